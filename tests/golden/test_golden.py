"""Conversions of tiny models are the same, bit for bit, as when `golden.json` was written.

After an intended change, ``python tests/golden/test_golden.py`` writes the file again; say in the commit what changed.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from models import codes, quantization_config
from tiny import tiny

from slidesparse.convert.options import ConvertOptions
from slidesparse.convert.stream import convert
from slidesparse.pattern import parse_pattern
from slidesparse.quantize import FP8, INT8, quantize_rows

GOLDEN = Path(__file__).parent / "golden.json"
HEADS = {"head_dim": 16}
EXPERTS = {**HEADS, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
GEMMA = {**HEADS, "query_pre_attn_scalar": 16, "sliding_window": 16}


def w8a8(folder: Path) -> Path:
    """Write a Llama in INT8 with per-channel scales."""
    return quantized(folder, lambda w: quantize_rows(w, INT8), "weight_scale", quantization_config("int8"))


def fp8_block(folder: Path) -> Path:
    """Write a Llama in FP8 with a scale for each block of 32 x 32 weights."""
    block = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 32]}
    return quantized(folder, lambda w: codes(w, FP8, 32, 32), "weight_scale_inv", block)


def quantized(folder: Path, quantize: Callable[..., Any], scale: str, quantization: dict[str, Any]) -> Path:
    """Quantize the linear layers of a Llama that was written to ``folder``."""
    tiny("llama", folder)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if "_proj" in name]:
        tensors[name], tensors[name.replace("weight", scale)] = quantize(tensors[name].float())
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    return folder


SOURCES: dict[str, Callable[[Path], Path]] = {
    "llama": lambda folder: tiny("llama", folder),
    "qwen3": lambda folder: tiny("qwen3", folder, **HEADS),
    "gemma3": lambda folder: tiny("gemma3_text", folder, **GEMMA),
    "phi3": lambda folder: tiny("phi3", folder),
    "bert": lambda folder: tiny("bert", folder),
    "qwen3_moe": lambda folder: tiny("qwen3_moe", folder, **EXPERTS),
    "bitnet": lambda folder: tiny("bitnet", folder, hidden_act="relu2"),
    "w8a8": w8a8,
    "fp8_block": fp8_block,
}


def digests(name: str, folder: Path) -> dict[str, str]:
    """Convert a source to 6:8 with default options; return the digests of tensors and of config.json."""
    convert(SOURCES[name](folder / "source"), folder / "out", ConvertOptions(parse_pattern("6:8")))
    tensors = hashlib.sha256()
    for key, tensor in sorted(load_file(folder / "out" / "model.safetensors").items()):
        tensors.update(f"{key} {tensor.dtype} {list(tensor.shape)}".encode())
        tensors.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    config = json.loads((folder / "out" / "config.json").read_text())
    config["quantization_config"]["slidesparse"].pop("tool")
    config.pop("transformers_version", None)
    text = json.dumps(config, sort_keys=True)
    return {"tensors": tensors.hexdigest()[:16], "config": hashlib.sha256(text.encode()).hexdigest()[:16]}


@pytest.mark.parametrize("name", SOURCES)
def test_conversion_is_unchanged(tmp_path: Path, name: str) -> None:
    assert digests(name, tmp_path) == json.loads(GOLDEN.read_text())[name]


if __name__ == "__main__":
    import tempfile

    written = {name: digests(name, Path(tempfile.mkdtemp())) for name in SOURCES}
    GOLDEN.write_text(json.dumps(written, indent=1) + "\n")
