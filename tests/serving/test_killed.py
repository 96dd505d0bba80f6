"""Processes that are killed while they serve: the request ends with vLLM's own error, and nothing hangs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import Engines
from models import QWEN, converted, write_w8a8

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

ON_GPU = torch.cuda.is_available()
MODEL = replace(QWEN, hidden=256, head_dim=64)  # FlashAttention has kernels for these sizes
GPU_OPTIONS = {
    "dtype": "float16",
    "enforce_eager": False,
    "gpu_memory_utilization": 0.1,
    "kv_cache_memory_bytes": 1 << 30,
    "disable_custom_all_reduce": True,
}


# The server is used for a killed core: the client of an offline `vllm.LLM`, SyncMPClient of 0.28.0, waits for ever
@pytest.mark.parametrize(
    ("task", "victim", "options"),
    [("killed_server", "EngineCore", {}), ("killed", "Worker", {"tensor_parallel_size": 2})],
    ids=["core", "worker"],
)
def test_killed_process_ends_requests_with_an_error(
    engines: Engines, tmp_path: Path, task: str, victim: str, options: dict[str, Any]
) -> None:
    ranks = options.get("tensor_parallel_size", 1)
    if ON_GPU and torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    model = converted(write_w8a8(MODEL, tmp_path / "w8a8"), tmp_path / "pruned", "6:8")
    answer = engines.serve(
        model,
        env={"VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
        options=options | (GPU_OPTIONS if ON_GPU else {}),
        task=task,
        work={"victim": victim, "seconds": 1.0},
        seconds=240,
    )
    assert answer.summary, "the plugin did not serve"
    assert answer.data["raised"] == "EngineDeadError"
