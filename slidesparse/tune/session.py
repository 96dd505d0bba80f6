"""State that the measuring commands share: the machine, operands, a deadline, progress, and the tables of winners."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from slidesparse.gemm.backend import Tunable
from slidesparse.gemm.problem import Problem
from slidesparse.gemm.tuned import Subject, Tuned, save
from slidesparse.tune.inputs import Inputs
from slidesparse.tune.machine import SERVED_DTYPES, Gpu
from slidesparse.tune.measure import Clock, Deadline
from slidesparse.tune.search import SearchResult, search

SAVE_SECONDS = 5.0  # interval between saves, which take milliseconds; a killed process loses later winners
MAX_SHOWN = 5  # refusals shown in a summary

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

    def __post_init__(self) -> None:
        self._saved = time.monotonic()
        self._winners: dict[Subject, list[tuple[Problem, Tuned]]] = defaultdict(list)

    def search(self, library: Tunable, problem: Problem, weights: list[Tensor]) -> SearchResult:
        """Search for the fastest algorithm, and save it if serving runs the problem.  Raises LibraryError."""
        operands = self.inputs.operands(problem, weights)
        result = search(library, problem, operands, self.clock, self.gpu.device)
        if (problem.out, problem.scale) in served_outputs(library, problem.dtype):
            best = Tuned(result.algorithm, result.timing.p50, result.others, result.tried)
            self._winners[self.gpu.subject(library)].append((problem, best))
            if time.monotonic() - self._saved >= SAVE_SECONDS:
                self.flush()
        return result

    def flush(self) -> None:
        """Save the winners found since the last save into the tuned tables."""
        for subject, results in self._winners.items():
            save(subject, results)
        self._winners.clear()
        self._saved = time.monotonic()


def served_outputs(library: Tunable, dtype: str) -> list[tuple[str, str]]:
    """Return output type and scale of the problems that serving gives to ``library`` for operands of ``dtype``.

    Sparse GEMMs with INT32 or FP32 output, scaled by a separate kernel, serve models in other types than BF16.  A dense
    library that scales is also used without scales, because for few tokens a separate kernel is faster.
    """
    outputs = library.output_types(dtype) if dtype in SERVED_DTYPES else ()
    if not outputs:
        return []
    problems = [(outputs[0], library.epilogue(dtype, outputs[0]))]
    if not library.sparse and problems[0][1] != "none":
        problems.append((outputs[0], "none"))
    exact = {"int8": "int32", "fp8": "fp32"}[dtype]
    if library.sparse and exact in outputs and (exact, "none") not in problems:
        problems.append((exact, "none"))
    return problems


def summarize_skipped(skipped: Sequence[str]) -> list[str]:
    """Return the first MAX_SHOWN of the refusals, and how many more there were."""
    note = [f"and {len(skipped) - MAX_SHOWN} more"] if len(skipped) > MAX_SHOWN else []
    return [*skipped[:MAX_SHOWN], *note]
