"""Tables of a folder as pandas frames, and sections of them: latencies of one subject at one dtype.

A run may have been interrupted anywhere: files, rows and the end of the last line may be missing.  Missing data are
listed (`Table.notes`, `Sections.missing`), never filled in.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from benchmarks.records import COUNTERS, E2E, TIMES, Format, RecordsError, read_conditions, read_rows
from slidesparse.pattern import MixedPattern, parse_pattern

CUSPARSELT, HOPPER, CUBLASLT, STOCK = "cusparselt", "hopper", "cublaslt", "stock"
DENSE, SUM, TWO_FOUR = "dense", "sum", "2:4"
LAYERS = 4  # linear layers of a decoder block: QKV, output, gate and up, down
DTYPES = ("int8", "fp8", "fp16", "bf16")
STAGES = ("prefill", "decode")
NUMBERS = (
    *TIMES,
    "M",
    "N",
    "K",
    "round",
    "us",
    "tokens_per_s",
    "tokens_per_joule",
    "step_ms",
    "error",
    *COUNTERS,
)
ALLOWED = {
    "mode": ("square", "model"),
    "stage": STAGES,
}
REQUIRED_COLUMNS = {
    "kernel": TIMES,
    "linear": TIMES,
    "spmm": TIMES,
    "e2e": ("tokens_per_s",),
}


@dataclass(frozen=True)
class Table:
    """The rows and conditions of one benchmark; patterns are spelled as 6:8, dtypes in lower case."""

    rows: pd.DataFrame
    conditions: dict[str, Any]
    notes: tuple[str, ...]  # sentences about missing or ignored data


def read(folder: Path, form: Format, name: str = "") -> Table:
    """Read NAME.csv (by default the format's) and NAME.json of a folder.

    Rows without a figure are ignored; of rows with the same key the last counts.  Those of whole models get a column
    `rate` (`_rates`).  Raises RecordsError.
    """
    path = folder / f"{name or form.name}.csv"
    rows, torn = read_rows(path, form.columns)
    frame = pd.DataFrame(rows, columns=list(form.columns), dtype=str)
    column = ""
    try:
        for column in frame:
            if column in NUMBERS:
                frame[column] = pd.to_numeric(frame[column].where(~frame[column].isin(["", "nan"])))
            elif column == "pattern":
                frame[column] = frame[column].map(
                    {text: parse_pattern(text).ratio for text in set(frame[column])}
                )
            elif column == "dtype":
                frame[column] = frame[column].str.lower()
            elif unknown := set(frame[column]) - set(ALLOWED.get(column, frame[column])):
                raise ValueError(f"{min(unknown)!r} is not one of {', '.join(ALLOWED[column])}")
    except ValueError as error:
        raise RecordsError(f"{path}, column {column}: {error}; correct or remove the line") from error
    notes = [] if path.is_file() else [f"`{path.name}` is not there."]
    if torn:
        notes.append(f"The last line of `{path.name}` is torn and was left out.")
    complete = frame.dropna(subset=list(REQUIRED_COLUMNS.get(form.name, ())))
    last = complete.drop_duplicates(list(form.key), keep="last").reset_index(drop=True)
    for count, problem in (
        (len(frame) - len(complete), "hold no figure: not measured"),
        (len(complete) - len(last), "were repeated: the last ones count"),
    ):
        notes += [f"{count} lines of `{path.name}` {problem}."] if count else []
    if form is E2E:
        last["rate"] = _rates(last)
    return Table(last, read_conditions(path.with_suffix(".json")), tuple(notes))


def _rates(rows: pd.DataFrame) -> pd.Series:
    """Return tokens per second: those of the median step where all systems of a round have it, else vLLM's figures.

    vLLM's are of the whole run, which includes its begin and end, and the steps that waited for a busy CPU.
    """
    steps = rows["step_ms"].isna().groupby([rows[name] for name in ("model", "dtype", "stage", "M", "round")])
    return rows["tokens_per_s"].where(steps.transform("any"), 1000 * rows["M"] / rows["step_ms"])


def pattern_order(name: str) -> float:
    """Return the sort key of a pattern: dense, shares of 2:4 blocks, 2:4, 4:6, ..., 2_inf."""
    parsed = parse_pattern(name)
    return float(parsed.share if isinstance(parsed, MixedPattern) else parsed.length or math.inf)


def dtype_order(name: str) -> tuple[int, str]:
    """Return the sort key of a dtype: the order of DTYPES, then others by name."""
    return (DTYPES.index(name) if name in DTYPES else len(DTYPES), name)


@dataclass(frozen=True)
class Section:
    """Latencies of one subject at one dtype: of dense providers, and of one sparse one."""

    title: str
    dtype: str
    ours: str  # the sparse provider
    us: pd.DataFrame  # microseconds; a row for each M, columns (provider, pattern)
    shapes: tuple[tuple[int, int], ...] = ()  # (N, K) of the GEMMs of a model

    @property
    def heading(self) -> str:
        """The title, with the sparse provider if it is not the page's default."""
        return self.title if self.ours in (CUSPARSELT, "sparse") else f"{self.title}, {self.ours}"

    @property
    def patterns(self) -> list[str]:
        """The patterns of the sparse provider, sparsest first, preceded by ``dense`` if it runs that too."""
        return sorted((p for name, p in self.us if name == self.ours), key=pattern_order)

    @property
    def dense(self) -> pd.DataFrame:
        """Microseconds of dense providers, cuBLASLt first; a row for each M."""
        providers = sorted((name for name, p in self.us if p == DENSE), key=lambda n: (n != CUBLASLT, n))
        return pd.DataFrame({name: self.us[name, DENSE] for name in providers}, index=self.us.index)

    def speedup(self, over: str = CUBLASLT) -> pd.DataFrame:
        """Return latency of the dense provider ``over`` / ours, by M and pattern; NaN unless both were measured."""
        ours = pd.DataFrame({p: self.us[self.ours, p] for p in self.patterns}, index=self.us.index)
        return ours.rdiv(self.dense.get(over, math.nan), axis=0)

    @property
    def bounds(self) -> pd.Series:
        """N/(N-1) of each pattern, which sparse tensor cores of twice the dense rate set."""
        return pd.Series({p: float(parse_pattern(p).speedup_bound) for p in self.patterns}, dtype=float)

    def tops(self) -> pd.DataFrame:
        """Return 2 M N K / latency in TOPS, K of the dense weight; columns "cublaslt" and the patterns."""
        work = [sum(2 * m * n * k for n, k in self.shapes) for m in self.us.index]
        us = {CUBLASLT: self.us.get((CUBLASLT, DENSE), math.nan)}
        us |= {pattern: self.us[self.ours, pattern] for pattern in self.patterns}
        return pd.DataFrame(us, index=self.us.index).rdiv(pd.Series(work, self.us.index) / 1e6, axis=0)

    def efficiency(self, over: str = CUBLASLT) -> pd.DataFrame:
        """Return the efficiency (S_pattern / S_2:4) / R_theory with R_theory = density(2:4) / density(pattern).

        Equations 18 and 19 of arXiv 2603.05232, appendix D.5; S is the speed-up over the dense provider ``over``.
        """
        speedup = self.speedup(over)
        native = speedup[TWO_FOUR] / 2 if TWO_FOUR in speedup else speedup.index.to_series() * math.nan
        return speedup.div(native, axis=0) / self.bounds


@dataclass(frozen=True)
class Sections:
    """All sections of one table, and the cells of the table that were not measured."""

    cells: pd.DataFrame  # columns title, dtype, provider, pattern, M, us
    # The same but us: providers, patterns and M that all titles of a group should have
    expected: pd.DataFrame
    group: tuple[str, ...] = ("dtype",)
    shapes: Mapping[str, tuple[tuple[int, int], ...]] | None = None  # by title

    @cached_property
    def sections(self) -> list[Section]:
        """A section for each dtype, title and sparse provider."""
        sections = []
        parts = dict(iter(self.cells.groupby(["dtype", "title"])))
        for dtype, title in sorted(parts, key=lambda key: (dtype_order(key[0]), key[1])):
            rows = parts[dtype, title].set_index(["M", "provider", "pattern"])
            us = rows["us"].unstack(["provider", "pattern"]).sort_index()
            sparse = {name for name, p in us if p != DENSE} or {CUSPARSELT}
            for ours in sorted(sparse, key=lambda name: (name not in (CUSPARSELT, "sparse"), name)):
                part = us[[pair for pair in us if pair[1] == DENSE or pair[0] == ours]].dropna(how="all")
                sections.append(Section(title, dtype, ours, part, (self.shapes or {}).get(title, ())))
        return sections

    def missing(self) -> pd.DataFrame:
        """Return cells that others of the group have, merged over M: columns dtype, subject, provider, pattern, M."""
        measured = set(
            self.cells[["dtype", "title", "provider", "pattern", "M"]].itertuples(index=False, name=None)
        )
        lacking = []
        for _, group_cells in self.expected.groupby(list(self.group), sort=False):
            dtype, ms = group_cells["dtype"].iloc[0], sorted(group_cells["M"].unique())
            titles = (group_cells if "title" in self.group else self.expected)["title"].unique()
            pairs = dict.fromkeys(zip(group_cells["provider"], group_cells["pattern"], strict=True))
            for provider, pattern in sorted(pairs, key=lambda pair: (pair[0], pattern_order(pair[1]))):
                for title in sorted(titles):
                    absent = [str(m) for m in ms if (dtype, title, provider, pattern, m) not in measured]
                    absent_ms = "all" if len(absent) == len(ms) else ", ".join(absent)
                    lacking += [(dtype.upper(), title, provider, pattern, absent_ms)] if absent else []
        frame = pd.DataFrame(lacking, columns=["dtype", "subject", "provider", "pattern", "M"])
        for column in ("pattern", "subject", "dtype"):  # rows that differ only in this column are merged
            others = [name for name in frame.columns if name != column]
            joined = frame.groupby(others, sort=False)[column].agg(", ".join)
            frame = joined.reset_index()[list(frame.columns)]
        return frame


def square_sections(kernel: Table) -> Sections:
    """Return a section for each dtype of the square GEMMs."""
    rows = kernel.rows[kernel.rows["mode"] == "square"].rename(columns={"p50_us": "us"})
    title = "Square, M = N = K"
    return Sections(rows.assign(title=title), rows.assign(title=title))


def model_sections(kernel: Table) -> Sections:
    """Return a section for each model and dtype, its four layers summed where all four were measured.

    The layers of a model are those that occur anywhere in the file.  If there are not four (a list of shapes, or an
    interrupted run), nothing can be summed, and each layer is a section.
    """
    rows = kernel.rows[kernel.rows["mode"] == "model"].rename(columns={"p50_us": "us"})
    whole = rows.groupby("model")["layer"].transform("nunique") == LAYERS
    rows = rows.assign(whole=whole, title=rows["model"].where(whole, rows["model"] + " " + rows["layer"]))
    sums = rows.groupby(["title", "dtype", "provider", "pattern", "M"], as_index=False, sort=False).agg(
        us=("us", "sum"), layers=("us", "size"), whole=("whole", "first")
    )
    shapes = {
        title: tuple(part[["N", "K"]].itertuples(index=False, name=None))
        for title, part in rows.drop_duplicates(["title", "layer"]).groupby("title")
    }
    return Sections(sums[(sums["layers"] == LAYERS) | ~sums["whole"]], rows, shapes=shapes)


def linear_sections(linear: Table) -> Sections:
    """Return a section for each model and dtype of linear.csv: its layer ``sum``, as the benchmark wrote it."""
    rows = linear.rows.rename(columns={"model": "title", "p50_us": "us"})
    return Sections(rows[rows["layer"] == SUM], rows)


def e2e_sections(e2e: Table) -> dict[str, Sections]:
    """Return sections of microseconds per token by stage."""
    rows = e2e.rows.rename(columns={"system": "provider", "model": "title"})
    sections = {}
    for stage in STAGES:
        of_stage = rows[rows["stage"] == stage]
        if not of_stage.empty:
            parts = [_token_us(part) for _, part in of_stage.groupby(["title", "dtype"], sort=False)]
            cells = pd.concat(parts, ignore_index=True)
            sections[stage] = Sections(cells, cells, ("title", "dtype"))
    return sections


def _token_us(rows: pd.DataFrame) -> pd.DataFrame:
    """Return microseconds per token: stock vLLM's median, over the median speed-up over it within a round.

    The speed of a machine varies from round to round, for all systems.  Without a round that has both, the system's
    own median is used.
    """
    rate, key = "rate", ["title", "dtype", "provider", "pattern", "M"]
    stock = rows[rows["provider"] == STOCK][["M", "round", rate]]
    joined = rows.merge(stock, on=["M", "round"], how="left", suffixes=("", "_stock"))
    medians = (
        joined.assign(ratio=joined[rate] / joined[f"{rate}_stock"])
        .groupby(key, sort=False)[["ratio", rate]]
        .median()
    )
    medians = medians.reset_index().join(stock.groupby("M")[rate].median().rename("stock"), on="M")
    return medians.assign(us=(1e6 / medians["stock"] / medians["ratio"]).fillna(1e6 / medians[rate]))


def rounds(e2e: Table) -> pd.DataFrame:
    """Return by cell: median tokens per second over the rounds, (largest - smallest) / median, number of rounds."""
    rates = e2e.rows.groupby(list(E2E.key[:-1]), sort=False)["rate"]
    medians = pd.DataFrame({"rate": rates.median(), "count": rates.size()})
    return medians.assign(spread=(rates.max() - rates.min()) / medians["rate"]).reset_index()


def over_stock(sections: Iterable[Section]) -> pd.DataFrame:
    """Return speed-ups over stock vLLM where both were measured: columns title, dtype, ours, pattern, M, speedup."""
    columns = ["title", "dtype", "ours", "pattern", "M", "speedup"]
    parts = [pd.DataFrame(columns=columns)]
    for section in sections:
        long = section.speedup(STOCK).reset_index().melt("M", var_name="pattern", value_name="speedup")
        parts.append(long.assign(title=section.title, dtype=section.dtype, ours=section.ours))
    return pd.concat([part for part in parts if len(part)] or parts)[columns].dropna().reset_index(drop=True)
