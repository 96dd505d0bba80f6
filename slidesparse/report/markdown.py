"""Markdown tables and the numbers in them.  ``-`` is a value that was not measured."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from slidesparse.pattern import SlidePattern
from slidesparse.report.sections import Section

NOTHING = "-"


def times(value: float | None) -> str:
    """A ratio, to two decimals."""
    return NOTHING if value is None else f"{value:.2f}"


def percent(value: float | None) -> str:
    """A share, to a tenth of a percent."""
    return NOTHING if value is None else f"{value:.1%}"


def microseconds(value: float | None) -> str:
    """To four digits or the whole microsecond."""
    return NOTHING if value is None else f"{value:.{2 if value < 100 else 1 if value < 1000 else 0}f}"


def cell(text: object) -> str:
    """Text that cannot break a table."""
    return " ".join(str(text).split()).replace("|", "\\|") or NOTHING


def table(header: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 0) -> str:
    """A table; the first ``left`` columns are set left, the others right."""
    rules = ["---" if i < left else "---:" for i in range(len(header))]
    return "\n".join(f"| {' | '.join(line)} |" for line in [list(header), rules, *map(list, rows)]) + "\n"


def bullets(lines: Iterable[str]) -> str:
    """A list."""
    return "".join(f"- {line}\n" for line in lines)


def grid(
    section: Section,
    value: Callable[[SlidePattern, int], str],
    lead: Sequence[tuple[str, Callable[[int], str]]] = (),
    last: tuple[str, Callable[[SlidePattern], str]] | None = None,
) -> str:
    """A row for each M, with ``lead`` columns and ``value`` for each pattern; ``last`` is a row for all M."""
    header = ["M", *(title for title, _ in lead), *(pattern.ratio for pattern in section.patterns)]
    rows = [
        [str(m), *(fill(m) for _, fill in lead), *(value(pattern, m) for pattern in section.patterns)]
        for m in section.ms
    ]
    if last:
        title, fill_last = last
        rows.append([title, *("" for _ in lead), *(fill_last(pattern) for pattern in section.patterns)])
    return table(header, rows)
