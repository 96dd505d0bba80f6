"""Whole linear layers, bfloat16 to bfloat16: quantize, multiply, scale, as serving runs them.

SlideSparse's layers are the public operators, called by `slidesparse.ops.linear` for each backend with the algorithms
in the tuned tables; vLLM's are its own two kernels.  Everything allocates memory as in serving and runs in CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor

from benchmarks.kernel import DENSE, STOCK, STOCK_ALIGNMENT, Group
from benchmarks.measure import Gauge, Job, take_turns
from benchmarks.records import ENERGY, LINEAR, TIMES, Records, Row
from benchmarks.stock import Stock
from slidesparse import ops
from slidesparse.gemm.cuda import CudaBackend
from slidesparse.gemm.problem import DTYPES, TWO_FOUR, stores_windows
from slidesparse.pattern import SlidePattern, parse_pattern
from slidesparse.prune import prune
from slidesparse.tune.inputs import clones, with_sparse_blocks
from slidesparse.tune.measure import Launch
from slidesparse.tune.session import Session
from slidesparse.tune.shapes import Layer

SUM_LAYER = "sum"  # the layer whose times and energies are the sums of the others'
FLOAT = torch.bfloat16

_Pack = Callable[[Tensor], Tensor]
_Call = Callable[[Tensor, Tensor, Tensor], Tensor]  # x [M, K], packed weight, scale_w [N, 1] -> [M, N]


@dataclass(frozen=True)
class Provider:
    """A way to run a layer."""

    name: str
    pattern: str
    sparse: bool
    pack: _Pack
    call: _Call
    columns: int  # of the weight before it is packed: K, or K' when sparse


def providers(
    layer: Layer, dtype: str, patterns: Sequence[str], libraries: Sequence[CudaBackend], stock: Stock | None
) -> list[Provider]:
    """vLLM first, then each library: dense weights if it takes them, and each pattern if it is sparse."""
    planned = []
    if stock and not (layer.n % STOCK_ALIGNMENT or layer.k % STOCK_ALIGNMENT):
        planned.append(Provider(STOCK, DENSE, False, lambda weight: weight, stock.linear, layer.k))
    for library in libraries:
        taken = [DENSE] if library.takes_dense else []
        taken += [pattern for pattern in patterns if library.sparse and pattern != DENSE]
        for pattern in taken:
            parsed = parse_pattern(pattern)
            if isinstance(parsed, SlidePattern) and not stores_windows(parsed, library.coded):
                call, _ = _operators(library, layer, dtype, parsed)
                pack_pruned = partial(_pack_pruned, library.pack, parsed)
                planned.append(Provider(library.name, pattern, False, pack_pruned, call, layer.k))
            elif isinstance(parsed, SlidePattern):
                call, pack = _operators(library, layer, dtype, parsed)
                columns = parsed.layout(layer.k).slided
                planned.append(Provider(library.name, pattern, True, pack, call, columns))
            elif library.takes_dense:
                call, pack = _operators(library, layer, dtype, None)
                pack = partial(_pack_mixed, pack, float(parsed.share)) if parsed.share else pack
                planned.append(Provider(library.name, pattern, False, pack, call, layer.k))
    return planned


def _operators(
    library: CudaBackend, layer: Layer, dtype: str, pattern: SlidePattern | None
) -> tuple[_Call, _Pack]:
    """A layer through `slidesparse.ops`, and a function that packs its already slid weight."""
    packed = library.layer(layer.n, layer.k, pattern, 0, DTYPES[dtype])

    def call(x: Tensor, weight: Tensor, scale_w: Tensor) -> Tensor:
        return ops.linear(x, weight, scale_w, None, packed, library.name)

    return call, partial(library.pack, pattern=pattern and TWO_FOUR)


def _pack_pruned(pack: Callable[..., Tensor], pattern: SlidePattern, weight: Tensor) -> Tensor:
    """Prune a weight to a pattern and pack it."""
    return pack(prune(weight, pattern), pattern)


def _pack_mixed(pack: _Pack, share: float, weight: Tensor) -> Tensor:
    """Prune a share of a weight's blocks to 2:4 and pack it."""
    return pack(with_sparse_blocks(weight, share))


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
        planned = providers(group.layer, group.dtype, patterns, libraries, stock)
        weights = cache(partial(_weights, session, group))
        for m in group.tokens:
            keys = [_row(group, provider, m) for provider in planned]
            measure = partial(_measure, session, gauge, group, planned, weights, m)
            yield Job(f"{group.model} {group.layer.name} {group.dtype} M={m}", keys, measure)
        weights.cache_clear()
        torch.cuda.empty_cache()  # memory that deleted graphs leave reserved


def _measure(
    session: Session,
    gauge: Gauge,
    group: Group,
    planned: Sequence[Provider],
    weights: Callable[[Provider], list[Tensor]],
    m: int,
) -> list[Row]:
    """Return the values of each provider; none where a library refuses."""
    copies = _copies(session, group, m)
    x = session.inputs.activations("bf16", m, group.layer.k, copies)
    scale_w = session.inputs.scale(group.layer.n).view(-1, 1)
    launches: dict[Provider, Launch] = {}
    for provider in planned:
        launch = partial(_launch, provider.call, x, weights(provider), scale_w)
        try:
            launch(0)
            launches[provider] = launch
        # a LibraryError or BackendError, in its words where C++ runs the operator
        except RuntimeError as error:
            session.skipped.append(f"{provider.name} {provider.pattern}: {error}")
    figures = take_turns(gauge, [(launch, copies) for launch in launches.values()])
    found = dict(zip(launches, figures, strict=True))
    for provider, measured in found.items():
        if not measured.timing.graphed:
            where = f"{group.layer.name} {group.dtype} M={m}"
            session.skipped.append(f"{provider.name} {provider.pattern}: {where} ran without a CUDA graph")
    return [found[provider].row if provider in found else {} for provider in planned]


def _copies(session: Session, group: Group, m: int) -> int:
    n, k = group.layer.n, group.layer.k
    return session.inputs.copies_exceeding_l2(n * k + (m * k + m * n) * FLOAT.itemsize)


def _weights(session: Session, group: Group, provider: Provider) -> list[Tensor]:
    """Return a random weight, packed, in as many copies as the fewest tokens need."""
    weight = session.inputs.weight(group.dtype, group.layer.n, provider.columns, provider.sparse)
    return clones(provider.pack(weight), _copies(session, group, min(group.tokens)))


def _row(group: Group, provider: Provider, m: int) -> Row:
    return {
        "model": group.model,
        "layer": group.layer.name,
        "dtype": group.dtype,
        "pattern": provider.pattern,
        "M": m,
        "provider": provider.name,
    }


def _launch(call: _Call, x: list[Tensor], weights: list[Tensor], scale_w: Tensor, i: int) -> Tensor:
    return call(x[i], weights[i], scale_w)


def add_sums(records: Records, groups: Iterable[Group]) -> None:
    """Add a row "sum" wherever all layers of a model are there.

    Absolute figures are summed, not ratios: a layer counts by the time it takes.
    """
    layers: dict[str, set[str]] = {}
    for group in groups:
        layers.setdefault(group.model, set()).add(group.layer.name)
    rows_by_case: dict[tuple[str, ...], dict[str, dict[str, str]]] = {}
    for row in records.rows:
        key = tuple(row[name] for name in LINEAR.key if name != "layer")
        rows_by_case.setdefault(key, {})[row["layer"]] = row
    for by_layer in rows_by_case.values():
        first = next(iter(by_layer.values()))
        parts = [by_layer.get(name) for name in layers.get(first["model"], ())]
        if not (parts and all(parts)):
            continue
        sums: dict[str, str] = {}
        for name in (*TIMES, ENERGY):
            values = [part[name] for part in parts if part]
            sums[name] = f"{sum(map(float, values)):.3f}" if all(values) else ""
        row = {**first, "layer": SUM_LAYER, **sums}
        if by_layer.get(SUM_LAYER) != row:  # absent, or of layers that were measured again
            records.add(row)
