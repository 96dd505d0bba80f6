"""Fuse the quantization of a layer's input with the norm or the activation that computes it, in compiled models.

Just before Inductor generates code, a graph of vLLM holds ``torch.ops.slidesparse.linear(y, ...)`` of a y that is

- ``vllm_ir.rms_norm`` or ``vllm_ir.fused_add_rms_norm``, which vLLM has not decomposed yet where it compiles models in
  pieces (on GPUs, in 0.25.1),
- or SiLU of one half times the other half, decomposed unless ``custom_ops`` selects vLLM's own kernel.

`FusionPass` replaces such a pair by one fused operator of `slidesparse.ops`, when nothing else uses y.  Inductor could
not do so itself, even if quantization were decomposed: it fuses operations over the same elements, while windows are a
gather of another width ([M, K'], not [M, K]) that follows reductions over the row, two of them with a norm.

Results equal those of the unfused graph up to float32 rounding of the norm's reduction, with one exception: where
Inductor recomputes a sum with the residual, it uses it unrounded; ours is rounded to the dtype of the model.

The pass is registered in vLLM's hook for custom passes, an option of Inductor; its uuid is part of Inductor's cache key
and, through the compilation config, of vLLM's.  A model, models nested in it (such as the language model of a
multimodal one) and its draft model share one compilation config, but not one model config.  So the pass is registered
even if nothing is fused, and its uuid covers everything that graphs depend on, because cached graphs are not checked.
"""

from __future__ import annotations

import hashlib
import operator
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from slidesparse.vllm_patch import compat
from torch._inductor.pattern_matcher import CallFunction, KeywordArg, PatternExpr, stable_topological_sort
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true, sym_eq
from vllm.compilation.passes.inductor_pass import InductorPass
from vllm.logger import init_logger
from vllm.platforms import current_platform

from slidesparse import __version__, ops
from slidesparse.errors import LOGGER
from slidesparse.resolve import Resolution

logger = init_logger(LOGGER)

PASS_KEY = "post_grad_custom_post_pass"  # option of torch._inductor.config
ADDITIONAL = "slidesparse"  # key in vLLM's additional_config
TO_THE_END = 2**63 - 1  # end of an open slice

aten, prims, ours = torch.ops.aten, torch.ops.prims, torch.ops.slidesparse

# The fused operators of a layer and each kind of producer
NORM, ADD_NORM = ours.rms_norm_linear.default, ours.add_rms_norm_linear.default
SILU_MUL = ours.silu_mul_linear.default


def register(key: str, resolution: Resolution) -> str:
    """Add the pass to the compilation of the model under construction; return the outcome for the summary line.

    Args:
        key: what compiled graphs of the model depend on.
        resolution: how the model is served; if it does not ask for fusion, the outcome is "".
    """
    config = compat.current_config().compilation_config
    custom_pass = add_cache_key(key)
    if not resolution.fuse:
        return ""
    if not ops.is_native(resolution.backend, torch.device(current_platform.device_type)):
        return f"norms and activations not fused: backend {resolution.backend} quantizes by itself"
    # by torch.compile (2) or vLLM's own backend (3)
    if int(config.mode or 0) not in (2, 3) or config.backend not in ("", "inductor"):
        return "norms and activations not fused: the model is not compiled by Inductor"
    if not isinstance(custom_pass, FusionPass):
        return f"norms and activations not fused: {PASS_KEY} is taken by {type(custom_pass).__name__}"
    custom_pass.fuses = True
    return "norms and activations fused"


def add_cache_key(key: str) -> Any:
    """Add ``key`` to the key of the model under construction in vLLM's compile cache.

    Returns the pass, or another program's that is registered in its place.  The key is then added to additional_config,
    which the cache key of models that are not nested contains.
    """
    config = compat.current_config()
    custom_pass = config.compilation_config.inductor_compile_config.setdefault(PASS_KEY, FusionPass())
    if isinstance(custom_pass, FusionPass):
        custom_pass.keys = tuple(sorted({*custom_pass.keys, key}))
    elif isinstance(config.additional_config, dict):
        keys = config.additional_config.get(ADDITIONAL, ())
        config.additional_config[ADDITIONAL] = sorted({*keys, key})
    return custom_pass


class FusionPass(InductorPass):  # type: ignore[misc]
    """The pass over each graph that Inductor compiles.  It is copied and pickled with configs."""

    def __init__(self) -> None:
        super().__init__()
        self.fuses = False
        self.keys: tuple[str, ...] = ()

    def __call__(self, graph: Graph) -> None:
        """Fuse the layers of a graph and log how many, once for all equal graphs."""
        counts = fuse(graph) if self.fuses else None
        if counts:
            _log(tuple(sorted(counts.items())))

    def uuid(self) -> str:
        """Return a key that changes whenever the pass or its inputs may change the result."""
        facts = f"{ops.ABI} {__version__} {self.fuses} {self.keys}"
        return hashlib.sha256(Path(__file__).read_bytes() + facts.encode()).hexdigest()


@cache
def _log(counts: tuple[tuple[str, int], ...]) -> None:
    logger.info("SlideSparse fusion in a graph: %s", ", ".join(f"{count} {name}" for name, count in counts))


@dataclass(frozen=True)
class Producer:
    """The nodes that compute the input of a layer."""

    operator: Any  # NORM, ADD_NORM or SILU_MUL
    inputs: tuple[Any, ...]  # leading arguments of the fused operator
    nodes: tuple[Node, ...]  # nodes that become unused, each before those that it uses
    sums: tuple[Node, ...] = ()  # nodes that hold the sum, the last result of the operator


def fuse(graph: Graph) -> Counter[str]:
    """Fuse each layer with its producer, where that is possible; return the number of layers by operator.

    The graph may be any model's; unknown operations are left alone.
    """
    counts: Counter[str] = Counter()
    for node in list(graph.nodes):
        if node.target is not ours.linear.default:
            continue
        producer = None if node.kwargs else _producer(node)
        if producer:
            _replace(node, producer)
        counts[node.target.name().partition("::")[2]] += 1
    if set(counts) - {"linear"}:
        stable_topological_sort(graph)  # a sum may be used before the layer
    return counts


def _producer(layer: Node) -> Producer | None:
    """Find what computes the input of a layer, if that can be fused."""
    source = layer.args[0]
    if not isinstance(source, Node) or len(source.users) != 1:
        return None
    value = source.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.dim() != 2:
        return None
    return _norm(source, value) or _activation(source, value)


def _replace(layer: Node, producer: Producer) -> None:
    """Replace ``layer`` by the fused operator; its result stays, and a sum becomes a second result."""
    like, value = layer.args[0].meta["val"], layer.meta["val"]  # type: ignore[union-attr]
    layer.target = producer.operator
    layer.args = (*producer.inputs, *layer.args[1:])
    layer.meta.pop("eager_input_vals", None)  # it describes the former arguments
    if producer.operator is ADD_NORM:
        layer.meta["val"] = (value, like)
        first = _result(layer, 0)
        layer.replace_all_uses_with(first, delete_user_cb=lambda user: user is not first)
        if producer.sums:
            total = _result(layer, 1)
            for node in producer.sums:
                node.replace_all_uses_with(total, delete_user_cb=lambda user: user not in producer.nodes)
    for node in (*producer.sums, *producer.nodes):
        if not node.users:
            layer.graph.erase_node(node)


def _result(layer: Node, index: int) -> Node:
    with layer.graph.inserting_after(layer):
        result = layer.graph.call_function(operator.getitem, (layer, index))
    result.meta["val"] = layer.meta["val"][index]
    return result


def _norm(source: Node, value: torch.Tensor) -> Producer | None:
    """Match vLLM's own operators of a norm over whole rows.

    ``rms_norm(x, weight, eps, variance_size=None)`` or, with a residual and a pair of results,
    ``fused_add_rms_norm(x, residual, weight, eps, variance_size=None)``.
    """
    fused, rows, nodes, sums = NORM, 1, [source], ()
    if not _calls(source, "vllm_ir::rms_norm"):
        call = source.args[0] if source.target is operator.getitem and source.args[1] == 0 else None
        if not isinstance(call, Node) or not _calls(call, "vllm_ir::fused_add_rms_norm"):
            return None
        fused, rows, nodes = ADD_NORM, 2, [source, call]
        sums = tuple(user for user in call.users if user.args[1] == 1)
    *tensors, eps = nodes[-1].args[: rows + 2]
    if any(extra is not None for extra in nodes[-1].args[rows + 2 :]):
        return None  # a norm over a part of the row
    if not all(isinstance(tensor, Node) for tensor in tensors) or not isinstance(eps, float):
        return None
    *likes, weight = (tensor.meta.get("val") for tensor in tensors)
    if not all(_alike(tensor, value) for tensor in likes) or weight is None or weight.dim() != 1:
        return None
    if weight.dtype != value.dtype or not weight.is_contiguous():
        return None
    return Producer(fused, (*tensors, eps), tuple(nodes), sums)


def _activation(source: Node, value: torch.Tensor) -> Producer | None:
    """Match silu(x[:, :K]) * x[:, K:] decomposed into ATen operators."""
    match = _activation_pattern(value.dtype).match(source)
    if not match:
        return None
    x, k = match.kwargs["x"], match.kwargs["k"]
    both = x.meta["val"]
    if both.dtype != value.dtype or both.dim() != 2 or not isinstance(k, int) or both.shape[1] != 2 * k:
        return None
    return Producer(SILU_MUL, (x,), tuple(reversed(match.nodes)))


def _calls(node: Node, name: str) -> bool:
    """Return whether a node calls an operator (which may not exist) with positional arguments only, as vLLM does."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target.name() == name and not node.kwargs


def _alike(value: Any, other: torch.Tensor) -> bool:
    """Return whether both have the same dtype and, for any number of tokens, the same shape."""
    return (
        isinstance(value, torch.Tensor)
        and value.dtype == other.dtype
        and value.dim() == other.dim()
        and statically_known_true(sym_eq(tuple(value.shape), tuple(other.shape)))
    )


def _cast(pattern: PatternExpr, dtype: torch.dtype, source: torch.dtype, users: int = 1) -> PatternExpr:
    """Return a pattern of ``pattern`` converted from ``source`` to ``dtype``; itself if they are equal."""
    if dtype == source:
        return pattern
    return CallFunction(prims.convert_element_type.default, pattern, dtype, _users=users)


@cache
def _activation_pattern(dtype: torch.dtype) -> PatternExpr:
    half = CallFunction(
        aten.slice.Tensor, KeywordArg("x"), 1, 0, KeywordArg("k"), _users=2 if dtype == torch.float32 else 1
    )
    gate = _cast(half, torch.float32, dtype, 2)
    power = CallFunction(aten.exp.default, CallFunction(aten.neg.default, gate))
    silu = CallFunction(aten.div.Tensor, gate, CallFunction(aten.add.Tensor, power, 1))
    up = CallFunction(aten.slice.Tensor, KeywordArg("x"), 1, KeywordArg("k"), TO_THE_END)
    return CallFunction(aten.mul.Tensor, _cast(silu, dtype, torch.float32), up)
