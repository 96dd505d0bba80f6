"""Search for the fastest algorithm of each GEMM that serving runs, and save it in the tuned tables.

A `Session` is the state that all commands that measure share.  Problems in the user's tables are skipped, so repeating
the command continues an interrupted run; what ships, from other machines, is where a search begins.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import product
from typing import cast

import torch

from slidesparse.gemm.cuda import CudaBackend
from slidesparse.gemm.hopper.backend import Hopper
from slidesparse.gemm.problem import LibraryError, Problem
from slidesparse.gemm.tuned import save, tuned_algorithm, tuned_tokens
from slidesparse.pattern import Pattern, parse_pattern
from slidesparse.tune.block import Block, block_problems
from slidesparse.tune.inputs import Inputs
from slidesparse.tune.machine import SERVED_DTYPES, Gpu
from slidesparse.tune.measure import CudaClock
from slidesparse.tune.search import SearchResult, gemm_contest, search
from slidesparse.tune.shapes import Layer


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
    """A problem to tune at several token counts, or those of the layers of a block; their own m is the first of them.

    A backend that fuses is tuned by blocks (`slidesparse.tune.block`), any other by GEMMs.
    """

    library: CudaBackend
    problems: tuple[Problem, ...]
    tokens: tuple[int, ...]
    pattern: Pattern
    layers: tuple[Layer, ...] = ()  # of a block, as many as problems


# What a run counts: problems that were searched, and that the user's tables had before; algorithms that were tried, of
# those the ones that the library refused, and the ones whose results differ from those of the library's own choice.
COUNTS = ("tuned", "known", "algorithms", "refused", "wrong")


def plan_jobs(
    libraries: Sequence[CudaBackend],
    models: Sequence[Sequence[Layer]],
    dtypes: Sequence[str],
    patterns: Sequence[str],
    tokens: Sequence[int],
) -> list[Job]:
    """List what serving runs of the layers of models, without duplicates: several may have the same shapes."""
    jobs: dict[tuple[str, tuple[Problem, ...]], Job] = {}
    for library, layers, dtype in product(libraries, models, dtypes):
        for out, scale in served_outputs(library, dtype):
            for pattern in map(parse_pattern, patterns):
                problems = block_problems(library, layers, dtype, out, pattern, tokens[0], scale)
                if library.fuses and problems:
                    job = Job(library, tuple(problems), tuple(tokens), pattern, tuple(layers))
                    jobs.setdefault((library.name, job.problems), job)
                    continue
                for problem in problems:
                    job = Job(library, (problem,), tuple(tokens), pattern)
                    jobs.setdefault((library.name, job.problems), job)
    return list(jobs.values())


def tune(session: Session, todo: Sequence[Job], force: bool = False) -> tuple[bool, dict[str, int]]:
    """Tune the problems that are not in the user's tables, or all with ``force``.

    Return whether there was time for all, and COUNTS.

    What a library refuses is appended to the session's ``skipped``.
    """
    counts = Counter(dict.fromkeys(COUNTS, 0))
    return all(_tune_job(session, job, force, counts) for job in todo), counts


def _tune_job(session: Session, job: Job, force: bool, counts: Counter[str]) -> bool:
    """Tune one job; return False if the deadline passed."""
    subject = session.gpu.subject(job.library)
    make = cache(partial(_block_search if job.layers else _gemm_search, session, job))
    tuned = [tuned_tokens(subject, problem, shipped=False) for problem in job.problems]
    try:
        for m in job.tokens:
            problems = [replace(problem, m=m) for problem in dict.fromkeys(job.problems)]
            if all(m in tokens for tokens in tuned) and not force:
                counts["known"] += len(problems)
            elif time.monotonic() >= session.deadline:
                return False
            else:
                try:
                    found = make()(m)
                    save(subject, [(problem, result.algorithm) for problem, result in found.items()])
                    for result in found.values():
                        tried = {"algorithms": result.tried, "refused": result.refused, "wrong": result.wrong}
                        counts.update(tuned=1, **tried)
                except LibraryError as error:
                    session.skipped.append(f"{job.library.name}: {error}")
                except torch.OutOfMemoryError:
                    full = f"{_label(job, problems[0])} does not fit into the GPU's memory"
                    session.skipped.append(f"{full}; give fewer tokens by --m")
            for problem in problems:
                session.advance(_label(job, problem))
    finally:
        if job.layers:
            cast("Hopper", job.library).forget()
        make.cache_clear()
        torch.cuda.empty_cache()  # so that other sizes fit
    return True


def _label(job: Job, problem: Problem) -> str:
    return f"{job.library.name} {problem.dtype} {problem.n}x{problem.k} M={problem.m}"


_Search = Callable[[int], dict[Problem, SearchResult]]  # from the number of tokens


def _gemm_search(session: Session, job: Job) -> _Search:
    """Return the search of a GEMM alone.  Raises LibraryError."""
    problem, inputs = job.problems[0], session.inputs
    smallest = replace(problem, m=min(job.tokens))
    weights = inputs.packed(job.library, smallest, inputs.copies(smallest))

    def tune_gemm(m: int) -> dict[Problem, SearchResult]:
        here = replace(problem, m=m)
        contest = gemm_contest(job.library, here, inputs.operands(here, weights), session.gpu.device)
        return {here: search(contest, session.clock)}

    return tune_gemm


def _block_search(session: Session, job: Job) -> _Search:
    """Return the search of the layers of a block together.  Raises LibraryError."""
    library = cast("Hopper", job.library)
    block = Block(library, job.layers, job.problems, job.pattern, session.inputs)
    known = partial(tuned_algorithm, session.gpu.subject(library))
    return lambda m: block.tune(m, session.clock, session.gpu.device, known)
