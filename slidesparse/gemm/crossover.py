"""Which numbers of tokens a layer multiplies faster by its dense weight, when it holds both (SLIDESPARSE_KEEP_DENSE).

Few tokens wait for the weight's bytes, of which a sparse one has fewer; many wait for the multiplications, of which
the windows of a mild pattern have as many as a dense weight.  Where one overtakes the other depends on the GPU, the
shape and the pattern, so it is measured, once a process and shape, while the model loads.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

# Measured numbers of tokens: between two the larger counts, beyond the last the last.
TOKENS = (32, 64, 128, 256, 512, 1024, 2048)
CALLS, SAMPLES = 8, 5
AHEAD_CYCLES = (
    3_000_000  # that the GPU is kept busy first, 1.5 ms or more: launches must not wait for the host
)
GAIN = 0.98  # of the sparse time that the dense one must stay below: equal ones stay sparse


class Shape(NamedTuple):
    """Layers of equal shape share a measurement."""

    device: int
    dtype: torch.dtype
    n: int
    k: int
    columns: int  # of the slided activations
    backend: str

    @classmethod
    def of(cls, scale_w: Tensor, k: int, dtype: torch.dtype, columns: int, backend: str) -> Shape:
        """Of a layer with weights of ``dtype``, K in-features and scales [N, 1] on the layer's device."""
        return cls(scale_w.get_device(), dtype, scale_w.shape[0], k, columns, backend)


Run = Callable[[Tensor], Tensor]  # activations [M, K] -> [M, N]
_dense: dict[Shape, frozenset[int]] = {}  # the TOKENS at which the dense weight was faster


def prefers_dense(shape: Shape, m: int) -> bool:
    """Whether ``m`` tokens are multiplied faster by the dense weight; False for a shape that was not measured."""
    chosen = _dense.get(shape)
    return chosen is not None and next((tokens for tokens in TOKENS if tokens >= m), TOKENS[-1]) in chosen


def measured(shape: Shape) -> frozenset[int] | None:
    """The TOKENS at which the dense weight was faster; None before `measure`."""
    return _dense.get(shape)


def measure(shape: Shape, dtype: torch.dtype, sparse: Run, dense: Run) -> frozenset[int]:
    """Time both at all of TOKENS on the shape's GPU, once; activations are random, of ``dtype``."""
    found = _dense.get(shape)
    if found is None:
        with torch.cuda.device(shape.device):
            found = _dense[shape] = frozenset(
                m for m in TOKENS if _dense_is_faster(shape, m, dtype, sparse, dense)
            )
    return found


def _dense_is_faster(shape: Shape, m: int, dtype: torch.dtype, sparse: Run, dense: Run) -> bool:
    device = torch.device("cuda", shape.device)
    generator = torch.Generator(device).manual_seed(m)
    x = torch.randn(m, shape.k, generator=generator, device=device).to(dtype)
    other = torch.empty(
        2 * torch.cuda.get_device_properties(device).L2_cache_size, dtype=torch.uint8, device=device
    )
    times: dict[Run, list[float]] = {sparse: [], dense: []}
    for run in times:
        run(x)  # makes plans and compiles
    for _ in range(SAMPLES):
        for run, samples in times.items():
            samples += _milliseconds(run, x, other)
    return median(times[dense]) < GAIN * median(times[sparse])


def _milliseconds(run: Run, x: Tensor, other: Tensor) -> list[float]:
    """Of CALLS calls, each after ``other`` has pushed the weight out of the cache, as a model's other layers do."""
    spans = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(CALLS)
    ]
    torch.cuda._sleep(AHEAD_CYCLES)
    for start, end in spans:
        other.zero_()
        start.record()
        run(x)
        end.record()
    spans[-1][1].synchronize()
    return [float(start.elapsed_time(end)) for start, end in spans]
