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

from slidesparse.kernels import Config, common, default_config
from slidesparse.kernels.common import fused_multiply_add, narrow, widen
from slidesparse.kernels.launch import Launcher

ACCUMULATORS = (torch.int32, torch.float32, torch.bfloat16)


@triton.jit(do_not_specialize=["M"])  # one kernel for any number of tokens
def dequant_bias_kernel(
    acc,
    scale_x,
    scale_w,
    bias,  # None without HAS_BIAS
    out,
    stride,  # stride of the rows of acc
    M,
    N,
    HAS_BIAS: tl.constexpr,
    NATIVE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (row < M)[:, None] & (column < N)[None, :]
    sums = widen(tl.load(acc + row[:, None] * stride + column[None, :], mask=inside, other=0))
    per_row = tl.load(scale_x + row, mask=row < M, other=0.0)[:, None]
    per_column = tl.load(scale_w + column, mask=column < N, other=0.0)[None, :]
    value = sums * per_column
    if HAS_BIAS:
        offset = widen(tl.load(bias + column, mask=column < N, other=0.0))[None, :]
        per_row, offset = tl.broadcast_to(per_row, value.shape), tl.broadcast_to(offset, value.shape)
        value = fused_multiply_add(value, per_row, offset, NATIVE)
    else:
        value = value * per_row
    value = narrow(value, out.dtype.element_ty, NATIVE)
    tl.store(out + row[:, None] * N + column[None, :], value, mask=inside)


_launch = Launcher(dequant_bias_kernel)


def dequant_bias(
    acc: Tensor,
    scale_x: Tensor,
    scale_w: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    launch: Config | None = None,
) -> Tensor:
    """acc [M, N] int32, float32 or bfloat16 -> [M, N] bfloat16, float16 or float32, contiguous.

    Args:
        acc: rows may be any stride apart; within a row the stride is 1.
        scale_x: [M, 1] or [M] float32, contiguous.
        scale_w: [N, 1] or [N] float32, contiguous.
        bias: [N] bfloat16, float16 or float32, or None.
        launch: block, rows and warps, instead of the table's.

    Raises:
        TypeError, ValueError: what was found, what is allowed.
    """
    common.require("acc", acc, 2, ACCUMULATORS)
    m, n = acc.shape
    _require_vector("scale_x", scale_x, m, (torch.float32,), acc)
    _require_vector("scale_w", scale_w, n, (torch.float32,), acc)
    if bias is not None:
        _require_vector("bias", bias, n, common.FLOATS, acc)
    if out_dtype not in common.FLOATS:
        raise TypeError(f"the output cannot be {out_dtype}; use one of {', '.join(map(str, common.FLOATS))}")
    out = torch.empty(m, n, dtype=out_dtype, device=acc.device)
    if not m or not n:
        return out
    launch = launch or default_config("dequant_bias", n, m)
    with common.on_device_of(acc):
        _launch(
            (-(-m // launch.rows), -(-n // launch.block), 1),
            (acc, scale_x, scale_w, bias, out),
            (acc.stride(0), m, n),
            {
                "HAS_BIAS": bias is not None,
                "NATIVE": common.native_level(acc),
                "ROWS": launch.rows,
                "BLOCK": launch.block,
            },
            launch.warps,
        )
    return out


def _require_vector(
    name: str, vector: Tensor, count: int, dtypes: tuple[torch.dtype, ...], acc: Tensor
) -> None:
    contiguous = vector.is_contiguous()
    if vector.dtype not in dtypes or not contiguous:
        common.require(name, vector.reshape(-1) if contiguous else vector, 1, dtypes)
    if vector.numel() != count or not contiguous or vector.device != acc.device:
        raise ValueError(
            f"{name} has shape {tuple(vector.shape)} and strides {vector.stride()} on {vector.device}; for acc of "
            f"shape {tuple(acc.shape)} it must hold {count} elements, contiguous, on {acc.device}"
        )
