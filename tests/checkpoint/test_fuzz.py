"""A short run of the fuzzer; FUZZ_TIMES=20 makes it a long one."""

from __future__ import annotations

import fuzz


def test_damaged_checkpoints_are_refused_or_read_right() -> None:
    defects: list[tuple[int, str, str]] = []
    counts = fuzz.run(0, 300 * fuzz.MORE, lambda *defect: defects.append(defect))
    assert defects == []
    for outcome in ("ok", "violations", "error"):
        assert counts[f"inspect: {outcome}"] > 1
    assert counts["convert: ok"] > 20
    assert counts["convert: error"] > 20
