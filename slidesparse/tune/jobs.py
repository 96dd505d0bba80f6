"""Search for the fastest algorithm of each GEMM and Triton kernel that serving runs, and save it in the tuned tables.

Problems in the tables are skipped, so repeating the command continues an interrupted run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from slidesparse.gemm.backend import TWO_FOUR, Tunable
from slidesparse.gemm.launches import Kernel, launch_problem
from slidesparse.gemm.problem import ALL_2_4, ALL_DENSE, DTYPES, MIXED, LibraryError, Problem
from slidesparse.gemm.tuned import find_entry
from slidesparse.kernels import quantizer_kind
from slidesparse.pattern import HARDWARE_LENGTH, SlidePattern, parse_pattern, round_up
from slidesparse.tune.launches import search_launches
from slidesparse.tune.search import SearchResult
from slidesparse.tune.session import Session, served_outputs
from slidesparse.tune.shapes import Layer, slided_columns

Search = Callable[[Problem], SearchResult]  # records what it found; raises LibraryError


@dataclass(frozen=True)
class Job:
    """A problem to tune at several token counts; its own m is the first of them."""

    library: Tunable
    problem: Problem
    tokens: tuple[int, ...]

    def prepare(self, session: Session) -> Search:
        """Pack weights for all token counts."""
        smallest = replace(self.problem, m=min(self.tokens))
        weights = session.inputs.packed(self.library, smallest, session.inputs.copies(smallest))
        return lambda problem: session.search(self.library, problem, weights)


@dataclass(frozen=True)
class KernelJob:
    """A Triton kernel to tune at several token counts; its problem is that of `slidesparse.gemm.launches`."""

    library: Kernel
    problem: Problem
    tokens: tuple[int, ...]
    length: int = HARDWARE_LENGTH  # block length of the pattern that quant_slide lifts

    def prepare(self, session: Session) -> Search:
        """See `Job.prepare`; there is nothing to prepare."""

        def run(problem: Problem) -> SearchResult:
            result = search_launches(self.library.name, problem, self.length, session.inputs, session.clock)
            session.winners.add(self.library, problem, result)
            return result

        return run


@dataclass
class Summary:
    """The counts of a run of tuning."""

    tuned: int = 0  # problems searched and saved
    known: int = 0  # problems that were in the tables before
    algorithms: int = 0  # algorithms tried
    refused: int = 0  # of those, refused by the library
    wrong: int = 0  # of those, results that differ from the library's own choice
    skipped: tuple[str, ...] = ()  # problems without a usable algorithm, and why
    finished: bool = False  # False if the time limit was reached


def gemm_jobs(
    libraries: Sequence[Tunable],
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


def _packed_columns(library: Tunable, layer: Layer, patterns: Sequence[str]) -> list[tuple[int, str]]:
    """Return the columns of a layer's packed weight at each pattern, and the kind of its blocks."""
    padded = round_up(layer.k, library.alignment)
    if not library.sparse:
        return [(padded, ALL_2_4)]
    columns = []
    for pattern in map(parse_pattern, patterns):
        if isinstance(pattern, SlidePattern):
            columns.append((slided_columns(layer.k, pattern.ratio, library.alignment), ALL_2_4))
        elif library.takes_dense:
            columns.append((padded, MIXED if pattern.share else ALL_DENSE))
    return list(dict.fromkeys(columns))


def kernel_jobs(
    layers: Sequence[Layer], dtypes: Sequence[str], patterns: Sequence[str], tokens: Sequence[int]
) -> list[KernelJob]:
    """List the Triton kernels that serving runs for these layers, each problem once, with activations in BF16."""
    jobs: dict[tuple[str, Problem], KernelJob] = {}

    def add(kind: str, source: str, target: str, n: int, k: int, length: int = HARDWARE_LENGTH) -> None:
        problem = launch_problem(DTYPES[source], DTYPES[target], n, k, tokens[0])
        jobs.setdefault((kind, problem), KernelJob(Kernel(kind), problem, tuple(tokens), length))

    for layer in layers:
        for dtype in dtypes:
            slid = [pattern for pattern in map(parse_pattern, patterns) if isinstance(pattern, SlidePattern)]
            for pattern in (TWO_FOUR, *slid):  # dense weights are served like 2:4 ones
                layout = pattern.layout(layer.k)
                add(quantizer_kind(layout.length, 0), "bf16", dtype, layout.slided, layer.k, layout.length)
            for sums in ("bf16", "int32") if dtype == "int8" else ("bf16",):
                add("dequant_bias", sums, "bf16", layer.n, layer.n)
    return list(jobs.values())


def tune(session: Session, todo: Sequence[Job | KernelJob], force: bool = False) -> Summary:
    """Tune the problems that are not in the tables, or all with ``force``, until the deadline."""
    count = Summary()
    try:
        count.finished = all(_tune_job(session, job, force, count) for job in todo)
    finally:
        session.winners.flush()
    count.skipped = tuple(session.skipped)
    return count


def _tune_job(session: Session, job: Job | KernelJob, force: bool, count: Summary) -> bool:
    """Tune one job; return False if the deadline passed."""
    subject = session.gpu.subject(job.library)
    search: Search | None = None
    for problem in (replace(job.problem, m=m) for m in job.tokens):
        if not force and find_entry(subject, problem):
            count.known += 1
        elif session.deadline.passed:
            return False
        else:
            search = search or job.prepare(session)
            _search_problem(session, job.library.name, problem, search, count)
        session.advance(f"{job.library.name} {problem.dtype} {problem.n}x{problem.k} M={problem.m}")
    if search:
        torch.cuda.empty_cache()  # so that other sizes fit
    return True


def _search_problem(session: Session, name: str, problem: Problem, search: Search, count: Summary) -> None:
    try:
        result = search(problem)
    except LibraryError as error:
        session.skipped.append(f"{name}: {error}")
        return
    count.tuned += 1
    count.algorithms += result.tried
    count.refused += result.refused
    count.wrong += result.wrong
