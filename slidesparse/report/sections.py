"""Latencies of one subject at one dtype, and what follows from them: speed-ups, efficiency, the physical floor."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from slidesparse.pattern import HARDWARE_LENGTH, HARDWARE_NONZEROS, SlidePattern
from slidesparse.report.data import (
    DENSE,
    LAYERS,
    MODEL,
    OURS,
    SPARSE,
    SQUARE,
    SUM,
    Measurement,
    ReportError,
    Results,
    pattern_name,
    pattern_order,
)

T = TypeVar("T")
Key = tuple[str, "SlidePattern | None", int]  # provider, pattern (None: dense), M
TWO_FOUR = SlidePattern(HARDWARE_LENGTH)
ELEMENT_BYTES = {"int8": 1, "fp8": 1, "fp16": 2, "bf16": 2}
RESULT_BYTES = 2  # BF16 or FP16, what serving writes
METADATA_BYTES = 0.25  # 2 bits for each weight that 2:4 keeps, its place among four


@dataclass(frozen=True)
class Section:
    """Square products, or the four layers of a model together, at one dtype."""

    title: str
    dtype: str
    us: Mapping[Key, float]  # median latency
    mode: str = MODEL
    absent: tuple[str, ...] = ()  # what others have at this dtype and this one does not, in words
    shapes: tuple[tuple[int, int, int], ...] = ()  # (M or 0 for any M, N, K) of the products
    ours: str = SPARSE  # the sparse provider

    @property
    def ms(self) -> list[int]:
        """Every M with a measurement, ascending."""
        return sorted({m for _, _, m in self.us})

    @property
    def patterns(self) -> list[SlidePattern]:
        """Those of our provider, sparsest first."""
        found = {pattern for provider, pattern, _ in self.us if provider == self.ours and pattern is not None}
        return sorted(found, key=pattern_order)

    @property
    def baselines(self) -> list[str]:
        """Dense providers, cuBLASLt first."""
        found = {provider for provider, pattern, _ in self.us if pattern is None}
        return sorted(found, key=lambda name: (name != DENSE, name))

    def speedup(self, pattern: SlidePattern, m: int, over: str = DENSE) -> float | None:
        """Dense latency of ``over`` / ours; None unless both were measured."""
        ours, dense = self.us.get((self.ours, pattern, m)), self.us.get((over, None, m))
        return dense / ours if ours and dense else None

    def share_of_bound(self, pattern: SlidePattern, m: int) -> float | None:
        """Speed-up over cuBLASLt / (N/(N-1)): 1 where nothing is lost."""
        found = self.speedup(pattern, m)
        return None if found is None else found / float(pattern.speedup_bound)

    def efficiency(self, pattern: SlidePattern, m: int) -> float | None:
        """Algorithmic efficiency (S_pattern / S_2:4) / R_theory, R_theory = density(2:4) / density(pattern).

        Equations 18 and 19 of arXiv 2603.05232, appendix D.5; S is the speed-up over cuBLASLt.
        """
        ours, native = self.speedup(pattern, m), self.speedup(TWO_FOUR, m)
        if ours is None or native is None:
            return None
        return ours / native / float(TWO_FOUR.density / pattern.density)

    def floor(self, pattern: SlidePattern | None, m: int, ceilings: Ceilings) -> float | None:
        """Microseconds that the machine needs at least, layer after layer; None where shapes or dtype are not known."""
        shapes = [(n, k) for at, n, k in self.shapes if at in (0, m)]
        if not shapes or self.dtype not in ELEMENT_BYTES:
            return None
        return sum(ceilings.floor(self.dtype, pattern, m, n, k) for n, k in shapes)


@dataclass(frozen=True)
class Ceilings:
    """What this machine was measured to do at most."""

    copy: float  # GB/s
    peak: Mapping[str, float]  # TFLOPS or TOPS of dense products, by dtype; may be empty

    @classmethod
    def of(cls, conditions: Mapping[str, Any]) -> Ceilings | None:
        """From ``copy_GBps`` (a number) and ``peak_TFLOPS`` (an object by dtype); None without the former."""
        copy, peak = conditions.get("copy_GBps"), conditions.get("peak_TFLOPS", {})
        if copy is None:
            return None
        numbers = [copy, *peak.values()] if isinstance(peak, dict) else []
        if not numbers or not all(isinstance(number, int | float) and number > 0 for number in numbers):
            raise ReportError(
                f"copy_GBps is {copy!r} and peak_TFLOPS {peak!r}; "
                "allowed: a number above 0, and an object of such numbers by dtype"
            )
        return cls(float(copy), {dtype.lower(): float(rate) for dtype, rate in peak.items()})

    def floor(self, dtype: str, pattern: SlidePattern | None, m: int, n: int, k: int) -> float:
        """max(2 M N K / peak, bytes / bandwidth) in microseconds, of one product with a 16-bit result.

        A pattern multiplies its non-zeros only, at the dense rate; activations [M, K'], the values [N, K'/2] and
        their places are read once, the result [M, N] is written once.
        """
        size = ELEMENT_BYTES[dtype]
        density = 1.0 if pattern is None else float(pattern.density)
        slided = k if pattern is None else pattern.layout(k).slided
        kept = k if pattern is None else slided * HARDWARE_NONZEROS // HARDWARE_LENGTH
        places = 0.0 if pattern is None else n * kept * METADATA_BYTES
        moved = (m * slided + n * kept) * size + places + m * n * RESULT_BYTES
        rate = self.peak.get(dtype)
        compute = 2 * m * n * k * density / (rate * 1e6) if rate else 0.0
        return max(compute, moved / (self.copy * 1e3))


def by_provider(keys: Iterable[Key], usual: str = SPARSE) -> list[str]:
    """Our sparse providers that are among ``keys``, the ``usual`` one first, and it when there is none."""
    found = {provider for provider, pattern, _ in keys if pattern is not None}
    return [name for name in dict.fromkeys((usual, *OURS)) if name in found] or [usual]


def beside_dense(us: Mapping[Key, T], ours: str) -> dict[Key, T]:
    """The cells of dense providers and of our provider ``ours``."""
    return {key: value for key, value in us.items() if key[1] is None or key[0] == ours}


def named(title: str, ours: str, usual: str = SPARSE) -> str:
    """The title of a section, with the provider where that is not the ``usual`` one of its page."""
    return title if ours == usual else f"{title}, {ours}"


def _each(
    title: str,
    dtype: str,
    us: Mapping[Key, float],
    mode: str = MODEL,
    wanted: Iterable[Key] | None = None,
    partial: Mapping[Key, str] | None = None,
    shapes: tuple[tuple[int, int, int], ...] = (),
) -> list[Section]:
    """A section for each of our sparse providers, beside the dense ones; ``wanted`` are the cells that others have."""
    whole = dict.fromkeys(us if wanted is None else wanted, 0.0)
    sections = []
    for ours in by_provider(us):
        absent = absent_cells(beside_dense(whole, ours), us, partial)
        sections.append(
            Section(named(title, ours), dtype, beside_dense(us, ours), mode, absent, shapes, ours)
        )
    return sections


def square_sections(results: Results) -> list[Section]:
    """One for each dtype of the square products, and sparse provider."""
    sections = []
    for dtype in results.dtypes(SQUARE):
        rows = [row for row in results.rows if row.mode == SQUARE and row.dtype == dtype]
        us = {(row.provider, row.pattern, row.m): row.p50 for row in rows}
        shapes = tuple(sorted({(row.m, row.n, row.k) for row in rows}))
        sections += _each("Square, M = N = K", dtype, us, SQUARE, shapes=shapes)
    return sections


def model_sections(results: Results) -> list[Section]:
    """One for each model, dtype and sparse provider, its four layers summed; a sum only where all four were measured.

    The layers of a model are those that occur anywhere in the file.  Where they are not four (a list of shapes, or a
    run that stopped early) nothing can be summed, and each layer is a section.
    """
    layers: dict[str, dict[str, tuple[int, int]]] = defaultdict(dict)
    for row in results.rows:
        if row.mode == MODEL:
            layers[row.model][row.layer] = (row.n, row.k)
    sections = []
    for dtype in results.dtypes(MODEL):
        rows = [row for row in results.rows if row.mode == MODEL and row.dtype == dtype]
        keys = {(row.provider, row.pattern, row.m) for row in rows}
        for model, layers_of in sorted(layers.items()):
            of_model = [row for row in rows if row.model == model]
            if len(layers_of) == LAYERS:
                us, partial = _sums(of_model, set(layers_of))
                shapes = tuple((0, *shape) for shape in layers_of.values())
                sections += _each(model, dtype, us, MODEL, keys, partial, shapes)
                continue
            for layer, shape in layers_of.items():
                us = {(row.provider, row.pattern, row.m): row.p50 for row in of_model if row.layer == layer}
                title = f"{model} {layer}".strip()
                sections += _each(title, dtype, us, MODEL, keys, shapes=((0, *shape),))
    return sections


def linear_sections(results: Results) -> list[Section]:
    """One for each model, dtype and sparse provider of ``linear.csv``: its layer ``sum``, as the benchmark wrote it."""
    sections = []
    for dtype in results.dtypes(MODEL):
        rows = [row for row in results.rows if row.dtype == dtype]
        keys = {(row.provider, row.pattern, row.m) for row in rows}
        for model in sorted({row.model for row in rows}):
            summed = (row for row in rows if row.model == model and row.layer == SUM)
            us = {(row.provider, row.pattern, row.m): row.p50 for row in summed}
            sections += _each(model, dtype, us, MODEL, keys)
    return sections


def _sums(rows: Iterable[Measurement], layers: set[str]) -> tuple[dict[Key, float], dict[Key, str]]:
    """Latencies summed where all of four ``layers`` are there, and what is missing elsewhere."""
    found: dict[Key, dict[str, float]] = defaultdict(dict)
    for row in rows:
        found[row.provider, row.pattern, row.m][row.layer] = row.p50
    sums, partial = {}, {}
    for key, by_layer in found.items():
        if len(by_layer) == LAYERS:
            sums[key] = sum(by_layer.values())
        else:
            lacking = sorted(layers - set(by_layer))
            without = f", without {', '.join(lacking)}" if lacking else ""
            partial[key] = f"{len(by_layer)} of {LAYERS} layers{without}"
    return sums, partial


def absent_cells(
    wanted: Iterable[Key], us: Mapping[Key, float], why: Mapping[Key, str] | None = None
) -> tuple[str, ...]:
    """Cells of the grid (each provider and pattern, each M, of ``wanted``) that ``us`` lacks, in words."""
    wanted = set(wanted)
    alike: dict[str, list[str]] = defaultdict(list)  # providers and patterns that lack the same
    for provider, pattern in sorted({key[:2] for key in wanted}, key=lambda c: (c[0], pattern_order(c[1]))):
        lacking: dict[str, list[int]] = defaultdict(list)
        for m in sorted({m for _, _, m in wanted}):
            if (provider, pattern, m) not in us:
                lacking[(why or {}).get((provider, pattern, m), "not measured")].append(m)
        if lacking:
            where = "; ".join(f"{reason} at M {', '.join(map(str, ms))}" for reason, ms in lacking.items())
            alike[where].append(f"{provider} {pattern_name(pattern)}")
    return tuple(f"{', '.join(names)}: {where}" for where, names in alike.items())
