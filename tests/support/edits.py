"""Checkpoints that are edited after conversion, and refusals to serve them."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from engines import Engines, Request
from safetensors.torch import load_file, save_file

SPARSE_FLAGS = {"USE_CUSPARSELT": "1", "SPARSITY": "2_8"}


def edited(
    source: Path, out: Path, tensors: dict[str, torch.Tensor | None], quantization: dict[str, object]
) -> str:
    """A copy of ``source`` with tensors and entries of quantization_config replaced (None removes)."""
    out.mkdir()
    both = {**load_file(source / "model.safetensors"), **tensors}
    merged = {name: tensor for name, tensor in both.items() if tensor is not None}
    save_file(merged, out / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    for key, value in quantization.items():
        if value is None:
            del config["quantization_config"][key]
        else:
            config["quantization_config"][key] = value
    (out / "config.json").write_text(json.dumps(config))
    return str(out)


def refused(engines: Engines, model: str, env: dict[str, str], *words: str, **options: object) -> str:
    answer = engines.ask(Request(model, env=env, options=options))
    assert answer.error, "this should not have been served"
    message = answer.error + answer.log
    for word in words:
        assert word in message, f"{word!r} is missing from:\n{answer.error}\n{answer.log[-3000:]}"
    return answer.error
