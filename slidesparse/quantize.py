"""Symmetric INT8 and FP8 E4M3 quantization of rows: activations per token, weights per output channel.

    scale[m] = max_k |x[m, k]| / Q                     Q = 127 (INT8), 448 (FP8 E4M3)
    q[m, k]  = round_half_even(x[m, k] / scale[m])

The stock kernels of vLLM compute this with slightly different arithmetic on CUDA and on the CPU, which
decides how near-ties such as 63.5 round.  Both are here, so that a layer quantizes bit for bit as stock vLLM
does on the same device.  Rows with NaN or Inf, and zero rows on the CPU, are exceptions; see `quantize_rows`.
INT8 tokens of experts are quantized by a Triton kernel, ``"triton"``: as on CUDA, but halves are rounded away from
zero, and absmax is 1e-10 at least.  Its divisions are approximate on GPUs and exact here.

======  ===================================================  ==========================================
        ``"cuda"``                                           ``"cpu"``
======  ===================================================  ==========================================
INT8    x * (127 / absmax)                                   x * (1 / scale)
FP8     x / scale, scale at least 1 / (448 * 512)            x * (1 / scale), the same least scale
======  ===================================================  ==========================================

Sources: vLLM's ``dynamic_scaled_int8_quant`` and ``dynamic_per_token_scaled_fp8_quant`` (CUDA),
``onednn_scaled_int8_quant`` and ``QuantFP8.forward_native`` (CPU), ``per_token_quant_int8`` (Triton).
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

Arithmetic = Literal["cuda", "cpu", "triton"]

INT8 = torch.int8
FP8 = torch.float8_e4m3fn
LARGEST = {INT8: 127.0, FP8: 448.0}
FP8_MIN_SCALE = 1.0 / (448.0 * 512.0)
INT8_MIN_ABSMAX = 1e-10  # of "triton"
NAMES = {"int8": INT8, "fp8": FP8}


def arithmetic_of(x: Tensor) -> Arithmetic:
    """Return the arithmetic of stock vLLM's kernels on the tensor's device."""
    return "cpu" if x.device.type == "cpu" else "cuda"


def is_finite(values: Tensor) -> bool:
    """Return whether all elements are finite; for the usual dtypes without temporary memory."""
    if not values.dtype.is_floating_point or not values.numel():
        return True
    if values.dtype == FP8:  # no Inf, and one NaN of either sign: 0x7f and 0xff
        return int(values.view(torch.int8).max()) < 0x7F and int(values.view(torch.uint8).max()) < 0xFF
    if values.element_size() == 1:
        return bool(torch.isfinite(values.float()).all())
    return bool(torch.isfinite(torch.stack(torch.aminmax(values))).all())  # NaN wins both comparisons


def quantize_rows(x: Tensor, dtype: torch.dtype, arithmetic: Arithmetic = "cuda") -> tuple[Tensor, Tensor]:
    """Quantize each row with its own scale; the scale returned is the one used.

    Args:
        x: [M, K] float32, float16 or bfloat16, any device.
        dtype: torch.int8 or torch.float8_e4m3fn.
        arithmetic: whose rounding to follow; see the module.

    Returns:
        q [M, K] of ``dtype`` and scale [M, 1] float32 with x ~ q * scale.  A zero row gives zeros (INT8: with
        scale 0).  With "cuda" NaN does not count towards the scale and becomes 0 in INT8 (as in vLLM) and NaN in FP8
        (vLLM's CUDA kernel makes it 448, which hides it); with "cpu" a row with NaN gets scale NaN, as a row of NaN
        alone does in vLLM.  A row with Inf gets scale Inf, so that the product is NaN instead of a plausible number.
        INT8 rows whose absmax is below 2**-121, where 127 / absmax overflows,
        keep only their signs.

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
        magnitudes = values.abs()
        if arithmetic != "cpu":
            magnitudes.nan_to_num_(nan=0.0, posinf=torch.inf)
        absmax = magnitudes.amax(-1, keepdim=True)
    if arithmetic == "triton" and dtype == INT8:
        absmax.clamp_(min=INT8_MIN_ABSMAX)
    # torch divides by a number in another way than by a tensor
    largest = torch.full_like(absmax, LARGEST[dtype])
    scale = absmax / largest
    if dtype == FP8:
        scale = scale.clamp_(min=FP8_MIN_SCALE)
        scaled = values * scale.reciprocal() if arithmetic == "cpu" else values / scale
        return scaled.clamp_(-LARGEST[FP8], LARGEST[FP8]).to(FP8), scale
    inverse = scale.reciprocal() if arithmetic == "cpu" else torch.div(largest, absmax)
    codes = values * inverse
    if arithmetic == "triton":  # below a half, so that numbers next to it are rounded as they should
        codes = torch.trunc(codes + torch.full_like(codes, 0.5 - 2**-25).copysign_(codes))
    # NaN too where a whole row is 0, whose inverse is infinite
    return codes.round_().clamp_(-128.0, 127.0).nan_to_num_(nan=0.0).to(INT8), scale


def dequantize_rows(q: Tensor, scale: Tensor) -> Tensor:
    """Return q * scale, float32 [N, K], for q [N, K] INT8 or FP8 and scale [N, 1], [N] or one element."""
    values = q.float() if q.dtype == FP8 else q  # the product converts integers
    return values * scale.float().reshape(-1, 1)


def dequantize_blocks(q: Tensor, scale: Tensor, block: tuple[int, int], first_row: int = 0) -> Tensor:
    """Return q * scale, float32 [M, K], for rows of a weight whose blocks have a scale each.

    Args:
        q: [M, K], the rows of the weight from ``first_row`` on.
        scale: [ceil(N / rows), ceil(K / columns)] for ``block`` (rows, columns).
    """
    rows = torch.arange(first_row, first_row + q.shape[0]) // block[0]
    columns = torch.arange(q.shape[1]) // block[1]
    return q.float() * scale.float()[rows[:, None], columns]
