"""A short run of damaged checkpoints that vLLM loads; ``tests/support/fuzz_serving.py --count 1000`` is a long one."""

from __future__ import annotations

import pytest
from engines import Engines, Request

pytestmark = pytest.mark.vllm


def test_damaged_checkpoints_are_refused_or_served_right(engines: Engines) -> None:
    answer = engines.ask(Request("", task="damaged", work={"first": 1090, "count": 30}))
    assert not answer.error, f"{answer.error}\n{answer.log[-3000:]}"
    assert answer.data["defects"] == []
    for outcome in ("right", "refused"):
        assert answer.data["counts"][f"serve: {outcome}"] > 1
