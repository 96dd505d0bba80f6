"""Speed-ups beside those of a reference folder.

The folder may hold ``kernel_model_total.csv`` (four layers of a model summed, results of the operands' type) and
``e2e_algsearch_layers.csv`` (layer by layer, results of the types that serving writes; several lines of one product
are algorithms, of which the fastest counts).  Either may be absent.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from slidesparse.pattern import SlidePattern
from slidesparse.report.data import DENSE, LAYERS, SPARSE, Line, pattern_order, read_csv
from slidesparse.report.markdown import NOTHING, table
from slidesparse.report.sections import Section

TOTAL, BY_LAYER = "kernel_model_total.csv", "e2e_algsearch_layers.csv"
TOTAL_COLUMNS = ("model", "dtype", "backend", "sparsity", "M", "latency_us_sum4layers")
LAYER_COLUMNS = ("model", "dtype", "backend", "layer", "sparsity", "M", "latency_us")
MODELS = ("Qwen2.5-7B", "Llama3.2-1B")
DTYPES = ("int8", "fp8")
MS = (64, 512, 4096, 16384)

Key = tuple[str, str, str, "SlidePattern | None", int]  # model (normalized), dtype, backend, pattern, M


def normalized(model: str) -> str:
    """A model's name without organization, case and hyphens: Llama-3.2-1B is Llama3.2-1B."""
    return re.sub(r"[-_ ]", "", model.rpartition("/")[2].lower())


@dataclass(frozen=True)
class Pair:
    """A speed-up over cuBLASLt here and in the reference; None where it was not measured."""

    ours: float | None
    theirs: float | None

    @property
    def complete(self) -> bool:
        """Whether both were measured."""
        return self.ours is not None and self.theirs is not None

    @property
    def reached(self) -> bool:
        """Whether ours is at least theirs."""
        return self.ours is not None and self.theirs is not None and self.ours >= self.theirs

    def __str__(self) -> str:
        if not self.complete:
            return " / ".join(
                NOTHING if value is None else f"{value:.3f}" for value in (self.ours, self.theirs)
            )
        text = f"{self.ours:.3f} {'≥' if self.reached else '<'} {self.theirs:.3f}"
        return text if self.reached else f"**{text}**"


def read_totals(folder: Path) -> tuple[dict[Key, float], list[str]]:
    """Microseconds of ``kernel_model_total.csv``, and notes.  Raises ReportError."""
    lines, notes = read_csv(folder / TOTAL, TOTAL_COLUMNS)
    return {_key(line): us for line in lines if (us := line.number("latency_us_sum4layers"))}, notes


def read_layers(folder: Path) -> tuple[dict[Key, float], list[str]]:
    """Microseconds of ``e2e_algsearch_layers.csv``, four layers summed where all are there, and notes."""
    lines, notes = read_csv(folder / BY_LAYER, LAYER_COLUMNS)
    fastest: dict[Key, dict[str, float]] = defaultdict(dict)
    for line in lines:
        layer, us = line.fields["layer"], line.number("latency_us")
        if layer and us and line.fields["sparsity"]:  # lines that name neither are of no layer
            layers = fastest[_key(line)]
            layers[layer] = min(us, layers.get(layer, us))
    return {key: sum(by.values()) for key, by in fastest.items() if len(by) == LAYERS}, notes


def _key(line: Line) -> Key:
    model, dtype = normalized(line.fields["model"]), line.fields["dtype"].lower()
    return model, dtype, line.fields["backend"], line.pattern("sparsity"), line.integer("M")


def compare_page(sections: Sequence[Section], folder: Path) -> tuple[list[str], list[str]]:
    """Blocks of ``comparison.md``, and notes on what is missing.  Raises ReportError."""
    parts = [
        "# Beside the reference",
        "Speed-up over dense cuBLASLt, ours beside the reference's, each over its own run: two machines, two "
        "baselines. Four layers of a model summed. `≥`: ours is at least theirs; `<`, in bold: it is not; "
        "`-`: not measured.",
    ]
    totals, notes = read_totals(folder)
    layers, more = read_layers(folder)
    others = sorted({name for s in sections for name in s.baselines if name.startswith(f"{DENSE}-")})
    for over in (DENSE, *others):  # the reference's INT8 baseline writes INT8
        parts.append(f"## Results of the operands' type there (`{TOTAL}`); ours over {over}")
        parts += _compared(sections, totals, MS, over)
    parts.append(f"## Results of the types that serving writes there (`{BY_LAYER}`); ours over {DENSE}")
    parts += ["Every M that both have.", *_compared(sections, layers, None, DENSE)]
    return parts, [*notes, *more]


def _compared(
    sections: Sequence[Section], theirs: Mapping[Key, float], ms: Sequence[int] | None, over: str
) -> list[str]:
    """The counts, and a table for each model and dtype; ``ms`` None is every M that both have."""
    if not theirs:
        return ["The reference has no such measurements."]
    parts: list[str] = []
    every: list[Pair] = []
    for model in MODELS:
        for dtype in DTYPES:
            section = _section(sections, model, dtype)
            if over != DENSE and (section is None or over not in section.baselines):
                continue
            pairs = _pairs(section, theirs, (normalized(model), dtype), ms, over)
            every += pairs.values()
            parts += [f"### {model}, {dtype.upper()}", _table(pairs)]
    return [counts(every), *parts]


def counts(pairs: Sequence[Pair]) -> str:
    """In how many cells that both measured ours is at least theirs, and how many lack a side."""
    complete = [pair for pair in pairs if pair.complete]
    reached = sum(pair.reached for pair in complete)
    here = sum(pair.ours is None and pair.theirs is not None for pair in pairs)
    there = sum(pair.theirs is None and pair.ours is not None for pair in pairs)
    return (
        f"Ours is at least theirs in {reached} of {len(complete)} cells; "
        f"{here} more were measured only there, {there} only here."
    )


def _section(sections: Sequence[Section], model: str, dtype: str) -> Section | None:
    return next((s for s in sections if (normalized(s.title), s.dtype) == (normalized(model), dtype)), None)


def _pairs(
    section: Section | None,
    theirs: Mapping[Key, float],
    subject: tuple[str, str],
    ms: Sequence[int] | None,
    over: str,
) -> dict[tuple[SlidePattern, int], Pair]:
    """Every pattern of either side at every M."""
    keys = [key for key in theirs if key[:2] == subject]
    patterns = {key[3] for key in keys if key[3] is not None} | set(section.patterns if section else ())
    if ms is None:
        ms = sorted({key[4] for key in keys if key[2] == DENSE} & set(section.ms if section else ()))
    pairs = {}
    for m in ms:
        dense = theirs.get((*subject, DENSE, None, m))
        for pattern in sorted(patterns, key=pattern_order):
            sparse = theirs.get((*subject, SPARSE, pattern, m))
            ours = section.speedup(pattern, m, over) if section else None
            pairs[pattern, m] = Pair(ours, dense / sparse if dense and sparse else None)
    return pairs


def _table(pairs: Mapping[tuple[SlidePattern, int], Pair]) -> str:
    if not any(pair.ours is not None for pair in pairs.values()):
        return "Not measured here."
    patterns = list(dict.fromkeys(pattern for pattern, _ in pairs))
    ms = list(dict.fromkeys(m for _, m in pairs))
    rows = [[str(m), *(str(pairs[pattern, m]) for pattern in patterns)] for m in ms]
    return table(("M", *(pattern.ratio for pattern in patterns)), rows)
