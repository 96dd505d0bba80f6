"""``slidesparse inspect`` and ``verify``: show the layers of a checkpoint, and compare two checkpoints."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slidesparse.checkpoint.architectures import (
    SCALE,
    UNKNOWN,
    WEIGHT,
    is_expert,
    known_family,
    layer_names,
)
from slidesparse.checkpoint.bitnet import is_bitnet
from slidesparse.checkpoint.converted import DamagedError, lacking_share, natural, open_checkpoint, restore
from slidesparse.checkpoint.metadata import Metadata, sparsity_of
from slidesparse.checkpoint.storage import Checkpoint, Reader, TensorSpec
from slidesparse.pattern import ZEROS, SlidePattern
from slidesparse.slide import bits, blocks_of, nonzero, violations

RATIOS = ("2:4", "4:6", "6:8", "8:10", "10:12", "12:14", "14:16")  # sparsest first
# Suffixes for weights that are not read: those of compressed-tensors in 4 bits, of GPTQ and AWQ, of torchao
_UNREAD = (".weight_packed", ".qweight", "._weight_qdata")
_NOT_A_LAYER = re.compile(r"embed|lm_head|norm|\.wte$|\.wpe$", re.IGNORECASE)


@dataclass(frozen=True)
class LayerReport:
    """One linear layer."""

    name: str
    out_features: int  # N
    in_features: int  # K, before sliding
    dtype: str
    pattern: str | None  # as the checkpoint's metadata claim
    satisfies: str | None  # the sparsest pattern from 2:4 to 14:16 that the weights obey
    violations: int  # blocks that break the pattern, rows that cannot be unslid, or missing 2:4 blocks
    first_violation: str | None
    bytes: int  # weight and scale
    expansion: float | None  # K' / K at the claimed pattern, or else at the satisfied one


@dataclass(frozen=True)
class Fit:
    """The numbers of blocks and weights of a ternary model that a pattern would change."""

    pattern: str
    weights: int
    nonzeros: int
    blocks: int
    over: int  # blocks with too many non-zeros
    gone: int  # non-zeros that would be pruned

    @property
    def zeros(self) -> float:
        """The share of the weights that are zero."""
        return 1 - self.nonzeros / self.weights

    @property
    def share_over(self) -> float:
        """The share of the blocks with too many non-zeros."""
        return self.over / self.blocks

    @property
    def share_gone(self) -> float:
        """The share of the non-zeros that would be pruned."""
        return self.gone / max(1, self.nonzeros)


@dataclass(frozen=True)
class CheckpointReport:
    """All linear layers of a checkpoint."""

    folder: str
    pattern: str | None
    layout: str | None  # also a format of compressed-tensors, as in `sparsity_of`
    layers: tuple[LayerReport, ...]
    experts: Mapping[str, int]  # dtype -> number of routed experts' matrices, which are never pruned
    unread: int  # number of matrices in another tool's format, such as 4-bit ones
    fits: tuple[Fit, ...] = ()  # fits of RATIOS, for a BitNet model

    @property
    def violations(self) -> int:
        """The total number of violations."""
        return sum(layer.violations for layer in self.layers)

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {**asdict(self), "violations": self.violations}


def inspect(folder: str | Path) -> CheckpointReport:
    """Examine all linear layers of a checkpoint, converted or not.  Raises CheckpointError for a broken one."""
    checkpoint, metadata = open_checkpoint(folder)
    with checkpoint.reader() as reader:
        layers = tuple(
            _inspect_layer(checkpoint, reader, metadata, name) for name in linear_layers(checkpoint, metadata)
        )
        damaged = any(layer.violations for layer in layers)
        fits = _fits(checkpoint, reader, metadata) if is_bitnet(checkpoint.config) and not damaged else ()
    claimed = metadata.pattern.ratio if metadata else None
    stored = sparsity_of(checkpoint.quantization_config() or {})
    layout = metadata.layout if metadata else stored[0] if stored else None
    unread = sum(name.endswith(_UNREAD) for name in checkpoint.tensors)
    return CheckpointReport(str(folder), claimed, layout, layers, expert_dtypes(checkpoint), unread, fits)


def expert_dtypes(checkpoint: Checkpoint) -> dict[str, int]:
    """Count the matrices of routed experts by dtype."""
    routed = filter(is_expert, layer_names(checkpoint.tensors))
    return dict(Counter(checkpoint.tensors[name + WEIGHT].spec.dtype for name in routed))


def _fits(checkpoint: Checkpoint, reader: Reader, metadata: Metadata | None) -> tuple[Fit, ...]:
    fits = {ratio: Fit(ratio, 0, 0, 0, 0, 0) for ratio in RATIOS}
    names = [
        n for n in linear_layers(checkpoint, metadata) if checkpoint.tensors[n + WEIGHT].spec.dtype == "I8"
    ]
    for name in names:
        spec = checkpoint.tensors[name + WEIGHT].spec
        for rows in spec.chunks():
            values = reader.rows(spec.name, rows)
            if metadata and name in metadata.layers:
                values = restore(values, metadata, name, rows.start)
            for ratio in RATIOS:
                fits[ratio] = _added(fits[ratio], values)
    return tuple(fits.values()) if names else ()


def _added(fit: Fit, values: Tensor) -> Fit:
    """Return ``fit`` with the rows ``values`` added."""
    pattern = SlidePattern.parse(fit.pattern)
    layout = pattern.layout(values.shape[1])
    counts = blocks_of(nonzero(values), layout).sum(-1)
    surplus = (counts - (layout.length - ZEROS)).clamp_(min=0)
    return Fit(
        fit.pattern,
        fit.weights + values.numel(),
        fit.nonzeros + int(counts.sum()),
        fit.blocks + counts.numel(),
        fit.over + int((surplus > 0).sum()),
        fit.gone + int(surplus.sum()),
    )


def linear_layers(checkpoint: Checkpoint, metadata: Metadata | None) -> list[str]:
    """List the layers by metadata and architecture; for an unknown one, all matrices that may be linear layers."""
    if family := known_family(checkpoint.config):
        names = family.layers(checkpoint.tensors)
    else:
        names = [
            name
            for name in layer_names(checkpoint.tensors)
            if not _NOT_A_LAYER.search(name) and not is_expert(name)
        ]
    matrices = {name for name in names if len(checkpoint.tensors[name + WEIGHT].spec.shape) == 2}
    return sorted(matrices.union(metadata.layers if metadata else ()), key=natural)


def fused_layers(checkpoint: Checkpoint, metadata: Metadata | None) -> list[list[str]]:
    """List `linear_layers`, those that vLLM runs as one layer, such as q, k and v, together and in its order."""
    names = linear_layers(checkpoint, metadata)
    family = known_family(checkpoint.config) or UNKNOWN
    order = [part for group in family.fused for part in group]
    groups = {group[0]: group for group in family.groups(names)}
    inner = {name for group in groups.values() for name in group[1:]}

    def place(name: str) -> int:
        last = name.rpartition(".")[2]
        return order.index(last) if last in order else len(order)

    return [sorted(groups.get(name, (name,)), key=place) for name in names if name not in inner]


def _inspect_layer(
    checkpoint: Checkpoint, reader: Reader, metadata: Metadata | None, name: str
) -> LayerReport:
    spec = checkpoint.tensors[name + WEIGHT].spec
    entry = metadata.layers.get(name) if metadata else None
    candidates = [SlidePattern.parse(ratio) for ratio in RATIOS]
    broken, first = 0, None
    for rows in spec.chunks():
        values = reader.rows(spec.name, rows)
        if entry and metadata:
            try:
                values = restore(values, metadata, name, rows.start)
            except DamagedError as error:
                broken, first = broken + error.violation.total, first or str(error)
                candidates = []
        candidates = [pattern for pattern in candidates if violations(values, pattern) is None]
    if entry and metadata and (lacking := lacking_share(checkpoint, reader, metadata, name)):
        broken, first = lacking.violation.total, str(lacking)
    satisfied = candidates[0] if candidates else None
    in_features = entry.in_features if entry else spec.columns
    shown = entry.pattern if entry else satisfied
    slided = shown.layout(in_features).slided if isinstance(shown, SlidePattern) else in_features
    scale = checkpoint.tensors.get(name + SCALE)
    return LayerReport(
        name=name,
        out_features=spec.rows,
        in_features=in_features,
        dtype=spec.dtype,
        pattern=entry.pattern.ratio if entry else None,
        satisfies=satisfied.ratio if satisfied else None,
        violations=broken,
        first_violation=first,
        bytes=checkpoint.tensors[spec.name].nbytes + (scale.nbytes if scale else 0),
        expansion=slided / in_features if shown and in_features else None,
    )


@dataclass(frozen=True)
class Difference:
    """The first difference between two checkpoints."""

    tensor: str
    what: str
    row: int | None = None
    column: int | None = None
    first: str | None = None
    second: str | None = None

    def __str__(self) -> str:
        if self.row is None:
            return f"{self.tensor}: {self.what}"
        return f"{self.tensor}: row {self.row}, column {self.column}: {self.first} and {self.second}"


@dataclass(frozen=True)
class CheckpointComparison:
    """Two checkpoints, compared tensor by tensor."""

    first: str
    second: str
    tensors: int
    slided: int  # layers that are slided in either checkpoint
    bytes: int
    difference: Difference | None

    @property
    def equal(self) -> bool:
        """Whether no tensor differs."""
        return self.difference is None

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {**asdict(self), "equal": self.equal}


class _Side:
    """One of two compared checkpoints, whose layers are read in the dense layout."""

    def __init__(self, folder: str | Path) -> None:
        self.checkpoint, self.metadata = open_checkpoint(folder)

    def slided(self, name: str) -> bool:
        """Return whether a tensor is the weight of a slided layer."""
        metadata = self.metadata
        return bool(metadata and metadata.layout == "slided" and name.removesuffix(WEIGHT) in metadata.layers)

    def spec(self, name: str) -> TensorSpec:
        """Return a tensor's spec in the dense layout."""
        spec = self.checkpoint.tensors[name].spec
        if self.metadata and self.slided(name):
            k = self.metadata.layers[name.removesuffix(WEIGHT)].in_features
            return spec._replace(shape=(spec.rows, k))
        return spec

    def rows(self, reader: Reader, name: str, rows: slice) -> Tensor:
        """Read rows [rows, K].  Raises DamagedError for slided rows that cannot be unslid."""
        values = reader.rows(name, rows)
        if self.metadata and self.slided(name):
            return restore(values, self.metadata, name.removesuffix(WEIGHT), rows.start)
        return values


def verify(first: str | Path, second: str | Path) -> CheckpointComparison:
    """Compare all tensors of two checkpoints bit for bit; weight layouts and shards may differ.

    Raises CheckpointError for a broken checkpoint, DamagedError for slided rows that cannot be unslid.
    """
    a, b = _Side(first), _Side(second)
    names = list(a.checkpoint.tensors)
    difference = _missing(a, b)
    with a.checkpoint.reader() as read_a, b.checkpoint.reader() as read_b:
        for name in names if difference is None else ():
            difference = _compare(name, a, b, read_a, read_b)
            if difference:
                break
    slided = sum(a.slided(name) or b.slided(name) for name in names if name in b.checkpoint.tensors)
    size = sum(stored.nbytes for stored in a.checkpoint.tensors.values())
    return CheckpointComparison(str(first), str(second), len(names), slided, size, difference)


def _missing(a: _Side, b: _Side) -> Difference | None:
    for side, other in ((a, b), (b, a)):
        absent = min(set(side.checkpoint.tensors) - set(other.checkpoint.tensors), default=None)
        if absent:
            return Difference(absent, f"is in {side.checkpoint.folder} but not in {other.checkpoint.folder}")
    return None


def _compare(name: str, a: _Side, b: _Side, read_a: Reader, read_b: Reader) -> Difference | None:
    spec_a, spec_b = a.spec(name), b.spec(name)
    if (spec_a.dtype, spec_a.shape) != (spec_b.dtype, spec_b.shape):
        return Difference(
            name, f"is {spec_a.dtype} {list(spec_a.shape)} and {spec_b.dtype} {list(spec_b.shape)}"
        )
    for rows in spec_a.chunks():
        values_a, values_b = a.rows(read_a, name, rows), b.rows(read_b, name, rows)
        different = bits(values_a) != bits(values_b)
        if bool(different.any()):
            row, column = divmod(int(different.flatten().to(torch.int8).argmax()), spec_a.columns)
            shown = [_show(values[row, column]) for values in (values_a, values_b)]
            return Difference(name, "values differ", rows.start + row, column, *shown)
    return None


def _show(value: Tensor) -> str:
    """Format a value, with the bits of a float, because 0.0 and -0.0 differ here."""
    if not value.dtype.is_floating_point:
        return str(value.item())
    width = value.element_size()
    raw = int(bits(value.reshape(1))) & (2 ** (8 * width) - 1)
    return f"{value.float().item():g} (bits {raw:#0{2 + 2 * width}x})"
