"""Models whose residual stream is turned give what they gave before."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file

from slidesparse.calibrate.models import open_model
from slidesparse.calibrate.rotation import RotatedReader, Rotation, obstacle, untied
from slidesparse.checkpoint.storage import Checkpoint

CPU = torch.device("cpu")
SIZES = {
    "hidden_size": 48,  # no power of two
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 64,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama tied": ("Llama", {"tie_word_embeddings": True}),
    "llama biased": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {}),
    "qwen2 tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3 tied": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
}


def saved(name: str, folder: Path) -> Any:
    """A random float32 model of transformers; norms and biases differ from their defaults."""
    kind, settings = MODELS[name]
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, "tie_word_embeddings": False, **settings})
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).float().eval()
    for parameter in model.parameters():
        parameter.data.normal_(0.0, 0.3) if parameter.dim() > 1 else parameter.data.uniform_(0.3, 1.5)
    model.save_pretrained(folder)
    return model


def orthogonal(*shape: int) -> torch.Tensor:
    return torch.linalg.qr(torch.randn(*shape, dtype=torch.float64)).Q


def written(source: Path, out: Path, rotation: Rotation) -> Any:
    """The turned model, in float32, as transformers reads it."""
    checkpoint = untied(Checkpoint.open(source))
    with checkpoint.reader() as reader:
        turned = RotatedReader(reader, open_model(checkpoint), CPU, rotation)
        tensors = {name: turned.whole(name).contiguous() for name in checkpoint.tensors}
    out.mkdir()
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(checkpoint.config))
    return transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)


@pytest.mark.parametrize("name", MODELS)
@torch.inference_mode()
def test_outputs_stay_equal(name: str, tmp_path: Path) -> None:
    model = saved(name, tmp_path / "source")
    sizes = open_model(Checkpoint.open(tmp_path / "source")).sizes
    rotation = Rotation(orthogonal(48, 48), orthogonal(2, sizes.kv_heads, sizes.head_dim, sizes.head_dim))
    turned = written(tmp_path / "source", tmp_path / "out", rotation)
    assert turned.config.tie_word_embeddings is False
    ids = torch.randint(3, 100, (2, 50), generator=torch.Generator().manual_seed(1))
    expected, found = model(ids).logits, turned(ids).logits
    assert float((found - expected).abs().max()) <= 200 * 2**-24 * float(expected.abs().max())
    assert not torch.allclose(
        turned.model.layers[0].mlp.down_proj.weight, model.model.layers[0].mlp.down_proj.weight
    )


def test_what_cannot_be_turned_is_told(tmp_path: Path) -> None:
    saved("llama", tmp_path)
    assert obstacle(Checkpoint.open(tmp_path)) is None
    for change, fact in (("BertModel", "BertModel"), ("LlamaModel", "LlamaModel")):
        config = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": [change]}))
        assert fact in str(obstacle(Checkpoint.open(tmp_path)))
