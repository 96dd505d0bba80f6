"""Whole linear layers, bfloat16 to bfloat16: quantize, multiply, scale, as serving runs them.

SlideSparse's layers are the public operators, as `slidesparse.ops.linear` calls them for each backend, with the
algorithms that are in the tuned tables; vLLM's are its own two kernels.  Everything allocates as it does while serving
and runs in CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from slidesparse import gemm, ops
from slidesparse.bench.kernel import DENSE, STOCK_ALIGNMENT, Group
from slidesparse.bench.measure import Launch, Timing, exact
from slidesparse.bench.records import Records
from slidesparse.bench.session import Session, free
from slidesparse.bench.shapes import Layer
from slidesparse.bench.stock import Stock
from slidesparse.gemm import hopper_operators
from slidesparse.gemm.library import DTYPES, Library, LibraryError
from slidesparse.pattern import HARDWARE_LENGTH, SlidePattern

KEY = ("model", "layer", "dtype", "pattern", "M", "provider")
TIMES = ("p20_us", "p50_us", "p80_us")
COLUMNS = (*KEY, *TIMES)
SUM = "sum"  # the layer whose times are the sums of the others' absolute times
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
    layer: Layer, dtype: str, patterns: Sequence[str], libraries: Sequence[Library], stock: Stock | None
) -> list[Provider]:
    """vLLM first, then the dense library, then the sparse one at each pattern."""
    found = []
    if stock and not (layer.n % STOCK_ALIGNMENT or layer.k % STOCK_ALIGNMENT):
        found.append(Provider("stock", DENSE, False, lambda weight: weight, stock.linear, layer.k))
    for library in libraries:
        pack = gemm.provider(library.name).pack
        if not library.sparse:
            call = _operators(library.name, dtype, HARDWARE_LENGTH, layer.k)
            found.append(Provider(library.name, DENSE, False, pack, call, layer.k))
            continue
        for pattern in patterns:
            layout = SlidePattern.parse(pattern).layout(layer.k)
            call = _operators(library.name, dtype, layout.length, layout.slided)
            found.append(Provider(library.name, pattern, True, pack, call, layout.slided))
    return found


def _operators(backend: str, dtype: str, length: int, slided: int) -> _Call:
    """A layer through `slidesparse.ops`; a length of 4 lifts nothing, as 2:4 and the dense path need."""
    kind, columns = DTYPES[dtype], gemm.columns(backend, slided)

    def call(x: Tensor, weight: Tensor, scale_w: Tensor) -> Tensor:
        return ops.linear(x, weight, scale_w, None, length, 0, kind, columns, backend)

    return call


class LinearBench:
    """Fills FOLDER/linear.csv."""

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
        self.records = Records(folder / "linear.csv", COLUMNS, KEY)

    def count(self, groups: Sequence[Group]) -> int:
        """How many cells there are, those that are measured already included."""
        return sum(len(self._providers(group)) * len(group.tokens) for group in groups)

    def _providers(self, group: Group) -> list[Provider]:
        return providers(group.layer, group.dtype, self._patterns, self._libraries, self._stock)

    def run(self, groups: Sequence[Group]) -> bool:
        """Measure what is not in the table, then add sums.  False when the time was up before the end."""
        try:
            return all(self._run(group) for group in groups)
        finally:
            add_sums(self.records, groups)

    def _run(self, group: Group) -> bool:
        found = self._providers(group)
        weights: dict[tuple[str, str], list[Tensor]] = {}
        scale_w = self._session.inputs.scale(group.layer.n).view(-1, 1)
        for m in group.tokens:
            for provider in found:
                key = _row(group, provider.name, provider.pattern, m)
                if not self.records.has(**key):
                    if self._session.deadline.passed:
                        return False
                    name = (provider.name, provider.pattern)
                    if name not in weights:
                        weights[name] = self._weights(group, provider)
                    self._measure(group, provider, m, weights[name], scale_w)
                self._session.advance(f"{group.model} {group.layer.name} {group.dtype} M={m}")
            free(self._session.gpu)  # graphs that are gone leave their outputs' memory reserved
        return True

    def _copies(self, group: Group, m: int) -> int:
        n, k = group.layer.n, group.layer.k
        return self._session.inputs.cold(n * k + (m * k + m * n) * FLOAT.itemsize)

    def _weights(self, group: Group, provider: Provider) -> list[Tensor]:
        weight = self._session.inputs.weight(group.dtype, group.layer.n, provider.columns, provider.sparse)
        first = provider.pack(weight)
        copies = self._copies(group, min(group.tokens))  # fewer tokens need more copies
        return [first, *(first.clone() for _ in range(copies - 1))]

    def _measure(
        self, group: Group, provider: Provider, m: int, weights: list[Tensor], scale_w: Tensor
    ) -> None:
        copies = min(self._copies(group, m), len(weights))
        activations = self._session.inputs.activations("bf16", m, group.layer.k, copies)
        launch = provider.launch(activations, weights, scale_w)
        try:
            with hopper_operators.own_errors():
                timing = exact(self._session.clock, launch, copies)
        except (LibraryError, gemm.BackendError) as error:
            self._session.skipped.append(f"{provider.name} {provider.pattern}: {error}")
            return
        if not timing.graphed:
            words = f"{group.layer.name} {group.dtype} M={m} was timed without a CUDA graph"
            self._session.skipped.append(f"{provider.name} {provider.pattern}: {words}")
        self.records.add(_row(group, provider.name, provider.pattern, m) | _times(timing))


def _row(group: Group, provider: str, pattern: str, m: int) -> dict[str, object]:
    return {
        "model": group.model,
        "layer": group.layer.name,
        "dtype": group.dtype,
        "pattern": pattern,
        "M": m,
        "provider": provider,
    }


def _times(timing: Timing) -> dict[str, object]:
    return {"p20_us": timing.p20, "p50_us": timing.p50, "p80_us": timing.p80}


def add_sums(records: Records, groups: Iterable[Group]) -> None:
    """Add a row "sum" wherever all layers of a model are there and the sum is not.

    Absolute times are summed, not ratios: a layer counts by the time it takes.
    """
    layers: dict[str, set[str]] = {}
    for group in groups:
        layers.setdefault(group.model, set()).add(group.layer.name)
    found: dict[tuple[str, ...], dict[str, dict[str, str]]] = {}
    for row in records.rows:
        key = tuple(row[name] for name in KEY if name != "layer")
        found.setdefault(key, {})[row["layer"]] = row
    for by_layer in found.values():
        first = next(iter(by_layer.values()))
        wanted = layers.get(first["model"], set())
        if wanted and wanted <= set(by_layer) and SUM not in by_layer:
            totals = {name: sum(float(by_layer[layer][name]) for layer in wanted) for name in TIMES}
            records.add({**first, "layer": SUM, **totals})
