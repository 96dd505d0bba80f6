"""The oracle: exact torch implementations of the three steps of a sparse linear layer.

    q, s_x = quant_slide(x)          [M, K] -> [M, K'] INT8 / FP8 and [M, 1]
    acc    = matmul(q, w')           [M, K'] @ [N, K'].T -> [M, N]
    y      = dequant_bias(acc)       acc * s_w * s_x + bias

Every other backend is tested against these functions.  They also serve machines without sparse tensor
cores, exactly but slowly.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slidesparse.pattern import SlideLayout
from slidesparse.quantize import INT8, Arithmetic, quantize_rows
from slidesparse.slide import lift

# A float32 sum of INT8 products is exact, in any order, up to 2**24 = 1024 * 128 * 128.
EXACT_COLUMNS = 1024
_CHUNK_ELEMENTS = 2**22  # weights converted to float32 at a time: 16 MB


def quant_slide(
    x: Tensor, layout: SlideLayout, dtype: torch.dtype, arithmetic: Arithmetic = "cuda"
) -> tuple[Tensor, Tensor]:
    """Quantize each token and lift it: [M, K] -> q [M, K'] of ``dtype``, scale [M, 1] float32."""
    q, scale = quantize_rows(x, dtype, arithmetic)
    return lift(q, layout), scale


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the RMSNorm of x [M, K], or of x + residual, and that sum, both [M, K] of x's dtype.

    Both are computed in float32 and rounded once; the norm is taken before the sum is rounded, as Inductor compiles
    vLLM's RMSNorm.
    """
    total = x.float() if residual is None else x.float() + residual.float()
    factor = torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + eps)
    return (total * factor * weight.float()).to(x.dtype), total.to(x.dtype)


def silu_mul(x: Tensor) -> Tensor:
    """Return silu(gate) * up, [M, K] of x's dtype, for x [M, 2 K] with gate before up; in float32, rounded once."""
    gate, up = x.float().chunk(2, -1)
    return (gate / (1 + gate.neg().exp()) * up).to(x.dtype)


def silu_mul_of_experts(x: Tensor) -> Tensor:
    """Return the same with silu(gate) rounded before it is multiplied, as vLLM's CUDA kernel does."""
    gate, up = x.chunk(2, -1)
    gate = gate.float()
    return (gate / (1 + gate.neg().exp())).to(x.dtype) * up


def matmul(q: Tensor, weight: Tensor) -> Tensor:
    """Accumulate q [M, K'] with a weight [N, K'], slided or dense.

    INT8 gives the exact INT32 [M, N]; FP8 gives float32, summed in float32.
    """
    if q.dtype == INT8:
        return _int8_matmul(q, weight)
    rows = max(1, _CHUNK_ELEMENTS // max(1, weight.shape[1]))
    out = q.new_empty(q.shape[0], weight.shape[0], dtype=torch.float32)
    activations = q.float()
    for start in range(0, weight.shape[0], rows):
        part = weight[start : start + rows].float()
        torch.mm(activations, part.t(), out=out[:, start : start + rows])
    return out


def _int8_matmul(q: Tensor, weight: Tensor) -> Tensor:
    """Multiply in float32, which is exact on every CPU and GPU.

    torch._int_mm is faster, but without VNNI instructions oneDNN adds pairs of its products in 16 bits with saturation.
    """
    out = torch.zeros(q.shape[0], weight.shape[0], dtype=torch.int32, device=q.device)
    for column in range(0, q.shape[1], EXACT_COLUMNS):
        columns = slice(column, column + EXACT_COLUMNS)
        activations = q[:, columns].float()
        rows = max(1, _CHUNK_ELEMENTS // activations.shape[1])
        for start in range(0, weight.shape[0], rows):
            part = weight[start : start + rows, columns].float()
            out[:, start : start + rows] += (activations @ part.t()).to(torch.int32)
    return out


def dequant_bias(
    acc: Tensor,
    scale_x: Tensor,
    scale_w: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    arithmetic: Arithmetic = "cuda",
) -> Tensor:
    """Return y = (acc * scale_w) * scale_x + bias, computed in float32 and rounded once to ``out_dtype``.

    acc [M, N] INT32 or float32; scale_x [M, 1], scale_w [N] or [N, 1] float32; bias [N] or None.
    The last product and the bias are one fused multiply-add in "cuda" arithmetic, as in the epilogue of vLLM's
    CUTLASS kernels, and two roundings in "cpu" arithmetic, as in its oneDNN kernel for AVX2; that for AVX-512 fuses.
    """
    out = acc.float() * scale_w.reshape(1, -1)
    scale_x = scale_x.reshape(-1, 1)
    if bias is None:
        out *= scale_x
    elif arithmetic == "cpu":
        out = out.mul_(scale_x).add_(bias.float())
    elif acc.is_cuda:
        out = torch.addcmul(bias.float(), out, scale_x)
    else:  # torch's addcmul does not fuse here; in float64 the product is exact
        out = torch.addcmul(bias.double(), out.double(), scale_x.double()).float()
    return out.to(out_dtype)
