"""Read and write the ``quantization_config`` of 8-bit checkpoints.

Converted checkpoints, and the plugin, use symmetric 8-bit weights with per-channel or per-tensor scales, and dynamic
per-token activation scales.  Sources that can be converted to this form are accepted: static and asymmetric
activations become dynamic and symmetric, and weights with per-block scales are dequantized.  All others are refused,
because their layers would run on vLLM's own kernels and gain nothing from the pattern.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import regex  # type: ignore[import-untyped]  # as vLLM does

from slidesparse.checkpoint.metadata import COMPRESSED_TENSORS, QUANT_METHOD, SPARSE_FORMATS, sparsity_of
from slidesparse.checkpoint.names import HEAD, SCALE, WEIGHT, fused_name, layer_names, search
from slidesparse.checkpoint.storage import FLOATS, SCALES, Checkpoint, CheckpointError, TensorSpec
from slidesparse.errors import shown

FP8_METHOD = "fp8"  # the quant_method of DeepSeek, Qwen and AutoFP8
KINDS = {"int8": ("int", "I8"), "fp8": ("float", "F8_E4M3")}  # quant -> type, dtype of safetensors
MIXED = "mixed-precision"  # the format of groups that have different formats
_FORMATS = ("int-quantized", "float-quantized", "naive-quantized")
_HEAD_CLASS = "ParallelLMHead"  # vLLM's, of an lm_head
_SCALE_INV = ".weight_scale_inv"  # suffix with quant_method fp8; despite its name a factor, not a divisor


@dataclass(frozen=True)
class Scheme:
    """The quantization of a layer in a source."""

    quant: str  # "int8" or "fp8"
    strategy: str  # granularity of the weight scale: "channel", "tensor" or "block"
    activations: str = "per token"  # or another quantization of activations, which is replaced
    block: tuple[int, int] | None = None  # rows and columns of a block that shares a scale
    scale: str = SCALE  # suffix of the scale's tensor name


@dataclass(frozen=True)
class Quantization:
    """The quantization of all layers of a checkpoint."""

    groups: Mapping[str, Scheme | None]  # config group -> scheme; None for a group without weights
    targets: Mapping[str, Scheme | None]  # layer name, ``re:`` regex, or class such as Linear -> scheme
    ignore: tuple[str, ...] = ()
    method: str = COMPRESSED_TENSORS
    kv_cache: Mapping[str, Any] | None = None  # kv_cache_scheme, in the form of compressed-tensors
    is_rotated: bool = False  # whether rotations of the weights were folded into them

    @property
    def schemes(self) -> set[Scheme]:
        """The schemes of all groups."""
        return {scheme for scheme in self.groups.values() if scheme}

    def rewritten(self, experts: bool) -> bool:
        """Return whether the source must be requantized, for the plugin or for ``experts`` with per-tensor scales."""
        return self.method == FP8_METHOD or any(
            scheme.block or scheme.activations != "per token" or (experts and scheme.strategy == "tensor")
            for scheme in self.schemes
        )

    def ignores(self, layer: str) -> bool:
        """Return whether the ignore list contains a layer: its name, a ``re:`` regex of it, or its `fused_name`.

        As in vLLM, a regex of the fused name does not count.
        """
        names, regexes = self._ignored
        return not names.isdisjoint((layer, fused_name(layer))) or any(_names(r, layer) for r in regexes)

    @cached_property
    def _ignored(self) -> tuple[frozenset[str], list[str]]:
        """The names (possibly one for each expert) and the regexes of the ignore list."""
        return frozenset(self.ignore), [entry for entry in self.ignore if entry.startswith("re:")]

    def loads_head(self, layer: str) -> bool:
        """Return whether vLLM (0.25.1 to 0.32) loads a quantized lm_head: only if a target names it, or vLLM's class.

        It takes one of the class Linear for a float one, and ends with "There is no module or parameter named
        'lm_head.weight_scale'".
        """
        named = any(_names(target, name) for target in self.targets for name in (layer, _HEAD_CLASS))
        return self.method != FP8_METHOD and named

    def scheme(self, layer: str, dtype: str) -> Scheme | None:
        """Return the scheme of a layer whose weight has ``dtype``, or None if it is not quantized.

        As in vLLM, the first target that names the layer, or else what it is fused into, counts, or else its class,
        which for a float lm_head is not Linear.  vLLM's own classes, such as RowParallelLinear, are those of some
        layers: the dtype tells which.  With quant_method fp8, which has no targets, all layers are quantized but those
        in float dtypes.
        """
        if self.ignores(layer) or (self.method == FP8_METHOD and dtype in FLOATS):
            return None
        is_head = HEAD.search(layer) is not None
        if dtype in FLOATS and is_head and not self.loads_head(layer):
            return None
        for name in filter(None, (layer, fused_name(layer), _HEAD_CLASS * is_head)):
            for target, scheme in self.targets.items():
                if _names(target, name):
                    return scheme
        for target, scheme in self.targets.items():
            is_class = _names(target, "Linear") or ("." not in target and "linear" in target.lower())
            if target.lower() == "linear" or (is_class and scheme and KINDS[scheme.quant][1] == dtype):
                return scheme
        return None


def _names(entry: str, layer: str) -> bool:
    return regex.match(entry[3:], layer) is not None if entry.startswith("re:") else entry == layer


def _require_matrix(checkpoint: Checkpoint, layer: str) -> TensorSpec:
    spec = checkpoint.require(layer + WEIGHT)
    if len(spec.shape) != 2 or 0 in spec.shape:
        raise CheckpointError(
            f"tensor {spec.name} has shape {list(spec.shape)}; a linear layer's is [N, K], not empty"
        )
    return spec


def require_float(checkpoint: Checkpoint, layer: str) -> TensorSpec:
    """Return the spec of a layer's weight.  Raises CheckpointError if it looks quantized or is no matrix.

    For a checkpoint whose config.json quantizes no weights.
    """
    spec = _require_matrix(checkpoint, layer)
    if layer + SCALE in checkpoint.tensors:
        raise CheckpointError(
            f"{checkpoint.folder} has {layer + SCALE}, but by its config.json no weights are quantized; fetch its "
            "config.json again"
        )
    if spec.dtype not in FLOATS:
        raise CheckpointError(
            f"tensor {spec.name} is {spec.dtype}; where config.json quantizes no weights, they must be "
            f"{', '.join(FLOATS)}: save the model in one of them, or fetch its config.json again"
        )
    return spec


def require_quantized(checkpoint: Checkpoint, layer: str, source: Quantization) -> TensorSpec:
    """Return the spec of a layer's weight.  Raises CheckpointError if it or its scale contradicts ``source``."""
    spec = _require_matrix(checkpoint, layer)
    scheme = source.scheme(layer, spec.dtype)
    if scheme is None:
        raise CheckpointError(
            f"tensor {spec.name} is {spec.dtype}, but by quantization_config the layer is not quantized; fetch the "
            "checkpoint again"
        )
    promised = KINDS[scheme.quant][1]
    if spec.dtype != promised:
        raise CheckpointError(
            f"tensor {spec.name} is {spec.dtype}, but quantization_config promises {promised} "
            f"({scheme.quant}) and does not ignore it; fetch the checkpoint again, or start from the original "
            "one if some layers are meant to be unquantized"
        )
    _require_scale(checkpoint.require(layer + scheme.scale), scheme, spec.shape)
    return spec


def _require_scale(scale: TensorSpec, scheme: Scheme, shape: tuple[int, ...]) -> None:
    """Raise CheckpointError unless a scale fits a weight of ``shape``."""
    rows, columns = shape
    if scheme.block:
        grid = (-(-rows // scheme.block[0]), -(-columns // scheme.block[1]))
        fits, expected = scale.shape == grid, f"{list(grid)}"
    else:
        count = rows if scheme.strategy == "channel" else 1
        fits, expected = scale.rows * scale.columns == count and len(scale.shape) <= 2, f"{count}"
    dtypes: tuple[str, ...] = SCALES if scheme.block else FLOATS
    if scale.dtype not in dtypes or not fits:
        raise CheckpointError(
            f"tensor {scale.name} is {scale.dtype} {list(scale.shape)}; scales per {scheme.strategy} of "
            f"{rows} rows are {expected} of {', '.join(dtypes)}"
        )


def new_block(
    quant: str, unquantized: Iterable[str] = (), kv_cache: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return a new ``quantization_config``: per-channel weights and dynamic per-token activations.

    Its ignore list holds lm_head and the names of ``unquantized`` layers, sorted.
    """
    return {
        "quant_method": COMPRESSED_TENSORS,
        "format": f"{KINDS[quant][0]}-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], **_arguments(quant)}},
        "ignore": ["lm_head", *sorted(set(unquantized) - {"lm_head"})],
        **({"kv_cache_scheme": dict(kv_cache)} if kv_cache else {}),
    }


def quantize_head(block: dict[str, Any], head: str, quant: str, layers: Iterable[str]) -> None:
    """Let a ``quantization_config`` quantize an lm_head, too, in a group of its own: see `Quantization.loads_head`.

    Args:
        layers: the names of all layers.

    Raises CheckpointError if an entry of the ignore list covers both it and another layer.
    """
    covering = {entry for entry in block["ignore"] if entry == "lm_head" or _names(entry, head)}
    for entry in covering:
        if others := [name for name in layers if name != head and _names(entry, name)]:
            raise CheckpointError(
                f"--layer: {head} cannot be quantized, as the source's ignore list covers {others[0]}, too, by "
                f"{entry!r}; leave the option out, or edit the list in its config.json"
            )
    block["ignore"] = [entry for entry in block["ignore"] if entry not in covering]
    target = f"re:.*{regex.escape(head.rpartition('.')[2])}$"
    form = f"{KINDS[quant][0]}-quantized"
    group = {"targets": [target], "format": form, **_arguments(quant)}
    # the first target that names it counts
    block["config_groups"] = {"lm_head": group, **block["config_groups"]}


def _arguments(quant: str, strategy: str = "channel") -> dict[str, Any]:
    common = {"num_bits": 8, "type": KINDS[quant][0], "symmetric": True}
    return {
        "weights": {**common, "strategy": strategy, "dynamic": False},
        "input_activations": {**common, "strategy": "token", "dynamic": True},
    }


def rewritten_block(
    block: Mapping[str, Any],
    source: Quantization,
    written: Mapping[str, tuple[str, str]],
    unquantized: Iterable[str],
) -> dict[str, Any]:
    """Return the ``quantization_config`` for a quantized source.

    Args:
        block: the source's, from which ``source`` was parsed.
        written: config group -> type and granularity of weight scales in the output.
        unquantized: names of layers to add to the ignore list.

    Targets, KV cache and ignore list are kept.  Of the groups without weights, vLLM reads those for attention alone.
    """
    quants = sorted({quant for quant, _ in written.values()})
    if source.method == FP8_METHOD:
        return new_block(quants[0], unquantized, source.kv_cache)
    groups = {}
    for name, group in block["config_groups"].items():
        if name in written:
            groups[name] = {**group, **_arguments(*written[name])}
            if len(quants) > 1 or group.get("format"):
                groups[name]["format"] = f"{KINDS[written[name][0]][0]}-quantized"
        elif len(group["targets"]) == 1 and group["targets"][0].endswith("Attention"):
            groups[name] = dict(group)
    form = MIXED if len(quants) > 1 else f"{KINDS[quants[0]][0]}-quantized"
    ignore = [*source.ignore, *sorted(set(unquantized) - set(source.ignore))]
    kept = {key: value for key, value in block.items() if key != "transform_config"}
    return {**kept, "format": form, "config_groups": groups, "ignore": ignore}


def parse_block(block: Mapping[str, Any], tensors: Iterable[str] = ()) -> Quantization:
    """Parse a ``quantization_config``.  Raises CheckpointError with the reason if it is not supported.

    Args:
        tensors: names of the tensors whose layers will be looked up.
    """
    tensors = list(tensors)
    quantization = _parsed(block, tensors)
    for kind, entries in (("ignore list", quantization.ignore), ("targets", quantization.targets)):
        for entry in (entry for entry in entries if entry.startswith("re:")):
            search(entry[3:], layer_names(tensors), f"the source's {kind}:")
    return quantization


def _parsed(block: Mapping[str, Any], tensors: Iterable[str]) -> Quantization:
    method = block.get("quant_method")
    if not method and block.get("sparsity_config"):  # the oldest blocks, of pruning alone
        method = COMPRESSED_TENSORS
    if method == FP8_METHOD:
        return _fp8(block, tensors)
    if method not in (COMPRESSED_TENSORS, QUANT_METHOD):
        named = shown(method) if method else "a method that quantization_config does not name"
        raise CheckpointError(
            f"the source is already quantized by {named}; supported sources are FP32, FP16, BF16, FP8 "
            "(quant_method fp8) and compressed-tensors W8A8 (INT8 or FP8): start from the original checkpoint"
        )
    sparsity = block.get("sparsity_config") or {}
    stored = sparsity.get("format", "dense") if isinstance(sparsity, dict) else sparsity
    if stored != "dense" and not sparsity_of(block):
        raise _refusal(
            f"weights stored as {shown(stored)}", f"plain ones and {', '.join(SPARSE_FORMATS)} are"
        )
    is_rotated = bool(block.get("transform_config"))
    if is_rotated and not _is_folded(block["transform_config"]):
        raise _refusal(
            "a transform_config of rotations while serving", "rotations folded into the weights are"
        )
    configs = block.get("config_groups") or {}
    if not isinstance(configs, dict):
        raise _refusal(f"config_groups {shown(configs)}", "an object of groups is")
    groups = dict[str, Scheme | None]()
    for name, group in configs.items():
        try:
            groups[name] = _group(shown(name), group, block.get("format"))
        except CheckpointError:
            if not isinstance(group, dict) or _applies(_targets(shown(name), group), tensors):
                raise
            groups[name] = None
    targets = {
        target: groups[name] for name, group in configs.items() for target in _targets(shown(name), group)
    }
    return Quantization(
        groups, targets, _ignore(block, "ignore"), kv_cache=_kv_cache(block), is_rotated=is_rotated
    )


def _is_folded(transforms: Any) -> bool:
    """Return whether all transforms of a ``transform_config`` apply to weights, as SpinQuant's R1 and R2."""
    try:
        schemes = transforms["config_groups"].values()
        places = {place["location"] for scheme in schemes for place in scheme["apply"]}
        return places <= {"weight_input", "weight_output"}
    except (TypeError, KeyError, AttributeError):
        return False


def _kv_cache(block: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the scheme of the KV cache; AutoFP8 names its only one "static".

    Raises CheckpointError for one that vLLM (0.28) refuses.
    """
    scheme = block.get("kv_cache_scheme")
    if not scheme:
        return None
    if scheme == "static" and block.get("quant_method") == FP8_METHOD:
        return {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    keys = ("num_bits", "type", "symmetric", "strategy")
    found = {key: scheme.get(key) for key in keys} if isinstance(scheme, dict) else scheme
    common = {"num_bits": 8, "type": "float", "symmetric": True}
    if found not in [{**common, "strategy": strategy} for strategy in ("tensor", "attn_head")]:
        raise CheckpointError(
            f"the source's kv_cache_scheme {shown(found)} is not served by vLLM, which takes symmetric 8-bit floats "
            "per tensor or attn_head; remove it from config.json to serve the KV cache unquantized"
        )
    assert isinstance(scheme, dict)
    return scheme


def _fp8(block: Mapping[str, Any], tensors: Iterable[str]) -> Quantization:
    """Parse quant_method fp8: per-block or per-tensor scales; transformers gives both the same name."""
    form, activations = block.get("fmt", "e4m3"), block.get("activation_scheme", "dynamic")
    if form not in ("e4m3", "float8_e4m3fn") or activations not in ("dynamic", "static"):
        raise _refusal(
            f"fmt {shown(form)} and activation_scheme {shown(activations)}", "e4m3, dynamic or static, is"
        )
    size = block.get("weight_block_size")
    if size is None:
        scale = _SCALE_INV if any(name.endswith(_SCALE_INV) for name in tensors) else SCALE
        scheme = Scheme("fp8", "tensor", activations, scale=scale)
    else:
        scheme = Scheme("fp8", "block", "per group", _block_size(size, "weight_block_size"), _SCALE_INV)
    ignore = _ignore(block, "ignored_layers") or _ignore(block, "modules_to_not_convert")
    return Quantization({FP8_METHOD: scheme}, {"Linear": scheme}, ignore, FP8_METHOD, _kv_cache(block))


def _ignore(block: Mapping[str, Any], key: str) -> tuple[str, ...]:
    ignore = block.get(key) or []
    if not isinstance(ignore, list) or not all(isinstance(name, str) for name in ignore):
        raise _refusal(f"an {key} list that is not a list of names", "a list of names is")
    return tuple(ignore)


# KV cache scales by names of other tools: one for keys and values, or below the projection whose output they scale
_KV_SCALE = re.compile(r"\A(.*\.)(?:kv_scale|([qkv])_proj\.output_scale|(?:qk)?[qkv]_proj\.([qkv])_scale)\Z")


def kv_scale_names(tensor: str) -> tuple[str, ...]:
    """Return the names by which vLLM loads a scale of the KV cache by one of these names; none for other tensors."""
    match = _KV_SCALE.match(tensor)
    return tuple(f"{match[1]}{part}_scale" for part in match[2] or match[3] or "kv") if match else ()


def _targets(name: str, group: Mapping[str, Any]) -> list[str]:
    targets = group.get("targets")
    if not isinstance(targets, list) or not targets or not all(isinstance(target, str) for target in targets):
        raise _refusal(f"no list of targets in {name}", "names of layers, re: regexes or classes are")
    return targets


def _applies(targets: Iterable[str], tensors: Iterable[str]) -> bool:
    """Return whether a layer may have one of ``targets``; vLLM never looks at a group without layers.

    Names without a dot are classes: Linear may be that of any layer, and vLLM skips the groups of attention.
    """
    scaled = [name.removesuffix(SCALE) for name in tensors if name.endswith(SCALE)]
    names = {*scaled, *filter(None, map(fused_name, scaled)), "Linear", _HEAD_CLASS}
    found = (
        search(target[3:], names, "the source's targets:")
        if target.startswith("re:")
        else target in names or not ("." in target or target.endswith("Attention"))
        for target in targets
    )
    return not scaled or any(found)


def _group(name: str, group: Any, form: Any) -> Scheme | None:
    """Parse a config group with the defaults of compressed-tensors; ``form`` is the checkpoint's format."""
    if not isinstance(group, dict):
        raise _refusal(f"{name} that is not an object", "weights and input_activations are")
    if not group.get("weights"):
        return None
    weights, inputs = group["weights"], group.get("input_activations") or {}
    if not isinstance(weights, dict) or not isinstance(inputs, dict):
        raise _refusal(f"weights or input_activations that are no objects in {name}", "objects are")
    bits, kind = weights.get("num_bits", 8), _type(weights)
    quants = [quant for quant, (type_, _) in KINDS.items() if (type_, 8) == (kind, bits)]
    form, strategy, block = group.get("format") or form, _strategy(weights), weights.get("block_structure")
    by_block = strategy == "block" and bool(block)
    is_static = weights.get("symmetric", True) and not weights.get("dynamic", False)
    is_alike = (inputs.get("num_bits", 8), _type(inputs)) == (8, kind)
    required = (
        (quants, f"{shown(bits)}-bit {shown(kind)} weights", "8-bit int and float weights are"),
        (inputs, "no quantized activations (W8A16)", "8-bit ones are"),
        (form in _FORMATS, f"format {shown(form)}", f"one of {', '.join(_FORMATS)} is"),
        (
            strategy in ("channel", "tensor") or by_block,
            f"weight scales per {shown(strategy)}",
            "scales per channel, tensor or block are",
        ),
        (is_static, "asymmetric or dynamic weights", "symmetric static ones are"),
        (is_alike, "activations of another type than the weights", f"8-bit {shown(kind)} ones are"),
        (not group.get("output_activations"), "quantized outputs", "unquantized ones are"),
    )
    for holds, problem, allowed in required:
        if not holds:
            raise _refusal(f"{problem} in {name}", allowed)
    size = _block_size(block, f"block_structure in {name}") if by_block else None
    return Scheme(quants[0], strategy, _activations(name, inputs, by_block), size)


def _strategy(arguments: Mapping[str, Any]) -> Any:
    size = arguments.get("group_size")
    return arguments.get("strategy") or ("channel" if size == -1 else "group" if size else "tensor")


def _type(arguments: Mapping[str, Any]) -> Any:
    """Return "int" or "float", which compressed-tensors reads in capitals, too, or what stands in their place."""
    kind = arguments.get("type", "int")
    return kind.lower() if isinstance(kind, str) else kind


def _activations(name: str, inputs: Mapping[str, Any], by_block: bool) -> str:
    """Return the quantization of activations; per group is allowed with per-block weight scales only."""
    dynamic, strategy = inputs.get("dynamic", False), _strategy(inputs)
    if dynamic is False and strategy == "tensor":
        return "static"
    names = {"token": "per token", "tensor": "dynamic", **({"group": "per group"} if by_block else {})}
    if dynamic is not True or not isinstance(strategy, str) or strategy not in names:
        raise _refusal(
            f"activations not quantized per token in {name}", "static or dynamic per-token ones are"
        )
    return names[strategy] if inputs.get("symmetric", True) else "asymmetric"


def _block_size(size: Any, where: str) -> tuple[int, int]:
    if (
        not isinstance(size, list | tuple)
        or len(size) != 2
        or not all(type(n) is int and n > 0 for n in size)
    ):
        raise _refusal(f"{where} {size!r}", "two whole numbers, such as [128, 128], are")
    return size[0], size[1]


def _refusal(problem: str, allowed: str) -> CheckpointError:
    return CheckpointError(
        f"the source's quantization_config has {problem}; only {allowed} supported. Start from the original "
        "checkpoint, or quantize it as W8A8 with dynamic per-token activations"
    )
