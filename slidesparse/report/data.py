"""Reading what the benchmark commands leave in a folder: one CSV of latencies and one JSON of conditions each.

A run may have been stopped anywhere: files, rows and the end of the last line may be missing.  Whatever is not
there is reported in words (`Results.notes`, `Section.absent`), never filled in.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slidesparse.pattern import PatternError, SlidePattern

LATENCIES = ("p20_us", "p50_us", "p80_us")
KERNEL_COLUMNS = (
    *("mode", "model", "layer", "dtype", "pattern", "M", "N", "K", "provider"),
    *LATENCIES,
    "algorithm",
)
LINEAR_COLUMNS = ("model", "layer", "dtype", "pattern", "M", "provider", *LATENCIES)
BANDWIDTH_COLUMNS = ("kernel", "dtype", "M", "K", "us", "GBps", "copy_GBps", "fraction")

SQUARE, MODEL = "square", "model"  # modes of kernel.csv
MODES = (SQUARE, MODEL)
SPARSE, DENSE = "cusparselt", "cublaslt"  # providers: ours, and the dense baseline of the papers
HOPPER = "hopper"
# Of whole models: whatever the plugin takes, dense weights kept beside it, norms and activations by themselves.
PLUGIN, KEPT, UNFUSED = "sparse", "sparse+dense", "unfused"
OURS = (SPARSE, HOPPER, PLUGIN, KEPT, UNFUSED)  # sparse providers, which have sections of their own
STOCK = "stock"  # the provider that vLLM itself would use
SUM = "sum"  # linear.csv: the layer that stands for the four of a model together
LAYERS = 4  # linear layers of a decoder block: QKV, output, gate and up, down
DTYPE_ORDER = ("int8", "fp8", "fp16", "bf16")


class ReportError(ValueError):
    """A results file that cannot be read; the message names the file, the line and the remedy."""


@dataclass(frozen=True)
class Line:
    """One line of a CSV file, by column name."""

    place: str  # "line 3 of kernel.csv"
    fields: dict[str, str]

    def integer(self, column: str) -> int:
        """A positive whole number."""
        value = self.number(column)
        if value is None or value != int(value):
            raise ReportError(
                f"{self.place}: {column} is {self.fields[column]!r}, not a whole number above 0"
            )
        return int(value)

    def number(self, column: str) -> float | None:
        """A finite number above 0; None where the field is empty or nan: not measured."""
        text = self.fields[column].strip()
        try:
            value = float(text) if text else math.nan
        except ValueError:
            value = -1.0
        if math.isnan(value):
            return None
        if not 0 < value < math.inf:
            raise ReportError(f"{self.place}: {column} is {text!r}; allowed: a number above 0, or nothing")
        return value

    def pattern(self, column: str) -> SlidePattern | None:
        """A pattern in either spelling; None for ``dense``."""
        try:
            return None if self.fields[column] == "dense" else SlidePattern.parse(self.fields[column])
        except PatternError as error:
            raise ReportError(f"{self.place}: {error}; or dense") from None


@dataclass(frozen=True)
class Measurement:
    """Latency percentiles, in microseconds, of one product or one linear layer."""

    mode: str
    model: str  # "" for square products
    layer: str
    dtype: str
    pattern: SlidePattern | None  # None: dense
    m: int
    n: int  # 0 where the file does not say (linear.csv)
    k: int  # of the dense weight, before sliding; 0 where the file does not say
    provider: str
    p20: float
    p50: float
    p80: float


@dataclass(frozen=True)
class Results:
    """What one benchmark left."""

    name: str  # "kernel": of kernel.csv and kernel.json
    rows: tuple[Measurement, ...]
    conditions: dict[str, Any]
    notes: tuple[str, ...]  # what is missing or was left out, in sentences

    def dtypes(self, mode: str) -> list[str]:
        """Those measured, in the order of DTYPE_ORDER."""
        return sorted({row.dtype for row in self.rows if row.mode == mode}, key=dtype_order)


def dtype_order(dtype: str) -> tuple[int, str]:
    """Sort key: the order of DTYPE_ORDER, others after it by name."""
    return (DTYPE_ORDER.index(dtype) if dtype in DTYPE_ORDER else len(DTYPE_ORDER), dtype)


def pattern_order(pattern: SlidePattern | None) -> float:
    """Sort key: dense, 2:4, 4:6, ..., 2_inf."""
    return 0 if pattern is None else pattern.length or math.inf


def pattern_name(pattern: SlidePattern | None) -> str:
    """``dense``, or the paper's spelling."""
    return "dense" if pattern is None else pattern.ratio


def read_csv(path: Path, columns: Sequence[str]) -> tuple[list[Line], list[str]]:
    """The lines of a CSV file, and notes on what is not there.

    A last line without line end, or with too few fields, was being written when the run stopped, and is left out.
    Raises ReportError for a missing column, and for a short line that is not the last.
    """
    if not path.is_file():
        return [], [f"`{path.name}` is not there."]
    text, notes = path.read_text(encoding="utf-8", errors="replace"), []
    if text and not text.endswith("\n"):
        text = text[: text.rfind("\n") + 1]
        notes.append(f"The last line of `{path.name}` is torn and was left out.")
    rows = [row for row in csv.reader(io.StringIO(text)) if row]
    if not rows:
        return [], [*notes, f"`{path.name}` is empty."]
    head, lines = rows[0], []
    if missing := [column for column in columns if column not in head]:
        raise ReportError(f"{path.name} lacks the columns {', '.join(missing)}; it has {', '.join(head)}")
    for number, fields in enumerate(rows[1:], 2):
        place = f"line {number} of {path.name}"
        if len(fields) == len(head):
            lines.append(Line(place, dict(zip(head, fields, strict=True))))
        elif number == len(rows) and not notes:
            notes.append(f"The last line of `{path.name}` is torn and was left out.")
        else:
            raise ReportError(f"{place} has {len(fields)} fields, its head {len(head)}; correct or delete it")
    return lines, notes


def read_conditions(path: Path) -> tuple[dict[str, Any], list[str]]:
    """The JSON object of a run's conditions, and notes on what is not there."""
    if not path.is_file():
        return {}, [f"`{path.name}` is not there: the conditions of the run are unknown."]
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        return {}, [f"`{path.name}` is not readable JSON ({error}): the conditions of the run are unknown."]
    if not isinstance(found, dict):
        raise ReportError(f"{path.name} holds a {type(found).__name__}; allowed: an object of conditions")
    return found, []


def read_kernel(folder: Path) -> Results:
    """``kernel.csv`` and ``kernel.json``.  Raises ReportError for what cannot be read."""
    return _results(folder, "kernel", KERNEL_COLUMNS)


def read_linear(folder: Path) -> Results:
    """``linear.csv`` and ``linear.json``; the mode of its rows is "model".  Raises ReportError."""
    return _results(folder, "linear", LINEAR_COLUMNS)


def _results(folder: Path, name: str, columns: Sequence[str]) -> Results:
    lines, notes = read_csv(folder / f"{name}.csv", columns)
    conditions, more = read_conditions(folder / f"{name}.json") if lines else ({}, [])
    rows: dict[tuple[object, ...], Measurement] = {}
    failed = repeated = 0
    for line in lines:
        row = _measurement(line, shapes="N" in columns)
        if row is None:
            failed += 1
            continue
        key = (row.mode, row.model, row.layer, row.dtype, row.pattern, row.m, row.provider)
        repeated += key in rows
        rows[key] = row
    if failed:
        notes.append(f"{failed} lines of `{name}.csv` hold no latency: refused or not measured.")
    if repeated:
        notes.append(f"{repeated} measurements of `{name}.csv` were repeated: the last one counts.")
    return Results(name, tuple(rows.values()), conditions, (*notes, *more))


def _measurement(line: Line, *, shapes: bool) -> Measurement | None:
    mode = line.fields["mode"] if shapes else MODEL
    if mode not in MODES:
        raise ReportError(f"{line.place}: mode is {mode!r}; allowed: {', '.join(MODES)}")
    p20, p50, p80 = (line.number(column) for column in LATENCIES)
    if p20 is None or p50 is None or p80 is None:
        return None
    return Measurement(
        mode=mode,
        model=line.fields["model"] if mode == MODEL else "",
        layer=line.fields["layer"] if mode == MODEL else "",
        dtype=line.fields["dtype"].lower(),
        pattern=line.pattern("pattern"),
        m=line.integer("M"),
        n=line.integer("N") if shapes else 0,
        k=line.integer("K") if shapes else 0,
        provider=line.fields["provider"],
        p20=p20,
        p50=p50,
        p80=p80,
    )
