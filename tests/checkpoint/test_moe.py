"""Mixtures of experts: routed experts are quantized and not pruned, or left as they are; routers always are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoints import assert_same_tensors, config_of, convert, refused, tensors_of, write
from commands import Done
from moe import EXPERTS, HIDDEN, LAYERS, MODELS

from slidesparse.checkpoint.inspection import inspect
from slidesparse.pattern import SlidePattern
from slidesparse.prune import prune
from slidesparse.quantize import NAMES, quantize_rows

EXPERT_DOWN = "model.layers.0.mlp.experts.down_proj"


@pytest.mark.parametrize(("name", "quant"), [("mixtral", "int8"), ("qwen2", "fp8"), ("qwen3", "int8")])
def test_linear_layers_are_pruned_and_experts_quantized(tmp_path: Path, name: str, quant: str) -> None:
    model = MODELS[name]
    source = model.write(tmp_path / "source")
    report = convert(source, tmp_path / "out", quant=quant)
    assert set(report.pruned) == set(model.linears())
    assert set(report.skipped) == set(model.experts())
    assert report.experts == {"w8a8": len(model.experts()), "kept": 0}
    expected = tensors_of(source)
    for layer in {**model.linears(), **model.experts()}:
        weight = expected[f"{layer}.weight"]
        weight = prune(weight, SlidePattern(8)) if layer in report.pruned else weight
        expected[f"{layer}.weight"], expected[f"{layer}.weight_scale"] = quantize_rows(weight, NAMES[quant])
    assert_same_tensors(tensors_of(tmp_path / "out"), expected)
    block = config_of(tmp_path / "out")["quantization_config"]
    assert set(block["ignore"]) == {"lm_head", *model.routers()}
    assert set(block["slidesparse"]["layers"]) == set(model.linears())


def vllm_ignores(folder: Path, layer: str) -> bool:
    """Return whether vLLM's own reading of the ignore list covers the layer."""
    from vllm.model_executor.layers.quantization.compressed_tensors.utils import should_ignore_layer

    return should_ignore_layer(layer, config_of(folder)["quantization_config"]["ignore"])


@pytest.mark.vllm
@pytest.mark.parametrize("name", MODELS)
def test_ignored_experts_are_ignored_by_the_names_of_vllm(tmp_path: Path, name: str) -> None:
    model = MODELS[name]
    source = model.write(tmp_path / "source")
    report = convert(source, tmp_path / "out", ignore=[r"layers\.1\..*\.experts\."])
    ignored = {layer for layer in model.experts() if "layers.1." in layer}
    assert report.experts == {"w8a8": len(model.experts()) - len(ignored), "kept": len(ignored)}
    assert {layer for layer, reason in report.kept.items() if reason == "--ignore"} == ignored
    before, after = tensors_of(source), tensors_of(tmp_path / "out")
    assert all(torch.equal(after[f"{layer}.weight"], before[f"{layer}.weight"]) for layer in ignored)
    for i in range(LAYERS):
        module = f"model.layers.{i}.{model.module}.experts"
        for prefix in ("", "language_model."):  # as vLLM renames the model around the experts of Qwen3-VL-MoE
            assert vllm_ignores(tmp_path / "out", f"{prefix}{module}.0.gate_proj") == (i == 1)
    assert not vllm_ignores(tmp_path / "out", "model.layers.1.mlp.shared_expert.gate_proj")


@pytest.mark.vllm
def test_experts_stored_in_one_tensor_are_left_unquantized(tmp_path: Path) -> None:
    model, experts = MODELS["qwen3"], {}
    for i in range(LAYERS):
        experts[f"model.layers.{i}.mlp.experts.gate_up_proj"] = torch.randn(EXPERTS, 128, HIDDEN).bfloat16()
        experts[f"model.layers.{i}.mlp.experts.down_proj"] = torch.randn(EXPERTS, HIDDEN, 64).bfloat16()
    tensors = {name: tensor for name, tensor in model.tensors().items() if ".experts." not in name} | experts
    source = write(tmp_path / "source", model.settings(), tensors)
    report = convert(source, tmp_path / "out")
    assert report.experts == {"w8a8": 0, "kept": 4}
    assert len(report.pruned) == 8
    assert vllm_ignores(tmp_path / "out", "model.layers.0.mlp.experts.0.gate_proj")
    assert not vllm_ignores(tmp_path / "out", "model.layers.0.self_attn.o_proj")
    write(source, model.settings(), {**tensors, EXPERT_DOWN: tensors[EXPERT_DOWN].to(torch.float8_e4m3fn)})
    refused(source, f"{EXPERT_DOWN} holds several routed experts in F8_E4M3", out="x")


def test_options_for_layers_do_not_apply_to_experts(tmp_path: Path) -> None:
    source = MODELS["qwen2"].write(tmp_path / "source")
    report = convert(source, tmp_path / "out", layer=["down_proj=8:10"])
    assert {p.ratio for name, p in report.patterns.items() if name.endswith("down_proj")} == {"8:10"}
    assert report.experts == {"w8a8": 12, "kept": 0}
    refused(source, "--layer 'experts'", "matches none of the 14", out="x", layer=["experts=8:10"])
    refused(source, "--ignore covers", "experts.0.gate_proj but not", out="x", ignore=[r"experts\.0\.gate"])


def test_commands_count_experts(tmp_path: Path) -> None:
    source = MODELS["mixtral"].write(tmp_path / "source")
    result = Done("convert", source, tmp_path / "out", "-s", "6:8")
    counted = "24 weights quantized but not pruned (routed experts, which vLLM serves dense): "
    assert f"unpruned  {counted}" in result.out
    result = Done("convert", source, tmp_path / "kept", "-s", "6:8", "--ignore", r"\.experts\.")
    assert "unchanged 24 weights neither pruned nor quantized again (--ignore): " in result.out
    for folder, dtype in (("out", "I8"), ("kept", "BF16")):
        assert inspect(tmp_path / folder).experts == {dtype: 24}
