"""Watch the tensors of one layer arrive: a checkpoint that does not hold what it claims must not serve.

vLLM's loaders narrow what they are given to what they need, cast it, and leave memory as it was where a quantized
checkpoint lacks a tensor.  So every tensor is looked at on its way, and counted.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from slidesparse.checkpoint.storage import CheckpointError
from slidesparse.quantize import FP8, INT8

Loader = Callable[..., None]

_AGAIN = "convert the original model again"


class Arrivals:
    """The weight and the scales of a layer, as far as they have come.

    Args:
        name: what the layer is called.
        columns: of each stored weight: K, or K' of a slided one, before it is cut into tensor-parallel shards.
        parts: of the layer, such as q, k and v; a checkpoint may also hold them as one.
    """

    def __init__(self, name: str, columns: int, parts: int) -> None:
        self._name, self._columns, self._parts = name, columns, parts
        self._arrived: dict[str, set[object]] = {"weight": set(), "weight_scale": set()}

    def watch(self, loader: Loader) -> Loader:
        """``loader(parameter, tensor, part)`` of vLLM, which looks at the tensor first."""

        @functools.wraps(loader)
        def look_and_load(parameter: Any, tensor: Tensor, *part: Any, **more: Any) -> None:
            kind = "weight" if parameter.dtype in (INT8, FP8) else "weight_scale"
            self._look(kind, parameter, tensor)
            loader(parameter, tensor, *part, **more)
            self._arrived[kind].add(next(iter((*part, *more.values())), None))

        return look_and_load

    def _look(self, kind: str, parameter: Any, tensor: Tensor) -> None:
        if kind == "weight":
            if tensor.dtype != parameter.dtype:
                raise CheckpointError(
                    f"{self._name}: the checkpoint holds {tensor.dtype} weights, its config.json says "
                    f"{parameter.dtype}; {_AGAIN}"
                )
            if tensor.dim() != 2 or tensor.shape[1] != self._columns:
                raise CheckpointError(
                    f"{self._name}: the checkpoint holds a weight of shape {list(tensor.shape)}, its metadata and the "
                    f"model ask for {self._columns} columns; {_AGAIN}"
                )
        elif not bool((torch.isfinite(tensor.float()) & (tensor.float() >= 0)).all()):
            raise CheckpointError(f"{self._name}: weight_scale holds NaN, Inf or negative numbers; {_AGAIN}")

    def require_all(self) -> None:
        """Raise CheckpointError that names what has not come, and begin again."""
        for kind, parts in self._arrived.items():
            whole = any(part is None or isinstance(part, tuple) for part in parts)
            if not whole and len(parts) < self._parts:
                came = f"{len(parts)} of its {self._parts} parts have" if self._parts > 1 else "it has not"
                raise CheckpointError(f"{self._name}: the checkpoint lacks its {kind}: {came} come; {_AGAIN}")
            parts.clear()
