"""More of ``torch.ops.slidesparse.*``: those of `slidesparse.ops` that compute the norm or activation before them too.

Two calls for a layer, or one where the backend has it (`slidesparse.gemm.FUSED`)::

    q, s_x = torch.ops.slidesparse.rms_norm_quant_slide(x, norm, eps, length, phase, dtype, columns)
    q, s_x, total = torch.ops.slidesparse.add_rms_norm_quant_slide(x, residual, norm, eps, ...)
    q, s_x = torch.ops.slidesparse.silu_mul_quant_slide(x, ...)

    y: Tensor = torch.ops.slidesparse.rms_norm_linear(x, norm, eps, weight, s_w, bias, ..., out_dtype, backend)
    y, total = torch.ops.slidesparse.add_rms_norm_linear(x, residual, norm, eps, weight, ...)
    y: Tensor = torch.ops.slidesparse.silu_mul_linear(x, weight, ...)

The compiler pass of `slidesparse.vllm_patch.fusion` writes them into graphs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slidesparse import profiling
from slidesparse.kernels import Producer, RmsNorm, SiluMul
from slidesparse.ops import LAYER, WINDOWS, linear_fake, quant_slide_fake, quantize, register, whole_layer


def rms_norm_quant_slide(
    x: Tensor, norm: Tensor, eps: float, length: int, phase: int, dtype: torch.dtype, columns: int
) -> tuple[Tensor, Tensor]:
    """`slidesparse.ops.quant_slide` of RMSNorm(x): norm [K]; the rest as there."""
    return _quantize(x, RmsNorm(norm, eps), length, phase, dtype, columns)


def add_rms_norm_quant_slide(
    x: Tensor,
    residual: Tensor,
    norm: Tensor,
    eps: float,
    length: int,
    phase: int,
    dtype: torch.dtype,
    columns: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """`slidesparse.ops.quant_slide` of RMSNorm(x + residual), and the sum [M, K] of x's dtype, the next residual."""
    total = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return *_quantize(x, RmsNorm(norm, eps, residual, total), length, phase, dtype, columns), total


def silu_mul_quant_slide(
    x: Tensor, length: int, phase: int, dtype: torch.dtype, columns: int
) -> tuple[Tensor, Tensor]:
    """`slidesparse.ops.quant_slide` of silu(gate) * up, where x [M, 2 K] holds gate before up."""
    return _quantize(x, SiluMul(), length, phase, dtype, columns)


def _quantize(
    x: Tensor, producer: Producer, length: int, phase: int, dtype: torch.dtype, columns: int
) -> tuple[Tensor, Tensor]:
    with profiling.stage("quantize", x):
        return quantize(x, length, phase, dtype, columns, producer)


def rms_norm_linear(x: Tensor, norm: Tensor, eps: float, *layer: Any) -> Tensor:
    """``torch.ops.slidesparse.linear`` of RMSNorm(x): norm [K]; ``layer`` is what follows x there."""
    return whole_layer(x, RmsNorm(norm, eps), *layer)


def add_rms_norm_linear(
    x: Tensor, residual: Tensor, norm: Tensor, eps: float, *layer: Any
) -> tuple[Tensor, Tensor]:
    """``torch.ops.slidesparse.linear`` of RMSNorm(x + residual), and the sum [M, K] of x's dtype."""
    total = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return whole_layer(x, RmsNorm(norm, eps, residual, total), *layer), total


def silu_mul_linear(x: Tensor, *layer: Any) -> Tensor:
    """``torch.ops.slidesparse.linear`` of silu(gate) * up, where x [M, 2 K] holds gate before up."""
    return whole_layer(x, SiluMul(), *layer)


def _rms_norm_quant_slide_fake(x: Tensor, norm: Tensor, eps: float, *windows: Any) -> tuple[Tensor, Tensor]:
    return quant_slide_fake(x, *windows)


def _add_rms_norm_quant_slide_fake(
    x: Tensor, residual: Tensor, norm: Tensor, eps: float, *windows: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return *quant_slide_fake(x, *windows), x.new_empty(x.shape)


def _rms_norm_linear_fake(x: Tensor, norm: Tensor, eps: float, *layer: Any) -> Tensor:
    return linear_fake(x, *layer)


def _add_rms_norm_linear_fake(
    x: Tensor, residual: Tensor, norm: Tensor, eps: float, *layer: Any
) -> tuple[Tensor, Tensor]:
    return linear_fake(x, *layer), x.new_empty(x.shape)


_NORM, _ADD_NORM = "Tensor x, Tensor norm, float eps", "Tensor x, Tensor residual, Tensor norm, float eps"

register(
    "rms_norm_quant_slide",
    f"({_NORM}, {WINDOWS}) -> (Tensor, Tensor)",
    rms_norm_quant_slide,
    _rms_norm_quant_slide_fake,
)
register(
    "add_rms_norm_quant_slide",
    f"({_ADD_NORM}, {WINDOWS}) -> (Tensor, Tensor, Tensor)",
    add_rms_norm_quant_slide,
    _add_rms_norm_quant_slide_fake,
)
register(
    "silu_mul_quant_slide",
    f"(Tensor x, {WINDOWS}) -> (Tensor, Tensor)",
    silu_mul_quant_slide,
    quant_slide_fake,
)
register("rms_norm_linear", f"({_NORM}, {LAYER}) -> Tensor", rms_norm_linear, _rms_norm_linear_fake)
register(
    "add_rms_norm_linear",
    f"({_ADD_NORM}, {LAYER}) -> (Tensor, Tensor)",
    add_rms_norm_linear,
    _add_rms_norm_linear_fake,
)
register("silu_mul_linear", f"(Tensor x, {LAYER}) -> Tensor", silu_mul_linear, linear_fake)
