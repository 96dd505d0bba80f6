"""Plots of docs/accuracy, as SVG files that can be read on light and on dark pages."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import pandas as pd

from benchmarks.e2e.plan import DECODE, DENSE, PREFILL
from benchmarks.kernel import STOCK
from benchmarks.report import CODER, H200, PATTERNS, PEERS, WIKITEXT, real_model_rows, whole_models
from slidesparse.errors import EnvironmentFault

try:
    import matplotlib
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullLocator
except ImportError as error:
    raise EnvironmentFault(
        "plots need matplotlib: pip install '.[report]' in a clone of SlideSparse"
    ) from error

MIXTURE = "distilled on own and packages"  # the text of most distilled models
GREY = "#868e96"  # of all that is not data
COLORS = ("#2f9e44", "#3b82c4", "#e8890c", "#d6336c", "#8f6bd1", "#1098ad", "#a0693c", "#7c9a12")
STYLE = {
    **{f"{name}.color": GREY for name in ("text", "xtick", "ytick", "grid")},
    **{f"axes.{name}": GREY for name in ("edgecolor", "labelcolor", "titlecolor")},
    "axes.grid": True,
    "grid.alpha": 0.3,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "slidesparse",
    "legend.frameon": False,
}
matplotlib.rcParams.update(STYLE)


def _svg(figure: Figure, note: str) -> str:
    buffer = io.StringIO()
    metadata = {"Date": None, "Description": note}
    figure.savefig(buffer, format="svg", transparent=True, bbox_inches="tight", metadata=metadata)
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines()) + "\n"


def _panels(titles: Sequence[str]) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(9, 4), layout="constrained")
    panels = list(figure.subplots(1, len(titles), sharey=True, squeeze=False)[0])
    for axes, title in zip(panels, titles, strict=True):
        axes.set_title(title)
    return figure, panels


def _finish(figure: Figure, panels: Sequence[Axes], ylabel: str) -> None:
    """Give the panels a y axis in percent, logarithmic but around 0, and one legend."""
    for axes in panels:
        axes.set_yscale("symlog", linthresh=1, linscale=0.4)
        axes.set_yticks((0, 1, 2, 5, 10, 20, 50, 100, 200))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_locator(NullLocator())
    panels[0].set_ylim(bottom=min(-0.1, *(axes.dataLim.y0 for axes in panels)))
    panels[0].set_ylabel(f"WikiText-2 perplexity over {ylabel}, %")
    found: dict[str, Any] = {}
    for axes in panels:
        handles, names = axes.get_legend_handles_labels()
        found |= dict(zip(names, handles, strict=True))
    figure.legend([*found.values()], [*found], loc="outside right upper")


def _of_most_text(rows: pd.DataFrame, key: list[str], column: str) -> pd.Series:
    """Return means over seeds by ``key``, each of the last method in the file, which has the most text.

    Of distilled models, those of one mixture of texts count, so that they differ by minutes alone.
    """
    rows = rows[(rows["kind"] != "distilled") | (rows["method"] == MIXTURE)]
    return rows.groupby([*key, "method"], sort=False)[column].mean().groupby(level=key).last()


def curve(note: str) -> str:
    """Return the loss of pruned models against the GPU minutes of their distillation, a panel for each model."""
    rows = real_model_rows()
    rows = rows[(rows["text"] == WIKITEXT) & rows["delta_pct"].notna() & (rows["pattern"] != DENSE)]
    rows = rows[rows["kind"].isin(["sparsegpt", "distilled"])]
    means = _of_most_text(rows, ["model", "quant", "pattern", "minutes"], "delta_pct")
    patterns = [*PATTERNS[::-1], *sorted({*rows["pattern"]} - {*PATTERNS})]
    models = list(rows["model"].unique())
    figure, panels = _panels(models)
    for axes, model in zip(panels, models, strict=True):
        by_line = dict(list(means[model].groupby(level=["quant", "pattern"])))
        for quant, pattern in sorted(by_line, key=lambda line: (patterns.index(line[1]), line[0] != "int8")):
            part = by_line[quant, pattern]
            fp8, budget = quant != "int8", pattern not in PATTERNS
            axes.plot(
                part.index.get_level_values("minutes"),
                part,
                color=COLORS[patterns.index(pattern) % len(COLORS)],
                marker="D" if budget else "o",
                linestyle="--" if fp8 else "-",
                markerfacecolor="none" if fp8 else None,
                label=pattern + (f", {quant.upper()}" if fp8 else ""),
            )
        axes.set_xscale("symlog", linthresh=5)
        axes.set_xticks(sorted({*means.index.get_level_values("minutes")}))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlabel("minutes of distillation on one H100")
    _finish(figure, panels, "unpruned")
    return _svg(figure, note)


def frontier(note: str) -> str:
    """Return the loss of the coder against the speed of a 7B model's shapes on an H200."""
    rows = real_model_rows()
    rows = rows[(rows["model"] == CODER) & (rows["text"] == WIKITEXT)]
    means = _of_most_text(rows, ["quant", "pattern", "kind", "minutes"], "perplexity")
    losses = 100 * (means / float(means["bf16"].iloc[0]) - 1)

    def loss(quant: str, pattern: str, *methods: str) -> pd.Series:
        """The losses by minutes, of the first kind of method that was scored."""
        found = [losses[quant, pattern, name] for name in methods if (quant, pattern, name) in losses.index]
        return pd.concat(found[:1] if pattern == DENSE else found) if found else pd.Series(dtype=float)

    points = {
        ("int8", "bf16"): ("BF16", loss("bf16", DENSE, "-")),
        ("int8", "w4a16"): ("W4A16", loss("w4a16", DENSE, "gptq")),
        ("int8", "w4a8"): ("W4A8", loss("w4a8", DENSE, "-")),
    }
    points |= {
        (q, STOCK): (f"{q.upper()}, stock vLLM", loss(q, DENSE, "-", "calibrated")) for q in ("int8", "fp8")
    }
    points["int8", DENSE] = "INT8, not pruned", loss("int8", DENSE, "calibrated", "-")
    points |= {("int8", p): (f"INT8, {p}", loss("int8", p, "sparsegpt", "distilled")) for p in PATTERNS[::-1]}
    speeds = whole_models(H200)
    speeds = speeds[speeds["round"].isin(PEERS)]
    figure, panels = _panels(["decode, batch size 16", "prefill, 8192 tokens per step"])
    for axes, (stage, m, context) in zip(panels, ((DECODE, 16, 16), (PREFILL, 8192, 1024)), strict=True):
        cell = speeds[(speeds["stage"] == stage) & (speeds["M"] == m) & (speeds["context"] == context)]
        rates = cell.groupby(["dtype", "column"])["rate"].median()
        for number, key in enumerate(key for key in points if key in rates.index):
            label, found = points[key]
            color, x = COLORS[number % len(COLORS)], rates[key] / rates["int8", STOCK]
            if found.empty:
                axes.axvline(x, color=color, linestyle=":", label=f"{label}, loss not measured")
                continue
            found = found.sort_index().iloc[[0, -1]]  # one shot, and distilled the longest
            marker = "o" if key[1] in (DENSE, *PATTERNS) else "s"
            axes.plot([x, x], found, color=color, marker=marker, label=label)
            if minutes := found.index[-1]:
                place = x, found.iloc[-1]
                axes.annotate(
                    f"{minutes:g} min", place, (6, 0), textcoords="offset points", fontsize=7, va="center"
                )
        axes.set_xlabel("tokens/s over stock vLLM's INT8")
    _finish(figure, panels, "BF16")
    return _svg(figure, note)
