"""The report of a conversion: each pruned layer as read back from disk, with the errors measured by calibration."""

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
from slidesparse.checkpoint.converted import DamagedError, lacking_share, natural, open_checkpoint, restore
from slidesparse.checkpoint.metadata import Metadata
from slidesparse.checkpoint.names import SCALE, WEIGHT
from slidesparse.checkpoint.output import workers
from slidesparse.checkpoint.storage import Checkpoint, Reader
from slidesparse.convert.choose import Outcome
from slidesparse.pattern import Pattern
from slidesparse.slide import nonzero

ERRORS = ("error_pruned", "error_quantized", "error_finetuned", "block_error", "block_error_finetuned")
MEASURED = ("method", *ERRORS, "tokens", "seconds")


@dataclass(frozen=True)
class Report:
    """The result of a conversion, or the plan in a dry run."""

    source: Path
    out: Path
    pattern: Pattern
    quant: str
    layout: str
    method: str
    patterns: dict[str, Pattern]  # pruned layers
    kept: dict[str, str]  # 2-D weights that are not changed -> reason
    skipped: dict[str, str]  # linear layers that are quantized but not pruned -> reason
    bytes_in: int
    bytes_out: int
    seconds: float
    rewritten: str = ""  # description of the changes to the source's quantization
    experts: Mapping[str, int] = field(default_factory=dict)  # number of matrices: "w8a8" and "kept"
    samples: str = ""  # description of the calibration samples
    note: str = ""  # hint about the samples
    rotation: str = ""  # with calibration: how the model was rotated, or why not
    smoothing: str = ""  # with calibration: what smoothing does, if it does anything
    budget: Outcome | None = None  # result of a budget
    distillation: str = ""  # requirements of distillation
    distilled: Distilled | None = None  # result of distillation
    layers: tuple[dict[str, Any], ...] = ()  # `layer_rows`, with calibration
    ternary: bool = False  # whether the source is a BitNet model
    newly_pruned: bool = True  # whether weights were pruned, which did not obey their patterns yet
    left_out: tuple[str, ...] = ()  # files of the source that were not copied
    unserved: str = ""  # why the vLLM that is installed does not serve the model

    @property
    def pruned(self) -> tuple[str, ...]:
        """The pruned layers."""
        return tuple(self.patterns)

    @property
    def sensitivity(self) -> list[str]:
        """The pruned layers by descending relative output error; empty without calibration."""
        measured = [row for row in self.layers if row["error_quantized"] is not None]
        return [row["name"] for row in sorted(measured, key=lambda row: (-final_error(row), row["name"]))]

    @property
    def rate(self) -> float:
        """The MB of source tensors converted per second."""
        return self.bytes_in / 1e6 / max(self.seconds, 1e-9)

    def to_json(self) -> dict[str, Any]:
        """Return the content of the ``--report`` file."""
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
            "smoothing": self.smoothing or None,
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
    """Return the final relative output error of a layer."""
    tuned: float | None = row["error_finetuned"]
    return row["error_quantized"] if tuned is None else tuned


@dataclass(frozen=True)
class Facts:
    """Properties of a pruned layer, read back from disk."""

    name: str
    pattern: str
    out_features: int  # N
    in_features: int  # K
    zeros: int
    violations: int  # blocks with too many non-zeros
    dead_columns: int  # in-features with non-zero weights in the source and none in the output
    scale_min: float  # absolute, over rows that are not all zero
    scale_max: float


def read_back(folder: Path, source: Checkpoint) -> list[Facts]:
    """Read back the pruned layers of a new checkpoint.

    Raises DamagedError, which names the first violation, if any block breaks its pattern.
    """
    checkpoint, metadata = open_checkpoint(folder)
    assert metadata
    names = sorted(metadata.layers, key=natural)
    with checkpoint.reader() as reader, source.reader() as original, workers() as pool:
        read_layer = partial(_facts, checkpoint, metadata, reader, original)
        results = list(pool.map(read_layer, names))
    for _, error in results:
        if error:
            raise error
    return [facts for facts, _ in results]


def _facts(
    checkpoint: Checkpoint, metadata: Metadata, reader: Reader, original: Reader, name: str
) -> tuple[Facts, DamagedError | None]:
    spec, entry = checkpoint.tensors[name + WEIGHT].spec, metadata.layers[name]
    alive = torch.zeros(entry.in_features, dtype=torch.bool)
    zeros, broken, first = 0, 0, None
    for rows in spec.chunks():
        try:
            values = nonzero(restore(reader.rows(spec.name, rows), metadata, name, rows.start))
        except DamagedError as error:
            broken, first = broken + error.violation.total, first or error
            continue
        alive |= values.any(0)
        zeros += int((~values).sum())
    if lacking := lacking_share(checkpoint, reader, metadata, name):
        broken, first = lacking.violation.total, lacking
    dead = 0 if bool(alive.all()) else int((_columns_used(original, name, len(alive)) & ~alive).sum())
    scale = reader.whole(name + SCALE).float().abs()  # some tools write negative ones
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


def _columns_used(source: Reader, name: str, in_features: int) -> Tensor:
    """Return whether each in-feature of a source layer has a non-zero weight, bool [K]; all True if it is slided."""
    spec = source.checkpoint.tensors[name + WEIGHT].spec
    if spec.columns != in_features:
        return torch.ones(in_features, dtype=torch.bool)
    used = torch.zeros(in_features, dtype=torch.bool)
    for rows in spec.chunks():
        used |= nonzero(source.rows(spec.name, rows)).any(0)
    return used


def layer_rows(
    facts: Iterable[Facts], measured: Iterable[Mapping[str, Any]], method: str
) -> list[dict[str, Any]]:
    """Return the report's rows: the facts of each layer, with calibration's measurements or None."""
    by_name = {row["name"]: row for row in measured}
    rows = []
    for fact in facts:
        values = by_name.get(fact.name, {"method": method})
        rows.append({**asdict(fact), **{key: values.get(key) for key in MEASURED}})
    return rows
