"""Measurement of the host time of a call."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch


def host_us(call: Callable[[], object]) -> float:
    """Median host time of a call, in microseconds, over 20 loops of 20 calls that do not fill the GPU's queue."""
    samples = []
    for _ in range(25):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(20):
            call()
        samples.append((time.perf_counter() - start) / 20 * 1e6)
    return statistics.median(samples[5:])
