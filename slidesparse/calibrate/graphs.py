"""CUDA graphs of loops that launch thousands of small kernels, which takes longer than to run them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

# Most bytes that a graph reads: it has a copy of them, and larger tensors keep a GPU busy
INPUT_BYTES = 2**28


class _Recording(NamedTuple):
    """A CUDA graph, and what it reads and writes."""

    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]
    out: Tensor


class _Recordings:
    """Graphs by function and arguments, with one pool of memory, as no two of them run at once."""

    def __init__(self) -> None:
        self.made: dict[tuple[Any, ...], _Recording] = {}
        self._stream: torch.cuda.Stream | None = None  # to one of which memory belongs
        self._first: torch.cuda.CUDAGraph | None = None  # the pool lives as long as one of its graphs

    @contextmanager
    def aside(self) -> Iterator[torch.cuda.Stream]:
        stream = self._stream = self._stream or torch.cuda.Stream()
        current = torch.cuda.current_stream()
        stream.wait_stream(current)
        try:
            with torch.cuda.stream(stream):
                yield stream
        finally:
            current.wait_stream(stream)

    def record(self, work: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
        graph, pool = torch.cuda.CUDAGraph(), self._first.pool() if self._first else None
        with (
            self.aside() as stream,
            torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"),
        ):
            out = work()
        self._first = self._first or graph
        return graph, out


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
def aside() -> Iterator[None]:
    """Run work on the stream of the graphs, after what the present one has been given and before what it will be.

    What autograd keeps of a weight belongs to the stream of its first backward pass.  A graph of a later pass cannot
    wait for another stream.
    """
    assert _recordings
    with _recordings.aside():
        yield


def record(work: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
    """Return a graph of ``work()``, which must not wait for the GPU and has run before, and what it returns."""
    assert _recordings
    return _recordings.record(work)


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
        graph, out = record(partial(function, *copies))
        _recordings.made[key] = _Recording(graph, [x for x in copies if isinstance(x, Tensor)], out)
    recording = _recordings.made[key]
    for copy, x in zip(recording.inputs, tensors, strict=True):
        copy.copy_(x)
    recording.graph.replay()
    return recording.out.clone()
