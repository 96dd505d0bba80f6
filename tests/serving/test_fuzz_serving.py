"""A short run of damaged checkpoints that vLLM loads; ``tests/support/fuzz_serving.py --count 1000`` is a long one."""

from __future__ import annotations

import pytest
from engines import Engines

pytestmark = pytest.mark.vllm


def test_damaged_checkpoints_are_refused_or_served_right(engines: Engines) -> None:
    answer = engines.serve("", task="damaged", work={"first": 2000, "count": 25})
    assert answer.data["defects"] == []
    for outcome in ("right", "refused"):
        assert answer.data["counts"][f"serve: {outcome}"] > 1
