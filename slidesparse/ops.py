"""The torch operators ``torch.ops.slidesparse.*``, which compiled graphs contain and which dispatch to backends.

A linear layer is one call, [M, K] -> [M, N], which may begin with the norm or the activation before it::

    y: Tensor = torch.ops.slidesparse.linear(x, weight, s_w, bias, length, phase, dtype, columns, out_dtype, backend)
    y: Tensor = torch.ops.slidesparse.rms_norm_linear(x, norm, eps, weight, ...)
    y, total = torch.ops.slidesparse.add_rms_norm_linear(x, residual, norm, eps, weight, ...)
    y: Tensor = torch.ops.slidesparse.silu_mul_linear(x, weight, ...)

The compiler pass `slidesparse.vllm_patch.fusion` inserts the fused operators into graphs.
On a GPU, layers of the backend hopper are called from C++ (`slidesparse.gemm.hopper`).
The operators are opaque to torch.compile; their fakes are symbolic in M, so one graph serves any number of tokens.
They do not read the environment: the arguments determine what runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from slidesparse import gemm
from slidesparse.gemm.backend import layer_spec
from slidesparse.gemm.hopper import operators as hopper_operators
from slidesparse.kernels import Producer, RmsNorm, SiluMul

ABI = 7  # version of operators and packed weights; part of vLLM's compile-cache key

NAMESPACE = hopper_operators.NAMESPACE
# The part that all schemas end with
LAYER = (
    "Tensor weight, Tensor scale_w, Tensor? bias, SymInt length, SymInt phase, ScalarType dtype, SymInt columns, "
    "ScalarType out_dtype, str backend"
)
if "_library" not in globals():  # kept across reloads: operators disappear with their library object
    _library = torch.library.Library(NAMESPACE, "FRAGMENT")


def _layer(
    x: Tensor,
    producer: Producer,
    weight: Tensor,
    scale_w: Tensor,
    bias: Tensor | None,
    length: int,
    phase: int,
    dtype: torch.dtype,
    columns: int,
    out_dtype: torch.dtype,
    backend: str,
) -> Tensor:
    """Run a layer by ``backend``, after ``producer``.  Raises BackendError for a wrong number of columns."""
    k = x.shape[1] // 2 if isinstance(producer, SiluMul) else x.shape[1]
    spec, implementation = layer_spec(scale_w.shape[0], k, length, phase, dtype, out_dtype), gemm.get(backend)
    if columns != spec.columns(implementation.alignment):
        raise gemm.BackendError(
            f"backend {backend} quantizes {k} in-features in windows of blocks of {length} to "
            f"{spec.columns(implementation.alignment)} columns, asked for {columns}: pack the weight for {backend}"
        )
    return implementation.linear(spec, x, weight, scale_w, bias, producer)


def _linear(x: Tensor, *layer: Any) -> Tensor:
    return _layer(x, None, *layer)


def _linear_fake(x: Tensor, weight: Tensor, scale_w: Tensor, *rest: Any) -> Tensor:
    *_bias_and_windows, out_dtype, _backend = rest
    return x.new_empty(x.shape[0], scale_w.shape[0], dtype=out_dtype)


def _rms_norm_linear(x: Tensor, norm: Tensor, eps: float, *layer: Any) -> Tensor:
    """Run ``linear`` on RMSNorm(x), norm [K]."""
    return _layer(x, RmsNorm(norm, eps), *layer)


def _rms_norm_linear_fake(x: Tensor, norm: Tensor, eps: float, *layer: Any) -> Tensor:
    return _linear_fake(x, *layer)


def _add_rms_norm_linear(
    x: Tensor, residual: Tensor, norm: Tensor, eps: float, *layer: Any
) -> tuple[Tensor, Tensor]:
    """Run ``linear`` on RMSNorm(x + residual); return also the sum [M, K] in x's dtype, the next residual."""
    total = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return _layer(x, RmsNorm(norm, eps, residual, total), *layer), total


def _add_rms_norm_linear_fake(
    x: Tensor, residual: Tensor, norm: Tensor, eps: float, *layer: Any
) -> tuple[Tensor, Tensor]:
    return _linear_fake(x, *layer), x.new_empty(x.shape)


def _silu_mul_linear(x: Tensor, *layer: Any) -> Tensor:
    """Run ``linear`` on silu(gate) * up, where x [M, 2 K] holds gate before up."""
    return _layer(x, SiluMul(), *layer)


def _register(name: str, schema: str, implementation: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Define an operator once per process, however often the plugin is loaded."""
    if hasattr(getattr(torch.ops, NAMESPACE), name):
        return
    by_python = name + hopper_operators.PYTHON_SUFFIX
    for operator in (name, by_python):
        _library.define(operator + schema, tags=(torch.Tag.pt2_compliant_tag,))
        torch.library.register_fake(f"{NAMESPACE}::{operator}", fake, lib=_library)
        _library.impl(operator, implementation, "CPU")
    hopper_operators.implement(name, implementation)
    _library.impl(by_python, hopper_operators.record_errors(implementation), "CUDA")


_NORM, _ADD_NORM = "Tensor x, Tensor norm, float eps", "Tensor x, Tensor residual, Tensor norm, float eps"

_register("linear", f"(Tensor x, {LAYER}) -> Tensor", _linear, _linear_fake)
_register("rms_norm_linear", f"({_NORM}, {LAYER}) -> Tensor", _rms_norm_linear, _rms_norm_linear_fake)
_register(
    "add_rms_norm_linear",
    f"({_ADD_NORM}, {LAYER}) -> (Tensor, Tensor)",
    _add_rms_norm_linear,
    _add_rms_norm_linear_fake,
)
_register("silu_mul_linear", f"(Tensor x, {LAYER}) -> Tensor", _silu_mul_linear, _linear_fake)


def linear(
    x: Tensor,
    weight: Tensor,
    scale_w: Tensor,
    bias: Tensor | None,
    length: int,
    phase: int,
    dtype: torch.dtype,
    columns: int,
    backend: str,
) -> Tensor:
    """Run a whole layer, x [..., K] -> [..., N] of x's dtype; the arguments are those of the operators."""
    tokens = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    y: Tensor = torch.ops.slidesparse.linear(
        tokens, weight, scale_w, bias, length, phase, dtype, columns, x.dtype, backend
    )
    return y if x.dim() == 2 else y.view(*x.shape[:-1], scale_w.shape[0])
