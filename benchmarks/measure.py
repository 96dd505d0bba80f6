"""Times and energies of launches that take turns, and the loop that fills a table with them.

All providers of a cell are prepared together, warm the GPU up together, and then run in ROUNDS rounds of one window
each, every other round in reverse: a GPU at its power limit slows down over seconds, so that one after the other they
would not be compared under the same clocks.

A window polls the GPU's energy counter (`benchmarks.energy`) while launches are queued, long enough for three of its
ticks.  Millijoules of a call are the mean power between them times the call's mean time in the window.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch

from benchmarks.energy import EnergyCounter
from benchmarks.records import ENERGY, TIMES, Records, Row
from slidesparse.tune.measure import EXACT_US, QUICK_US, CudaClock, Launch, Replay, Timing
from slidesparse.tune.session import Session

ROUNDS = 3
WARM_UP_SECONDS = 0.5  # of all providers together: the chip reaches its power limit
WARM_UP_WINDOW = 0.05
WINDOW_SECONDS = 0.35
BATCH_SECONDS = 0.03  # launches that are queued at a time


@dataclass(frozen=True)
class Window:
    """The share of one provider in a round."""

    samples: list[float]  # microseconds of a launch, one for each replay
    watts: float | None  # None: the counter was not read, or ticked less than twice


@dataclass(frozen=True)
class Figures:
    """The time and energy of one call."""

    timing: Timing
    mj: float | None

    @classmethod
    def of(cls, windows: Sequence[Window], graphed: bool) -> Figures:
        """Combine a provider's windows: percentiles over all samples, the mean of the windows' energies."""
        energies = [w.watts * statistics.fmean(w.samples) / 1e3 for w in windows if w.watts is not None]
        timing = Timing.of([sample for window in windows for sample in window.samples], graphed)
        return cls(timing, statistics.fmean(energies) if energies else None)

    @property
    def row(self) -> dict[str, object]:
        """The columns TIMES and ENERGY of a table."""
        times = (self.timing.p20, self.timing.p50, self.timing.p80)
        return dict(zip(TIMES, times, strict=True)) | {ENERGY: self.mj}


class Gauge(Protocol):
    """Runs launches and reads their time and energy: on a GPU, or in a test."""

    def prepare(self, launch: Launch, copies: int) -> Replay:
        """Make many launches that can be replayed, through ``copies`` copies of the operands."""

    def window(self, replay: Replay, seconds: float) -> Window:
        """Replay for about ``seconds``, at least twice."""


def take_turns(gauge: Gauge, launches: Sequence[tuple[Launch, int]]) -> list[Figures]:
    """Measure launches, each with its number of copies, in interleaved rounds."""
    replays = [gauge.prepare(launch, copies) for launch, copies in launches]
    end = time.monotonic() + WARM_UP_SECONDS
    while replays and time.monotonic() < end:
        for replay in replays:
            gauge.window(replay, WARM_UP_WINDOW)
    windows: list[list[Window]] = [[] for _ in replays]
    for number in range(ROUNDS):
        for i in range(len(replays))[:: -1 if number % 2 else 1]:
            windows[i].append(gauge.window(replays[i], WINDOW_SECONDS))
    return [Figures.of(parts, replay.graphed) for parts, replay in zip(windows, replays, strict=True)]


class CudaGauge:
    """The gauge of one GPU, on its clock's stream."""

    def __init__(self, clock: CudaClock, uuid: str) -> None:
        self._clock, self._counter = clock, EnergyCounter(uuid)

    def prepare(self, launch: Launch, copies: int) -> Replay:
        """See `Gauge.prepare`; the launches are a CUDA graph if one can be captured."""
        self._clock.time_once(launch)
        about = min(self._clock.prepare(launch, copies, self._clock.time_once(launch), QUICK_US).samples(2))
        return self._clock.prepare(launch, copies, about, EXACT_US)

    def window(self, replay: Replay, seconds: float) -> Window:
        """See `Gauge.window`: a batch is always queued behind the one that is waited for."""
        marks = [_mark()]
        replay.run()
        marks.append(_mark())
        marks[1].synchronize()
        about = max(marks[0].elapsed_time(marks[1]) / 1e3, 1e-6)
        batch = max(1, round(min(BATCH_SECONDS, seconds / 2) / about))
        end = time.perf_counter() + seconds
        self._counter.restart()
        while len(marks) < 4 or time.perf_counter() < end:
            waited_for = marks[-1]
            for _ in range(batch):
                replay.run()
                marks.append(_mark())
            while self._counter.poll() and not waited_for.query():
                pass
            waited_for.synchronize()
        marks[-1].synchronize()
        samples = [1e3 * a.elapsed_time(b) / replay.launches for a, b in pairwise(marks[1:])]
        return Window(samples, self._counter.watts)


def _mark() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


@dataclass(frozen=True)
class Job:
    """Cells of a table that are measured together, such as one layer at one number of tokens by every provider."""

    label: str
    keys: Sequence[Row]
    measure: Callable[[], Sequence[Row]]  # values of each key; an empty mapping where a library refuses


def fill(session: Session, records: Records, jobs: Iterable[Job]) -> bool:
    """Measure the jobs that are not complete in a table; return False if the time limit was reached first."""
    for job in jobs:
        if not all(records.has(key) for key in job.keys):
            if time.monotonic() >= session.deadline:
                return False
            for key, values in zip(job.keys, job.measure(), strict=True):
                records.add({**key, **values})
        session.advance(job.label)
    return True
