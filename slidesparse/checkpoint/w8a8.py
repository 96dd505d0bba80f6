"""The compressed-tensors ``quantization_config`` of W8A8 checkpoints: read strictly, written plainly.

We take symmetric 8-bit weights, scaled per channel or per tensor, with activations quantized per token while
serving.  Any other kind is refused by name, because its layers would run on vLLM's own kernels and gain
nothing from the pattern.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slidesparse.checkpoint.architectures import SCALE, WEIGHT, compile_regexes, layer_names
from slidesparse.checkpoint.metadata import QUANT_METHOD, SPARSE_FORMATS, sparsity_of
from slidesparse.checkpoint.storage import FLOATS, Checkpoint, CheckpointError, TensorSpec
from slidesparse.errors import shown

QUANT_METHODS = ("compressed-tensors", QUANT_METHOD)
KINDS = {"int8": ("int", "I8"), "fp8": ("float", "F8_E4M3")}  # quant -> type, dtype of safetensors
_FORMATS = ("int-quantized", "float-quantized", "naive-quantized")


@dataclass(frozen=True)
class W8A8:
    """How the linear layers of a checkpoint are quantized."""

    quant: str  # "int8" or "fp8"
    strategy: str  # one scale per "channel" or per "tensor"
    ignore: tuple[str, ...] = ()

    @property
    def dtype(self) -> str:
        """The safetensors dtype of the weights."""
        return KINDS[self.quant][1]

    def ignores(self, layer: str) -> bool:
        """Whether the ignore list holds a layer, by name or by a ``re:`` regex."""
        return any(
            re.match(entry[3:], layer) is not None if entry.startswith("re:") else entry == layer
            for entry in self.ignore
        )


def require_quantized(checkpoint: Checkpoint, layer: str, source: W8A8) -> TensorSpec:
    """Return the spec of a layer's weight.  CheckpointError unless it and its scale are as ``source`` says."""
    spec = checkpoint.require(layer + WEIGHT)
    if len(spec.shape) != 2 or 0 in spec.shape:
        raise CheckpointError(
            f"tensor {spec.name} has shape {list(spec.shape)}; a linear layer's is [N, K], not empty"
        )
    if spec.dtype != source.dtype:
        raise CheckpointError(
            f"tensor {spec.name} is {spec.dtype}, but quantization_config promises {source.dtype} "
            f"({source.quant}) and does not ignore it; fetch the checkpoint again, or start from the original "
            "one if it leaves some layers unquantized on purpose"
        )
    scale = checkpoint.require(layer + SCALE)
    expected = {"channel": spec.shape[0], "tensor": 1}[source.strategy]
    if scale.dtype not in FLOATS or scale.rows * scale.columns != expected or len(scale.shape) > 2:
        raise CheckpointError(
            f"tensor {scale.name} is {scale.dtype} {list(scale.shape)}; scales per {source.strategy} of "
            f"{spec.shape[0]} rows are {expected} of {', '.join(FLOATS)}"
        )
    return spec


def new_block(quant: str, ignore: Sequence[str]) -> dict[str, Any]:
    """Return the block of a checkpoint that we quantize: per channel, with dynamic per-token activations."""
    kind = KINDS[quant][0]
    common = {"num_bits": 8, "type": kind, "symmetric": True}
    return {
        "quant_method": "compressed-tensors",
        "format": f"{kind}-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**common, "strategy": "channel", "dynamic": False},
                "input_activations": {**common, "strategy": "token", "dynamic": True},
            }
        },
        "ignore": list(ignore),
    }


def holds_floats(block: Mapping[str, Any]) -> bool:
    """Whether a ``quantization_config`` says no more than how weights in 16 or 32 bits are stored without zeros."""
    return sparsity_of(block) is not None and not block.get("config_groups")


def parse_block(block: Mapping[str, Any], tensors: Iterable[str] = ()) -> W8A8:
    """Read a ``quantization_config``.  CheckpointError says why it cannot be accelerated.

    Args:
        tensors: names, of which the layers are those that `W8A8.ignores` will be asked about.
    """
    method = block.get("quant_method")
    if method not in QUANT_METHODS:
        raise CheckpointError(
            f"the source is already quantized by {shown(method)}; the sources taken are FP32, FP16, BF16 and "
            "compressed-tensors W8A8 (INT8 or FP8): start from the original checkpoint"
        )
    status, form = block.get("quantization_status", "compressed"), block.get("format")
    if status != "compressed" or form not in _FORMATS:
        raise _refusal(
            f"format {shown(form)} and status {shown(status)}",
            f"a compressed one of {', '.join(_FORMATS)} is",
        )
    sparsity = block.get("sparsity_config") or {}
    stored = sparsity.get("format", "dense") if isinstance(sparsity, dict) else sparsity
    if stored != "dense" and not sparsity_of(block):
        raise _refusal(
            f"weights stored as {shown(stored)}", f"plain ones and {', '.join(SPARSE_FORMATS)} are"
        )
    if block.get("transform_config"):
        raise _refusal("a transform_config (rotations of the activations)", "checkpoints without one are")
    groups = block.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise _refusal(f"config_groups {shown(groups)}", "an object with a group for Linear is")
    kinds = {_group(name, group) for name, group in groups.items()}
    if len(kinds) > 1:
        found = " and ".join(f"{quant} per {strategy}" for quant, strategy in sorted(kinds))
        raise _refusal(f"groups with different arguments ({found})", "the same for all is")
    ignore = block.get("ignore") or []
    if not isinstance(ignore, list) or not all(isinstance(name, str) for name in ignore):
        raise _refusal("an ignore list that is not a list of names", "a list of names is")
    regexes = [entry[3:] for entry in ignore if entry.startswith("re:")]
    compile_regexes(regexes, "the source's ignore list:", layer_names(tensors))
    (quant, strategy), *_ = kinds
    return W8A8(quant, strategy, tuple(ignore))


def _group(name: str, group: Any) -> tuple[str, str]:
    """Return (quant, strategy) of one config group; the defaults are those of compressed-tensors."""
    if not isinstance(group, dict):
        raise _refusal(f"{shown(name)} that is not an object", "weights and input_activations are")
    name = shown(name)
    weights, inputs = group.get("weights") or {}, group.get("input_activations") or {}
    if not isinstance(weights, dict) or not isinstance(inputs, dict):
        raise _refusal(f"weights or input_activations that are no objects in {name}", "objects are")
    bits, kind = weights.get("num_bits", 8), weights.get("type", "int")
    quant = next((quant for quant, (type_, _) in KINDS.items() if (type_, 8) == (kind, bits)), None)
    if not weights or quant is None:
        raise _refusal(
            f"{shown(bits)}-bit {shown(kind)} weights in {name}", "8-bit int and float weights are"
        )
    if not inputs:
        raise _refusal(f"no quantized activations in {name} (W8A16)", "8-bit dynamic per-token ones are")
    strategy = weights.get("strategy") or "tensor"
    if strategy not in ("channel", "tensor"):
        raise _refusal(f"weight scales per {shown(strategy)} in {name}", "scales per channel or tensor are")
    if not weights.get("symmetric", True) or weights.get("dynamic", False):
        raise _refusal(f"asymmetric or dynamic weights in {name}", "symmetric static ones are")
    if (inputs.get("num_bits", 8), inputs.get("type", "int")) != (8, kind):
        raise _refusal(f"activations of another type than the weights in {name}", f"8-bit {kind} ones are")
    if inputs.get("dynamic", False) is not True or inputs.get("strategy") != "token":
        found = "activations not quantized per token" if inputs.get("dynamic") else "static activations"
        raise _refusal(f"{found} in {name}", "dynamic per-token ones are")
    if not inputs.get("symmetric", True):
        raise _refusal(f"asymmetric activations in {name}", "symmetric ones are")
    if group.get("output_activations"):
        raise _refusal(f"quantized outputs in {name}", "unquantized ones are")
    return quant, strategy


def _refusal(found: str, allowed: str) -> CheckpointError:
    return CheckpointError(
        f"the source's quantization_config has {found}; only {allowed} run by the sparse kernels, the rest "
        "would stay on vLLM's own. Start from the original checkpoint, or quantize it as W8A8 with dynamic "
        "per-token activations"
    )


def ignore_list(left: Iterable[str]) -> list[str]:
    """Return the ignore list of a checkpoint that we quantize: lm_head and the layers left, sorted."""
    return ["lm_head", *sorted(set(left) - {"lm_head"})]
