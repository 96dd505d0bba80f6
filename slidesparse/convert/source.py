"""The source of a conversion, as an object: floats, quantized weights, or weights that were pruned before.

A source answers for each linear layer what is written for it, and makes it, rows at a time.  To read another format,
write a `Source`, and return it from `source_of`.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from torch import Tensor

from slidesparse.checkpoint.bitnet import is_bitnet
from slidesparse.checkpoint.converted import restore
from slidesparse.checkpoint.metadata import KEY, QUANT_METHOD, Metadata
from slidesparse.checkpoint.names import BIAS, HEAD, SCALE, WEIGHT, ZERO_POINT, layer_names
from slidesparse.checkpoint.storage import FLOATS, Checkpoint, CheckpointError, Reader, TensorSpec
from slidesparse.checkpoint.w8a8 import (
    FP8_METHOD,
    Quantization,
    Scheme,
    kv_scale_names,
    new_block,
    parse_block,
    require_float,
    require_quantized,
    rewritten_block,
)
from slidesparse.errors import CalibrationError
from slidesparse.quantize import NAMES, dequantize_blocks, dequantize_rows, quantize_rows

UNQUANTIZED = Quantization({}, {})
# In the names of what quantizers and their observers leave beside weights
_OF_QUANTIZATION = re.compile("scale|zero_point|quant|observer|min_val|max_val|amax|g_idx|shape")
Prune = Callable[[Tensor], Tensor]  # rows [n, K] -> the same rows, pruned, in their dtype


class Source(ABC):
    """A checkpoint to convert.

    Args:
        quant: the requested type of its float weights, "int8" or "fp8".
    """

    metadata: Metadata | None = None  # of a source that was pruned before
    heads: Mapping[str, Scheme] = {}  # lm_heads that are quantized and must be written as floats
    requantizes = False  # whether scales and activations are not the source's
    replaces_ignore = True  # whether the output's ignore list is new, not the source's with additions

    def __init__(
        self, checkpoint: Checkpoint, quant: str | None, quantization: Quantization = UNQUANTIZED
    ) -> None:
        self.checkpoint, self.quantization = checkpoint, quantization
        self._quant = quant or "int8"

    @abstractmethod
    def in_features(self, layer: str) -> int:
        """Return K of a linear layer.  Raises CheckpointError if its weight or scale is not what it must be."""

    @abstractmethod
    def codes(self, reader: Reader, layer: str, rows: slice, prune: Prune) -> tuple[Tensor, Tensor | None]:
        """Return rows of a layer's weight, pruned and quantized, and their scales [n, 1] unless these are copied."""

    @abstractmethod
    def config(self, layers: Collection[str], ignored: Collection[str]) -> dict[str, Any]:
        """Return the ``quantization_config`` of the output, in which ``ignored`` are names of unquantized layers."""

    def quant(self, layer: str) -> str:
        """Return the type of a layer in the output, "int8" or "fp8"."""
        return self._quant

    def copies_scale(self, layer: str) -> bool:
        """Return whether the scales of a layer are copied, not written with its weight."""
        return False

    def is_float(self, layer: str) -> bool:
        """Return whether a quantized source keeps a layer in floats."""
        return False

    def copies(self, spec: TensorSpec) -> tuple[TensorSpec, ...]:
        """Return what a tensor that is not converted is written as."""
        return tuple(spec._replace(name=name) for name in kv_scale_names(spec.name) or (spec.name,))

    def dropped(self, layers: Collection[str]) -> dict[str, str]:
        """Return the tensors of ``layers`` that the output's format lacks, each with what is said of it, or "".

        A layer has a weight, a bias and a scale, and possibly scales of the KV cache.  Raises CheckpointError for a
        tensor that no quantizer left, such as an adapter's: without it, the layer may have other outputs.
        """
        known, named = (WEIGHT, BIAS), {*layers}
        dropped = {}
        for name in self.checkpoint.tensors:
            parts = name.split(".")
            prefixes = (".".join(parts[:count]) for count in range(1, len(parts)))
            layer = next((prefix for prefix in prefixes if prefix in named), None)
            suffix = name.removeprefix(layer or "")
            if layer and suffix not in known and not kv_scale_names(name) and not self.keeps(layer, suffix):
                if not _OF_QUANTIZATION.search(suffix):
                    raise CheckpointError(
                        f"tensor {name} is no part of a linear layer, and without it the layer may have other outputs; "
                        "merge adapters into the weights, or remove it"
                    )
                dropped[name] = self.reason(suffix)
        return dropped

    def keeps(self, layer: str, suffix: str) -> bool:
        """Return whether a further tensor of a layer is copied."""
        return False

    def reason(self, suffix: str) -> str:
        """Return what is said of the dropped tensors of a suffix, or ""."""
        return f"{suffix} tensors removed, which W8A8 lacks"

    def changes(self, layers: Collection[str]) -> Iterator[str]:
        """Describe the changes to the source's quantization."""
        if self.quantization.is_rotated:
            yield "transform_config removed, as its rotations are folded into the weights"
        reasons = Counter(reason for reason in self.dropped(layers).values() if reason)
        yield from (f"{count} {words}" for words, count in reasons.items())

    def require_calibration(self) -> None:
        """Raise CalibrationError unless the weights can be calibrated."""
        return

    def also_quantized(self, excluded: Collection[str]) -> list[str]:
        """Return further matrices that must be quantized again, besides the ``excluded`` layers."""
        return []


class Floats(Source):
    """Weights in FP32, FP16 or BF16."""

    def in_features(self, layer: str) -> int:
        return require_float(self.checkpoint, layer).shape[1]

    def codes(self, reader: Reader, layer: str, rows: slice, prune: Prune) -> tuple[Tensor, Tensor | None]:
        values = prune(reader.rows(layer + WEIGHT, rows))
        return quantize_rows(values, NAMES[self._quant], "cuda")

    def config(self, layers: Collection[str], ignored: Collection[str]) -> dict[str, Any]:
        return new_block(self._quant, ignored, self.quantization.kv_cache)


class Quantized(Source):
    """INT8 or FP8 weights, which are kept with their scales, or dequantized and quantized again where these differ.

    Raises CheckpointError for a quantization that is not supported, or that contradicts ``quant``.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        quant: str | None,
        quantization: Quantization,
        block: Mapping[str, Any],
        has_experts: bool,
    ) -> None:
        super().__init__(checkpoint, quant, quantization)
        self._block, self._asked = dict(block), quant
        self.requantizes = self.quantization.rewritten(has_experts)
        self.replaces_ignore = quantization.method == FP8_METHOD
        for scheme in self.quantization.schemes:
            if not scheme.block and quant not in (None, scheme.quant):
                raise CheckpointError(
                    f"--quant {quant} contradicts the source, which has {scheme.quant} weights already; "
                    "leave --quant out, or start from the original float checkpoint"
                )
        self.heads = self._float_heads()

    def scheme(self, layer: str) -> Scheme | None:
        """Return how the source quantized a layer, or None for floats."""
        return self.quantization.scheme(layer, self.checkpoint.require(layer + WEIGHT).dtype)

    def quant(self, layer: str) -> str:
        return self._quant_of(self._required(layer))

    def _quant_of(self, scheme: Scheme) -> str:
        """Return the output type: the source's, unless that has per-block scales and another was asked for."""
        return (self._asked or scheme.quant) if scheme.block else scheme.quant

    def _required(self, layer: str) -> Scheme:
        scheme = self.scheme(layer)
        assert scheme
        return scheme

    def in_features(self, layer: str) -> int:
        return require_quantized(self.checkpoint, layer, self.quantization).shape[1]

    def is_float(self, layer: str) -> bool:
        return self.checkpoint.require(layer + WEIGHT).dtype in FLOATS and not self.scheme(layer)

    def copies_scale(self, layer: str) -> bool:
        return not self.requantizes or self._required(layer).strategy == "channel"

    def copies(self, spec: TensorSpec) -> tuple[TensorSpec, ...]:
        """See `Source.copies`; vLLM loads scales [N, 1] or [1] alone."""
        layer = spec.name.removesuffix(SCALE)
        scheme = self.scheme(layer) if layer + WEIGHT in self.checkpoint.tensors else None
        if not scheme:
            return super().copies(spec)
        count = spec.rows * spec.columns
        return (spec._replace(shape=(count,) if scheme.strategy == "tensor" else (count, 1)),)

    def codes(self, reader: Reader, layer: str, rows: slice, prune: Prune) -> tuple[Tensor, Tensor | None]:
        values, scheme = reader.rows(layer + WEIGHT, rows), self._required(layer)
        if scheme.block:
            scale = reader.whole(layer + scheme.scale).float()
            values = prune(dequantize_blocks(values, scale, scheme.block, rows.start))
            return quantize_rows(values, NAMES[self._quant_of(scheme)], "cuda")
        if self.copies_scale(layer):
            return prune(values), None
        scale = reader.whole(layer + scheme.scale).float()
        return prune(values), scale.reshape(1, 1).expand(len(values), 1)

    def float_rows(self, reader: Reader, head: str, rows: slice) -> Tensor:
        """Return rows of a quantized lm_head, codes times their scales, in float32."""
        values, scheme = reader.rows(head + WEIGHT, rows), self.heads[head]
        scale = reader.whole(head + scheme.scale)
        if scheme.block:
            return dequantize_blocks(values, scale, scheme.block, rows.start)
        return dequantize_rows(values, scale.reshape(-1)[rows] if scheme.strategy == "channel" else scale)

    def _float_heads(self) -> dict[str, Scheme]:
        heads = {}
        for name in filter(HEAD.search, layer_names(self.checkpoint.tensors)):
            scheme = self.scheme(name)
            if scheme and not self.quantization.loads_head(name):
                require_quantized(self.checkpoint, name, self.quantization)
                heads[name] = scheme
        return heads

    def also_quantized(self, excluded: Collection[str]) -> list[str]:
        if not self.requantizes:
            return []
        return [
            name
            for name in layer_names(self.checkpoint.tensors)
            if name not in excluded
            and self.scheme(name)
            and self.checkpoint.require(name + WEIGHT).dtype not in FLOATS
        ]

    def keeps(self, layer: str, suffix: str) -> bool:
        return suffix == self._required(layer).scale and self.copies_scale(layer)

    def reason(self, suffix: str) -> str:
        """See `Source.dropped`; `changes` says enough of scales and zero points that requantization replaces."""
        is_replaced = "scale" in suffix or "zero_point" in suffix
        return "" if self.requantizes and is_replaced else super().reason(suffix)

    def dropped(self, layers: Collection[str]) -> dict[str, str]:
        tensors, prefixes = self.checkpoint.tensors, tuple(f"{head}.weight_" for head in self.heads)
        zero_points = (name for name in tensors if name.endswith(ZERO_POINT))
        of_heads = (name for name in tensors if name.startswith(prefixes))
        said = "zero points removed, as the weights are symmetric"
        return {
            **super().dropped(layers),
            **dict.fromkeys(of_heads, ""),  # said of the head
            **dict.fromkeys(zero_points, said),
        }

    def changes(self, layers: Collection[str]) -> Iterator[str]:
        counts = Counter(_change(self._required(layer)) for layer in layers if self.requantizes)
        yield from (f"{count} layers: {words}" for words, count in counts.items() if words)
        for name in self.heads:
            yield f"{name} dequantized, as vLLM loads a quantized one only if a target names it"
        yield from super().changes(layers)

    def config(self, layers: Collection[str], ignored: Collection[str]) -> dict[str, Any]:
        written = {
            name: (self._quant_of(scheme), "channel" if self.requantizes else scheme.strategy)
            for name, scheme in self.quantization.groups.items()
            if scheme
        }
        return rewritten_block(self._block, self.quantization, written, [*ignored, *self.heads])

    def require_calibration(self) -> None:
        if not is_bitnet(self.checkpoint.config):
            raise CalibrationError(
                "calibration updates float weights, but those of the source are quantized; start from the original "
                "checkpoint, or prune its quantized weights: leave --calib out"
            )


def _change(scheme: Scheme) -> str:
    """Describe what requantization changes for a layer, or return ""."""
    if scheme.block:
        rows, columns = scheme.block
        return f"dequantized from blocks of {rows} x {columns} and quantized again per channel"
    of_scales = {"tensor": "per-tensor scales expanded to per-channel, which experts need"}
    of_activations = {
        "static": "static activation scales removed, as activations are now quantized dynamically per token",
        "dynamic": "activations are now quantized per token instead of per tensor",
        "asymmetric": "activations are now quantized symmetrically",
    }
    return of_activations.get(scheme.activations) or of_scales.get(scheme.strategy, "")


class Converted(Quantized):
    """A checkpoint that was pruned before, of which only the layout changes."""

    def __init__(self, checkpoint: Checkpoint, block: Mapping[str, Any], metadata: Metadata) -> None:
        super().__init__(checkpoint, None, parse_block(block, checkpoint.tensors), block, has_experts=False)
        self.metadata = self._converted = metadata

    def in_features(self, layer: str) -> int:
        return self._converted.layers[layer].in_features

    def codes(self, reader: Reader, layer: str, rows: slice, prune: Prune) -> tuple[Tensor, Tensor | None]:
        entry, layout = self._converted.layers[layer], self._converted.layout
        return restore(reader.rows(layer + WEIGHT, rows), entry, layout, layer, rows.start), None

    def config(self, layers: Collection[str], ignored: Collection[str]) -> dict[str, Any]:
        return dict(self._block)


def source_of(checkpoint: Checkpoint, quant: str | None, has_experts: bool) -> Source:
    """Return the source of a checkpoint.

    Args:
        quant: the requested type of weights; None is that of the source, or "int8" for floats.
        has_experts: whether it has routed experts, which vLLM serves with per-channel scales only.

    Raises CheckpointError for a form that cannot be converted.
    """
    block = checkpoint.quantization_config()
    metadata = Metadata.of_config(block)
    if block is not None and metadata is None and block.get("quant_method") == QUANT_METHOD:
        raise CheckpointError(
            f"the source says quant_method {QUANT_METHOD!r} but has no quantization_config.{KEY}, which "
            "holds its pattern and layout; start from the original checkpoint"
        )
    if block is None:
        return Floats(checkpoint, quant)
    if metadata is not None and not _is_unpruned(metadata):
        return Converted(checkpoint, block, metadata)
    quantization = parse_block(block, checkpoint.tensors)
    if not quantization.schemes:
        return Floats(checkpoint, quant, quantization)
    return Quantized(checkpoint, quant, quantization, block, has_experts)


def _is_unpruned(metadata: Metadata) -> bool:
    """Return whether metadata describe an ordinary W8A8 checkpoint, of which nothing is pruned yet."""
    patterns = (metadata.pattern, *(entry.pattern for entry in metadata.layers.values()), *metadata.experts)
    return metadata.layout == "dense" and all(pattern.density == 1 for pattern in patterns)
