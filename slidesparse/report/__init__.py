"""``slidesparse report``: what the benchmark commands left in a folder, as Markdown tables and SVG plots.

Everything in the report comes from the files of the folder (and of a reference folder, where one is given): what was
not measured is shown as ``-`` and listed as missing, never interpolated.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from slidesparse.report import plots
from slidesparse.report.compare import compare_page
from slidesparse.report.data import SPARSE, STOCK, ReportError, Results, read_kernel, read_linear
from slidesparse.report.e2e import EndToEnd, e2e_page, read_e2e
from slidesparse.report.e2e import draw as draw_e2e
from slidesparse.report.layouts import Layouts, layout_page, read_layouts
from slidesparse.report.markdown import bullets, cell, table
from slidesparse.report.pages import bandwidth_page, kernel_page, linear_page, page
from slidesparse.report.sections import linear_sections, model_sections, square_sections
from slidesparse.report.steps import read_steps, steps_page

__all__ = ["ReportError", "render"]

PAGES = {
    "kernel.md": "matrix products alone: square ones and those of models",
    "linear.md": "linear layers with quantization and scaling, against stock vLLM",
    "bandwidth.md": "kernels that memory bounds",
    "layout.md": "memory layouts that the libraries take, and their speed",
    "e2e.md": "whole models in vLLM: tokens per second",
    "e2e_profile.md": "where the time of a step of a whole model goes",
    "comparison.md": "speed-ups beside those of a reference",
}
COMMANDS = "commands"  # key of the conditions: a list of command lines


def render(folder: Path, reference: Path | None = None) -> list[Path]:
    """Write the report of ``folder`` into it: README.md, a page for each benchmark that is there, and plots.

    Reads kernel, linear, layout and e2e .csv and .json, bandwidth.csv and e2e_profile.csv, any of which may be missing
    or stop early; ``reference`` is a folder of earlier figures to compare with (`slidesparse.report.compare`).
    Everything is read before anything is written, and the same files give the same bytes.

    Returns the paths written.  Raises ReportError for a folder that is not there or holds none of the files, and for
    a file that cannot be understood.
    """
    for given in filter(None, (folder, reference)):
        if not given.is_dir():
            raise ReportError(f"{given} is not a folder; name one that benchmarks wrote to")
    kernel, linear = read_kernel(folder), read_linear(folder)
    bandwidth, notes = bandwidth_page(folder)
    layouts, whole, steps = read_layouts(folder), read_e2e(folder), read_steps(folder)
    if not (kernel.rows or linear.rows or bandwidth or layouts.rows or whole.rows):
        raise ReportError(
            f"{folder} holds no measurement in kernel.csv, linear.csv, bandwidth.csv, layout.csv or e2e.csv; "
            "run a benchmark into it first"
        )
    models = model_sections(kernel)
    products, layers = [*square_sections(kernel), *models], linear_sections(linear)
    comparison, more = (
        compare_page([s for s in models if s.ours == SPARSE], reference) if reference else ([], [])
    )

    drawn = plots.available()
    kernel_plots = plots.draw("kernel", folder, products) if drawn else []
    linear_plots = plots.draw("linear", folder, layers, STOCK) if drawn else []
    e2e_plots = draw_e2e(folder, whole) if drawn else []
    texts = {
        "kernel.md": kernel_page(kernel, products, kernel_plots) if kernel.rows else "",
        "linear.md": linear_page(linear, layers, linear_plots) if linear.rows else "",
        "bandwidth.md": bandwidth,
        "layout.md": layout_page(layouts),
        "e2e.md": e2e_page(whole, e2e_plots),
        "e2e_profile.md": steps_page(steps),
        "comparison.md": page(comparison),
    }
    texts = {name: text for name, text in texts.items() if text.strip()}
    missing = [
        *kernel.notes,
        *linear.notes,
        *notes,
        *layouts.notes,
        *whole.notes,
        *(f"Reference: {note}" for note in more),
    ]
    sections = [*products, *layers, *(row.section for row in whole.rows)]
    missing += [f"{s.title}, {s.dtype.upper()}: {line}" for s in sections for line in s.absent]
    texts["README.md"] = _readme(list(texts), missing, [kernel, linear, layouts, whole], drawn=drawn)
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    return [*(folder / name for name in texts), *kernel_plots, *linear_plots, *e2e_plots]


def _readme(
    pages: Sequence[str],
    missing: Sequence[str],
    measured: Sequence[Results | Layouts | EndToEnd],
    *,
    drawn: bool,
) -> str:
    parts = ["# Measurements", bullets(f"[{name}]({name}): {PAGES[name]}" for name in pages)]
    if not drawn:
        parts.append(plots.EXTRA)
    parts += ["## Missing", bullets(missing) if missing else "Nothing of what these files should hold."]
    for results in measured:
        if results.rows:
            parts += [f"## Conditions of {results.name}.csv", *_conditions(results)]
    return page(parts)


def _conditions(results: Results | Layouts | EndToEnd) -> list[str]:
    """The commands, and a table of everything else in the JSON file."""
    found = dict(results.conditions)
    commands = "\n".join(map(str, found.pop(COMMANDS, [])))
    parts = [f"```\n{commands}\n```" if commands else f"`{results.name}.json` names no command."]
    rows = [(cell(name), cell(value)) for name, value in _flat(found)]
    return [*parts, table(("condition", "value"), rows, left=2)] if rows else parts


def _flat(found: object, name: str = "") -> list[tuple[str, str]]:
    """Nested objects as ``outer.inner``; lists as JSON."""
    if isinstance(found, dict):
        return [
            pair
            for key, value in found.items()
            for pair in _flat(value, f"{name}.{key}" if name else str(key))
        ]
    return [(name, found if isinstance(found, str) else json.dumps(found, ensure_ascii=False))]
