"""Times of layers: ``SLIDESPARSE_PROFILE=1`` prints a table when a serving process ends.

    layer         M     calls  quantize  product  scale  of all steps  algorithm
    gate_up_proj  4096  28     60.1      1407.2   98.3   41.0%         19

Stages are timed with CUDA events around their launches, on a CPU with a clock; microseconds are means per call.  A norm
or an activation that is fused with quantization counts as quantization.  A step is the time from the beginning of a
model's first layer to the end of its last one, including everything in between; time between steps is not counted.

Calls captured into a CUDA graph record their events inside the graph, and each replay overwrites them.  A second table
shows the times of the last replay, averaged over graphs for the same number of tokens.  Replays run no Python, so their
number is unknown, and shares are of the steps with the same number of tokens.

Events prevent kernels from overlapping and take time themselves, so a profiled step is longer.
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from multiprocessing.util import Finalize

import torch
from torch import Tensor

STAGES = ("quantize", "product", "scale")
STEP = "step"
PENDING = 4096  # most unread events; beyond that the host waits for the GPU to read them
NEVER_SET = ("invalid resource handle", "not ready")  # CUDA's errors for an event that no replay has recorded


Key = tuple[str, int]  # a layer's kind, and its tokens rounded up to a power of two
_Mark = float | torch.cuda.Event


@dataclass
class Entry:
    """Calls of one kind of layer at one number of tokens, and their times."""

    calls: int = 0
    timed: int = 0
    us: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))  # total
    algorithm: str = ""


@dataclass
class Times:
    """Times of layers, and of the steps that they are part of."""

    entries: dict[Key, Entry] = field(default_factory=lambda: defaultdict(Entry))
    steps: int = 0
    step_us: dict[int, float] = field(default_factory=lambda: defaultdict(float))  # total, by tokens
    by_tokens: bool = False  # whether shares are of the steps with the same number of tokens, not of all
    error: str = ""  # why some events could not be read

    def add(self, key: Key, name: str, us: float) -> None:
        """Count the time of a stage, or of a step."""
        if name == STEP:
            self.steps += 1
            self.step_us[key[1]] += us
            return
        self.entries[key].us[name] += us
        self.entries[key].timed += name == "product"

    def lines(self) -> list[str]:
        """Render a table, the costliest layers first."""
        share_of = "of its steps" if self.by_tokens else "of all steps"
        rows: list[tuple[str, ...]] = [("layer", "M", "calls", *STAGES, share_of, "algorithm")]
        total = sum(self.step_us.values())
        for (kind, tokens), entry in sorted(self.entries.items(), key=lambda item: -sum(item[1].us.values())):
            means = [f"{entry.us[name] / entry.timed:.1f}" if entry.timed else "-" for name in STAGES]
            steps = self.step_us.get(tokens, 0.0) if self.by_tokens else total
            share = f"{sum(entry.us.values()) / steps:.1%}" if steps and entry.timed else "-"
            rows.append((kind, str(tokens), str(entry.calls), *means, share, entry.algorithm or "-"))
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        return [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]


class _Recorder:
    """A recorder that orders events into the stages of a layer and the layers of a step."""

    def __init__(self, captures: bool) -> None:
        self.captures = captures
        self.times = Times(by_tokens=captures)
        self.spans: list[tuple[Key, str, _Mark, _Mark]] = []
        self.current: Key | None = None
        self._before: list[tuple[str, _Mark, _Mark]] = []  # quantization, before its layer is known
        self._first: int | None = None
        # The running step: its first layer, its beginning, and its end so far
        self._step: tuple[Key, _Mark, _Mark | None] | None = None

    def stage(self, name: str, start: _Mark, end: _Mark) -> None:
        if name == STAGES[0]:
            self._before.append((name, start, end))
        elif self.current:
            self.spans.append((self.current, name, start, end))
            self._step = self._step and (*self._step[:2], end)

    def layer(self, key: Key, address: int, x: Tensor) -> None:
        begun = self._before[0][1] if self._before else _mark(x, self.captures)
        self.spans += [(key, *span) for span in self._before]
        self._before.clear()
        self._first = address if self._first is None else self._first
        if address == self._first:
            self.end_step()
            self._step = key, begun, None
        self.current = key
        self.times.entries[key].calls += 1

    def end_step(self) -> None:
        """End the current step."""
        if self._step and self._step[2] is not None:
            self.spans.append((self._step[0], STEP, self._step[1], self._step[2]))
        self._step = None


class Profiler:
    """A collector of times; not thread-safe."""

    def __init__(self) -> None:
        self.kinds: dict[int, str] = {}  # address of a packed weight -> what its layer is called
        self._launched, self._captured = _Recorder(captures=False), _Recorder(captures=True)
        self._last = self._launched

    @property
    def times(self) -> Times:
        """Times of the launches whose events have been read (`collect`)."""
        return self._launched.times

    @contextmanager
    def stage(self, name: str, x: Tensor) -> Iterator[None]:
        """Time the work launched in the block, on the device of ``x``."""
        recorder = self._recorder(x)
        start = _mark(x, recorder.captures)
        yield
        recorder.stage(name, start, _mark(x, recorder.captures))

    def layer(self, weight: Tensor, n: int, q: Tensor) -> None:
        """Record that the next GEMM belongs to the layer of the packed ``weight``, [n, K']; q [M, K']."""
        address, tokens = weight.data_ptr(), q.shape[0]
        kind = self.kinds.get(address, f"{n}x{q.shape[1]}")
        key = kind, 1 << max(0, tokens - 1).bit_length()
        self._last = recorder = self._recorder(q)
        recorder.layer(key, address, q)
        if not recorder.captures and len(recorder.spans) > PENDING:
            self.collect()

    def chose(self, algorithm: str) -> None:
        """Record the algorithm of the running GEMM."""
        if self._last.current:
            self._last.times.entries[self._last.current].algorithm = algorithm

    def _recorder(self, x: Tensor) -> _Recorder:
        return self._captured if _capturing(x) else self._launched

    def collect(self) -> None:
        """Read the pending events, once the GPU has recorded them."""
        for key, name, start, end in self._launched.spans:
            self.times.add(key, name, _between(start, end))
        self._launched.spans.clear()

    def replayed(self) -> Times:
        """Return times from the last replay of each CUDA graph; graphs that were never replayed are left out."""
        times = Times(by_tokens=True)
        for key, name, start, end in self._captured.spans:
            try:
                us = _between(start, end)
            except RuntimeError as error:
                if not any(words in str(error) for words in NEVER_SET):
                    times.error = times.error or str(error).partition("\n")[0]
                continue
            times.add(key, name, us)
        for key, entry in times.entries.items():
            entry.calls, entry.algorithm = entry.timed, self._captured.times.entries[key].algorithm
        return times

    def table(self) -> str:
        """Render the tables; empty when nothing was called."""
        for recorder in (self._launched, self._captured):
            recorder.end_step()
        self.collect()
        times, replayed = self.times, self.replayed()
        lines = []
        if times.entries:
            lines += [f"SlideSparse profile: {times.steps} steps; microseconds are means of a call"]
            lines += times.lines()
        calls = sum(entry.calls for entry in self._captured.times.entries.values())
        if calls:
            summary = (
                f"{replayed.steps} steps, as each graph was last replayed; microseconds are means of a call"
            )
            summary += f"; some could not be read: {replayed.error}" if replayed.error else ""
            lines += [f"SlideSparse profile: {calls} calls captured into CUDA graphs; {summary}"]
            lines += replayed.lines()
        return "\n".join(lines)


_profiler: Profiler | None = None
_on_switch: list[Callable[[bool], None]] = []


def enable() -> Profiler:
    """Profile this process from now on, and print the table when it ends.  Idempotent."""
    global _profiler
    if _profiler is None:
        _profiler = Profiler()
        for callback in _on_switch:
            callback(True)
        Finalize(None, _print, exitpriority=1)  # runs in worker processes too, where atexit does not
    return _profiler


def on_switch(callback: Callable[[bool], None]) -> None:
    """Call ``callback`` with whether profiling is on, now and at each change, because C++ calls cannot be timed."""
    _on_switch.append(callback)
    callback(enabled())


def disable() -> None:
    """Stop profiling and discard the results."""
    global _profiler
    _profiler = None
    for callback in _on_switch:
        callback(False)


def enabled() -> bool:
    """Return whether this process is profiled."""
    return _profiler is not None


def _print() -> None:
    text = _profiler.table() if _profiler else ""
    if text:
        print(text, file=sys.stderr, flush=True)


def stage(name: str, x: Tensor) -> AbstractContextManager[None]:
    """Time a stage when profiling is on; ``name`` is one of STAGES."""
    return nullcontext() if _profiler is None else _profiler.stage(name, x)


def layer(weight: Tensor, n: int, q: Tensor) -> None:
    """Call `Profiler.layer` when profiling is on."""
    if _profiler is not None:
        _profiler.layer(weight, n, q)


def chose(algorithm: str) -> None:
    """Call `Profiler.chose` when profiling is on."""
    if _profiler is not None:
        _profiler.chose(algorithm)


def _capturing(x: Tensor) -> bool:
    if not x.is_cuda:
        return False
    with torch.cuda.device(x.device):
        return torch.cuda.is_current_stream_capturing()


def _mark(x: Tensor, captured: bool) -> _Mark:
    if not x.is_cuda:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True, external=captured)
    event.record(torch.cuda.current_stream(x.device))
    return event


def _between(start: _Mark, end: _Mark) -> float:
    """Return the microseconds between two marks.  Raises RuntimeError for events of a graph that was never replayed."""
    if isinstance(start, float) or isinstance(end, float):
        assert isinstance(start, float)
        assert isinstance(end, float)
        return (end - start) * 1e6
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e3
