"""vLLM's compressed-tensors config with our scheme wrapped around W8A8 layers."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import regex  # with which vLLM compiles ignore and targets
from slidesparse.vllm_patch import compat, fusion
from slidesparse.vllm_patch.scheme import W8A8, SlideSparseScheme, refusal
from slidesparse.vllm_patch.summary import LayerSummary
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
    CompressedTensorsConfig,
)
from vllm.platforms import current_platform

from slidesparse import flags
from slidesparse.checkpoint.metadata import COMPRESSED_TENSORS, KEY, QUANT_METHOD, LayerEntry, Metadata
from slidesparse.errors import shown
from slidesparse.flags import Flags
from slidesparse.resolve import (
    CONVERT_STORED,
    NO_FP8_ACTIVATIONS,
    STAMP,
    WHAT_IT_TAKES,
    Capability,
    Resolution,
    ResolveError,
    claim,
    common_entry,
    left_to_vllm,
    pattern_of,
    require_dynamic_w8a8,
    resolve,
    stamp,
    unread_storage,
)
from slidesparse.versions import VLLM_TESTED_TEXT

logger = init_logger("vllm.slidesparse")

CONVERT_AGAIN = "convert the original model again"
WEIGHT_ONLY = "CompressedTensorsW8A16Fp8"
FUSED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
HEADS = {"total_num_heads": "num_attention_heads", "total_num_kv_heads": "num_key_value_heads"}


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
        log_as_vllm_does()
        config = hf_quant_cfg or {}
        resolution = claim(config, user_quant, _machine)
        unknown = flags.unknown_names()
        if unknown and (resolution or config.get("quant_method") == COMPRESSED_TENSORS):
            compat.warn(f"environment variables that SlideSparse does not read: {', '.join(unknown)}")
        if resolution is None:
            if config.get("quant_method") == COMPRESSED_TENSORS:
                _warn_without_effect(config)
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
        require_dynamic_w8a8(config)
        _require_readable(config)
        config.pop("sparsity_config", None)  # newer vLLM rejects this key, whose content is in the resolution
        try:
            quant_config = super().from_config(config)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
            raise ResolveError(
                f"vLLM cannot read quantization_config of this checkpoint ({reason}); {CONVERT_AGAIN}"
            ) from error
        quant_config.resolution = resolution
        quant_config.metadata = Metadata.of_config(config)
        quant_config.summary = LayerSummary()
        quant_config.key = _key(config, resolution)
        return quant_config

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        """Rename the layers of the metadata along with vLLM's own lists."""
        super().apply_vllm_mapper(hf_to_vllm_mapper)
        if self.metadata:
            renamed = {
                new: entry
                for name, entry in self.metadata.layers.items()
                if (new := hf_to_vllm_mapper._map_name(name)) is not None
            }
            self.metadata = Metadata(self.metadata.pattern, self.metadata.layout, renamed, self.metadata.tool)

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        """Return vLLM's method for a layer, and count experts, which have no scheme.

        Raises ResolveError for quantized experts that vLLM has no kernel for.
        """
        if not isinstance(layer, RoutedExperts):
            return super().get_quant_method(layer, prefix)
        try:
            method = super().get_quant_method(layer, prefix)
            if "NONE" in str(getattr(method, "fp8_backend", "")):
                raise NotImplementedError("no FP8 kernel for experts supports this platform")
        except (NotImplementedError, ValueError) as error:
            raise ResolveError(
                f"{prefix}: vLLM cannot serve quantized experts here: {str(error).rstrip('.')}. Convert the original "
                "model with --ignore '\\.experts\\.', which leaves them as they are"
            ) from error
        self.summary.count(prefix, "MoE experts")
        return method

    def get_scheme(self, layer: Any, layer_name: str | None = None) -> Any:
        """Return vLLM's scheme for a layer, wrapped in `SlideSparseScheme` if that can serve it.

        Raises ResolveError if vLLM has no scheme for a linear layer, and if quantization_config leaves a pruned one
        unquantized.
        """
        name = layer_name or type(layer).__name__
        if not isinstance(layer, LinearBase):
            self.summary.count(name, "lm_head")
            return super().get_scheme(layer, layer_name)
        try:
            scheme = super().get_scheme(layer, layer_name)
        except NotImplementedError as error:
            reason = " ".join(str(error).split())
            raise ResolveError(
                f"{name}: vLLM does not support the quantization that quantization_config declares: {reason}; "
                f"{CONVERT_AGAIN}"
            ) from error
        if scheme is None and all(part in self._listed() for part in self._parts(name)):
            raise ResolveError(
                f"{name}: the metadata say that it was pruned, but ignore and targets of quantization_config leave it "
                f"unquantized; {CONVERT_AGAIN}"
            )
        if scheme is not None and not isinstance(scheme, W8A8) and self._would_be_ours(layer, name):
            self._replaced_by(type(scheme).__name__, name)
        reason = "not quantized" if scheme is None else refusal(scheme)
        entry = None if reason else self._entry(name)
        self.summary.listed |= entry is not None
        pattern = pattern_of(self.resolution, self.metadata, entry)
        reason = reason or left_to_vllm(self.resolution, pattern)
        if not isinstance(scheme, W8A8):
            self.summary.count(name, reason)
            return scheme
        if not self.summary.is_pending():  # the first layer
            self.summary.fusion = fusion.register(self.key, self.resolution)
        self.summary.expect(name, layer)
        return SlideSparseScheme(self, scheme, name, entry, pattern, reason)

    def _would_be_ours(self, layer: Any, name: str) -> bool:
        """Return whether we would serve a layer if vLLM gave it the scheme that its quantization config specifies."""
        if self.resolution.layout == "slided":
            return self._entry(name) is not None
        parts = self.get_scheme_dict(layer, name) or {}
        weights, activations = parts.get("weights"), parts.get("input_activations")
        return (
            weights is not None
            and activations is not None
            and weights.num_bits == activations.num_bits == 8
            and weights.strategy in ("channel", "tensor")
            and bool(activations.dynamic and activations.symmetric)
        )

    def _replaced_by(self, scheme: str, name: str) -> None:
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
        if self.resolution.layout != "dense":
            raise ResolveError(
                f"{name}: {problem}, which cannot read the {self.resolution.layout} layout. To run sparse "
                f"layers: {remedy}; to use vLLM's own kernels: convert with --layout dense"
            )
        if self.resolution.asked:
            raise ResolveError(
                f"{name}: {problem}, but a SlideSparse flag is set. To run sparse layers: {remedy}; "
                "to use vLLM's own kernels: unset the flag"
            )
        compat.warn(f"SlideSparse leaves them dense: {problem}. To run them sparse: {remedy}")

    def _entry(self, name: str) -> LayerEntry | None:
        """Return the metadata entry of a layer, or of all parts that vLLM fuses into it, or None."""
        entries = {part.rpartition(".")[2]: self._lookup(part) for part in self._parts(name)}
        return common_entry(name, entries)

    def _parts(self, name: str) -> list[str]:
        """Return the checkpoint's names of the layers that vLLM fuses into one.

        That is the name itself where the checkpoint holds them fused, as GLM-4's, whose mapping names the parts.
        """
        whole = compat.checkpoint_name(name)
        if self._lookup(whole):
            return [whole]
        head, _, last = whole.rpartition(".")
        # vLLM sets no mapping in the configs of draft models
        return [f"{head}.{part}" for part in (self.packed_modules_mapping or FUSED).get(last, [last])]

    def _listed(self) -> Mapping[str, LayerEntry]:
        return self.metadata.layers if self.metadata else {}

    def _lookup(self, name: str) -> LayerEntry | None:
        """Return a layer's metadata entry, or None; vLLM may have added a prefix to its name, or dropped one."""
        layers = self._listed()
        if name in layers:
            return layers[name]
        for listed_name, entry in layers.items():
            if name.endswith(f".{listed_name}") or listed_name.endswith(f".{name}"):
                return entry
        return None


def _machine() -> tuple[str, Capability]:
    """Return vLLM's platform, and the GPU's compute capability if vLLM knows it, without initializing CUDA."""
    if not current_platform.is_cuda():
        return "cpu" if current_platform.is_cpu() else current_platform.device_name, None
    capability = current_platform.get_device_capability()
    return "cuda", None if capability is None else (capability.major, capability.minor)


def _warn_without_effect(config: Mapping[str, Any]) -> None:
    """Warn that vLLM cannot read a checkpoint without us, or that flags have no effect on it."""
    if stored := unread_storage(config):
        compat.warn(f"{stored}. USE_CUSPARSELT=1 serves it if it is W8A8; else {CONVERT_STORED}")
    elif idle := flags.active_names():
        compat.warn(
            f"{', '.join(idle)} has no effect on this checkpoint, which `slidesparse convert` did not make: vLLM's own "
            "kernels serve it, unless USE_CUSPARSELT=1 is set"
        )


def _require_readable(config: Mapping[str, Any]) -> None:
    """Raise ResolveError for entries on which vLLM would fail later with an error that does not name them."""
    lists = {"ignore": config.get("ignore", [])}
    lists |= {
        f"targets of {name!r}": group.get("targets")
        for name, group in config["config_groups"].items()
        if isinstance(group, dict)
    }
    for place, entries in lists.items():
        if not isinstance(entries, list) or not all(isinstance(entry, str) for entry in entries):
            raise ResolveError(
                f"quantization_config: {place} is {shown(entries)}, it must be a list of texts; {CONVERT_AGAIN}"
            )
        for entry in entries:
            try:
                regex.compile(entry.removeprefix("re:") if entry.startswith("re:") else "")
            except regex.error as error:
                raise ResolveError(
                    f"quantization_config: {place} holds {shown(entry)}, which is no regular expression ({error}); "
                    f"{CONVERT_AGAIN}"
                ) from error
    cache = config.get("kv_cache_scheme")
    if not isinstance(cache, (dict, type(None))):
        raise ResolveError(
            f"quantization_config: kv_cache_scheme is {shown(cache)}, it must be an object or null; {CONVERT_AGAIN}"
        )


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


def log_as_vllm_does() -> None:
    """Send the whole package's log to vLLM's handlers, once, unless the user has configured handlers for it."""
    package, vllm = logging.getLogger("slidesparse"), logging.getLogger("vllm")
    if package.handlers:
        return
    for handler in vllm.handlers:
        package.addHandler(handler)
    package.propagate = vllm.propagate
    if package.level == logging.NOTSET:
        package.setLevel(vllm.level)
