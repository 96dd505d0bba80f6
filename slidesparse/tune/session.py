"""Search for the fastest algorithm of each GEMM that serving runs, and save it in the tuned tables.

A `Session` is the state that all commands that measure share.  Problems in the tables are skipped, so repeating the
command continues an interrupted run.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from slidesparse.gemm.cuda import CudaBackend
from slidesparse.gemm.problem import ALL_DENSE, MIXED, LibraryError, Problem
from slidesparse.gemm.tuned import Tuned, save, tuned_tokens
from slidesparse.pattern import SlidePattern, parse_pattern, round_up
from slidesparse.tune.inputs import Inputs
from slidesparse.tune.machine import SERVED_DTYPES, Gpu
from slidesparse.tune.measure import CudaClock
from slidesparse.tune.search import search
from slidesparse.tune.shapes import Layer, packed_columns


@dataclass
class Session:
    """The state of one measuring command."""

    gpu: Gpu
    clock: CudaClock
    inputs: Inputs
    deadline: float  # by time.monotonic(), infinite without a limit
    show: Callable[[str], None] = lambda label: None
    cells: int = 0  # that are done, or were already there
    skipped: list[str] = field(default_factory=list)  # the libraries' refusals as text

    def advance(self, label: str) -> None:
        """Count a cell, and show its label."""
        self.cells += 1
        self.show(label)


def served_outputs(library: CudaBackend, dtype: str) -> list[tuple[str, str]]:
    """Return output type and scale of the problems that serving gives to ``library`` for operands of ``dtype``.

    GEMMs with INT32 or FP32 output, scaled by a separate kernel, serve models in other types than BF16.  A dense
    library has nothing to tune.
    """
    outputs = library.products[dtype] if library.sparse and dtype in SERVED_DTYPES else ()
    if not outputs:
        return []
    problems = [(outputs[0], library.epilogue(dtype, outputs[0]))]
    exact = {"int8": "int32", "fp8": "fp32"}[dtype]
    if exact in outputs and (exact, "none") not in problems:
        problems.append((exact, "none"))
    return problems


@dataclass(frozen=True)
class Job:
    """A problem to tune at several token counts; its own m is the first of them."""

    library: CudaBackend
    problem: Problem
    tokens: tuple[int, ...]


# What a run counts: problems that were searched, and that the tables had before; algorithms that were tried, of those
# the ones that the library refused, and the ones whose results differ from those of the library's own choice.
COUNTS = ("tuned", "known", "algorithms", "refused", "wrong")


def gemm_jobs(
    libraries: Sequence[CudaBackend],
    layers: Sequence[Layer],
    dtypes: Sequence[str],
    patterns: Sequence[str],
    tokens: Sequence[int],
) -> list[Job]:
    """List the GEMMs that serving runs, without duplicates: layers of several models may have the same shape."""
    jobs: dict[tuple[str, Problem], Job] = {}
    for library in libraries:
        for layer in layers:
            for dtype in dtypes:
                for out, scale in served_outputs(library, dtype):
                    for k, blocks in _packed_columns(library, layer, patterns):
                        problem = Problem(dtype, out, layer.n, k, tokens[0], scale, blocks=blocks)
                        jobs.setdefault((library.name, problem), Job(library, problem, tuple(tokens)))
    return list(jobs.values())


def _packed_columns(library: CudaBackend, layer: Layer, patterns: Sequence[str]) -> list[tuple[int, str]]:
    """Return the columns of a layer's packed weight at each pattern, and the kind of its blocks."""
    padded = round_up(layer.k, library.alignment)
    columns = []
    for pattern in map(parse_pattern, patterns):
        if isinstance(pattern, SlidePattern):
            columns.append(packed_columns(layer.k, pattern.ratio, library.alignment, library.coded))
        elif library.takes_dense:
            columns.append((padded, MIXED if pattern.share else ALL_DENSE))
    return list(dict.fromkeys(columns))


def tune(session: Session, todo: Sequence[Job], force: bool = False) -> tuple[bool, dict[str, int]]:
    """Tune the problems that are not in the tables, or all with ``force``; whether there was time for all, and COUNTS.

    What a library refuses is appended to the session's ``skipped``.
    """
    counts = Counter(dict.fromkeys(COUNTS, 0))
    return all(_tune_job(session, job, force, counts) for job in todo), counts


def _tune_job(session: Session, job: Job, force: bool, counts: Counter[str]) -> bool:
    """Tune one job; return False if the deadline passed."""
    subject, inputs = session.gpu.subject(job.library), session.inputs
    weights: list[Tensor] = []
    for problem in (replace(job.problem, m=m) for m in job.tokens):
        if not force and problem.m in tuned_tokens(subject, problem):
            counts["known"] += 1
        elif time.monotonic() >= session.deadline:
            return False
        else:
            try:
                if not weights:
                    smallest = replace(job.problem, m=min(job.tokens))
                    weights = inputs.packed(job.library, smallest, inputs.copies(smallest))
                # As a layer runs: a GEMM that loads weights while the kernel before it quantizes has other optima
                operands = inputs.operands(problem, weights, quantized=not job.library.fuses)
                result = search(job.library, problem, operands, session.clock, session.gpu.device)
                save(subject, [(problem, Tuned(result.algorithm, result.timing.p50))])
                tried = {"algorithms": result.tried, "refused": result.refused, "wrong": result.wrong}
                counts.update(tuned=1, **tried)
            except LibraryError as error:
                session.skipped.append(f"{job.library.name}: {error}")
        session.advance(f"{job.library.name} {problem.dtype} {problem.n}x{problem.k} M={problem.m}")
    if weights:
        torch.cuda.empty_cache()  # so that other sizes fit
    return True
