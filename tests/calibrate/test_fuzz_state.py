"""A short run of `fuzz_state`; FUZZ_TIMES=50 makes it a long one."""

from __future__ import annotations

import fuzz_state
from fuzz import MORE


def test_damaged_state_of_other_runs_is_refused_or_replaced() -> None:
    defects: list[tuple[int, str, str]] = []
    counts = fuzz_state.run(0, 40 * MORE, lambda *defect: defects.append(defect))
    assert defects == []
    assert counts["work: error"] > 5
    assert counts["losses: ok"] > 5
    assert counts["tuned: error"] > 2
