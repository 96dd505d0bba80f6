"""Search for a library's fastest algorithm: run all once, time the fast ones, then time the best in turns.

An algorithm that is refused is skipped, and one with a wrong result is dropped; both are counted.  Turns, after a
warm-up, give all the same clocks: long launches bring a GPU to its power limit, where it slows down over 0.1 s.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slidesparse.gemm.cuda import CudaBackend
from slidesparse.gemm.problem import LibraryError, Problem
from slidesparse.tune.inputs import Operands
from slidesparse.tune.measure import EXACT_US, QUICK_US, SAMPLES, CudaClock, Launch, Replay, Timing

FINALISTS = 16  # that are timed precisely, at most; quick estimates of equally fast algorithms differ by some percent,
QUICK_ERROR = 1.2  # and one may seem this much slower than the first
ROUNDS = 5  # in which the finalists take turns, every other one in reverse
# Of all finalists together, from WARM_UP_TOKENS on: without one, a layer of 512 tokens took 108 us on an H200, in
# windows that were long enough for the power limit 129.
WARM_UP_SECONDS, WARM_UP_TOKENS = 0.5, 256
MARGIN = 0.003  # by which an algorithm must be faster than what is served; repetitions differ by as much
MAX_SLOWDOWN = 2.0  # algorithms slower than this many times the best so far are not timed further
NOISE_US = 300.0  # of one eager launch, in which the GPU may wait for a host that is in use
LONG_US = 1000.0  # launches of at least this long are timed without a graph, as gaps do not matter
FP8_ERROR = 2.0**-8  # relative to the norm of an FP8 product, see `outputs_agree`
COMPARED_ELEMENTS = 2**25  # output elements that are compared at a time


@dataclass(frozen=True)
class SearchResult:
    """The fastest algorithm and how the search went."""

    algorithm: str
    timing: Timing
    tried: int
    refused: int
    wrong: int


@dataclass(frozen=True)
class Contest:
    """The algorithms for a problem, and what is timed."""

    library: str  # its name, for messages
    problem: Problem
    names: Sequence[str]
    launch: Callable[[str], Launch]  # raises LibraryError for an algorithm that is refused
    # the product of an algorithm, None for the library's own choice; the next call may overwrite it
    output: Callable[[str | None], Tensor]
    copies: int  # of the operands
    incumbent: str | None = None  # one of the names, which stays unless another is faster by MARGIN
    finalists: int = FINALISTS
    quick_error: float = QUICK_ERROR
    warm_up_seconds: float = WARM_UP_SECONDS


def gemm_contest(library: CudaBackend, problem: Problem, operands: Operands, device: torch.device) -> Contest:
    """Return the contest of a GEMM alone.  Raises LibraryError when the library refuses the problem."""

    def launch(name: str | None) -> Launch:
        return operands.launch(library.plan(problem, device, name))

    def output(name: str | None) -> Tensor:
        out = operands.outs[0]
        out.fill_(math.nan if out.dtype.is_floating_point else torch.iinfo(out.dtype).min)
        launch(name)(0)
        return out

    names = list(dict.fromkeys(library.algorithms(problem, device)))
    return Contest(library.name, problem, names, launch, output, len(operands.outs))


def search(contest: Contest, clock: CudaClock) -> SearchResult:
    """Time every algorithm of a contest.

    Raises LibraryError when none of them runs and gives the result of the library's own choice, or of the first one if
    the library has none.
    """
    names, problem = contest.names, contest.problem
    expected = _expected_output(contest)
    timed: dict[str, tuple[float, Launch]] = {}
    for name in names:
        best = min((us for us, _ in timed.values()), default=math.inf)
        try:
            launch = contest.launch(name)
            timed[name] = _estimate_us(clock, launch, contest.copies, best), launch
        except LibraryError:
            continue
    finalists: dict[str, Replay] = {}
    wrong = 0
    for name, (us, launch) in sorted(timed.items(), key=lambda item: item[1][0]):
        first = timed[next(iter(finalists))][0] if finalists else us
        late = us > contest.quick_error * first or len(finalists) == contest.finalists
        if late and name != contest.incumbent:
            continue
        if not outputs_agree(contest.output(name), expected, problem):
            wrong += 1
            continue
        finalists[name] = clock.prepare(launch, contest.copies, us, EXACT_US)
    if not finalists:
        raise LibraryError(
            f"{contest.library}: none of the {len(names)} algorithms for {problem} can be used: "
            f"{len(names) - len(timed)} cannot run here and {wrong} give wrong results"
        )
    timings = _take_turns(finalists, contest.warm_up_seconds if problem.m >= WARM_UP_TOKENS else 0.0)
    winner = min(timings, key=lambda name: timings[name].p50)
    kept = timings.get(contest.incumbent or "")
    if contest.incumbent and kept and timings[winner].p50 > (1 - MARGIN) * kept.p50:
        winner = contest.incumbent
    return SearchResult(winner, timings[winner], len(names), len(names) - len(timed), wrong)


def _take_turns(finalists: dict[str, Replay], warm_up_seconds: float) -> dict[str, Timing]:
    """Time finalists."""
    samples: dict[str, list[float]] = {name: [] for name in finalists}
    end = time.monotonic() + warm_up_seconds
    while time.monotonic() < end:
        for replay in finalists.values():
            replay.samples(1)
    for number in range(ROUNDS):
        for name in list(finalists)[:: -1 if number % 2 else 1]:
            samples[name] += finalists[name].samples(SAMPLES // ROUNDS)
    return {name: Timing.of(samples[name], replay.graphed) for name, replay in finalists.items()}


def _expected_output(contest: Contest) -> Tensor:
    """Return the output of the library's own choice, or of the first algorithm that runs."""
    refusals: list[LibraryError] = []
    for name in (None, *contest.names):
        try:
            return contest.output(name).clone()
        except LibraryError as error:
            refusals.append(error)
    raise refusals[0]


def _estimate_us(clock: CudaClock, launch: Launch, copies: int, best: float) -> float:
    """Estimate the microseconds of a launch; less exactly if it is much slower than ``best``."""
    us = min(clock.time_once(launch), clock.time_once(launch))  # the first one also loads the kernel
    if us > min(LONG_US, MAX_SLOWDOWN * best + NOISE_US):
        return us
    return min(clock.prepare(launch, copies, us, QUICK_US).samples(4))


def outputs_agree(out: Tensor, expected: Tensor, problem: Problem) -> bool:
    """Return whether two algorithms' outputs are equal up to rounding; NaN and Inf never are.

    INT8 sums are exact, so without scales integer outputs must be equal bit for bit.  Otherwise the Frobenius norm of
    the difference is compared, relative to that of ``expected``.  With u the unit roundoff of the output, two outputs
    rounded from equal sums are at most 2u apart.  An algorithm that splits K and keeps partial sums in the output's
    type rounds each part and their sum once more; norms of parts of random sign add up like the norm of the whole, so
    2u more.  The sums are float32, but FP8 tensor cores truncate products to about 14 bits of the largest in a step,
    unless an algorithm periodically promotes sums to other registers, as the libraries' own choice may.  Against
    float64 every algorithm of cuSPARSELt 0.8.0 stayed within 2^-8 of the norm, BF16 output included, with k from 512 to
    28416 on an H200: FP8_ERROR each.  One missing tile of a hundred changes the norm by a tenth, far more than this.
    """
    if problem.dtype == "int8" and problem.scale == "none" and not out.dtype.is_floating_point:
        return torch.equal(out, expected)
    unit = torch.finfo(out.dtype).eps / 2 if out.dtype.is_floating_point else 2.0**-7  # of an INT8 code
    sums = {"fp8": FP8_ERROR, "int8": 0.0}
    bound = 4 * unit + 2 * sums.get(problem.dtype, 2.0**-23 * math.sqrt(problem.k))
    return _relative_error(out, expected) <= bound


def _relative_error(out: Tensor, expected: Tensor) -> float:
    """Return |out - expected| / |expected|, NaN when either holds NaN or Inf."""
    rows = max(1, COMPARED_ELEMENTS // max(1, out.shape[1]))
    squares = torch.zeros(2, dtype=torch.float64, device=out.device)
    for start in range(0, out.shape[0], rows):
        right = expected[start : start + rows].float()
        squares[0] += (out[start : start + rows].float() - right).pow_(2).sum(dtype=torch.float64)
        squares[1] += right.pow_(2).sum(dtype=torch.float64)
    apart, norm = squares.tolist()
    return math.sqrt(apart / norm) if 0 < norm < math.inf else math.nan
