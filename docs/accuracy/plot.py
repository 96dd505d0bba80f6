"""Plots of this folder's results: `pip install 'slidesparse[report]'` first.

    python docs/accuracy/plot.py cosine docs/accuracy/protocol_b.csv OUT.png
    python docs/accuracy/plot.py layers REPORT.json [REPORT.json ...] OUT.png
    python docs/accuracy/plot.py table docs/accuracy/protocol_b.csv

The second draws what `slidesparse convert --report REPORT.json` measured: the error of each layer's output, a line a
report.  The third prints the table of README.md.
"""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

PATTERNS = ("8:10", "6:8", "4:6", "2:4")
METHODS = {"sparsegpt": "o", "wanda": "s", "magnitude": "^"}


def cosine(source: Path, out: Path) -> None:
    """Mean cosine, with the first percentile below it, by pattern and method; INT8."""
    with source.open(newline="") as file:
        rows = {(row["pattern"], row["method"], row["quant"]): row for row in csv.DictReader(file)}
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for method, marker in METHODS.items():
        found = [(i, rows[p, method, "int8"]) for i, p in enumerate(PATTERNS) if (p, method, "int8") in rows]
        x = [i for i, _ in found]
        (line,) = axes.plot(x, [float(row["cosine_mean"]) for _, row in found], marker=marker, label=method)
        low = [float(row["cosine_p1"]) for _, row in found]
        axes.plot(
            x, low, marker=marker, linestyle=":", color=line.get_color(), label=f"{method}, first percentile"
        )
    axes.set_xticks(range(len(PATTERNS)), PATTERNS)
    axes.set(
        xlabel="pattern", ylabel="cosine to the original's embedding", title="MiniLM-L6, INT8, served by vLLM"
    )
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(out, dpi=150)


def layers(reports: list[Path], out: Path) -> None:
    """Relative error of the output of each layer, in the order of the model."""
    figure, axes = plt.subplots(figsize=(10, 5), layout="constrained")
    for path in reports:
        report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        rows = [row for row in report["layers"] if row["error_quantized"] is not None]
        label = f"{report['pattern']} {report['method']} {report['quant']}"
        axes.plot([row["error_quantized"] for row in rows], marker=".", label=label)
        axes.set_xticks(range(len(rows)), [row["name"] for row in rows], rotation=90, fontsize=6)
    axes.set(
        ylabel="|X (W - W')| / |X W|",
        title="Error of each layer's output, pruned and quantized",
        ylim=(0, None),
    )
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(out, dpi=150)


def table(source: Path) -> str:
    """Markdown, in the order of PATTERNS and METHODS."""
    with source.open(newline="") as file:
        rows = list(csv.DictReader(file))
    order = {name: i for i, name in enumerate(("dense", *PATTERNS, "-", *METHODS, "int8", "fp8"))}
    rows.sort(key=lambda row: [order[row[key]] for key in ("quant", "pattern", "method")])
    lines = [
        "| pattern | method | | cosine | first percentile | same ten | MRR | lost of the original's |",
        "|---|---|---|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        figures = [f"{float(row[name]):.4f}" for name in ("cosine_mean", "cosine_p1", "top10", "mrr")]
        lost = [f"{float(row[f'mrr_loss{end}']):+.4f}" for end in ("", "_low", "_high")]
        cells = [
            row["pattern"],
            row["method"],
            row["quant"].upper(),
            *figures,
            f"{lost[0]} ({lost[1]} to {lost[2]})",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """The command."""
    match sys.argv[1:]:
        case ["cosine", source, out]:
            cosine(Path(source), Path(out))
        case ["table", source]:
            print(table(Path(source)))
        case ["layers", *reports, out] if reports:
            layers([Path(report) for report in reports], Path(out))
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    main()
