"""Processes that are killed while they serve: the request ends with vLLM's own error, and nothing hangs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from models import QWEN, converted, write_w8a8
from zygote import Request, Zygote

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


# A server notices; the client of an offline `vllm.LLM`, SyncMPClient of 0.28.0, waits for ever when its core is killed
@pytest.mark.parametrize(
    ("task", "victim", "options"),
    [("killed_server", "EngineCore", {}), ("killed", "Worker", {"tensor_parallel_size": 2})],
    ids=["core", "worker"],
)
def test_a_process_that_is_killed(
    zygote: Zygote, tmp_path: Path, task: str, victim: str, options: dict[str, Any]
) -> None:
    model = converted(write_w8a8(QWEN, tmp_path / "w8a8"), tmp_path / "pruned", "6:8")
    request = Request(
        str(model),
        env={"VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
        options=options,
        task=task,
        work={"victim": victim, "seconds": 1.0},
        seconds=240,
    )
    answer = zygote.ask(request)
    assert not answer.error, answer.error + answer.log[-3000:]
    assert answer.summary, "the plugin did not serve"
    assert answer.data["raised"] == "EngineDeadError"
