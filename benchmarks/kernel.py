"""GEMM alone: dense cuBLASLt, the sparse libraries at each pattern and dense, and vLLM's own kernel, side by side.

Every library uses its best algorithm, searched for each shape and M.  All providers of one shape and M are measured one
after the other in one run, under the same clocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.records import KERNEL, Records
from benchmarks.stock import Stock
from benchmarks.timing import label_algorithm, percentiles, rest, time_exactly
from slidesparse.gemm.backend import Tunable
from slidesparse.gemm.problem import DTYPES, LibraryError, Problem
from slidesparse.pattern import round_up
from slidesparse.tune.inputs import clones
from slidesparse.tune.machine import SERVED_DTYPES
from slidesparse.tune.measure import Timing
from slidesparse.tune.search import search
from slidesparse.tune.session import Session
from slidesparse.tune.shapes import Layer, slided_columns

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
    """One provider's GEMM for a layer; patterns with the same K' share one."""

    provider: str
    patterns: tuple[str, ...]
    k: int  # columns of the weight, K' if slided
    out: str
    scale: str
    library: Tunable | None  # None: vLLM's kernel

    @property
    def dense_in_blocks(self) -> bool:
        """Whether a sparse library multiplies a weight without a pattern."""
        return self.library is not None and self.library.sparse and self.patterns == (DENSE,)

    def problem(self, dtype: str, n: int, m: int) -> Problem:
        """The problem at ``m`` tokens."""
        return Problem(dtype, self.out, n, self.k, m, self.scale)


def square_groups(dtypes: Sequence[str], tokens: Sequence[int]) -> list[Group]:
    """Square GEMMs, M = N = K."""
    return [
        Group(SQUARE, SQUARE, Layer(SQUARE, size, size), dtype, (size,))
        for dtype in dtypes
        for size in tokens
    ]


def model_groups(
    models: Sequence[tuple[str, tuple[Layer, ...]]], dtypes: Sequence[str], tokens: Sequence[int]
) -> list[Group]:
    """Model by model and type by type, so that sums over layers are complete early."""
    return [
        Group("model", name, layer, dtype, tuple(tokens))
        for name, layers in models
        for dtype in dtypes
        for layer in layers
    ]


def cells(
    layer: Layer, dtype: str, patterns: Sequence[str], libraries: Sequence[Tunable], stock: Stock | None
) -> list[Cell]:
    """Return the cells to measure for a layer."""
    planned: list[Cell] = []
    for library in libraries:
        outs = library.output_types(dtype)
        if not outs:
            continue
        scale = library.epilogue(dtype, outs[0])
        if library.sparse:
            planned += [
                Cell(library.name, names, k, outs[0], scale, library)
                for k, names in _patterns_by_columns(layer.k, patterns, library.alignment).items()
            ]
            if not library.takes_dense:
                continue
        k = round_up(layer.k, library.alignment)
        planned.append(Cell(library.name, (DENSE,), k, outs[0], scale, library))
        if dtype == "int8" and "int8" in outs[1:]:
            scale = library.epilogue(dtype, "int8")
            planned.append(Cell(f"{library.name}-int8", (DENSE,), k, "int8", scale, library))
    if stock and dtype in SERVED_DTYPES and not (layer.n % STOCK_ALIGNMENT or layer.k % STOCK_ALIGNMENT):
        planned.append(Cell("stock", (DENSE,), layer.k, "bf16", "both", None))
    return planned


def _patterns_by_columns(k: int, patterns: Sequence[str], alignment: int) -> dict[int, tuple[str, ...]]:
    """Return the patterns that have each K'."""
    by_columns: dict[int, tuple[str, ...]] = {}
    for pattern in patterns:
        columns = slided_columns(k, pattern, alignment)
        by_columns[columns] = (*by_columns.get(columns, ()), pattern)
    return by_columns


class KernelBench:
    """Fills FOLDER/kernel.csv."""

    def __init__(
        self,
        session: Session,
        folder: Path,
        groups: Sequence[Group],
        libraries: Sequence[Tunable],
        stock: Stock | None,
        patterns: Sequence[str],
    ) -> None:
        self._session, self._groups = session, groups
        self._cells = {group: cells(group.layer, group.dtype, patterns, libraries, stock) for group in groups}
        self._stock = stock
        self.records = Records(folder, KERNEL)
        self.count = sum(len(self._cells[group]) * len(group.tokens) for group in groups)

    def run(self) -> bool:
        """Measure what is not in the table.  False when the time was up before the end."""
        try:
            return all(self._run(group) for group in self._groups)
        finally:
            self._session.winners.flush()

    def _run(self, group: Group) -> bool:
        weights = _Weights(self._session, group)
        for m in group.tokens:
            for cell in self._cells[group]:
                rows = [_row(group, cell, pattern, m) for pattern in cell.patterns]
                missing = [row for row in rows if not self.records.has(row)]
                if missing:
                    if self._session.deadline.passed:
                        return False
                    self._measure(group, cell, m, missing, weights)
                self._session.advance(f"{group.model} {group.layer.name} {group.dtype} M={m}")
        torch.cuda.empty_cache()
        return True

    def _measure(
        self, group: Group, cell: Cell, m: int, missing: Sequence[dict[str, object]], weights: _Weights
    ) -> None:
        problem = cell.problem(group.dtype, group.layer.n, m)
        try:
            timing, algorithm = self._time(cell, problem, weights.of(cell))
        except LibraryError as error:
            self._session.skipped.append(f"{cell.provider}: {error}")
            return
        for row in missing:
            self.records.add(row | percentiles(timing) | {"algorithm": algorithm})

    def _time(self, cell: Cell, problem: Problem, weights: list[Tensor]) -> tuple[Timing, str]:
        if cell.library and cell.dense_in_blocks:  # not saved: serving uses the winner for 2:4
            operands = self._session.inputs.operands(problem, weights)
            winner = search(cell.library, problem, operands, self._session.clock, self._session.gpu.device)
            return winner.timing, label_algorithm(winner.algorithm, winner.timing)
        if cell.library:
            # dense: the faster of scaling in the epilogue and not
            scales = dict.fromkeys((problem.scale, problem.scale if cell.library.sparse else "none"))
            searches = [
                self._session.search(cell.library, replace(problem, scale=scale), weights) for scale in scales
            ]
            winner = min(searches, key=lambda result: result.timing.p50)
            return winner.timing, label_algorithm(winner.algorithm, winner.timing)
        assert self._stock
        operands = self._session.inputs.operands(problem, weights)
        timing = time_exactly(self._session.clock, self._stock.gemm(operands), operands.copies)
        return timing, label_algorithm("cutlass", timing)


class _Weights:
    """A group's packed weights, made once for all its token counts, on first use."""

    def __init__(self, session: Session, group: Group) -> None:
        self._session, self._group = session, group
        self._made: dict[tuple[str, int, bool], list[Tensor]] = {}

    def of(self, cell: Cell) -> list[Tensor]:
        name = cell.library.name if cell.library else cell.provider
        key = (name, cell.k, cell.dense_in_blocks)
        if not self._made:
            rest()  # after the group before
        if key not in self._made:
            self._made[key] = self._make(cell)
        return self._made[key]

    def _make(self, cell: Cell) -> list[Tensor]:
        inputs, group = self._session.inputs, self._group
        problem = cell.problem(group.dtype, group.layer.n, min(group.tokens))
        copies = inputs.copies(problem)  # fewer tokens need more copies
        if cell.library and not cell.dense_in_blocks:
            return inputs.packed(cell.library, problem, copies)
        weight = inputs.weight(problem.dtype, problem.n, problem.k, sparse=False)
        if cell.library:
            weight = cell.library.pack(weight, None)
        return clones(weight, copies)


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
