"""What the measuring commands share: the machine, operands, a deadline, progress, and the tables of winners."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from slidesparse.bench.inputs import Inputs
from slidesparse.bench.machine import SERVED, Gpu, outputs
from slidesparse.bench.measure import SAMPLES, Clock, Deadline, exact
from slidesparse.bench.search import Found, search
from slidesparse.gemm.library import Library, Problem
from slidesparse.gemm.tuned import Subject, Tuned, save

SAVE_SECONDS = 5.0  # winners that a kill may lose; a save takes milliseconds
COPIED = 2**30  # bytes of the copy that gives the memory's bandwidth

Advance = Callable[[str], None]  # one cell is done or was there; says what comes next


class Winners:
    """Collects the fastest algorithms and saves them into the tuned tables every few seconds."""

    def __init__(self, gpu: Gpu, now: Callable[[], float] = time.monotonic) -> None:
        self._gpu, self._now, self._saved = gpu, now, now()
        self._pending: dict[Subject, list[tuple[Problem, Tuned]]] = defaultdict(list)

    def add(self, library: Library, problem: Problem, found: Found) -> None:
        """Note the best of one problem."""
        best = Tuned(found.algorithm, found.timing.p50)
        self._pending[self._gpu.subject(library)].append((problem, best))
        if self._now() - self._saved >= SAVE_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Save what was noted since the last time."""
        for subject, results in self._pending.items():
            save(subject, results)
        self._pending.clear()
        self._saved = self._now()


@dataclass
class Session:
    """One measuring command.  ``skipped`` collects, in words, what the libraries refused."""

    gpu: Gpu
    clock: Clock
    inputs: Inputs
    deadline: Deadline
    advance: Advance = lambda label: None
    skipped: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.winners = Winners(self.gpu)

    def search(self, library: Library, problem: Problem, weights: list[Tensor]) -> Found:
        """The fastest algorithm, noted as a winner when serving runs the problem.  Raises LibraryError."""
        rotation = self.inputs.rotation(problem, weights)
        found = search(library, problem, rotation, self.clock, self.gpu.device)
        if (problem.out, problem.scale) in served(library, problem.dtype):
            self.winners.add(library, problem, found)
        return found

    def copy_rate(self) -> float:
        """GB/s of a large device-to-device copy, read and written bytes counted."""
        return 2 * COPIED / self.copy_us(COPIED) / 1e3

    def copy_us(self, size: int) -> float:
        """Median microseconds of a device-to-device copy of ``size`` bytes, the faster of two ways.

        In a CUDA graph a large copy runs at two thirds of its rate on an H200, and a small one eagerly waits for its
        launch, so both are timed.
        """
        flats = self.inputs.activations("int8", 1, size, 2 * self.inputs.cold(2 * size))
        sources, targets = flats[::2], flats[1::2]

        def copy(i: int) -> Tensor:
            return targets[i].copy_(sources[i])

        eager = statistics.median(self.clock.once(copy) for _ in range(SAMPLES))
        return min(eager, exact(self.clock, copy, len(sources)).p50)


def served(library: Library, dtype: str) -> list[tuple[str, str]]:
    """(out, scale) of the problems that serving gives to ``library`` for operands of ``dtype``, without bias.

    Sparse INT8 with INT32 output is the exact path, scaled by a kernel of its own.  A dense library that scales is
    asked for products without, too: few tokens are scaled faster by a kernel.
    """
    found = outputs(library, dtype) if dtype in SERVED else ()
    if not found:
        return []
    problems = [(found[0], library.epilogue(dtype, found[0]))]
    if not library.sparse and problems[0][1] != "none":
        problems.append((found[0], "none"))
    if library.sparse and dtype == "int8" and "int32" in found and ("int32", "none") not in problems:
        problems.append(("int32", "none"))
    return problems


def free(gpu: Gpu) -> None:
    """Give memory that is not used back to the GPU, so that other sizes find room."""
    if gpu.device.type == "cuda":
        torch.cuda.empty_cache()


def describe(skipped: Sequence[str], most: int = 5) -> list[str]:
    """The first of the refusals, and how many there were."""
    rest = [f"and {len(skipped) - most} more"] if len(skipped) > most else []
    return [*skipped[:most], *rest]
