"""The results of the protocols, read from their CSVs and put into the tables of docs/accuracy/README.md.

A loss is the increase in perplexity over the dense model in BF16, in percent.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from benchmarks.report.markdown import NO_VALUE, table

PATTERNS, UNSTRUCTURED = ("8:10", "6:8", "4:6", "2:4"), ("25%", "33%")
METHODS, QUANTS = ("sparsegpt", "wanda", "magnitude"), ("bf16", "int8", "fp8")
DENSE = "dense"
TEXTS = {"in": "held-out text", "out": "WikiText-2"}
KEY = ["pattern", "method", "quant", "text", "seed"]
PARITY = {
    ("llmcompressor", "default"): "its default, blocks of 128",
    ("llmcompressor", "block126"): "blocks of 126",
    ("llmcompressor", "padded"): "blocks of 126, rows padded",
    ("slidesparse", "plain"): "`--target own --sweeps 0`",
    ("slidesparse", "sweeps4"): "`--target own`",
}
TOOLS = {"llmcompressor": "llm-compressor", "slidesparse": "SlideSparse"}


def zeros(pattern: str) -> float:
    """Return the percentage of weights that a pattern, such as 6:8 or 25%, zeroes."""
    return float(pattern[:-1]) if pattern.endswith("%") else 200 / int(pattern.split(":")[1])


@dataclass(frozen=True)
class Loss:
    """The loss of one kind of checkpoint, in percent, over the seeds of its calibration samples."""

    seeds: tuple[float, ...]
    low: float  # lowest end of the seeds' 95% intervals
    high: float

    @property
    def mean(self) -> float:
        """The mean over the seeds."""
        return sum(self.seeds) / len(self.seeds)

    def __str__(self) -> str:
        shown = f"{self.mean:.2f}"
        return f"{shown} ({min(self.seeds):.2f} to {max(self.seeds):.2f})" if len(self.seeds) > 1 else shown


@dataclass(frozen=True)
class Results:
    """The rows of a CSV that protocol_a.py wrote; of two with the same key, the later."""

    rows: pd.DataFrame

    @staticmethod
    def of(source: Path) -> Results:
        """Read the rows of a CSV that were not distilled."""
        rows = pd.read_csv(source, keep_default_na=False)
        return Results(rows[rows["distilled"] == ""].drop_duplicates(KEY, keep="last"))

    def loss(self, pattern: str, method: str, quant: str, text: str = "in") -> Loss | None:
        """Return the loss of one kind of checkpoint; None where it was not measured."""
        selected = (self.rows[KEY[:-1]] == (pattern, method, quant, text)).all(axis=1)
        if not selected.any():
            return None
        rows = self.rows[selected]
        return Loss(tuple(rows["delta_pct"]), rows["ci_low"].min(), rows["ci_high"].max())

    def kinds(self) -> list[tuple[str, str]]:
        """Return the patterns and methods in the order of the tables."""
        pruned = [(pattern, method) for pattern in (*PATTERNS, *UNSTRUCTURED) for method in METHODS]
        measured = set(zip(self.rows["pattern"], self.rows["method"], strict=True))
        return [kind for kind in [(DENSE, "-"), *pruned] if kind in measured]


def _format_cell(value: object) -> str:
    return NO_VALUE if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)


def losses(source: Path) -> str:
    """Return the table of the losses of the checkpoints without distillation."""
    results = Results.of(source)
    rows = [
        (
            f"{pattern} unstructured" if pattern in UNSTRUCTURED else pattern,
            method,
            *(_format_cell(results.loss(pattern, method, quant, text)) for text in TEXTS for quant in QUANTS),
        )
        for pattern, method in results.kinds()
    ]
    return table(("pattern", "method", "BF16", "INT8", "FP8", "WikiText-2, BF16", "INT8", "FP8"), rows, 2)


def encoder(source: Path) -> str:
    """Return the table of protocol B, in the order of PATTERNS and METHODS."""
    rows = pd.read_csv(source)
    shown = (
        DENSE,
        "8:10",
        "6:8",
        "zeros 25%",
        "4:6",
        "zeros 33.3%",
        "2:4",
        "-",
        *METHODS,
        "budget",
        "int8",
        "fp8",
    )
    order = {name: i for i, name in enumerate(shown)}
    rows = rows.sort_values(["quant", "pattern", "method"], key=lambda column: column.map(order))
    lines = [
        (
            *(r.pattern, r.method, r.quant.upper()),
            *(f"{value:.4f}" for value in (r.cosine_mean, r.cosine_p1, r.top10, r.mrr)),
            f"{r.mrr_loss:+.4f} ({r.mrr_loss_low:+.4f} to {r.mrr_loss_high:+.4f})",
        )
        for r in rows.itertuples()
    ]
    header = (
        "pattern",
        "method",
        "",
        "cosine",
        "1st-percentile cosine",
        "top-10 overlap",
        "MRR",
        "MRR loss against the original",
    )
    return table(header, lines, 3)


def parity(source: Path) -> str:
    """Return the table of means over the calibration windows of llm-compressor's checkpoints and ours."""
    rows = pd.read_csv(source)
    rows = rows[rows["tool"] != "-"].assign(broken=rows["violations"] / rows["groups"])
    means = rows.groupby(["pattern", "tool", "setting"])[["ppl", "delta_pct", "broken", "zeros_pct"]].mean()
    runs = rows.groupby(["pattern", "tool", "setting"]).size()
    lines = []
    for pattern in ("6:8", "4:6"):
        for tool, setting in PARITY:
            if (key := (pattern, tool, setting)) in means.index:
                ppl, up, broken, gone = means.loc[key]
                label = PARITY[tool, setting] + (" (one choice)" if runs[key] == 1 else "")
                share = f"{broken:.1%}" if broken else "0"
                lines.append((pattern, TOOLS[tool], label, f"{ppl:.4f}", f"{up:.2f}%", share, f"{gone:.1f}%"))
    header = ("pattern", "tool", "", "perplexity", "up on dense", "groups that break the pattern", "zeros")
    return table(header, lines, 3)
