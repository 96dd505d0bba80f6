"""The linear layers of a model's block in a row, from bfloat16 to bfloat16, with what stands between them.

SlideSparse's kernels begin while the ones before them still run, and take norms and activations into the
quantization, so what a layer costs shows among its neighbours (`slidesparse.tune.block`).  Layers run by the operators
that serve, with the algorithms in the tuned tables; vLLM's, in INT8, are its own kernels.  In FP8, where its compiler
fuses norms and activations with the quantization, whole models show what it takes (`benchmarks.e2e`).  Everything
allocates memory as in serving and runs in CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import cast

import torch

from benchmarks.kernel import DENSE, STOCK, STOCK_ALIGNMENT
from benchmarks.measure import Gauge, Job, take_turns
from benchmarks.records import Row
from benchmarks.stock import Stock, StockBlock, find
from slidesparse.gemm.cuda import CudaBackend
from slidesparse.gemm.hopper.backend import Hopper
from slidesparse.pattern import parse_pattern
from slidesparse.tune.block import Block, block_problems
from slidesparse.tune.measure import Launch
from slidesparse.tune.session import Session
from slidesparse.tune.shapes import Layer


@dataclass(frozen=True)
class Group:
    """The layers of a block in one type, at several token counts."""

    model: str
    layers: tuple[Layer, ...]
    dtype: str
    tokens: tuple[int, ...]

    @property
    def name(self) -> str:
        """The names of the layers, such as ``qkv+o+gate_up+down``."""
        return "+".join(layer.name for layer in self.layers)


@dataclass(frozen=True)
class Provider:
    """A way to run a block."""

    name: str
    pattern: str
    make: Callable[[], Block | StockBlock]  # with packed weights.  Raises LibraryError


def model_groups(
    models: Sequence[tuple[str, tuple[Layer, ...]]], dtypes: Sequence[str], tokens: Sequence[int]
) -> list[Group]:
    """Model by model and type by type."""
    return [Group(name, layers, dtype, tuple(tokens)) for name, layers in models for dtype in dtypes]


def providers(
    session: Session,
    group: Group,
    patterns: Sequence[str],
    libraries: Sequence[CudaBackend],
    stock: Stock | None,
) -> list[Provider]:
    """vLLM first, then each library: dense weights if it takes them, and each pattern if it is sparse."""
    planned, layers, inputs = [], group.layers, session.inputs
    if stock and group.dtype != "int8":
        session.skipped.append(
            f"{STOCK}: its compiler fuses {group.dtype} quantization; whole models show it"
        )
    elif stock and any(layer.n % STOCK_ALIGNMENT or layer.k % STOCK_ALIGNMENT for layer in layers):
        session.skipped.append(f"{STOCK}: not all sizes of {group.name} are multiples of {STOCK_ALIGNMENT}")
    elif stock:
        planned.append(Provider(STOCK, DENSE, partial(StockBlock, stock, layers, group.dtype, inputs)))
    for library in libraries:
        taken = [DENSE] if library.takes_dense else []
        taken += [pattern for pattern in patterns if library.sparse and pattern != DENSE]
        for name in taken:
            pattern = parse_pattern(name)
            problems = block_problems(library, layers, group.dtype, library.products[group.dtype][0], pattern)
            if problems and library.fuses:
                make: Callable[[], Block | StockBlock] = partial(
                    Block, cast("Hopper", library), layers, problems, pattern, inputs
                )
                planned.append(Provider(library.name, name, make))
            elif problems and (kernels := stock or find()):
                make = partial(StockBlock, kernels, layers, group.dtype, inputs, library, problems, pattern)
                planned.append(Provider(library.name, name, make))
            elif problems:
                session.skipped.append(
                    f"{library.name}: norms and activations between its layers are vLLM's, which is not installed"
                )
    return planned


def jobs(
    session: Session,
    gauge: Gauge,
    groups: Sequence[Group],
    libraries: Sequence[CudaBackend],
    stock: Stock | None,
    patterns: Sequence[str],
) -> Iterator[Job]:
    """Yield a job for each block, type and number of tokens; weights are packed once, when first needed."""
    for group in groups:
        planned = providers(session, group, patterns, libraries, stock)
        make = cache(lambda provider: provider.make())
        for m in group.tokens:
            keys = [_row(group, provider, m) for provider in planned]
            measure = partial(_measure, session, gauge, planned, make, m)
            yield Job(f"{group.model} {group.dtype} M={m}", keys, measure)
        make.cache_clear()
        torch.cuda.empty_cache()  # memory that deleted graphs leave reserved


def _measure(
    session: Session,
    gauge: Gauge,
    planned: Sequence[Provider],
    make: Callable[[Provider], Block | StockBlock],
    m: int,
) -> list[Row]:
    """Return the values of each provider; none where a library refuses."""
    launches: dict[Provider, tuple[Launch, int]] = {}
    for provider in planned:
        try:
            block = make(provider)
            launch = block.launch(m)
            launch(0)
            launches[provider] = launch, block.copies
        # a LibraryError or BackendError, in its words where C++ runs the operator
        except RuntimeError as error:
            session.skipped.append(f"{provider.name} {provider.pattern}: {error}")
    figures = take_turns(gauge, list(launches.values()))
    found = dict(zip(launches, figures, strict=True))
    for provider, measured in found.items():
        if not measured.timing.graphed:
            session.skipped.append(f"{provider.name} {provider.pattern}: M={m} ran without a CUDA graph")
    return [found[provider].row if provider in found else {} for provider in planned]


def _row(group: Group, provider: Provider, m: int) -> Row:
    return {
        "model": group.model,
        "layer": group.name,
        "dtype": group.dtype,
        "pattern": provider.pattern,
        "M": m,
        "provider": provider.name,
    }
