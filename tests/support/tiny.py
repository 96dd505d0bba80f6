"""Tiny models of many architectures, made by transformers, whose weights are the same on every CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}


def tiny(model_type: str, folder: Path, **settings: Any) -> Path:
    """Write the model of a ``model_type`` of transformers in BF16, [2 blocks, hidden 64] unless ``settings`` differ."""
    model = build(model_type, **settings)
    fill(model)
    model.bfloat16().save_pretrained(folder)
    return folder


def build(model_type: str, architecture: str | None = None, **settings: Any) -> nn.Module:
    """Return a model of transformers without meaningful weights.

    Args:
        architecture: its class; by default the causal one, that of images and text, or the bare one.
    """
    config = transformers.CONFIG_MAPPING[model_type](**{**SIZES, **settings})
    kind: Any = getattr(transformers, architecture) if architecture else transformers.AutoModel
    for mapping, auto in (
        (transformers.MODEL_FOR_CAUSAL_LM_MAPPING, transformers.AutoModelForCausalLM),
        (transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, transformers.AutoModelForImageTextToText),
    ):
        if not architecture and type(config) in mapping and "bert" not in model_type:
            kind = auto
    make = kind._from_config if architecture else kind.from_config
    model: nn.Module = make(config, dtype=torch.float32, experts_implementation="eager")
    return model.eval()


def fill(model: nn.Module, seed: int = 0) -> None:
    """Set all parameters: matrices about normal with an output of about their input's size, others near 1."""
    generator = np.random.default_rng(seed)
    for parameter in model.parameters():
        x = bell(generator, parameter.shape)
        scale = 1.5 * parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.2
        parameter.data = x * scale + (0.0 if parameter.dim() > 1 else 1.0)


def bell(generator: np.random.Generator, shape: torch.Size | tuple[int, ...]) -> Tensor:
    """Return sums of four uniform integers, of variance 1: exact, unlike a normal distribution's logarithms."""
    total = sum(generator.integers(-127, 128, tuple(shape)) for _ in range(4))
    return torch.from_numpy(np.asarray(total, dtype=np.float32)) / 146.0
