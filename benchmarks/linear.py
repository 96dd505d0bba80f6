"""Whole linear layers, bfloat16 to bfloat16: quantize, multiply, scale, as serving runs them.

SlideSparse's layers are the public operators, called by `slidesparse.ops.linear` for each backend with the algorithms
in the tuned tables; vLLM's are its own two kernels.  Everything allocates memory as in serving and runs in CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.kernel import DENSE, STOCK_ALIGNMENT, Group
from benchmarks.records import LINEAR, TIMES, Records
from benchmarks.stock import Stock
from benchmarks.timing import percentiles, rest, time_exactly
from slidesparse import ops
from slidesparse.gemm import problem
from slidesparse.gemm.backend import Tunable
from slidesparse.gemm.problem import DTYPES, TWO_FOUR
from slidesparse.pattern import SlidePattern, parse_pattern
from slidesparse.tune.inputs import clones, with_sparse_blocks
from slidesparse.tune.measure import Launch
from slidesparse.tune.session import Session
from slidesparse.tune.shapes import Layer

SUM_LAYER = "sum"  # the layer whose times are the sums of the others' absolute times
FLOAT = torch.bfloat16

_Call = Callable[[Tensor, Tensor, Tensor], Tensor]  # x [M, K], packed weight, scale_w [N, 1] -> [M, N]


@dataclass(frozen=True)
class Provider:
    """A way to run a layer."""

    name: str
    pattern: str
    sparse: bool
    pack: Callable[[Tensor], Tensor]
    call: _Call
    columns: int  # of the weight before it is packed: K, or K' when sparse

    def launch(self, activations: list[Tensor], weights: list[Tensor], scale_w: Tensor) -> Launch:
        """Run a layer on copy i."""
        return lambda i: self.call(activations[i], weights[i], scale_w)


def providers(
    layer: Layer, dtype: str, patterns: Sequence[str], libraries: Sequence[Tunable], stock: Stock | None
) -> list[Provider]:
    """vLLM first, then each library: dense weights if it takes them, and each pattern if it is sparse."""
    planned = []
    if stock and not (layer.n % STOCK_ALIGNMENT or layer.k % STOCK_ALIGNMENT):
        planned.append(Provider("stock", DENSE, False, lambda weight: weight, stock.linear, layer.k))
    for library in libraries:
        taken = [DENSE] if library.takes_dense else []
        taken += [pattern for pattern in patterns if library.sparse and pattern != DENSE]
        for pattern in taken:
            parsed = parse_pattern(pattern)
            if isinstance(parsed, SlidePattern):
                call, pack = _operators(library, layer, dtype, parsed)
                columns = parsed.layout(layer.k).slided
                planned.append(Provider(library.name, pattern, True, pack, call, columns))
            elif library.takes_dense:
                call, pack = _operators(library, layer, dtype, None)
                pack = _with_dense_share(pack, parsed.share) if parsed.share else pack
                planned.append(Provider(library.name, pattern, False, pack, call, layer.k))
    return planned


def _operators(
    library: Tunable, layer: Layer, dtype: str, pattern: SlidePattern | None
) -> tuple[_Call, Callable[[Tensor], Tensor]]:
    """A layer through `slidesparse.ops`, and a function that packs its already slid weight."""
    packed = problem.Layer.of(layer.n, layer.k, pattern, 0, DTYPES[dtype], library.alignment)

    def call(x: Tensor, weight: Tensor, scale_w: Tensor) -> Tensor:
        return ops.linear(x, weight, scale_w, None, packed, library.name)

    return call, partial(library.pack, pattern=pattern and TWO_FOUR)


def _with_dense_share(pack: Callable[[Tensor], Tensor], share: Fraction) -> Callable[[Tensor], Tensor]:
    """Return a function that prunes a share of a weight's blocks, and packs it."""

    def mixed(weight: Tensor) -> Tensor:
        return pack(with_sparse_blocks(weight, float(share)))

    return mixed


class LinearBench:
    """Fills FOLDER/linear.csv."""

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
        self._providers = {
            group: providers(group.layer, group.dtype, patterns, libraries, stock) for group in groups
        }
        self.records = Records(folder, LINEAR)
        self.count = sum(len(self._providers[group]) * len(group.tokens) for group in groups)

    def run(self) -> bool:
        """Measure what is not in the table, then add sums.  False when the time was up before the end."""
        try:
            return all(self._run(group) for group in self._groups)
        finally:
            add_sums(self.records, self._groups)

    def _run(self, group: Group) -> bool:
        weights: dict[Provider, list[Tensor]] = {}
        scale_w = self._session.inputs.scale(group.layer.n).view(-1, 1)
        for m in group.tokens:
            for provider in self._providers[group]:
                row = _row(group, provider, m)
                if not self.records.has(row):
                    if self._session.deadline.passed:
                        return False
                    if not weights:
                        rest()  # after the group before
                    if provider not in weights:
                        weights[provider] = self._weights(group, provider)
                    self._measure(group, provider, row, m, weights[provider], scale_w)
                self._session.advance(f"{group.model} {group.layer.name} {group.dtype} M={m}")
            torch.cuda.empty_cache()  # memory that deleted graphs leave reserved
        return True

    def _copies(self, group: Group, m: int) -> int:
        n, k = group.layer.n, group.layer.k
        return self._session.inputs.copies_exceeding_l2(n * k + (m * k + m * n) * FLOAT.itemsize)

    def _weights(self, group: Group, provider: Provider) -> list[Tensor]:
        weight = self._session.inputs.weight(group.dtype, group.layer.n, provider.columns, provider.sparse)
        copies = self._copies(group, min(group.tokens))  # fewer tokens need more copies
        return clones(provider.pack(weight), copies)

    def _measure(
        self,
        group: Group,
        provider: Provider,
        row: dict[str, object],
        m: int,
        weights: list[Tensor],
        scale_w: Tensor,
    ) -> None:
        copies = min(self._copies(group, m), len(weights))
        activations = self._session.inputs.activations("bf16", m, group.layer.k, copies)
        launch = provider.launch(activations, weights, scale_w)
        subject = f"{provider.name} {provider.pattern}"
        try:
            timing = time_exactly(self._session.clock, launch, copies)
        # a LibraryError or BackendError, in its words where C++ runs the operator
        except RuntimeError as error:
            self._session.skipped.append(f"{subject}: {error}")
            return
        if not timing.graphed:
            words = f"{group.layer.name} {group.dtype} M={m} was timed without a CUDA graph"
            self._session.skipped.append(f"{subject}: {words}")
        self.records.add(row | percentiles(timing))


def _row(group: Group, provider: Provider, m: int) -> dict[str, object]:
    return {
        "model": group.model,
        "layer": group.layer.name,
        "dtype": group.dtype,
        "pattern": provider.pattern,
        "M": m,
        "provider": provider.name,
    }


def add_sums(records: Records, groups: Iterable[Group]) -> None:
    """Add a row "sum" wherever all layers of a model are there and the sum is not.

    Absolute times are summed, not ratios: a layer counts by the time it takes.
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
        names = layers.get(first["model"], set())
        if names and names <= set(by_layer) and SUM_LAYER not in by_layer:
            totals = {name: sum(float(by_layer[layer][name]) for layer in names) for name in TIMES}
            records.add({**first, "layer": SUM_LAYER, **totals})
