"""Conversion of mixture-of-experts models: pruned, only quantized, and unchanged layers."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from checkpoints import config_of, convert, refused, tensors_of, write
from commands import Done
from moe import EXPERTS, HIDDEN, LAYERS, MODELS, Moe
from strategies import assert_same_bits

from slidesparse.calibrate.task import Calibration
from slidesparse.checkpoint.inspection import inspect
from slidesparse.checkpoint.names import inside
from slidesparse.errors import CalibrationError
from slidesparse.pattern import SlidePattern
from slidesparse.prune import prune
from slidesparse.quantize import NAMES, quantize_rows

SIX_EIGHT = SlidePattern.parse("6:8")
KEEP = [r"\.experts\."]


@pytest.mark.parametrize("quant", ["int8", "fp8"])
@pytest.mark.parametrize("name", MODELS)
def test_linear_layers_are_pruned_and_experts_quantized(tmp_path: Path, name: str, quant: str) -> None:
    model = MODELS[name]
    source = model.write(tmp_path / "source")
    report = convert(source, tmp_path / "out", quant=quant)
    before, after = tensors_of(source), tensors_of(tmp_path / "out")
    assert set(report.pruned) == set(model.linears())
    assert set(report.skipped) == set(model.experts())
    assert report.experts == {"w8a8": len(model.experts()), "kept": 0}
    for layer in {**model.linears(), **model.experts()}:
        weight = before.pop(f"{layer}.weight")
        weight = prune(weight, SIX_EIGHT) if layer in report.pruned else weight
        expected, scale = quantize_rows(weight, NAMES[quant])
        assert_same_bits(after.pop(f"{layer}.weight"), expected)
        assert_same_bits(after.pop(f"{layer}.weight_scale"), scale)
    assert set(after) == set(before)
    for tensor in model.routers():
        assert_same_bits(after[f"{tensor}.weight"], before[f"{tensor}.weight"])
    block = config_of(tmp_path / "out")["quantization_config"]
    assert set(block["ignore"]) == {"lm_head", *model.routers()}
    assert set(block["slidesparse"]["layers"]) == set(model.linears())


def vllm_ignores(folder: Path, layer: str) -> bool:
    """Return whether vLLM's own reading of the ignore list covers the layer."""
    from vllm.model_executor.layers.quantization.compressed_tensors.utils import should_ignore_layer

    return should_ignore_layer(layer, config_of(folder)["quantization_config"]["ignore"])


@pytest.mark.vllm
@pytest.mark.parametrize("name", MODELS)
def test_ignored_experts_are_left_unquantized(tmp_path: Path, name: str) -> None:
    """All experts of the layer are ignored by the names that vLLM uses, which may differ from the checkpoint's."""
    model = MODELS[name]
    source = model.write(tmp_path / "source")
    report = convert(source, tmp_path / "out", ignore=[r"layers\.1\..*\.experts\."])
    ignored = {layer for layer in model.experts() if "layers.1." in layer}
    assert report.experts == {"w8a8": len(model.experts()) - len(ignored), "kept": len(ignored)}
    assert {layer for layer, reason in report.kept.items() if reason == "--ignore"} == ignored
    before, after = tensors_of(source), tensors_of(tmp_path / "out")
    for layer in ignored:
        assert_same_bits(after[f"{layer}.weight"], before[f"{layer}.weight"])
    for i in range(LAYERS):
        module = f"model.layers.{i}.{model.module}.experts"
        for prefix in ("", "language_model."):
            assert vllm_ignores(tmp_path / "out", f"{prefix}{module}.0.gate_proj") == (i == 1)
    assert not vllm_ignores(tmp_path / "out", "model.layers.1.mlp.shared_expert.gate_proj")


def test_convert_refuses_to_ignore_some_experts_of_a_layer(tmp_path: Path) -> None:
    source = MODELS["mixtral"].write(tmp_path / "source")
    refused(source, "--ignore covers", "experts.0.w1 but not", "fuses them", ignore=[r"experts\.0\.w1"])


def test_layer_options_do_not_apply_to_experts(tmp_path: Path) -> None:
    """A pattern for down_proj applies only to pruned layers; a pattern that matches only experts is refused."""
    source = MODELS["qwen2"].write(tmp_path / "source")
    report = convert(source, tmp_path / "out", layer=["down_proj=8:10"], linear="proj")
    assert {p.ratio for name, p in report.patterns.items() if name.endswith("down_proj")} == {"8:10"}
    assert report.experts == {"w8a8": 12, "kept": 0}
    refused(source, "--layer 'experts'", "matches none of the 14", out="x", layer=["experts=8:10"])
    refused(source, "--skip 'experts'", "matches none of the 14", out="x", skip=["experts"])
    refused(source, "matches none of the 14", out="x", linear="proj", layer=["experts=8:10"])
    calibration = Calibration("random", 1, 8)
    refused(source, "Qwen2Moe", error=CalibrationError, out="x", calibration=calibration)


def write_joined_experts(model: Moe, folder: Path) -> Path:
    """Write a checkpoint with all experts of a layer in one tensor, as some models store them."""
    tensors = {name: tensor for name, tensor in model.tensors().items() if ".experts." not in name}
    for i in range(LAYERS):
        tensors[f"model.layers.{i}.mlp.experts.gate_up_proj"] = torch.randn(EXPERTS, 128, HIDDEN).bfloat16()
        tensors[f"model.layers.{i}.mlp.experts.down_proj"] = torch.randn(EXPERTS, HIDDEN, 64).bfloat16()
    return write(folder, model.settings(), tensors)


@pytest.mark.vllm
def test_experts_stored_in_one_tensor_are_left_unquantized(tmp_path: Path) -> None:
    model = MODELS["qwen3"]
    source = write_joined_experts(model, tmp_path / "source")
    report = convert(source, tmp_path / "out")
    assert report.experts == {"w8a8": 0, "kept": 4}
    assert len(report.pruned) == 8
    assert vllm_ignores(tmp_path / "out", "model.layers.0.mlp.experts.0.gate_proj")
    assert not vllm_ignores(tmp_path / "out", "model.layers.0.self_attn.o_proj")
    tensors = tensors_of(source)
    name = "model.layers.0.mlp.experts.down_proj"
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    write(source, model.settings(), tensors)
    refused(source, f"{name} holds several routed experts in F8_E4M3", out="x")


def test_ignored_experts_are_found_where_vllm_renames_the_model_around_them() -> None:
    """As in Qwen3-VL-MoE, whose ``model.language_model`` vLLM calls ``language_model.model``."""
    entry = inside("model.language_model.layers.0.mlp.experts").removeprefix("re:")
    assert re.match(entry, "language_model.model.layers.0.mlp.experts.0.gate_proj")
    assert not re.match(entry, "language_model.model.layers.10.mlp.experts.0.gate_proj")


@pytest.mark.parametrize("layout", ["slided", "packed"])
def test_converting_between_layouts_is_lossless(tmp_path: Path, layout: str) -> None:
    source = MODELS["qwen2"].write(tmp_path / "source")
    convert(source, tmp_path / "dense")
    convert(source, tmp_path / layout, layout=layout)
    convert(tmp_path / layout, tmp_path / "again")
    dense, restored = tensors_of(tmp_path / "dense"), tensors_of(tmp_path / "again")
    assert dense.keys() == restored.keys()
    for name, tensor in dense.items():
        assert_same_bits(restored[name], tensor)


def test_commands_report_number_of_experts(tmp_path: Path) -> None:
    source = MODELS["mixtral"].write(tmp_path / "source")
    report = tmp_path / "report.json"
    result = Done("convert", source, tmp_path / "out", "-s", "6:8", "--report", report)
    assert result.code == 0, result.err
    assert (
        "unpruned  24 weights quantized but not pruned (routed experts, which vLLM serves dense): "
        in result.out
    )
    assert json.loads(report.read_text())["experts"] == {"w8a8": 24, "kept": 0}
    result = Done("convert", source, tmp_path / "kept", "-s", "6:8", "--ignore", *KEEP)
    assert "unchanged 24 weights neither pruned nor quantized again (--ignore): " in result.out
    for folder, dtype in (("out", "I8"), ("kept", "BF16")):
        assert inspect(tmp_path / folder).experts == {dtype: 24}
        result = Done("inspect", tmp_path / folder)
        assert "8 layers" in result.out
        assert f"24 weights of routed experts in {dtype}" in result.out
