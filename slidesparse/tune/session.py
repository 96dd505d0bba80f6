"""State that the measuring commands share: the machine, operands, a deadline, progress, and the tables of winners."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from slidesparse.gemm.backend import Tunable
from slidesparse.gemm.problem import Problem
from slidesparse.gemm.tuned import Tuned, save
from slidesparse.tune.inputs import Inputs
from slidesparse.tune.machine import SERVED_DTYPES, Gpu
from slidesparse.tune.measure import Clock, Deadline
from slidesparse.tune.search import SearchResult, search

Advance = Callable[[str], None]  # called with a label when a cell is done or was already there


@dataclass
class Session:
    """The state of one measuring command."""

    gpu: Gpu
    clock: Clock
    inputs: Inputs
    deadline: Deadline
    advance: Advance = lambda label: None
    skipped: list[str] = field(default_factory=list)  # the libraries' refusals as text

    def search(self, library: Tunable, problem: Problem, weights: list[Tensor]) -> SearchResult:
        """Search for the fastest algorithm, and save it if serving runs the problem.  Raises LibraryError."""
        operands = self.inputs.operands(problem, weights)
        result = search(library, problem, operands, self.clock, self.gpu.device)
        if (problem.out, problem.scale) in served_outputs(library, problem.dtype):
            best = Tuned(result.algorithm, result.timing.p50)
            save(self.gpu.subject(library), [(problem, best)])  # milliseconds
        return result


def served_outputs(library: Tunable, dtype: str) -> list[tuple[str, str]]:
    """Return output type and scale of the problems that serving gives to ``library`` for operands of ``dtype``.

    GEMMs with INT32 or FP32 output, scaled by a separate kernel, serve models in other types than BF16.  A dense
    library has nothing to tune.
    """
    outputs = library.output_types(dtype) if library.sparse and dtype in SERVED_DTYPES else ()
    if not outputs:
        return []
    problems = [(outputs[0], library.epilogue(dtype, outputs[0]))]
    exact = {"int8": "int32", "fp8": "fp32"}[dtype]
    if exact in outputs and (exact, "none") not in problems:
        problems.append((exact, "none"))
    return problems
