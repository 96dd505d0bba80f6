"""``slidesparse inspect``: show the layers of a checkpoint."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from slidesparse.blocks import STRIP, dense_blocks
from slidesparse.checkpoint.converted import DamagedError, natural, open_checkpoint, restore
from slidesparse.checkpoint.metadata import Metadata, sparsity_of
from slidesparse.checkpoint.names import SCALE, WEIGHT, is_expert, layer_names
from slidesparse.checkpoint.output import workers
from slidesparse.checkpoint.skeleton import Skeleton
from slidesparse.checkpoint.storage import Checkpoint, Reader, TensorSpec
from slidesparse.pattern import MixedPattern, Pattern, SlidePattern
from slidesparse.slide import obeys

ROWS = 64 * STRIP  # that are searched for 2:4 blocks at a time
RATIOS = ("2:4", "4:6", "6:8", "8:10", "10:12", "12:14", "14:16")  # sparsest first
# Suffixes for weights that are not read: those of compressed-tensors in 4 bits, of GPTQ and AWQ, of torchao
_UNREAD = (".weight_packed", ".qweight", "._weight_qdata")


@dataclass(frozen=True)
class LayerReport:
    """One linear layer."""

    name: str
    out_features: int  # N
    in_features: int  # K, before sliding
    dtype: str
    pattern: str | None  # as the checkpoint's metadata claim
    satisfies: str | None  # the sparsest of RATIOS that the weights obey, or their share of 2:4 blocks
    violations: int  # blocks that break the pattern, or rows that cannot be unslid
    first_violation: str | None
    bytes: int  # weight and scale
    expansion: float | None  # K' / K at the claimed pattern, or else at the satisfied one


@dataclass(frozen=True)
class CheckpointReport:
    """All linear layers of a checkpoint."""

    folder: str
    pattern: str | None
    layout: str | None  # also a format of compressed-tensors, as in `sparsity_of`
    layers: tuple[LayerReport, ...]
    experts: Mapping[str, int]  # dtype -> number of routed experts' matrices
    expert_patterns: Mapping[str, int]  # the sparsest pattern that they satisfy -> number of them, if any
    unread: int  # number of matrices in another tool's format, such as 4-bit ones

    @property
    def violations(self) -> int:
        """The total number of violations."""
        return sum(layer.violations for layer in self.layers)


def inspect(folder: str | Path) -> CheckpointReport:
    """Examine all linear layers of a checkpoint, converted or not.  Raises CheckpointError for a broken one."""
    checkpoint, metadata = open_checkpoint(folder)
    names = sorted(metadata.layers if metadata else Skeleton(checkpoint).layers, key=natural)
    with checkpoint.reader() as reader, workers() as pool:
        layers = tuple(pool.map(partial(_inspect_layer, checkpoint, reader, metadata), names))
        routed = [
            checkpoint.tensors[name + WEIGHT].spec
            for name in layer_names(checkpoint.tensors)
            if is_expert(name)
        ]
        obeyed = [*pool.map(lambda spec: _sparsest(spec, partial(reader.rows, spec.name)), routed)]
    claimed = metadata.pattern.ratio if metadata else None
    stored = sparsity_of(checkpoint.quantization_config() or {})
    layout = metadata.layout if metadata else stored[0] if stored else None
    unread = sum(name.endswith(_UNREAD) for name in checkpoint.tensors)
    experts = Counter(spec.dtype for spec in routed)
    satisfied = Counter(pattern.ratio for pattern in obeyed if pattern)
    patterns = {ratio: satisfied[ratio] for ratio in RATIOS if satisfied[ratio]}
    return CheckpointReport(str(folder), claimed, layout, layers, dict(experts), patterns, unread)


def _sparsest(
    spec: TensorSpec, read: Callable[[slice], Tensor], known: Pattern | None = None
) -> SlidePattern | None:
    """Return the sparsest pattern that a matrix obeys, if any, such as the ``known`` one; a dense one is read in part.

    Args:
        read: a function that returns rows of the matrix, [rows, K].
    """
    patterns = map(SlidePattern.parse, RATIOS)
    return next(
        (p for p in patterns if p == known or all(obeys(read(rows), p) for rows in spec.chunks())), None
    )


def _inspect_layer(
    checkpoint: Checkpoint, reader: Reader, metadata: Metadata | None, name: str
) -> LayerReport:
    spec = checkpoint.tensors[name + WEIGHT].spec
    entry = metadata.layers.get(name) if metadata else None
    broken, first = 0, None

    def read(rows: slice) -> Tensor:
        values = reader.rows(spec.name, rows)
        return restore(values, entry, metadata.layout, name, rows.start) if metadata and entry else values

    for rows in spec.chunks() if entry else ():
        try:
            read(rows)
        except DamagedError as error:
            broken, first = broken + error.violation.total, first or str(error)
    satisfied: Pattern | None = None if broken else _sparsest(spec, read, entry.pattern if entry else None)
    if entry and isinstance(entry.pattern, MixedPattern) and entry.pattern.share and not satisfied:
        strips = (slice(start, min(start + ROWS, spec.rows)) for start in range(0, spec.rows, ROWS))
        dense = torch.cat([dense_blocks(read(rows)) for rows in strips])
        satisfied = MixedPattern(Fraction(int((~dense).sum()), dense.numel()))
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
