"""Short calibrated conversions on the CPU, and their calibration samples."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from checkpoints import LLAMA, convert

from slidesparse.calibrate.task import Calibration
from slidesparse.convert.report import Report

LINEARS = sorted(LLAMA.linears())
TOKENS = (6, 24)  # number of samples, sequence length
DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


class Killed(BaseException):
    """Stand-in for a signal that kills the process: no code handles it."""


def write_ids(path: Path, samples: int = TOKENS[0]) -> str:
    """Token ids [samples, 24]."""
    np.save(path, np.random.default_rng(0).integers(0, LLAMA.vocabulary, (samples, TOKENS[1])))
    return str(path)


def calibrated(source: Path, out: Path, ids: str, **options: Any) -> Report:
    """Convert with calibration, by default without rotation and on the CPU, where results are deterministic."""
    settings = {field.name: options.pop(field.name) for field in fields(Calibration) if field.name in options}
    calibration = Calibration(ids, **{"device": "cpu", "seqlen": TOKENS[1], "rotate": "off", **settings})
    return convert(source, out, calibration=calibration, **options)


def random_model(model_class: str, config_class: str, settings: dict[str, Any]) -> Any:
    """Return a random float32 model of transformers, whose norms and biases differ from their defaults."""
    torch.manual_seed(0)
    model = getattr(transformers, model_class)(getattr(transformers, config_class)(**settings)).float().eval()
    for parameter in model.parameters():
        parameter.data.normal_(0.0, 0.3) if parameter.dim() > 1 else parameter.data.uniform_(0.3, 1.5)
    return model


def random_decoder(kind: str, **settings: Any) -> Any:
    """Return a small `random_model`."""
    sizes = {
        "hidden_size": 48,  # no power of two
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 100,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
    }
    return random_model(f"{kind}ForCausalLM", f"{kind}Config", {**sizes, **settings})
