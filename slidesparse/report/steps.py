"""The page of ``e2e_profile.csv``: where the microseconds of a step of a whole model go."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from slidesparse.report.data import dtype_order, read_csv
from slidesparse.report.markdown import NOTHING, cell, microseconds, percent, table
from slidesparse.report.pages import page

COLUMNS = ("model", "dtype", "stage", "M", "pattern", "system", "kernel", "class", "calls", "us")
KINDS = (
    *("quantize", "product", "scale", "attention", "norm and activation"),
    *("sampling and the rest", "idle"),
)
LONGEST = 6  # kernels of a system that are listed

Cell = tuple[str, str, str, int]  # model, dtype, stage, M
System = tuple[str, str]  # system, pattern
Kernels = list[tuple[str, str, str, float]]  # kernel, class, calls, microseconds


def read_steps(folder: Path) -> dict[Cell, dict[System, Kernels]]:
    """``e2e_profile.csv`` by cell and system, in its order.  Raises ReportError."""
    lines, _ = read_csv(folder / "e2e_profile.csv", COLUMNS)
    found: dict[Cell, dict[System, Kernels]] = defaultdict(lambda: defaultdict(list))
    for line in lines:
        fields, us = line.fields, line.number("us")
        subject = fields["model"], fields["dtype"].lower(), fields["stage"], line.integer("M")
        entry = fields["kernel"], fields["class"], fields["calls"], us or 0.0
        found[subject][fields["system"], fields["pattern"]].append(entry)
    return found


def steps_page(found: Mapping[Cell, Mapping[System, Kernels]]) -> str:
    """``e2e_profile.md``, "" without measurements."""
    if not found:
        return ""
    parts = [
        "# A step of a whole model",
        "Microseconds of GPU time in one step, by what kernels do, as vLLM's profiler (PyTorch's) recorded them; it "
        "slows the host, so `idle`, when no kernel ran, is an upper bound. Products include lm_head; norms and "
        "activations that are fused with quantization count as quantization.",
    ]
    order = sorted(found, key=lambda one: (one[0], dtype_order(one[1]), one[2] != "prefill", one[3]))
    for model, dtype, stage, m in order:
        systems = found[model, dtype, stage, m]
        parts += [f"## {model}, {dtype.upper()}, {stage}, M {m}", _by_kind(systems), _longest(systems)]
    return page(parts)


def _name(system: System) -> str:
    return system[0] if system[1] == "dense" else f"{system[0]} {system[1]}"


def _by_kind(systems: Mapping[System, Kernels]) -> str:
    totals = {
        system: {kind: sum(us for _, its, _, us in kernels if its == kind) for kind in KINDS}
        for system, kernels in systems.items()
    }
    rows = [
        [
            kind,
            *(microseconds(totals[system][kind]) if totals[system][kind] else NOTHING for system in systems),
        ]
        for kind in KINDS
    ]
    rows.append(["all", *(microseconds(sum(totals[system].values())) for system in systems)])
    return table(("", *map(_name, systems)), rows, left=1)


def _longest(systems: Mapping[System, Kernels]) -> str:
    rows: list[Sequence[str]] = []
    for system, kernels in systems.items():
        whole = sum(us for *_, us in kernels)
        for name, kind, calls, us in sorted(kernels, key=lambda one: -one[3])[:LONGEST]:
            rows.append([_name(system), cell(name), cell(kind), calls, microseconds(us), percent(us / whole)])
    return table(("system", "kernel", "does", "calls", "us", "share"), rows, left=3)
