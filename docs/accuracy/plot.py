"""Plots of this folder's results: `pip install '.[report]'` first.

    python docs/accuracy/plot.py cosine docs/accuracy/protocol_b.csv OUT.svg
    python docs/accuracy/plot.py layers REPORT.json [REPORT.json ...] OUT.svg
    python docs/accuracy/plot.py table docs/accuracy/protocol_b.csv
    python docs/accuracy/plot.py table docs/accuracy/protocol_a.csv
    python docs/accuracy/plot.py wanted docs/accuracy/protocol_a.csv
    python docs/accuracy/plot.py distilled docs/accuracy/protocol_a.csv
    python docs/accuracy/plot.py speeds docs/accuracy/protocol_a.csv docs/benchmarks/h200/linear.csv
    python docs/accuracy/plot.py losses docs/accuracy/protocol_a.csv OUT.svg
    python docs/accuracy/plot.py speed docs/accuracy/protocol_a.csv docs/benchmarks/h200/linear.csv OUT.svg

`layers` draws what `slidesparse convert --report REPORT.json` measured: the error of each layer's output, a line a
report.  `table`, `wanted`, `distilled` and `speeds` print the tables of README.md; `speed` draws the last of them: what
a pattern loses beside what it gains.  SVG files are the same bytes for the same results.
"""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import language_results as language
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from slidesparse.calibrate.report import final_error
from slidesparse.report.plots import STYLE

PATTERNS = language.PATTERNS
METHODS = {"sparsegpt": "o", "wanda": "s", "magnitude": "^"}
FIXED = {**mpl.rcParamsDefault, **STYLE}  # whatever the settings of the machine


@mpl.rc_context(FIXED)
def cosine(source: Path, out: Path) -> None:
    """Mean cosine, with the first percentile below it, by pattern and method; INT8."""
    with source.open(newline="") as file:
        rows = {(row["pattern"], row["method"], row["quant"]): row for row in csv.DictReader(file)}
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
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
    _save(figure, out)


@mpl.rc_context(FIXED)
def layers(reports: list[Path], out: Path) -> None:
    """Relative error of the output of each layer, in the order of the model."""
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
    _save(figure, out)


@mpl.rc_context(FIXED)
def losses(source: Path, out: Path) -> None:
    """What pruning costs, by the share of zeros: as served in INT8, and in BF16 beside unstructured pruning."""
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
    _save(figure, out)


@mpl.rc_context(FIXED)
def speed(source: Path, linear: Path, out: Path) -> None:
    """What sparsegpt in INT8 loses in one model, by the speed-up of another's linear layers."""
    results, times = language.Results.of(source), language.Speeds.of(linear)
    figure = Figure(figsize=(9.5, 4.2), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for axes, (m, stage) in zip(panels, language.STAGES.items(), strict=True):
        by_pattern = {pattern: times.of_pattern(pattern, m) for pattern in PATTERNS}
        at = {pattern: found.value for pattern, found in by_pattern.items()}
        _points(axes, {language.DENSE: 1.0}, results, "-", "", color="k", marker="s", label="dense")
        _points(axes, at, results, "sparsegpt", "", color="C0", marker="o", label="sparsegpt")
        label = "sparsegpt and distillation"
        _points(axes, at, results, "sparsegpt", language.DISTILLED, color="C1", marker="D", label=label)
        axes.axvline(1, color="#444444", linewidth=1)
        axes.set(title=f"{stage}, M = {m}\n{_providers(by_pattern)}", yscale="log")
        axes.set(xlabel=f"speed-up of {language.MODEL}'s linear layers, INT8")
        axes.margins(x=0.2)
        _plain_percent(axes)
    panels[0].set(ylabel="perplexity lost by the 30 M model, %")
    panels[1].legend(fontsize=8)
    _save(figure, out)


def _providers(by_pattern: dict[str, language.Speed]) -> str:
    """Whose times they are."""
    names = [name for name in language.PROVIDERS if any(s.provider == name for s in by_pattern.values())]
    if len(names) == 1:
        return names[0]
    return "; ".join(
        f"{name}: {', '.join(p for p, speed in by_pattern.items() if speed.provider == name)}"
        for name in names
    )


def _points(
    axes: Axes, at: dict[str, float], results: language.Results, method: str, distilled: str, **style: Any
) -> None:
    """A point for each pattern, at its speed-up."""
    found = {p: loss for p in at if (loss := results.loss(p, method, "int8", "in", distilled))}
    low = [loss.mean - loss.low for loss in found.values()]
    high = [loss.high - loss.mean for loss in found.values()]
    means = [loss.mean for loss in found.values()]
    axes.errorbar([at[pattern] for pattern in found], means, [low, high], capsize=3, linestyle="", **style)
    for pattern, loss in found.items():
        where = (at[pattern], loss.mean)
        axes.annotate(pattern, where, xytext=(7, -3), textcoords="offset points", fontsize=8)


def _curve(
    axes: Axes,
    results: language.Results,
    patterns: tuple[str, ...],
    method: str,
    quant: str,
    text: str,
    **style: Any,
) -> None:
    found = [(language.zeros(p), loss) for p in patterns if (loss := results.loss(p, method, quant, text))]
    low = [loss.mean - loss.low for _, loss in found]
    high = [loss.high - loss.mean for _, loss in found]
    axes.errorbar([x for x, _ in found], [loss.mean for _, loss in found], [low, high], **style)


def _plain_percent(axes: Axes) -> None:
    """0.5, 1, 2, 5, ... instead of powers of ten."""
    ticks = [digit * 10.0**power for power in range(-2, 3) for digit in (1, 2, 5)]
    low, high = axes.get_ylim()
    axes.set_yticks([tick for tick in ticks if low <= tick <= high], minor=False)
    axes.set_yticks([], minor=True)
    axes.yaxis.set_major_formatter("{x:g}")


def _save(figure: Figure, out: Path) -> None:
    figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})


def table(source: Path) -> str:
    """Protocol B in Markdown, in the order of PATTERNS and METHODS."""
    rows = language.read(source)
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
            print(language.table(Path(source)) if language.is_of(Path(source)) else table(Path(source)))
        case ["wanted", source]:
            print(language.wanted(Path(source)))
        case ["distilled", source]:
            print(language.distilled(Path(source)))
        case ["speeds", source, linear]:
            print(language.speeds(Path(source), Path(linear)))
        case ["losses", source, out]:
            losses(Path(source), Path(out))
        case ["speed", source, linear, out]:
            speed(Path(source), Path(linear), Path(out))
        case ["layers", *reports, out] if reports:
            layers([Path(report) for report in reports], Path(out))
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    main()
