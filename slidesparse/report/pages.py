"""The Markdown pages of the report, one for each benchmark."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

from slidesparse.pattern import SlidePattern
from slidesparse.report.data import BANDWIDTH_COLUMNS, DENSE, STOCK, Results, pattern_name, read_csv
from slidesparse.report.losses import losses
from slidesparse.report.markdown import bullets, cell, grid, microseconds, percent, table, times
from slidesparse.report.sections import Ceilings, Section

PROVIDERS = {
    DENSE: "dense cuBLASLt",
    STOCK: "the dense kernel of stock vLLM",
    "cublaslt-int8": "dense cuBLASLt that writes INT8",
}


def kernel_page(results: Results, sections: Sequence[Section], plots: Sequence[Path]) -> str:
    """``kernel.md``: products alone, square ones and those of whole models."""
    ceilings = Ceilings.of(results.conditions)
    parts = [
        "# Matrix products",
        "Median latencies of the product alone; of a model, its four layers summed where all four were measured. "
        "Speed-up: latency of the dense product / ours, of the same run. `-`: not measured.",
        _spread(results),
        *images(plots),
    ]
    for section in sections:
        parts += [*head(section), *_speedups(section), *share(section), *efficiency(section)]
        if ceilings:
            parts += _floor(section, ceilings)
    return page(parts)


def linear_page(results: Results, sections: Sequence[Section], plots: Sequence[Path]) -> str:
    """``linear.md``: linear layers with everything around their product."""
    parts = [
        "# Linear layers",
        "Median latencies of the four linear layers of a model, summed, each with its quantization and scaling. "
        "Speed-up: latency of the dense layers / ours, of the same run. `-`: not measured.",
        _spread(results),
        *images(plots),
        *losses(sections),
    ]
    for section in sections:
        parts += [*head(section), *_speedups(section), *share(section)]
    return page(parts)


def bandwidth_page(folder: Path) -> tuple[str, list[str]]:
    """``bandwidth.md``, "" without measurements, and notes on what is missing.  Raises ReportError."""
    lines, notes = read_csv(folder / "bandwidth.csv", BANDWIDTH_COLUMNS)
    measured = [line for line in lines if line.number("GBps") is not None]
    if len(measured) < len(lines):
        notes.append(f"{len(lines) - len(measured)} lines of `bandwidth.csv` hold no rate: not measured.")
    if not measured:
        return "", notes
    rows = [
        [
            *(cell(line.fields[name]) for name in ("kernel", "dtype", "M", "K")),
            *(microseconds(line.number(name)) for name in ("us", "GBps", "copy_GBps")),
            percent(line.number("fraction")),
        ]
        for line in measured
    ]
    header = ("kernel", "dtype", "M", "K", "us", "GB/s", "copy GB/s", "share of the copy")
    parts = [
        "# Memory-bound kernels",
        "What a kernel moves a second, beside a plain copy on the same machine. `-`: not measured.",
        table(header, rows, left=2),
    ]
    return page(parts), notes


def page(parts: Sequence[str]) -> str:
    """Blocks of Markdown, an empty line between two."""
    return "\n\n".join(part.rstrip("\n") for part in parts if part) + "\n"


def images(plots: Sequence[Path]) -> list[str]:
    """A Markdown image for each plot."""
    return [f"![{path.stem.replace('-', ' ')}]({path.name})" for path in plots]


def _spread(results: Results) -> str:
    spreads = [((row.p80 - row.p20) / row.p50, row) for row in results.rows]
    if not spreads:
        return ""
    worst, row = max(spreads, key=lambda pair: pair[0])
    subject = filter(None, (row.model, row.layer, row.dtype.upper(), row.provider, pattern_name(row.pattern)))
    return (
        f"Spread of the runs, (p80 - p20) / p50: {percent(median(spread for spread, _ in spreads))} in the median, "
        f"{percent(worst)} at most ({' '.join(subject)}, M {row.m})."
    )


def head(section: Section) -> list[str]:
    """A heading, and what was not measured."""
    parts = [f"## {section.title}, {section.dtype.upper()}"]
    if section.absent:
        parts.append(f"Missing here:\n\n{bullets(section.absent)}")
    return parts


def bound(pattern: SlidePattern) -> str:
    """N/(N-1), the speed-up that the pattern allows."""
    return times(float(pattern.speedup_bound))


def _speedups(section: Section) -> list[str]:
    """A table over each dense provider; the first one shows the latencies of all of them."""

    def latency(provider: str) -> Callable[[int], str]:
        return lambda m: microseconds(section.us.get((provider, None, m)))

    def over(provider: str, lead: Sequence[str]) -> str:
        return grid(
            section,
            lambda pattern, m: times(section.speedup(pattern, m, provider)),
            [(f"{name} us", latency(name)) for name in lead],
            ("N/(N-1)", bound),
        )

    if not section.baselines:
        return ["No dense latency is complete here, so there is no speed-up."]
    parts = []
    for provider in section.baselines:
        lead = section.baselines if provider == section.baselines[0] else [provider]
        parts += [f"Speed-up over {PROVIDERS.get(provider, f'dense {provider}')}:", over(provider, lead)]
    return parts


def share(section: Section) -> list[str]:
    """A table of speed-ups as shares of the bound; nothing where there is none."""
    return _relative(
        section,
        section.share_of_bound,
        "Speed-up over dense cuBLASLt as a share of the bound N/(N-1), which sparse tensor cores of twice the dense "
        "rate set:",
    )


def efficiency(section: Section) -> list[str]:
    """A table of the algorithmic efficiency; nothing where there is none."""
    return _relative(
        section,
        section.efficiency,
        "Algorithmic efficiency, (S / S of 2:4) / R with S the speed-up over dense cuBLASLt and "
        "R = density of 2:4 / density (arXiv 2603.05232, appendix D.5). Above 100%: 2:4 itself stays further below "
        "its bound:",
    )


def _relative(section: Section, value: Callable[[SlidePattern, int], float | None], title: str) -> list[str]:
    """A table of percentages, or nothing where there is none."""
    if not any(value(pattern, m) for pattern in section.patterns for m in section.ms):
        return []
    return [title, grid(section, lambda pattern, m: percent(value(pattern, m)))]


def _floor(section: Section, ceilings: Ceilings) -> list[str]:
    if all(section.floor(None, m, ceilings) is None for m in section.ms):
        return []
    rate = ceilings.peak.get(section.dtype)
    compute = f"the longer of the multiplications at {rate:g} TFLOPS dense and of " if rate else ""
    return [
        f"Physical floor in us, layer after layer: {compute}all operands read and a 16-bit result written once, at the "
        f"{ceilings.copy:g} GB/s of a copy. What a run finds in the L2 cache can be faster:",
        grid(
            section,
            lambda pattern, m: microseconds(section.floor(pattern, m, ceilings)),
            [("dense", lambda m: microseconds(section.floor(None, m, ceilings)))],
        ),
    ]
