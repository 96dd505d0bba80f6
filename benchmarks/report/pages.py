"""The Markdown pages of a folder of tables, one for each benchmark."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

import pandas as pd

from benchmarks.e2e import BLOCKS
from benchmarks.records import (
    E2E,
    KERNEL,
    LINEAR,
    SPMM,
    SPMM_COUNTERS,
    RecordsError,
    read_rows,
)
from benchmarks.report import data, spmm
from benchmarks.report.data import CUBLASLT, DENSE, HOPPER, STAGES, STOCK, Section, Table
from benchmarks.report.markdown import (
    NO_VALUE,
    bullets,
    grid,
    microseconds,
    page,
    percent,
    span,
    table,
    times,
)

EQUAL_TOLERANCE = 0.01  # relative difference up to which times count as equal
BASELINE_NAMES = {CUBLASLT: "dense cuBLASLt", STOCK: "stock vLLM"}
REFERENCE_COLUMNS = ("results", "model", "dtype", "pattern", "M", "speedup")
RESULTS = {  # kinds of figures in docs/benchmarks/reference.csv
    "square": "square GEMMs",
    "operands": "GEMMs of layers",
    "served": "GEMMs of layers, as the authors' implementation serves them",
    "prefill": "prefill of whole models",
    "decode": "decode of whole models",
}
_PRODUCTS = (CUBLASLT, "cublaslt-int8")  # the paper's have the operands' type
BASELINES = {
    **dict.fromkeys(("square", "operands"), _PRODUCTS),
    "served": (CUBLASLT,),
    **dict.fromkeys(STAGES, (BLOCKS, STOCK)),
}
REFERENCE_GPU = "H100 PCIe"
KERNEL_HOPPER = "kernel_hopper"  # like kernel.csv, another run: `hopper` beside cuBLASLt and stock vLLM
OPTIONAL_PARTS = (KERNEL_HOPPER, "spmm")  # not every folder has them
SUBJECTS = {
    "kernel": "GEMMs alone: square ones and those of models",
    KERNEL_HOPPER: "GEMMs of models by `hopper`, another run",
    "linear": "linear layers with quantization and scaling, against stock vLLM",
    "e2e": "whole models in vLLM: tokens per second",
    "spmm": "hand-written N:M kernels, compared with cuBLAS and with a study's claims",
    "comparison": "comparison with the paper and the reference implementation",
}


class Results:
    """The tables of a folder.  Raises RecordsError when it has none, and for an invalid file."""

    def __init__(self, folder: Path) -> None:
        forms = {form.name: form for form in (KERNEL, LINEAR, E2E, SPMM)}
        forms[KERNEL_HOPPER] = KERNEL
        self.counters = data.read(folder, SPMM_COUNTERS)
        self.folder = folder
        self.tables = {name: data.read(folder, forms[name], name) for name in SUBJECTS if name in forms}
        if all(data_table.rows.empty for data_table in self.tables.values()):
            raise RecordsError(
                f"{folder} holds no measurement; name a folder that `python -m benchmarks` wrote to"
            )
        self.square = data.square_sections(self.tables["kernel"])
        self.models = data.model_sections(self.tables["kernel"])
        self.hopper = data.model_sections(self.tables[KERNEL_HOPPER])
        self.layers = data.linear_sections(self.tables["linear"])
        self.stages = data.e2e_sections(self.tables["e2e"])

    @property
    def gpu(self) -> str:
        """The GPU that was measured, as the conditions name it."""
        gpus = [data_table.conditions.get("gpu") for data_table in self.tables.values()]
        return next((str(name).removeprefix("NVIDIA ") for name in gpus if name), "unknown GPU")

    def drawn(self) -> dict[str, tuple[list[Section], str]]:
        """Return the sections to plot, and the dense provider to compare with, by name of the plot.

        Layers are plotted as `hopper` runs them, or if it was not measured, as the others do.
        """
        layers = self.layers.sections
        drawn = {"linear": ([section for section in layers if section.ours == HOPPER] or layers, STOCK)}
        for stage, sections in self.stages.items():
            stock = any(STOCK in section.dense for section in sections.sections)
            drawn[f"e2e-{stage}"] = (sections.sections, STOCK if stock else CUBLASLT)
        return drawn

    def pages(self, reference: Path | None = None) -> dict[str, str]:
        """Return the text of each page by file name, with links to the plots that are in the folder."""
        makers = (
            self._kernel,
            self._kernel_hopper,
            self._linear,
            self._e2e,
            self._spmm,
        )
        both = zip(self.tables.items(), makers, strict=True)
        texts = {name: page(make(data_table)) for (name, data_table), make in both if len(data_table.rows)}
        if reference:
            texts["comparison"] = page(_comparison(self, reference))
        return {"README.md": self._readme(texts), **{f"{name}.md": text for name, text in texts.items()}}

    def _images(self, name: str) -> list[str]:
        paths = sorted(self.folder.glob(f"{name}-*.svg"))
        return [f"![{path.stem.replace('-', ' ')}]({path.name})" for path in paths]

    def _readme(self, names: Iterable[str]) -> str:
        rows = []
        for name in names:
            files = [f"{name}.csv", f"{name}.json"]
            links = [f"[{file}]({file})" for file in files if (self.folder / file).exists()]
            rows.append((f"[{name}.md]({name}.md)", SUBJECTS[name], ", ".join(links)))
        gaps = {"kernel.csv, square": self.square, "kernel.csv": self.models}
        gaps |= {f"{KERNEL_HOPPER}.csv": self.hopper, "linear.csv": self.layers}
        gaps |= {f"e2e.csv, {stage}": sections for stage, sections in self.stages.items()}
        lacking = [
            (name, *row)
            for name, sections in gaps.items()
            for row in sections.missing().itertuples(index=False)
        ]
        notes = [
            note
            for name, data_table in self.tables.items()
            if name not in OPTIONAL_PARTS or len(data_table.rows)
            for note in data_table.notes
        ]
        parts = [
            "# Measurements",
            "The JSON files hold the conditions of the CSV files: GPU, clocks, versions, dates, command lines.",
            table(("", "", "figures"), rows, 3),
            "## Missing",
            table(("file", "dtype", "not measured for", "by", "at", "M"), lacking, 6) if lacking else "",
            bullets(notes) if notes or lacking else "Nothing of what these files should hold.",
        ]
        return page(parts)

    # --- GEMMs and layers

    def _kernel(self, kernel: Table) -> list[str]:
        return self._gemms(kernel, "GEMMs", [*self.square.sections, *self.models.sections])

    def _kernel_hopper(self, kernel: Table) -> list[str]:
        return self._gemms(kernel, "GEMMs by `hopper`", self.hopper.sections)

    def _gemms(self, kernel: Table, title: str, sections: Iterable[Section]) -> list[str]:
        parts = [
            f"# {title}",
            "Median latencies of the GEMM alone; for a model, the sum over its four layers if all four were measured. "
            "Speed-up: latency of the dense GEMM / ours, of the same run. `-`: not measured. `stock` and `hopper` "
            "apply scales and write BF16; cuBLASLt does so only where that is faster than writing unscaled sums. "
            "`hopper` supports INT8 and FP8 only; its `dense` is an unpruned weight.",
            _spread(kernel.rows),
        ]
        for section in sections:
            parts += [_heading(section), *_speedups(section, (CUBLASLT, STOCK))]
        return parts

    def _linear(self, linear: Table) -> list[str]:
        parts = [
            "# Linear layers",
            "Sums of the median latencies of a model's four linear layers, including quantization and scaling. "
            "Speed-up: latency of the dense layers / ours. `-`: not measured.",
            _spread(linear.rows),
            *self._images("linear"),
            "## Compared with stock vLLM",
            verdicts(data.over_stock(self.layers.sections), "ours"),
        ]
        for section in self.layers.sections:
            parts += [_heading(section), *_speedups(section, [_baseline(section)])]
        return parts

    # --- whole models

    def _e2e(self, e2e: Table) -> list[str]:
        rates = data.rounds(e2e)
        engines = (e2e.conditions.get("workload") or {}).get("engines")
        speedups = [
            data.over_stock(sections.sections).assign(stage=stage) for stage, sections in self.stages.items()
        ]
        parts = [
            "# Whole models",
            "Tokens per second of `vllm bench throughput`: prompt and output tokens for prefill (one output token "
            "per prompt), output tokens only for decode. M: tokens per step. Each figure is the median of the "
            f"rounds, {f'engines {engines}, taking turns' if engines else 'every run a fresh process'}, by median "
            "steps where all systems of a round have `step_ms` in e2e.csv; ±: half of "
            "(largest - smallest) / median. `-`: not measured. `dense`: not pruned, on the kernels for sparse weights; "
            "`cublaslt`: not pruned, by cuBLASLt. Speed-ups are medians of the ratios within a round, as a machine may "
            "change from round to round. N/(N-1) bounds the linear layers only: these figures also include attention, "
            "sampling and engine overhead.",
            _noise(rates),
            *self._images("e2e"),
            "## Compared with stock vLLM",
            verdicts(pd.concat(speedups), "stage"),
        ]
        for stage, sections in self.stages.items():
            for section in sections.sections:
                cell_key = (section.title, stage, section.dtype)
                rows = rates[(rates[["model", "stage", "dtype"]] == cell_key).all(axis=1)]
                title = f"## {section.heading}, {stage}, {section.dtype.upper()}"
                parts += [title, "Tokens per second:", _rates(section, rows)]
                parts += _speedups(section, [_baseline(section)], latencies=False)
        return parts

    def _spmm(self, measured: Table) -> list[str]:
        return spmm.page(measured, self.counters, self._images("spmm"))


def _heading(section: Section) -> str:
    return f"## {section.heading}, {section.dtype.upper()}"


def _spread(rows: pd.DataFrame) -> str:
    spread = (rows["p80_us"] - rows["p20_us"]) / rows["p50_us"]
    worst = rows.loc[spread.idxmax()]
    subject = [worst["model"], worst["layer"], worst["dtype"].upper(), worst["provider"], worst["pattern"]]
    return (
        f"Spread of the runs, (p80 - p20) / p50: {percent(spread.median())} in the median, "
        f"{percent(spread.max())} at most ({' '.join(dict.fromkeys(subject))}, M {worst['M']})."
    )


def _baseline(section: Section) -> str:
    """Return the provider that users have without SlideSparse, or dense cuBLASLt where it was not measured."""
    return STOCK if STOCK in section.dense else CUBLASLT


def _speedups(section: Section, over: Iterable[str], latencies: bool = True) -> list[str]:
    """Return a table over each dense provider of ``over``, preceded by its latencies if ``latencies``."""
    if not section.patterns:
        return []
    parts: list[str] = []
    for provider in (name for name in over if name in section.dense):
        shown = section.dense[[provider] if latencies else []]
        frame = pd.concat(
            [shown.map(microseconds).add_suffix(" us"), section.speedup(provider).map(times)], axis=1
        ).rename_axis("M")
        frame.loc["N/(N-1)"] = [*("" for _ in shown), *section.bounds.map(times)]
        parts += [f"Speed-up over {BASELINE_NAMES[provider]}:", grid(frame)]
    return parts or ["No dense latency is complete here, so there is no speed-up."]


def verdicts(speedups: pd.DataFrame, by: str) -> str:
    """Return a table of how often each pattern is faster than stock vLLM, equal and slower, and its extremes.

    ``speedups`` is what `data.over_stock` returns; rows are told apart by its column ``by`` and by pattern.
    """
    rows = []
    parts = dict(iter(speedups.reset_index(drop=True).groupby([by, "pattern"])))
    order = list(dict.fromkeys(speedups[by]))
    for name, pattern in sorted(parts, key=lambda key: (order.index(key[0]), data.pattern_order(key[1]))):
        part = parts[name, pattern]
        slower = 1 / part["speedup"] - 1
        within = slower.abs() <= EQUAL_TOLERANCE + 1e-9  # 1.01 is not exact in binary
        ends = [part.loc[part["speedup"].idxmax()], part.loc[part["speedup"].idxmin()]]
        shown = [f"{times(e['speedup'])} ({e['title']} {e['dtype'].upper()}, M {e['M']})" for e in ends]
        counts = (((slower < 0) & ~within).sum(), within.sum(), ((slower > 0) & ~within).sum())
        rows.append((name, pattern, len(part), *counts, *shown))
    if not rows:
        return "No cell has both stock vLLM and a pattern measured."
    return table(("", "pattern", "cells", "faster", "within 1%", "slower", "best", "worst"), rows, 2)


def _noise(rates: pd.DataFrame) -> str:
    """Describe the spread of the rounds."""
    text = f"Rounds: {rates['count'].min()} to {rates['count'].max()}."
    several = rates[rates["count"] > 1]["spread"]
    if len(several):
        text += f" Spread, (largest - smallest) / median: {percent(several.median())} in the median, "
        text += f"{percent(several.max())} at most."
    return text


def _rates(section: Section, rows: pd.DataFrame) -> str:
    shown = [
        f"{rate:.{0 if rate >= 100 else 2}f}" + (f" ±{spread / 2:.1%}" if count > 1 else "")
        for rate, spread, count in zip(rows["rate"], rows["spread"], rows["count"], strict=True)
    ]
    rows = rows.assign(shown=shown, name=rows["pattern"].where(rows["pattern"] != DENSE, rows["system"]))
    rows = rows[(rows["pattern"] == DENSE) | (rows["system"] == section.ours)]
    wide = rows.pivot(index="M", columns="name", values="shown").fillna(NO_VALUE)
    dense = sorted(section.dense, key=lambda name: (name != STOCK, name == CUBLASLT, name))
    return grid(wide[[*dense, *section.patterns]])


# --- the paper and the reference implementation


def compare_reference(results: Results, reference: Path) -> pd.DataFrame:
    """Return reference figures beside ours: columns results, model, dtype, pattern, M, theirs, who, ours.

    ``who`` is our sparse provider and the dense one that it is compared with.  Figures of theirs without any of ours
    appear once, with NaN.  Raises RecordsError.
    """
    rows, _ = read_rows(reference, REFERENCE_COLUMNS)
    theirs = pd.DataFrame(rows, columns=list(REFERENCE_COLUMNS)).astype({"M": int, "speedup": float})
    key = ["results", "model", "dtype", "pattern", "M"]
    gemms = (*results.models.sections, *results.hopper.sections)
    sections = {
        "square": results.square.sections,
        **dict.fromkeys(("operands", "served"), gemms),
        **{stage: stage_sections.sections for stage, stage_sections in results.stages.items()},
    }
    parts = [pd.DataFrame(columns=[*key, "who", "ours"])]
    for kind, of_kind in sections.items():
        for section in of_kind:
            for over in section.dense:
                if over in BASELINES[kind]:
                    ours = (
                        section.speedup(over).reset_index().melt("M", var_name="pattern", value_name="ours")
                    )
                    model = kind if kind == "square" else section.title
                    facts = {"results": kind, "model": model, "dtype": section.dtype}
                    parts.append(ours.dropna().assign(**facts, who=f"{section.ours} over {over}"))
    measured = pd.concat([part for part in parts if len(part)] or parts)
    return theirs.rename(columns={"speedup": "theirs"}).merge(measured, on=key, how="left")


def summary(comparison: pd.DataFrame) -> str:
    """Return a table of how many cells of ours are at least theirs, and how far behind the others are."""
    rows = []
    for (results, who), part in comparison.dropna().groupby(["results", "who"], sort=False):
        behind = 1 - part["ours"] / part["theirs"]
        counts = pd.cut(behind, [-math.inf, 0, 0.05, 0.15, math.inf]).value_counts(sort=False)
        most = percent(behind.max()) if behind.max() > 0 else NO_VALUE
        rows.append((RESULTS[results], who, len(part), *counts, most))
    header = (
        "theirs",
        "ours",
        "cells",
        "at least theirs",
        "up to 5% lower",
        "5 to 15%",
        "more",
        "largest gap",
    )
    return table(header, rows, 2)


def _comparison(results: Results, reference: Path) -> list[str]:
    comparison = compare_reference(results, reference)
    parts = [
        "# Comparison with the paper and the reference implementation",
        f"Speed-ups over dense GEMMs, theirs and ours, each over the baseline of the same run. Theirs were measured on "
        f"an {REFERENCE_GPU}, from the tables of [arXiv 2603.05232](https://arxiv.org/abs/2603.05232), appendix D, "
        f"or, where stated, from its implementation; ours on an {results.gpu}. Differences may come from the GPU or "
        "from the baseline: ours is the fastest of all algorithms of a newer cuBLASLt, with cold caches. `over "
        "cublaslt`: over dense cuBLASLt, as theirs; `cublaslt-int8`: with INT8 results; `stock`: over stock vLLM. "
        "`sparse` is a whole model as the plugin serves it, by `hopper` on such a GPU; `over dense`: over the model "
        "that is not pruned, on the same kernels, which shows what sparsity itself gains. The paper compares with "
        "dense cuBLASLt. It has no sparse FP16 figures for an H100.",
        summary(comparison),
        "## Theirs, not measured here",
        _not_measured(comparison),
        "## GEMMs",
        "Our speed-up / theirs, as the range over M. Above 1, ours is larger.",
        _relative_gemms(comparison[~comparison["results"].isin(STAGES)].dropna()),
    ]
    for (stage, dtype, model), rows in comparison.groupby(["results", "dtype", "model"], sort=False):
        if stage in STAGES and rows["ours"].notna().any():
            parts += [f"## Whole models, {stage}, {model}, {dtype.upper()}", _side_by_side(rows)]
    return parts


def _not_measured(comparison: pd.DataFrame) -> str:
    absent = comparison[comparison["ours"].isna()]
    rows = [
        (RESULTS[kind], model, dtype.upper(), len(part), ", ".join(map(str, sorted(part["M"].unique()))))
        for (kind, model, dtype), part in absent.groupby(["results", "model", "dtype"], sort=False)
    ]
    return table(("theirs", "model", "dtype", "cells", "M"), rows, 3) if rows else "Nothing."


def _relative_gemms(gemms: pd.DataFrame) -> str:
    ratios = gemms["ours"] / gemms["theirs"]
    key = [gemms[name] for name in ("results", "model", "dtype", "who", "pattern")]
    spans = ratios.groupby(key, sort=False).agg(span).unstack(fill_value=NO_VALUE)
    patterns = sorted(spans, key=data.pattern_order)
    rows = [
        (RESULTS[kind], "" if model == kind else model, dtype.upper(), who, *row)
        for (kind, model, dtype, who), *row in spans[patterns].itertuples(name=None)
    ]
    return table(("theirs", "model", "dtype", "ours", *patterns), rows, 4) if rows else "Nothing."


def _side_by_side(rows: pd.DataFrame) -> str:
    """Return a table with a row for each M of the paper's results, and one for each of ours."""
    theirs = rows.assign(who="paper", shown=rows["theirs"])
    both = pd.concat([theirs, rows.assign(shown=rows["ours"]).dropna(subset=["ours"])])
    order = list(dict.fromkeys(both["who"]))
    wide = both.drop_duplicates(["M", "who", "pattern"]).pivot(
        index=["M", "who"], columns="pattern", values="shown"
    )
    wide = wide[sorted(wide, key=data.pattern_order)].map(times).reset_index()
    wide = wide.sort_values(["M", "who"], key=lambda c: c.map(order.index) if c.name == "who" else c)
    return table(("M", "", *wide.columns[2:]), wide.itertuples(index=False, name=None), 2)
