"""vLLM's compressed-tensors config with our scheme wrapped around W8A8 layers."""

from __future__ import annotations

from typing import Any

from vllm.logger import init_logger
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
from vllm.platforms import current_platform

from slidesparse.flags import Flags
from slidesparse.metadata import QUANT_METHOD, Metadata
from slidesparse.vllm_patch import compat
from slidesparse.vllm_patch.census import Census
from slidesparse.vllm_patch.resolve import Resolution, ResolveError, resolve, wanted
from slidesparse.vllm_patch.scheme import SlideSparseScheme, refusal

logger = init_logger("vllm.slidesparse")

COMPRESSED_TENSORS = "compressed-tensors"


@register_quantization_config(QUANT_METHOD)
class SlideSparseConfig(CompressedTensorsConfig):
    """Compressed-tensors, with W8A8 layers that obey the pattern run by slidesparse and all others by vLLM."""

    resolution: Resolution
    metadata: Metadata | None
    census: Census

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, Any] | None, user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        """Take checkpoints with our metadata, and compressed-tensors ones when a flag asks for it."""
        flags = Flags.from_environment()
        if not hf_quant_cfg or hf_quant_cfg.get("quant_method") not in (COMPRESSED_TENSORS, QUANT_METHOD):
            return None
        if user_quant not in (None, QUANT_METHOD):
            if flags.path:
                raise ResolveError(
                    f"--quantization {user_quant} asks for vLLM's own kernels while a SlideSparse flag is set; drop one"
                )
            return None
        return QUANT_METHOD if wanted(hf_quant_cfg, flags) or user_quant == QUANT_METHOD else None

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> SlideSparseConfig:
        """Resolve flags and metadata once, stamp the result into ``config``, and parse the rest as vLLM does."""
        resolution = resolve(config, Flags.from_environment(), current_platform.is_cuda())
        config.pop("sparsity_config", None)  # newer vLLM rejects it; our metadata says all it said
        made = super().from_config(config)
        made.resolution = resolution
        made.metadata = Metadata.of_config(config)
        made.census = Census()
        return made

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
        """vLLM's own; experts never ask for a scheme, so they are counted here."""
        method = super().get_quant_method(layer, prefix)
        if compat.is_moe(layer):
            self.census.settle(prefix, "MoE experts")
        return method

    def get_scheme(self, layer: Any, layer_name: str | None = None) -> Any:
        """vLLM's scheme for the layer, wrapped in ours where ours takes it."""
        scheme = super().get_scheme(layer, layer_name)
        name = layer_name or type(layer).__name__
        if not isinstance(layer, LinearBase):
            self.census.settle(name, "lm_head")
            return scheme
        reason = "not quantized" if scheme is None else refusal(scheme)
        entry = None
        if reason is None and self.metadata:
            entry, reason = self._entry(name)
        if reason is not None:
            self.census.settle(name, reason)
            return scheme
        self.census.expect(name)
        return SlideSparseScheme(self, scheme, name, entry)

    def _entry(self, name: str) -> tuple[Any, str | None]:
        """The metadata of a layer, of the first of its parts when vLLM fuses several; or why it is not sparse."""
        assert self.metadata is not None
        last = name.rsplit(".", 1)[-1]
        parts = self.packed_modules_mapping.get(last, [last])
        names = [name[: len(name) - len(last)] + part for part in parts]
        entries = {n: self.metadata.layers[n] for n in names if n in self.metadata.layers}
        if not entries:
            return None, "not pruned"
        found = list(entries.values())
        if len(entries) < len(names) or any(entry != found[0] for entry in found):
            raise ResolveError(
                f"{name} joins {', '.join(parts)}, of which only {', '.join(entries)} are pruned alike; "
                "convert again with the same pattern for all of them"
            )
        return found[0], None
