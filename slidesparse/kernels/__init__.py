"""The Triton kernels of backends that call a GEMM library, one per file: `quant_slide` and `dequant_bias`.

Bit-identical to `slidesparse.reference` with ``arithmetic="cuda"`` on a GPU; Triton's interpreter (TRITON_INTERPRET=1)
rounds sums of products and bfloat16 a little differently.  This package needs neither Triton nor a GPU; its modules
need Triton when imported, and a GPU (or the interpreter) when called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


class RmsNorm(NamedTuple):
    """Quantize RMSNorm(x), or with a residual RMSNorm(x + residual); see `slidesparse.reference.rms_norm`."""

    weight: Tensor  # [K] of any float dtype
    eps: float  # added to the mean square
    residual: Tensor | None = None  # [M, K] of x's dtype
    total: Tensor | None = None  # with a residual: contiguous memory [M, K] of x's dtype, for the sum


class SiluMul(NamedTuple):
    """Quantize silu(gate) * up for x [M, 2 K], gate before up."""


Producer = RmsNorm | SiluMul | None  # fused operation on x before quantization, if any
