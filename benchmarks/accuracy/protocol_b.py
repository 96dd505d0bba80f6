"""Protocol B: what pruning costs a sentence encoder, MiniLM-L6 (22 M parameters, 36 linear layers), served by vLLM.

Texts are docstrings of installed packages: a query is a function's name and the first line of its docstring, and the
document to retrieve is the rest.  They are split by source file into calibration texts and evaluation pairs, after
dropping duplicates.  Every checkpoint is made by `slidesparse convert` and embedded by vLLM with the plugin;
the original, in float32, by vLLM itself.

    python -m benchmarks.accuracy.protocol_b WORKFOLDER --out docs/accuracy/protocol_b.csv

Runs already in the CSV are skipped.  The work folder keeps a report of each conversion, for plot.py.
"""

from __future__ import annotations

import argparse
import ast
import csv
import hashlib
import importlib.util
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks.accuracy.protocol_a import BUDGET, parse_budget
from slidesparse import demo
from slidesparse.calibrate.task import Calibration
from slidesparse.convert.budget import MIDDLE
from slidesparse.convert.options import ConvertOptions
from slidesparse.convert.stream import convert
from slidesparse.evaluate.embedding import Embedding, summarize
from slidesparse.evaluate.engine import Engine
from slidesparse.evaluate.texts import texts_or_pairs
from slidesparse.pattern import SlidePattern, parse_pattern

PACKAGES = (
    "torch",
    "numpy",
    "transformers",
    "sympy",
    "networkx",
    "vllm",
    "asyncio",
    "json",
    "email",
    "unittest",
)
CALIBRATION_TEXTS, PAIRS, SEED = 160, 2000, 0
MAX_TOKENS = 128  # tokens of a text
QUERY_LENGTH, DOCUMENT_LENGTH = 20, 100  # characters, at least
DENSE = "dense"  # quantized, not pruned
PATTERNS = ("8:10", "6:8", "4:6", "2:4")
METHODS = ("sparsegpt", "wanda", "magnitude")
BUDGETS = ("zeros 25%", "zeros 33.3%")
FIELDS = (
    *("pattern", "method", "quant", "cosine_mean", "cosine_mean_low", "cosine_mean_high", "cosine_p1"),
    *("cosine_p1_low", "cosine_p1_high", "top10", "top10_low", "top10_high", "mrr", "mrr_low", "mrr_high"),
    *("mrr_dense", "mrr_loss", "mrr_loss_low", "mrr_loss_high"),
)


def docstrings(path: Path) -> Iterator[tuple[str, str]]:
    """Yield (query, document) of each documented function and class of a source file."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        first, _, rest = (ast.get_docstring(node) or "").partition("\n")
        document = " ".join(rest.split())
        if len(first) >= QUERY_LENGTH and len(document) >= DOCUMENT_LENGTH:
            yield f"{node.name.replace('_', ' ').strip()}: {first}", document


def files() -> list[Path]:
    """Return all Python files of PACKAGES, in an order that does not depend on the machine."""
    entries = []
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        if spec is None or not spec.submodule_search_locations:
            raise SystemExit(f"the package {name} is not installed, whose docstrings are part of the data")
        root = Path(spec.submodule_search_locations[0])
        named = ((f"{name}/{path.relative_to(root).as_posix()}", path) for path in root.rglob("*.py"))
        entries += sorted(named)
    entries.sort(key=lambda entry: hashlib.sha256(entry[0].encode()).digest())
    return [path for _, path in entries]


def gather(folder: Path) -> tuple[Path, Path]:
    """Write calib.jsonl and pairs.jsonl."""
    seen: set[str] = set()
    calibration, pairs = [], []
    for path in files():
        fresh = []
        for query, document in docstrings(path):
            first = query.partition(": ")[2]
            if query not in seen and document not in seen and first not in seen:
                fresh.append({"query": query, "text": document})
            seen |= {query, document, first}
        if len(calibration) < CALIBRATION_TEXTS:
            calibration += [{"text": f"{pair['query']} {pair['text']}"} for pair in fresh]
        elif len(pairs) < PAIRS:
            pairs += fresh
    for name, rows, count in (("calib", calibration, CALIBRATION_TEXTS), ("pairs", pairs, PAIRS)):
        if len(rows) < count:
            raise SystemExit(f"the packages give {len(rows)} texts for {name}, {count} are needed")
        lines = (json.dumps(row) for row in rows[:count])
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder / "calib.jsonl", folder / "pairs.jsonl"


def runs() -> list[tuple[str, str, str]]:
    """Return (pattern, method, quant) of each run, the most informative first."""
    ours = [(pattern, method, "int8") for pattern in ("6:8", "4:6", "2:4", "8:10") for method in METHODS]
    ours += [(budget, BUDGET, "int8") for budget in BUDGETS]
    fp8 = [(pattern, "sparsegpt", "fp8") for pattern in ("6:8", "4:6", "2:4", "8:10")]
    return [*ours, (DENSE, "-", "int8"), *fp8, (DENSE, "-", "fp8")]


def originals(folder: Path, source: Path, engine: Engine, ids: list[list[int]]) -> np.ndarray:
    """Return the original's embeddings of ``ids``, which are computed once and saved."""
    path = folder / f"dense-{hashlib.sha256(repr(ids).encode()).hexdigest()[:12]}.npy"
    if not path.exists():
        np.save(path, engine.score(source, "embedding", ids, stock=True).arrays["embeddings"])
    return np.asarray(np.load(path))


def row(pattern: str, method: str, quant: str, embedding: Embedding) -> dict[str, str]:
    """Return a line of the CSV."""
    cells = {"pattern": pattern, "method": method, "quant": quant}
    for name in ("cosine_mean", "cosine_p1", "top10", "mrr", "mrr_loss"):
        interval = getattr(embedding, name)
        ends = {"": interval.value, "_low": interval.low, "_high": interval.high}
        cells |= {f"{name}{end}": f"{value:.5f}" for end, value in ends.items()}
    assert embedding.mrr_against
    return {**cells, "mrr_dense": f"{embedding.mrr_against.value:.5f}"}


def main() -> None:
    """Gather, convert, embed, and write a row at a time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path, help="for data, checkpoints and logs")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--only", help="PATTERN,METHOD,QUANT: this run alone, such as 2:4@50%%,sparsegpt,int8"
    )
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    calib, data = gather(options.folder)
    source = demo.original()
    texts = texts_or_pairs(data, source, PAIRS, MAX_TOKENS)
    ids = [*texts.queries, *(texts.documents or [])]
    engine = Engine({"dtype": "float32", "gpu_memory_utilization": 0.2}, options.folder / "vllm.log")
    dense: np.ndarray | None = None
    done = []
    if options.out.exists():
        with options.out.open(newline="") as file:
            done = list(csv.DictReader(file))
    measured = {(line["pattern"], line["method"], line["quant"]) for line in done}
    for run in [tuple(options.only.split(","))] if options.only else runs():
        if run in measured:
            continue
        if dense is None:
            dense = originals(options.folder, source, engine, ids)
        pattern, method, quant = run
        checkpoint = options.folder / "-".join(run).replace(":", "_").replace("%", "pct").replace(" ", "")
        shutil.rmtree(checkpoint, ignore_errors=True)
        if pattern == DENSE:
            convert(source, checkpoint, ConvertOptions(SlidePattern(None), quant))
        else:
            calibration = Calibration(str(calib), CALIBRATION_TEXTS, MAX_TOKENS, resume=True)
            budget = parse_budget(pattern) if method == BUDGET else None
            convert_options = ConvertOptions(
                MIDDLE if budget else parse_pattern(pattern),
                quant,
                method="sparsegpt" if budget else method,
                budget=budget,
                calibration=calibration,
                seed=SEED,
            )
            report = convert(source, checkpoint, convert_options)
            (options.folder / f"{checkpoint.name}.json").write_text(json.dumps(report.to_json(), indent=2))
        result = engine.score(checkpoint, "embedding", ids)
        if not result.served_by:
            raise SystemExit(f"the plugin did not serve {checkpoint}; see {engine.log}")
        arrays = (result.arrays["embeddings"], dense)
        done.append(row(*run, summarize(checkpoint.name, source.name, *arrays, True, (result.served_by, ""))))
        with options.out.open("w", newline="") as file:
            writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(done)
        print(" ".join(f"{name} {done[-1][name]}" for name in FIELDS), file=sys.stderr)


if __name__ == "__main__":
    main()
