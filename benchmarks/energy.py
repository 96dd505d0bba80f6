"""The energy that a GPU counts itself, by NVML; standard library only.

On an H100 the counter moves every 100 ms, and a read takes 3 ms, sometimes 30.  Power is therefore the mean between two
moments at which the counter was seen to move, and not the difference of two reads.  Of a move that a slow read saw,
nobody knows when it was: it counts only if the read took little of the time between the first and the last move.
"""

from __future__ import annotations

import ctypes
import time
from contextlib import suppress

SLOW_READ_SECONDS = 0.01
SLOW_READ_SHARE = 0.02  # of the time between the first and the last move of the counter


class EnergyCounter:
    """The total energy of one GPU, by its UUID or its index among those of the driver."""

    def __init__(self, gpu: str | int) -> None:
        self._value, self._device = ctypes.c_ulonglong(), ctypes.c_void_p()
        self._last: int | None = None
        # seconds at which the counter was seen to move, its value, and the seconds that the read took
        self._ticks: list[tuple[float, int, float]] = []
        self._nvml: ctypes.CDLL | None = None
        with suppress(OSError):
            nvml = ctypes.CDLL("libnvidia-ml.so.1")
            handle = ctypes.byref(self._device)
            failed = nvml.nvmlInit_v2() or (
                nvml.nvmlDeviceGetHandleByIndex_v2(gpu, handle)
                if isinstance(gpu, int)
                else nvml.nvmlDeviceGetHandleByUUID(f"GPU-{gpu.removeprefix('GPU-')}".encode(), handle)
            )
            self._nvml = None if failed else nvml

    def read(self) -> int | None:
        """Return the millijoules since the driver was loaded; None if the GPU does not count them."""
        if self._nvml is None:
            return None
        failed = self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._device, ctypes.byref(self._value))
        return None if failed else self._value.value

    def restart(self) -> None:
        """Forget what was seen so far."""
        self._ticks.clear()
        self._last = self.read()

    def poll(self) -> bool:
        """Read the counter once; return whether the GPU has one."""
        before = time.perf_counter()
        value = self.read()
        after = time.perf_counter()
        if value != self._last and value is not None:
            self._last = value
            self._ticks.append((after, value, after - before))
        return value is not None

    @property
    def watts(self) -> float | None:
        """The mean power between the first and the last move of the counter whose time is known; None for no two."""
        span = self._ticks[-1][0] - self._ticks[0][0] if self._ticks else 0.0
        slow = max(SLOW_READ_SECONDS, SLOW_READ_SHARE * span)
        known = [(moment, value) for moment, value, seconds in self._ticks if seconds < slow]
        if len(known) < 2:
            return None
        (began, first), (ended, last) = known[0], known[-1]
        return (last - first) / (ended - began) / 1e3
