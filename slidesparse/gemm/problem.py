"""The types that describe a GEMM for tuning and benchmarks: problem, memory layout, algorithm, plan.

A `Problem` is one GEMM with its types and epilogue.  An algorithm is one way in which a backend computes it, identified
by a short string that the backend understands.  A `Plan` is both, ready to run.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Protocol

import torch
from torch import Tensor

from slidesparse.errors import EnvironmentFault

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


class LibraryError(EnvironmentFault, RuntimeError):
    """A GEMM library refused a call, or is missing; the message holds the library's error, the shapes and the types."""


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
    bias: bool = False  # whether the epilogue adds a bias [n]
    # one of BLOCKS; dense blocks only for backends that take them, whose weights are not slid
    blocks: str = ALL_2_4

    def __str__(self) -> str:
        epilogue = " * scale_w * scale_x" if self.scale == "both" else ""
        epilogue += " + bias" if self.bias else ""
        blocks = "" if self.blocks == ALL_2_4 else f" of {self.blocks} blocks"
        return f"{self.dtype} [{self.m}, {self.k}] @ [{self.n}, {self.k}].T{blocks}{epilogue} -> {self.out}"


@dataclass(frozen=True)
class Layout:
    """The dimension of each matrix that is contiguous in memory."""

    weight_k: bool = True  # K of the weight, stored [n, k]; else N, stored [k, n]
    activations_k: bool = True  # K of the activations, stored [m, k]; else M, stored [k, m]
    output_n: bool = True  # N of the output, stored [m, n]; else M, stored [n, m]

    @property
    def contiguous(self) -> tuple[str, str, str]:
        """The contiguous dimensions of weight, activations and output, such as ("K", "M", "N")."""
        return "NK"[self.weight_k], "MK"[self.activations_k], "MN"[self.output_n]

    def __str__(self) -> str:
        weight, activations, output = self.contiguous
        return f"weight {weight}-contiguous, activations {activations}-contiguous, output {output}-contiguous"


TN = Layout()  # the layout of serving, in BLAS terms: the weight transposed, the activations not
LAYOUTS = tuple(Layout(*flags) for flags in product((True, False), repeat=3))


def require_operand(dtype: torch.dtype) -> str:
    """Return the name of an operand's dtype.  Raises LibraryError for one that no backend multiplies."""
    for name in OPERANDS:
        if DTYPES.get(name) == dtype:
            return name
    raise LibraryError(
        f"weights and activations of {dtype} cannot be multiplied, only {', '.join(OPERANDS)} can (FP4 needs block "
        "scales, which no kernel of this version writes): quantize to int8 or fp8"
    )


class Plan(Protocol):
    """A problem and an algorithm, ready to run on one device."""

    algorithm: str
    workspace: int  # bytes of workspace that it needs

    def run(
        self,
        activations: Tensor,
        weight: Tensor,
        out: Tensor,
        scale_w: Tensor | None = None,
        scale_x: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> None:
        """Launch on torch's current stream; never synchronizes, allocates nothing but the stream's workspace once.

        activations [m, k], weight from `Tunable.operand`, out [m, n], in the plan's layout; scale_w [n],
        scale_x [m] float32 and bias [n] of out's dtype if the problem has them.  Shapes must be those of the problem;
        they are not checked.
        """
