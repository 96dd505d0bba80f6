"""The plan of a conversion: how each source tensor is written, decided and checked before anything is written."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import slidesparse
from slidesparse import methods
from slidesparse.bitmask import BYTE, compress, places
from slidesparse.blocks import STRIP
from slidesparse.calibrate.task import Task, prepare
from slidesparse.checkpoint import architectures
from slidesparse.checkpoint.architectures import SCALE, WEIGHT, ZERO_POINT
from slidesparse.checkpoint.bitnet import is_bitnet
from slidesparse.checkpoint.converted import require_shape
from slidesparse.checkpoint.metadata import COMPRESSED_TENSORS, KEY, QUANT_METHOD, STAMP, LayerEntry, Metadata
from slidesparse.checkpoint.storage import (
    BITMASK,
    COMPRESSED,
    CONFIG,
    FLOATS,
    INDEX,
    QUANTIZATION,
    SHAPE,
    TEXT_CONFIG,
    Checkpoint,
    CheckpointError,
    StoredTensor,
    TensorSpec,
    Writer,
    plan_file,
    text_config,
)
from slidesparse.checkpoint.w8a8 import (
    FP8_METHOD,
    KINDS,
    Quantization,
    Scheme,
    holds_floats,
    ignore_list,
    new_block,
    parse_block,
    require_float,
    require_quantized,
    rewritten_block,
)
from slidesparse.convert.options import ConvertOptions
from slidesparse.errors import CalibrationError, shown
from slidesparse.pattern import MixedPattern, Pattern, SlidePattern

# A table of embeddings; vLLM may quantize linear layers that belong to one, such as patch_embedding.linear
_TABLE = re.compile(r"(^|\.)(embed_(tokens|positions|in)\w*|\w*(embed|embeddings?)|wte|wpe)$")

# Reasons for leaving a two-dimensional weight unchanged
BY_IGNORE, BY_SOURCE, NOT_LINEAR = (
    "--ignore",
    "not quantized in the source",
    "not a linear layer of a transformer block",
)
JOINED = "routed experts in one tensor, which vLLM serves unquantized"
# Reasons for quantizing a linear layer without pruning it
BY_SKIP, BY_BUDGET = "--skip", "by the budget"
ROUTED = "routed experts, which vLLM serves dense"
QUANTIZED = "quantized in the source, but not a linear layer of a transformer block"

_BLOCK = re.compile(r"\blayers?\.(\d+)\.")
_ACTIVATIONS = (".input_scale", ".input_zero_point", ".activation_scale")  # suffixes for static quantization


@dataclass(frozen=True)
class Part:
    """A source tensor and the tensors to write for it: itself, a converted weight and its scale, or none."""

    source: TensorSpec
    file: str
    out: tuple[TensorSpec, ...]
    layer: str | None = None  # name of the layer, if the tensor is a weight to quantize
    in_features: int = 0  # K of the layer
    pattern: Pattern | None = None  # None: not pruned
    scheme: Scheme | None = None  # how the source quantized the layer, if it did; without a layer, an lm_head

    def chunks(self) -> Iterator[slice]:
        """Yield the rows of each chunk; with a mixed pattern, whole strips, whose blocks are chosen together."""
        return self.source.chunks(STRIP if isinstance(self.pattern, MixedPattern) else 1)

    @property
    def scaled(self) -> bool:
        """Whether the layer's scales are written with its weight instead of copied."""
        return self.layer is not None and self.out[-1].name == self.layer + SCALE

    def write(self, writer: Writer, row: int, weight: Tensor, scale: Tensor | None) -> int:
        """Write output rows, starting at ``row``, and return the number of bytes.

        Args:
            weight: [rows, K], or [rows, K'] in the slided layout; for the packed layout it is packed here.
            scale: [rows, 1], unless the source's scales are copied.
        """
        tensors = {self.out[0].name: weight}
        if isinstance(self.pattern, SlidePattern) and len(self.out) > 2:
            values, bitmask = compress(weight, self.pattern, str(self.layer))
            tensors = dict(zip((spec.name for spec in self.out), (values, bitmask), strict=False))
            if row == 0:
                tensors[self.out[2].name] = torch.tensor([[self.source.rows], [self.in_features]])
        if scale is not None:
            tensors[self.out[-1].name] = scale
        for name, tensor in tensors.items():
            writer.write(name, row, tensor)
        return sum(tensor.nbytes for tensor in tensors.values())


@dataclass(frozen=True)
class _Layer:
    """A layer to quantize."""

    pattern: Pattern | None  # None: not pruned
    in_features: int  # K
    scheme: Scheme | None  # how the source quantized it, if it did


@dataclass(frozen=True)
class ConversionPlan:
    """The plan of a whole conversion."""

    checkpoint: Checkpoint
    options: ConvertOptions
    pattern: Pattern  # pattern of all layers, or of most weights
    quant: str  # "int8", "fp8" or "fp8 and int8"
    parts: tuple[Part, ...]
    kept: dict[str, str]  # 2-D weights that are not changed -> reason
    skipped: dict[str, str]  # linear layers that are quantized but not pruned -> reason
    rewritten: str  # description of the changes to the source's quantization
    config: dict[str, Any]  # the config.json to write
    converted: Metadata | None  # metadata of a source that was converted before: only its layout changes

    @property
    def patterns(self) -> dict[str, Pattern]:
        """The pruned layers, each with its pattern."""
        return {part.layer: part.pattern for part in self.parts if part.layer and part.pattern}

    @property
    def experts(self) -> dict[str, int]:
        """The number of routed experts' matrices in W8A8, and of unchanged ones."""
        kept = sum(reason == JOINED or architectures.is_expert(name) for name, reason in self.kept.items())
        return {"w8a8": sum(reason == ROUTED for reason in self.skipped.values()), "kept": kept}

    @property
    def bytes_in(self) -> int:
        """The bytes of all source tensors, unpacked."""
        return sum(part.source.nbytes for part in self.parts)

    @property
    def bytes_out(self) -> int:
        """The bytes of all tensors written."""
        return sum(spec.nbytes for part in self.parts for spec in part.out)

    def specs(self, file: str) -> list[TensorSpec]:
        """Return the tensors of an output file."""
        return [spec for part in self.parts if part.file == file for spec in part.out]

    def disk_bytes(self) -> int:
        """Return the bytes of all safetensors files written, including headers."""
        return sum(plan_file(self.specs(file))[2] for file in self.checkpoint.files)

    def small_files(self) -> Iterator[tuple[str, bytes]]:
        """Yield the names and contents of the JSON files; config.json, which completes the checkpoint, comes last."""
        if self.checkpoint.index is not None:
            files = {spec.name: part.file for part in self.parts for spec in part.out}
            old = self.checkpoint.index.get("metadata")
            metadata = {**(old if isinstance(old, dict) else {}), "total_size": self.bytes_out}
            yield INDEX, _json({"metadata": metadata, "weight_map": dict(sorted(files.items()))})
        yield CONFIG, _json(self.config)


def _json(value: object) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def make_plan(
    checkpoint: Checkpoint, options: ConvertOptions, by_budget: Mapping[str, Pattern | None] | None = None
) -> ConversionPlan:
    """Plan a conversion without writing anything.  Raises the errors of `slidesparse.convert.stream.convert`.

    Args:
        by_budget: the pattern of each layer chosen for ``options.budget``, None for dense layers; absent before the
            choice.
    """
    block = checkpoint.quantization_config()
    source = None if block is None or holds_floats(block) else parse_block(block, checkpoint.tensors)
    converted = _converted(block, options)
    routed = architectures.experts(checkpoint.tensors)
    rewritten = source is not None and source.rewritten(experts=bool(routed))
    _require_fitting(checkpoint, options, source, converted)
    heads = _float_heads(checkpoint, source)
    patterns: dict[str, Pattern | None]
    if converted:
        patterns = {name: entry.pattern for name, entry in converted.layers.items()}
        kept: dict[str, str] = {}
        skipped: dict[str, str] = {}
    else:
        patterns, kept, skipped = _choose_patterns(checkpoint, source, options, routed, by_budget)
        unprunable = {name: ROUTED for names in routed.values() for name in names if name not in kept}
        if source and rewritten:
            _require_none_ignored(checkpoint, source, kept)
            unprunable |= _quantized(checkpoint, source, {*kept, *patterns, *unprunable, *heads})
        skipped |= unprunable
        patterns |= dict.fromkeys(unprunable)
    layers = {
        name: _Layer(
            pattern,
            _in_features(checkpoint, name, source, converted),
            _scheme(checkpoint, name, source),
        )
        for name, pattern in patterns.items()
    }
    for layer in _other_matrices(checkpoint, {*layers, *heads}):
        kept.setdefault(layer, BY_SOURCE if source and source.ignores(layer) else NOT_LINEAR)
    requantized = {name: layer.scheme for name, layer in layers.items() if rewritten and layer.scheme}
    zero_points = [name for name in checkpoint.tensors if source and name.endswith(ZERO_POINT)]
    dropped = {*zero_points, *_dropped(requantized, heads)}
    parts = tuple(
        Part(stored.spec, stored.file, ())
        if name in dropped
        else _float_part(checkpoint, stored, heads[name.removesuffix(WEIGHT)])
        if name.removesuffix(WEIGHT) in heads
        else _part(stored, options, layers, rewritten)
        for name, stored in checkpoint.tensors.items()
    )
    entries = {
        name: LayerEntry(layer.pattern, layer.in_features) for name, layer in layers.items() if layer.pattern
    }
    metadata = Metadata(
        _commonest(checkpoint, entries) if by_budget else options.pattern,
        options.layout,
        entries,
        f"slidesparse {slidesparse.__version__}",
    )
    return ConversionPlan(
        checkpoint=checkpoint,
        options=options,
        pattern=metadata.pattern,
        quant=" and ".join(sorted({_quant(options, layer.scheme) for layer in layers.values()})),
        parts=parts,
        kept=kept,
        skipped=skipped,
        rewritten="; ".join(_rewriting(requantized.values(), heads, len(zero_points))),
        config=_config(checkpoint, _block(block, source, rewritten, options, kept, heads), metadata),
        converted=converted,
    )


def calibration_task(plan: ConversionPlan) -> Task:
    """Return the task of a plan with calibration data.  Raises the errors of `prepare`."""
    options = plan.options
    assert options.calibration
    return prepare(
        plan.checkpoint,
        plan.patterns,
        plan.skipped,
        options.method_name,
        plan.quant,
        options.seed,
        options.calibration,
        options.budget is not None,
    )


# Checks of the source


def _converted(block: dict[str, Any] | None, options: ConvertOptions) -> Metadata | None:
    """Return the metadata of a source that was pruned before, whose pattern must be the requested one."""
    metadata = Metadata.of_config(block)
    if metadata is None:
        if block is not None and block.get("quant_method") == QUANT_METHOD:
            raise CheckpointError(
                f"the source says quant_method {QUANT_METHOD!r} but has no quantization_config.{KEY}, which "
                "holds its pattern and layout; start from the original checkpoint"
            )
        return None
    patterns = (metadata.pattern, *(entry.pattern for entry in metadata.layers.values()))
    if metadata.layout == "dense" and all(pattern.density == 1 for pattern in patterns):
        return None  # an ordinary W8A8 checkpoint, of which nothing is pruned yet
    if options.budget:
        raise CheckpointError(
            f"the source is already pruned to {metadata.pattern}, so {options.budget.goal} cannot choose patterns; "
            "start from the original checkpoint"
        )
    if metadata.pattern != options.pattern:
        raise CheckpointError(
            f"the source is already pruned to {metadata.pattern}, --sparsity asks for {options.pattern}; pruning "
            "twice loses more than it must, so start from the original checkpoint, or give --sparsity "
            f"{metadata.pattern.ratio} to change the layout only"
        )
    return metadata


def _require_fitting(
    checkpoint: Checkpoint, options: ConvertOptions, source: Quantization | None, converted: Metadata | None
) -> None:
    """Raise CheckpointError or CalibrationError for an option that does not fit the source."""
    architecture = architectures.architecture_of(checkpoint.config)
    if options.layout == "packed" and architecture not in architectures.FAMILIES:
        raise CheckpointError(
            f"--layout packed does not go with the architecture {shown(architecture)}, which is not known: vLLM "
            "reorders rows of some models while loading them, such as Llama 4's, and finds them by names that packed "
            "weights do not have; use --layout dense or slided"
        )
    if source and any(
        _quant(options, scheme) != (options.quant or scheme.quant) for scheme in source.schemes
    ):
        raise CheckpointError(
            f"--quant {options.quant} contradicts the source, whose weights are {source.quant} already; leave "
            "--quant out, or start from the original float checkpoint"
        )
    if converted:
        conflicts = {
            "--ignore": bool(options.ignore),
            "--linear": options.linear is not None,
            "--layer": bool(options.layer_patterns),
            "--skip": bool(options.skip),
            "--calib": options.calibration is not None,
            f"--method {options.method}": options.method not in (None, methods.DEFAULT),
        }
        for option in (option for option, is_given in conflicts.items() if is_given):
            raise CheckpointError(
                f"{option} cannot be used with a source that is already pruned, as only its layout changes; "
                "start from the original checkpoint"
            )
    if source and options.calibration and not is_bitnet(checkpoint.config):
        raise CalibrationError(
            f"calibration updates float weights, but the source holds {source.quant} ones; start from the original "
            "checkpoint, or prune its quantized weights: --method magnitude without --calib"
        )


# The choice of layers and patterns


def _choose_patterns(
    checkpoint: Checkpoint,
    source: Quantization | None,
    options: ConvertOptions,
    routed: Mapping[str, Sequence[str]],
    by_budget: Mapping[str, Pattern | None] | None,
) -> tuple[dict[str, Pattern | None], dict[str, str], dict[str, str]]:
    """Return the pattern of each linear layer, None for those not pruned; and `kept` and `skipped` of the plan."""
    chosen, kept, groups = _choose_layers(checkpoint, source, options, routed)
    by_name = architectures.matched(chosen, groups, options.skip, BY_SKIP)
    skipped = {
        name: BY_SKIP if name in by_name else BY_BUDGET
        for name in chosen
        if name in by_name or (by_budget is not None and by_budget.get(name) is None)
    }
    pruned: Mapping[str, Pattern | None] = by_budget or _patterns(chosen, groups, options)
    patterns = {name: None if name in skipped else pruned[name] for name in chosen}
    if not any(patterns.values()):
        raise CheckpointError("every linear layer is skipped, so nothing is left to prune; skip fewer")
    return patterns, kept, skipped


def _choose_layers(
    checkpoint: Checkpoint,
    source: Quantization | None,
    options: ConvertOptions,
    routed: Mapping[str, Sequence[str]],
) -> tuple[list[str], dict[str, str], list[tuple[str, ...]]]:
    """Return the linear layers to quantize, those to leave unchanged with the reasons, and the groups that vLLM fuses.

    Routed experts are included only if they are left unchanged.
    """
    names = list(checkpoint.tensors)
    family = architectures.family_of(checkpoint.config, names, options.linear)
    candidates = family.layers(names)
    if options.linear is not None:
        matrices = [
            n for n in architectures.UNKNOWN.layers(names) if len(checkpoint.require(n + WEIGHT).shape) == 2
        ]
        selected = architectures.matched(matrices, family.groups(matrices), [options.linear], "--linear")
        candidates = [name for name in candidates if name in selected]
    if not candidates:
        prefix = family.prefix(names)
        raise CheckpointError(
            f"none of the {len(names)} tensors is a linear layer by the names expected ({family.linear.pattern}); "
            + (
                f"they begin with {shown(prefix)}: save the model without its wrapper"
                if prefix
                else "name them yourself: --linear REGEX, searched in layer names"
            )
        )
    if options.linear is None:
        _require_complete(checkpoint, family, candidates, bool(routed))
    expert_groups = [tuple(experts) for experts in routed.values()]
    layers = [*candidates, *(name for experts in expert_groups for name in experts)]
    ignored = architectures.matched(
        layers, [*family.groups(candidates), *expert_groups], options.ignore, BY_IGNORE
    )
    kept = {name: BY_IGNORE for name in layers if name in ignored}
    for name in layers:
        if (
            source
            and checkpoint.require(name + WEIGHT).dtype in FLOATS
            and not _scheme(checkpoint, name, source)
        ):
            kept.setdefault(name, BY_SOURCE)
    for name, stored in checkpoint.tensors.items():
        if len(stored.spec.shape) == 3 and architectures.joined_experts(name):
            kept[name] = _joined(stored.spec)
    chosen = [name for name in candidates if name not in kept]
    if not chosen:
        raise CheckpointError("every linear layer is ignored, so nothing is left to prune; ignore fewer")
    return chosen, kept, family.groups(chosen)


def _require_complete(
    checkpoint: Checkpoint, family: architectures.Family, layers: Sequence[str], routed: bool
) -> None:
    """Raise CheckpointError if linear layers are missing."""
    if missing := family.missing(layers):
        raise CheckpointError(
            f"{missing[0]} is missing, but layers that vLLM fuses with it are present ({len(missing)} such); the "
            "checkpoint is incomplete: fetch it again"
        )
    blocks = {match[1] for match in map(_BLOCK.search, layers) if match}
    expected: Any = text_config(checkpoint.config).get("num_hidden_layers")
    if type(expected) is not int or len(blocks) == expected:
        return
    if len(blocks) < expected or not routed:  # some mixtures of experts have more, to predict further
        raise CheckpointError(
            f"config.json says num_hidden_layers is {expected}, but {checkpoint.folder} has linear layers of "
            f"{len(blocks)} blocks; the checkpoint is incomplete, or the config another model's: fetch it again"
        )


def _joined(spec: TensorSpec) -> str:
    """Return why routed experts in one tensor are left unchanged.  Raises CheckpointError for quantized ones."""
    if spec.dtype not in FLOATS:
        raise CheckpointError(
            f"tensor {spec.name} holds several routed experts in {spec.dtype}, which cannot be written in a form that "
            "vLLM serves; start from the original checkpoint, or one with a tensor for each expert"
        )
    return JOINED


def _require_none_ignored(checkpoint: Checkpoint, source: Quantization, kept: Mapping[str, str]) -> None:
    """Raise CheckpointError for --ignore on a quantized layer of a source that is requantized."""
    for name, reason in kept.items():
        if reason == BY_IGNORE and _scheme(checkpoint, name, source):
            raise CheckpointError(
                f"--ignore covers {name}, which cannot be left unchanged, because the source is requantized; "
                "use --skip to leave it unpruned, or start from the original float checkpoint"
            )


def _quantized(checkpoint: Checkpoint, source: Quantization, excluded: Container[str]) -> dict[str, str]:
    """Return the quantized matrices of a requantized source that are not among the ``excluded`` layers."""
    return {
        name: QUANTIZED
        for name in architectures.layer_names(checkpoint.tensors)
        if name not in excluded
        and _scheme(checkpoint, name, source)
        and checkpoint.require(name + WEIGHT).dtype not in FLOATS
    }


def _float_heads(checkpoint: Checkpoint, source: Quantization | None) -> dict[str, Scheme]:
    """Return the quantized lm_heads to dequantize, with their schemes."""
    heads: dict[str, Scheme] = {}
    for name in filter(architectures.HEAD.search, architectures.layer_names(checkpoint.tensors)):
        scheme = _scheme(checkpoint, name, source)
        if source and scheme and not source.loads_head(name):
            require_quantized(checkpoint, name, source)
            heads[name] = scheme
    return heads


def _patterns(
    chosen: Sequence[str], groups: Sequence[tuple[str, ...]], options: ConvertOptions
) -> dict[str, Pattern]:
    """Return the pattern of each layer: that of the last match in ``layer_patterns``, or the common one."""
    patterns = dict.fromkeys(chosen, options.pattern)
    for regex, pattern in options.layer_patterns:
        patterns |= dict.fromkeys(architectures.matched(chosen, groups, [regex], "--layer"), pattern)
    return patterns


def _commonest(checkpoint: Checkpoint, entries: Mapping[str, LayerEntry]) -> Pattern:
    """Return the pattern of most weights."""
    weights: Counter[Pattern] = Counter()
    for name, entry in entries.items():
        weights[entry.pattern] += entry.in_features * checkpoint.require(name + WEIGHT).rows
    return weights.most_common(1)[0][0]


def _other_matrices(checkpoint: Checkpoint, pruned: Container[str]) -> Iterator[str]:
    """Yield the layers of two-dimensional weights that are neither pruned nor embeddings."""
    for name, stored in checkpoint.tensors.items():
        layer = name.removesuffix(WEIGHT)
        is_matrix = layer != name and len(stored.spec.shape) == 2
        if is_matrix and layer not in pruned and not _TABLE.search(layer):
            yield layer


def _scheme(checkpoint: Checkpoint, layer: str, source: Quantization | None) -> Scheme | None:
    return source.scheme(layer, checkpoint.require(layer + WEIGHT).dtype) if source else None


def _in_features(
    checkpoint: Checkpoint, layer: str, source: Quantization | None, converted: Metadata | None
) -> int:
    """Return K of a layer to quantize, after checking dtype and shape of its weight and scale."""
    if source is None:
        return require_float(checkpoint, layer).shape[1]
    spec = require_quantized(checkpoint, layer, source)
    if converted is None:
        return spec.shape[1]
    require_shape(checkpoint, converted, layer)
    return converted.layers[layer].in_features


# The output


def _quant(options: ConvertOptions, scheme: Scheme | None) -> str:
    """Return the output type of a layer: the source's, unless that has per-block scales and is dequantized."""
    if scheme and not scheme.block:
        return scheme.quant
    return options.quant or (scheme.quant if scheme else "int8")


def _part(
    stored: StoredTensor, options: ConvertOptions, layers: Mapping[str, _Layer], rewritten: bool
) -> Part:
    """Return the part of a tensor that is not dropped."""
    spec, name = stored.spec, stored.spec.name.removesuffix(WEIGHT)
    if not spec.name.endswith(WEIGHT) or name not in layers:
        return Part(spec, stored.file, (spec,))
    layer, rows = layers[name], spec.shape[0]
    pattern, k, scheme = layer.pattern, layer.in_features, layer.scheme
    columns = LayerEntry(pattern, k).columns(options.layout) if pattern else k
    out = [TensorSpec(spec.name, KINDS[_quant(options, scheme)][1], (rows, columns))]
    if isinstance(pattern, SlidePattern) and options.layout == "packed":
        out = [
            TensorSpec(name + COMPRESSED, out[0].dtype, (rows, places(pattern, k))),
            TensorSpec(name + BITMASK, "U8", (rows, -(-k // BYTE))),
            TensorSpec(name + SHAPE, "I64", (2, 1)),
        ]
    if scheme is None or (rewritten and scheme.strategy != "channel"):
        out.append(TensorSpec(name + SCALE, "F32", (rows, 1)))
    return Part(spec, stored.file, tuple(out), name, k, pattern, scheme)


def _float_part(checkpoint: Checkpoint, stored: StoredTensor, scheme: Scheme) -> Part:
    """Return the part of a weight to dequantize, to the dtype of the largest float tensor, the embedding."""
    floats = [tensor.spec for tensor in checkpoint.tensors.values() if tensor.spec.dtype in FLOATS]
    dtype = max(floats, key=lambda spec: spec.nbytes).dtype
    return Part(stored.spec, stored.file, (stored.spec._replace(dtype=dtype),), scheme=scheme)


def _dropped(requantized: Mapping[str, Scheme], heads: Mapping[str, Scheme]) -> Iterator[str]:
    """Yield the names of scales that are not copied: of layers that are requantized, and of float heads."""
    for layer, scheme in requantized.items():
        yield from (layer + suffix for suffix in _ACTIVATIONS)
        if scheme.strategy != "channel":
            yield layer + scheme.scale
    for layer, scheme in heads.items():
        yield from (layer + suffix for suffix in (scheme.scale, *_ACTIVATIONS))


def _rewriting(requantized: Iterable[Scheme], heads: Iterable[str], zero_points: int) -> Iterator[str]:
    """Describe the changes to the source's quantization."""
    counts: Counter[str] = Counter()
    for scheme in requantized:
        if scheme.block:
            rows, columns = scheme.block
            counts[f"dequantized from blocks of {rows} x {columns} and quantized again per channel"] += 1
        elif scheme.activations == "static":
            counts[
                "static activation scales removed, as activations are now quantized dynamically per token"
            ] += 1
        elif scheme.activations == "dynamic":
            counts["activations are now quantized per token instead of per tensor"] += 1
        elif scheme.activations == "asymmetric":
            counts["activations are now quantized symmetrically"] += 1
        elif scheme.strategy == "tensor":
            counts["per-tensor scales expanded to per-channel, which experts need"] += 1
    yield from (f"{count} layers: {words}" for words, count in counts.items())
    yield from (
        f"{name} dequantized, as vLLM loads a quantized one only if a target names it" for name in heads
    )
    if zero_points:
        yield f"{zero_points} zero points removed, as the weights are symmetric"


def _block(
    old: dict[str, Any] | None,
    source: Quantization | None,
    rewritten: bool,
    options: ConvertOptions,
    kept: Mapping[str, str],
    heads: Mapping[str, Scheme],
) -> dict[str, Any]:
    """Return the quantization_config of the output."""
    if old is None or source is None:
        return new_block(options.quant or "int8", ignore_list(_ignore_names(kept)))
    if rewritten:
        replaced = source.method == FP8_METHOD  # with the source's ignore list
        kept = {name: reason for name, reason in kept.items() if replaced or not source.ignores(name)}
        return rewritten_block(old, source, partial(_quant, options), [*_ignore_names(kept), *heads])
    return {**old, **({"ignore": [*source.ignore, *heads]} if heads else {})}


def _ignore_names(kept: Mapping[str, str]) -> Iterator[str]:
    for name, reason in kept.items():
        experts = architectures.joined_experts(name) if reason == JOINED else None
        yield from [architectures.inside(experts)] if experts else architectures.serving_names(name)


def _config(checkpoint: Checkpoint, block: dict[str, Any], metadata: Metadata) -> dict[str, Any]:
    config = {key: value for key, value in checkpoint.config.items() if key not in QUANTIZATION}
    if isinstance(text := config.get(TEXT_CONFIG), dict):
        config[TEXT_CONFIG] = {key: value for key, value in text.items() if key not in QUANTIZATION}
    if architectures.architecture_of(config) in architectures.FAMILIES:
        config.pop("auto_map", None)  # names code, which is not copied; transformers and vLLM have the model
    block["quant_method"] = COMPRESSED_TENSORS if metadata.layout == "dense" else QUANT_METHOD
    block.pop("sparsity_config", None)  # refused by newer vLLM; our metadata replace it
    block.pop(STAMP, None)
    block[KEY] = metadata.to_json()
    config["quantization_config"] = block
    return config
