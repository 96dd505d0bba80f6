"""A clock for distillation that advances by one second at each reading, so that all runs have the same steps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from slidesparse.calibrate import distill

WORKER = distill._worker


def set_clock(patch: pytest.MonkeyPatch) -> None:
    seconds = iter(range(10**6))
    patch.setattr(distill, "time", SimpleNamespace(monotonic=lambda: float(next(seconds))))


def set_pace(patch: pytest.MonkeyPatch) -> None:
    """Set the clock, with short steps at a high rate."""
    set_clock(patch)
    patch.setattr(distill, "RATE", 0.01)
    patch.setitem(distill.STEP_TOKENS, "cpu", 960)
    patch.setitem(distill.PASS_TOKENS, "cpu", 240)


def paced_worker(*arguments: Any) -> None:
    """Train in a process of its own, by such a clock."""
    set_pace(pytest.MonkeyPatch())
    WORKER(*arguments)
