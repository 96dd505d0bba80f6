"""Format frames and numbers as Markdown.  ``-`` is a value that was not measured."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import pandas as pd

NO_VALUE = "-"


def times(value: float) -> str:
    """Format a ratio to two decimals."""
    return NO_VALUE if pd.isna(value) else f"{value:.2f}"


def percent(value: float) -> str:
    """Format a share to a tenth of a percent."""
    return NO_VALUE if pd.isna(value) else f"{value:.1%}"


def microseconds(value: float) -> str:
    """Format microseconds with four significant digits, at least to the whole microsecond."""
    return NO_VALUE if pd.isna(value) else f"{value:.{2 if value < 100 else 1 if value < 1000 else 0}f}"


def tops(value: float) -> str:
    """Format a number with three significant digits, at least to the whole number."""
    return NO_VALUE if pd.isna(value) else f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f}"


def span(values: Iterable[float], show: Callable[[float], str] = times) -> str:
    """Format the smallest and the largest value: ``1.03 to 1.06``, or ``-`` if there is none."""
    present = [value for value in values if not pd.isna(value)]
    ends = [show(end) for end in (min(present), max(present))] if present else [NO_VALUE]
    return " to ".join(dict.fromkeys(ends))


def cell(text: object) -> str:
    """Escape text so that it cannot break a table."""
    return " ".join(str(text).split()).replace("|", "\\|") or NO_VALUE


def table(header: Sequence[object], rows: Iterable[Sequence[object]], left: int = 0) -> str:
    """Format a table; the first ``left`` columns are left-aligned, the others right-aligned."""
    rules = ["---" if i < left else "---:" for i in range(len(header))]
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in (header, rules, *rows))


def grid(frame: pd.DataFrame, left: int = 0) -> str:
    """Format a frame of text as a table, its index as the first column."""
    header = [frame.index.name or "", *frame.columns]
    return table(header, frame.itertuples(name=None), left)


def bullets(lines: Iterable[str]) -> str:
    """Format lines as a bulleted list."""
    return "".join(f"- {line}\n" for line in lines)


def page(parts: Iterable[str]) -> str:
    """Join blocks of Markdown with blank lines."""
    return "\n\n".join(part.rstrip("\n") for part in parts if part) + "\n"
