"""A short run of the fuzzer; ``tests/support/fuzz.py --count 5000`` is a long one."""

from __future__ import annotations

import time
from typing import Any

import fuzz
import pytest

from slidesparse.errors import SlideSparseError


def count_outcomes(first: int, count: int) -> tuple[list[str], dict[str, int]]:
    """Run the fuzzer, and return its defects and the counts of outcomes."""
    defects: list[str] = []
    counts = fuzz.run(
        first, count, lambda case, damage, message: defects.append(f"case {case}, {damage}: {message}")
    )
    return defects, counts


def test_damaged_checkpoints_are_refused_or_read_right() -> None:
    defects, counts = count_outcomes(0, 300)
    assert defects == []
    for outcome in ("ok", "violations", "error"):
        assert counts[f"inspect: {outcome}"] > 1
    assert counts["convert: ok"] > 20
    assert counts["convert: error"] > 20


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (lambda: {}["x"], "KeyError"),
        (lambda: bytearray(2 << 30), "MemoryError"),
        (lambda: time.sleep(5), "it takes more than 0.1 s"),
        (lambda: (_ for _ in ()).throw(SlideSparseError("two\nlines")), "no clear line"),
    ],
)
def test_fuzzer_detects_each_kind_of_defect(
    monkeypatch: pytest.MonkeyPatch, command: Any, message: str
) -> None:
    monkeypatch.setattr(fuzz, "SECONDS", 0.1)
    with pytest.raises(fuzz.Defect, match=message):
        fuzz.outcome(command)
