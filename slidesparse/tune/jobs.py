"""Search the fastest algorithm of each GEMM that serving runs, and save it in the tuned tables.

What is in the tables already is skipped, so a run that was stopped is continued by repeating the command.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from slidesparse.gemm.backend import Tunable
from slidesparse.gemm.problem import ALL_2_4, ALL_DENSE, MIXED, LibraryError, Problem
from slidesparse.gemm.tuned import tuned
from slidesparse.pattern import SlidePattern, parse_pattern
from slidesparse.tune.session import Session, free, served
from slidesparse.tune.shapes import Layer, round_up, slided


@dataclass(frozen=True)
class Job:
    """A problem to tune at several token counts; its own m is the first of them."""

    library: Tunable
    problem: Problem
    tokens: tuple[int, ...]

    def problems(self) -> Iterator[Problem]:
        """One for each token count."""
        return (replace(self.problem, m=m) for m in self.tokens)


@dataclass(frozen=True)
class Summary:
    """The counts of a run of tuning."""

    tuned: int  # searched and saved
    known: int  # in the tables before
    algorithms: int  # tried
    refused: int  # of them
    wrong: int  # of them: other results than the library's own choice
    skipped: tuple[str, ...]  # problems without a usable algorithm, and why
    finished: bool  # False: the time was up


def jobs(
    libraries: Sequence[Tunable],
    layers: Sequence[Layer],
    dtypes: Sequence[str],
    patterns: Sequence[str],
    tokens: Sequence[int],
) -> list[Job]:
    """The problems that serving runs, each once: layers of several models may have the same shape."""
    found: dict[tuple[str, Problem], Job] = {}
    for library in libraries:
        for layer in layers:
            for dtype in dtypes:
                for out, scale in served(library, dtype):
                    for k, blocks in _operands(library, layer, patterns):
                        problem = Problem(dtype, out, layer.n, k, tokens[0], scale, blocks=blocks)
                        found.setdefault((library.name, problem), Job(library, problem, tuple(tokens)))
    return list(found.values())


def _operands(library: Tunable, layer: Layer, patterns: Sequence[str]) -> list[tuple[int, str]]:
    """The columns of a layer's weight at each pattern, and its blocks."""
    whole = round_up(layer.k, library.alignment)
    if not library.sparse:
        return [(whole, ALL_2_4)]
    found = []
    for pattern in map(parse_pattern, patterns):
        if isinstance(pattern, SlidePattern):
            found.append((slided(layer.k, pattern.ratio, library.alignment), ALL_2_4))
        elif library.takes_dense:
            found.append((whole, MIXED if pattern.share else ALL_DENSE))
    return list(dict.fromkeys(found))


def tune(session: Session, todo: Sequence[Job], force: bool = False) -> Summary:
    """Tune the problems that are not in the tables, or all with ``force``, until the deadline."""
    count = _Count()
    try:
        finished = all(_tune(session, job, force, count) for job in todo)
    finally:
        session.winners.flush()
    return Summary(
        tuned=count.tuned,
        known=count.known,
        algorithms=count.algorithms,
        refused=count.refused,
        wrong=count.wrong,
        skipped=tuple(session.skipped),
        finished=finished,
    )


@dataclass
class _Count:
    tuned: int = 0
    known: int = 0
    algorithms: int = 0
    refused: int = 0
    wrong: int = 0


def _tune(session: Session, job: Job, force: bool, count: _Count) -> bool:
    """Tune one job; return False when the time was up."""
    subject = session.gpu.subject(job.library)
    weights: list[Tensor] = []
    for problem in job.problems():
        if not force and tuned(subject, problem):
            count.known += 1
        elif session.deadline.passed:
            return False
        else:
            weights = weights or _weights(session, job)
            _search(session, job.library, problem, weights, count)
        session.advance(f"{job.library.name} {problem.dtype} {problem.n}x{problem.k} M={problem.m}")
    if weights:
        free(session.gpu)
    return True


def _weights(session: Session, job: Job) -> list[Tensor]:
    smallest = replace(job.problem, m=min(job.tokens))
    return session.inputs.packed(job.library, smallest, session.inputs.copies(smallest))


def _search(
    session: Session, library: Tunable, problem: Problem, weights: list[Tensor], count: _Count
) -> None:
    try:
        found = session.search(library, problem, weights)
    except LibraryError as error:
        session.skipped.append(f"{library.name}: {error}")
        return
    count.tuned += 1
    count.algorithms += found.tried
    count.refused += found.refused
    count.wrong += found.wrong
