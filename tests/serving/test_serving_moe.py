"""Mixtures of experts: the tokens are those of stock vLLM on the same checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import convert, edit_block
from edits import SPARSE_FLAGS, edited
from engines import STOCK, Answer, Engines, Request
from models import shrink_codes
from moe import MODELS, PRUNED, Moe

from slidesparse import doctor
from slidesparse.evaluate.engine import summaries

pytestmark = pytest.mark.vllm


TWO_PATTERNS = ["attn=dense", *PRUNED, "experts.*down_proj=2:4"]


def converted(model: Moe, folder: Path, quant: str = "int8", **options: object) -> Path:
    """Convert by the real converter, experts at 6:8, too; INT8 codes are made small enough for all CPUs."""
    options = {"layer": () if "ignore" in options else PRUNED, **options}
    convert(model.write(folder / "source"), folder / "out", quant=quant, **options)
    return shrink_codes(folder / "out")


@pytest.mark.parametrize("name", MODELS)
def test_experts_in_16_bits_tokens_equal_stock(engines: Engines, tmp_path: Path, name: str) -> None:
    """vLLM's CPU build serves such experts on every CPU."""
    model = converted(MODELS[name], tmp_path, ignore=[r"\.experts\."])
    answer = engines.as_stock(model)
    assert len({tuple(tokens) for tokens in answer.tokens}) == len(answer.tokens)
    layers = {"mixtral": 4, "qwen3": 4, "qwen2": 8}[name]
    assert f"{layers} layers sparse" in answer.summary, answer.summary
    assert f"{1 if name == 'qwen2' else 2} MoE experts" in answer.summary
    if name == "qwen2":
        convert(model, tmp_path / "slided", layout="slided")
        assert engines.serve(tmp_path / "slided").tokens == answer.tokens


def stock(engines: Engines, model: Path, **settings: object) -> Answer:
    """vLLM's own methods load the experts; torch multiplies, as vLLM has no kernel for them on most CPUs."""
    answer = engines.serve(model, env=STOCK, registered="expert_kernel", **settings)
    assert not answer.summary
    return answer


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize(
    ("name", "quant", "options", "words"),
    [
        ("mixtral", "int8", {}, "6:8 (2 of every 8 pruned): 6 layers sparse"),
        ("qwen3", "fp8", {}, "6:8 (2 of every 8 pruned): 6 layers sparse"),
        ("qwen2", "int8", {}, "6:8 (2 of every 8 pruned): 9 layers sparse"),
        ("qwen2", "int8", {"layout": "slided"}, "9 layers sparse"),
        ("qwen3", "int8", {"layer": TWO_PATTERNS}, "2 layers sparse (2 at 6:8 and 2:4)"),
        ("mixtral", "int8", {"layer": []}, "4 layers sparse, 2 not pruned"),
    ],
)
def test_tokens_of_quantized_experts_equal_stock(
    engines: Engines, tmp_path: Path, name: str, quant: str, options: dict[str, Any], words: str
) -> None:
    """Shared experts, if any, are vLLM's linear layers; the layout of experts is always dense.  Doctor counts alike."""
    model = converted(MODELS[name], tmp_path, quant, **{**options, "layout": "dense"})
    expected = stock(engines, model)
    assert len({tuple(tokens) for tokens in expected.tokens}) == len(expected.tokens)
    if "layout" in options:
        convert(model, tmp_path / "slided", layout=options["layout"])
        model = tmp_path / "slided"
    answer = engines.serve(model)
    assert answer.tokens == expected.tokens
    assert words in answer.summary, answer.summary
    assert doctor.examine("model", model).patterns == summaries(answer.log)[0]["layers"]


@pytest.mark.parametrize("options", [{}, {"enable_expert_parallel": True}], ids=["tensor", "expert"])
def test_experts_on_two_processes(engines: Engines, tmp_path: Path, options: dict[str, Any]) -> None:
    """Tensor parallelism cuts the second layer's columns; expert parallelism gives each process half of the experts."""
    model = converted(MODELS["qwen2"], tmp_path)
    answer = engines.serve(model, options={"tensor_parallel_size": 2, **options})
    assert answer.tokens == stock(engines, model, options={"tensor_parallel_size": 2, **options}).tokens
    assert "9 layers sparse" in answer.summary


def test_a_missing_expert_is_refused(engines: Engines, tmp_path: Path) -> None:
    """vLLM's loader leaves its memory as it was."""
    model = converted(MODELS["qwen3"], tmp_path)
    name = "model.layers.1.mlp.experts.3.up_proj"
    edited(model, tmp_path / "less", {f"{name}.weight": None, f"{name}.weight_scale": None}, {})
    answer = engines.ask(Request(str(tmp_path / "less")))
    assert "model.layers.1.mlp.experts: the checkpoint lacks experts" in answer.error


def test_experts_with_a_flag_alone_and_compiled(engines: Engines, tmp_path: Path) -> None:
    model = converted(MODELS["qwen3"], tmp_path)
    edit_block(model, slidesparse=None)
    answer = engines.serve(model, env=SPARSE_FLAGS, options={"enforce_eager": False}, pieces=True)
    assert answer.tokens == stock(engines, model).tokens
    assert "6 layers sparse" in answer.summary


@pytest.mark.parametrize("quant", ["int8", "fp8"])
def test_experts_without_a_kernel_are_refused(engines: Engines, tmp_path: Path, quant: str) -> None:
    """With LoRA experts are left to vLLM."""
    if torch.cpu._is_amx_tile_supported() and quant == "int8":
        pytest.skip("this CPU multiplies tiles, so vLLM has a kernel")
    convert(MODELS["mixtral"].write(tmp_path / "source"), tmp_path / "out", quant=quant)
    answer = engines.ask(Request(str(tmp_path / "out"), options={"enable_lora": True}))
    assert "block_sparse_moe.experts: vLLM cannot serve quantized experts here" in answer.error
    assert r"--ignore '\.experts\.'" in answer.error
