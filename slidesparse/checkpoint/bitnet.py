"""Read BitNet b1.58 checkpoints as W8A8 INT8 checkpoints.

The weights of such a model are ternary: codes -1, 0 and 1 with one scale per tensor, and its activations are INT8,
scaled per token.  A source stores weights in one of three forms, which `as_int8` presents as INT8 codes [N, K] and
scales [N, 1]::

    master    float w [N, K]                 scale = mean |w|      code = round(w / scale), at most 1
    packed    uint8 [N / 4, K] and a scale   code of row r: bits 2b and 2b + 1 of byte r mod N/4, b = r div N/4, less 1
    unpacked  float -1, 0, 1 [N, K] and a scale

Sources: arXiv 2402.17764, and ``integrations/bitnet.py`` of transformers, whose BitLinear divides by the stored scale,
and whose AutoBitLinear multiplies by it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from slidesparse.checkpoint.names import SCALE, WEIGHT, architecture_of
from slidesparse.checkpoint.skeleton import Skeleton
from slidesparse.checkpoint.storage import FLOATS, Checkpoint, CheckpointError, Reader, StoredTensor
from slidesparse.checkpoint.w8a8 import new_block

ARCHITECTURE = "BitNetForCausalLM"
METHOD = "bitnet"  # quant_method; master checkpoints may have no quantization_config
PER_BYTE = 4
MIN_SCALE = 1e-5
MASTER, PACKED, UNPACKED = "master", "packed", "unpacked"


def is_bitnet(config: Mapping[str, Any]) -> bool:
    """Return whether a config.json describes a BitNet model, whatever the form of its weights."""
    return architecture_of(config) == ARCHITECTURE


def as_int8(checkpoint: Checkpoint) -> Checkpoint:
    """Return a BitNet source as a W8A8 checkpoint, and any other unchanged.

    Raises CheckpointError for a BitNet source whose weights are in none of the forms above.
    """
    block = checkpoint.quantization_config()
    if not is_bitnet(checkpoint.config) or (block and block.get("quant_method") != METHOD):
        return checkpoint
    if block and block.get("use_rms_norm"):
        raise CheckpointError(
            "quantization_config of the source has use_rms_norm, a norm before each linear layer, which is not "
            "supported, unlike the norms of BitNetForCausalLM: take a source without it"
        )
    inverse = bool(block) and block.get("linear_class", "bitlinear") == "bitlinear"  # type: ignore[union-attr]
    forms = {name: _form(checkpoint, name) for name in Skeleton(checkpoint).layers}
    tensors: dict[str, StoredTensor] = {}
    for name, stored in checkpoint.tensors.items():
        layer = name.removesuffix(WEIGHT)
        if layer in forms and name != layer:
            rows = stored.spec.rows * (PER_BYTE if forms[layer] == PACKED else 1)
            shape = (rows, *stored.spec.shape[1:])
            tensors[name] = stored._replace(spec=stored.spec._replace(dtype="I8", shape=shape))
            scale = stored.spec._replace(name=layer + SCALE, dtype="F32", shape=(rows, 1))
            tensors[scale.name] = stored._replace(spec=scale)
        elif name.removesuffix(SCALE) not in forms:
            tensors[name] = stored
    config = {**checkpoint.config, "quantization_config": new_block("int8")}
    facts = checkpoint.folder, config, checkpoint.index, checkpoint.files, tensors
    return BitNetCheckpoint(*facts, checkpoint, forms, inverse, opened=checkpoint.opened)


def _form(checkpoint: Checkpoint, layer: str) -> str:
    spec, scale = checkpoint.require(layer + WEIGHT), checkpoint.tensors.get(layer + SCALE)
    if scale and (scale.spec.dtype not in FLOATS or scale.spec.rows * scale.spec.columns != 1):
        raise CheckpointError(
            f"tensor {scale.spec.name} is {scale.spec.dtype} {list(scale.spec.shape)}; the scale of a ternary weight "
            f"is one of {', '.join(FLOATS)}"
        )
    if spec.dtype == "U8" and scale and len(spec.shape) == 2:
        return PACKED
    if spec.dtype in FLOATS and len(spec.shape) == 2:
        return UNPACKED if scale else MASTER
    raise CheckpointError(
        f"tensor {spec.name} is {spec.dtype} {list(spec.shape)} {'with' if scale else 'without'} a weight_scale; "
        f"BitNet weights are {', '.join(FLOATS)} [N, K], or U8 [N/4, K] with a weight_scale: fetch the checkpoint again"
    )


@dataclass(frozen=True)
class BitNetCheckpoint(Checkpoint):
    """A BitNet source with the tensors of the equivalent W8A8 checkpoint."""

    source: Checkpoint
    forms: Mapping[str, str]  # linear layer -> MASTER, PACKED or UNPACKED
    inverse: bool  # whether stored scales are divisors

    def reader(self) -> Reader:
        """Return a context manager that reads codes and scales, and all other tensors unchanged."""
        return _Reader(self)


class _Reader(Reader):
    def __init__(self, checkpoint: BitNetCheckpoint) -> None:
        super().__init__(checkpoint)
        self._view = checkpoint
        self._scales: dict[str, float] = {}
        self._lock = Lock()  # so that each scale is computed once

    def rows(self, name: str, rows: slice) -> Tensor:
        """Read rows [rows, columns]; a linear layer has INT8 codes, and its scale repeated in float32."""
        layer = name.removesuffix(SCALE)
        if layer in self._view.forms:
            return torch.full((rows.stop - rows.start, 1), self._scale(layer))
        layer = name.removesuffix(WEIGHT)
        form = self._view.forms.get(layer) if layer != name else None
        if form is None:
            return super().rows(name, rows)
        if form == PACKED:
            return self._unpacked(name, rows)
        values = self._raw(name, rows).float()
        if form == UNPACKED:
            return self._ternary(name, values)
        scale = self._scale(layer)
        return values.mul_(1.0 / scale).round_().clamp_(-1, 1).to(torch.int8)

    def _raw(self, name: str, rows: slice) -> Tensor:
        """Read rows of a tensor as the source stores it."""
        return self._rows(self._view.source.tensors[name], rows)

    def _unpacked(self, name: str, rows: slice) -> Tensor:
        stored = self._view.source.tensors[name].spec.rows
        parts = []
        for number in range(PER_BYTE):
            first = max(rows.start - number * stored, 0)
            last = min(rows.stop - number * stored, stored)
            if first < last:
                parts.append((self._raw(name, slice(first, last)) >> (2 * number)) & 3)
        return self._ternary(name, torch.cat(parts).to(torch.int8) - 1)

    def _ternary(self, name: str, values: Tensor) -> Tensor:
        """Return INT8 codes.  Raises CheckpointError unless all values are -1, 0 or 1."""
        codes = values.to(torch.int8)
        wrong = (codes != values) | (codes.abs() > 1)
        if bool(wrong.any()):
            value = values[wrong][0].item()
            raise CheckpointError(
                f"tensor {name} holds {value:g}, ternary weights are -1, 0 and 1; fetch the checkpoint again"
            )
        return codes

    def _scale(self, layer: str) -> float:
        """Return the scale of a layer, a float32 number."""
        with self._lock:
            if layer not in self._scales:
                if self._view.forms[layer] == MASTER:
                    spec = self._view.source.tensors[layer + WEIGHT].spec
                    parts = (self._raw(spec.name, rows).double().abs().sum() for rows in spec.chunks())
                    mean = sum(parts, torch.zeros((), dtype=torch.float64)) / (spec.rows * spec.columns)
                    scale = max(float(mean.float()), MIN_SCALE)  # in this order, NaN stays NaN
                else:
                    stored = self._raw(layer + SCALE, slice(0, 1)).float().reshape(())
                    scale = float(1 / stored if self._view.inverse else stored)
                if not 0 < scale < float("inf"):
                    raise CheckpointError(
                        f"the scale of {layer} is {scale}, so its weights or their scale are not finite, or zero; "
                        "fetch the checkpoint again, or repair the training"
                    )
                self._scales[layer] = scale
            return self._scales[layer]
