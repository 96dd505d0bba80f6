"""CUDA graphs of loops that launch thousands of small kernels, which takes longer than to run them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

INPUT_BYTES = (
    2**28
)  # most bytes that a graph reads: it has a copy of them, and larger tensors keep a GPU busy


class _Recording(NamedTuple):
    """A CUDA graph, and what it reads and writes."""

    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]
    out: Tensor


_recordings: dict[tuple[Any, ...], _Recording] | None = None  # within `recordings`


@contextmanager
def recordings() -> Iterator[None]:
    """Let `recorded` make graphs, and keep them until the end."""
    global _recordings
    _recordings = {}
    try:
        yield
    finally:
        _recordings = None


def recorded(function: Callable[..., Tensor], *arguments: Any) -> Tensor:
    """Return ``function(*arguments)``, on a GPU within `recordings` by a graph for each of the arguments' shapes.

    The function must not wait for the GPU.
    """
    tensors = [x for x in arguments if isinstance(x, Tensor)]
    device = tensors[0].device
    if _recordings is None or device.type != "cuda" or sum(x.nbytes for x in tensors) > INPUT_BYTES:
        return function(*arguments)
    key = function, device, *((x.shape, x.dtype) if isinstance(x, Tensor) else x for x in arguments)
    if key not in _recordings:
        copies = [x.clone() if isinstance(x, Tensor) else x for x in arguments]
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            function(*copies)  # loads kernels
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                out = function(*copies)
        torch.cuda.current_stream(device).wait_stream(stream)
        _recordings[key] = _Recording(graph, [x for x in copies if isinstance(x, Tensor)], out)
    recording = _recordings[key]
    for copy, x in zip(recording.inputs, tensors, strict=True):
        copy.copy_(x)
    recording.graph.replay()
    return recording.out.clone()
