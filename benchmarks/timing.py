"""Exact times of launches."""

from __future__ import annotations

import time

from benchmarks.records import TIMES
from slidesparse.tune.measure import EXACT_US, QUICK_US, SAMPLES, Clock, Launch, Timing

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
