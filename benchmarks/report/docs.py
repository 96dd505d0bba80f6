"""``python -m benchmarks docs``: generate every table of figures in docs/ from the CSVs in docs/.

A page holds a table between the lines ``<!-- table: NAME -->`` and ``<!-- end -->``; NAME is one of `TABLES`.  The
pages of docs/benchmarks/h100 and h200 are generated completely.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from itertools import zip_longest
from pathlib import Path

import pandas as pd

from benchmarks.e2e import BLOCKS
from benchmarks.records import E2E, RecordsError
from benchmarks.report import data, pages
from benchmarks.report.data import CUBLASLT, CUSPARSELT, DENSE, HOPPER, STOCK
from benchmarks.report.markdown import percent, span, table, times, tops
from slidesparse.convert.times import FOLDER
from slidesparse.errors import CheckFailed
from slidesparse.gemm.tuned import slug
from slidesparse.tune.shapes import MODELS

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "docs" / "benchmarks"
H200, H100, REFERENCE = BENCHMARKS / "h200", BENCHMARKS / "h100", BENCHMARKS / "reference.csv"
FOLDERS = {H100: None, H200: REFERENCE}
MARKED_PAGES = (BENCHMARKS / "README.md",)
MARKED = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)

WHOLE_MODEL_COLUMNS = {BLOCKS: "not pruned", **{name: name for name in ("8:10", "6:8", "4:6", "2:4")}}
OTHER_COLUMNS = {
    **{name: name for name in ("2:4@33%", "2:4@50%", "2:4@67%")},
    **{f"{CUSPARSELT} {name}": f"`{CUSPARSELT}` {name}" for name in ("6:8", "2:4")},
}
PATTERNS = ("2:4", "4:6", "6:8", "8:10")
# Tokens of a prompt, and the table.
CONTEXTS = {16: "e2e", 2048: "e2e_context_2048", 8192: "e2e_context_8192"}
CONTEXT_BATCHES = (16, 32, 64, 128)
CONTEXT_COLUMNS = {BLOCKS: "not pruned", "6:8": "6:8", "2:4": "2:4"}
QWEN, LLAMA = "Qwen2.5-7B", "Llama3.2-1B"
NAMES = {LLAMA: "Llama-3.2-1B", "Llama3.2-3B": "Llama-3.2-3B"}  # as the text spells them
SHAPES = "shapes.csv"  # like linear.csv, of layers that are named by their N x K
POPULAR_SHAPES = {  # of their four linear layers, as SHAPES names them
    "Llama-3.1-8B, Mistral-7B": ("6144x4096", "4096x4096", "28672x4096", "4096x14336"),
    "Qwen3-8B": ("6144x4096", "4096x4096", "24576x4096", "4096x12288"),
    "Qwen3-14B": ("7168x5120", "5120x5120", "34816x5120", "5120x17408"),
    "Gemma-2-9B": ("8192x3584", "3584x4096", "28672x3584", "3584x14336"),
    "Llama-3.1-70B, one of four GPUs": ("2560x8192", "8192x2048", "14336x8192", "8192x7168"),
}
MAX_FEW_TOKENS = 256  # tokens up to which a layer is bound by reading its weights
STEPS = {"prefill": "prefill, {} tokens per step", "decode": "decode, batch size {}"}


@cache
def _results(folder: Path) -> pages.Results:
    return pages.Results(folder)


@cache
def _layers(folder: Path) -> pd.DataFrame:
    """Speed-ups of layers over stock vLLM's."""
    return data.over_stock(_results(folder).layers.sections)


# --- whole models


def _step(stage: str, m: int) -> str:
    return STEPS[stage].format(m)


def _speedups(name: str, base: str) -> pd.DataFrame:
    """Return rates of NAME.csv over those of ``base``, by round; a column for each pattern or dense system."""
    rates = data.read(H200, E2E, name).rows
    column = rates["pattern"].where(rates["pattern"] != DENSE, rates["system"])
    column = column.where(rates["system"] != CUSPARSELT, CUSPARSELT + " " + rates["pattern"])
    key = ["model", "dtype", "stage", "M", "round"]
    rates = rates.assign(column=column).pivot(index=key, columns="column", values="rate")
    return rates.div(rates[base], axis=0).dropna(how="all")


def whole(model: str) -> str:
    """A whole model over stock vLLM, not pruned and with the patterns."""
    return _whole_model_table(_speedups("e2e", STOCK).loc[model], WHOLE_MODEL_COLUMNS)


def other() -> str:
    """Qwen2.5-7B with mixed blocks, and with cuSPARSELt."""
    ratios = _speedups("e2e_few", STOCK).loc[QWEN][[*OTHER_COLUMNS]].dropna(how="all")
    return _whole_model_table(ratios, OTHER_COLUMNS)


def few_bitnet() -> str:
    """BitNet b1.58 2B over its own unpruned codes by the same kernels."""
    return _whole_model_table(
        _speedups("e2e_few", BLOCKS).loc["BitNet-2B"], {name: name for name in PATTERNS[::-1]}
    )


def contexts() -> str:
    """Decode over stock vLLM, by the tokens that each sequence has at the start; medians over the rounds."""
    rows = []
    for dtype in ("int8", "fp8"):
        for tokens, name in CONTEXTS.items():
            ratios = _speedups(name, STOCK).loc[QWEN, dtype, "decode"]
            batches = sorted(set(ratios.index.get_level_values("M")) & set(CONTEXT_BATCHES))
            for number, m in enumerate(batches):
                figures = map(times, ratios.loc[m].reindex(columns=[*CONTEXT_COLUMNS]).median())
                rows.append((f"{dtype.upper()}, {tokens}" if number == 0 else "", m, *figures))
    return table(("tokens at the start", "batch size", *CONTEXT_COLUMNS.values()), rows, 2)


def _whole_model_table(ratios: pd.DataFrame, columns: Mapping[str, str]) -> str:
    """Return a table of dtypes and steps: medians over the rounds of the ratios of one model."""
    rows = []
    for dtype in (dtype for dtype in ("int8", "fp8") if dtype in ratios.index):
        cells = sorted(
            {(stage, m) for stage, m, _ in ratios.loc[dtype].index},
            key=lambda cell: (cell[0] == "prefill", cell[1]),
        )
        for number, (stage, m) in enumerate(cells):
            figures = map(times, ratios.loc[dtype, stage, m].reindex(columns=[*columns]).median())
            rows.append((dtype.upper() if number == 0 else "", _step(stage, m), *figures))
    return table(("", "", *columns.values()), rows, 2)


def fusion() -> str:
    """The gain by fused norms and activations, round by round."""
    rows = data.read(H200, E2E, "e2e_unfused").rows
    rates = rows.pivot(index=["stage", "M", "dtype", "pattern", "round"], columns="system", values="rate")
    ratios = (rates["sparse"] / rates["unfused"]).dropna()
    shown = {
        (dtype, name): f"{dtype.upper()}, {name}" for dtype in ("int8", "fp8") for name in ("6:8", "2:4")
    }
    lines = []
    for (stage, m), part in ratios.groupby(["stage", "M"]):
        lines.append((_step(stage, m), *(span(part[stage, m, dtype, name]) for dtype, name in shown)))
    return table(("", *shown.values()), lines, 1)


# --- layers and kernels


def layers() -> str:
    """Layers by `hopper` over stock vLLM's."""
    ms = (1, 16, 64, 128, 256, 512, 1024, 2048, 8192, 16384)
    rows = []
    subjects = [
        (H200, QWEN, PATTERNS),
        (H200, LLAMA, ("6:8",)),
        (H100, QWEN, ("6:8",)),
        (H100, LLAMA, ("6:8",)),
    ]
    for folder, model, patterns in subjects:
        speedups = _layers(folder)
        speedups = speedups[(speedups["title"] == model) & (speedups["ours"] == HOPPER)]
        values = speedups.set_index(["dtype", "pattern", "M"])["speedup"]
        for dtype in ("int8", "fp8"):
            name = f"{folder.name.upper()}, {NAMES.get(model, model)}, {dtype.upper()}"
            for number, pattern in enumerate(patterns):
                rows.append(
                    (name if number == 0 else "", pattern, *(times(values[dtype, pattern, m]) for m in ms))
                )
    return table(("", "M", *ms), rows, 2)


def popular() -> str:
    """Layers of more models by `hopper` over stock vLLM's, from the sums of their shapes' times."""
    frame = pd.read_csv(H200 / SHAPES).set_index(["layer", "dtype", "provider", "pattern", "M"])["p50_us"]
    ms, rows = (1, 16, 64, 256, 2048, 8192), []
    for model, shapes in POPULAR_SHAPES.items():
        for dtype in ("int8", "fp8"):
            us = frame.loc[[*shapes]].groupby(level=["dtype", "provider", "pattern", "M"]).sum()[dtype]
            for number, pattern in enumerate((DENSE, "6:8", "4:6", "2:4")):
                ratios = us[STOCK, DENSE].loc[[*ms]] / us[HOPPER, pattern].loc[[*ms]]
                name = f"{model}, {dtype.upper()}" if number == 0 else ""
                rows.append((name, "not pruned" if pattern == DENSE else pattern, *map(times, ratios)))
    return table(("", "M", *ms), rows, 2)


def ranges() -> str:
    """The least and the most of layers by `hopper` over stock vLLM's, by model, for few tokens and for many."""
    rows = []
    for folder in (H200, H100):
        speedups = _layers(folder)
        speedups = speedups[speedups["ours"] == HOPPER]
        for model in speedups["title"].unique():
            for label, part in (
                (f"1 to {MAX_FEW_TOKENS}", speedups[speedups["M"] <= MAX_FEW_TOKENS]),
                (f"{2 * MAX_FEW_TOKENS} and more", speedups[speedups["M"] > MAX_FEW_TOKENS]),
            ):
                part = part[part["title"] == model]
                cells = [span(part[part["pattern"] == pattern]["speedup"]) for pattern in PATTERNS]
                rows.append((f"{folder.name.upper()}, {NAMES.get(model, model)}", label, *cells))
    return table(("", "tokens", *PATTERNS), rows, 2)


def verdicts() -> str:
    """The numbers of cells in which layers are faster and slower than stock vLLM's on an H200."""
    speedups = _layers(H200)
    return pages.verdicts(speedups[speedups["pattern"].isin(PATTERNS)], "ours")


def gemms() -> str:
    """cuSPARSELt's GEMMs over dense cuBLASLt, Qwen2.5-7B from 512 tokens on."""
    rows = []
    for section in _results(H200).models.sections:
        if section.title == QWEN and section.ours == CUSPARSELT:
            speedups = section.speedup()
            many = [span(speedups[speedups.index > MAX_FEW_TOKENS][pattern]) for pattern in PATTERNS]
            rows.append((section.dtype.upper(), *many, *(times(speedups[p][64]) for p in ("2:4", "6:8"))))
    header = (
        *(f"{p}, from {2 * MAX_FEW_TOKENS} tokens" for p in PATTERNS),
        "2:4, 64 tokens",
        "6:8, 64 tokens",
    )
    return table(("", *header), rows, 1)


def hopper_gemms() -> str:
    """GEMMs by `hopper`, Qwen2.5-7B: TOPS, and the speed-ups over dense cuBLASLt and stock vLLM's kernel."""
    patterns, rows = ("2:4", "4:6", "6:8"), []
    for section in _results(H200).hopper.sections:
        if section.title == QWEN:
            rates, speedups = section.tops(), [section.speedup(name) for name in (CUBLASLT, STOCK)]
            for number, m in enumerate((64, 1024, 16384)):
                figures = [
                    f"{tops(rates[p][m])}: {', '.join(times(speedup[p][m]) for speedup in speedups)}"
                    for p in patterns
                ]
                dense = tops(rates[CUBLASLT][m])
                rows.append((section.dtype.upper() if number == 0 else "", m, dense, *figures))
    return table(("", "M", "dense cuBLASLt", *patterns), rows, 1)


def reference() -> str:
    """Our speed-ups beside the paper's and the reference implementation's."""
    return pages.summary(pages.compare_reference(_results(H200), REFERENCE))


def efficiency() -> str:
    """The paper's algorithmic efficiency, and the share of the bound, at 8192 tokens: of GEMMs and of prefill."""
    rows, results = [], _results(H200)
    prefill = [section for section in results.stages["prefill"].sections if section.ours == "sparse"]
    for section in (*results.models.sections, *results.hopper.sections, *prefill):
        if section.title == QWEN:
            over = BLOCKS if section in prefill else CUBLASLT
            efficiencies, speedup = section.efficiency(over).loc[8192], section.speedup(over).loc[8192]
            cells = [
                f"{percent(efficiencies[p])} ({times(speedup[p])} of {times(section.bounds[p])})"
                for p in PATTERNS
            ]
            label = "prefill" if section in prefill else f"GEMMs by `{section.ours}`"
            rows.append((label, section.dtype.upper(), *cells))
    return table(("", "", *PATTERNS), rows, 2)


def blocks() -> str:
    """Whole layers of Qwen2.5-7B in INT8 over stock vLLM, by the share of their blocks that are 2:4."""
    frame = pd.read_csv(H200 / "linear.csv").set_index(
        ["model", "layer", "dtype", "M", "provider", "pattern"]
    )
    us = frame["p50_us"].sort_index()["Qwen2.5-7B", "sum", "int8"].unstack(["provider", "pattern"])
    shares = {
        "dense": "dense",
        "2:4@33%": "a third",
        "2:4@50%": "a half",
        "2:4@67%": "two thirds",
        "2:4": "all",
    }
    ratios = {name: us[STOCK, DENSE] / us[HOPPER, pattern] for pattern, name in shares.items()}
    rows = [(str(m), *(times(ratio[m]) for ratio in ratios.values())) for m in us.index]
    return table(("tokens", *ratios), rows, 1)


TABLES: dict[str, Callable[[], str]] = {
    "whole_7b": partial(whole, QWEN),
    "whole_14b": partial(whole, "Qwen2.5-14B"),
    "whole_3b": partial(whole, "Llama3.2-3B"),
    **{make.__name__: make for make in (contexts, other, few_bitnet, fusion)},
    **{make.__name__: make for make in (layers, popular, ranges, verdicts, gemms, hopper_gemms)},
    **{make.__name__: make for make in (reference, efficiency, blocks)},
}


def fill_tables(text: str, path: Path) -> str:
    """Return the text of a page with regenerated tables.  Raises RecordsError for a name that is not in TABLES."""

    def fill(match: re.Match[str]) -> str:
        name = match[2]
        if name not in TABLES:
            raise RecordsError(f"{path} asks for the table {name!r}; there are {', '.join(TABLES)}")
        return f"{match[1]}{TABLES[name]()}{match[3]}"

    return MARKED.sub(fill, text)


def texts() -> Iterator[tuple[Path, str, str]]:
    """Yield (path, present text, generated text) of every page."""
    for path in MARKED_PAGES:
        text = path.read_text(encoding="utf-8")
        yield path, text, fill_tables(text, path)
    for folder, reference_csv in FOLDERS.items():
        for name, generated in _results(folder).pages(reference_csv).items():
            path = folder / name
            yield path, path.read_text(encoding="utf-8") if path.exists() else "", generated
    for folder in FOLDERS:
        gpu = json.loads((folder / "linear.json").read_text(encoding="utf-8"))["gpu"]
        path = FOLDER / f"{slug(gpu)}.csv"
        yield path, path.read_text(encoding="utf-8") if path.exists() else "", layer_times(folder)


def layer_times(folder: Path) -> str:
    """Return the layer times that budgets use (see `slidesparse.convert.times`)."""
    shapes = {(model, layer.name): (layer.n, layer.k) for model, layers in MODELS.items() for layer in layers}
    us_by_key: dict[tuple[str, int, int, str, int], str] = {}
    for path in filter(Path.exists, (folder / "linear.csv", folder / SHAPES)):
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                if row["layer"] == "sum" or row["pattern"] not in (DENSE, *PATTERNS):
                    continue
                if row["provider"] in (STOCK, HOPPER):
                    n, _, k = row["layer"].partition("x")
                    shape = shapes.get((row["model"], row["layer"])) or (int(n), int(k))
                    pattern = STOCK if row["provider"] == STOCK else row["pattern"]
                    key = row["dtype"], shape[0], shape[1], pattern, int(row["M"])
                    us_by_key[key] = row["p50_us"]
    rows = [",".join(map(str, (*key, us))) for key, us in sorted(us_by_key.items())]
    return "\n".join(["dtype,n,k,pattern,tokens,us", *rows, ""])


def write() -> list[Path]:
    """Write the pages that differ; return their paths."""
    changed = [(path, generated) for path, text, generated in texts() if text != generated]
    for path, generated in changed:
        path.write_text(generated, encoding="utf-8")
    return [path for path, _ in changed]


def check() -> list[Path]:
    """Raise CheckFailed with the first line that differs from what the CSVs give; nothing is written."""
    for path, text, generated in texts():
        lines = zip_longest(text.splitlines(), generated.splitlines(), fillvalue="nothing")
        for number, (line, expected) in enumerate(lines, 1):
            if line != expected:
                raise CheckFailed(
                    f"{path.relative_to(ROOT)}, line {number}: found\n  {line}\nbut the CSVs give\n  {expected}\n"
                    "write the pages anew: python -m benchmarks docs"
                )
    return []
