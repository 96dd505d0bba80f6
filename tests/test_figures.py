"""The figures in README.md and docs/benchmarks/README.md are those of the CSV files beside the latter."""

from __future__ import annotations

import csv
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from statistics import median

import pytest

ROOT = Path(__file__).resolve().parent.parent
BENCHMARKS = ROOT / "docs" / "benchmarks"
PAGES = {"README.md": ROOT / "README.md", "docs/benchmarks/README.md": BENCHMARKS / "README.md"}
PATTERNS = ("2:4", "4:6", "6:8", "8:10")
MODELS = {"Llama-3.2-1B": "Llama3.2-1B"}  # as the text spells them, and the files
LONG = (2048, 4096, 8192, 16384, 32768, 65536)
DECODE = (64, 128, 256, 512)

Key = tuple[str, str, str, int, str, str]


def rows(name: str) -> list[dict[str, str]]:
    with (BENCHMARKS / name).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@cache
def rates() -> dict[Key, dict[str, float]]:
    """Tokens per second by model, type, stage, M, pattern and system, then by round."""
    found: dict[Key, dict[str, float]] = defaultdict(dict)
    for row in rows("h200/e2e.csv"):
        key = (row["model"], row["dtype"], row["stage"], int(row["M"]), row["pattern"], row["system"])
        found[key][row["round"]] = float(row["tokens_per_s"])
    return found


def over_stock(model: str, dtype: str, stage: str, m: int, pattern: str, system: str) -> float:
    """The median of the ratios within a round."""
    stock = rates()[model, dtype, stage, m, "dense", "stock"]
    ours = rates()[model, dtype, stage, m, pattern, system]
    return median(rate / stock[number] for number, rate in ours.items() if number in stock)


@cache
def layers() -> dict[tuple[str, str, str, str, int, str], float]:
    return {
        (gpu, row["model"], row["dtype"], row["pattern"], int(row["M"]), row["provider"]): float(
            row["p50_us"]
        )
        for gpu in ("h200", "h100")
        for row in rows(f"{gpu}/linear.csv")
        if row["layer"] == "sum"
    }


def table(page: str, head: str) -> Iterator[list[str]]:
    """The cells of the rows of the one table whose first line is ``head``."""
    lines = PAGES[page].read_text(encoding="utf-8").splitlines()
    assert lines.count(head) == 1
    for line in lines[lines.index(head) + 2 :]:
        if not line.startswith("|"):
            return
        yield [cell.strip() for cell in line.strip("|").split("|")]


def near(written: str, value: float) -> bool:
    """Whether a figure of two decimals is that value, rounded."""
    return abs(float(written.rstrip("x")) - value) <= 0.0051


@pytest.mark.parametrize(
    ("page", "head", "model", "lines"),
    [
        ("README.md", "| | | stock | 2:4 | 4:6 | 6:8 | 8:10 |", "Qwen2.5-7B", 12),
        (
            "docs/benchmarks/README.md",
            "| | | 2:4 | 4:6 | 6:8 | 8:10 | `cublaslt` | `off` |",
            "Qwen2.5-7B",
            24,
        ),
        ("docs/benchmarks/README.md", "| | | 2:4 | 4:6 | 6:8 | 8:10 |", "Llama3.2-1B", 4),
    ],
)
def test_whole_models(page: str, head: str, model: str, lines: int) -> None:
    dtype, stage, count = "", "", 0
    for first, second, *figures in table(page, head):
        dtype = first.lower() or dtype
        stage = next((word for word in ("prefill", "decode") if second.startswith(word)), stage)
        m = int(re.findall(r"\d+", second)[0])
        if "stock" in head:
            stock = median(rates()[model, dtype, stage, m, "dense", "stock"].values())
            assert figures.pop(0) == f"{stock:,.0f}"
        for name, written in zip(re.findall(r"\d+:\d+|(?<=`)\w+", head), figures, strict=True):
            pattern, system = (name, "sparse") if name in PATTERNS else ("dense", name)
            value = over_stock(model, dtype, stage, m, pattern, system)
            assert near(written, value), (model, dtype, stage, m, name, written, value)
        count += 1
    assert count == lines


def test_layers() -> None:
    gpu = model = dtype = ""
    count = 0
    head = "| | M | 1 | 16 | 64 | 128 | 256 | 512 | 1024 | 2048 | 8192 | 16384 |"
    for subject, pattern, *figures in table("docs/benchmarks/README.md", head):
        words = subject.split(", ")
        if len(words) == 3:
            gpu, model = words[0].lower(), MODELS.get(words[1], words[1])
        dtype = words[-1].lower() or dtype
        for m, written in zip(re.findall(r"\d+", head), figures, strict=True):
            stock = layers()[gpu, model, dtype, "dense", int(m), "stock"]
            ours = layers()[gpu, model, dtype, pattern, int(m), "hopper"]
            assert near(written, stock / ours), (subject, pattern, m, written, stock / ours)
            count += 1
    assert count == 14 * 10


def test_ranges() -> None:
    """The first table of README: the least and the most over steps and numbers of sequences."""
    found = {first: cells for first, *cells in table("README.md", "| | 2:4 | 4:6 | 6:8 | 8:10 |")}
    for stage, tokens in (("prefill", LONG), ("decode", DECODE)):
        for dtype in ("int8", "fp8"):
            (cells,) = (
                cells for name, cells in found.items() if name.startswith(f"{stage}, {dtype.upper()}")
            )
            for pattern, cell in zip(PATTERNS, cells, strict=True):
                values = [over_stock("Qwen2.5-7B", dtype, stage, m, pattern, "sparse") for m in tokens]
                least, most = cell.split(" to ")
                assert near(least, min(values)), (stage, dtype, pattern, cell, values)
                assert near(most, max(values)), (stage, dtype, pattern, cell, values)
