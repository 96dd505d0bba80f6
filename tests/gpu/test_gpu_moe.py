"""Mixtures of experts on GPUs: routed experts by the grouped kernel give the tokens of vLLM's own on one checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import convert
from engines import STOCK, Engines
from moe import MODELS

pytestmark = [pytest.mark.gpu, pytest.mark.vllm]

PROMPTS = [[(7 * i * j + 3) % 500 for j in range(1, 40 + i)] for i in range(1, 9)]
TOKENS = 24
SAME = 0.9  # of the texts; sums that are rounded in another order may turn a near tie


@pytest.mark.parametrize(
    ("name", "quant", "pattern", "options"),
    [
        ("mixtral", "int8", "6:8", {}),
        ("qwen3", "int8", "2:4", {"enforce_eager": False}),
        ("qwen2", "int8", "6:8", {"enforce_eager": False}),
        ("qwen3", "fp8", "2:4", {}),
        ("qwen2", "int8", "6:8", {"tensor_parallel_size": 2}),
        ("qwen3", "int8", "2:4", {"tensor_parallel_size": 2, "enable_expert_parallel": True}),
    ],
)
def test_texts_equal_stock(
    engines: Engines, tmp_path: Path, name: str, quant: str, pattern: str, options: dict[str, Any]
) -> None:
    if torch.cuda.device_count() < options.get("tensor_parallel_size", 1):
        pytest.skip("two GPUs are needed")
    convert(MODELS[name].write(tmp_path / "source"), tmp_path / "out", pattern, quant=quant)
    settings: dict[str, Any] = {
        "options": {"dtype": "bfloat16", "disable_custom_all_reduce": True, **options},
        "work": {"prompts": PROMPTS, "tokens": TOKENS},
    }
    expected = engines.serve(tmp_path / "out", env=STOCK, **settings)
    answer = engines.serve(tmp_path / "out", **settings)
    assert not expected.summary
    assert "MoE experts" not in answer.summary, answer.summary
    first = [(a[0], b[0]) for a, b in zip(answer.tokens, expected.tokens, strict=True)]
    assert sum(a == b for a, b in first) >= (SAME if quant == "int8" else 0.5) * len(first)
    equal = sum(a == b for a, b in zip(answer.tokens, expected.tokens, strict=True))
    print(f"{equal} of {len(PROMPTS)} texts equal stock's")
    assert quant == "fp8" or equal >= SAME * len(PROMPTS)
