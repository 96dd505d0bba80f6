"""vLLM's compressed-tensors config with our scheme wrapped around W8A8 layers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import regex  # with which vLLM compiles ignore and targets
from slidesparse.vllm_patch import compat, experts, fusion
from slidesparse.vllm_patch.loading import AGAIN
from slidesparse.vllm_patch.scheme import W8A8, SlideSparseScheme, conclude
from slidesparse.vllm_patch.summary import LayerSummary
from torch.nn.modules.module import register_module_module_registration_hook
from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
    CompressedTensorsConfig,
)
from vllm.platforms import current_platform

from slidesparse import flags
from slidesparse.checkpoint.metadata import COMPRESSED_TENSORS, KEY, QUANT_METHOD, LayerEntry, Metadata
from slidesparse.checkpoint.names import FUSED
from slidesparse.errors import shown, warn_once
from slidesparse.flags import REQUIRED, SPARSITY, Flags
from slidesparse.gemm import SPARSE
from slidesparse.pattern import DENSE_WEIGHT, Pattern, SlidePattern
from slidesparse.resolve import (
    CONVERT_STORED,
    NO_FP8_ACTIVATIONS,
    NOT_PRUNED,
    STAMP,
    WHAT_IT_TAKES,
    Capability,
    Resolution,
    ResolveError,
    claim,
    needs_plugin,
    or_unset,
    resolve,
    stamp,
    unread_storage,
)
from slidesparse.versions import VLLM_TESTED_TEXT

WEIGHT_ONLY = "CompressedTensorsW8A16Fp8"
HEADS = {"total_num_heads": "num_attention_heads", "total_num_kv_heads": "num_key_value_heads"}


def refusal(parts: Mapping[str, Any], scheme: object = None) -> str | None:
    """Return why we do not serve layers, as text for the summary line; None for those that we do.

    Args:
        parts: vLLM's QuantizationArgs of their ``weights`` and ``input_activations``, each perhaps None.
        scheme: vLLM's own scheme of such a layer.
    """
    weights, inputs = parts.get("weights"), parts.get("input_activations")
    # MXFP8 has scales for groups, and a scheme of vLLM's own, in which nothing would tell that a flag has no effect
    if not weights or not inputs or {weights.num_bits, inputs.num_bits} != {8} or weights.strategy == "group":
        return type(scheme).__name__.removeprefix("CompressedTensors") if scheme else "not W8A8"
    if weights.type != inputs.type:  # of which vLLM heeds the weights' alone
        return f"8-bit {weights.type} weights with {inputs.type} activations"
    if weights.strategy == "block":
        return "block FP8"
    if not inputs.dynamic:
        return "static activations"
    return None if inputs.symmetric else "asymmetric activations"


@register_quantization_config(QUANT_METHOD)
class SlideSparseConfig(CompressedTensorsConfig):
    """Compressed-tensors config that runs W8A8 layers that obey the pattern by slidesparse, all others by vLLM."""

    resolution: Resolution
    metadata: Metadata | None
    summary: LayerSummary
    key: str  # what compiled graphs depend on, except for decisions that depend on the weights

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if not args and not kwargs:  # how vLLM makes a config for a model that has none
            raise ResolveError(
                f"--quantization {QUANT_METHOD} is for a quantized checkpoint; {WHAT_IT_TAKES}"
            )
        super().__init__(*args, **kwargs)

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, Any] | None, user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        """Select this method for the checkpoints that `slidesparse.resolve.claim` claims.

        vLLM calls this in the front-end process when it reads the config of a model or of a draft model; only workers
        parse the latter.
        """
        config = hf_quant_cfg or {}
        resolution = claim(config, user_quant, _machine)
        unknown = flags.unknown_names()
        if unknown and (resolution or config.get("quant_method") == COMPRESSED_TENSORS):
            warn_once(f"environment variables that SlideSparse does not read: {', '.join(unknown)}")
        if config.get("quant_method") == COMPRESSED_TENSORS and not (
            resolution and needs_plugin(config, user_quant)
        ):
            _warn_without_effect(config, resolution is not None)
        if resolution is None:
            return None
        config_dicts = _config_dicts(hf_quant_cfg, hf_config)
        stamp(resolution, config_dicts)
        for config_dict in config_dicts:
            _add_head_counts(config_dict, hf_config)
        return QUANT_METHOD

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> SlideSparseConfig:
        """Read the resolution that the front end has stamped into ``config``, and parse the rest as vLLM does."""
        if STAMP not in config:  # no front-end process resolved it, as in a program that makes configs itself
            platform, capability = _machine()
            stamp(resolve(config, Flags.from_environment(), platform == "cuda", capability), [config])
        resolution = Resolution.of_stamp(config[STAMP])
        _require_readable(config)
        stored = unread_storage(config)
        config.pop("sparsity_config", None)  # newer vLLM rejects this key, whose content is in the resolution
        try:
            quant_config = super().from_config(config)
        except (AssertionError, AttributeError, KeyError, TypeError, ValueError) as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")
            raise ResolveError(
                f"vLLM cannot read quantization_config of this checkpoint ({reason}); {AGAIN}"
            ) from error
        reasons = [refusal(parts) for parts in quant_config.target_scheme_map.values()]
        if all(reasons):
            found = f" ({', '.join(dict.fromkeys(filter(None, reasons)))})" if reasons else ""
            problem = f"no group of layers of this checkpoint is W8A8 with dynamic activations{found}"
            remedy = f". {stored}: {CONVERT_STORED}" if stored else f"; {WHAT_IT_TAKES}{or_unset()}"
            raise ResolveError(problem + remedy)
        quant_config.resolution = resolution
        quant_config.metadata = Metadata.of_config(config)
        quant_config.summary = LayerSummary()
        quant_config.key = _key(config, resolution)
        return quant_config

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        """Rename the layers of the metadata along with vLLM's own lists."""
        super().apply_vllm_mapper(hf_to_vllm_mapper)
        if self.metadata:
            self.metadata = replace(self.metadata, layers=hf_to_vllm_mapper.apply_dict(self.metadata.layers))

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        """Return the method for a layer: vLLM's own, but for experts that we may serve, which have no scheme.

        Raises ResolveError for quantized experts that vLLM has no kernel for.
        """
        method = self._method(layer, prefix)
        if method is not None and prefix in self.summary.dense:
            self._conclude_without_ours(method)
        return method

    def _method(self, layer: Any, prefix: str) -> Any:
        if not isinstance(layer, RoutedExperts):
            return super().get_quant_method(layer, prefix)
        compat.pad_no_products()
        ours = experts.method(self, layer, prefix)
        if not isinstance(ours, str):
            return ours
        try:
            method = super().get_quant_method(layer, prefix)
            if "NONE" in str(getattr(method, "fp8_backend", "")):
                raise NotImplementedError("no FP8 kernel for experts supports this platform")
        except (NotImplementedError, ValueError) as error:
            raise experts.missing_kernel(prefix, error) from error
        self.summary.count(prefix, f"MoE experts {ours}".strip())
        return method

    def _conclude_without_ours(self, method: Any) -> None:
        """Conclude after loading, by the ``method`` of a layer that vLLM serves, if there is none that we may serve."""
        process = method.process_weights_after_loading

        def process_and_conclude(layer: Any) -> None:
            process(layer)
            if not self.summary.concludes:
                self.summary.concludes = True
                if not compat.is_part():
                    conclude(self)

        method.process_weights_after_loading = process_and_conclude

    def get_scheme_dict(self, layer: Any, layer_name: str | None = None) -> Any:
        """Return the quantization of a layer, which a draft model's config names without vLLM's prefix for it."""
        return super().get_scheme_dict(layer, layer_name and layer_name.removeprefix(compat.OF_DRAFTS))

    def get_scheme(self, layer: Any, layer_name: str | None = None) -> Any:
        """Return vLLM's scheme for a layer, wrapped in `SlideSparseScheme` if that may serve it.

        Raises ResolveError if vLLM has no scheme for a linear layer, if parts of a fused one differ, and if
        quantization_config leaves a pruned one unquantized.
        """
        name = layer_name or self.summary.unnamed(layer)
        if not isinstance(layer, LinearBase):
            return self._head_scheme(layer, name)
        parts = self._parts(name)
        try:
            scheme = super().get_scheme(layer, layer_name)
        except NotImplementedError as error:
            reason = " ".join(str(error).split())
            raise ResolveError(
                f"{name}: vLLM does not support the quantization that quantization_config declares: {reason}; "
                f"{AGAIN}"
            ) from error
        except ValueError as error:
            fused = ", ".join(part.rpartition(".")[2] for part in parts)
            raise ResolveError(
                f"{name}: vLLM fuses {fused} into one layer, but quantization_config quantizes only some of them; "
                f"{AGAIN}, with all or none of them"
            ) from error
        listed = [found for part in parts if (found := self._listed(part))]
        self.summary.claimed.update(listed)
        if scheme is None and listed:
            subject = "it" if len(listed) == len(parts) else ", ".join(listed)
            raise ResolveError(
                f"{name}: the metadata say that {subject} was pruned, but ignore and targets of quantization_config "
                f"leave the layer unquantized; {AGAIN}"
            )
        reason = refusal(self.get_scheme_dict(layer, name) or {}, scheme) if scheme else "not quantized"
        if not reason and not isinstance(scheme, W8A8):
            self._replaced_by(type(scheme).__name__, name, bool(listed))
            reason = refusal({}, scheme)
        if not isinstance(scheme, W8A8):
            self.summary.count(name, reason)
            return scheme
        entry = None if reason else self._entry(name)
        if not self.summary.is_pending():  # the first layer
            self.summary.fusion = fusion.register(self.key, self.resolution)
        self.summary.expect(name, layer)
        return SlideSparseScheme(self, scheme, name, entry, reason)

    def _head_scheme(self, head: Any, name: str) -> Any:
        """Return the scheme of an lm_head.  Raises vLLM's ValueError, which it expects, if no target names it."""
        self.summary.count(name, "lm_head")
        scheme = super().get_scheme(head, name)
        if not isinstance(scheme, W8A8) or refusal(self.get_scheme_dict(head, name) or {}, scheme):
            return scheme
        self.summary.expect(name, head)
        return SlideSparseScheme(self, scheme, name, None, is_head=True)

    def patterns(self, entry: LayerEntry | None = None, of_experts: bool = False) -> list[Pattern]:
        """Return the patterns that the weights of a layer, or of experts, may obey, the sparsest first.

        That is its entry's, or without metadata the one of the whole model.  A layer that the metadata do not list may
        be one that they list by another name than vLLM's, so any of their patterns is possible; which one, its weights
        tell.
        """
        if entry:
            return [entry.pattern]
        if self.metadata is None:
            return [self.resolution.parsed_pattern]
        of_layers = {entry.pattern for entry in self.metadata.layers.values()}
        listed = self.metadata.experts if of_experts else of_layers
        slides = [pattern for pattern in listed if isinstance(pattern, SlidePattern) and pattern.length]
        if self.resolution.path != SPARSE:
            slides = []
        return [*sorted(slides, key=lambda pattern: pattern.density), NOT_PRUNED]

    def unclaimed(self) -> str:
        """Explain, after the last layer, that layers of the metadata are missing among the pruned ones; or return "".

        A layer that this process does not hold is not missing: those of other stages of a pipeline, of a model beside
        a draft model, or that the model does not use.  So others must be here, and an unpruned one of its columns.
        """
        listed = self.metadata.layers if self.metadata else {}
        missing = [name for name in listed if name not in self.summary.claimed]
        columns = {listed[name].in_features for name in missing}
        found = self.summary.by_weights.items()
        unpruned = [
            name for name, layer in found if layer.pattern == DENSE_WEIGHT and layer.columns in columns
        ]
        others = self.summary.claimed or self.summary.pruned_by_weights
        if not others or not unpruned or len(missing) <= self.summary.pruned_by_weights:
            return ""
        if compat.is_part():
            return ""
        return (
            f"the metadata list {len(missing)} layers, such as {missing[0]}, that vLLM has no layer of that name for, "
            f"and the weights of {len(unpruned)} layers, such as {unpruned[0]}, obey none of their patterns: they were "
            f"changed after pruning; {AGAIN}"
        )

    def _replaced_by(self, scheme: str, name: str, listed: bool) -> None:
        """Warn that vLLM chose a scheme that we do not wrap, or raise ResolveError if that must not serve the layer."""
        problem = f"vLLM runs W8A8 layers of this checkpoint with its own {scheme}"
        remedy = f"slidesparse convert SRC OUT --sparsity {self.resolution.pattern}"
        if scheme == WEIGHT_ONLY:
            problem += f": {NO_FP8_ACTIVATIONS}"
            remedy = f"convert the original model to INT8: {remedy} --quant int8"
        else:
            remedy = (
                f"convert the original model ({remedy}) and serve it with a tested vLLM: {VLLM_TESTED_TEXT}"
            )
        layout, conflict, stock = self.resolution.layout, "", "convert to the dense layout"
        if listed and layout != "dense":
            conflict = f"which cannot read the {layout} layout"
        elif self.resolution.asked:
            conflict, stock = "but a SlideSparse flag is set", "unset the flag"
        if conflict:
            raise ResolveError(
                f"{name}: {problem}, {conflict}. To run sparse layers: {remedy}; to use vLLM's own kernels: {stock}"
            )
        warn_once(f"SlideSparse leaves them dense: {problem}. To run them sparse: {remedy}")

    def _entry(self, name: str) -> LayerEntry | None:
        """Return the metadata entry that the parts share that vLLM fuses into a layer; None if no part has one.

        The checkpoint may lack parts that are not listed: Gemma 4 has keys in the place of values, or none of either
        where a layer uses those of an earlier one.  Raises ResolveError where the others differ.
        """
        layers = self.metadata.layers if self.metadata else {}
        listed = filter(None, map(self._listed, self._parts(name)))
        entries = {part.rpartition(".")[2]: layers[part] for part in listed}
        first = next(iter(entries.values()), None)
        if any(entry != first for entry in entries.values()):
            pruned = ", ".join(f"{part} {entry.pattern.ratio}" for part, entry in entries.items())
            raise ResolveError(
                f"vLLM fuses {', '.join(entries)} into {name}, but their patterns in the checkpoint differ: {pruned}; "
                "convert again with the same pattern for all of them"
            )
        return first

    def _parts(self, name: str) -> list[str]:
        """Return the checkpoint's names of the layers that vLLM fuses into one.

        That is the name itself where the checkpoint holds them fused, as GLM-4's, whose mapping names the parts.
        """
        whole = compat.checkpoint_name(name)
        if self._listed(whole):
            return [whole]
        head, _, last = whole.rpartition(".")
        # vLLM sets no mapping in the configs of draft models
        return [f"{head}.{part}" for part in (self.packed_modules_mapping or FUSED).get(last, [last])]

    def _listed(self, name: str) -> str | None:
        """Return what the metadata call a layer, if they list it; vLLM may have added a prefix, or dropped one."""
        layers = self.metadata.layers if self.metadata else {}
        if name in layers:
            return name
        return next((n for n in layers if name.endswith(f".{n}") or n.endswith(f".{name}")), None)


def _refuse_unasked(_: Any, __: str, layer: Any) -> None:
    """Raise ResolveError for a pruned layer that vLLM builds without asking its quantization config.

    Some of vLLM's classes, as ModernBERT's, pass none to their layers, and then load codes as if they were floats.
    """
    if not isinstance(layer, LinearBase) or getattr(layer, "quant_config", layer) is not None:
        return
    vllm_config = get_current_vllm_config_or_none()
    config = getattr(vllm_config, "quant_config", None)
    if not isinstance(config, SlideSparseConfig) or not config.metadata:
        return
    if vllm_config.speculative_config:  # a draft model's layers may have the names of the pruned ones
        return
    if any(f".{layer.prefix}".endswith(f".{name}") for name in config.metadata.layers):
        raise ResolveError(
            f"{layer.prefix}: this vLLM builds the layer without quantization, and would load its codes as if they "
            "were floats; convert the original model again where vLLM is installed, or serve the original"
        )


def _machine() -> tuple[str, Capability]:
    """Return vLLM's platform, and the GPU's compute capability if vLLM knows it, without initializing CUDA."""
    if not current_platform.is_cuda():
        return "cpu" if current_platform.is_cpu() else current_platform.device_name, None
    capability = current_platform.get_device_capability()
    return "cuda", None if capability is None else (capability.major, capability.minor)


def _warn_without_effect(config: Mapping[str, Any], served: bool) -> None:
    """Warn that vLLM cannot read a checkpoint, or that flags have no effect on it unless they ask for us."""
    idle = [name for name in flags.active_names() if name == SPARSITY or not served]
    if not served and (stored := unread_storage(config)):
        warn_once(f"{stored}; {CONVERT_STORED}")
    elif idle:
        warn_once(
            f"{', '.join(idle)} has no effect on this checkpoint, which `slidesparse convert` did not make, unless "
            f"{REQUIRED} is set"
        )


def _require_readable(config: Mapping[str, Any]) -> None:
    """Raise ResolveError for entries on which vLLM would fail later with an error that does not name them."""
    groups = config.get("config_groups")
    lists = {"ignore": config.get("ignore", [])}
    lists |= {
        f"targets of {name!r}": group.get("targets")
        for name, group in (groups if isinstance(groups, dict) else {}).items()
        if isinstance(group, dict)
    }
    problem = ""
    for place, entries in lists.items():
        if not isinstance(entries, list) or not all(isinstance(entry, str) for entry in entries):
            problem = f"{place} is {shown(entries)}, it must be a list of texts"
            break
        for entry in entries:
            try:
                regex.compile(entry.removeprefix("re:") if entry.startswith("re:") else "")
            except regex.error as error:
                problem = f"{place} holds {shown(entry)}, which is no regular expression ({error})"
    cache = config.get("kv_cache_scheme")
    if not isinstance(cache, (dict, type(None))):
        problem = f"kv_cache_scheme is {shown(cache)}, it must be an object or null"
    if problem:
        raise ResolveError(f"quantization_config: {problem}; {AGAIN}")


def _config_dicts(quant_config: dict[str, Any] | None, hf_config: Any) -> list[dict[str, Any]]:
    """Return the dicts that hold a model's quantization_config in this process.

    From 0.30 on vLLM passes a copy; workers get the one in ``hf_config``, or in a config nested in it.
    """
    nested = (hf_config, getattr(hf_config, "text_config", None))
    values = [
        getattr(source, key, None)
        for source in nested
        for key in ("quantization_config", "compression_config")
    ]
    return [value for value in (quant_config, *values) if isinstance(value, dict)]


def _add_head_counts(config: dict[str, Any], hf_config: Any) -> None:
    """Add the numbers of heads for KV caches with one scale per head, which vLLM adds only for its own method."""
    text = getattr(hf_config, "text_config", None) or hf_config
    if config.get("quant_method") == QUANT_METHOD and text is not None:
        heads = getattr(text, "num_attention_heads", None)
        for target, source in HEADS.items():
            config.setdefault(target, getattr(text, source, None) or heads)


def _key(config: dict[str, Any], resolution: Resolution) -> str:
    """Return a digest of the resolution, without its reason, and of the checkpoint's metadata."""
    facts = {**asdict(resolution), "reason": "", "metadata": config.get(KEY)}
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()


# the only call that such layers make: of torch's, in every process that builds a model
register_module_module_registration_hook(_refuse_unasked)
