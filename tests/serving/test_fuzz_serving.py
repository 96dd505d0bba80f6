"""A short run of damaged checkpoints that vLLM loads; FUZZ_TIMES=40 makes it a long one."""

from __future__ import annotations

import pytest
from engines import Engines
from fuzz import MORE

pytestmark = pytest.mark.vllm


def test_damaged_checkpoints_are_refused_or_served_right(engines: Engines) -> None:
    answer = engines.serve("", task="damaged", work={"first": 2000, "count": 25 * MORE}, seconds=600 * MORE)
    assert answer.data["defects"] == []
    for outcome in ("right", "refused"):
        assert answer.data["counts"][f"serve: {outcome}"] > 1
