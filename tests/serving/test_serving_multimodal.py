"""The language model inside a multimodal model, whose vision tower no request uses, is served like any other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from engines import Engines
from models import LLAMA, converted, write_w8a8
from safetensors.torch import load_file, save_file

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

NO_IMAGES = {"limit_mm_per_prompt": {"image": 0}}
VISION = {
    "model_type": "idefics3_vision",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 56,
    "patch_size": 14,
}


def wrapped(text: Path, folder: Path) -> str:
    """Write a checkpoint of Idefics3, without weights of its vision tower, that contains a Llama checkpoint."""

    def renamed(name: str) -> str:
        return name if name.startswith("lm_head") else f"model.text_model.{name.removeprefix('model.')}"

    folder.mkdir()
    tensors = load_file(text / "model.safetensors")
    save_file({renamed(name): tensor for name, tensor in tensors.items()}, folder / "model.safetensors")
    config: dict[str, Any] = json.loads((text / "config.json").read_text())
    block = config.pop("quantization_config")
    if metadata := block.get("slidesparse"):
        metadata["layers"] = {renamed(name): entry for name, entry in metadata["layers"].items()}
    wrapper = {
        "architectures": ["Idefics3ForConditionalGeneration"],
        "model_type": "idefics3",
        "text_config": config,
        "vision_config": VISION,
        "image_token_id": LLAMA.vocabulary - 1,
        "scale_factor": 2,
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": False,
        "quantization_config": block,
    }
    (folder / "config.json").write_text(json.dumps(wrapper))
    return str(folder)


def test_language_model_is_served_sparse(engines: Engines, tmp_path: Path) -> None:
    plain = write_w8a8(LLAMA, tmp_path / "plain")
    whole = converted(Path(wrapped(plain, tmp_path / "wrapped")), tmp_path / "whole", "6:8")
    answer = engines.serve(str(whole), options=NO_IMAGES)
    text = converted(plain, tmp_path / "text", "6:8")
    assert "8 layers sparse, 1 dense (1 lm_head)" in answer.summary
    assert answer.tokens == engines.serve(text).tokens
