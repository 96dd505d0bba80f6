"""Memory layouts: which of the eight each GEMM library supports, and how fast it is in each.

The weight may have K or N contiguous, the activations K or M, the output N or M.  Serving uses K, K and N; this
benchmark checks that choice.  GEMMs are measured without scales and bias.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.records import LAYOUT, Records
from benchmarks.timing import label_algorithm, time_exactly
from slidesparse.gemm.backend import Tunable
from slidesparse.gemm.problem import LAYOUTS, Layout, LibraryError, Plan, Problem
from slidesparse.pattern import round_up
from slidesparse.tune.inputs import Operands, clones
from slidesparse.tune.search import outputs_agree, search
from slidesparse.tune.session import Session
from slidesparse.tune.shapes import Layer, slided_columns

PATTERN = "6:8"  # of the weights of sparse libraries
WRONG_PRODUCT = "its product is wrong"
CHUNK_ELEMENTS = 2**26  # float64 elements that the check computes at a time


@dataclass(frozen=True)
class Product:
    """One layer in one type by one library."""

    library: Tunable
    layer: Layer
    dtype: str

    def problem(self, m: int) -> Problem:
        """Return the problem at ``m`` tokens; sparse libraries multiply the K' columns of PATTERN."""
        k = self.layer.k
        alignment = self.library.alignment
        columns = slided_columns(k, PATTERN, alignment) if self.library.sparse else round_up(k, alignment)
        return Problem(self.dtype, self.library.output_types(self.dtype)[0], self.layer.n, columns, m)


def products(libraries: Sequence[Tunable], layers: Sequence[Layer], dtypes: Sequence[str]) -> list[Product]:
    """Return the products that the libraries support; those of one layer and type follow each other."""
    return [
        Product(library, layer, dtype)
        for dtype in dtypes
        for layer in layers
        for library in libraries
        if library.output_types(dtype)
    ]


def output_types(chosen: Sequence[Product]) -> dict[str, str]:
    """Return the output types of products, such as {"cusparselt int8": "bf16"}."""
    return {f"{product.library.name} {product.dtype}": product.problem(1).out for product in chosen}


class LayoutBench:
    """Fills FOLDER/layout.csv."""

    def __init__(
        self, session: Session, folder: Path, chosen: Sequence[Product], tokens: Sequence[int]
    ) -> None:
        self._session, self._products, self._tokens = session, chosen, tokens
        self.records = Records(folder, LAYOUT)
        self.count = len(chosen) * len(tokens) * len(LAYOUTS)

    def run(self) -> bool:
        """Measure what is not in the table; return False if the time limit was reached first."""
        return all(self._run(product) for product in self._products)

    def _run(self, product: Product) -> bool:
        weights = _Weights(self._session, product, min(self._tokens))
        for m in self._tokens:
            right = _Expected(product.problem(m), weights)
            for layout in LAYOUTS:
                key = _key(product, m, layout)
                if not self.records.has(key):
                    if self._session.deadline.passed:
                        return False
                    self.records.add(key | self._measure(product.library, layout, right, weights))
                self._session.advance(f"{product.library.name} {product.layer.name} {product.dtype} M={m}")
        torch.cuda.empty_cache()
        return True

    def _measure(
        self, library: Tunable, layout: Layout, right: _Expected, weights: _Weights
    ) -> dict[str, object]:
        """Measure a product in a layout; return the values of its row."""
        session, problem, device = self._session, right.problem, self._session.gpu.device
        try:
            operands = session.inputs.operands(problem, weights.packed(layout))
            result = search(library, problem, operands, session.clock, device, layout)
            best = library.plan(problem, device, result.algorithm, layout)
            wrong = not right.agrees(best, layout, operands)
        except LibraryError as error:
            return _row("no", reason=error)
        label = label_algorithm(result.algorithm, result.timing)
        if wrong:
            return _row("yes", algorithm=label, reason=WRONG_PRODUCT)
        try:
            launch = operands.launch(library.plan(problem, device, None, layout))
            own = time_exactly(session.clock, launch, operands.copies).p50
        except LibraryError as error:
            return _row("yes", "", result.timing.p50, label, f"its heuristic is refused: {error}")
        return _row("yes", own, result.timing.p50, label)


class _Weights:
    """A product's random weight, and its packed copies in each layout, made on first use."""

    def __init__(self, session: Session, product: Product, least: int) -> None:
        self._session, self._product, self._least = session, product, least
        self._packed: dict[Layout, list[Tensor]] = {}
        self._plain: Tensor | None = None

    @property
    def plain(self) -> Tensor:
        """The weight [n, k], 2:4 for a sparse library."""
        if self._plain is None:
            problem = self._product.problem(self._least)
            sparse = self._product.library.sparse
            self._plain = self._session.inputs.weight(problem.dtype, problem.n, problem.k, sparse)
        return self._plain

    def packed(self, layout: Layout) -> list[Tensor]:
        """Return packed copies, enough for the smallest number of tokens.  Raises LibraryError."""
        if layout not in self._packed:
            copies = self._session.inputs.copies(self._product.problem(self._least))
            self._packed[layout] = clones(self._product.library.operand(self.plain, layout), copies)
        return self._packed[layout]


class _Expected:
    """Checks that plans of all layouts give the same product, which is computed in float64 on first use."""

    def __init__(self, problem: Problem, weights: _Weights) -> None:
        self.problem, self._weights = problem, weights
        self._reference: tuple[Tensor, Tensor] | None = None

    def agrees(self, plan: Plan, layout: Layout, operands: Operands) -> bool:
        """Run ``plan`` on operands stored in its layout, and compare its output."""
        if self._reference is None:
            x = operands.activations[0].clone()
            self._reference = x, exact_product(x, self._weights.plain, operands.outs[0].dtype)
        x, expected = self._reference
        out = operands.outs[0]
        out.zero_()
        plan.run(x if layout.activations_k else x.t().contiguous(), operands.weights[0], out)
        output = out if layout.output_n else out.view(self.problem.n, self.problem.m).t()
        return outputs_agree(output, expected, self.problem)


def exact_product(x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x [m, k] @ weight [n, k].T, computed in float64 (exact for INT8), as [m, n] of ``dtype``."""
    out = torch.empty(x.shape[0], weight.shape[0], dtype=dtype, device=x.device)
    x = x.double()
    step = max(1, CHUNK_ELEMENTS // max(weight.shape[1], x.shape[0]))
    for start in range(0, weight.shape[0], step):
        out[:, start : start + step] = x @ weight[start : start + step].double().t()
    return out


def _key(product: Product, m: int, layout: Layout) -> dict[str, object]:
    weight, activations, output = layout.contiguous
    return {
        "library": product.library.name,
        "dtype": product.dtype,
        "weight": weight,
        "activations": activations,
        "output": output,
        "M": m,
        "N": product.layer.n,
        "K": product.layer.k,
    }


def _row(
    taken: str, own: float | str = "", best: float | str = "", algorithm: str = "", reason: object = ""
) -> dict[str, object]:
    text = " ".join(str(reason).split())  # a row is one line
    return {"taken": taken, "heuristic_us": own, "p50_us": best, "algorithm": algorithm, "reason": text}
