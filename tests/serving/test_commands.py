"""vLLM's own commands, unchanged, on a converted checkpoint."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from models import QWEN, converted, write_float

from slidesparse import demo

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt")


def test_vllm_bench_throughput(tmp_path: Path) -> None:
    """The command measures a BF16 folder with a tokenizer after conversion, with the flags of the
    environment.
    """
    source = write_float(replace(QWEN, vocabulary=30522), tmp_path / "source")
    for name in TOKENIZER:
        shutil.copy(demo.original() / name, source / name)
    model = converted(source, tmp_path / "pruned", "6:8")
    command = [
        *(str(Path(sys.executable).with_name("vllm")), "bench", "throughput", "--model", str(model)),
        *(
            "--dataset-name",
            "random",
            "--num-prompts",
            "4",
            "--random-input-len",
            "16",
            "--random-output-len",
            "8",
        ),
        *("--enforce-eager", "--gpu-memory-utilization", "0.2", "--max-model-len", "256"),
    ]
    env = {"USE_CUSPARSELT": "1", "SPARSITY": "2_8", "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    run = subprocess.run(
        command, env=os.environ | env, capture_output=True, text=True, timeout=300, check=False
    )
    printed = run.stdout + run.stderr
    assert run.returncode == 0, printed[-4000:]
    assert re.search(r"Throughput: [\d.]+ requests/s", printed)
    assert "SlideSparse 6:8 (2 of every 8 pruned): 8 layers sparse, 1 dense (1 lm_head)" in printed
