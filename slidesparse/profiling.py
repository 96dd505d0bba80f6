"""Where the time of layers goes: ``SLIDESPARSE_PROFILE=1`` prints a table when a serving process ends.

    layer         M     calls  quantize  product  scale  of all steps  algorithm
    gate_up_proj  4096  28     60.1      1407.2   98.3   41.0%         19

Stages are timed on the GPU with CUDA events around what is launched, on a CPU with a clock; microseconds are means of a
call.  A norm or an activation that is fused with quantization counts as quantization.  A step is the time from the
beginning of a model's first layer to the end of its last one, with all that runs between.  Calls that are captured into
a CUDA graph cannot be timed, as a replay runs no Python: they are counted, and the table says so; what is replayed
between two steps is in neither.
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
PENDING = 4096  # events that wait to be read; more make the host wait for the GPU

Key = tuple[str, int]  # a layer's kind, and its tokens rounded up to a power of two
_Mark = float | torch.cuda.Event


@dataclass
class Entry:
    """What is known of the calls of one kind at one number of tokens."""

    calls: int = 0
    captured: int = 0  # of them: into CUDA graphs, not timed
    us: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))  # in all
    algorithm: str = ""


class Profiler:
    """Collects times; not for several threads at once."""

    def __init__(self) -> None:
        self.entries: dict[Key, Entry] = defaultdict(Entry)
        self.kinds: dict[int, str] = {}  # address of a packed weight -> what its layer is called
        self.step_us = 0.0
        self.steps = 0
        self._current: Key | None = None
        self._before: list[tuple[str, _Mark, _Mark]] = []  # timed before the layer is known: its quantization
        self._pending: list[tuple[Key, str, _Mark, _Mark]] = []
        self._first: int | None = None
        self._step: tuple[_Mark, _Mark | None] | None = None  # that runs: its beginning, and its end so far

    @contextmanager
    def stage(self, name: str, x: Tensor) -> Iterator[None]:
        """Time what is launched within, on the device of ``x``."""
        if _capturing(x):
            yield
            return
        start = _mark(x)
        yield
        end = _mark(x)
        if name == STAGES[0]:
            self._before.append((name, start, end))
        elif self._current:
            self._pending.append((self._current, name, start, end))
            self._step = self._step and (self._step[0], end)

    def layer(self, weight: Tensor, n: int, q: Tensor) -> None:
        """The product that comes belongs to the layer of ``weight``, packed, [n, K']; q [M, K']."""
        address, tokens = weight.data_ptr(), q.shape[0]
        kind = self.kinds.get(address, f"{n}x{q.shape[1]}")
        self._current = kind, 1 << max(0, tokens - 1).bit_length()
        entry = self.entries[self._current]
        entry.calls += 1
        if _capturing(q):
            entry.captured += 1
            self._before.clear()
            return
        begun = self._before[0][1] if self._before else _mark(q)
        self._pending += [(self._current, *span) for span in self._before]
        self._before.clear()
        self._first = address if self._first is None else self._first
        if address == self._first:
            self._end_step()
            self._step = begun, None
        if len(self._pending) > PENDING:
            self.collect()

    def chose(self, algorithm: str) -> None:
        """The algorithm of the product that runs."""
        if self._current:
            self.entries[self._current].algorithm = algorithm

    def _end_step(self) -> None:
        """Another one begins, or none."""
        if self._step and self._step[1] is not None and self._current:
            self._pending.append((self._current, STEP, self._step[0], self._step[1]))
        self._step = None

    def collect(self) -> None:
        """Read the events that wait, once the GPU has passed them."""
        for key, name, start, end in self._pending:
            us = _between(start, end)
            if name == STEP:
                self.step_us += us
                self.steps += 1
            else:
                self.entries[key].us[name] += us
        self._pending.clear()

    def table(self) -> str:
        """The table, the costliest layers first; empty when nothing was called."""
        self._end_step()
        self.collect()
        if not self.entries:
            return ""
        rows: list[tuple[str, ...]] = [("layer", "M", "calls", *STAGES, "of all steps", "algorithm")]
        ordered = sorted(self.entries.items(), key=lambda item: -sum(item[1].us.values()))
        for (kind, tokens), entry in ordered:
            timed = max(1, entry.calls - entry.captured)
            share = f"{sum(entry.us.values()) / self.step_us:.1%}" if self.step_us else "-"
            means = [f"{entry.us[name] / timed:.1f}" for name in STAGES]
            rows.append((kind, str(tokens), str(entry.calls), *means, share, entry.algorithm or "-"))
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows
        ]
        captured = sum(entry.captured for entry in self.entries.values())
        note = f"{self.steps} steps; microseconds are means of a call"
        if captured:
            note += (
                f"; {captured} calls went into CUDA graphs, not timed: serve with --enforce-eager to time all"
            )
        return "\n".join([f"SlideSparse profile: {note}", *(line.rstrip() for line in lines)])


_profiler: Profiler | None = None
_when_enabled: list[Callable[[], None]] = []


def enable() -> Profiler:
    """Profile this process from now on, and print the table when it ends.  Again: the same profiler."""
    global _profiler
    if _profiler is None:
        _profiler = Profiler()
        for callback in _when_enabled:
            callback()
        Finalize(None, _print, exitpriority=1)  # runs in worker processes too, where atexit does not
    return _profiler


def when_enabled(callback: Callable[[], None]) -> None:
    """Call this when profiling begins: what runs without Python cannot be timed."""
    _when_enabled.append(callback)


def disable() -> None:
    """Stop profiling and forget what was found."""
    global _profiler
    _profiler = None


def enabled() -> bool:
    """Whether this process is profiled."""
    return _profiler is not None


def _print() -> None:
    text = _profiler.table() if _profiler else ""
    if text:
        print(text, file=sys.stderr, flush=True)


def stage(name: str, x: Tensor) -> AbstractContextManager[None]:
    """Time a stage when profiling is on; ``name`` is one of STAGES."""
    return nullcontext() if _profiler is None else _profiler.stage(name, x)


def layer(weight: Tensor, n: int, q: Tensor) -> None:
    """See `Profiler.layer`; nothing when profiling is off."""
    if _profiler is not None:
        _profiler.layer(weight, n, q)


def chose(algorithm: str) -> None:
    """See `Profiler.chose`; nothing when profiling is off."""
    if _profiler is not None:
        _profiler.chose(algorithm)


def _capturing(x: Tensor) -> bool:
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def _mark(x: Tensor) -> _Mark:
    if not x.is_cuda:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between(start: _Mark, end: _Mark) -> float:
    """Microseconds."""
    if isinstance(start, float) or isinstance(end, float):
        assert isinstance(start, float)
        assert isinstance(end, float)
        return (end - start) * 1e6
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e3
