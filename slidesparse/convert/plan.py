"""The plan of a conversion: how each source tensor is written, decided and checked before anything is written."""

from __future__ import annotations

import contextlib
import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import filterfalse
from typing import Any

import torch
from torch import nn

import slidesparse
from slidesparse.calibrate.model import Model
from slidesparse.calibrate.rotation import untie_head
from slidesparse.checkpoint import names as naming
from slidesparse.checkpoint import storage
from slidesparse.checkpoint.bitnet import is_bitnet
from slidesparse.checkpoint.metadata import COMPRESSED_TENSORS, KEY, QUANT_METHOD, STAMP, LayerEntry, Metadata
from slidesparse.checkpoint.names import SCALE, WEIGHT
from slidesparse.checkpoint.skeleton import Skeleton
from slidesparse.checkpoint.storage import FLOATS, Checkpoint, CheckpointError, TensorSpec
from slidesparse.checkpoint.w8a8 import KINDS, quantize_head
from slidesparse.convert.options import ConvertOptions
from slidesparse.convert.source import Floats, Source, source_of
from slidesparse.errors import CalibrationError, shown
from slidesparse.pattern import Pattern, SlidePattern
from slidesparse.serving import NotServedError, Serving, Skeletons
from slidesparse.serving import stored as stored_specs

# Reasons for leaving a two-dimensional weight unchanged
BY_IGNORE, BY_SOURCE, NOT_LINEAR = (
    "--ignore",
    "not quantized in the source",
    "not a linear layer of a transformer block",
)
UNSERVED = "vLLM does not quantize it"
SPLIT = "stored as one matrix of several layers"
JOINED = "routed experts in one tensor of another form, which vLLM serves unquantized"
# Reasons for quantizing a linear layer without pruning it
BY_LAYER, BY_BUDGET = "--layer", "by the budget"
ROUTED = r"routed experts: --layer '\.experts\.=PATTERN' prunes them, too"
QUANTIZED = "quantized in the source, but not a linear layer of a transformer block"


@dataclass(frozen=True)
class Output:
    """A source tensor and the tensors to write for it: itself, a converted weight and its scale, or none."""

    source: TensorSpec
    file: str
    specs: tuple[TensorSpec, ...]
    layer: str | None = None  # name of the layer, if the tensor is a weight to quantize
    pattern: Pattern | None = None  # None: not pruned
    is_limit: bool = False  # whether it is no weight but a limit of a clamp, and may be infinite


@dataclass(frozen=True)
class ConversionPlan:
    """The plan of a whole conversion."""

    source: Source
    options: ConvertOptions
    pattern: Pattern  # pattern of all layers, or of most weights
    quant: str  # "int8", "fp8" or "fp8 and int8"
    outputs: tuple[Output, ...]
    kept: dict[str, str]  # 2-D weights that are not changed -> reason
    skipped: dict[str, str]  # linear layers that are quantized but not pruned -> reason
    config: dict[str, Any]  # the config.json to write
    head: str | None  # the lm_head, if floats of it are quantized
    source_of: Callable[[str], Source]  # what makes the codes of a layer
    # the quantized linear layers of blocks, those together that vLLM may fuse; () if transformers cannot run the model
    groups: tuple[tuple[str, ...], ...]

    @property
    def checkpoint(self) -> Checkpoint:
        """The checkpoint to convert."""
        return self.source.checkpoint

    @property
    def patterns(self) -> dict[str, Pattern]:
        """The pruned layers, each with its pattern."""
        return {output.layer: output.pattern for output in self.outputs if output.layer and output.pattern}

    @property
    def unpruned(self) -> list[str]:
        """The linear layers of blocks that are quantized but not pruned."""
        return [name for name in self.skipped if name != self.head]

    @property
    def rewritten(self) -> str:
        """A description of the changes to the source's quantization."""
        layers = [output.layer for output in self.outputs if output.layer and output.layer != self.head]
        return "; ".join(self.source.changes(layers))

    @cached_property
    def bytes_in(self) -> int:
        """The bytes of all source tensors, unpacked."""
        return sum(output.source.nbytes for output in self.outputs)

    @cached_property
    def bytes_out(self) -> int:
        """The bytes of all tensors written."""
        return sum(spec.nbytes for output in self.outputs for spec in output.specs)

    def specs(self, file: str) -> list[TensorSpec]:
        """Return the tensors of an output file."""
        return [spec for output in self.outputs if output.file == file for spec in output.specs]

    def disk_bytes(self) -> int:
        """Return the bytes of all safetensors files written, including headers."""
        return sum(storage.plan_file(self.specs(file))[2] for file in self.checkpoint.files)

    def small_files(self) -> Iterator[tuple[str, bytes]]:
        """Yield the names and contents of the JSON files; config.json, which completes the checkpoint, comes last."""
        if self.checkpoint.index is not None:
            files = {spec.name: output.file for output in self.outputs for spec in output.specs}
            old = self.checkpoint.index.get("metadata")
            metadata = {**(old if isinstance(old, dict) else {}), "total_size": self.bytes_out}
            yield storage.INDEX, _json({"metadata": metadata, "weight_map": dict(sorted(files.items()))})
        yield storage.CONFIG, _json(self.config)


def _json(value: object) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()


class Planner:
    """Plans conversions of one checkpoint; nothing is written.

    Args:
        opened: makes the source of a checkpoint: see `slidesparse.convert.source.source_of`.

    Raises the errors of `slidesparse.convert.stream.convert`.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        options: ConvertOptions,
        opened: Callable[[Checkpoint, str | None, bool], Source] = source_of,
    ) -> None:
        self.options, self.skeleton, self.original = options, Skeleton(checkpoint), checkpoint
        self.head = self._asked_head()  # the lm_head, if it is to be quantized
        if self.head:
            self.skeleton = Skeleton(untie_head(checkpoint, asked=True))
        # Of the linear layers, by the checkpoint's names, why vLLM does not quantize some, and vLLM's names of all
        self.unquantized, self.served_names = dict[str, str](), dict[str, list[str]]()
        self.checkpoint = checkpoint = self.skeleton.with_single_experts()
        self.routed = naming.experts(checkpoint.tensors)
        self.source = opened(checkpoint, options.quant, bool(self.routed))
        if self.source.metadata:
            _require_layout_alone(self.source.metadata, options)
        elif options.calibration:
            self.source.require_calibration()
        self._of_head = self._head_source()
        pruned = self.source.metadata.layers if self.source.metadata else {}
        is_ternary, scheme = is_bitnet(checkpoint.config), self.source.quantization.scheme
        self.skeleton.require_tensors(
            {name: entry.in_features for name, entry in pruned.items()},
            lambda layer, dtype: is_ternary or bool(scheme(layer, dtype)),
        )

    def _asked_head(self) -> str | None:
        """Return the lm_head if a --layer option names it: one that matches it and no linear layer of a block."""
        asked = [option for option in self.options.layer_patterns if self._names_head(option[0])]
        if not asked:
            return None
        text, pattern = asked[-1]
        head = self.skeleton.head_names[0]
        if pattern is None or pattern.density < 1:
            raise CheckpointError(
                f"--layer {text!r}: {head}, which predicts tokens, can be quantized, but not pruned: {text}=dense"
            )
        return head

    def _names_head(self, text: str, option: str = "--layer") -> bool:
        names, layers = self.skeleton.head_names, self.skeleton.layers
        return bool(naming.search(text, names, option)) and not naming.search(text, layers, option)

    def _head_source(self) -> Source:
        """Return what quantizes the floats of the lm_head.  Raises CheckpointError if that cannot be."""
        if not self.head:
            return self.source
        if self.checkpoint.require(self.head + WEIGHT).dtype not in FLOATS:
            remedy = "leave the option out"
            if self.head in self.source.heads:  # which are written as floats
                remedy = (
                    "let a target in its quantization_config name it, or start from the original checkpoint"
                )
            raise CheckpointError(
                f"--layer: {self.head} cannot be quantized: it is quantized already; {remedy}"
            )
        if isinstance(self.source, Floats):
            return self.source
        layers = (name for name in self.skeleton.layers if not self.source.is_float(name))
        commonest = Counter(map(self.source.quant, layers)).most_common(1)
        return Floats(self.checkpoint, commonest[0][0] if commonest else None)

    def _source(self, layer: str) -> Source:
        """Return what makes the codes of a layer."""
        return self._of_head if layer == self.head else self.source

    @property
    def experts(self) -> list[str]:
        """The matrices of routed experts, each stored as a tensor."""
        return [name for names in self.routed.values() for name in names]

    @cached_property
    def model(self) -> Model:
        """The model on the device of calibration, or on the CPU."""
        calibration = self.options.calibration
        return Model(self.skeleton, calibration.torch_device if calibration else torch.device("cpu"))

    def plan(self, by_budget: Mapping[str, Pattern | None] | None = None) -> ConversionPlan:
        """Plan a conversion.

        Args:
            by_budget: the pattern of each layer chosen for the budget, None for dense layers; absent before the choice.
        """
        source, options = self.source, self.options
        patterns: dict[str, Pattern | None]
        kept: dict[str, str] = {}
        skipped: dict[str, str] = {}
        if source.metadata:
            patterns = {name: entry.pattern for name, entry in source.metadata.layers.items()}
        else:
            patterns, kept, skipped = self._choose_patterns(by_budget)
            excluded = {*kept, *patterns, *source.heads}
            unprunable = dict.fromkeys(source.also_quantized(excluded), QUANTIZED)
            skipped |= unprunable
            patterns |= dict.fromkeys(unprunable)
            treatments: tuple[dict[str, Any], ...] = (patterns, kept, skipped)
            for name, sibling in self.unread().items():
                for treatment in treatments:
                    if sibling in treatment:
                        treatment[name] = treatment[sibling]
        widths = {name: self._source(name).in_features(name) for name in patterns}
        if not source.metadata:
            kept |= self._other_matrices({*kept, *patterns, *source.heads})
            self._require_apart(patterns, kept)
        experts = {*self.experts}
        pruned = {name: LayerEntry(pattern, widths[name]) for name, pattern in patterns.items() if pattern}
        entries = {name: entry for name, entry in pruned.items() if name not in experts}
        of_experts = {pattern for name in experts if isinstance(pattern := patterns.get(name), SlidePattern)}
        metadata = Metadata(
            self._commonest(entries or pruned) if by_budget else options.pattern,
            options.layout,
            entries,
            f"slidesparse {slidesparse.__version__}",
            source.metadata.experts
            if source.metadata
            else tuple(sorted(of_experts, key=lambda p: p.density)),
        )
        dropped = source.dropped([name for name in patterns if name != self.head])
        block = source.config(patterns, self._ignored(kept))
        if self.head:
            layers = naming.layer_names(self.checkpoint.tensors)
            quantize_head(block, self.head, self._of_head.quant(self.head), layers)
        return ConversionPlan(
            source=source,
            options=options,
            pattern=metadata.pattern,
            quant=" and ".join(sorted({self._source(name).quant(name) for name in patterns})),
            outputs=tuple(self._output(name, patterns, entries, dropped) for name in self._written(kept)),
            kept=kept,
            skipped=skipped,
            config=self._config(block, metadata),
            head=self.head,
            source_of=self._source,
            groups=self._groups({name for name in patterns if name != self.head}),
        )

    # The choice of layers and patterns

    def _choose_patterns(
        self, by_budget: Mapping[str, Pattern | None] | None
    ) -> tuple[dict[str, Pattern | None], dict[str, str], dict[str, str]]:
        """Return the pattern of each linear layer, None for those not pruned; and `kept` and `skipped` of the plan."""
        chosen, kept = self._choose_layers()
        experts = [name for name in self.experts if name not in kept]
        patterns: dict[str, Pattern | None] = dict.fromkeys(chosen, self.options.pattern)
        patterns |= dict.fromkeys(experts)
        reasons = dict.fromkeys(experts, ROUTED)
        if by_budget is not None:
            patterns |= {name: by_budget[name] for name in chosen if name in by_budget}
            reasons |= dict.fromkeys(by_budget, BY_BUDGET)
        groups = [*self._groups(chosen)]
        blocks = range(len(self.skeleton.blocks))
        places = {name: place for block in blocks for name, place in self.skeleton.experts(block).items()}
        for names in self.routed.values():  # gate and up are one matrix in vLLM, down another
            kinds = {
                name: places[name].parameter
                if name in places
                else self.checkpoint.require(name + WEIGHT).shape
                for name in names
            }
            groups += (tuple(n for n in names if kinds[n] == kind) for kind in dict.fromkeys(kinds.values()))
        given: dict[str, Pattern | None] = {}  # by all options together
        for regex, pattern in self.options.layer_patterns:
            if self.head and self._names_head(regex):
                continue
            found = naming.search(regex, [*patterns, *kept], "--layer")
            if found and found <= kept.keys():
                name = min(found)
                raise CheckpointError(
                    f"--layer {shown(regex)} matches only layers that stay unchanged, such as {name} ({kept[name]}); "
                    f"leave it out{f', or {BY_IGNORE}' * (kept[name] == BY_IGNORE)}"
                )
            given |= dict.fromkeys(naming.matched(regex, [*patterns], "--layer"), pattern)
        naming.require_alike(groups, given, "--layer")
        for name, pattern in given.items():
            asked = pattern or (by_budget or {}).get(name, self.options.pattern)
            patterns[name] = asked if asked and asked.density < 1 else None
        if self.head:  # after the options, so that those for layers of blocks do not prune it
            patterns[self.head] = None
        skipped = {name: reasons.get(name, BY_LAYER) for name, pattern in patterns.items() if pattern is None}
        quantizes_experts = experts and self.options.pattern.density == 1
        if not any(patterns.values()) and not quantizes_experts:
            hint = f" ({ROUTED})" if experts else ""
            fewer = "leave fewer dense" + ", or ignore fewer" * (BY_IGNORE in kept.values())
            raise CheckpointError(f"no linear layer is left to prune; {fewer}{hint}")
        return patterns, kept, skipped

    def _choose_layers(self) -> tuple[list[str], dict[str, str]]:
        """Return the linear layers to quantize, but for routed experts, and all to leave unchanged with the reasons."""
        candidates = self.skeleton.layers
        if not candidates:
            raise CheckpointError(
                f"{type(self.skeleton.model).__name__} has no linear layers in its blocks that are stored as [N, K]; "
                "such models cannot be converted"
            )
        layers = [*candidates, *self.experts]
        groups = [*self._groups(candidates)] if self.options.ignore else []
        groups += map(tuple, self.routed.values())
        # Other tools are told to ignore lm_head, which is left as it is here unless --layer names it
        of_head = {text for text in self.options.ignore if self._names_head(text, BY_IGNORE)}
        if of_head and self.head:
            raise CheckpointError(
                f"--ignore {min(of_head)!r} and --layer both name {self.head}; leave one of them out"
            )
        others = [text for text in self.options.ignore if text not in of_head]
        ignored = {name for text in others for name in naming.matched(text, layers, BY_IGNORE)}
        naming.require_alike(groups, dict.fromkeys(ignored), BY_IGNORE)
        kept = {name: BY_IGNORE for name in layers if name in ignored}
        kept |= {name: self.unquantized[name] for name in layers if name in self.unquantized}
        if self.source.requantizes and (
            quantized := [name for name in kept if not self.source.is_float(name)]
        ):
            raise CheckpointError(
                f"--ignore covers {quantized[0]}, which cannot be left unchanged, because the source is requantized; "
                f"--layer '{re.escape(quantized[0])}=dense' leaves it unpruned"
            )
        kept = {name: BY_SOURCE for name in layers if self.source.is_float(name)} | kept
        for name, stored in self.checkpoint.tensors.items():
            if (
                len(stored.spec.shape) == 3
                and naming.joined_experts(name)
                and name not in self.skeleton.joined
            ):
                if stored.spec.dtype not in FLOATS:
                    raise CheckpointError(
                        f"tensor {name} holds several routed experts in {stored.spec.dtype}, which vLLM cannot load; "
                        "start from the original checkpoint, or one with a tensor for each expert"
                    )
                kept[name] = JOINED
        chosen = [name for name in candidates if name not in kept]
        if not chosen and {*self.experts} <= kept.keys():
            reasons = ", ".join(sorted({*kept.values()}))
            remedy = "leave --ignore out, or ignore fewer"
            if BY_IGNORE not in kept.values():
                remedy = "if its weights are floats, remove quantization_config from its config.json"
            raise CheckpointError(
                f"no linear layer is left to prune: all stay unchanged ({reasons}); {remedy}"
            )
        return chosen, kept

    def _groups(self, layers: Collection[str]) -> tuple[tuple[str, ...], ...]:
        """Return ``layers``, those together that vLLM may fuse; none of a model that transformers cannot run."""
        try:
            fused = self.model.fused()
        except CalibrationError:
            if self.options.calibration:
                raise
            return ()  # vLLM itself refuses a part of a fused layer
        groups = (tuple(name for name in group if name in layers) for group in fused)
        return tuple(filter(None, groups))

    def unread(self) -> dict[str, str]:
        """Return the layers that transformers drops but vLLM fuses with a layer of the model, each with that layer.

        They are the keys and values of layers of Gemma 3n and 4 that use those of an earlier layer.
        """
        layers = {naming.fused_name(name): name for name in self.skeleton.layers}
        unread = filterfalse(self.skeleton.reads, naming.layer_names(self.checkpoint.tensors))
        fused = {name: naming.fused_name(name) for name in unread}
        return {name: layers[whole] for name, whole in fused.items() if whole and whole in layers}

    def _commonest(self, entries: Mapping[str, LayerEntry]) -> Pattern:
        """Return the pattern of most weights."""
        weights: Counter[Pattern] = Counter()
        for name, entry in entries.items():
            weights[entry.pattern] += entry.in_features * self.checkpoint.require(name + WEIGHT).rows
        return weights.most_common(1)[0][0]

    def _other_matrices(self, excluded: Collection[str]) -> dict[str, str]:
        """Return the layers of other two-dimensional weights, but for embeddings, with the reasons to keep them."""
        tables = {
            self.skeleton.stored.get(name + WEIGHT)
            for name, module in self.skeleton.model.named_modules()
            if isinstance(module, nn.Embedding)
        }
        kept = {}
        for name, stored in self.checkpoint.tensors.items():
            layer = name.removesuffix(WEIGHT)
            if layer != name and len(stored.spec.shape) == 2 and layer not in excluded and name not in tables:
                other = SPLIT if self.skeleton.converted(name) else NOT_LINEAR
                kept[layer] = BY_SOURCE if self.source.is_float(layer) else other
        return kept

    def _require_apart(self, quantized: Collection[str], kept: Mapping[str, str]) -> None:
        """Raise CheckpointError for a matrix of which vLLM would take ``quantized`` layers for parts, to be ignored."""
        for name in quantized:
            if (fused := naming.fused_name(name)) in kept:
                raise CheckpointError(
                    f"{fused}{WEIGHT} and {name}{WEIGHT} are both in {self.checkpoint.folder}, and vLLM makes one "
                    "layer of them; remove that which is not of this model"
                )

    # The output

    def _written(self, kept: Collection[str]) -> Iterator[str]:
        """Yield the tensors to write something for: of joined experts, each one alone, unless they are kept."""
        joined = self.skeleton.joined
        single = {name for names in joined.values() for name in names}
        for name in self.checkpoint.tensors:
            layer = name.removesuffix(WEIGHT)
            if layer not in kept if layer in single else joined.get(name, {}).keys() <= {*kept}:
                yield name

    def _output(
        self,
        name: str,
        patterns: Mapping[str, Pattern | None],
        entries: Mapping[str, LayerEntry],
        dropped: Collection[str],
    ) -> Output:
        """Return what is written for a tensor."""
        stored, layer = self.checkpoint.tensors[name], name.removesuffix(WEIGHT)
        spec = stored.spec
        if name in dropped:
            return Output(spec, stored.file, ())
        if layer in self.source.heads and layer != name:
            floats = (
                tensor.spec for tensor in self.checkpoint.tensors.values() if tensor.spec.dtype in FLOATS
            )
            largest = max(floats, key=lambda spec: spec.nbytes)  # the embedding
            return Output(spec, stored.file, (spec._replace(dtype=largest.dtype),))
        if layer == name or layer not in patterns:
            is_limit = name in self.skeleton.limits
            return Output(spec, stored.file, self.source.copies(spec), is_limit=is_limit)
        entry, rows = entries.get(layer), spec.shape[0]
        source = self._source(layer)
        columns = entry.columns(self.options.layout) if entry else source.in_features(layer)
        specs = [TensorSpec(name, KINDS[source.quant(layer)][1], (rows, columns))]
        if not source.copies_scale(layer):
            specs.append(TensorSpec(layer + SCALE, "F32", (rows, 1)))
        return Output(spec, stored.file, tuple(specs), layer, patterns[layer])

    def _ignored(self, kept: Mapping[str, str]) -> list[str]:
        """Return the entries of the ignore list for layers that are left unquantized by this conversion."""
        names: list[str] = []
        ignores = self.source.quantization.ignores
        for name, reason in kept.items():
            served = self.served_names.get(name, ())
            if not self.source.replaces_ignore and (ignores(name) or not self.source.requantizes):
                names += filterfalse(ignores, served) if ignores(name) else ()
                continue
            experts = naming.joined_experts(name) if reason == JOINED else None
            names += [naming.inside(experts)] if experts else naming.serving_names(name)
            # vLLM wants to read the names of all parts, also of those that Gemma 4 lacks
            names += (
                part for part in naming.fused_parts(name) if part + WEIGHT not in self.checkpoint.tensors
            )
            names += served
        return list(dict.fromkeys(names))

    def _config(self, block: dict[str, Any], metadata: Metadata) -> dict[str, Any]:
        config = storage.unquantized_config(self.checkpoint.config)
        config.pop("auto_map", None)  # names code, which is not copied; transformers has the model
        block["quant_method"] = COMPRESSED_TENSORS if metadata.layout == "dense" else QUANT_METHOD
        block.pop("sparsity_config", None)  # refused by newer vLLM; our metadata replace it
        block.pop(STAMP, None)
        block.pop(KEY, None)
        if metadata.layers or metadata.experts:  # else quantized experts alone, as of any other tool
            block[KEY] = metadata.to_json()
        config["quantization_config"] = block
        return config


def _require_layout_alone(metadata: Metadata, options: ConvertOptions) -> None:
    """Raise CheckpointError for an option that would change the weights of a source that is pruned already."""
    asked = {
        "--max-loss": options.budget,
        f"--sparsity {options.pattern.ratio}": options.pattern != metadata.pattern,
        "--ignore": options.ignore,
        "--layer": options.layer_patterns,
        "--calib": options.calibration,
        "--quant": options.quant,
    }
    degree = f"to {metadata.pattern}" if metadata.pattern.density < 1 else "in some layers"
    for option in filter(asked.get, asked):
        raise CheckpointError(
            f"{option} cannot be used with a source that is already pruned {degree}, as only its layout "
            f"changes, with --sparsity {metadata.pattern.ratio}; start from the original checkpoint"
        )


def ask(planner: Planner, skeletons: Skeletons) -> str:
    """Ask vLLM how it would serve the output, before anything is written, and tell the planner.

    Layers that vLLM builds without quantization, as some mixers of Mamba, stay unchanged, and those that it calls by a
    name of its own are ignored by that name.  Returns "", or why vLLM does not serve such a model on this machine.
    Raises CheckpointError where it would serve the source, but not the output, or with wrong weights.
    """
    plan = planner.plan()
    options, folder = naming.serving_options(plan.config), plan.checkpoint.folder
    refused = "vLLM, which is installed here, would not serve the converted checkpoint"
    hint = f"; it may be that it takes {planner.head} in floats: leave --layer out" if planner.head else ""
    if not plan.source.metadata:
        block = {key: value for key, value in plan.config["quantization_config"].items() if key != KEY}
        block["quant_method"] = COMPRESSED_TENSORS
        config = {**plan.config, "quantization_config": block}
        try:
            serving = skeletons.layers(folder, _unpacked(plan), config, **options)
        except NotServedError as error:
            original = planner.original
            with contextlib.suppress(NotServedError):
                skeletons.layers(folder, stored_specs(original), original.config, **options)
                raise CheckpointError(f"{refused}: {error}{hint}") from None
            return str(error)
        names: dict[str, list[str]] = {}
        for layer in serving.layers:
            for weight in layer.weights:
                names.setdefault(weight, []).append(layer.name)
        planned = {output.layer for output in plan.outputs if output.layer} & {*planner.skeleton.layers}
        if planned and not planned & serving.quantized:  # of experts it does not say
            raise CheckpointError(
                "vLLM, which is installed here, quantizes no linear layer of this model: it would load the converted "
                "weights as if they were floats, or not at all; serve the original checkpoint"
            )
        planner.unquantized = dict.fromkeys(planned - serving.quantized, UNSERVED)
        planner.served_names = names
        plan = planner.plan()

    def serve(plan: ConversionPlan) -> Serving:
        specs = [spec for output in plan.outputs for spec in output.specs]
        return skeletons.layers(folder, specs, plan.config, **options)

    served = None
    try:
        served = serve(plan)
    except NotServedError as error:
        # experts may be built without quantization, as those of FlexOlmo
        if planner.experts and isinstance(plan.source, Floats):
            reason = f"{UNSERVED}: {str(error).splitlines()[-1]}"
            planner.unquantized |= dict.fromkeys(planner.experts, reason)
            plan = planner.plan()
            with contextlib.suppress(NotServedError):
                served = serve(plan)
        if served is None:
            raise CheckpointError(f"{refused}: {error}{hint}") from None
    asked = [*plan.patterns, *([planner.head] if planner.head else [])]
    known = {*served.quantized, *planner.unread()}  # newer releases do not load what transformers drops
    lost = [name for name in asked if name not in known and not naming.is_expert(name)]
    if lost:
        raise CheckpointError(
            f"vLLM, which is installed here, would not serve {lost[0]} quantized; leave such layers unchanged by "
            "--ignore"
        )
    for layer in served.layers:
        patterns = {name: plan.patterns.get(name) for name in layer.weights if not naming.is_expert(name)}
        if len({*patterns.values()}) > 1:
            found = ", ".join(
                f"{name} {pattern.ratio if pattern else 'unpruned'}" for name, pattern in patterns.items()
            )
            raise CheckpointError(
                f"vLLM, which is installed here, fuses {found} into one layer; give all of them the same pattern"
            )
    return ""


def _unpacked(plan: ConversionPlan) -> Iterator[TensorSpec]:
    """Yield the tensors of a plan, [N, K] and without the scales that unquantized layers cannot load."""
    for output in plan.outputs:
        for spec in output.specs:
            if output.layer and spec.name == output.layer + WEIGHT:
                columns = plan.source_of(output.layer).in_features(output.layer)
                yield spec._replace(shape=(spec.shape[0], columns))
            elif not spec.name.endswith(SCALE):
                yield spec
