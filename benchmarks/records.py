"""Tables on disk that benchmarks append to, row by row, and continue after an interruption; with their conditions.

Every measuring command writes OUT/NAME.csv, of one of the formats below, and OUT/NAME.json: GPU, clocks, versions, date
and command lines.
"""

from __future__ import annotations

import csv
import io
import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from slidesparse.errors import SlideSparseError

VERSIONS = "versions"
SHARED_CONDITIONS = ("gpu", "capability", VERSIONS)  # conditions that all rows of a table share


@dataclass(frozen=True)
class Format:
    """The columns of a table; those of ``key`` identify a row."""

    name: str
    key: tuple[str, ...]
    values: tuple[str, ...]

    @property
    def columns(self) -> tuple[str, ...]:
        """All columns, in the order of the file."""
        return self.key + self.values


TIMES = ("p20_us", "p50_us", "p80_us")
_KERNEL = ("mode", "model", "layer", "dtype", "pattern", "M", "N", "K", "provider")
_CELL = ("model", "dtype", "stage", "M", "pattern", "system")
KERNEL = Format("kernel", _KERNEL, (*TIMES, "algorithm"))  # K is that of the dense weight
LINEAR = Format("linear", ("model", "layer", "dtype", "pattern", "M", "provider"), TIMES)
# tokens_per_joule is from the GPU's energy counter.  step_ms is the median time of a step of M tokens.  Both are of
# resident engines, on a GPU and anywhere; otherwise they are empty.
E2E = Format("e2e", (*_CELL, "round"), ("tokens_per_s", "tokens_per_joule", "step_ms"))
# `sparsity` is "2:4" or "dense"; `offsets` are each out-feature's "own" or those of a "strip" of 32, "-" when dense.
_SPMM = ("dtype", "sparsity", "offsets", "M", "N", "K", "provider")
SPMM = Format("spmm", ("mode", "model", "layer", *_SPMM), (*TIMES, "error"))
COUNTERS = {  # column -> metric of Nsight Compute
    "sm_pct": "sm__throughput.avg.pct_of_peak_sustained_elapsed",
    "dram_pct": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "warps_pct": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "ipc": "smsp__inst_executed.avg.per_cycle_active",
    "l1_bytes": "l1tex__t_bytes.sum",
    "load_conflicts": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum",
    "store_conflicts": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_st.sum",
    **{
        f"stall_{reason}": f"smsp__average_warps_issue_stalled_{reason}_per_issue_active.ratio"
        for reason in ("long_scoreboard", "short_scoreboard", "mio_throttle", "barrier", "wait", "drain")
    },
}
SPMM_COUNTERS = Format("spmm_counters", _SPMM, tuple(COUNTERS))


class RecordsError(SlideSparseError, RuntimeError):
    """A table cannot be read or continued; the message names the file and the remedy."""


def read_rows(path: Path, columns: Sequence[str]) -> tuple[list[dict[str, str]], bool]:
    """Return the rows of a CSV file, none if it does not exist, and whether its last line is incomplete.

    An incomplete last line, which a killed process may leave, is ignored.  Raises RecordsError for other columns, and
    for a line of another length.
    """
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    complete = text[: text.rfind("\n") + 1]
    lines = csv.reader(io.StringIO(complete, newline=""))
    header = next(lines, None)
    if header not in (None, list(columns)):
        raise RecordsError(
            f"{path} has the columns {','.join(header or ())}, not {','.join(columns)}; "
            "remove the file or choose another folder with --out"
        )
    rows = []
    for number, values in enumerate(lines, 2):
        if len(values) != len(columns):
            raise RecordsError(
                f"line {number} of {path} has {len(values)} values for {len(columns)} columns; correct or remove it"
            )
        rows.append(dict(zip(columns, values, strict=True)))
    return rows, complete != text


class Records:
    """An append-only CSV file: each row is written once, an incomplete last line is dropped.  Raises RecordsError."""

    def __init__(self, folder: Path, form: Format) -> None:
        self.path, self._form = folder / f"{form.name}.csv", form
        self.rows, torn = read_rows(self.path, form.columns)
        folder.mkdir(parents=True, exist_ok=True)
        if torn:
            content = self.path.read_bytes()
            os.truncate(self.path, content.rfind(b"\n") + 1)
        if not self.path.exists() or not self.path.stat().st_size:
            self.path.write_text(_line(form.columns), encoding="utf-8")
        self._keys = {self._key_of(row) for row in self.rows}

    def _key_of(self, row: Mapping[str, object]) -> tuple[str, ...]:
        return tuple(str(row[name]) for name in self._form.key)

    def has(self, row: Mapping[str, object]) -> bool:
        """Return whether there is a row with the key of ``row``."""
        return self._key_of(row) in self._keys

    def add(self, row: Mapping[str, object]) -> None:
        """Append a row, with numbers rounded to nanoseconds, and flush it."""
        cells = {name: _text(row[name]) for name in self._form.columns}
        with self.path.open("a", encoding="utf-8", newline="") as file:
            file.write(_line(list(cells.values())))
        self.rows.append(cells)
        self._keys.add(self._key_of(cells))


def _text(value: object) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def _line(cells: Sequence[str]) -> str:
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerow(cells)
    return buffer.getvalue()


def write_conditions(path: Path, facts: Mapping[str, Any], same: Sequence[str] = SHARED_CONDITIONS) -> None:
    """Write conditions beside a table, with the date and the command line of this run added to those before.

    Raises RecordsError when the table was begun on another GPU, with other versions, or with another value of any of
    ``same``, because one table must not mix machines.  Only versions that both have are compared: an added system may
    need another library.
    """
    before = read_conditions(path)
    old, new = before.get(VERSIONS, {}), facts.get(VERSIONS, {})
    was, now_is = {**before, VERSIONS: {**new, **old}}, {**facts, VERSIONS: {**old, **new}}
    for name in same:
        if before and was.get(name) != now_is.get(name):
            raise RecordsError(
                f"{path} was measured with {name} {was.get(name)}, but here it is {now_is.get(name)}; "
                "choose another folder with --out"
            )
    line = shlex.join(["python", "-m", "benchmarks", *sys.argv[1:]])
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    document = {
        **before,
        **now_is,
        "date": before.get("date", now),
        "last_date": now,
        "commands": [*before.get("commands", []), line],
    }
    _write(path, document)


def amend_conditions(path: Path, facts: Mapping[str, Any]) -> None:
    """Add facts known only after the start of a run to the conditions that `write_conditions` wrote."""
    _write(path, {**read_conditions(path), **facts})


def _write(path: Path, document: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def read_conditions(path: Path) -> dict[str, Any]:
    """Return the JSON object beside a table, or an empty one if it does not exist.  Raises RecordsError."""
    if not path.exists():
        return {}
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RecordsError(
            f"{path} cannot be read: {error}; remove it or choose another folder with --out"
        ) from error
    return document if isinstance(document, dict) else {}
