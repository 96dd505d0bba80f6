"""The page of ``layout.csv``: which memory layouts the libraries take, and what the others cost or save."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slidesparse.report.data import Line, ReportError, dtype_order, read_conditions, read_csv
from slidesparse.report.markdown import NOTHING, bullets, cell, microseconds, table, times
from slidesparse.report.pages import page

KEY = ("library", "dtype", "weight", "activations", "output", "M", "N", "K")
LAYOUT_COLUMNS = (*KEY, "taken", "heuristic_us", "p50_us", "reason")
SERVED = ("K", "K", "N")  # the contiguous dimensions of weight, activations and output while serving
DIMENSIONS = {"weight": "KN", "activations": "KM", "output": "NM"}

Layout = tuple[str, str, str]


@dataclass(frozen=True)
class Cell:
    """One product in one layout; times in microseconds, None where there is none."""

    library: str
    dtype: str
    layout: Layout
    m: int
    shape: tuple[int, int]  # N, K
    taken: bool
    own: float | None  # by the library's own choice
    best: float | None  # by its best algorithm
    reason: str


@dataclass(frozen=True)
class Layouts:
    """What ``bench layout`` left."""

    name: str
    rows: tuple[Cell, ...]
    conditions: dict[str, Any]
    notes: tuple[str, ...]


def read_layouts(folder: Path) -> Layouts:
    """``layout.csv`` and ``layout.json``; of a repeated line the last counts.  Raises ReportError."""
    lines, notes = read_csv(folder / "layout.csv", LAYOUT_COLUMNS)
    conditions, more = read_conditions(folder / "layout.json") if lines else ({}, [])
    rows = {tuple(line.fields[name] for name in KEY): _cell(line) for line in lines}
    return Layouts("layout", tuple(rows.values()), conditions, (*notes, *more))


def _cell(line: Line) -> Cell:
    fields = line.fields
    for name, allowed in (*DIMENSIONS.items(), ("taken", ("yes", "no"))):
        if fields[name] not in tuple(allowed):
            raise ReportError(f"{line.place}: {name} is {fields[name]!r}; allowed: {', '.join(allowed)}")
    return Cell(
        library=fields["library"],
        dtype=fields["dtype"].lower(),
        layout=(fields["weight"], fields["activations"], fields["output"]),
        m=line.integer("M"),
        shape=(line.integer("N"), line.integer("K")),
        taken=fields["taken"] == "yes",
        own=line.number("heuristic_us"),
        best=line.number("p50_us"),
        reason=fields["reason"],
    )


def layout_page(found: Layouts) -> str:
    """``layout.md``, "" without measurements."""
    if not found.rows:
        return ""
    parts = [
        "# Memory layouts",
        "The dimension of each matrix that is contiguous in memory: K or N of the weight, K or M of the activations, N "
        "or M of the output. Serving uses K, K, N. Times are medians of the product alone, summed over the shapes that "
        "the library was measured with, by its best algorithm and by its own choice (heuristic); a sum is shown only "
        "where every shape was taken and timed. Ratio: time of serving's layout / this one's, above 1 this one is "
        "faster. `-`: refused or not measured.",
    ]
    groups: dict[tuple[str, str], list[Cell]] = defaultdict(list)
    for row in found.rows:
        groups[row.dtype, row.library].append(row)
    for dtype, library in sorted(groups, key=lambda key: (dtype_order(key[0]), key[1])):
        outputs = found.conditions.get("outputs")
        out = outputs.get(f"{library} {dtype}") if isinstance(outputs, dict) else None
        title = f"## {library}, {dtype.upper()}" + (f" to {str(out).upper()}" if out else "")
        parts += [title, *_group(groups[dtype, library])]
    return page(parts)


def _group(rows: Sequence[Cell]) -> list[str]:
    """One library at one type: a table with a row for each layout, in words which is fastest, and refusals."""
    ms, shapes = sorted({row.m for row in rows}), {row.shape for row in rows}
    layouts = sorted({row.layout for row in rows}, key=_order)
    best = {(layout, m): _sum(rows, layout, m, shapes, "best") for layout in layouts for m in ms}
    own = {(layout, m): _sum(rows, layout, m, shapes, "own") for layout in layouts for m in ms}
    header = ["weight", "activations", "output", "taken"]
    header += [f"M {m} {what}" for m in ms for what in ("us", "heuristic us", "ratio")]
    lines = []
    for layout in layouts:
        mine = [row for row in rows if row.layout == layout]
        line = [*layout, f"{sum(row.taken for row in mine)} of {len(mine)}"]
        for m in ms:
            line += [microseconds(best[layout, m]), microseconds(own[layout, m])]
            line.append(times(_ratio(best.get((SERVED, m)), best[layout, m])))
        lines.append(line)
    fastest = [_fastest(best, layouts, m) for m in ms]
    return [table(header, lines, left=4), *fastest, bullets(_refusals(rows))]


def _order(layout: Layout) -> tuple[int, ...]:
    """Serving's first."""
    return tuple(DIMENSIONS[name].index(word) for name, word in zip(DIMENSIONS, layout, strict=True))


def _sum(
    rows: Iterable[Cell], layout: Layout, m: int, shapes: set[tuple[int, int]], what: str
) -> float | None:
    """Microseconds of all shapes; None where one is missing."""
    found: dict[tuple[int, int], float] = {
        row.shape: us
        for row in rows
        if row.layout == layout and row.m == m and (us := getattr(row, what)) is not None
    }
    return sum(found.values()) if set(found) == shapes else None


def _ratio(served: float | None, other: float | None) -> float | None:
    return served / other if served and other else None


def _fastest(best: dict[tuple[Layout, int], float | None], layouts: Sequence[Layout], m: int) -> str:
    found = [(us, layout) for layout in layouts if (us := best[layout, m]) is not None]
    if not found:
        return f"At M {m} no layout was measured with every shape."
    us, layout = min(found, key=lambda pair: pair[0])  # of equal ones the first, so serving's
    if layout == SERVED:
        return f"At M {m} serving's layout is the fastest of the {len(found)} that every shape has."
    ratio = times(_ratio(best.get((SERVED, m)), us))
    beside = f"{ratio} times as fast as serving's" if ratio != NOTHING else "serving's was not measured"
    return f"At M {m} {', '.join(layout)} is the fastest of the {len(found)} that every shape has, {beside}."


def _refusals(rows: Iterable[Cell]) -> list[str]:
    """What libraries said, without the shapes, and how often."""
    counts: dict[tuple[str, Layout], int] = defaultdict(int)
    for row in rows:
        if row.reason:
            counts[row.reason.partition(";")[0], row.layout] += 1
    alike: dict[str, list[str]] = defaultdict(list)
    for (said, layout), count in sorted(counts.items(), key=lambda pair: (pair[0][0], _order(pair[0][1]))):
        alike[said].append(f"{', '.join(layout)} ({count})")
    return [f"{'; '.join(where)}: {cell(said)}" for said, where in alike.items()]
