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

Row = Mapping[str, object]


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


# Microseconds and millijoules of one call; mj is empty where the GPU's energy counter was not read.
TIMES, ENERGY = ("p20_us", "p50_us", "p80_us"), "mj"
KERNEL = Format(  # K is that of the dense weight
    "kernel",
    ("mode", "model", "layer", "dtype", "pattern", "M", "N", "K", "provider"),
    (*TIMES, ENERGY, "algorithm"),
)
LINEAR = Format("linear", ("model", "layer", "dtype", "pattern", "M", "provider"), (*TIMES, ENERGY))
# context: tokens of a prompt.  step_ms is the median time of a step of M tokens; tokens_per_joule is by the GPU's
# energy counter, and empty without one; graph_ms is the time of the GPU alone for all decoder layers of a decode step.
E2E = Format(
    "e2e",
    ("model", "dtype", "stage", "M", "context", "system", "pattern", "round"),
    ("step_ms", "tokens_per_s", "tokens_per_joule", "graph_ms"),
)


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
    """An append-only CSV file, whose incomplete last line is dropped; of rows with one key the last counts.

    Raises RecordsError.
    """

    def __init__(self, folder: Path, form: Format) -> None:
        self.path, self._form = folder / f"{form.name}.csv", form
        self.rows, torn = read_rows(self.path, form.columns)
        folder.mkdir(parents=True, exist_ok=True)
        if torn:
            os.truncate(self.path, self.path.read_bytes().rfind(b"\n") + 1)
        if not self.path.exists() or not self.path.stat().st_size:
            self.path.write_text(_line(form.columns), encoding="utf-8")
        self._keys = {self._key_of(row) for row in self.rows}

    def _key_of(self, row: Row) -> tuple[str, ...]:
        return tuple(str(row[name]) for name in self._form.key)

    def has(self, row: Row) -> bool:
        """Return whether there is a row with the key of ``row``."""
        return self._key_of(row) in self._keys

    def add(self, row: Row) -> None:
        """Append a row, with numbers rounded to three decimals and missing values empty, and flush it."""
        cells = {name: _text(row.get(name)) for name in self._form.columns}
        with self.path.open("a", encoding="utf-8", newline="") as file:
            file.write(_line(list(cells.values())))
        self.rows.append(cells)
        self._keys.add(self._key_of(cells))


def _text(value: object) -> str:
    return "" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)


def _line(cells: Sequence[str]) -> str:
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerow(cells)
    return buffer.getvalue()


def write_conditions(path: Path, facts: Mapping[str, Any], same: Sequence[str] = SHARED_CONDITIONS) -> None:
    """Write conditions beside a table, with the date and the command line of this run added to those
    before, unless it repeats the last one.

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
    commands = before.get("commands", [])
    line = shlex.join(["python", "-m", "benchmarks", *sys.argv[1:]])
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    dates = {"date": before.get("date", now), "last_date": now}
    document = {
        **before,
        **now_is,
        **dates,
        "commands": commands if line in commands[-1:] else [*commands, line],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    publish(path, json.dumps(document, indent=1) + "\n")


def publish(path: Path, text: str) -> None:
    """Write a file at once: it is never seen in part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
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
