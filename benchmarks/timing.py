"""Exact times of launches, and of memory copies, the reference for memory-bound kernels."""

from __future__ import annotations

import statistics
import time

from torch import Tensor

from benchmarks.records import TIMES
from slidesparse.tune.measure import EXACT_US, QUICK_US, SAMPLES, Clock, Launch, Timing
from slidesparse.tune.session import Session

# Right after three seconds of the largest products, stock's kernel with one token took 9% longer on an H100, and 1%
# longer after 0.2 s of rest.
REST_SECONDS = 0.5


def rest() -> None:
    """Wait until large products no longer affect what is timed next."""
    time.sleep(REST_SECONDS)


def time_exactly(clock: Clock, launch: Launch, copies: int) -> Timing:
    """Warm up and time a launch with no alternatives."""
    clock.time_once(launch)
    about = min(clock.prepare(launch, copies, clock.time_once(launch), QUICK_US).samples(2))
    replay = clock.prepare(launch, copies, about, EXACT_US)
    return Timing.of(replay.samples(SAMPLES), replay.graphed)


def percentiles(timing: Timing) -> dict[str, float]:
    """Return the columns TIMES of a table."""
    return dict(zip(TIMES, (timing.p20, timing.p50, timing.p80), strict=True))


def label_algorithm(algorithm: str, timing: Timing) -> str:
    """The name of an algorithm in tables: marked when it was timed without a CUDA graph."""
    return algorithm if timing.graphed else f"{algorithm} (no graph)"


def copy_us(session: Session, size: int) -> float:
    """Median microseconds of a device-to-device copy of ``size`` bytes, the faster of two ways.

    In a CUDA graph a large copy runs at two thirds of its rate on an H200, and a small one eagerly waits for its
    launch, so both are timed.
    """
    flats = session.inputs.activations("int8", 1, size, 2 * session.inputs.copies_exceeding_l2(2 * size))
    sources, targets = flats[::2], flats[1::2]

    def copy(i: int) -> Tensor:
        return targets[i].copy_(sources[i])

    eager = statistics.median(session.clock.time_once(copy) for _ in range(SAMPLES))
    return min(eager, time_exactly(session.clock, copy, len(sources)).p50)
