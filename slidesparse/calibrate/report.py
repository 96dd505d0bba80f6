"""What a conversion did to each layer: read back from the disk, beside what calibration measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slidesparse.architectures import SCALE, WEIGHT
from slidesparse.checkpoint import Checkpoint, Reader
from slidesparse.metadata import Metadata
from slidesparse.publish import workers
from slidesparse.slide import nonzero
from slidesparse.stored import DamagedError, natural, open_checkpoint, restore

ERRORS = ("error_pruned", "error_quantized", "error_finetuned", "block_error", "block_error_finetuned")
MEASURED = ("method", *ERRORS, "tokens", "seconds")


@dataclass(frozen=True)
class Facts:
    """A pruned layer as it lies on the disk."""

    name: str
    pattern: str
    out_features: int  # N
    in_features: int  # K
    zeros: int
    violations: int  # blocks with too many non-zeros
    dead_columns: int  # in-features of which the source has weights, and nothing is left
    scale_min: float  # of rows that are not all zero
    scale_max: float


def read_back(folder: Path, source: Checkpoint) -> list[Facts]:
    """Read the pruned layers of a checkpoint just written.

    Raises DamagedError, which names the first, when any block breaks its pattern.
    """
    checkpoint, metadata = open_checkpoint(folder)
    assert metadata
    names = sorted(metadata.layers, key=natural)
    with checkpoint.reader() as reader, workers() as pool:
        read = partial(_facts, checkpoint, metadata, reader, source)
        found = list(pool.map(read, names))
    for _, error in found:
        if error:
            raise error
    return [facts for facts, _ in found]


def _facts(
    checkpoint: Checkpoint, metadata: Metadata, reader: Reader, source: Checkpoint, name: str
) -> tuple[Facts, DamagedError | None]:
    spec, entry = checkpoint.tensors[name + WEIGHT].spec, metadata.layers[name]
    alive = torch.zeros(entry.in_features, dtype=torch.bool)
    zeros, broken, first = 0, 0, None
    for rows in spec.chunks():
        try:
            values = nonzero(restore(reader.rows(spec.name, rows), metadata, name, rows.start))
        except DamagedError as error:
            broken, first = broken + error.found.total, first or error
            continue
        alive |= values.any(0)
        zeros += int((~values).sum())
    dead = 0 if bool(alive.all()) else int((_columns_used(source, name, len(alive)) & ~alive).sum())
    scale = reader.whole(name + SCALE).float()
    used = scale[scale > 0]
    facts = Facts(
        name=name,
        pattern=entry.pattern.ratio,
        out_features=spec.rows,
        in_features=entry.in_features,
        zeros=zeros,
        violations=broken,
        dead_columns=dead,
        scale_min=float(used.min()) if len(used) else 0.0,
        scale_max=float(used.max()) if len(used) else 0.0,
    )
    return facts, first


def _columns_used(source: Checkpoint, name: str, in_features: int) -> Tensor:
    """Which in-features of a layer of the source [N, K] have a weight that is not zero; all, if it is slided."""
    spec = source.tensors[name + WEIGHT].spec
    if spec.columns != in_features:
        return torch.ones(in_features, dtype=torch.bool)
    used = torch.zeros(in_features, dtype=torch.bool)
    with source.reader() as reader:
        for rows in spec.chunks():
            used |= nonzero(reader.rows(spec.name, rows)).any(0)
    return used


def layer_rows(
    facts: Iterable[Facts], measured: Iterable[Mapping[str, Any]], method: str
) -> list[dict[str, Any]]:
    """The report's rows: facts, and what calibration measured, None where there was none."""
    known = {row["name"]: row for row in measured}
    rows = []
    for fact in facts:
        found = known.get(fact.name, {"method": method})
        rows.append({**asdict(fact), **{key: found.get(key) for key in MEASURED}})
    return rows


def sensitivity(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Names of layers, the largest relative output error first; empty without calibration."""
    known = [row for row in rows if row["error_quantized"] is not None]
    return [row["name"] for row in sorted(known, key=lambda row: (-final_error(row), row["name"]))]


def final_error(row: Mapping[str, Any]) -> float:
    """The relative output error of a layer as it was written."""
    tuned: float | None = row["error_finetuned"]
    return row["error_quantized"] if tuned is None else tuned
