"""Check the tensors of a layer while they are loaded, so that a damaged checkpoint is not served.

vLLM's loaders narrow a tensor to what they need, cast it, and leave memory uninitialized where a quantized
checkpoint lacks a tensor.  So every tensor is checked before it is loaded, and counted.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.parameter import BasevLLMParameter

from slidesparse.bitmask import decompress
from slidesparse.checkpoint.converted import restore
from slidesparse.checkpoint.metadata import LayerEntry
from slidesparse.checkpoint.storage import CheckpointError
from slidesparse.pattern import Pattern
from slidesparse.quantize import is_finite
from slidesparse.slide import row_chunks

Loader = Callable[..., None]

AGAIN = "convert the original model again"


class LoadCheck:
    """Checks each tensor of a layer while it is loaded, and that none is missing.

    Args:
        name: the layer's name.
        in_features: K, before weights are cut into tensor-parallel shards.
        parts: the number of parts of the layer, such as q, k and v; a checkpoint may also hold them as one tensor.
        slided: the patterns at which its weights may be slided; vLLM's loaders get them restored to [N, K].
        strict: False to check nothing, where stock vLLM would serve the layer if we did not.
    """

    def __init__(
        self, name: str, in_features: int, parts: int, slided: Iterable[Pattern] = (), strict: bool = True
    ) -> None:
        self._name, self._parts, self._strict = name, parts, strict
        entries = [LayerEntry(pattern, in_features) for pattern in slided]
        # by the columns of stored weights; None for those that are [N, K]: sliding changes none at 2:4 that has as many
        self._entries = {entry.columns("slided"): entry for entry in entries} | {in_features: None}
        self._loaded: dict[str, set[object]] = {"weight": set(), "weight_scale": set(), "bias": set()}
        self._packed = False
        self._watched: dict[str, Loader] = {}
        self.weights = 1  # how many weights of the checkpoint were loaded into the layer

    def watch(self, loader: Loader, kind: str) -> Loader:
        """Wrap vLLM's ``loader(parameter, tensor, part)`` of a ``kind`` so that the tensor is checked first.

        The kind is weight, weight_scale or bias.  Neither shape nor dtype tells them apart: a layer of one out-feature
        has a scale and a bias [1], and zero points of static activations are INT8, as weights are.
        """

        if not self._strict:
            return loader

        @functools.wraps(loader)
        def check_and_load(parameter: Any, tensor: Tensor, *part: Any, **kwargs: Any) -> None:
            self._check(kind, parameter, tensor)
            shape = list(tensor.shape)  # as the checkpoint holds it
            counts = tensor.is_meta or not parameter.is_meta  # vLLM first counts what a reload brings
            if kind == "weight" and (entry := self._entries[tensor.shape[1]]):
                tensor = self._unslided(tensor, parameter, entry)
            key = next(iter((*part, *kwargs.values())), None)
            if kind == "weight" and key in self._loaded[kind]:
                packed = f"packed and as it is; {AGAIN}"
                where = packed if self._packed else "in two files; remove that which is not of this model"
                raise CheckpointError(f"{self._name}: the checkpoint holds a weight twice, {where}")
            try:
                loader(parameter, tensor, *part, **kwargs)
            except (AssertionError, RuntimeError) as error:
                if type(error) not in (AssertionError, RuntimeError):
                    raise  # out of memory, or an error of ours
                raise CheckpointError(
                    f"{self._name}: the checkpoint's {kind} of shape {shape} does not fit the layer "
                    f"({str(error) or 'another shape is expected'}); {AGAIN}"
                ) from error
            if counts:
                self._loaded[kind].add(key)

        self._watched[kind] = check_and_load
        return check_and_load

    def _check(self, kind: str, parameter: Any, tensor: Tensor) -> None:
        if kind == "weight":
            if tensor.dtype != parameter.dtype:
                raise CheckpointError(
                    f"{self._name}: the checkpoint holds {tensor.dtype} weights, its config.json says "
                    f"{parameter.dtype}; {AGAIN}"
                )
            if tensor.dim() != 2 or tensor.shape[1] not in self._entries:
                raise CheckpointError(
                    f"{self._name}: the checkpoint holds a weight of shape {list(tensor.shape)}, its metadata and the "
                    f"model need {' or '.join(map(str, self._entries))} columns; {AGAIN}"
                )
        elif not tensor.is_meta and not is_finite(tensor):
            raise CheckpointError(f"{self._name}: {kind} holds NaN or Inf; {AGAIN}")

    def _unslided(self, slided: Tensor, parameter: Tensor, entry: LayerEntry) -> Tensor:
        """Return the weight [N, K] on the parameter's device; one of either on the device meta has no values."""
        if slided.is_meta or parameter.is_meta:
            return slided.new_empty(len(slided), entry.in_features, device="meta")
        weight = parameter.data.new_empty(len(slided), entry.in_features)
        for rows in row_chunks(*slided.shape):  # as restoring a large weight takes several times its memory
            chunk = slided[rows].to(parameter.device)
            weight[rows] = restore(chunk, entry, "slided", self._name, rows.start)
        return weight

    def require_all(self, layer: torch.nn.Module, unread: Collection[str] = ()) -> None:
        """Raise CheckpointError, which names the missing tensors, unless all were loaded; then reset for a reload.

        Parts that are ``unread``, as vLLM's loaders call them, may be missing.
        A model's class may put a loader of its own in place of a parameter's, such as that of a mamba layer's shards.
        """
        self.weights = max(1, len(self._loaded["weight"]))
        for kind, parts in self._loaded.items() if self._strict else ():
            parameter = getattr(layer, kind, None)
            replaced = getattr(parameter, "weight_loader", None) not in (None, self._watched.get(kind))
            if parameter is None or (not parts and replaced):
                continue
            complete = any(part is None or isinstance(part, tuple) for part in parts)
            found, needed = len(parts.difference(unread)), self._parts - len(unread)
            if not complete and found < needed:
                loaded = f"{found} of its {needed} parts were" if needed > 1 else "it was not"
                raise CheckpointError(
                    f"{self._name}: the checkpoint lacks its {kind}: {loaded} loaded; {AGAIN}"
                )
            parts.clear()

    def take_packed(self, layer: torch.nn.Module) -> None:
        """Register the parameters of a packed weight on ``layer``: ``compressed``, ``bitmask``, ``shape``.

        Once all three are loaded they are unpacked on the layer's device, and the weight's loader gets the dense
        weight, which it cuts into tensor-parallel shards of any size.
        """
        self._packed, loader = True, layer.weight.weight_loader
        # part of the layer, such as q, k or v -> its tensors so far
        pending: dict[object, dict[str, Tensor]] = {}

        def loader_of(kind: str) -> Loader:
            @functools.wraps(loader)  # with its arguments' names, by which vLLM keeps calls for later
            def collect(param: Any, tensor: Tensor, *part: Any, **kwargs: Any) -> None:
                key = next(iter((*part, *kwargs.values())), None)
                if tensor.is_meta and kind == "compressed":
                    self._loaded["weight"].add(key)  # in a model without weights, to see what is loaded
                if layer.weight.is_meta:
                    return  # vLLM only counts what a reload brings, and calls again
                tensors = pending.setdefault(key, {})
                tensors[kind] = tensor.to(layer.weight.device, copy=True)  # vLLM may use its memory again
                if tensors.keys() >= {"compressed", "bitmask", "shape"}:
                    del pending[key]
                    loader(layer.weight, _dense(self._name, tensors), *part, **kwargs)

            return collect

        for kind in ("compressed", "bitmask", "shape", "row_offsets"):
            empty = torch.empty(0, dtype=torch.uint8, device=layer.weight.device)
            layer.register_parameter(kind, BasevLLMParameter(data=empty, weight_loader=loader_of(kind)))


def require_numbers(name: str, weight: Tensor) -> None:
    """Raise CheckpointError if an FP8 weight holds NaN."""
    if not is_finite(weight):
        raise CheckpointError(f"{name}: weight holds NaN; {AGAIN}")


def _dense(name: str, tensors: dict[str, Tensor]) -> Tensor:
    """Return the weight [N, K] of packed tensors.  Raises CheckpointError where they do not fit together."""
    sizes = tensors["shape"].flatten().tolist()
    try:
        integral = all(type(size) is int for size in sizes)
        if not integral or len(sizes) != 2 or sizes[:1] != list(tensors["bitmask"].shape[:1]):
            raise ValueError(f"the shape {sizes} and a bitmask {list(tensors['bitmask'].shape)}")
        return decompress(tensors["compressed"], tensors["bitmask"], sizes[-1])
    except ValueError as error:
        raise CheckpointError(f"{name}: the checkpoint holds a packed weight of {error}; {AGAIN}") from error
