"""The types that describe a layer and a GEMM: layer, problem, tensors, plan.

A `Layer` is what operators are called with.  A `Problem` is one GEMM with its types and epilogue.  An algorithm is one
way in which a backend computes it, a short string that the backend understands.  A `Plan` is both, ready to be called.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from slidesparse.blocks import BLOCK
from slidesparse.errors import EnvironmentFault
from slidesparse.pattern import HARDWARE_LENGTH, SlideLayout, SlidePattern, round_up
from slidesparse.quantize import FP8, INT8

# Names of element types, as tables and error messages spell them.
DTYPES = {
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "int32": torch.int32,
    "fp32": torch.float32,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
OPERANDS = ("int8", "fp8", "fp16", "bf16")
# The blocks of a sparse library's weight (`slidesparse.blocks`); "mixed" is 2:4 and dense ones, half of each for tuning
BLOCKS = ALL_2_4, MIXED, ALL_DENSE = ("2:4", "mixed", "dense")
CODED = "coded"  # those of a weight that is not slid but coded, see `slidesparse.gemm.hopper.format`
TWO_FOUR = SlidePattern(HARDWARE_LENGTH)  # 2:4: the identity, because its windows do not overlap
SIX_EIGHT = SlidePattern(8)  # the pattern of coded weights
# Lengths of the patterns at which a backend that codes 6:8 does not store weights dense
STORED_BY_CODERS = (HARDWARE_LENGTH, 6, SIX_EIGHT.length)
MIN_ROWS = 16
MIN_INT8_ROWS = 32  # of a dense product, as torch takes no fewer than 17 on a GPU


class LibraryError(EnvironmentFault, RuntimeError):
    """A GEMM library refused a call, or is missing; the message holds the library's error, the shapes and the types."""


def stored_pattern(pattern: SlidePattern | None, coded: bool) -> SlidePattern | None:
    """Return the pattern in whose form a backend stores a weight, slid or coded; None for dense.

    Windows of 8:10 have as many bytes as the dense weight and those of milder patterns more, so backends that code
    store these dense.
    """
    return pattern if pattern and (not coded or pattern.length in STORED_BY_CODERS) else None


def coded_columns(layout: SlideLayout, coded: bool) -> int:
    """Return the columns of the activations of a coded weight, whole blocks; 0 if a backend does not code it."""
    return round_up(layout.padded, BLOCK) if coded and layout.length == SIX_EIGHT.length else 0


class Layer(NamedTuple):
    """A linear layer x [M, k] -> y [M, n] as integers: what operators take, and SlidesparseLayer of csrc/hopper/."""

    n: int  # out-features; 0 for a plan that only quantizes
    k: int  # in-features
    length: int  # columns of a block of the pattern; 4 at phase 0, for 2:4 and dense weights, lifts nothing
    # zero columns before the first: those of its block that belong to another tensor-parallel shard
    phase: int
    fp8: int  # 1 if weight and quantized activations are E4M3, 0 if they are INT8
    # width of the quantized activations: K' or `coded_columns`, and zeros up to a multiple of the alignment
    columns: int

    @classmethod
    def of(
        cls,
        n: int,
        k: int,
        pattern: SlidePattern | None,
        phase: int,
        dtype: torch.dtype,
        alignment: int,
        coded: bool = False,
    ) -> Layer:
        """Return the layer of a weight [n, k] of ``dtype``; ``pattern`` None is a dense weight, which is not slid.

        ``alignment`` and ``coded`` are the backend's.
        """
        pattern = stored_pattern(pattern, coded)
        layout = pattern.layout(k, phase) if pattern else TWO_FOUR.layout(k)
        columns = coded_columns(layout, coded) or layout.slided
        return cls(n, k, layout.length, layout.phase, int(dtype == FP8), round_up(columns, alignment))

    @property
    def layout(self) -> SlideLayout:
        """The windows that activations are lifted into."""
        return SlideLayout(self.k, self.phase, self.length)

    @property
    def dtype(self) -> torch.dtype:
        """The type of the weight and of quantized activations."""
        return FP8 if self.fp8 else INT8


@dataclass(frozen=True)
class Problem:
    """out [m, n] = activations [m, k] @ weight [n, k].T, all row-major, K contiguous.

    ``k`` counts the columns that are multiplied, so K' for slided weights.
    """

    dtype: str  # type of activations and weight, one of OPERANDS
    out: str  # type of the output, a key of DTYPES
    n: int
    k: int
    m: int
    scale: str = "none"  # what the epilogue multiplies by: "none", or "both" scale_w and scale_x
    # one of BLOCKS, or CODED; dense blocks only for backends that take them, whose weights are not slid
    blocks: str = ALL_2_4

    def __str__(self) -> str:
        epilogue = " * scale_w * scale_x" if self.scale == "both" else ""
        blocks = "" if self.blocks == ALL_2_4 else f" of {self.blocks} blocks"
        return f"{self.dtype} [{self.m}, {self.k}] @ [{self.n}, {self.k}].T{blocks}{epilogue} -> {self.out}"


class Tensors(NamedTuple):
    """The tensors of out = (activations @ weight.T) * scale_w * scale_x + bias."""

    activations: Tensor  # [M, K'], INT8 or FP8 when a layer runs
    weight: Tensor  # as the backend packed it
    out: Tensor  # [M, N]
    scale_w: Tensor | None = None  # [N] or [N, 1] float32
    scale_x: Tensor | None = None  # [M] or [M, 1] float32
    bias: Tensor | None = None  # [N]


# Launches on torch's current stream of one device, with memory from torch's allocator; never synchronizes.  Scales are
# given if the problem has them.  Shapes must be those of the problem; they are not checked.
Plan = Callable[[Tensors], None]


def require_operand(dtype: torch.dtype) -> str:
    """Return the name of an operand's dtype.  Raises LibraryError for one that no backend multiplies."""
    if NAMES.get(dtype) in OPERANDS:
        return NAMES[dtype]
    raise LibraryError(
        f"weights and activations of {dtype} cannot be multiplied, only {', '.join(OPERANDS)} can: quantize to int8 "
        "or fp8"
    )


def bucket(m: int) -> int:
    """Round the number of tokens up to the number of rows that products are planned for; 0 stays 0.

    A plan of a library is for one M, but a step may have any number of tokens.  There are 16 buckets from each power of
    two to the next, so that at most 1/16 of the rows are padding (below 256 tokens: up to 15 rows, which a tensor-core
    tile computes anyway).
    """
    if m <= MIN_ROWS:
        return MIN_ROWS if m else 0
    return round_up(m, max(MIN_ROWS, 1 << ((m - 1).bit_length() - 5)))
