"""What protocol A measured, read and put into the tables of README.md; plot.py draws it.

A loss is what a model's perplexity is above that of the dense model in BF16, in percent.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

PATTERNS, UNSTRUCTURED = ("8:10", "6:8", "4:6", "2:4"), ("25%", "33%")
METHODS, QUANTS = ("sparsegpt", "wanda", "magnitude"), ("bf16", "int8", "fp8")
DENSE, CONTROL, DISTILLED = "dense", "control", "kl"
START = "start"  # what distillation began with, where that was made otherwise than the rest of the CSV
TEXTS = {"in": "held-out text", "out": "WikiText-2"}
KEY = ("pattern", "method", "quant", "text", "distilled", "seed")
STAGES = {64: "decode", 8192: "prefill"}  # by M
MODEL, LAYER, DTYPE = "Qwen2.5-7B", "sum", "int8"  # of linear.csv
STOCK, PROVIDERS = "stock", ("hopper", "cusparselt")  # the first that was measured

Row = dict[str, str]


def read(source: Path) -> list[Row]:
    """The rows of a CSV."""
    with source.open(newline="") as file:
        return list(csv.DictReader(file))


def is_of(source: Path) -> bool:
    """Whether a CSV is protocol A's."""
    return "delta_pct" in read(source)[0]


def zeros(pattern: str) -> float:
    """Percent of the weights that a pattern, such as 6:8 or 25%, zeroes."""
    if pattern.endswith("%"):
        return float(pattern[:-1])
    return 200 / int(pattern.split(":")[1])


@dataclass(frozen=True)
class Loss:
    """Of one kind of checkpoint, in percent; over the seeds of its calibration samples."""

    seeds: tuple[float, ...]
    low: float  # the least end of the seeds' 95% intervals
    high: float

    @property
    def mean(self) -> float:
        """Over the seeds."""
        return sum(self.seeds) / len(self.seeds)

    def __str__(self) -> str:
        shown = f"{self.mean:.2f}"
        return f"{shown} ({min(self.seeds):.2f} to {max(self.seeds):.2f})" if len(self.seeds) > 1 else shown


@dataclass(frozen=True)
class Results:
    """Rows by KEY; of two with the same key, the later."""

    rows: dict[tuple[str, ...], Row]

    @staticmethod
    def of(source: Path) -> Results:
        """Of a CSV that protocol_a.py wrote."""
        return Results({tuple(row[name] for name in KEY): row for row in read(source)})

    def loss(
        self, pattern: str, method: str, quant: str, text: str = "in", distilled: str = ""
    ) -> Loss | None:
        """None where it was not measured."""
        wanted = (pattern, method, quant, text, distilled)
        found = [row for key, row in self.rows.items() if key[:-1] == wanted]
        if not found:
            return None
        return Loss(
            tuple(float(row["delta_pct"]) for row in found),
            min(float(row["ci_low"]) for row in found),
            max(float(row["ci_high"]) for row in found),
        )

    def first(self, pattern: str, method: str, quant: str, text: str = "in", distilled: str = "") -> float:
        """The loss with the calibration samples of seed 0; KeyError where it was not measured."""
        return float(self.rows[pattern, method, quant, text, distilled, "0"]["delta_pct"])

    def begun(self, pattern: str, quant: str, text: str = "in") -> float | None:
        """The loss that distillation began with: of seed 0, or else the mean of what there is."""
        made = START if any(key[0] == pattern and key[4] == START for key in self.rows) else ""
        if (pattern, "sparsegpt", quant, text, made, "0") in self.rows:
            return self.first(pattern, "sparsegpt", quant, text, made)
        found = self.loss(pattern, "sparsegpt", quant, text, made)
        return found.mean if found else None

    def kinds(self) -> list[tuple[str, str]]:
        """Patterns and methods, in the order of the tables."""
        pruned = [(pattern, method) for pattern in (*PATTERNS, *UNSTRUCTURED) for method in METHODS]
        known = {key[:2] for key in self.rows}
        return [kind for kind in [(DENSE, "-"), *pruned] if kind in known]


@dataclass(frozen=True)
class Speed:
    """Of a pattern's linear layers, over stock vLLM's."""

    value: float
    provider: str


@dataclass(frozen=True)
class Speeds:
    """Median times of MODEL's linear layers, in us, by pattern, M and provider."""

    times: dict[tuple[str, int, str], float]

    @staticmethod
    def of(source: Path) -> Speeds:
        """Of linear.csv."""
        rows = [
            row for row in read(source) if (row["model"], row["layer"], row["dtype"]) == (MODEL, LAYER, DTYPE)
        ]
        return Speeds({(r["pattern"], int(r["M"]), r["provider"]): float(r["p50_us"]) for r in rows})

    def of_pattern(self, pattern: str, m: int) -> Speed:
        """By the first of PROVIDERS that was measured."""
        for provider in PROVIDERS:
            if (pattern, m, provider) in self.times:
                stock = self.times[DENSE, m, STOCK]
                return Speed(stock / self.times[pattern, m, provider], provider)
        raise SystemExit(f"linear.csv has none of {', '.join(PROVIDERS)} at {pattern} and M = {m} of {MODEL}")


def table(source: Path) -> str:
    """Losses of all that was only pruned and quantized."""
    results = Results.of(source)
    lines = [
        "| pattern | method | BF16 | INT8 | FP8 | WikiText-2, BF16 | INT8 | FP8 |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for pattern, method in results.kinds():
        found = [results.loss(pattern, method, quant, text) for text in TEXTS for quant in QUANTS]
        name = f"{pattern} unstructured" if pattern in UNSTRUCTURED else pattern
        lines.append(f"| {' | '.join([name, method, *(str(loss) if loss else '-' for loss in found)])} |")
    return "\n".join(lines)


def wanted(source: Path) -> str:
    """What was wanted of held-out text, and what came out."""
    results = Results.of(source)

    def mean(pattern: str, method: str, quant: str) -> float:
        loss = results.loss(pattern, method, quant)
        if loss is None:
            raise SystemExit(f"{source} has no row of {pattern} {method} {quant}")
        return loss.mean

    def added(quant: str) -> str:
        kinds = [(DENSE, "-"), *((pattern, "sparsegpt") for pattern in PATTERNS)]
        each = [(kind[0], results.first(*kind, quant) - results.first(*kind, "bf16")) for kind in kinds]
        return ", ".join(f"{pattern} {points:.2f}" for pattern, points in each)

    ratios = [f"{p} {mean(p, 'sparsegpt', 'int8') / mean(p, 'magnitude', 'int8'):.2f}" for p in PATTERNS]
    rows = [
        ("sparsegpt, INT8, 6:8 loses", "at most 1.0%", f"{mean('6:8', 'sparsegpt', 'int8'):.2f}%"),
        ("sparsegpt, INT8, 4:6 loses", "at most 3%", f"{mean('4:6', 'sparsegpt', 'int8'):.2f}%"),
        ("sparsegpt's loss / magnitude's, INT8", "at most 0.4", ", ".join(ratios)),
        ("points that INT8 adds to BF16, sparsegpt, same windows", "at most 0.15", added("int8")),
        ("points that FP8 adds to BF16, sparsegpt, same windows", "at most 0.3", added("fp8")),
    ]
    return "\n".join(
        ["| | wanted | came out |", "|---|---|---|", *(f"| {' | '.join(row)} |" for row in rows)]
    )


def distilled(source: Path) -> str:
    """Losses before and after distillation, and how much of the way to the dense models it went."""
    results = Results.of(source)
    lines = [
        "| pattern | | before | after | WikiText-2, before | after | way to the dense model | to the control |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for pattern in PATTERNS:
        for quant in QUANTS:
            after = {text: results.loss(pattern, "sparsegpt", quant, text, DISTILLED) for text in TEXTS}
            if after["in"]:
                cells = [
                    figure
                    for text, loss in after.items()
                    for figure in (results.begun(pattern, quant, text), loss.seeds[0] if loss else None)
                ]
                shown = [f"{figure:.2f}" if figure is not None else "-" for figure in cells]
                way = [closed(results, pattern, quant, to) for to in ("", CONTROL)]
                lines.append(f"| {' | '.join([pattern, quant.upper(), *shown, *way])} |")
    for quant in QUANTS:
        found = [results.loss(DENSE, "-", quant, text, after) for text in TEXTS for after in ("", CONTROL)]
        if found[1]:
            shown = [f"{loss.mean:.2f}" if loss else "-" for loss in found]
            lines.append(f"| {' | '.join(['dense: control', quant.upper(), *shown, '-', '-'])} |")
    return "\n".join(lines)


def closed(results: Results, pattern: str, quant: str, to: str) -> str:
    """Percent of the way from the pruned model's loss to that of the dense one, or the control, in the same format."""
    before, goal = results.begun(pattern, quant), results.loss(DENSE, "-", quant, "in", to)
    if before is None or goal is None:  # not measured
        return "-"
    after = results.first(pattern, "sparsegpt", quant, "in", DISTILLED)
    return f"{100 * (before - after) / (before - goal.mean):.0f}%"


def speeds(source: Path, linear: Path) -> str:
    """Losses of sparsegpt in INT8 beside the speed-ups of MODEL's linear layers."""
    results, times = Results.of(source), Speeds.of(linear)
    stages = " | ".join(f"{stage}, M = {m}" for m, stage in STAGES.items())
    lines = [f"| pattern | lost | distilled | {stages} |", f"|---|---:|---:|{'---|' * len(STAGES)}"]
    for pattern in PATTERNS:
        found = [results.loss(pattern, "sparsegpt", "int8", "in", by) for by in ("", DISTILLED)]
        each = [times.of_pattern(pattern, m) for m in STAGES]
        cells = [f"{loss.mean:.2f}" if loss else "-" for loss in found]
        cells += [f"{speed.value:.2f} {speed.provider}" for speed in each]
        lines.append(f"| {' | '.join([pattern, *cells])} |")
    return "\n".join(lines)
