"""How long work tells what it has done."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[..., None]  # of the phase, bytes done, bytes in all, and possibly a text on how it goes


def no_progress(phase: str, done: int, total: int, detail: str = "") -> None:
    """Ignore progress."""
