"""GEMM alone: dense cuBLASLt, the sparse libraries at each pattern and dense, and vLLM's own kernel, side by side.

Every sparse library uses its best algorithm, searched for each shape and M; cuBLASLt the one that torch chooses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from operator import itemgetter

import torch
from torch import Tensor

from benchmarks.measure import Gauge, Job, take_turns
from benchmarks.records import Row
from benchmarks.stock import Stock
from slidesparse.gemm.cuda import CudaBackend
from slidesparse.gemm.problem import ALL_2_4, Problem
from slidesparse.pattern import round_up
from slidesparse.tune.inputs import clones
from slidesparse.tune.machine import SERVED_DTYPES
from slidesparse.tune.measure import Launch
from slidesparse.tune.search import gemm_contest, search
from slidesparse.tune.session import Session
from slidesparse.tune.shapes import Layer, packed_columns

DENSE, STOCK, SQUARE, MODEL = "dense", "stock", "square", "model"
STOCK_ALIGNMENT = 16  # of N and K in vLLM's CUTLASS kernels


@dataclass(frozen=True)
class Group:
    """One layer in one type, at several token counts."""

    mode: str  # SQUARE or MODEL
    model: str
    layer: Layer
    dtype: str
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Cell:
    """One provider's GEMM for a layer; patterns with the same columns share one."""

    provider: str
    patterns: tuple[str, ...]
    k: int  # columns of the weight, K' if slided
    out: str
    scale: str
    library: CudaBackend | None = field(compare=False)  # None: vLLM's kernel
    blocks: str = ALL_2_4  # of the packed weight

    @property
    def dense_in_blocks(self) -> bool:
        """Whether a sparse library multiplies a weight without a pattern."""
        return self.library is not None and self.library.sparse and self.patterns == (DENSE,)

    def problem(self, dtype: str, n: int, m: int) -> Problem:
        """The problem at ``m`` tokens."""
        return Problem(dtype, self.out, n, self.k, m, self.scale, blocks=self.blocks)


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
        Group(MODEL, name, layer, dtype, tuple(tokens))
        for name, layers in models
        for dtype in dtypes
        for layer in layers
    ]


def cells(
    layer: Layer, dtype: str, patterns: Sequence[str], libraries: Sequence[CudaBackend], stock: Stock | None
) -> list[Cell]:
    """Return the cells to measure for a layer."""
    planned: list[Cell] = []
    for library in libraries:
        outs = library.products.get(dtype, ())
        if not outs:
            continue
        scale = library.epilogue(dtype, outs[0])
        if library.sparse:
            by_columns: dict[tuple[int, str], list[str]] = {}
            for pattern in patterns:
                columns = packed_columns(layer.k, pattern, library.alignment, library.coded)
                by_columns.setdefault(columns, []).append(pattern)
            planned += [
                Cell(library.name, tuple(names), k, outs[0], scale, library, blocks)
                for (k, blocks), names in by_columns.items()
            ]
            if not library.takes_dense:
                continue
        k = round_up(layer.k, library.alignment)
        planned.append(Cell(library.name, (DENSE,), k, outs[0], scale, library))
    if stock and dtype in SERVED_DTYPES and not (layer.n % STOCK_ALIGNMENT or layer.k % STOCK_ALIGNMENT):
        planned.append(Cell(STOCK, (DENSE,), layer.k, "bf16", "both", None))
    return planned


def jobs(
    session: Session,
    gauge: Gauge,
    groups: Sequence[Group],
    libraries: Sequence[CudaBackend],
    stock: Stock | None,
    patterns: Sequence[str],
) -> Iterator[Job]:
    """Yield a job for each layer, type and number of tokens; a group's weights are packed once, when first needed."""
    for group in groups:
        planned = cells(group.layer, group.dtype, patterns, libraries, stock)
        weights = cache(partial(_weights, session, group))
        for m in group.tokens:
            keys = [_row(group, cell, pattern, m) for cell in planned for pattern in cell.patterns]
            measure = partial(_measure, session, gauge, stock, group, planned, weights, m)
            yield Job(f"{group.model} {group.layer.name} {group.dtype} M={m}", keys, measure)
        weights.cache_clear()
        torch.cuda.empty_cache()  # memory that deleted graphs leave reserved


def _measure(
    session: Session,
    gauge: Gauge,
    stock: Stock | None,
    group: Group,
    planned: Sequence[Cell],
    weights: Callable[[Cell], list[Tensor]],
    m: int,
) -> list[Row]:
    """Return the values of each pattern of each cell; none where a library refuses."""
    prepared: dict[Cell, tuple[str, tuple[Launch, int]]] = {}
    for cell in planned:
        problem = cell.problem(group.dtype, group.layer.n, m)
        try:
            prepared[cell] = _prepare(session, stock, cell, problem, weights(cell))
        except RuntimeError as error:  # a LibraryError, or torch's
            session.skipped.append(f"{cell.provider}: {error}")
    figures = take_turns(gauge, [launch for _, launch in prepared.values()])
    rows: dict[Cell, Row] = {}
    for (cell, (algorithm, _)), found in zip(prepared.items(), figures, strict=True):
        label = algorithm if found.timing.graphed else f"{algorithm} (no graph)"
        rows[cell] = found.row | {"algorithm": label}
    return [rows.get(cell, {}) for cell in planned for _ in cell.patterns]


def _prepare(
    session: Session, stock: Stock | None, cell: Cell, problem: Problem, weights: list[Tensor]
) -> tuple[str, tuple[Launch, int]]:
    """Return the fastest algorithm, and its launch with the number of copies.  Raises LibraryError."""
    if cell.library is None:
        assert stock
        operands = session.inputs.operands(problem, weights)
        return "cutlass", (stock.gemm(operands), len(operands.outs))
    found = []
    # A dense library: the faster of scaling in the epilogue and not
    for scale in dict.fromkeys((problem.scale, problem.scale if cell.library.sparse else "none")):
        problem = replace(problem, scale=scale)
        operands = session.inputs.operands(problem, weights)
        contest = gemm_contest(cell.library, problem, operands, session.gpu.device)
        result = search(contest, session.clock)
        found.append((result.timing.p50, result.algorithm, problem, operands))
    _, algorithm, problem, operands = min(found, key=itemgetter(0))
    plan = cell.library.plan(problem, session.gpu.device, algorithm)
    return algorithm, (operands.launch(plan), len(operands.outs))


def _weights(session: Session, group: Group, cell: Cell) -> list[Tensor]:
    """Return a random weight, packed, in as many copies as the fewest tokens need."""
    inputs = session.inputs
    problem = cell.problem(group.dtype, group.layer.n, min(group.tokens))
    copies = inputs.copies(problem)
    if cell.library and not cell.dense_in_blocks:
        return inputs.packed(cell.library, problem, copies)
    weight = inputs.weight(problem.dtype, problem.n, problem.k, sparse=False)
    if cell.library:
        weight = cell.library.pack(weight, None)
    return clones(weight, copies)


def _row(group: Group, cell: Cell, pattern: str, m: int) -> Row:
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
