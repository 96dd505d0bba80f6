"""A short run of the fuzzer; FUZZ_TIMES=20 makes it a long one."""

from __future__ import annotations

import fuzz


def test_damaged_checkpoints_are_refused_or_read_right() -> None:
    counts, defects = fuzz.run(0, 300 * fuzz.MORE)
    assert defects == []
    for outcome in ("inspect: ok", "inspect: violations", "inspect: error"):
        assert counts[outcome] > 1
    assert min(counts["convert: ok"], counts["convert: error"]) > 20
