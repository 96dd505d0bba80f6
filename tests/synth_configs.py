"""What the tests of synth share: small models' configs, and samples of few rows."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from models import LLAMA, QWEN, Decoder

from slidesparse import checkpoint as checkpoint_module

SIZES: dict[str, int] = {"hidden": 64, "intermediate": 88, "heads": 2, "kv_heads": 1, "vocabulary": 90}
SMALL = {"qwen2": replace(QWEN, **SIZES), "llama": replace(LLAMA, **SIZES)}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples of few rows, so that tiny tensors take several turns of them."""
    monkeypatch.setattr(checkpoint_module, "CHUNK_ELEMENTS", 640)


def config_file(folder: Path, model: Decoder = SMALL["qwen2"], **changed: Any) -> Path:
    """A config.json; ``changed`` entries are replaced, or removed with None."""
    path = folder / "config.json"
    config = {**model.config(), **changed}
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))
    return path
