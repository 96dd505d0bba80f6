"""The Triton kernels, one a file: `quant_slide`, `quant_only`, `dequant_bias`, and `slide_weight` for loading.

Bit-identical to `slidesparse.reference` with ``arithmetic="cuda"``, on the GPU and in Triton's interpreter
(TRITON_INTERPRET=1).  This package needs neither Triton nor a GPU; its modules need Triton when imported, and
a GPU (or the interpreter) when called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from slidesparse.pattern import HARDWARE_LENGTH

if TYPE_CHECKING:
    import torch
    from torch import Tensor

KINDS = ("quant_slide", "quant_only", "dequant_bias")

# When the quantizing kernels let the product behind them start, if that waits for their results itself (on Hopper and
# later): "early", as soon as they run; "late", before they write the codes; "off", when they end.  It is not left out
# where another product follows, as operators are not told which one does and it is one instruction: a kernel that was
# launched in the ordinary way, as cuSPARSELt's, starts when they end, whatever this says.
LAUNCH_DEPENDENTS = "late"


class Config(NamedTuple):
    """How a kernel is launched.

    ``block`` counts what one step of a program handles along the row: words of four codes (those that quantize) or
    columns (dequant_bias).  ``rows`` is the rows of a program.
    """

    block: int  # a power of two
    rows: int  # a power of two; 1 for the quantizing kernels, which give a program one row
    warps: int


class RmsNorm(NamedTuple):
    """RMSNorm(x), or with a residual RMSNorm(x + residual), is quantized: see `slidesparse.reference.rms_norm`."""

    weight: Tensor  # [K] of any float dtype
    eps: float  # added to the mean square
    residual: Tensor | None = None  # [M, K] of x's dtype
    total: Tensor | None = None  # with a residual: contiguous memory [M, K] of x's dtype, for the sum


class SiluMul(NamedTuple):
    """silu(gate) * up of x [M, 2 K], gate before up, is quantized."""


Producer = RmsNorm | SiluMul | None  # computes what is quantized; None: x itself is

# kind -> ((largest size, largest M, how to launch), ...): the first entry that holds both counts.  Sizes are K for the
# quantizing kernels and N for dequant_bias; None is any.  Measured on an H200 at M = 4096 and 16384 and sizes 2048,
# 3584 and 18944, in INT8 and FP8: each entry is within some percent of the best of 30 for both.
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
        (None, None, Config(1024, 1, 8)),
    ),
    "dequant_bias": (
        (None, 64, Config(256, 1, 1)),
        (None, None, Config(2048, 1, 4)),
    ),
}


def quantize(
    x: Tensor, length: int, phase: int, dtype: torch.dtype, columns: int, rows: int = 0
) -> tuple[Tensor, Tensor]:
    """Quantize by `quant_slide`, or by `quant_only` where nothing is lifted; arguments and results are the former's."""
    # Imported late: they need Triton.
    if length == HARDWARE_LENGTH and phase == 0:
        from slidesparse.kernels.quant_only import quant_only

        return quant_only(x, dtype, columns, rows)
    from slidesparse.kernels.quant_slide import quant_slide

    return quant_slide(x, length, phase, dtype, columns, rows)


def config(kind: str, size: int, m: int) -> Config:
    """How to launch ``kind`` for rows of ``size`` (K, or N for dequant_bias) and ``m`` rows.

    Raises KeyError for a kind that is not in KINDS.
    """
    for largest_size, largest_m, found in TABLE[kind]:
        if (largest_size is None or size <= largest_size) and (largest_m is None or m <= largest_m):
            return found
    raise AssertionError(f"the table of {kind} has no entry for any size")  # its last entry has no limits
