"""CUDA graphs of loops that launch thousands of small kernels, which takes longer than to run them."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

# Most bytes that a graph reads: it has a copy of them, and larger tensors keep a GPU busy
INPUT_BYTES = 2**28
# A graph takes new memory, and none that torch keeps for reuse.  That is given back if less than this share of the
# GPU's is free, but not each time, as it takes 0.27 s: a quarter of the time in which SmolLM2-135M was converted.
FREE_SHARE = 1 / 4


@dataclass
class _Recordings:
    """Graphs by function and arguments, with one pool of memory, as no two of them run at once."""

    made: dict[tuple[Any, ...], Callable[[Sequence[Tensor]], Tensor]] = field(default_factory=dict)
    stream: torch.cuda.Stream | None = None  # to one of which memory belongs
    first: torch.cuda.CUDAGraph | None = None  # the pool lives as long as one of its graphs


_recordings: _Recordings | None = None  # within `recordings`


@contextmanager
def recordings() -> Iterator[None]:
    """Let `recorded` and `record` make graphs, and keep their memory until the end."""
    global _recordings
    _recordings = _Recordings()
    try:
        yield
    finally:
        _recordings = None


def can_record(device: torch.device) -> bool:
    """Return whether graphs are made: on a GPU within `recordings`."""
    return _recordings is not None and device.type == "cuda"


@contextmanager
def aside() -> Iterator[torch.cuda.Stream]:
    """Run work on the stream of the graphs, after what the present one has been given and before what it will be.

    What autograd keeps of a weight belongs to the stream of its first backward pass.  A graph of a later pass cannot
    wait for another stream.
    """
    assert _recordings
    stream = _recordings.stream = _recordings.stream or torch.cuda.Stream()
    current = torch.cuda.current_stream()
    stream.wait_stream(current)
    try:
        with torch.cuda.stream(stream):
            yield stream
    finally:
        current.wait_stream(stream)


def record(work: Callable[[], T], inputs: Sequence[Tensor]) -> Callable[[Sequence[Tensor]], T]:
    """Return a function that copies tensors into ``inputs`` and runs a graph of ``work()``, which reads those.

    It returns what the work did, which must not wait for the GPU and has run before.
    """
    assert _recordings
    free, total = torch.cuda.mem_get_info()
    if free < FREE_SHARE * total:
        torch.cuda.empty_cache()
    graph = torch.cuda.CUDAGraph()
    with aside(), captured(graph, _recordings.first.pool() if _recordings.first else None):
        out = work()
    _recordings.first = _recordings.first or graph

    def replay(tensors: Sequence[Tensor]) -> T:
        for copy, x in zip(inputs, tensors, strict=True):
            copy.copy_(x)
        graph.replay()
        return out

    return replay


@contextmanager
def captured(graph: torch.cuda.CUDAGraph, pool: Any = None) -> Iterator[None]:
    """Capture what is launched on the current stream; like `torch.cuda.graph`, but it collects no garbage before.

    None is collected meanwhile, either: to free another graph would end the capture.

    Args:
        graph: to capture into.
        pool: of memory, by default a new one.
    """
    pool, collects = pool or torch.cuda.graph_pool_handle(), gc.isenabled()
    gc.disable()
    try:
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        yield
        graph.capture_end()
    except BaseException:
        with suppress(RuntimeError):  # no capture to end if capture_begin() or capture_end() itself failed
            graph.capture_end()
        with suppress(RuntimeError):  # otherwise the allocator is still capturing, and fails later
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)
        raise
    finally:
        if collects:
            gc.enable()


@contextmanager
def without_waiting() -> Iterator[None]:
    """Raise RuntimeError where work waits for the GPU, as a graph cannot: a failed recording would harm later ones."""
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)


def recorded(function: Callable[..., Tensor], *arguments: Any) -> Tensor:
    """Return ``function(*arguments)``, where graphs are made by one for each of the arguments' shapes.

    The function must not wait for the GPU.
    """
    tensors = [x for x in arguments if isinstance(x, Tensor)]
    device = tensors[0].device
    if not can_record(device) or sum(x.nbytes for x in tensors) > INPUT_BYTES:
        return function(*arguments)
    assert _recordings
    key = function, device, *((x.shape, x.dtype) if isinstance(x, Tensor) else x for x in arguments)
    if key not in _recordings.made:
        copies = [x.clone() if isinstance(x, Tensor) else x for x in arguments]
        function(*copies)  # loads kernels
        inputs = [x for x in copies if isinstance(x, Tensor)]
        _recordings.made[key] = record(partial(function, *copies), inputs)
    return _recordings.made[key](tensors).clone()


class Repeated:
    """Runs ``work(*tensors)``, where graphs are made from the third time on by one for each of the tensors' shapes.

    What it returns is overwritten by the next run.  Work that waits for the GPU is never recorded.
    """

    def __init__(self, work: Callable[..., Any], device: torch.device) -> None:
        self._work, self._records = work, can_record(device)
        self._graphs: dict[tuple[torch.Size, ...], Callable[[Sequence[Tensor]], Any]] = {}
        self._done = Counter[tuple[torch.Size, ...]]()

    def __call__(self, tensors: Sequence[Tensor]) -> Any:
        """Run the work."""
        shapes = tuple(x.shape for x in tensors)
        self._done[shapes] += 1
        if not self._records:
            return self._work(*tensors)
        if self._done[shapes] == 1:
            with aside():
                return self._work(*tensors)
        if self._done[shapes] == 2:
            try:
                with aside(), without_waiting():
                    return self._work(*tensors)
            except RuntimeError:  # of a block that sorts tokens by expert, for example
                self._records = False
                return self._work(*tensors)
        if shapes not in self._graphs:
            self._graphs[shapes] = record(partial(self._work, *tensors), tensors)
        return self._graphs[shapes](tensors)
