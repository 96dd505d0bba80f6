"""Scale accumulators and add the bias, rounded once to the output's dtype.

    y[m, n] = (acc[m, n] * scale_w[n]) * scale_x[m] + bias[n]

in float32.  The last product and the bias are one fused multiply-add, as in the epilogue of vLLM's CUTLASS kernels.
"""

# ruff: noqa: N803 (compile-time arguments in capitals, as is Triton's convention)
# mypy: disable-error-code="untyped-decorator,no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

COLUMNS, WARPS = 1024, 4  # of a program, for one row


@triton.jit
def dequant_bias_kernel(
    acc,
    scale_x,
    scale_w,
    bias,  # None without HAS_BIAS
    out,
    stride,  # stride of the rows of acc
    N,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < N
    sums = tl.load(acc + row * stride + column, mask=inside, other=0).to(tl.float32)
    value = sums * tl.load(scale_w + column, mask=inside, other=0.0)
    per_row = tl.broadcast_to(tl.load(scale_x + row), value.shape)
    if HAS_BIAS:
        value = tl.fma(value, per_row, tl.load(bias + column, mask=inside, other=0.0).to(tl.float32))
    else:
        value = value * per_row
    tl.store(out + row * N + column, value.to(out.dtype.element_ty), mask=inside)


def dequant_bias(acc: Tensor, scale_x: Tensor, scale_w: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Write acc [M, N] int32, float32 or bfloat16, scaled, to out [M, N] bfloat16, float16 or float32.

    Args:
        acc: rows may be any stride apart; within a row the stride is 1.
        scale_x: [M, 1] or [M] float32, contiguous.
        scale_w: [N, 1] or [N] float32, contiguous.
        bias: [N] bfloat16, float16 or float32, or None.
        out: contiguous.
    """
    m, n = acc.shape
    if not m or not n:
        return
    with torch.cuda.device(acc.device if acc.is_cuda else -1):
        dequant_bias_kernel[(m, -(-n // COLUMNS))](
            *(acc, scale_x, scale_w, bias, out, acc.stride(0), n),
            HAS_BIAS=bias is not None,
            BLOCK=COLUMNS,
            num_warps=WARPS,
            enable_fp_fusion=False,
        )
