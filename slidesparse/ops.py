"""The torch operators ``torch.ops.slidesparse.*``, which compiled graphs contain.

A linear layer is one call, [M, K] -> [M, N], which may begin with the norm or the activation before it::

    y: Tensor = torch.ops.slidesparse.linear(x, weight, scale_w, bias, layer, out_dtype)
    y: Tensor = torch.ops.slidesparse.rms_norm_linear(x, norm, eps, weight, ...)
    y, total = torch.ops.slidesparse.add_rms_norm_linear(x, residual, norm, eps, weight, ...)
    y: Tensor = torch.ops.slidesparse.silu_mul_linear(x, weight, ...)
    y: Tensor = torch.ops.slidesparse.linear_by(x, weight, scale_w, bias, layer, out_dtype, backend)

``layer`` is a `slidesparse.gemm.problem.Layer`.  The first four run the backend hopper on a GPU, in C++ (csrc/hopper/
operators.cpp, installed when that backend is loaded), and the reference backend on a CPU; ``linear_by`` runs any other.
The compiler pass `slidesparse.vllm_patch.fusion` inserts the fused operators into graphs.

The operators are opaque to torch.compile; their fakes are symbolic in M, so one graph serves any number of tokens.
They do not read the environment: the arguments determine what runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from slidesparse import gemm, reference
from slidesparse.gemm.backend import TwoStep
from slidesparse.gemm.problem import Layer
from slidesparse.kernels import RmsNorm, SiluMul

ABI = 9  # version of operators and packed weights; part of vLLM's compile-cache key

NAMESPACE = "slidesparse"
# type of device -> the backend that runs all operators but linear_by
NATIVE = {"cuda": "hopper", "cpu": "reference"}
# The part that all schemas but linear_by's end with
LAYER = "Tensor weight, Tensor scale_w, Tensor? bias, SymInt[] layer, ScalarType out_dtype"
if "_library" not in globals():  # kept across reloads: operators disappear with their library object
    _library = torch.library.Library(NAMESPACE, "FRAGMENT")


def _linear_by(
    x: Tensor,
    weight: Tensor,
    scale_w: Tensor,
    bias: Tensor | None,
    layer: Sequence[int],
    out_dtype: torch.dtype,
    backend: str,
) -> Tensor:
    """Run a layer by ``backend``."""
    implementation = cast("TwoStep", gemm.get(backend))
    return implementation.linear(Layer(*layer), x, weight, scale_w, bias, out_dtype)


def _linear(x: Tensor, *layer: Any) -> Tensor:
    arguments: tuple[Any, ...] = x, *layer, NATIVE["cpu"]
    return _linear_by(*arguments)


def _linear_fake(
    x: Tensor,
    weight: Tensor,
    scale_w: Tensor,
    bias: Tensor | None,
    layer: Sequence[int],
    out: torch.dtype,
    *_: str,
) -> Tensor:
    return x.new_empty(x.shape[0], Layer(*layer).n, dtype=out)


def _rms_norm_linear(x: Tensor, norm: Tensor, eps: float, *layer: Any) -> Tensor:
    """Run ``linear`` on RMSNorm(x), norm [K]."""
    return _linear(reference.produce(x, RmsNorm(norm, eps)), *layer)


def _rms_norm_linear_fake(x: Tensor, norm: Tensor, eps: float, *layer: Any) -> Tensor:
    return _linear_fake(x, *layer)


def _add_rms_norm_linear(
    x: Tensor, residual: Tensor, norm: Tensor, eps: float, *layer: Any
) -> tuple[Tensor, Tensor]:
    """Run ``linear`` on RMSNorm(x + residual); return also the sum [M, K] in x's dtype, the next residual."""
    total = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return _linear(reference.produce(x, RmsNorm(norm, eps, residual, total)), *layer), total


def _add_rms_norm_linear_fake(
    x: Tensor, residual: Tensor, norm: Tensor, eps: float, *layer: Any
) -> tuple[Tensor, Tensor]:
    return _linear_fake(x, *layer), x.new_empty(x.shape)


def _silu_mul_linear(x: Tensor, *layer: Any) -> Tensor:
    """Run ``linear`` on silu(gate) * up, where x [M, 2 K] holds gate before up."""
    return _linear(reference.produce(x, SiluMul()), *layer)


def _register(
    name: str, schema: str, implementation: Callable[..., Any], fake: Callable[..., Any], key: str = "CPU"
) -> None:
    """Define an operator once per process, however often the plugin is loaded."""
    if hasattr(getattr(torch.ops, NAMESPACE), name):
        return
    _library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)
    _library.impl(name, implementation, key)


_NORM, _ADD_NORM = "Tensor x, Tensor norm, float eps", "Tensor x, Tensor residual, Tensor norm, float eps"

_register("linear", f"(Tensor x, {LAYER}) -> Tensor", _linear, _linear_fake)
_register("rms_norm_linear", f"({_NORM}, {LAYER}) -> Tensor", _rms_norm_linear, _rms_norm_linear_fake)
_register("silu_mul_linear", f"(Tensor x, {LAYER}) -> Tensor", _silu_mul_linear, _linear_fake)
_both = f"({_ADD_NORM}, {LAYER}) -> (Tensor, Tensor)"
_register("add_rms_norm_linear", _both, _add_rms_norm_linear, _add_rms_norm_linear_fake)
_any_device = "CompositeExplicitAutograd"
_register("linear_by", f"(Tensor x, {LAYER}, str backend) -> Tensor", _linear_by, _linear_fake, _any_device)


def linear(
    x: Tensor, weight: Tensor, scale_w: Tensor, bias: Tensor | None, layer: Layer, backend: str
) -> Tensor:
    """Run a whole layer by ``backend``, x [..., K] -> [..., N] of x's dtype.

    Args:
        weight: the weight as the backend packed it.
        scale_w: [N, 1] float32.
        bias: [N] or None.
    """
    tokens = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    arguments = tokens, weight, scale_w, bias, [*layer], x.dtype
    ours = torch.ops.slidesparse
    y: Tensor = (
        ours.linear(*arguments) if is_native(backend, x.device) else ours.linear_by(*arguments, backend)
    )
    return y if x.dim() == 2 else y.view(*x.shape[:-1], layer.n)


def is_native(backend: str, device: torch.device) -> bool:
    """Return whether ``backend`` runs the operators of its own, fused ones included, on a device."""
    return NATIVE.get(device.type) == backend
