"""Timing of calls on the GPU: CUDA graphs of many launches, timed with CUDA events.

A launch is a callable that takes a number, which selects one of several copies of its operands, and launches on
torch's current stream.  With enough copies, the weights of a call are in memory and not in the L2 cache, as in a
model, where hundreds of other layers run in between.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from slidesparse.calibrate.graphs import captured
from slidesparse.pattern import round_up

Launch = Callable[[int], object]

SAMPLES = 15  # samples of an exact timing
QUICK_US, EXACT_US = 150.0, 400.0  # the shortest sample; the gap between two replays is about 2 us
MAX_LAUNCHES = 512  # launches in a graph; capturing one takes about 5 us of CPU time


@dataclass(frozen=True)
class Timing:
    """Percentiles of the time of one launch, in microseconds."""

    p20: float
    p50: float
    p80: float
    graphed: bool = True  # False: no CUDA graph could be captured, so gaps between launches are included

    @classmethod
    def of(cls, samples: Sequence[float], graphed: bool = True) -> Timing:
        """Compute the percentiles of at least two samples."""
        tenths = statistics.quantiles(samples, n=10, method="inclusive")
        return cls(tenths[1], tenths[4], tenths[7], graphed)


class Replay:
    """Launches that are ready to be timed: a CUDA graph of them, or a call that enqueues them."""

    def __init__(self, run: Callable[[], object], launches: int, graphed: bool) -> None:
        self.run, self.launches, self.graphed = run, launches, graphed
        run()  # the first replay uploads the graph

    def samples(self, count: int) -> list[float]:
        """Return ``count`` times of one launch, in microseconds."""
        events = [_events() for _ in range(count)]
        for start, end in events:
            start.record()
            self.run()
            end.record()
        events[-1][1].synchronize()
        return [float(start.elapsed_time(end)) * 1e3 / self.launches for start, end in events]


class CudaClock:
    """Times launches in torch's current stream, which `own_stream` makes one that graphs can be captured in.

    Its graphs run one after the other and share their memory: while a graph is captured, the allocator cannot give back
    what others have left.
    """

    def __init__(self) -> None:
        # the shared memory lives as long as one of its graphs
        self._first: torch.cuda.CUDAGraph | None = None

    def time_once(self, launch: Launch) -> float:
        """Run one launch eagerly, to its end; return its time in microseconds, which includes gaps."""
        start, end = _events()
        start.record()
        launch(0)
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e3

    def prepare(self, launch: Launch, copies: int, about_us: float, target_us: float) -> Replay:
        """Make samples of about ``target_us`` of a launch that takes ``about_us``, and warm up.

        A sample is of whole rounds through the copies.  Falls back to eager launches, and says so, when capture fails.
        """
        count = round_up(int(min(MAX_LAUNCHES, -(-target_us // max(about_us, 0.1)))), copies)
        results: deque[object] = deque(maxlen=copies)  # not overwritten while in the cache either

        def enqueue() -> None:
            for i in range(count):
                results.append(launch(i % copies))

        graph = torch.cuda.CUDAGraph()
        try:
            with captured(graph, self._first.pool() if self._first else None):
                enqueue()
        except RuntimeError:
            return Replay(enqueue, count, graphed=False)  # raises if the launch itself fails
        self._first = self._first or graph
        return Replay(graph.replay, count, graphed=True)


@contextmanager
def own_stream(device: torch.device) -> Iterator[CudaClock]:
    """Make a stream of its own torch's current one, in which operands are made too, and yield a clock for it.

    Graphs cannot be captured in the default stream.
    """
    outer, stream = torch.cuda.current_stream(device), torch.cuda.Stream(device)
    stream.wait_stream(outer)
    try:
        with torch.cuda.stream(stream):
            yield CudaClock()
    finally:
        outer.wait_stream(stream)


def _events() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
