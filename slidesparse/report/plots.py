"""SVG plots, the same bytes for the same results.  Needs matplotlib, imported late: the extra ``report``."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slidesparse.pattern import SlidePattern
from slidesparse.report.data import DENSE, MODEL, pattern_order
from slidesparse.report.sections import Section

if TYPE_CHECKING:
    from matplotlib.figure import Figure

EXTRA = "The plots need matplotlib: pip install '.[report]' in a clone of SlideSparse."
PANEL = (5.0, 3.6)  # inches
MOST_COLUMNS, MOST_PANELS = 3, 6  # of one file
STYLE: dict[str, Any] = {
    "svg.hashsalt": "slidesparse",  # ids inside the file
    "svg.fonttype": "none",  # text stays text: small, searchable
    "font.size": 10,
    "axes.grid": True,
    "grid.alpha": 0.3,
}
# Okabe and Ito's colours, which colour-blind readers can tell apart
COLOURS = {
    4: "#000000",
    6: "#E69F00",
    8: "#D55E00",
    10: "#009E73",
    12: "#56B4E9",
    14: "#0072B2",
    16: "#CC79A7",
}
OTHER_COLOUR = "#888888"  # 2_inf, and patterns beyond 14:16
MARKERS = "osD^vP*X"


def available() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def draw(name: str, folder: Path, sections: Sequence[Section], over: str = DENSE) -> list[Path]:
    """``NAME-speedup-DTYPE.svg`` and ``NAME-models-DTYPE.svg`` for each dtype; those that have something to show.

    The former has a panel of speed-ups against M for each section (beyond six, the rest is in
    ``NAME-speedup-DTYPE-2.svg`` and so on), the latter bars of each model at one M.
    """
    written = []
    for dtype in dict.fromkeys(section.dtype for section in sections):
        shown = [s for s in sections if s.dtype == dtype and _curves(s, over)]
        if not shown:
            continue
        for start in range(0, len(shown), MOST_PANELS):
            number = f"-{start // MOST_PANELS + 1}" if start else ""
            path = folder / f"{name}-speedup-{dtype}{number}.svg"
            with _styled():
                _save(_lines(shown[start : start + MOST_PANELS], over), path)
            written.append(path)
        models = [section for section in shown if section.mode == MODEL]
        if models and (m := common_m(models, over)):
            path = folder / f"{name}-models-{dtype}.svg"
            with _styled():
                _save(_bars(models, m, over), path)
            written.append(path)
    return written


def common_m(sections: Sequence[Section], over: str) -> int | None:
    """The largest M at which every section has a speed-up; None when there is none."""
    measured = [{m for _, points in _curves(section, over) for m, _ in points} for section in sections]
    return max(set.intersection(*measured), default=None)


def _curves(section: Section, over: str) -> list[tuple[SlidePattern, list[tuple[int, float]]]]:
    """(M, speed-up) of each pattern that has any, ascending in M."""
    curves = [
        (pattern, [(m, s) for m in section.ms if (s := section.speedup(pattern, m, over)) is not None])
        for pattern in section.patterns
    ]
    return [(pattern, points) for pattern, points in curves if points]


def _colour(pattern: SlidePattern) -> str:
    return COLOURS.get(pattern.length or 0, OTHER_COLOUR)


def _marker(pattern: SlidePattern) -> str:
    place = len(MARKERS) - 1 if pattern.length is None else pattern.length // 2 - 2
    return MARKERS[min(place, len(MARKERS) - 1)]


@contextmanager
def _styled() -> Iterator[None]:
    import matplotlib

    with matplotlib.rc_context({**matplotlib.rcParamsDefault, **STYLE}):
        yield


def _save(figure: Figure, path: Path) -> None:
    figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})


def _lines(sections: Sequence[Section], over: str) -> Figure:
    from matplotlib.figure import Figure

    columns = min(len(sections), MOST_COLUMNS)
    rows = math.ceil(len(sections) / columns)
    figure = Figure(figsize=(PANEL[0] * columns, PANEL[1] * rows + 0.6), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False, sharey=True).flatten()
    handles: dict[str, Any] = {}
    for panel, section in zip(panels, sections, strict=False):
        dense = panel.axhline(1, color="#444444", linewidth=2)
        for pattern, points in _curves(section, over):
            colour = _colour(pattern)
            panel.axhline(float(pattern.speedup_bound), color=colour, linestyle=":", linewidth=1)
            (line,) = panel.plot(
                *zip(*points, strict=True), color=colour, marker=_marker(pattern), markersize=4
            )
            handles[pattern.ratio] = (pattern_order(pattern), line)
        handles[f"{over}, dense = 1"] = (0, dense)
        panel.set_xscale("log", base=2)
        panel.set_xticks(section.ms, [str(m) for m in section.ms], rotation=45)
        panel.minorticks_off()
        panel.set_title(section.title)
        panel.set_xlabel("M")
    for panel in panels[len(sections) :]:
        panel.set_visible(False)
    figure.supylabel(f"speed-up over {over}", fontsize="medium")
    ordered = sorted(handles.items(), key=lambda item: item[1][0])
    figure.suptitle(f"{sections[0].dtype.upper()}; dotted: the bound N/(N-1) of the pattern in its colour")
    figure.legend(
        [line for _, (_, line) in ordered],
        [label for label, _ in ordered],
        loc="outside lower center",
        ncols=5,
    )
    return figure


def _bars(sections: Sequence[Section], m: int, over: str) -> Figure:
    from matplotlib.figure import Figure

    patterns = sorted({pattern for section in sections for pattern in section.patterns}, key=pattern_order)
    width = 0.8 / len(patterns)
    figure = Figure(figsize=(max(6.0, 1.0 + 2.2 * len(sections)), 4.2), layout="constrained")
    axes = figure.subplots()
    for i, pattern in enumerate(patterns):
        bound, label = float(pattern.speedup_bound), pattern.ratio
        for at, section in enumerate(sections):
            speedup = section.speedup(pattern, m, over)
            if speedup is None:
                continue
            left = at - 0.4 + i * width
            axes.bar(left, speedup, width * 0.9, align="edge", color=_colour(pattern), label=label)
            axes.plot([left, left + width * 0.9], [bound, bound], color="#444444", linewidth=1.2)
            label = "_again"  # matplotlib leaves it out of the legend
    axes.axhline(1, color="#444444", linewidth=2)
    axes.grid(visible=False, axis="x")
    axes.set_xticks(range(len(sections)), [section.title for section in sections])
    axes.set_ylabel(f"speed-up over {over}")
    axes.set_title(f"{sections[0].dtype.upper()}, M = {m}; line over a bar: its bound N/(N-1)")
    figure.legend(loc="outside lower center", ncols=8)
    return figure
