"""Symmetric INT8 and FP8 E4M3 quantization of rows: activations per token, weights per output channel.

    scale[m] = max_k |x[m, k]| / Q                     Q = 127 (INT8), 448 (FP8 E4M3)
    q[m, k]  = round_half_even(x[m, k] / scale[m])

The stock kernels of vLLM compute this with slightly different arithmetic on CUDA and on the CPU, which
decides how near-ties such as 63.5 round.  Both are here, so that a layer quantizes as stock vLLM does on
the same device, bit for bit:

======  ===================================================  ==========================================
        ``"cuda"``                                           ``"cpu"``
======  ===================================================  ==========================================
INT8    x * (127 / absmax)                                   x * (1 / scale), the reciprocal in float64
FP8     x / scale, scale at least 1 / (448 * 512)            x * (1 / scale), the same least scale
======  ===================================================  ==========================================

Sources: vLLM's ``dynamic_scaled_int8_quant`` and ``dynamic_per_token_scaled_fp8_quant`` (CUDA),
``onednn_scaled_int8_quant`` and ``QuantFP8.forward_native`` (CPU).
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

Arithmetic = Literal["cuda", "cpu"]

INT8 = torch.int8
FP8 = torch.float8_e4m3fn
LARGEST = {INT8: 127.0, FP8: 448.0}
FP8_LEAST_SCALE = 1.0 / (448.0 * 512.0)
NAMES = {"int8": INT8, "fp8": FP8}


def quantize_rows(x: Tensor, dtype: torch.dtype, arithmetic: Arithmetic = "cuda") -> tuple[Tensor, Tensor]:
    """Quantize each row with its own scale; the scale returned is the one used.

    Args:
        x: [M, K] float32, float16 or bfloat16, any device.
        dtype: torch.int8 or torch.float8_e4m3fn.
        arithmetic: whose rounding to follow, see the module.

    Returns:
        q [M, K] of ``dtype`` and scale [M, 1] float32 with x ~ q * scale.  A zero row gives zeros (INT8: with
        scale 0).  NaN does not count towards the scale and becomes 0 in INT8, NaN in FP8.  A row with Inf gets
        scale Inf, so that the product is NaN instead of a plausible number.

    Raises:
        TypeError: another dtype.
    """
    if dtype not in LARGEST or arithmetic not in get_args(Arithmetic):
        raise TypeError(
            f"cannot quantize to {dtype} with {arithmetic!r} arithmetic; the dtypes are torch.int8 and "
            f"torch.float8_e4m3fn, the arithmetics {get_args(Arithmetic)}"
        )
    values = x.float()
    if x.shape[1] == 0:
        absmax = values.new_zeros(x.shape[0], 1)
    else:
        absmax = values.abs().nan_to_num_(nan=0.0, posinf=torch.inf).amax(-1, keepdim=True)
    scale = absmax / LARGEST[dtype]
    if dtype == FP8:
        scale = scale.clamp_(min=FP8_LEAST_SCALE)
        scaled = values / scale if arithmetic == "cuda" else values * scale.reciprocal()
        return scaled.clamp_(-LARGEST[FP8], LARGEST[FP8]).to(FP8), scale
    if arithmetic == "cuda":
        inverse = torch.where(absmax == 0, 0.0, LARGEST[INT8] / absmax)
    else:
        inverse = torch.where(absmax == 0, 0.0, scale.double().reciprocal().float())
    rounded = (values * inverse).round_().clamp_(-128.0, 127.0)
    return rounded.nan_to_num_(nan=0.0).to(INT8), scale


def dequantize_rows(q: Tensor, scale: Tensor) -> Tensor:
    """q [N, K] INT8 or FP8 and scale ([N, 1], [N] or one element) -> float32 [N, K]."""
    return q.float() * scale.float().reshape(-1, 1)
