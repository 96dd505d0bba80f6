"""SVG plots of speed-ups; deterministic for a given release of matplotlib."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from benchmarks.report.data import Section, pattern_order

PANEL = (5.0, 3.6)  # inches
MAX_COLUMNS, MAX_PANELS = 3, 6  # of one file
STYLE: dict[str, Any] = {
    "svg.hashsalt": "slidesparse",  # ids inside the file
    "svg.fonttype": "none",  # keep text as text: small and searchable
    "font.size": 10,
    "axes.grid": True,
    "grid.alpha": 0.3,
}
FIXED_PARAMETERS = {**mpl.rcParamsDefault, **STYLE}  # independent of the machine's settings
# Okabe and Ito's colours, which colour-blind readers can tell apart, greys for mixed blocks, and a marker for each
PATTERN_STYLES = {
    "dense": ("#F0E442", "x"),
    "2:4": ("#000000", "o"),
    "4:6": ("#E69F00", "s"),
    "6:8": ("#D55E00", "D"),
    "8:10": ("#009E73", "^"),
    "10:12": ("#56B4E9", "v"),
    "12:14": ("#0072B2", "P"),
    "14:16": ("#CC79A7", "*"),
    "16:18": ("#882255", "h"),
    "2:4@33%": ("#BBBBBB", "<"),
    "2:4@50%": ("#888888", ">"),
    "2:4@67%": ("#555555", "p"),
}
OTHER_STYLE = ("#332288", "X")  # 2_inf, and patterns beyond 16:18


def draw(name: str, folder: Path, sections: Sequence[Section], over: str) -> list[Path]:
    """Draw ``NAME-speedup-DTYPE.svg`` for each dtype with data: a panel of speed-ups against M for each section.

    Beyond six sections the rest is in ``NAME-speedup-DTYPE-2.svg`` and so on.
    """
    figures = {}
    for dtype in dict.fromkeys(section.dtype for section in sections):
        shown = [s for s in sections if s.dtype == dtype and s.speedup(over).notna().any(axis=None)]
        with mpl.rc_context(FIXED_PARAMETERS):
            for start in range(0, len(shown), MAX_PANELS):
                number = f"-{start // MAX_PANELS + 1}" if start else ""
                panels = shown[start : start + MAX_PANELS]
                figures[f"{name}-speedup-{dtype}{number}"] = _lines(panels, over)
    return [save(figure, folder / f"{stem}.svg") for stem, figure in figures.items()]


def save(figure: Figure, path: Path) -> Path:
    """Write an SVG file without metadata that differs between runs."""
    with mpl.rc_context(FIXED_PARAMETERS):
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})
    return path


def _lines(sections: Sequence[Section], over: str) -> Figure:
    columns = min(len(sections), MAX_COLUMNS)
    rows = math.ceil(len(sections) / columns)
    figure = Figure(figsize=(PANEL[0] * columns, PANEL[1] * rows + 0.6), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False, sharey=True).flatten()
    handles: dict[str, Any] = {}
    for panel, section in zip(panels, sections, strict=False):
        handles[f"{over}, dense = 1"] = panel.axhline(1, color="#444444", linewidth=2)
        for pattern, values in section.speedup(over).items():
            points = values.dropna()
            if points.empty:
                continue
            colour, marker = PATTERN_STYLES.get(str(pattern), OTHER_STYLE)
            panel.axhline(section.bounds[pattern], color=colour, linestyle=":", linewidth=1)
            style = {"color": colour, "marker": marker, "markersize": 4}
            (handles[str(pattern)],) = panel.plot(points.index, points, **style)
        panel.set_xscale("log", base=2)
        panel.set_xticks(section.us.index, [str(m) for m in section.us.index], rotation=45)
        panel.minorticks_off()
        panel.set_title(section.heading)
        panel.set_xlabel("M")
    for panel in panels[len(sections) :]:
        panel.set_visible(False)
    figure.supylabel(f"speed-up over {over}", fontsize="medium")
    labels = sorted(handles, key=lambda label: 0 if "=" in label else pattern_order(label))
    figure.suptitle(f"{sections[0].dtype.upper()}; dotted: the bound N/(N-1) of the pattern in its colour")
    figure.legend([handles[label] for label in labels], labels, loc="outside lower center", ncols=5)
    return figure
