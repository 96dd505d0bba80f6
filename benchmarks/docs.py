"""The generated files of docs/: pages with tables of figures, and plots.

A page holds a table between the lines ``<!-- table: NAME -->`` and ``<!-- end -->``; NAME is one of `TABLES`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path

from benchmarks.records import E2E, RecordsError
from benchmarks.report import (
    ACCURACY,
    BENCHMARKS,
    H200,
    REAL_MODELS,
    ROOT,
    TABLES,
    layer_fits,
)
from slidesparse.convert import budget
from slidesparse.errors import CheckFailed

MARKED_PAGES = sorted([*BENCHMARKS.glob("*.md"), *ACCURACY.glob("*.md")])
MARKED = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def fill_tables(text: str, path: Path) -> str:
    """Return the text of a page with regenerated tables.  Raises RecordsError for a name that is not in TABLES."""

    def fill(match: re.Match[str]) -> str:
        name = match[2]
        if name not in TABLES:
            raise RecordsError(f"{path} asks for the table {name!r}; there are {', '.join(TABLES)}")
        return f"{match[1]}{TABLES[name]()}{match[3]}"

    return MARKED.sub(fill, text)


def _plots() -> Iterator[tuple[Path, str, str]]:
    """Yield (path, present text, generated text) of plots; those that name the digest of their data stay as they are.

    Other releases of the library draw other bytes.
    """
    for name, data in (("curve", ()), ("frontier", (H200 / f"{E2E.name}.csv",))):
        path, sources = ACCURACY / f"{name}.svg", [REAL_MODELS, *data, Path(__file__).with_name("plots.py")]
        note = f"of data {hashlib.sha256(b''.join(source.read_bytes() for source in sources)).hexdigest()}"
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        if note in text:
            yield path, text, text
            continue
        from benchmarks import plots

        yield path, text, plots.curve(note) if name == "curve" else plots.frontier(note)


def _files() -> Iterator[tuple[Path, str, str]]:
    """Yield (path, present text, generated text) of every generated file."""
    yield from _plots()
    for path in MARKED_PAGES:
        text = path.read_text(encoding="utf-8")
        yield path, text, fill_tables(text, path)
    path = budget.FILE
    yield path, path.read_text(encoding="utf-8") if path.exists() else "", layer_fits()


def write(check: bool) -> list[Path]:
    """Write the files whose tables are out of date; return their paths.  With ``check`` raise CheckFailed instead."""
    changed = [(path, text, generated) for path, text, generated in _files() if text != generated]
    for path, text, generated in changed:
        if not check:
            path.write_text(generated, encoding="utf-8")
            continue
        pairs = zip_longest(text.splitlines(), generated.splitlines(), fillvalue="nothing")
        number, (line, expected) = next((n, pair) for n, pair in enumerate(pairs, 1) if pair[0] != pair[1])
        raise CheckFailed(
            f"{path.relative_to(ROOT)}, line {number}: found\n  {line}\nbut the CSVs give\n  {expected}\n"
            "write the pages anew: python -m benchmarks docs"
        )
    return [path for path, _, _ in changed]
