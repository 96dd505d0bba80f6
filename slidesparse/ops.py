"""The torch operators ``torch.ops.slidesparse.*``, which compiled graphs contain.

A linear layer is one call, [M, K] -> [M, N], which may begin with the norm or the activation before it::

    y: Tensor = torch.ops.slidesparse.linear(x, weight, scale_w, bias, layer, out_dtype)
    y: Tensor = torch.ops.slidesparse.rms_norm_linear(x, norm, eps, weight, ...)
    y, total = torch.ops.slidesparse.add_rms_norm_linear(x, residual, norm, eps, weight, ...)
    y: Tensor = torch.ops.slidesparse.silu_mul_linear(x, weight, ...)
    y: Tensor = torch.ops.slidesparse.linear_by(x, weight, scale_w, bias, layer, out_dtype, backend)

The experts of a mixture are three, each for all experts that this process holds::

    order, rows, offsets = torch.ops.slidesparse.route(topk_ids, expert_map, experts)
    y: Tensor = torch.ops.slidesparse.grouped_linear(x, order, top_k, weight, scale_w, offsets, ...)
    y: Tensor = torch.ops.slidesparse.combine(y, rows, top_k)

``layer`` is a `slidesparse.gemm.problem.Layer`.  The first four run the backend hopper on a GPU, in C++ (csrc/hopper/
operators.cpp, installed when that backend is loaded), and the reference backend on a CPU; ``linear_by`` runs any other.
The compiler pass `slidesparse.vllm_patch.fusion` inserts the fused operators into graphs.

The operators are opaque to torch.compile; their fakes are symbolic in M, so one graph serves any number of tokens.
They do not read the environment: the arguments determine what runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from slidesparse import gemm, reference
from slidesparse.gemm.backend import TwoStep, quantize
from slidesparse.gemm.problem import Layer

ABI = 10  # version of operators and packed weights; part of vLLM's compile-cache key

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


def _linear_fake(x: Tensor, *others: Any) -> Tensor:
    layer, out_dtype = others[3:5]
    return x.new_empty(x.shape[0], Layer(*layer).n, dtype=out_dtype)


def _rms_norm_linear(x: Tensor, norm: Tensor, eps: float, *layer: Any) -> Tensor:
    """Run ``linear`` on RMSNorm(x), norm [K]."""
    return _linear(reference.rms_norm(x, norm, eps)[0], *layer)


def _add_rms_norm_linear(
    x: Tensor, residual: Tensor, norm: Tensor, eps: float, *layer: Any
) -> tuple[Tensor, Tensor]:
    """Run ``linear`` on RMSNorm(x + residual); return also the sum [M, K] in x's dtype, the next residual."""
    normed, total = reference.rms_norm(x, norm, eps, residual)
    return _linear(normed, *layer), total.contiguous()


def _silu_mul_linear(x: Tensor, *layer: Any) -> Tensor:
    """Run ``linear`` on silu(gate) * up, where x [M, 2 K] holds gate before up."""
    return _linear(reference.silu_mul(x), *layer)


def _route(topk_ids: Tensor, expert_map: Tensor | None, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sort the slots, token * top_k + k, stably by expert.

    Args:
        topk_ids: [T, top_k] INT32 or INT64, the experts of each token; -1 for none.
        expert_map: INT32, the index in this process of each expert, -1 for those of others; None if all are here.
        experts: how many are here, E.

    Returns, INT32: order [T * top_k], the sorted slots, undefined from offsets[E] on; rows [T * top_k], the place of
    each slot in them, -1 for those of other processes; offsets [E + 1] of the experts' first slots in them.
    """
    chosen = topk_ids.flatten().long()
    if expert_map is not None:
        chosen = torch.where(chosen < 0, -1, expert_map.long()[chosen.clamp(min=0)])
    chosen = torch.where(chosen < 0, experts, chosen)
    ordered, order = chosen.sort(stable=True)
    offsets = torch.searchsorted(ordered, torch.arange(experts + 1))
    rows = torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))
    return order.int(), rows.masked_fill_(chosen == experts, -1).int(), offsets.int()


def _route_fake(topk_ids: Tensor, expert_map: Tensor | None, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    slots, dtype = topk_ids.shape[0] * topk_ids.shape[1], torch.int32
    sizes = slots, slots, experts + 1
    order, rows, offsets = (topk_ids.new_empty(size, dtype=dtype) for size in sizes)
    return order, rows, offsets


def _grouped_linear(
    x: Tensor,
    order: Tensor,
    top_k: int,
    weight: Tensor,
    scale_w: Tensor,
    offsets: Tensor,
    slot_scale: Tensor | None,
    silu_mul: bool,
    layer: Sequence[int],
    out_dtype: torch.dtype,
) -> Tensor:
    """Run the layer of each expert on the rows of the slots that `route` has sorted.

    Args:
        x: [T, K], of which slot s reads row s // top_k; or, with ``silu_mul`` and top_k 1, [T * top_k, 2 K]: gate and
            up of the sorted slots.
        order, offsets: from `route`.
        weight: [E, ...], each expert's as the backend packed it.
        scale_w: [E, N] float32.
        slot_scale: [T * top_k] float32 by slot, by which results are multiplied before they are rounded; or None.
        layer: of one expert.

    Returns [T * top_k, N], the rows of the sorted slots, undefined from offsets[E] on.  Rounds where vLLM's activation,
    quantizer and Triton kernel for experts on GPUs do.
    """
    bounds = offsets.tolist()
    y = x.new_zeros(len(order), layer[0], dtype=torch.float32)
    for expert, (start, stop) in enumerate(pairwise(bounds)):
        if start == stop:
            continue
        rows = x[start:stop] if silu_mul else x[order[start:stop].long() // top_k]
        inputs = reference.silu_mul_of_experts(rows) if silu_mul else rows
        q, scale_x = quantize(inputs, Layer(*layer), "triton")
        y[start:stop] = reference.matmul(q, weight[expert]).float() * scale_x * scale_w[expert]
    if slot_scale is not None:
        y[: bounds[-1]] *= slot_scale[order[: bounds[-1]].long(), None]
    return y.to(out_dtype)


def _combine(y: Tensor, rows: Tensor, top_k: int) -> Tensor:
    """Sum the rows of each token's slots in float32: y [T * top_k, N] and rows from `route` -> [T, N].

    As vLLM does on GPUs: in the order of the slots, rounded once.
    """
    here = (rows >= 0)[:, None]
    terms = torch.where(here, y[rows.clamp(min=0).long()].float(), 0.0).view(-1, top_k, y.shape[1])
    total = terms.new_zeros(terms.shape[0], y.shape[1])
    for term in terms.unbind(1):
        total += term
    return total.to(y.dtype)


def _register(
    name: str, schema: str, implementation: Callable[..., Any], fake: Callable[..., Any], key: str = "CPU"
) -> None:
    """Define an operator once per process, however often the plugin is loaded."""
    if hasattr(getattr(torch.ops, NAMESPACE), name):
        return
    _library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)
    _library.impl(name, implementation, key)


_register("linear", f"(Tensor x, {LAYER}) -> Tensor", _linear, _linear_fake)
_register(
    "rms_norm_linear",
    f"(Tensor x, Tensor norm, float eps, {LAYER}) -> Tensor",
    _rms_norm_linear,
    lambda x, norm, eps, *layer: _linear_fake(x, *layer),
)
_register("silu_mul_linear", f"(Tensor x, {LAYER}) -> Tensor", _silu_mul_linear, _linear_fake)
_register(
    "add_rms_norm_linear",
    f"(Tensor x, Tensor residual, Tensor norm, float eps, {LAYER}) -> (Tensor, Tensor)",
    _add_rms_norm_linear,
    lambda x, residual, norm, eps, *layer: (_linear_fake(x, *layer), x.new_empty(x.shape)),
)
_register(
    "route",
    "(Tensor topk_ids, Tensor? expert_map, SymInt experts) -> (Tensor, Tensor, Tensor)",
    _route,
    _route_fake,
)
_register(
    "grouped_linear",
    "(Tensor x, Tensor order, SymInt top_k, Tensor weight, Tensor scale_w, Tensor offsets, Tensor? slot_scale, "
    "bool silu_mul, SymInt[] layer, ScalarType out_dtype) -> Tensor",
    _grouped_linear,
    lambda x, order, *others: x.new_empty(order.shape[0], Layer(*others[-2]).n, dtype=others[-1]),
)
_register(
    "combine",
    "(Tensor y, Tensor rows, SymInt top_k) -> Tensor",
    _combine,
    lambda y, rows, top_k: y.new_empty(rows.shape[0] // top_k, y.shape[1]),
)
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


class Experts(NamedTuple):
    """The two layers of a mixture's experts, each with the weights of those that this process holds.

    The first has gate, then up, as out-features.
    """

    weights: tuple[Tensor, Tensor]  # [E, ...], from `slidesparse.gemm.backend.Backend.pack_experts`
    scales: tuple[Tensor, Tensor]  # [E, N] float32
    layers: tuple[Layer, Layer]


def experts(
    x: Tensor, experts: Experts, topk_ids: Tensor, slot_scale: Tensor | None, expert_map: Tensor | None
) -> Tensor:
    """Run the experts of each token, and sum their results: x [T, K] -> [T, K] of x's dtype.

    Args:
        topk_ids, expert_map: see `_route`.
        slot_scale: [T, top_k] float32, the routers' weights, or None for ones.
    """
    ours, top_k = torch.ops.slidesparse, topk_ids.shape[1]
    (first, second), scales, layers = experts
    order, rows, offsets = ours.route(topk_ids, expert_map, first.shape[0])
    both = ours.grouped_linear(x, order, top_k, first, scales[0], offsets, None, False, [*layers[0]], x.dtype)
    slots = None if slot_scale is None else slot_scale.flatten()
    y = ours.grouped_linear(both, order, 1, second, scales[1], offsets, slots, True, [*layers[1]], x.dtype)
    summed: Tensor = ours.combine(y, rows, top_k)
    return summed
