"""The report of a conversion: each pruned layer, read back from the disk, with the errors that calibration measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import slidesparse
from slidesparse.calibrate.distill import Distilled
from slidesparse.checkpoint.architectures import SCALE, WEIGHT
from slidesparse.checkpoint.converted import DamagedError, lacking_share, natural, open_checkpoint, restore
from slidesparse.checkpoint.metadata import Metadata
from slidesparse.checkpoint.output import workers
from slidesparse.checkpoint.storage import Checkpoint, Reader
from slidesparse.convert.choose import Outcome
from slidesparse.pattern import Pattern
from slidesparse.slide import nonzero

ERRORS = ("error_pruned", "error_quantized", "error_finetuned", "block_error", "block_error_finetuned")
MEASURED = ("method", *ERRORS, "tokens", "seconds")


@dataclass(frozen=True)
class Report:
    """The outcome of a conversion, or in a dry run what it would be."""

    source: Path
    out: Path
    pattern: Pattern
    quant: str
    layout: str
    method: str
    patterns: dict[str, Pattern]  # pruned layers
    kept: dict[str, str]  # 2-D weights left as they are -> why
    skipped: dict[str, str]  # linear layers quantized, not pruned -> why
    bytes_in: int
    bytes_out: int
    seconds: float
    rewritten: str = ""  # in words, what became of a source's quantization that is not written as it was
    experts: Mapping[str, int] = field(default_factory=dict)  # matrices: in "w8a8", and "kept"
    samples: str = ""  # of calibration, in words
    note: str = ""  # what the user should know of the samples
    rotation: str = ""  # whether the model was rotated, or why not; with calibration
    budget: Outcome | None = None  # what a budget led to
    lesson: str = ""  # what distillation takes, in words
    distilled: Distilled | None = None  # what it led to
    layers: tuple[dict[str, Any], ...] = ()  # `layer_rows`; with calibration or ``check``
    ternary: bool = False  # whether the source is a BitNet one
    made: bool = True  # whether anything was pruned now, not just laid out anew
    left_out: tuple[str, ...] = ()  # files of the source that were not copied

    @property
    def pruned(self) -> tuple[str, ...]:
        """The pruned layers."""
        return tuple(self.patterns)

    @property
    def sensitivity(self) -> list[str]:
        """The pruned layers, the largest relative error of their output first; empty without calibration."""
        known = [row for row in self.layers if row["error_quantized"] is not None]
        return [row["name"] for row in sorted(known, key=lambda row: (-final_error(row), row["name"]))]

    @property
    def rate(self) -> float:
        """MB of source tensors per second over all passes."""
        return self.bytes_in / 1e6 / max(self.seconds, 1e-9)

    def to_json(self) -> dict[str, Any]:
        """Return what ``--report`` writes."""
        return {
            "slidesparse": slidesparse.__version__,
            "source": str(self.source),
            "out": str(self.out),
            "pattern": self.pattern.ratio,
            "quant": self.quant,
            "layout": self.layout,
            "method": self.method,
            "calibration": self.samples or None,
            "rotation": self.rotation or None,
            "budget": self.budget.to_json() if self.budget else None,
            "distilled": self.distilled.to_json() if self.distilled else None,
            "seconds": round(self.seconds, 3),
            "violations": sum(row["violations"] for row in self.layers),
            "dead_columns": sum(row["dead_columns"] for row in self.layers),
            "layers": list(self.layers),
            "sensitivity": self.sensitivity,
            "skipped": self.skipped,
            "kept": self.kept,
            "rewritten": self.rewritten or None,
            "experts": dict(self.experts),
        }


def final_error(row: Mapping[str, Any]) -> float:
    """Return the relative output error of a layer as it was written."""
    tuned: float | None = row["error_finetuned"]
    return row["error_quantized"] if tuned is None else tuned


@dataclass(frozen=True)
class Facts:
    """The facts about a pruned layer, read back from the disk."""

    name: str
    pattern: str
    out_features: int  # N
    in_features: int  # K
    zeros: int
    violations: int  # blocks with too many non-zeros
    dead_columns: int  # in-features whose weights were not all zero in the source, and are now
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
    if lacking := lacking_share(checkpoint, reader, metadata, name):
        broken, first = lacking.found.total, lacking
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
    """Return which in-features of a source's layer [N, K] have a weight that is not zero; all, if it is slided."""
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
    """Return the report's rows: the facts of each layer, and calibration's measurements or None."""
    known = {row["name"]: row for row in measured}
    rows = []
    for fact in facts:
        found = known.get(fact.name, {"method": method})
        rows.append({**asdict(fact), **{key: found.get(key) for key in MEASURED}})
    return rows
