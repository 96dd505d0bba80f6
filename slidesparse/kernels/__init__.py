"""The Triton kernels, one per file: `quant_slide`, `dequant_bias`, and `slide_weight` for loading.

Bit-identical to `slidesparse.reference` with ``arithmetic="cuda"``, on the GPU and in Triton's interpreter
(TRITON_INTERPRET=1).  This package needs neither Triton nor a GPU; its modules need Triton when imported, and
a GPU (or the interpreter) when called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from slidesparse.pattern import HARDWARE_LENGTH

if TYPE_CHECKING:
    from torch import Tensor

KINDS = ("quant_slide", "quant_only", "dequant_bias")  # as tables name them; see `quantizer_kind`

MAX_WARPS = 32  # limit of a program
MAX_LANES = 1 << 16  # limit of block x rows of a program


class Config(NamedTuple):
    """The launch parameters of a kernel.

    ``block`` is the part of a row that one step of a program handles: in words of four codes (quantizing kernels) or
    columns (dequant_bias).  ``rows`` is the number of rows per program.
    """

    block: int  # a power of two
    rows: int  # a power of two; 1 for the quantizing kernels, which give a program one row
    warps: int  # a power of two, at most 32

    def __str__(self) -> str:
        """Block, rows and warps as `parse` reads them, such as "1024x1x8"."""
        return "x".join(map(str, self))

    @classmethod
    def parse(cls, text: str) -> Config:
        """Read what ``str`` wrote.  Raises ValueError for anything else."""
        parts = text.split("x")
        numbers = [int(part) for part in parts if part.isdecimal()]
        if len(parts) != 3 or len(numbers) != 3 or any(number.bit_count() != 1 for number in numbers):
            raise ValueError(
                f"{text!r} for a launch, not powers of two as block x rows x warps, such as 1024x1x8"
            )
        config = cls(*numbers)
        if config.warps > MAX_WARPS or config.block * config.rows > MAX_LANES:
            raise ValueError(f"{text!r} for a launch, more than {MAX_WARPS} warps or {MAX_LANES} lanes")
        return config


class RmsNorm(NamedTuple):
    """Quantize RMSNorm(x), or with a residual RMSNorm(x + residual); see `slidesparse.reference.rms_norm`."""

    weight: Tensor  # [K] of any float dtype
    eps: float  # added to the mean square
    residual: Tensor | None = None  # [M, K] of x's dtype
    total: Tensor | None = None  # with a residual: contiguous memory [M, K] of x's dtype, for the sum


class SiluMul(NamedTuple):
    """Quantize silu(gate) * up for x [M, 2 K], gate before up."""


Producer = RmsNorm | SiluMul | None  # fused operation on x before quantization, if any

# kind -> ((largest size, largest M, how to launch), ...): the first entry that holds both counts.  Sizes are K for the
# quantizing kernels and N for dequant_bias; None is any.  Measured on an H200 at M = 4096 and 16384 and sizes 2048,
# 3584 and 18944, in INT8 and FP8: each entry is within a few percent of the best of 30 for both.
_Entry = tuple[int | None, int | None, Config]
TABLE: dict[str, tuple[_Entry, ...]] = {
    "quant_slide": (
        (1024, None, Config(256, 1, 2)),
        (2048, None, Config(1024, 1, 2)),
        (4096, None, Config(2048, 1, 4)),
        (8192, None, Config(4096, 1, 8)),
        (32768, None, Config(1024, 1, 16)),
        (None, None, Config(4096, 1, 16)),
    ),
    "quant_only": (
        (1024, None, Config(256, 1, 2)),
        (4096, None, Config(1024, 1, 4)),
        (8192, None, Config(2048, 1, 8)),
        (None, None, Config(2048, 1, 16)),
    ),
    "dequant_bias": (
        (None, 64, Config(256, 1, 1)),
        (None, None, Config(2048, 1, 4)),
    ),
}


def quantizer_kind(length: int, phase: int) -> str:
    """Return the kind of quantizing kernel: quant_only if nothing is lifted, else quant_slide."""
    return "quant_only" if length == HARDWARE_LENGTH and phase == 0 else "quant_slide"


def default_config(kind: str, size: int, m: int) -> Config:
    """Return how to launch ``kind`` for ``m`` rows of ``size`` (K, or N for dequant_bias).

    Raises KeyError for a kind that is not in KINDS.
    """
    for largest_size, largest_m, config in TABLE[kind]:
        if (largest_size is None or size <= largest_size) and (largest_m is None or m <= largest_m):
            return config
    raise AssertionError(f"the table of {kind} has no entry for any size")  # its last entry has no limits
