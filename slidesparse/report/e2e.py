"""The page of ``e2e.csv``: tokens per second of whole models, by system and pattern."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from slidesparse.pattern import SlidePattern
from slidesparse.report import plots
from slidesparse.report.data import (
    DENSE,
    KEPT,
    OURS,
    PLUGIN,
    SPARSE,
    STOCK,
    UNFUSED,
    ReportError,
    dtype_order,
    pattern_order,
    read_conditions,
    read_csv,
)
from slidesparse.report.losses import cells, sentence
from slidesparse.report.markdown import NOTHING, grid, percent, table, times
from slidesparse.report.pages import bound, efficiency, head, images, page, share
from slidesparse.report.sections import Key, Section, absent_cells, beside_dense, by_provider, named

E2E_COLUMNS = ("model", "dtype", "stage", "M", "pattern", "system", "round", "tokens_per_s")
STAGES = ("prefill", "decode")
OFF = "off"
SYSTEMS = (STOCK, OFF, DENSE, SPARSE, PLUGIN, KEPT, UNFUSED)  # called as the providers of the other pages
NAMES = {STOCK: "stock vLLM, without the plugin", DENSE: "dense cuBLASLt through the plugin"}


@dataclass(frozen=True)
class Rate:
    """Tokens per second of one cell in each round."""

    rounds: tuple[float, ...]

    @property
    def median(self) -> float:
        """Over the rounds."""
        return median(self.rounds)

    @property
    def spread(self) -> float:
        """(largest - smallest) / median; 0 for one round."""
        return (max(self.rounds) - min(self.rounds)) / self.median

    def __str__(self) -> str:
        digits = 0 if self.median >= 100 else 2
        return f"{self.median:.{digits}f}" + (f" ±{self.spread / 2:.1%}" if len(self.rounds) > 1 else "")


@dataclass(frozen=True)
class Measured:
    """One model at one dtype in one stage."""

    model: str
    stage: str
    section: Section  # with microseconds a token where other pages have those of a product
    rates: Mapping[Key, Rate]


@dataclass(frozen=True)
class EndToEnd:
    """What ``bench e2e`` left."""

    name: str
    rows: tuple[Measured, ...]
    conditions: dict[str, Any]
    notes: tuple[str, ...]


def read_e2e(folder: Path) -> EndToEnd:
    """``e2e.csv`` and ``e2e.json``; of a repeated line the last counts.  Raises ReportError."""
    lines, notes = read_csv(folder / "e2e.csv", E2E_COLUMNS)
    conditions, more = read_conditions(folder / "e2e.json") if lines else ({}, [])
    found: dict[tuple[str, str, str], dict[Key, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    for line in lines:
        stage, system = line.fields["stage"], line.fields["system"]
        for column, value, allowed in (("stage", stage, STAGES), ("system", system, SYSTEMS)):
            if value not in allowed:
                raise ReportError(f"{line.place}: {column} is {value!r}; allowed: {', '.join(allowed)}")
        pattern, rate = line.pattern("pattern"), line.number("tokens_per_s")
        if (pattern is None) == (system in OURS):
            wanted = "a pattern such as 6:8" if pattern is None else "dense"
            raise ReportError(
                f"{line.place}: {system} with pattern {line.fields['pattern']!r}; allowed: {wanted}"
            )
        if rate is not None:
            subject = line.fields["model"], line.fields["dtype"].lower(), stage
            cell = system, pattern, line.integer("M")
            found[subject][cell][line.integer("round")] = rate
    order = sorted(found, key=lambda s: (s[0], dtype_order(s[1]), STAGES.index(s[2])))
    rows = [row for subject in order for row in _measured(subject, found[subject])]
    return EndToEnd("e2e", tuple(rows), conditions, (*notes, *more))


def _measured(subject: tuple[str, str, str], cells: Mapping[Key, Mapping[int, float]]) -> Iterator[Measured]:
    """One for each of our sparse providers."""
    model, dtype, stage = subject
    all_rates = {key: Rate(tuple(by_round.values())) for key, by_round in cells.items()}
    for ours in by_provider(all_rates, PLUGIN):
        rates = beside_dense(all_rates, ours)
        us = {key: _us(key, cells) for key in rates}
        title = named(f"{model}, {stage}", ours, PLUGIN)
        yield Measured(model, stage, Section(title, dtype, us, absent=absent_cells(us, us), ours=ours), rates)


def _us(key: Key, cells: Mapping[Key, Mapping[int, float]]) -> float:
    """Microseconds a token: stock vLLM's median, times the median of the ratios to it within a round.

    A machine gets slower and faster from round to round, for all systems.  Without a round that has both, of the
    median alone.
    """
    mine, stock = cells[key], cells.get((STOCK, None, key[2]), {})
    if ratios := [stock[number] / rate for number, rate in mine.items() if number in stock]:
        return 1e6 / median(stock.values()) * median(ratios)
    return 1e6 / median(mine.values())


def draw(folder: Path, found: EndToEnd) -> list[Path]:
    """``e2e-STAGE-speedup-DTYPE.svg`` and ``e2e-STAGE-models-DTYPE.svg``, over stock vLLM where it was measured."""
    written = []
    for stage in STAGES:
        sections = [row.section for row in found.rows if row.stage == stage]
        over = STOCK if any(STOCK in section.baselines for section in sections) else DENSE
        written += plots.draw(f"e2e-{stage}", folder, sections, over)
    return written


def e2e_page(found: EndToEnd, drawn: Sequence[Path]) -> str:
    """``e2e.md``, "" without measurements."""
    if not found.rows:
        return ""
    parts = [
        "# Whole models",
        "Tokens per second of `vllm bench throughput`: prompt and output tokens together for prefill (one output "
        "token a prompt), output tokens alone for decode. M: tokens of a step. Each figure is the median of the "
        f"rounds, {_processes(found)}; ±: half of (largest - smallest) / median. `-`: not measured. "
        "Speed-ups are medians of the ratios within a round, as a machine may change from round to round. "
        "N/(N-1) bounds linear layers: attention, sampling and the engine's own time are in these figures as well.",
        _noise(found),
        *images(drawn),
        *_sentences(found),
    ]
    for row in found.rows:
        parts += [*head(row.section), *_tables(row)]
    return page(parts)


def _processes(found: EndToEnd) -> str:
    engines = (found.conditions.get("workload") or {}).get("engines")
    return f"engines {engines} on the GPU and taking turns" if engines else "every run a fresh process"


def _noise(found: EndToEnd) -> str:
    """How far the rounds are apart, and ``off`` from ``stock``, which run the same kernels."""
    rates = [rate for row in found.rows for rate in row.rates.values()]
    counts = sorted({len(rate.rounds) for rate in rates})
    words = [f"Rounds: {' to '.join(map(str, dict.fromkeys((counts[0], counts[-1]))))}."]
    if spreads := [rate.spread for rate in rates if len(rate.rounds) > 1]:
        words.append(
            f"Spread, (largest - smallest) / median: {percent(median(spreads))} in the median, "
            f"{percent(max(spreads))} at most."
        )
    pairs = [
        abs(rate.median / stock.median - 1)
        for row in found.rows
        for (provider, _, m), rate in row.rates.items()
        if provider == OFF and (stock := row.rates.get((STOCK, None, m)))
    ]
    if pairs:
        words.append(
            "`off` is the plugin told to do nothing, so that it runs stock vLLM's kernels. The two differ by "
            f"{percent(median(pairs))} in the median, {percent(max(pairs))} at most: the noise of a comparison."
        )
    return " ".join(words)


def _sentences(found: EndToEnd) -> list[str]:
    """How often each pattern is faster, equal and slower than stock vLLM, stage by stage."""
    parts = ["## Beside stock vLLM"]
    for stage in STAGES:
        sections = [row.section for row in found.rows if row.stage == stage]
        patterns = sorted({pattern for s in sections for pattern in s.patterns}, key=pattern_order)
        parts += [f"{stage.capitalize()}: {sentence(cells(sections, p), p)}" for p in patterns]
    return parts if len(parts) > 1 else []


def _tables(row: Measured) -> list[str]:
    section = row.section
    columns: list[tuple[str, str, SlidePattern | None]] = [
        (name, name, None) for name in SYSTEMS if name in section.baselines
    ]
    columns += [(pattern.ratio, section.ours, pattern) for pattern in section.patterns]
    rates = [
        [str(m), *(str(row.rates.get((provider, pattern, m), NOTHING)) for _, provider, pattern in columns)]
        for m in section.ms
    ]
    parts = ["Tokens per second:", table(("M", *(title for title, _, _ in columns)), rates)]
    if not section.patterns:
        return parts
    for over in (STOCK, DENSE):
        if over in section.baselines:
            parts += [f"Speed-up over {NAMES[over]}:", _speedups(section, over)]
    return [*parts, *share(section), *efficiency(section)]


def _speedups(section: Section, over: str) -> str:
    return grid(
        section,
        lambda pattern, m: times(section.speedup(pattern, m, over)),
        last=("N/(N-1)", bound),
    )
