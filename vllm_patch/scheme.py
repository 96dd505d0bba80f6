"""The scheme of one linear layer: vLLM's W8A8 scheme creates the parameters, ours packs them and multiplies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from slidesparse.vllm_patch import compat, fusion
from slidesparse.vllm_patch.loading import AGAIN, LoadCheck, require_numbers
from slidesparse.vllm_patch.summary import Found
from torch import Tensor
from vllm.logger import init_logger
from vllm.model_executor.layers.linear import QKVParallelLinear
from vllm.model_executor.layers.quantization.compressed_tensors.schemes import (
    CompressedTensorsScheme,
    CompressedTensorsW8A8Fp8,
    CompressedTensorsW8A8Int8,
)
from vllm.platforms import current_platform

from slidesparse import gemm, ops, profiling
from slidesparse.checkpoint.metadata import LayerEntry
from slidesparse.checkpoint.storage import CheckpointError
from slidesparse.errors import LOGGER, SlideSparseError, warn_once
from slidesparse.gemm import SPARSE
from slidesparse.gemm.problem import NAMES, Layer
from slidesparse.pattern import MixedPattern, Pattern, PatternError, SlidePattern
from slidesparse.prune import prune
from slidesparse.resolve import BREAKS, NOT_PRUNED, left_to_vllm, require_invariance, warn_left
from slidesparse.slide import obeys

if TYPE_CHECKING:
    from slidesparse.vllm_patch.config import SlideSparseConfig

logger = init_logger(LOGGER)

W8A8 = (CompressedTensorsW8A8Int8, CompressedTensorsW8A8Fp8)  # the schemes that ours may wrap
OVERSIZED = 20 << 20  # bytes of a block of GPU memory that torch does not split while vLLM loads a model
ABSENT = "none of the checkpoint's pruned layers is in this part of the model"
UNABLE = "in a setting that the backend does not support"
DUMPS = ("sharded_state", "runai_streamer_sharded", "tensorizer")  # load formats of other engines' parameters
UNREAD = ("k", "v")  # vLLM's names of the parts of a layer whose attention uses those of another layer
PACKED = "_slidesparse_packed"  # marks a parameter that is already in the backend's form


class SlideSparseScheme(CompressedTensorsScheme):
    """W8A8 with per-token dynamic activations, run by `slidesparse.ops.linear`.

    The weights decide, once they are loaded, which of the possible ``patterns`` a layer has.  One that breaks its
    pattern is an error when the checkpoint says the layer is pruned (``entry``), and goes to vLLM's own scheme when
    only a flag said so.  Any weight obeys a `MixedPattern`, so that the unpruned layers of a pruned model run on the
    same backend, if it supports dense blocks.
    """

    def __init__(
        self,
        config: SlideSparseConfig,
        inner: CompressedTensorsScheme,
        name: str,
        entry: LayerEntry | None,
        dense_because: str | None = None,
        is_head: bool = False,
    ) -> None:
        self.config = config
        self.inner = inner
        self.name = name
        self.entry = entry
        self.unasked = not (config.resolution.asked or config.metadata)
        # once the weights are loaded, one; `slidesparse convert` prunes no lm_head, whatever random weights obey
        self.patterns = [NOT_PRUNED] if is_head and config.metadata else config.patterns(entry)
        self.backend = gemm.get(config.resolution.backend)
        # Once the weights are loaded, one of these is set: why vLLM's own scheme serves the layer, or what our
        # operators run.
        reasons = [left_to_vllm(config.resolution, pattern) for pattern in self.patterns]
        self.dense_because = dense_because or (reasons[0] if all(reasons) else None)
        self.layer: Layer | None = None

    @classmethod
    def get_min_capability(cls) -> int:
        """Return 80: Ampere is the first with 2:4 sparse tensor cores; the wrapped scheme checks its own minimum."""
        return 80

    def create_weights(self, layer: torch.nn.Module, **kwargs: Any) -> None:
        """Let vLLM's scheme create the parameters, whose loaders are watched."""
        self.dummy = compat.loads_dummy_weights()
        dtype, shard, in_features = (
            kwargs[key] for key in ("params_dtype", "input_size_per_partition", "input_size")
        )
        if self.entry and self.entry.in_features != in_features:
            raise CheckpointError(
                f"{self.name}: the metadata say {self.entry.in_features} in-features, the model has {in_features}; "
                f"{AGAIN}"
            )
        self.in_features = in_features  # K, before sharding
        layout = self.config.resolution.layout
        listed = self.config.metadata.layers.values() if self.config.metadata else ()
        entries = ([self.entry] if self.entry else listed) if layout == "slided" else ()
        strict = not self.unasked or layout != "dense"
        self._attentions = compat.current_config().compilation_config.static_forward_context
        parts = len(kwargs["output_partition_sizes"])
        patterns = {entry.pattern for entry in entries}
        self.load_check = LoadCheck(self.name, in_features, parts, patterns, strict)
        self.inner.create_weights(layer=layer, **kwargs)
        for kind in ("weight", "weight_scale"):
            parameter = getattr(layer, kind)
            parameter.weight_loader = self.load_check.watch(parameter.weight_loader, kind)
        # vLLM makes the bias next, with this loader.
        layer.weight_loader = self.load_check.watch(layer.weight_loader, "bias")
        if layout == "packed":
            self.load_check.take_packed(layer)
        if self.dense_because is None and self._is_other_head(dtype):
            self.dense_because = f"{str(dtype).removeprefix('torch.')} outputs"
        weight = layer.weight
        self._dtype = weight.dtype
        try:
            if self.dense_because is None:
                self._require_able(weight, dtype)
        except SlideSparseError as error:
            self.dense_because = self._left(error)
        if self.dense_because:
            return
        compat.forget_input_quant_key(layer)
        rank = getattr(layer, "tp_rank", 0) if shard != in_features else 0
        self._first_column = rank * shard

    def _slides(self, pattern: Pattern | None = None) -> tuple[SlidePattern | None, int]:
        """Return what the weight is `slid` for at ``pattern``, by default the sparsest one."""
        return slid(self.config, pattern or self.patterns[0], self._first_column)

    def _is_other_head(self, dtype: torch.dtype) -> bool:
        """Return whether the outputs have a type that is not the model's and that the backend cannot write.

        Pooling models may have a head in float32.
        """
        return dtype != compat.current_config().model_config.dtype and dtype not in self.backend.outputs

    def _require_able(self, weight: Tensor, dtype: torch.dtype) -> None:
        """Raise BackendError or CheckpointError for settings that we cannot serve, before the weights are read."""
        load_format = str(compat.current_config().load_config.load_format)
        if load_format in DUMPS:
            raise CheckpointError(
                f"--load-format {load_format} loads a dump of parameters, in which weights have the form of the "
                "backend that served them; load the checkpoint itself, without --load-format"
            )
        gemm.require_output(self.backend.name, dtype)
        require_invariance(self.backend.name, NAMES[weight.dtype])
        self._require_no_threads()
        if weight.device.type == current_platform.device_type:
            gemm.require(self.backend.name, weight.device)

    def _require_no_threads(self) -> None:
        if compat.current_config().parallel_config.use_ubatching and not self.backend.threads:
            raise gemm.BackendError(
                f"backend {self.backend.name} keeps GEMM plans for one thread, but vLLM's dual batch overlap runs each "
                "step in new ones: leave out --enable-dbo, or set DISABLE_SLIDESPARSE=1"
            )

    def require_loaded(self, layer: torch.nn.Module) -> None:
        """Raise CheckpointError unless all tensors were loaded, and none into a weight that is not this layer's."""
        if layer.weight.dtype != self._dtype:
            raise CheckpointError(
                f"{self.name}: the checkpoint quantizes it, but its config.json ties it to the embedding; {AGAIN}"
            )
        self.load_check.require_all(layer, UNREAD if self._shares_keys(layer) else ())

    def _shares_keys(self, layer: torch.nn.Module) -> bool:
        """Return whether the attention of this layer uses keys and values of an earlier one, and nobody reads its own.

        Gemma 3n's and 4's last layers do.  Files that transformers saves lack theirs, and vLLM leaves that memory as it
        is, which would break the pattern, or hold NaN.
        """
        attention = self._attentions.get(f"{self.name.rpartition('.')[0]}.attn")
        shares = getattr(attention, "kv_sharing_target_layer_name", None) is not None
        return shares and isinstance(layer, QKVParallelLinear)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Slide and pack the weight, or hand the layer to vLLM's scheme.  May run again, for example after a reload.

        A layer stays as it was first loaded, because compiled graphs contain it: dense for any later weights, or
        sparse, with PatternError for weights that break the pattern.
        """
        if getattr(layer.weight, PACKED, False):
            return
        if not self.dummy:
            self.require_loaded(layer)
        if self._shares_keys(layer):
            queries = layer.logical_widths[0]
            layer.weight.data[queries:] = 0
            scale = layer.weight_scale.data  # for each row, or for each part
            scale[queries if len(scale) == len(layer.weight) else 1 :] = 0
        try:
            packed = None if self.dense_because else self._packed(self._loaded(layer))
        except SlideSparseError as error:
            packed, self.dense_because = None, self._left(error)
        if packed is None:
            self.dense_because = self.dense_because or BREAKS
            self.inner.process_weights_after_loading(layer)
        else:
            self._serve(layer, packed)
        self.dummy = False  # weights loaded from now on are not random
        self._report()

    def _left(self, error: SlideSparseError) -> str:
        """Return why vLLM serves a layer that we cannot serve; raise the error if we were asked to."""
        if not self.unasked or self.layer:  # compiled graphs hold a layer that we have served
            raise error
        if UNABLE not in self.config.summary.dense.values():
            warn_left(str(error))
        return UNABLE

    def _loaded(self, layer: torch.nn.Module) -> Tensor:
        """Return the loaded weight; a random one, of dummy loading, is pruned first."""
        weight, pattern = layer.weight.data, self.patterns[0]
        if not self.dummy or len(self.patterns) > 1:
            return weight
        if isinstance(pattern, MixedPattern) and self.config.resolution.path == SPARSE and pattern.share:
            return prune(weight, pattern)
        target, phase = self._slides()
        return prune(weight, target, phase=phase) if target else weight

    def _packed(self, weight: Tensor) -> Tensor | None:
        """Pack the loaded weight [N, K] for the backend; None if vLLM's scheme serves the layer."""
        gemm.require(self.backend.name, weight.device)
        require_numbers(self.name, weight)
        release_unused(weight)
        *sparser, last = self.patterns
        found = next((pattern for pattern in sparser if obeys(weight, *self._slides(pattern))), last)
        self.patterns = [found]
        self.dense_because = left_to_vllm(self.config.resolution, found)
        if self.dense_because:
            return None
        try:
            packed = self.backend.pack(weight, *self._slides())
        except PatternError as error:
            problem = f"{self.name}: {str(error).removeprefix('weight: ')}"
            if self.entry:
                raise PatternError(problem) from None
            if self.layer:
                raise PatternError(
                    f"{problem}. The layer has been sparse since the server started; restart it to serve "
                    "these weights"
                ) from None
            return None
        return packed

    def _serve(self, layer: torch.nn.Module, packed: Tensor) -> None:
        """Replace the loaded weight by the packed one."""
        weight = layer.weight
        self.layer = self.backend.layer(*weight.shape, *self._slides(), weight.dtype)
        layer.weight = torch.nn.Parameter(packed, requires_grad=False)
        setattr(layer.weight, PACKED, True)
        layer.weight_scale = torch.nn.Parameter(self._channel_scale(layer), requires_grad=False)
        layer.input_scale = None

    def _channel_scale(self, layer: torch.nn.Module) -> Tensor:
        """Return scales [N, 1] float32; a per-tensor scale is repeated for the rows of its part of a fused layer."""
        scale, rows = layer.weight_scale.data.float(), sum(layer.logical_widths)
        if scale.numel() == rows:
            return scale.reshape(-1, 1)
        widths = torch.tensor(layer.logical_widths, device=scale.device)
        return scale.reshape(-1).expand(len(widths)).repeat_interleave(widths).reshape(-1, 1)

    def _report(self) -> None:
        """Count the layer; after the last one, conclude."""
        summary, metadata = self.config.summary, self.config.metadata
        pattern = self.patterns[0]
        last = summary.count(self.name, self.dense_because, pattern.ratio)
        if metadata and not self.entry and len(self.patterns) == 1:
            summary.by_weights[self.name] = Found(pattern.ratio, self.in_features, self.load_check.weights)
        elif self.dense_because == BREAKS:
            summary.by_weights[self.name] = Found(BREAKS, self.in_features, 0)
        if last:
            conclude(self.config)

    def apply_weights(self, layer: torch.nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Run the layer: x [..., K] -> [..., N] of x's dtype."""
        if self.layer is None:
            return self.inner.apply_weights(layer, x, bias)
        return ops.linear(x, layer.weight, layer.weight_scale, bias, self.layer, self.backend.name)


def slid(config: SlideSparseConfig, pattern: Pattern, first_column: int) -> tuple[SlidePattern | None, int]:
    """Return the pattern that a weight is slid for, and its phase: on the dense path, and for blocks, there is none."""
    if config.resolution.path != SPARSE or not isinstance(pattern, SlidePattern):
        return None, 0
    return pattern, pattern.shard_phase(first_column)


def conclude(config: SlideSparseConfig) -> None:
    """Log the summary, after the last layer, or raise PatternError if none obeys the pattern."""
    summary, resolution, metadata = config.summary, config.resolution, config.metadata
    if resolution.profile:  # calls while loading are not profiled
        profiling.enable()
    if summary.by_weights:  # which neither the flags nor the metadata tell
        fusion.add_cache_key(f"by weights: {sorted(summary.by_weights.items())}")
    if problem := config.unclaimed():
        if resolution.asked:
            raise PatternError(problem)
        warn_once(problem)
    pruned = summary.claimed or summary.pruned_by_weights
    absent = metadata and metadata.layers and not pruned  # as in a pipeline stage or a draft model
    numbers, line = summary.lines(resolution, ABSENT if absent else "")
    needed = metadata or (resolution.asked and not summary.sparse)
    if needed and not (metadata and (metadata.layers or metadata.experts)):
        scope = "of this checkpoint" if compat.stages() == 1 else "in this stage of the pipeline"
        raise PatternError(
            f"{line}. No layer {scope} satisfies the pattern, so there is nothing "
            f"to run sparse. Convert it: slidesparse convert SRC OUT --sparsity {resolution.pattern}; "
            "or set DISABLE_SLIDESPARSE=1"
        )
    if summary.sparse or metadata or resolution.asked:  # else stock vLLM serves the model
        logger.info("%s", numbers)
        logger.info("%s", line)


def release_unused(weight: Tensor) -> None:
    """Free the GPU memory of the last layer's dense weight before a large weight is packed.

    Otherwise the slightly smaller packed weight would be allocated in it and keep all of it, because torch does not
    split such blocks while vLLM loads (``max_split_size_mb``).
    """
    if weight.is_cuda and weight.nbytes >= OVERSIZED:
        torch.cuda.empty_cache()
