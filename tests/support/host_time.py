"""Time that a call takes the host."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch


def host_us(call: Callable[[], object]) -> float:
    """Microseconds of a call on the host while the GPU's queue has room: the median of 20 loops of 20 calls."""
    samples = []
    for _ in range(25):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(20):
            call()
        samples.append((time.perf_counter() - start) / 20 * 1e6)
    return statistics.median(samples[5:])
