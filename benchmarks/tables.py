"""Format numbers and tables as Markdown, and read CSV files as frames.

What was not measured is shown as ``-``, never interpolated; of rows with one key the last counts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.records import E2E, ENERGY, TIMES, Format, RecordsError, read_rows
from slidesparse.errors import EnvironmentFault
from slidesparse.pattern import MixedPattern, parse_pattern

try:
    import pandas as pd
except ImportError as error:
    raise EnvironmentFault(
        "reports need pandas: pip install '.[report]' in a clone of SlideSparse"
    ) from error

NO_VALUE = "-"
FIGURES = {*TIMES, *E2E.values, ENERGY, "error", "M", "N", "K", "context", "round"}  # columns of numbers


def ratio(value: float) -> str:
    """Format a ratio to two decimals."""
    return NO_VALUE if pd.isna(value) else f"{value:.2f}"


def digits(value: float) -> str:
    """Format a number with four significant digits, at least to the whole number."""
    return NO_VALUE if pd.isna(value) else f"{value:.{max(0, 3 - int(math.log10(max(value, 1))))}f}"


def span(values: Iterable[float]) -> str:
    """Format the smallest and the largest ratio: ``1.03 to 1.06``, or ``-`` if there is none."""
    present = [value for value in values if not pd.isna(value)]
    return " to ".join(dict.fromkeys(map(ratio, (min(present), max(present))))) if present else NO_VALUE


def table(header: Sequence[object], rows: Iterable[Sequence[object]], left: int = 1) -> str:
    """Format a table; the first ``left`` columns are left-aligned, the others right-aligned."""
    rules = ["---" if i < left else "---:" for i in range(len(header))]
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in (header, rules, *rows))


def read(folder: Path, form: Format, name: str = "") -> pd.DataFrame:
    """Read NAME.csv (by default the format's), without rows that hold no figure; patterns are spelled as 6:8.

    Rows of whole models get a column `rate` (`_rates`).  Raises RecordsError.
    """
    path = folder / f"{name or form.name}.csv"
    rows, _ = read_rows(path, form.columns)
    frame = pd.DataFrame(rows, columns=list(form.columns), dtype=str)
    frame = frame.drop_duplicates(list(form.key), keep="last").reset_index(drop=True)
    column = ""
    try:
        for column in set(frame) & FIGURES:
            frame[column] = pd.to_numeric(frame[column].where(~frame[column].isin(["", "nan"])))
        for column in set(frame) & {"pattern"}:
            spelled = {text: parse_pattern(text).ratio for text in set(frame[column])}
            frame[column] = frame[column].map(spelled)
    except ValueError as error:
        raise RecordsError(f"{path}, column {column}: {error}; correct or remove the line") from error
    frame = frame.dropna(subset=[name for name in ("p50_us", "tokens_per_s") if name in frame])
    return frame.assign(rate=_rates(frame)) if form is E2E else frame


def _rates(rows: pd.DataFrame) -> pd.Series:
    """Return tokens per second: those of the median step where all systems of a round have it, else vLLM's figures.

    vLLM's are of the whole run, which includes its begin and end, and the steps that waited for a busy CPU.
    """
    key = [rows[name] for name in ("model", "dtype", "stage", "M", "context", "round")]
    lacking = rows["step_ms"].isna().groupby(key).transform("any")
    return rows["tokens_per_s"].where(lacking, 1000 * rows["M"] / rows["step_ms"])


def pattern_order(name: str) -> tuple[float, str]:
    """Return the sort key of a column: dense ones by name, shares of 2:4 blocks, 2:4, 4:6, ..., 2_inf."""
    try:
        parsed = parse_pattern(name.rpartition(" ")[2])
    except ValueError:
        return (-1, name)
    return (float(parsed.share if isinstance(parsed, MixedPattern) else parsed.length or math.inf), name)
