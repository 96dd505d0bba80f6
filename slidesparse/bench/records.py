"""Tables on disk that a benchmark adds to, row by row, and continues after it was stopped; with their conditions."""

from __future__ import annotations

import csv
import io
import json
import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

VERSIONS = "versions"
SAME = ("gpu", "capability", VERSIONS)  # conditions that all rows of a table share


class RecordsError(RuntimeError):
    """A table that cannot be continued; names the file and the remedy."""


class Records:
    """An append-only CSV file; a row is identified by its key columns and written once.

    A last line without its end, which a killed process leaves, is dropped.  Raises RecordsError for a file with other
    columns.
    """

    def __init__(self, path: Path, columns: Sequence[str], key: Sequence[str]) -> None:
        self.path, self.columns, self._key = path, tuple(columns), tuple(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        _drop_torn_line(path)
        text = path.read_bytes().decode("utf-8") if path.exists() else ""
        if not text:
            path.write_bytes(_line(self.columns).encode())
        self.rows = list(self._parse(text)) if text else []
        self._keys = {self._key_of(row) for row in self.rows}

    def _parse(self, text: str) -> Iterator[dict[str, str]]:
        lines = csv.reader(io.StringIO(text))
        header = tuple(next(lines, ()))
        if header != self.columns:
            raise self._error(f"has the columns {','.join(header)}, not {','.join(self.columns)}")
        for number, words in enumerate(lines, 2):
            if len(words) != len(self.columns):
                raise self._error(f"line {number} has {len(words)} values for {len(self.columns)} columns")
            yield dict(zip(self.columns, words, strict=True))

    def _error(self, what: str) -> RecordsError:
        return RecordsError(f"{self.path} {what}; remove the file or choose another folder with --out")

    def _key_of(self, row: Mapping[str, object]) -> tuple[str, ...]:
        return tuple(str(row[name]) for name in self._key)

    def has(self, **key: object) -> bool:
        """Whether there is a row with these values in the key columns, all of which must be named."""
        return self._key_of(key) in self._keys

    def add(self, row: Mapping[str, object]) -> None:
        """Append a row, numbers rounded to nanoseconds; it is on its way to the disk when this returns."""
        words = {name: _text(row[name]) for name in self.columns}
        with self.path.open("a", encoding="utf-8", newline="") as file:
            file.write(_line(list(words.values())))
        self.rows.append(words)
        self._keys.add(self._key_of(words))


def _text(value: object) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def _line(words: Sequence[str]) -> str:
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerow(words)
    return buffer.getvalue()


def _drop_torn_line(path: Path) -> None:
    if not path.exists():
        return
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        with path.open("r+b") as file:
            file.truncate(whole)


def write_conditions(
    path: Path,
    found: Mapping[str, Any],
    command: Sequence[str] | None = None,
    same: Sequence[str] = SAME,
) -> None:
    """Write conditions beside a table, with the date and the command line of this run added to those before.

    Raises RecordsError when the table was begun on another GPU or with other versions, or whatever ``same`` names:
    figures of two machines in one table could not be told apart.  Of versions those count that both have: a system that
    is added may bring a library of its own.
    """
    before = _read(path)
    old, new = before.get(VERSIONS, {}), found.get(VERSIONS, {})
    was, now_is = {**before, VERSIONS: {**new, **old}}, {**found, VERSIONS: {**old, **new}}
    for name in same:
        if before and was.get(name) != now_is.get(name):
            raise RecordsError(
                f"{path} was measured with {name} {was.get(name)}, but here it is {now_is.get(name)}; "
                "choose another folder with --out"
            )
    line = shlex.join(command if command is not None else ["slidesparse", *sys.argv[1:]])
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    document = {
        **before,
        **now_is,
        "date": before.get("date", now),
        "last_date": now,
        "commands": [*before.get("commands", []), line],
    }
    _write(path, document)


def amend_conditions(path: Path, found: Mapping[str, Any]) -> None:
    """Add what a run found out to the conditions that `write_conditions` wrote at its start."""
    _write(path, {**_read(path), **found})


def _write(path: Path, document: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def _read(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RecordsError(
            f"{path} cannot be read: {error}; remove it or choose another folder with --out"
        ) from error
    return document if isinstance(document, dict) else {}
