"""GEMM alone: dense cuBLASLt, the sparse libraries at each pattern, and vLLM's own kernel, side by side.

Every library is given its best algorithm, searched for each shape and M.  All providers of one shape and M are
measured one after the other in one run, so that they meet the same clocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from slidesparse.bench.machine import SERVED, outputs
from slidesparse.bench.measure import Timing, exact
from slidesparse.bench.records import Records
from slidesparse.bench.search import labelled
from slidesparse.bench.session import Session, free
from slidesparse.bench.shapes import Layer, round_up, slided
from slidesparse.bench.stock import Stock
from slidesparse.gemm.library import Library, LibraryError, Problem

KEY = ("mode", "model", "layer", "dtype", "pattern", "M", "N", "K", "provider")
COLUMNS = (*KEY, "p20_us", "p50_us", "p80_us", "algorithm")
DTYPES = ("int8", "fp8", "fp16", "bf16")
DENSE = "dense"
SQUARE = "square"
STOCK_ALIGNMENT = 16  # of N and K in vLLM's CUTLASS kernels


@dataclass(frozen=True)
class Group:
    """One layer in one type, at several token counts."""

    mode: str  # "square" or "model"
    model: str
    layer: Layer
    dtype: str
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Cell:
    """One provider's product for a layer; several patterns share one when their K' is the same."""

    provider: str
    patterns: tuple[str, ...]
    k: int  # columns that are multiplied, K' for slided weights
    out: str
    scale: str
    library: Library | None  # None: vLLM's kernel

    def problem(self, dtype: str, n: int, m: int) -> Problem:
        """At a number of tokens."""
        return Problem(dtype, self.out, n, self.k, m, self.scale)


def square_groups(dtypes: Sequence[str], tokens: Sequence[int]) -> list[Group]:
    """M = N = K."""
    return [
        Group(SQUARE, SQUARE, Layer(SQUARE, size, size), dtype, (size,))
        for dtype in dtypes
        for size in tokens
    ]


def model_groups(
    models: Sequence[tuple[str, tuple[Layer, ...]]], dtypes: Sequence[str], tokens: Sequence[int]
) -> list[Group]:
    """Model after model, type after type, so that sums over layers are complete early."""
    return [
        Group("model", name, layer, dtype, tuple(tokens))
        for name, layers in models
        for dtype in dtypes
        for layer in layers
    ]


def cells(
    layer: Layer, dtype: str, patterns: Sequence[str], libraries: Sequence[Library], stock: Stock | None
) -> list[Cell]:
    """What there is to measure for a layer."""
    found: list[Cell] = []
    for library in libraries:
        outs = outputs(library, dtype)
        if not outs:
            continue
        scale = library.epilogue(dtype, outs[0])
        if library.sparse:
            found += [
                Cell(library.name, names, k, outs[0], scale, library)
                for k, names in _by_columns(layer.k, patterns, library.alignment).items()
            ]
            continue
        k = round_up(layer.k, library.alignment)
        found.append(Cell(library.name, (DENSE,), k, outs[0], scale, library))
        if dtype == "int8" and "int8" in outs[1:]:
            scale = library.epilogue(dtype, "int8")
            found.append(Cell(f"{library.name}-int8", (DENSE,), k, "int8", scale, library))
    if stock and dtype in SERVED and not (layer.n % STOCK_ALIGNMENT or layer.k % STOCK_ALIGNMENT):
        found.append(Cell("stock", (DENSE,), layer.k, "bf16", "both", None))
    return found


def _by_columns(k: int, patterns: Sequence[str], alignment: int) -> dict[int, tuple[str, ...]]:
    """K' -> the patterns that have it."""
    found: dict[int, tuple[str, ...]] = {}
    for pattern in patterns:
        columns = slided(k, pattern, alignment)
        found[columns] = (*found.get(columns, ()), pattern)
    return found


class KernelBench:
    """Fills FOLDER/kernel.csv."""

    def __init__(
        self,
        session: Session,
        libraries: Sequence[Library],
        stock: Stock | None,
        patterns: Sequence[str],
        folder: Path,
    ) -> None:
        self._session, self._libraries, self._stock = session, libraries, stock
        self._patterns = patterns
        self.records = Records(folder / "kernel.csv", COLUMNS, KEY)

    def count(self, groups: Sequence[Group]) -> int:
        """How many cells there are, those that are measured already included."""
        return sum(len(self._cells(group)) * len(group.tokens) for group in groups)

    def _cells(self, group: Group) -> list[Cell]:
        return cells(group.layer, group.dtype, self._patterns, self._libraries, self._stock)

    def run(self, groups: Sequence[Group]) -> bool:
        """Measure what is not in the table.  False when the time was up before the end."""
        try:
            return all(self._run(group) for group in groups)
        finally:
            self._session.winners.flush()

    def _run(self, group: Group) -> bool:
        found, weights = self._cells(group), _Weights(self._session, group)
        for m in group.tokens:
            for cell in found:
                missing = [pattern for pattern in cell.patterns if not self._has(group, cell, pattern, m)]
                if missing:
                    if self._session.deadline.passed:
                        return False
                    self._measure(group, cell, m, missing, weights)
                self._session.advance(f"{group.model} {group.layer.name} {group.dtype} M={m}")
        free(self._session.gpu)
        return True

    def _has(self, group: Group, cell: Cell, pattern: str, m: int) -> bool:
        return self.records.has(**_row(group, cell, pattern, m))

    def _measure(self, group: Group, cell: Cell, m: int, missing: Sequence[str], weights: _Weights) -> None:
        problem = cell.problem(group.dtype, group.layer.n, m)
        try:
            timing, algorithm = self._time(cell, problem, weights.of(cell))
        except LibraryError as error:
            self._session.skipped.append(f"{cell.provider}: {error}")
            return
        figures = {"p20_us": timing.p20, "p50_us": timing.p50, "p80_us": timing.p80}
        for pattern in missing:
            self.records.add(_row(group, cell, pattern, m) | figures | {"algorithm": algorithm})

    def _time(self, cell: Cell, problem: Problem, weights: list[Tensor]) -> tuple[Timing, str]:
        if cell.library:
            # dense: the faster of scaling in the epilogue and not
            scales = dict.fromkeys((problem.scale, problem.scale if cell.library.sparse else "none"))
            searches = [
                self._session.search(cell.library, replace(problem, scale=one), weights) for one in scales
            ]
            found = min(searches, key=lambda one: one.timing.p50)
            return found.timing, found.label
        assert self._stock
        rotation = self._session.inputs.rotation(problem, weights)
        timing = exact(self._session.clock, self._stock.gemm(rotation), rotation.copies)
        return timing, labelled("cutlass", timing)

    def peaks(self) -> dict[str, float]:
        """The highest rate of dense products in the table, in TFLOPS (TOPS), by operand type."""
        found: dict[str, float] = {}
        for row in self.records.rows:
            if row["pattern"] == DENSE:
                work = 2.0 * int(row["M"]) * int(row["N"]) * int(row["K"])
                rate = round(work / float(row["p50_us"]) / 1e6, 1)
                found[row["dtype"]] = max(rate, found.get(row["dtype"], 0.0))
        return found


class _Weights:
    """A group's packed weights, made once for all its token counts, when first asked for."""

    def __init__(self, session: Session, group: Group) -> None:
        self._session, self._group = session, group
        self._made: dict[tuple[str, int], list[Tensor]] = {}

    def of(self, cell: Cell) -> list[Tensor]:
        key = (cell.library.name if cell.library else cell.provider, cell.k)
        if key not in self._made:
            self._made[key] = self._make(cell)
        return self._made[key]

    def _make(self, cell: Cell) -> list[Tensor]:
        inputs, group = self._session.inputs, self._group
        problem = cell.problem(group.dtype, group.layer.n, min(group.tokens))
        copies = inputs.copies(problem)  # fewer tokens need more copies
        if cell.library:
            return inputs.packed(cell.library, problem, copies)
        weight = inputs.weight(problem.dtype, problem.n, problem.k, sparse=False)
        return [weight, *(weight.clone() for _ in range(copies - 1))]


def _row(group: Group, cell: Cell, pattern: str, m: int) -> dict[str, object]:
    return {
        "mode": group.mode,
        "model": group.model,
        "layer": group.layer.name,
        "dtype": group.dtype,
        "pattern": pattern,
        "M": m,
        "N": group.layer.n,
        "K": group.layer.k,
        "provider": cell.provider,
    }
