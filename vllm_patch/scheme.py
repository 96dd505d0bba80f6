"""The scheme of one linear layer: vLLM's W8A8 scheme creates the parameters, ours packs them and multiplies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from slidesparse.vllm_patch import compat, fusion
from torch import Tensor
from vllm.logger import init_logger
from vllm.model_executor.layers.quantization.compressed_tensors.schemes import (
    CompressedTensorsScheme,
    CompressedTensorsW8A8Fp8,
    CompressedTensorsW8A8Int8,
)
from vllm.model_executor.parameter import ModelWeightParameter
from vllm.platforms import current_platform

from slidesparse import gemm, ops, profiling
from slidesparse.flags import SPARSE
from slidesparse.gemm import ahead, crossover, hopper_operators
from slidesparse.metadata import LayerEntry
from slidesparse.pattern import HARDWARE_LENGTH, PatternError, SlidePattern
from slidesparse.prune import prune
from slidesparse.slide import bits, require_pattern

if TYPE_CHECKING:
    from slidesparse.vllm_patch.config import SlideSparseConfig

logger = init_logger("vllm.slidesparse")

W8A8 = (CompressedTensorsW8A8Int8, CompressedTensorsW8A8Fp8)  # the schemes that ours may wrap
HARDWARE = SlidePattern(HARDWARE_LENGTH)
OVERSIZED = 20 << 20  # bytes of a block of GPU memory that torch does not split while vLLM loads a model
BREAKS = "whose weights break the pattern"  # reason of a layer to be dense
PACKED = "_slidesparse_packed"  # marks a parameter that is already in the backend's form


def refusal(scheme: Any) -> str | None:
    """Why a layer stays with vLLM's own scheme, in words for the summary line; None when ours takes it."""
    if isinstance(scheme, CompressedTensorsW8A8Int8):
        if scheme.is_static_input_scheme:
            return "static activations"
        return None if scheme.input_symmetric else "asymmetric activations"
    if isinstance(scheme, CompressedTensorsW8A8Fp8):
        if scheme.is_static_input_scheme:
            return "static activations"
        return "block FP8" if str(getattr(scheme.strategy, "value", scheme.strategy)) == "block" else None
    return type(scheme).__name__.removeprefix("CompressedTensors")


class SlideSparseScheme(CompressedTensorsScheme):
    """W8A8 with per-token dynamic activations, run by `slidesparse.ops.linear`.

    A weight that breaks the pattern is an error when the checkpoint says the layer is pruned (``entry``), and goes
    to vLLM's own scheme when only a flag said so.
    """

    def __init__(
        self, config: SlideSparseConfig, inner: CompressedTensorsScheme, name: str, entry: LayerEntry | None
    ) -> None:
        self.config = config
        self.inner = inner
        self.name = name
        self.pruned_by_us = entry is not None
        self.pattern = entry.pattern if entry else config.resolution.slide_pattern
        self.slided = config.resolution.layout == "slided"
        self.arguments: tuple[int, int, torch.dtype, int, str] | None = (
            None  # of ops.linear, once loaded; None: inner's
        )
        self.dense_because = ""  # vLLM's own scheme serves the layer: the reason
        self.dense_backend = ""  # of the dense weight that is kept beside the packed one, if any
        self.phase = 0
        self.in_features = 0

    @classmethod
    def get_min_capability(cls) -> int:
        """Ampere, the first with 2:4 sparse tensor cores; the wrapped scheme has been asked for its own."""
        return 80

    def create_weights(self, layer: torch.nn.Module, **kwargs: Any) -> None:
        """Let vLLM's scheme create the parameters; slided checkpoints hold K' columns instead of K."""
        self.dtype, self.dummy = kwargs["params_dtype"], compat.loads_dummy_weights()
        self.inner.create_weights(layer=layer, **kwargs)
        if self._is_other_head():
            self.dense_because = f"{str(self.dtype).removeprefix('torch.')} outputs"
            return
        gemm.require_output(self.config.resolution.backend, self.dtype)
        if self.config.resolution.keep_dense:
            gemm.require_output(_dense_backend(), self.dtype)
        self._require_invariance(layer.weight.dtype)
        if layer.weight.device.type == current_platform.device_type:  # now, as reading weights takes minutes
            gemm.require(self.config.resolution.backend, layer.weight.device)
        self._require_no_threads()
        compat.forget_input_quant_key(layer)
        shard, whole = kwargs["input_size_per_partition"], kwargs["input_size"]
        self.in_features = shard
        rank = getattr(layer, "tp_rank", 0) if shard != whole else 0
        self.phase = self.pattern.shard_phase(rank * shard)
        if self.slided:
            self._require_whole_blocks(shard, whole)
            weight = layer.weight
            slided = torch.empty(
                weight.shape[0], self.pattern.layout(shard).slided, dtype=weight.dtype, device=weight.device
            )
            layer.register_parameter(
                "weight",
                ModelWeightParameter(
                    data=slided, input_dim=1, output_dim=0, weight_loader=kwargs["weight_loader"]
                ),
            )
        if self.config.resolution.path == SPARSE:
            pattern, phase = (HARDWARE, 0) if self.slided else (self.pattern, self.phase)
            ahead.begin(self.config.resolution.backend, layer.weight.data, pattern, phase)

    def _is_other_head(self) -> bool:
        """Whether outputs are of a type that the backend does not write, in a model whose type is another.

        Pooling models may have a head in float32.
        """
        outputs = gemm.provider(self.config.resolution.backend).outputs
        return self.dtype not in outputs and self.dtype != compat.model_dtype() and not self.slided

    def _require_invariance(self, dtype: torch.dtype) -> None:
        resolution = self.config.resolution
        if not compat.batch_invariant() or resolution.backend == "reference":
            return
        if dtype != torch.int8 or resolution.keep_dense:
            what = "takes one of two weights" if dtype == torch.int8 else "adds FP8 products in an order"
            raise gemm.BackendError(
                f"backend {resolution.backend} {what} that depends on the number of tokens, but VLLM_BATCH_INVARIANT "
                "is set: convert with --quant int8 and leave out SLIDESPARSE_KEEP_DENSE, or set DISABLE_SLIDESPARSE=1"
            )

    def _require_no_threads(self) -> None:
        resolution = self.config.resolution
        backend, kept = resolution.backend, resolution.keep_dense
        if not compat.starts_threads() or backend == "reference":
            return
        # C++ shares what it has prepared among threads; it leaves calls that are timed to Python
        if backend != "hopper" or kept or resolution.profile or not hopper_operators.installed():
            raise gemm.BackendError(
                f"backend {backend}{' beside dense weights' if kept else ''} plans products for one thread, but vLLM's "
                "dual batch overlap runs each step in new ones: leave out --enable-dbo, or set DISABLE_SLIDESPARSE=1"
                + (
                    "; hopper takes it without SLIDESPARSE_PROFILE, and with torch 2.10"
                    if backend == "hopper"
                    else ""
                )
            )

    def _require_whole_blocks(self, shard: int, whole: int) -> None:
        """A slided row can be cut between blocks only; say which tensor-parallel sizes do so."""
        length = self.pattern.length
        if shard == whole or (length and whole % length == 0 and shard % length == 0):
            return
        sizes = [n for n in range(1, 65) if length and whole % length == 0 and (whole // length) % n == 0]
        works = ", ".join(map(str, sizes)) if sizes else "1"
        raise PatternError(
            f"{self.name}: the slided layout of {whole} in-features at {self.pattern} cannot be cut into "
            f"{whole // shard} tensor-parallel shards of whole blocks; tensor-parallel sizes that work: {works}. "
            "The dense layout works at any size: slidesparse convert SRC OUT --layout dense"
        )

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Slide and pack the weight, or hand the layer to vLLM's scheme.  May run again, also after a reload.

        A layer stays what it was at first, as compiled graphs hold it: dense whatever is loaded then, or sparse, with
        PatternError for weights that break the pattern.
        """
        if getattr(layer.weight, PACKED, False):
            return
        weight = layer.weight.data
        dtype, sparse = weight.dtype, self.config.resolution.path == SPARSE
        if self.dummy and sparse and not self.slided:
            weight = prune(weight, self.pattern, phase=self.phase)
        backend = gemm.require(self.config.resolution.backend, weight.device)
        packed = None
        if not self.dense_because:
            packed = self._packed(weight, backend.name) if sparse else backend.pack(_whole_words(weight))
        self.dummy = False  # what is loaded from now on are weights
        if packed is None:
            self.dense_because = self.dense_because or BREAKS
            self.inner.process_weights_after_loading(layer)
            self._settle(self.dense_because)
            return
        layout = (
            self.pattern.layout(self.in_features, self.phase) if sparse else HARDWARE.layout(self.in_features)
        )
        if self.config.resolution.keep_dense:
            self._keep(layer, weight)
        del weight
        layer.weight = torch.nn.Parameter(packed, requires_grad=False)
        setattr(layer.weight, PACKED, True)
        layer.weight_scale = torch.nn.Parameter(self._channel_scale(layer), requires_grad=False)
        layer.input_scale = None
        columns = gemm.columns(backend.name, layout.slided)
        self.arguments = (layout.length, layout.phase, dtype, columns, backend.name)
        if self.dense_backend:
            self._compare(layer)
        kind = self.name.rpartition(".")[2]
        self.config.census.kinds[packed.data_ptr()] = kind
        if self.dense_backend:
            self.config.census.kinds[layer.weight_dense.data_ptr()] = kind
        self._settle(None)

    def _packed(self, weight: Tensor, backend: str) -> Tensor | None:
        """[N, K] or [N, K'] as loaded -> as the backend wants it; None when the layer is not ours to refuse."""
        ahead.finish()
        _release_unused(weight)
        if self.slided:
            if self.dummy:
                weight = prune(weight, HARDWARE)
            else:
                require_pattern(weight, HARDWARE, self.name)
            return gemm.provider(backend).pack(weight)
        try:
            return gemm.slide_and_pack(backend, weight, self.pattern, self.phase, self.name)
        except PatternError as error:
            if self.pruned_by_us:
                raise
            if self.arguments is not None:
                raise PatternError(
                    f"{error}. The layer has been sparse since the server started; restart it to serve these weights"
                ) from None
            return None

    def _keep(self, layer: torch.nn.Module, weight: Tensor) -> None:
        """Hold the dense weight [N, K] as well, in the form of a dense backend."""
        backend = gemm.require(_dense_backend(), weight.device)
        layer.weight_dense = torch.nn.Parameter(backend.pack(_whole_words(weight)), requires_grad=False)
        self.dense_backend = backend.name

    def _compare(self, layer: torch.nn.Module) -> None:
        """On a GPU, measure which of the two weights is faster for how many tokens; once for all layers of a shape."""
        if not layer.weight.is_cuda:
            return
        assert self.arguments is not None
        length, phase, dtype, columns, backend = self.arguments
        scale = layer.weight_scale
        shape = crossover.Shape.of(scale, self.in_features, dtype, columns, backend)
        if crossover.measured(shape) is not None:
            return
        found = crossover.measure(
            shape,
            self.dtype,
            lambda x: ops.sparse_linear(
                x, layer.weight, scale, None, length, phase, dtype, columns, self.dtype, backend
            ),
            lambda x: ops.dense_linear(
                x, layer.weight_dense, scale, None, dtype, self.dtype, self.dense_backend
            ),
        )
        logger.info(
            "SlideSparse: %s [%d, %d] takes its dense weight for %s tokens",
            *(
                self.name.rpartition(".")[2],
                shape.n,
                shape.k,
                ", ".join(map(str, sorted(found))) or "no number of",
            ),
        )

    def _channel_scale(self, layer: torch.nn.Module) -> Tensor:
        """[N, 1] float32: a per-tensor scale holds for each row of its part of a fused layer."""
        scale, rows = layer.weight_scale.data.float(), sum(layer.logical_widths)
        if scale.numel() == rows:
            return scale.reshape(-1, 1)
        widths = torch.tensor(layer.logical_widths, device=scale.device)
        return scale.reshape(-1).expand(len(widths)).repeat_interleave(widths).reshape(-1, 1)

    def _settle(self, reason: str | None) -> None:
        """Count the layer; after the last one, print the summary, or refuse what was to be sparse and is not at all."""
        census, resolution = self.config.census, self.config.resolution
        last = census.settle(self.name, reason, self.pattern.ratio)
        # Not before the last one: products while loading are no serving.
        if resolution.profile and (last or profiling.enabled()):
            profiling.enable().kinds.update(census.kinds)
        if not last:
            return
        broken = sorted(name for name, why in census.dense.items() if why == BREAKS)
        if broken:
            fusion.depends_on(f"dense: {', '.join(broken)}")
        line = census.line(resolution)
        if not census.sparse and self.config.metadata and self.config.metadata.layers:
            # of a pipeline, or a draft: had it any of them, they would be sparse, or refused
            line += "; none of the checkpoint's pruned layers is in this part of the model"
        elif not census.sparse:
            where = "of this checkpoint" if compat.stages() == 1 else "in this stage of the pipeline"
            raise PatternError(
                f"{line}. No layer {where} obeys the pattern, so there is nothing to "
                f"run sparse. Convert it: slidesparse convert SRC OUT --sparsity {resolution.pattern}; "
                "or set DISABLE_SLIDESPARSE=1"
            )
        logger.info("%s", line)

    def apply_weights(self, layer: torch.nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [..., K] -> [..., N] of x's dtype."""
        if self.arguments is None:
            return self.inner.apply_weights(layer, x, bias)
        if self.dense_backend:
            return ops.linear(
                x,
                layer.weight,
                layer.weight_scale,
                bias,
                *self.arguments,
                layer.weight_dense,
                self.dense_backend,
            )
        return ops.linear(x, layer.weight, layer.weight_scale, bias, *self.arguments)


def _dense_backend() -> str:
    """Of the dense weight that is kept beside the packed one."""
    return "stock" if current_platform.is_cuda() else "reference"


def _release_unused(weight: Tensor) -> None:
    """Give the GPU memory that the last layer's dense weight had back, before a large weight is packed.

    The packed one would otherwise take it, being a little smaller, and keep all of it: torch splits no such block
    while vLLM loads (``max_split_size_mb``).  Kernels that read it must have ended: vLLM's allocator for sleep mode
    does not wait for them before it unmaps memory, in releases up to 0.20.
    """
    if weight.is_cuda and weight.nbytes >= OVERSIZED:
        torch.cuda.synchronize(weight.device)
        torch.cuda.empty_cache()


def _whole_words(weight: Tensor) -> Tensor:
    """[N, K] with zero columns up to whole words of four, as quant_slide pads the activations."""
    missing = -weight.shape[1] % HARDWARE_LENGTH
    return torch.nn.functional.pad(bits(weight), (0, missing)).view(weight.dtype) if missing else weight
