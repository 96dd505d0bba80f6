"""Tables of figures, made from CSV files: those of docs/, and a page for any folder of results."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from benchmarks.e2e.plan import CUSPARSELT, DENSE, PREFILL, SPARSE
from benchmarks.kernel import MODEL, SQUARE, STOCK
from benchmarks.records import (
    E2E,
    ENERGY,
    KERNEL,
    LINEAR,
    RecordsError,
    read_conditions,
    read_rows,
)
from benchmarks.spmm import report as spmm
from benchmarks.tables import NO_VALUE, digits, pattern_order, ratio, read, span, table
from slidesparse.convert import budget
from slidesparse.flags import REQUIRE
from slidesparse.gemm.tuned import slug
from slidesparse.pattern import parse_pattern
from slidesparse.tune.shapes import MODELS

ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS = ROOT / "docs" / "benchmarks"
H200, H100 = BENCHMARKS / "h200", BENCHMARKS / "h100"
FOLDERS = (H200, H100)
ACCURACY = ROOT / "docs" / "accuracy"
REAL_MODELS = ACCURACY / "real_models.csv"

CUBLASLT, HOPPER, TWO_FOUR = "cublaslt", "hopper", "2:4"
DTYPES = ("int8", "fp8", "bf16", "fp16")
LAYERS = 4  # linear layers of a decoder block: QKV, output, gate and up, down
SERVED = (TWO_FOUR, "4:6", "6:8")
PATTERNS = (*SERVED, "8:10")  # 8:10 by version 0.2.0; it is served as dense weights since
GOALS = {  # least speed-ups of `layers`
    "1 to 64": (1, 1, 1.14, 1.22, 1.4),
    "512 and more": (1, 1, 1, 1.08, 1.35),
}
SUM_LAYER = "sum"  # in h100/linear.csv: the times of a block's layers, each measured alone, together
QWEN, BITNET = "Qwen2.5-7B", "BitNet-2B"
CODER, WIKITEXT = "qwen-coder", "wikitext2"  # in REAL_MODELS
MAX_FEW_TOKENS = 256  # tokens up to which a layer is bound by reading its weights
STEPS = {"prefill": "prefill, {} tokens per step", "decode": "decode, batch size {}"}
# Rounds of h200/e2e.csv (h200/e2e.json): those of the table, and of other runs
MAIN, OTHER, UNFUSED_RUNS = range(100), range(100, 200), range(200, 300)
MIXTURES = range(500, 600)  # rounds with pruned experts
STEPPED = range(700, 800)  # rounds on the H200 by version 0.3.0, with the GPU's part of decode
PEERS = range(800, 810)  # rounds on the H200 beside what people would pick instead
POWERED = range(810, 820)  # the same, long enough for the energy of prefill
NOT_PRUNED = {DENSE: "not pruned"}
BESIDE = {  # type and column of the rounds PEERS
    ("int8", "bf16"): "BF16",
    ("int8", "w4a16"): "W4A16 (Machete, groups of 128)",
    ("int8", "w4a8"): "W4A8 in FP8 (CUTLASS, groups of 128)",
    **{(dtype, STOCK): f"{dtype.upper()}, stock" for dtype in ("fp8", "int8")},
    **{("fp8", name): f"FP8, {NOT_PRUNED.get(name, name)}" for name in (DENSE, "6:8")},
    **{("int8", name): f"INT8, {NOT_PRUNED.get(name, name)}" for name in (DENSE, "6:8", TWO_FOUR)},
}
REFERENCE_COLUMNS = ("results", "model", "dtype", "pattern", "M", "speedup")
RESULTS = {  # kinds of figures in docs/benchmarks/reference.csv
    "square": "square GEMMs",
    "operands": "GEMMs of layers",
    "served": "GEMMs of layers, as the authors' implementation serves them",
    "prefill": "prefill of whole models",
    "decode": "decode of whole models",
}


# --- figures


@cache
def whole_models(folder: Path) -> pd.DataFrame:
    """Read e2e.csv with a column `column`: a pattern, a dense system, or another system and its pattern."""
    rows = read(folder, E2E)
    other = rows["system"].where(rows["system"] == SPARSE, rows["system"] + " " + rows["pattern"])
    column = rows["pattern"].where(rows["system"] == SPARSE, other)
    return rows.assign(column=column.where(rows["pattern"] != DENSE, rows["system"]))


def within_rounds(rows: pd.DataFrame, base: str, value: str = "rate") -> pd.DataFrame:
    """Return ``value`` over that of the column ``base`` in the same round: rows of cells and rounds, a column for each.

    The speed of a machine varies from round to round, for all systems.
    """
    index = ["model", "dtype", "stage", "M", "context", "round"]
    wide = rows.pivot(index=index, columns="column", values=value)
    return wide.div(wide[base], axis=0).dropna(how="all") if base in wide else wide.iloc[:0]


def layer_us(rows: pd.DataFrame, value: str = "p50_us") -> pd.DataFrame:
    """Return ``value`` of layers: rows (model, layer, dtype, M), columns (provider, pattern)."""
    return rows.pivot(index=["model", "layer", "dtype", "M"], columns=["provider", "pattern"], values=value)


@cache
def model_layers(folder: Path) -> pd.DataFrame:
    """Return the microseconds of the layers of each model's block together: rows (model, dtype, M)."""
    wide = layer_us(read(folder, LINEAR))
    blocks = [name == SUM_LAYER or "+" in name for name in wide.index.get_level_values("layer")]
    return wide[blocks].droplevel("layer")


@cache
def gemm_us(folder: Path, name: str = "") -> pd.DataFrame:
    """Return microseconds of kernel.csv: rows (model, dtype, M), columns (provider, pattern).

    Squares are the model SQUARE; a model's four layers are summed where all were measured.
    """
    rows = read(folder, KERNEL, name)
    key = ["model", "dtype", "M", "provider", "pattern"]
    sums = rows[rows["mode"] == MODEL].groupby(key)["p50_us"].agg(["sum", "size"])
    parts = [sums[sums["size"] == LAYERS]["sum"], rows[rows["mode"] == SQUARE].set_index(key)["p50_us"]]
    return pd.concat(parts).unstack(["provider", "pattern"])


def over(us: pd.DataFrame, base: str, ours: str) -> pd.DataFrame:
    """Return times of the dense provider ``base`` over those of ``ours``, a column for each pattern."""
    if (base, DENSE) not in us or ours not in us:
        return pd.DataFrame(index=us.index)
    return us[ours].rdiv(us[base, DENSE], axis=0)


# --- tables of docs/benchmarks


def _step(stage: str, m: int) -> str:
    return STEPS[stage].format(m)


def _whole_model_table(ratios: pd.DataFrame, columns: Mapping[str, str]) -> str:
    """Return a table of types and steps: medians over the rounds of the ratios of one model."""
    medians = (
        ratios.reindex(columns=[*columns]).dropna(how="all").groupby(level=["dtype", "stage", "M"]).median()
    )
    rows: list[tuple[str, ...]] = []
    for dtype in (name for name in DTYPES if name in medians.index.get_level_values("dtype")):
        cells = medians.loc[dtype]
        for number, (stage, m) in enumerate(cells.index):
            rows.append(
                (dtype.upper() if number == 0 else "", _step(stage, m), *map(ratio, cells.loc[stage, m]))
            )
    return table(("", "", *columns.values()), rows, 2)


def _rounds(numbers: range) -> pd.DataFrame:
    """Return the rows of some rounds on the H200."""
    rows = whole_models(H200)
    return rows[rows["round"].isin(numbers)]


def whole(model: str, folder: Path = H200) -> str:
    """A whole model over stock vLLM, not pruned and with the patterns."""
    rows = whole_models(folder)
    ratios = within_rounds(rows[rows["round"].isin(MAIN)], STOCK).loc[[model]]
    columns = {**NOT_PRUNED, **{name: name for name in SERVED[::-1] if name in ratios}}
    return _whole_model_table(ratios, columns)


def cusparselt() -> str:
    """Qwen2.5-7B by cuSPARSELt."""
    columns = {f"{CUSPARSELT} {name}": name for name in ("6:8", TWO_FOUR)}
    return _whole_model_table(within_rounds(_rounds(OTHER), STOCK).loc[[QWEN]], columns)


def bitnet() -> str:
    """BitNet b1.58 2B over its own unpruned codes by the same kernels."""
    ratios = within_rounds(_rounds(OTHER), DENSE).loc[[BITNET]]
    return _whole_model_table(ratios, {name: name for name in PATTERNS[::-1]})


def beside() -> str:
    """Milliseconds of decode, of a step and of its GPU's part, and tokens a second and a joule, beside other types."""
    rows = _rounds(PEERS)
    medians = rows.groupby(["stage", "dtype", "column", "M"])[["step_ms", "graph_ms", "rate"]].median()
    steps, graphs = (medians.loc["decode"][value].unstack() for value in ("step_ms", "graph_ms"))
    prefill = medians.loc[PREFILL]["rate"].unstack()[8192]
    powered = _rounds(POWERED).groupby(["stage", "dtype", "column"])["tokens_per_joule"].median().loc[PREFILL]
    lines = [
        (
            label,
            *map(ratio, (*steps.loc[key], *graphs.loc[key])),
            f"{prefill[key] / 1000:.1f}",
            f"{powered[key]:.0f}",
        )
        for key, label in BESIDE.items()
    ]
    heads = ("", *steps, *(f"{m}: the GPU's part" for m in graphs), PREFILL, f"{PREFILL}, tokens per joule")
    return table(heads, lines)


def contexts() -> str:
    """Decode over stock vLLM, by the tokens that each sequence has at the start; medians over the rounds."""
    columns = {**NOT_PRUNED, "6:8": "6:8", TWO_FOUR: TWO_FOUR}
    rows = whole_models(H200)
    rows = rows[rows["round"].isin(MAIN) | (rows["context"] > 16)]
    ratios = within_rounds(rows, STOCK).loc[[QWEN]].reindex(columns=[*columns])
    medians = ratios.xs("decode", level="stage").groupby(level=["dtype", "context", "M"]).median()
    lines = []
    for dtype, tokens in (pair for name in DTYPES[:2] for pair in [(name, n) for n in (16, 2048, 8192)]):
        cells = medians.loc[dtype, tokens]
        for number, m in enumerate(m for m in cells.index if m in (16, 32, 64, 128)):
            label = f"{dtype.upper()}, {tokens}" if number == 0 else ""
            lines.append((label, m, *map(ratio, cells.loc[m])))
    return table(("tokens at the start", "batch size", *columns.values()), lines, 2)


def spans(rounds: range) -> str:
    """Return a table of whole models over stock vLLM: the median over some rounds, and their range."""
    lines: list[tuple[str, ...]] = []
    for folder in FOLDERS:
        rows = whole_models(folder)
        rows = rows[rows["round"].isin(rounds)].replace({"column": {REQUIRE: DENSE}})
        for (model, dtype), cells in within_rounds(rows, STOCK).groupby(level=["model", "dtype"], sort=False):
            for number, ((stage, m), of_rounds) in enumerate(cells.groupby(level=["stage", "M"])):
                name = f"{folder.name.upper()}, {model}, {dtype.upper()}" if number == 0 else ""
                figures = (of_rounds[column].dropna() for column in (DENSE, "6:8", TWO_FOUR))
                texts = (f"{ratio(x.median())} ({span(x)})" if len(x) else NO_VALUE for x in figures)
                lines.append((name, _step(stage, m), *texts))
    return table(("", "", NOT_PRUNED[DENSE], "6:8", TWO_FOUR), lines, 2)


def steps() -> str:
    """Return milliseconds of steps by stock vLLM on an H200, and how many times as fast ours are: median and range.

    In decode by the GPU's part, the graph of all decoder layers, and by whole steps.
    """
    columns = {**NOT_PRUNED, **{name: name for name in SERVED[::-1]}}
    rows = _rounds(STEPPED)
    lines: list[tuple[str, ...]] = []
    for value, part in (("graph_ms", ": the GPU's part"), ("step_ms", "")):
        ratios = 1 / within_rounds(rows, STOCK, value)
        stock = rows[rows["column"] == STOCK].groupby(["dtype", "stage", "M"])[value].median()
        for dtype in DTYPES[:2]:
            cells = ratios.xs(dtype, level="dtype").dropna(how="all").groupby(level=["stage", "M"])
            for number, ((stage, m), of_rounds) in enumerate(cells):
                texts = (
                    f"{ratio(x.median())} ({span(x)})" for x in (of_rounds[name].dropna() for name in columns)
                )
                name = dtype.upper() if number == 0 else ""
                lines.append((name, _step(stage, m) + part, digits(stock[dtype, stage, m]), *texts))
    return table(("", "", "stock, ms", *columns.values()), lines, 2)


def fusion() -> str:
    """The gain by fused norms and activations, round by round."""
    rows = _rounds(UNFUSED_RUNS)
    lines = []
    for m in sorted(rows["M"].unique()):
        cells = []
        for dtype in DTYPES[:2]:
            for pattern in ("6:8", TWO_FOUR):
                part = rows[(rows["M"] == m) & (rows["dtype"] == dtype) & (rows["pattern"] == pattern)]
                rates = part.pivot(index="round", columns="system", values="rate")
                cells.append(span(rates[SPARSE] / rates["unfused"]))
        lines.append((_step(PREFILL, m), *cells))
    header = [f"{dtype.upper()}, {name}" for dtype in DTYPES[:2] for name in ("6:8", TWO_FOUR)]
    return table(("", *header), lines)


def layers() -> str:
    """Layers of Qwen2.5-7B by version 0.3.0: unpruned ones over the libraries', patterns over those, and the goals."""
    lines: list[tuple[object, ...]] = []
    for folder in (H100, H200):
        us = model_layers(folder).loc[QWEN]
        bases = {f"not pruned over {name}": over(us, name, HOPPER).get(DENSE) for name in (STOCK, CUBLASLT)}
        patterns = over(us, HOPPER, HOPPER)[[*SERVED[::-1]]].add_suffix(" over not pruned")
        cells = patterns.assign(**bases)[[*bases, *patterns]].astype(float)
        for dtype in DTYPES[:2]:
            for number, (m, figures) in enumerate(cells.loc[dtype].iterrows()):
                label = "" if number else f"{folder.name.upper()}, {dtype.upper()}"
                lines.append((label, m, *map(ratio, figures)))
    goals = [("goal", name, *map(ratio, least)) for name, least in GOALS.items()]
    return table(("", "tokens", *cells), [*lines, *goals], 2)


def popular() -> str:
    """Layers of more models on an H200: unpruned ones over stock vLLM's in INT8, patterns over those."""
    rows = []
    us = model_layers(H200).drop(index=QWEN, level="model")
    ms = sorted(set(us.index.get_level_values("M")))
    for model in us.index.unique("model"):
        for dtype in DTYPES[:2]:
            of_model = us.loc[model, dtype]
            cells = over(of_model, HOPPER, HOPPER).assign(**{DENSE: over(of_model, STOCK, HOPPER)[DENSE]})
            measured = [name for name in (DENSE, *SERVED[::-1]) if cells[name].notna().any()]
            for number, pattern in enumerate(measured):
                name = "" if number else f"{model}, {dtype.upper()}"
                base = f"not pruned over {STOCK}" if pattern == DENSE else f"{pattern} over not pruned"
                rows.append((name, base, *(ratio(cells[pattern][m]) for m in ms)))
    return table(("", "M", *ms), rows, 2)


def gemms() -> str:
    """GEMMs of Qwen2.5-7B over dense cuBLASLt, as the range over M."""
    rows = []
    for ours, file in ((CUSPARSELT, ""), (HOPPER, "kernel_hopper")):
        cells = over(gemm_us(H200, file).loc[QWEN], CUBLASLT, ours)
        for dtype in (name for name in DTYPES if name in cells.dropna(how="all").index):
            many = cells.loc[dtype].loc[lambda part: part.index > MAX_FEW_TOKENS]
            few = cells.loc[dtype].loc[64]
            rows.append(
                (f"`{ours}`", dtype.upper(), *(f"{span(many[p])} ({ratio(few[p])})" for p in PATTERNS))
            )
    return table(("", "", *PATTERNS), rows, 2)


@cache
def compared() -> pd.DataFrame:
    """Return the reference's figures beside ours: columns results, model, dtype, pattern, M, theirs, who, ours.

    ``who`` is our sparse provider and the dense one that it is compared with.
    """
    key = ["results", "model", "dtype", "pattern", "M"]
    parts = []
    for ours, file in ((CUSPARSELT, ""), (HOPPER, "kernel_hopper")):
        for base in (CUBLASLT, "cublaslt-int8"):
            cells = over(gemm_us(H200, file), base, ours).drop(columns=DENSE, errors="ignore")
            long = cells.melt(ignore_index=False, var_name="pattern", value_name="ours").reset_index()
            for kind in ("square", "operands", *(["served"] if base == CUBLASLT else [])):
                part = long[(long["model"] == SQUARE) == (kind == "square")]
                parts.append(part.assign(results=kind, who=f"{ours} over {base}"))
    for base in (DENSE, STOCK):
        ratios = within_rounds(_rounds(MAIN), base).drop(columns=[STOCK, DENSE])
        medians = ratios.groupby(level=["model", "dtype", "stage", "M"]).median()
        long = medians.melt(ignore_index=False, var_name="pattern", value_name="ours").reset_index()
        parts.append(long.rename(columns={"stage": "results"}).assign(who=f"sparse over {base}"))
    rows, _ = read_rows(BENCHMARKS / "reference.csv", REFERENCE_COLUMNS)
    theirs = pd.DataFrame(rows).astype({"M": int, "speedup": float}).rename(columns={"speedup": "theirs"})
    return theirs.merge(pd.concat(parts).dropna(subset="ours")[[*key, "who", "ours"]], on=key)


def reference() -> str:
    """How many cells of ours are at least the paper's and the reference implementation's, and how far others are."""
    rows = []
    for (results, who), part in compared().groupby(["results", "who"], sort=False):
        behind = 1 - part["ours"] / part["theirs"]
        counts = pd.cut(behind, [-math.inf, 0, 0.05, 0.15, math.inf]).value_counts(sort=False)
        rows.append((RESULTS[results], who, len(part), *counts, f"{behind.max():.1%}"))
    header = ("cells", "at least theirs", "up to 5% lower", "5 to 15%", "more", "largest gap")
    return table(("theirs", "ours", *header), rows, 2)


def efficiency() -> str:
    """The paper's algorithmic efficiency, and the share of the bound, at 8192 tokens: of GEMMs and of prefill.

    (S / S of 2:4) / R with R the density of 2:4 over that of the pattern: equations 18 and 19 of arXiv 2603.05232,
    appendix D.5.
    """
    prefill = within_rounds(_rounds(MAIN), DENSE).loc[QWEN].xs(PREFILL, level="stage")
    sources = {
        f"GEMMs by `{CUSPARSELT}`": over(gemm_us(H200).loc[QWEN], CUBLASLT, CUSPARSELT),
        f"GEMMs by `{HOPPER}`": over(gemm_us(H200, "kernel_hopper").loc[QWEN], CUBLASLT, HOPPER),
        "prefill": prefill.groupby(level=["dtype", "M"]).median(),
    }
    rows = []
    for label, cells in sources.items():
        at = cells.reindex(columns=[*PATTERNS]).dropna().xs(8192, level="M")
        for dtype in (name for name in DTYPES if name in at.index):
            speedup = at.loc[dtype]
            figures = []
            for pattern in PATTERNS:
                bound = float(1 / parse_pattern(pattern).density)
                share = speedup[pattern] / (speedup[TWO_FOUR] / 2) / bound
                figures.append(f"{share:.1%} ({ratio(speedup[pattern])} of {ratio(bound)})")
            rows.append((label, dtype.upper(), *figures))
    return table(("", "", *PATTERNS), rows, 2)


def real_model_rows() -> pd.DataFrame:
    """Read the losses of real models, with a column of the kind of method, such as ``distilled``.

    Of rows that differ in text alone, the last has the most.
    """
    rows = pd.read_csv(REAL_MODELS, keep_default_na=False, dtype=str)
    rows["kind"] = rows["method"].str.partition(" ")[0]
    numbers = ["zeros", "minutes", "perplexity", "delta_pct", "humaneval"]
    return rows.assign(**{name: pd.to_numeric(rows[name]) for name in numbers})


def real_models() -> str:
    """Perplexities of two real language models, their increases over the unpruned model, and HumanEval.

    Means over seeds, with half of their range.
    """

    def cell(part: pd.DataFrame, text: str, column: str, form: str) -> str:
        values = part.loc[part["text"] == text, column].dropna()
        if values.empty:
            return NO_VALUE
        spread = f" ± {(values.max() - values.min()) / 2:.1f}" if len(values) > 1 else ""
        return f"{values.mean():{form}}{spread}" + ("%" if column == "delta_pct" else "")

    lines = []
    key = ["model", "quant", "pattern", "method", "minutes"]
    for (model, quant, pattern, method, minutes), part in real_model_rows().groupby(key, sort=False):
        cells = [f"{part['zeros'].iloc[0]:.0f}%", f"{minutes:g}", cell(part, WIKITEXT, "perplexity", ".2f")]
        cells += [cell(part, text, "delta_pct", "+.1f") for text in (WIKITEXT, "own", "python")]
        cells.append(cell(part, "humaneval", "humaneval", ".1f"))
        lines.append((model, quant.upper(), NOT_PRUNED.get(pattern, pattern), method, *cells))
    header = ("zeros", "minutes", "WikiText-2", "increase", "own text", "Python reference", "HumanEval")
    return table(("model", "", "pattern", "method", *header), lines, 4)


TABLES: dict[str, Callable[[], str]] = {
    "whole_14b": partial(whole, "Qwen2.5-14B"),
    "whole_h100": partial(whole, QWEN, H100),
    "whole_h200": steps,
    "mixtures": partial(spans, MIXTURES),
    **{make.__name__: make for make in (beside, contexts, cusparselt, bitnet, fusion, layers, popular)},
    **{make.__name__: make for make in (gemms, reference, efficiency, real_models)},
    "spmm_squares": partial(spmm.squares, H200),
    "spmm_others": partial(spmm.others, H200),
}


# --- the page of a folder


def page(folder: Path) -> str:
    """Return the page of a folder of results.  Raises RecordsError if it holds none."""
    parts = [*_e2e_page(folder), *_layer_page(folder), *_gemm_page(folder), *spmm.page(folder)]
    if not parts:
        raise RecordsError(
            f"{folder} holds no measurement; name a folder that `python -m benchmarks` wrote to"
        )
    gpus = (read_conditions(path).get("gpu") for path in sorted(folder.glob("*.json")))
    parts[:0] = [
        f"# Measurements on {next(filter(None, gpus), 'a CPU')}",
        "Made by `python -m benchmarks report` from the CSV files beside it, whose conditions are in the JSON files. "
        "Ratios are speed-ups, so above 1 the column is faster; `-`: not measured.",
    ]
    return "\n\n".join(part.rstrip("\n") for part in parts) + "\n"


def _grid(frame: pd.DataFrame, left: Sequence[str]) -> str:
    """Format a frame of text, its index as the first columns."""
    rows = frame.reset_index().itertuples(index=False, name=None)
    return table((*left, *(" ".join(c) if isinstance(c, tuple) else c for c in frame)), rows, len(left))


def _e2e_page(folder: Path) -> Iterator[str]:
    rows = whole_models(folder)
    for (model, dtype), part in rows.groupby(["model", "dtype"], sort=False):
        base = STOCK if (part["column"] == STOCK).any() else DENSE
        for value, words in (("rate", "Tokens per second"), ("tokens_per_joule", "Tokens per joule")):
            ratios = (
                within_rounds(part, base, value).dropna(axis=1, how="all").drop(columns=base, errors="ignore")
            )
            medians = ratios.groupby(level=["stage", "M", "context"]).median()
            if medians.size:
                key = [part[name] for name in ("stage", "M", "context")]
                absolute = part[part["column"] == base].groupby(key)[value].median().map(digits)
                shown = medians[sorted(medians, key=pattern_order)].map(ratio)
                shown.insert(0, base, absolute.reindex(shown.index).fillna(NO_VALUE))
                yield f"## {model}, {dtype.upper()}: whole model"
                yield f"{words} of `{base}`, and the others' over them: medians over rounds."
                yield _grid(shown, ("", "M", "context"))


def _layer_page(folder: Path) -> Iterator[str]:
    rows = read(folder, LINEAR)
    for (model, dtype), part in rows.groupby(["model", "dtype"], sort=False):
        part = part[part["layer"] == SUM_LAYER] if (part["layer"] == SUM_LAYER).any() else part
        for value, words in (("p50_us", "Microseconds"), (ENERGY, "Millijoules")):
            wide = layer_us(part, value).loc[model].droplevel("dtype").dropna(axis=1, how="all")
            base = (STOCK, DENSE) if (STOCK, DENSE) in wide else (CUBLASLT, DENSE)
            if base in wide:
                shown = wide.rdiv(wide[base], axis=0).drop(columns=[base])
                shown = shown[sorted(shown, key=lambda c: (c[0], pattern_order(c[1])))].map(ratio)
                shown.insert(0, base, wide[base].map(digits))
                yield f"## {model}, {dtype.upper()}: linear layers"
                yield f"{words} of {base[0]}'s layers, and ratios to them."
                yield _grid(shown, ("layer", "M"))


def _gemm_page(folder: Path) -> Iterator[str]:
    for path in sorted(folder.glob("kernel*.csv")):
        us = gemm_us(folder, path.stem)
        for model, dtype in us.index.droplevel("M").unique():
            wide = us.loc[model, dtype].dropna(axis=1, how="all")
            base = (CUBLASLT, DENSE)
            if base in wide:
                shown = wide.rdiv(wide[base], axis=0).drop(columns=[base])
                shown = shown[sorted(shown, key=lambda c: (c[0], pattern_order(c[1])))].map(ratio)
                shown.insert(0, base, wide[base].map(digits))
                yield f"## {model}, {dtype.upper()}: GEMMs alone ({path.name})"
                yield "Microseconds of dense cuBLASLt, and ratios to them."
                yield _grid(shown, ("M",))


def write_page(folder: Path) -> Path:
    """Write README.md of a folder of results.  Raises RecordsError."""
    if not folder.is_dir():
        raise RecordsError(f"{folder} is not a folder; name one that benchmarks wrote to")
    text, path = page(folder), folder / "README.md"
    path.write_text(text, encoding="utf-8")
    return path


# --- docs


class Measured(NamedTuple):
    """The layers of a row of linear.csv."""

    layers: int
    weights: float  # millions
    us: float


def fit(points: Sequence[Measured]) -> tuple[float, float]:
    """Fit us = a layers + b weights with a, b >= 0 by least squares of the relative errors; return (a, b)."""
    # minimise sum (a n / y + b x / y - 1)^2
    aa = sum((n / y) ** 2 for n, _, y in points)
    ab = sum(n * x / y**2 for n, x, y in points)
    bb = sum((x / y) ** 2 for _, x, y in points)
    a1, b1 = sum(n / y for n, _, y in points), sum(x / y for _, x, y in points)
    determinant = aa * bb - ab * ab
    if len(points) == 1 or determinant <= 0 or a1 * bb < b1 * ab:
        return 0.0, b1 / bb
    a, b = (a1 * bb - b1 * ab) / determinant, (b1 * aa - a1 * ab) / determinant
    return (a, b) if b >= 0 else (a1 / aa, 0.0)


def measured_layers(folder: Path) -> dict[tuple[str, str, int], dict[tuple[str, str], Measured]]:
    """Return what was measured of our kernels by (type, pattern, tokens), and by (model, names of the layers).

    Only where there are several rows to fit.
    """
    sizes = {
        (model, layer.name): layer.n * layer.k / 1e6 for model, layers in MODELS.items() for layer in layers
    }
    rows = read(folder, LINEAR)
    rows = rows[(rows["provider"] == HOPPER) & (rows["layer"] != SUM_LAYER)]
    found: dict[tuple[str, str, int], dict[tuple[str, str], Measured]] = {}
    for row in rows.itertuples():
        names = row.layer.split("+")
        measured = Measured(len(names), sum(sizes[row.model, name] for name in names), row.p50_us)
        found.setdefault((row.dtype, row.pattern, row.M), {})[row.model, row.layer] = measured
    return {case: measured for case, measured in found.items() if len(measured) > 1}


def fit_case(
    measured: Mapping[tuple[str, str, int], Mapping[tuple[str, str], Measured]], case: tuple[str, str, int]
) -> tuple[float, float]:
    """Fit what was measured of a case; as dense layers times their mean ratio where it lacks some of theirs."""
    dtype, _, tokens = case
    ours, dense = measured[case], measured[dtype, DENSE, tokens]
    if ours.keys() >= dense.keys():
        return fit([*ours.values()])
    share = statistics.fmean(ours[key].us / dense[key].us for key in ours)
    a, b = fit([*dense.values()])
    return a * share, b * share


def layer_fits() -> str:
    """Return the CSV of fitted layer times that budgets use (see `slidesparse.convert.budget`)."""
    lines = [",".join(budget.COLUMNS)]
    for folder in sorted(FOLDERS):
        gpu = slug(read_conditions(folder / "linear.json")["gpu"])
        measured = measured_layers(folder)
        for case in sorted(measured):
            a, b = fit_case(measured, case)
            lines.append(",".join(map(str, (gpu, *case, f"{a:.4g}", f"{b:.4g}"))))
    return "\n".join([*lines, ""])
