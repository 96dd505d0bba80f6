"""Mixture-of-experts models: linear layers served sparse, experts by vLLM; tokens are those of stock vLLM."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from checkpoints import MODEL, convert, tensors_of
from engines import STOCK, Engines, Request
from models import shrink_codes
from moe import MODELS, Moe
from safetensors.torch import save_file

from slidesparse.quantize import dequantize_rows

pytestmark = pytest.mark.vllm


def converted(model: Moe, folder: Path, quant: str = "int8", **options: object) -> Path:
    """Convert by the real converter; INT8 codes are made small enough for all CPUs."""
    convert(model.write(folder / "source"), folder / "out", quant=quant, **options)
    return shrink_codes(folder / "out")


@pytest.mark.parametrize("name", MODELS)
def test_experts_in_16_bits_tokens_equal_stock(engines: Engines, tmp_path: Path, name: str) -> None:
    """vLLM's CPU build serves such experts on every CPU."""
    model = converted(MODELS[name], tmp_path, ignore=[r"\.experts\."])
    expected = engines.serve(model, env=STOCK)
    assert not expected.summary
    assert len({tuple(tokens) for tokens in expected.tokens}) == len(expected.tokens)
    answer = engines.serve(model)
    assert answer.tokens == expected.tokens
    layers = {"mixtral": 4, "qwen3": 4, "qwen2": 8}[name]
    assert f"{layers} layers sparse" in answer.summary, answer.summary
    assert f"{1 if name == 'qwen2' else 2} MoE experts" in answer.summary
    if name == "qwen2":
        convert(model, tmp_path / "slided", layout="slided")
        assert engines.serve(tmp_path / "slided").tokens == expected.tokens


@pytest.mark.parametrize(("name", "quant"), [("mixtral", "int8"), ("qwen3", "fp8")])
def test_quantized_experts_are_loaded_by_vllm(
    engines: Engines, tmp_path: Path, name: str, quant: str
) -> None:
    """They go into the parameters of vLLM's own method, whose kernel alone is replaced: it has none for most
    CPUs.

    Float experts of the same values give the same tokens by vLLM's own kernel, so vLLM read what was written.
    """
    model = converted(MODELS[name], tmp_path, quant)
    floats = tmp_path / "floats"
    floats.mkdir()
    config = json.loads((model / "config.json").read_text())
    config["quantization_config"]["ignore"].append(r"re:.*\.experts\.")
    (floats / "config.json").write_text(json.dumps(config))
    tensors = tensors_of(model)
    for layer in MODELS[name].experts():
        scale = tensors.pop(f"{layer}.weight_scale")
        tensors[f"{layer}.weight"] = dequantize_rows(tensors[f"{layer}.weight"], scale)
    save_file(tensors, floats / MODEL, metadata={"format": "pt"})
    expected = engines.serve(floats, env=STOCK)
    for env in (STOCK, {}):
        answer = engines.serve(model, env=env, registered="expert_kernel")
        assert answer.tokens == expected.tokens
    assert answer.summary.startswith("6:8 (2 of every 8 pruned): 4 layers sparse")


@pytest.mark.parametrize("quant", ["int8", "fp8"])
def test_experts_without_a_kernel_are_refused_with_a_remedy(
    engines: Engines, tmp_path: Path, quant: str
) -> None:
    if torch.cpu._is_amx_tile_supported() and quant == "int8":
        pytest.skip("this CPU multiplies tiles, so vLLM has a kernel")
    convert(MODELS["mixtral"].write(tmp_path / "source"), tmp_path / "out", quant=quant)
    answer = engines.ask(Request(str(tmp_path / "out")))
    assert "block_sparse_moe.experts: vLLM cannot serve quantized experts here" in answer.error
    assert r"--ignore '\.experts\.'" in answer.error
