"""Plots of docs/accuracy: `pip install '.[report]'` first.

    python -m benchmarks.accuracy.plot cosine docs/accuracy/protocol_b.csv OUT.svg
    python -m benchmarks.accuracy.plot layers REPORT.json [REPORT.json ...] OUT.svg
    python -m benchmarks.accuracy.plot losses docs/accuracy/protocol_a.csv OUT.svg

`layers` draws what `slidesparse convert --report REPORT.json` measured: the error of each layer's output, a line a
report.  SVG files are deterministic.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.accuracy import language_results as language
from benchmarks.report.plots import FIXED_PARAMETERS, save
from slidesparse.convert.report import final_error

PATTERNS = language.PATTERNS
METHODS = {"sparsegpt": "o", "wanda": "s", "magnitude": "^"}


@mpl.rc_context(FIXED_PARAMETERS)
def cosine(source: Path, out: Path) -> None:
    """Draw the mean cosine in INT8, with the first percentile below it, by pattern and method."""
    rows = pd.read_csv(source).set_index(["pattern", "method", "quant"])
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for method, marker in METHODS.items():
        points = [
            (i, rows.loc[key]) for i, p in enumerate(PATTERNS) if (key := (p, method, "int8")) in rows.index
        ]
        x = [i for i, _ in points]
        (line,) = axes.plot(x, [row["cosine_mean"] for _, row in points], marker=marker, label=method)
        low = [row["cosine_p1"] for _, row in points]
        axes.plot(
            x, low, marker=marker, linestyle=":", color=line.get_color(), label=f"{method}, first percentile"
        )
    axes.set_xticks(range(len(PATTERNS)), PATTERNS)
    axes.set(
        xlabel="pattern", ylabel="cosine to the original's embedding", title="MiniLM-L6, INT8, served by vLLM"
    )
    axes.grid(alpha=0.3)
    axes.legend()
    save(figure, out)


@mpl.rc_context(FIXED_PARAMETERS)
def layers(reports: list[Path], out: Path) -> None:
    """Draw the relative error of the output of each layer, in the order of the model."""
    figure = Figure(figsize=(10, 5), layout="constrained")
    axes = figure.subplots()
    for path in reports:
        report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        rows = [row for row in report["layers"] if row["error_quantized"] is not None]
        label = f"{report['pattern']} {report['method']} {report['quant']}"
        axes.plot([final_error(row) for row in rows], marker=".", label=label)
        axes.set_xticks(range(len(rows)), [row["name"] for row in rows], rotation=90, fontsize=6)
    axes.set(
        ylabel="|X (W - W')| / |X W|",
        title="Error of each layer's output as it is served",
    )
    axes.set_ylim(0, 1.12 * axes.get_ylim()[1])
    axes.grid(alpha=0.3)
    axes.legend(loc="upper center", ncols=len(reports))
    save(figure, out)


@mpl.rc_context(FIXED_PARAMETERS)
def losses(source: Path, out: Path) -> None:
    """Draw the loss of pruning by the share of zeros: as served in INT8, and in BF16 beside unstructured pruning."""
    results = language.Results.of(source)
    figure = Figure(figsize=(9.5, 4.2), layout="constrained")
    served, pruned = figure.subplots(1, 2, sharey=True)
    for number, (method, marker) in enumerate(METHODS.items()):
        line = {"color": f"C{number}", "marker": marker, "capsize": 2}
        for text, style in (("in", "-"), ("out", ":")):
            label = f"{method}, {language.TEXTS[text]}"
            _curve(served, results, PATTERNS, method, "int8", text, label=label, linestyle=style, **line)
        _curve(pruned, results, PATTERNS, method, "bf16", "in", label=method, **line)
        hollow = {"markerfacecolor": "none", "linestyle": "--", "label": f"{method}, unstructured"}
        _curve(pruned, results, language.UNSTRUCTURED, method, "bf16", "in", **hollow, **line)
    served.set(title="INT8, served by vLLM with the plugin", ylabel="perplexity lost, %", yscale="log")
    pruned.set(title="BF16, held-out text: pruning alone")
    for axes in (served, pruned):
        axes.set_xticks(
            [language.zeros(pattern) for pattern in PATTERNS],
            [f"{pattern}\n{language.zeros(pattern):.0f}%" for pattern in PATTERNS],
        )
        axes.set(xlabel="pattern, weights that are zero")
        axes.legend(fontsize=7)
        _plain_percent(axes)
    save(figure, out)


def _curve(
    axes: Axes,
    results: language.Results,
    patterns: tuple[str, ...],
    method: str,
    quant: str,
    text: str,
    **style: Any,
) -> None:
    points = [(language.zeros(p), loss) for p in patterns if (loss := results.loss(p, method, quant, text))]
    low = [loss.mean - loss.low for _, loss in points]
    high = [loss.high - loss.mean for _, loss in points]
    axes.errorbar([x for x, _ in points], [loss.mean for _, loss in points], [low, high], **style)


def _plain_percent(axes: Axes) -> None:
    """Label the axes 0.5, 1, 2, 5, ... instead of powers of ten."""
    ticks = [digit * 10.0**power for power in range(-2, 3) for digit in (1, 2, 5)]
    low, high = axes.get_ylim()
    axes.set_yticks([tick for tick in ticks if low <= tick <= high], minor=False)
    axes.set_yticks([], minor=True)
    axes.yaxis.set_major_formatter("{x:g}")


def main() -> None:
    """Draw one plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("plot", choices=("cosine", "layers", "losses"))
    parser.add_argument("source", type=Path, nargs="+")
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    draw = {"cosine": cosine, "losses": losses}
    if options.plot == "layers":
        layers(options.source, options.out)
    elif len(options.source) != 1:
        parser.error(f"{options.plot} takes one source")
    else:
        draw[options.plot](*options.source, options.out)


if __name__ == "__main__":
    main()
