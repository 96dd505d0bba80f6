"""Quantized sources of several tools: the output has their codes, or is computed from exact codes times scales."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import (
    DOWN,
    INDEX,
    LLAMA,
    MODEL,
    Q,
    config_of,
    convert,
    edit_json,
    refused,
    tensors_of,
    w8a8,
    write,
)
from commands import Done
from models import float_tensors, quantization_config
from moe import MODELS
from strategies import assert_same_bits
from tool_sources import compressed, fp8
from torch import Tensor

from slidesparse.checkpoint.inspection import inspect, verify
from slidesparse.checkpoint.w8a8 import parse_block
from slidesparse.pattern import SlidePattern
from slidesparse.prune import prune
from slidesparse.quantize import FP8, INT8, NAMES, quantize_rows

SIX_EIGHT = SlidePattern.parse("6:8")
LINEARS = sorted(LLAMA.linears())
ACTIVATIONS = (".input_scale", ".input_zero_point")
O0 = "model.layers.0.self_attn.o_proj"


def check_codes(before: dict[str, Tensor], after: dict[str, Tensor], layer: str, pruned: bool = True) -> None:
    """Check that codes are pruned, and that the scale of each row is the source's."""
    codes, scale = (before[f"{layer}.{name}"] for name in ("weight", "weight_scale"))
    assert_same_bits(after[f"{layer}.weight"], prune(codes, SIX_EIGHT) if pruned else codes)
    if scale.numel() == 1:
        assert_same_bits(after[f"{layer}.weight_scale"], scale.float().reshape(1, 1).repeat(len(codes), 1))
    else:
        assert_same_bits(after[f"{layer}.weight_scale"], scale)


def check_blocks(
    before: dict[str, Tensor],
    after: dict[str, Tensor],
    layer: str,
    scale: Tensor,
    block: tuple[int, int],
    quant: str = "fp8",
    pruned: bool = True,
) -> None:
    """Check that weights are codes times scales of their blocks, pruned and quantized per channel."""
    codes = before[f"{layer}.weight"]
    n, k = codes.shape
    scales_of_weights = scale.float().repeat_interleave(block[0], 0)[:n].repeat_interleave(block[1], 1)[:, :k]
    floats = codes.float() * scales_of_weights
    weight, scales = quantize_rows(prune(floats, SIX_EIGHT) if pruned else floats, NAMES[quant])
    assert_same_bits(after[f"{layer}.weight"], weight)
    assert_same_bits(after[f"{layer}.weight_scale"], scales)


def check_block(folder: Path, quant: str, ignore: set[str]) -> None:
    """Check that the quantization_config equals that of a converted float source."""
    block = config_of(folder)["quantization_config"]
    group = quantization_config(quant)["config_groups"]["group_0"]  # type: ignore[index]
    assert [dict(entry) for entry in block["config_groups"].values()] == [
        {**entry, **group, "targets": entry["targets"]} for entry in block["config_groups"].values()
    ]
    assert block["quant_method"] == "compressed-tensors"
    assert block["format"] == quantization_config(quant)["format"]
    assert set(block["ignore"]) == ignore
    parsed = parse_block(block)
    assert all(scheme.native for scheme in parsed.schemes)


def scheme(preset: str, targets: list[str], **weights: Any) -> Any:
    from compressed_tensors.quantization import preset_name_to_scheme

    preset_scheme = preset_name_to_scheme(preset, targets)
    for name, value in weights.items():
        setattr(preset_scheme.weights, name, value)
    return preset_scheme


def static_int8(targets: list[str]) -> Any:
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    inputs = QuantizationArgs(num_bits=8, symmetric=False, dynamic=False, strategy="tensor")
    weights = QuantizationArgs(num_bits=8, strategy="channel")
    return QuantizationScheme(targets=targets, weights=weights, input_activations=inputs)


@pytest.mark.parametrize("quant", ["int8", "fp8"])
def test_zero_points_of_symmetric_weights_are_dropped_or_refused(tmp_path: Path, quant: str) -> None:
    """Zero points of zero are dropped, as vLLM cannot load them; others are refused."""
    source = w8a8(tmp_path / "source", quant)
    before = tensors_of(source)
    layers = [name.removesuffix("_scale") for name in before if name.endswith(".weight_scale")]
    dtype = before[layers[0]].dtype
    zeros = {f"{name}_zero_point": torch.zeros(len(before[name]), 1, dtype=dtype) for name in layers}
    (source / MODEL).unlink()
    write(source, config_of(source), before | zeros, shards=3)
    report = convert(source, tmp_path / "out")
    assert report.rewritten == "13 zero points removed, as the weights are symmetric"
    assert set(tensors_of(tmp_path / "out")) == set(before)
    assert set(json.loads((tmp_path / "out" / INDEX).read_text())["weight_map"]) == set(before)
    zeros[f"{Q}.weight_zero_point"][5] = 1
    write(source, config_of(source), before | zeros, shards=3)
    refused(source, f"tensor {Q}.weight_zero_point in", "is not 0 everywhere", "symmetric", out="x")


# compressed-tensors, by the package itself


@pytest.mark.vllm
@pytest.mark.parametrize("make", [static_int8, lambda targets: scheme("FP8", targets)], ids=["int8", "fp8"])
def test_static_activations_become_dynamic(tmp_path: Path, make: Callable[[list[str]], Any]) -> None:
    source = compressed(tmp_path / "source", {"group_0": make(["Linear"])}, ["lm_head"])
    report = convert(source, tmp_path / "out")
    before, after = tensors_of(source), tensors_of(tmp_path / "out")
    assert f"{Q}.input_scale" in before
    assert {name for name in before if not name.endswith(ACTIVATIONS)} == set(after)
    assert sorted(report.pruned) == LINEARS
    for layer in LINEARS:
        check_codes(before, after, layer)
    check_block(tmp_path / "out", report.quant, {"lm_head"})
    assert (
        report.rewritten
        == "14 layers: static activation scales removed, as activations are now quantized dynamically per token"
    )
    result = Done("convert", source, tmp_path / "again", "-s", "6:8")
    assert result.out.count(f"source    {report.rewritten}\n") == 1
    refused(source, f"--ignore covers {DOWN}", "--skip", out="x", ignore=["0.mlp.down_proj"])


def test_asymmetric_activations_become_symmetric(tmp_path: Path) -> None:
    """llmcompressor 0.14 stores nothing else for dynamic asymmetric activations, whose zero points are per token."""
    source = w8a8(tmp_path / "source")
    block = config_of(source)["quantization_config"]
    block["config_groups"]["group_0"]["input_activations"] |= {"symmetric": False, "zp_dtype": "torch.int8"}
    edit_json(source / "config.json", quantization_config=block)
    report = convert(source, tmp_path / "out")
    assert report.rewritten == "13 layers: activations are now quantized symmetrically"
    before, after = tensors_of(source), tensors_of(tmp_path / "out")
    assert set(after) == set(before)
    for layer in set(LINEARS) - {DOWN}:
        check_codes(before, after, layer)
    check_block(tmp_path / "out", "int8", {"re:.*lm_head", DOWN})


def test_negative_scales_are_kept(tmp_path: Path) -> None:
    """AutoRound 0.15 writes them with INT8 in rows where -128 is of use."""
    source = w8a8(tmp_path / "source")
    tensors = tensors_of(source)
    tensors[f"{Q}.weight_scale"][::2] *= -1
    write(source, config_of(source), tensors)
    convert(source, tmp_path / "out", layout="slided")
    convert(tmp_path / "out", tmp_path / "dense")
    check_codes(tensors, tensors_of(tmp_path / "dense"), Q)
    assert inspect(tmp_path / "dense").violations == 0


def test_float_head_need_not_be_ignored(tmp_path: Path) -> None:
    """AutoRound 0.15 writes an empty ignore list with FP8, and a float lm_head, which is not Linear for vLLM."""
    source = w8a8(tmp_path / "source", "fp8")
    block = config_of(source)["quantization_config"]
    edit_json(source / "config.json", quantization_config={**block, "ignore": [DOWN]})
    report = convert(source, tmp_path / "out")
    assert report.kept["lm_head"] == "not a linear layer of a transformer block"
    assert_same_bits(tensors_of(tmp_path / "out")["lm_head.weight"], tensors_of(source)["lm_head.weight"])


@pytest.mark.vllm
def test_block_scales_are_dequantized(tmp_path: Path) -> None:
    """Weights equal those that the package itself dequantizes; the ignore list leaves one layer float."""
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    block_scheme = scheme("FP8_BLOCK", ["Linear"], block_structure=[32, 16])
    source = compressed(tmp_path / "source", {"group_0": block_scheme}, ["lm_head", "re:.*layers.0.*o_proj"])
    before = tensors_of(source)
    for quant in ("fp8", "int8"):
        report = convert(source, tmp_path / quant, quant=quant)
        assert report.quant == quant
        assert report.kept[O0] == "not quantized in the source"
        after = tensors_of(tmp_path / quant)
        assert_same_bits(after[f"{O0}.weight"], before[f"{O0}.weight"])
        for layer in set(LINEARS) - {O0}:
            check_blocks(before, after, layer, before[f"{layer}.weight_scale"], (32, 16), quant)
        check_block(tmp_path / quant, quant, {"lm_head", O0})
        assert "13 layers: dequantized from blocks of 32 x 16" in report.rewritten
    codes, scale = before[f"{Q}.weight"], before[f"{Q}.weight_scale"].float()
    weight, scales = quantize_rows(prune(dequantize(codes, scale, args=block_scheme.weights), SIX_EIGHT), FP8)
    after = tensors_of(tmp_path / "fp8")
    assert_same_bits(after[f"{Q}.weight"], weight)
    assert_same_bits(after[f"{Q}.weight_scale"], scales)


@pytest.mark.vllm
@pytest.mark.parametrize("preset", ["W8A8", "FP8_DYNAMIC", "FP8_BLOCK"])
def test_quantized_lm_head_is_dequantized(tmp_path: Path, preset: str) -> None:
    """vLLM loads a quantized head only if a target names it; one that only the class Linear matches is dequantized."""
    by_class = scheme(preset, ["Linear"], **({"block_structure": [32, 16]} if "BLOCK" in preset else {}))
    report = convert(
        compressed(tmp_path / "source", {"group_0": by_class}, []), tmp_path / "slided", layout="slided"
    )
    assert report.rewritten.endswith(
        "lm_head dequantized, as vLLM loads a quantized one only if a target names it"
    )
    assert "lm_head" not in {**report.kept, **report.skipped}
    convert(tmp_path / "slided", tmp_path / "out")
    before, after = tensors_of(tmp_path / "source"), tensors_of(tmp_path / "out")
    scale = before["lm_head.weight_scale"].float()
    if "BLOCK" in preset:
        n, k = before["lm_head.weight"].shape
        scale = scale.repeat_interleave(32, 0)[:n].repeat_interleave(16, 1)[:, :k]
    assert_same_bits(after["lm_head.weight"], (before["lm_head.weight"].float() * scale).bfloat16())
    assert [name for name in after if "lm_head" in name] == ["lm_head.weight"]
    assert config_of(tmp_path / "out")["quantization_config"]["ignore"] == ["lm_head"]

    by_name = scheme("W8A8", ["Linear", "re:.*lm_head"])
    report = convert(compressed(tmp_path / "named", {"group_0": by_name}, []), tmp_path / "as_named")
    assert not report.rewritten
    before, after = tensors_of(tmp_path / "named"), tensors_of(tmp_path / "as_named")
    check_codes(before, after, "lm_head", pruned=False)
    assert config_of(tmp_path / "as_named")["quantization_config"]["ignore"] == []


@pytest.mark.vllm
def test_quantization_groups_of_several_kinds(tmp_path: Path) -> None:
    """Targets are a class, a regex and a name, in INT8 and FP8; one group targets only the KV cache's attention."""
    groups = {
        "group_0": scheme("W8A8", ["Linear"]),
        "group_1": scheme("FP8_BLOCK", [r"re:.*mlp\..*_proj"], block_structure=[32, 16]),
        "group_2": scheme("FP8", [O0]),
    }
    cache = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    source = compressed(tmp_path / "source", groups, ["lm_head"], kv_cache_scheme=cache)
    config = config_of(source)["quantization_config"]
    assert config["format"] == "mixed-precision"
    attention = {"targets": ["LlamaAttention"], "weights": None, "input_activations": cache}
    norms = {"targets": ["re:.*norm"], "weights": None, "input_activations": None}
    config["config_groups"] |= {"group_3": attention, "group_4": norms}
    edit_json(source / "config.json", quantization_config=config)
    report = convert(source, tmp_path / "out")
    before, after = tensors_of(source), tensors_of(tmp_path / "out")
    assert report.quant == "fp8 and int8"
    for layer in LINEARS:
        if ".mlp." in layer:
            check_blocks(before, after, layer, before[f"{layer}.weight_scale"], (32, 16))
        else:
            check_codes(before, after, layer)
            assert after[f"{layer}.weight"].dtype == (FP8 if layer == O0 else INT8)
    block = config_of(tmp_path / "out")["quantization_config"]
    assert block["kv_cache_scheme"] == cache
    assert {name: group["format"] for name, group in block["config_groups"].items() if "format" in group} == {
        "group_0": "int-quantized",
        "group_1": "float-quantized",
        "group_2": "float-quantized",
    }
    assert set(block["config_groups"]) == {f"group_{i}" for i in range(4)}
    assert block["config_groups"]["group_3"] == attention
    assert block["format"] == "mixed-precision"
    refused(
        source, "--quant int8 contradicts the source, whose weights are fp8 and int8", out="x", quant="int8"
    )
    chosen = vllm_schemes(block)
    assert {layer: (kind, str(after[f"{layer}.weight"].dtype)) for layer, kind in chosen.items()} == {
        layer: ("float", "torch.float8_e4m3fn") if ".mlp." in layer or layer == O0 else ("int", "torch.int8")
        for layer in LINEARS
    }


def vllm_schemes(block: dict[str, Any]) -> dict[str, str]:
    """Return the type of each layer's weights as vLLM reads the config; check for scales per channel and token."""
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
        CompressedTensorsConfig,
    )

    config = CompressedTensorsConfig.from_config({**block, "quant_method": "compressed-tensors"})
    config.packed_modules_mapping = {}
    kinds = {}
    for layer in LINEARS:
        arguments = config.get_scheme_dict(torch.nn.Linear(1, 1), layer)
        assert arguments is not None
        assert arguments["weights"].strategy == "channel"
        assert arguments["input_activations"].strategy == "token"
        assert arguments["input_activations"].dynamic is True
        kinds[layer] = "int" if arguments["weights"].type == "int" else "float"
    return kinds


@pytest.mark.vllm
def test_supported_quantization_groups_are_kept(tmp_path: Path) -> None:
    """Groups have scales per channel or per tensor; layers outside all groups are float and stay unchanged."""
    groups = {
        "group_0": scheme("W8A8", [r"re:.*self_attn\..*_proj"]),
        "group_1": scheme("W8A8", [DOWN], strategy="tensor"),
    }
    source = compressed(tmp_path / "source", groups, [])
    report = convert(source, tmp_path / "out")
    assert not report.rewritten
    before, after = tensors_of(source), tensors_of(tmp_path / "out")
    named = {layer for layer in LINEARS if "self_attn" in layer} | {DOWN}
    assert set(report.pruned) == named
    assert set(after) == set(before)
    for name, tensor in before.items():
        layer = name.removesuffix(".weight")
        assert_same_bits(after[name], prune(tensor, SIX_EIGHT) if layer in named else tensor)
    old, new = (config_of(folder)["quantization_config"] for folder in (source, tmp_path / "out"))
    del new["slidesparse"]
    assert new == {name: value for name, value in old.items() if name != "sparsity_config"}


def test_matching_target_takes_precedence_as_in_vllm() -> None:
    """A name takes precedence over a class, and the first matching name wins; other and ignored layers have no
    scheme.
    """
    group = quantization_config("int8")["config_groups"]["group_0"]  # type: ignore[index]
    by_tensor = {**group, "weights": {**group["weights"], "strategy": "tensor"}}
    unquantized = {"targets": ["re:.*v_proj"], "weights": None}
    block = {
        **quantization_config("int8"),
        "config_groups": {
            "a": {**group, "targets": ["Linear"]},
            "b": {**by_tensor, "targets": ["re:.*o_proj", "m.q_proj"]},
            "c": {**group, "targets": ["re:.*[oq]_proj"]},
            "d": unquantized,
        },
        "ignore": ["lm_head", "re:m2.*"],
    }
    parsed = parse_block(block)
    layers = ("m.q_proj", "m.o_proj", "m.k_proj", "m2.q_proj", "lm_head", "m.v_proj", "n.q_proj")
    chosen = {layer: parsed.scheme(layer, "I8") for layer in layers}
    assert {layer: layer_scheme and layer_scheme.strategy for layer, layer_scheme in chosen.items()} == {
        "m.q_proj": "tensor",
        "m.o_proj": "tensor",
        "m.k_proj": "channel",
        "n.q_proj": "channel",
        "m2.q_proj": None,
        "lm_head": None,
        "m.v_proj": None,
    }
    del block["config_groups"]["a"]
    assert parse_block(block).scheme("m.k_proj", "BF16") is None


# quant_method fp8


@pytest.mark.parametrize(("block", "dtype"), [((32, 16), torch.float32), ((128, 128), torch.bfloat16)])
def test_fp8_block_scales_of_deepseek_and_qwen(
    tmp_path: Path, block: tuple[int, int], dtype: torch.dtype
) -> None:
    """Some blocks extend beyond the layers' edges, and some are larger than the layers."""
    source = fp8(tmp_path / "source", block, scale_dtype=dtype)
    report = convert(source, tmp_path / "out", skip=[r"0.*o_proj"])
    before, after = tensors_of(source), tensors_of(tmp_path / "out")
    assert report.quant == "fp8"
    assert set(after) == {name.replace("_scale_inv", "_scale") for name in before}
    for layer in set(LINEARS) - {O0}:
        check_blocks(before, after, layer, before[f"{layer}.weight_scale_inv"], block)
    assert (after[f"{O0}.weight"].float() == 0).float().mean() < 0.1
    check_block(tmp_path / "out", "fp8", {"lm_head"})
    convert(source, tmp_path / "int8", quant="int8")
    after = tensors_of(tmp_path / "int8")
    check_blocks(before, after, Q, before[f"{Q}.weight_scale_inv"], block, "int8")


def test_frozen_status_of_earlier_compressed_tensors_is_accepted(tmp_path: Path) -> None:
    """Its weights are compressed all the same; vLLM does not read the status."""
    source = w8a8(tmp_path / "source")
    block = config_of(source)["quantization_config"]
    edit_json(source / "config.json", quantization_config={**block, "quantization_status": "frozen"})
    convert(source, tmp_path / "out")
    check_codes(tensors_of(source), tensors_of(tmp_path / "out"), Q)


@pytest.mark.parametrize(("static", "layout"), [(False, "dense"), (True, "slided"), (True, "packed")])
def test_fp8_per_tensor_scales_keep_codes(tmp_path: Path, static: bool, layout: str) -> None:
    """q, k and v each have their own scale; codes are kept."""
    source = fp8(tmp_path / "source", static=static)
    report = convert(source, tmp_path / layout, layout=layout)
    if layout != "dense":
        convert(tmp_path / layout, tmp_path / "dense")
    before, after = tensors_of(source), tensors_of(tmp_path / "dense")
    assert not any("input_scale" in name for name in after)
    for layer in LINEARS:
        check_codes(before, after, layer)
    message = "static activation scales" if static else "activations are now quantized per token"
    assert message in report.rewritten
    refused(source, "--quant int8 contradicts the source", out="x", quant="int8")
    check_block(tmp_path / "dense", "fp8", {"lm_head"})


def test_fp8_per_tensor_scales_by_their_names_in_transformers(tmp_path: Path) -> None:
    """Scales are named as in Ministral 3."""
    source = fp8(tmp_path / "source", static=True)
    convert(source, tmp_path / "out")
    names = {"weight_scale": "weight_scale_inv", "input_scale": "activation_scale"}
    tensors = {
        f"{layer}.{names.get(last, last)}": tensor
        for (layer, _, last), tensor in ((name.rpartition("."), t) for name, t in tensors_of(source).items())
    }
    write(tmp_path / "renamed", config_of(source), tensors)
    convert(tmp_path / "renamed", tmp_path / "again")
    assert verify(tmp_path / "out", tmp_path / "again").equal
    assert not any(name.endswith(tuple(names.values())) for name in tensors_of(tmp_path / "again"))


@pytest.mark.parametrize("listed", [[], [DOWN]])
@pytest.mark.parametrize("block", [(32, 16), None])
def test_fp8_layers_outside_blocks_are_rewritten_unpruned(
    tmp_path: Path, block: tuple[int, int] | None, listed: list[str]
) -> None:
    """The head is written as float; float layers stay float, whether or not the source's list names them."""
    layers = [*(set(LINEARS) - {DOWN}), "lm_head", "mtp.in"]
    tensors = float_tensors(LLAMA)
    tensors["mtp.in.weight"] = tensors["lm_head.weight"].roll(1)
    source = fp8(tmp_path / "source", block, tensors=tensors, layers=layers)
    edit_json(
        source / "config.json",
        quantization_config={**config_of(source)["quantization_config"], "ignored_layers": listed},
    )
    report = convert(source, tmp_path / "out")
    assert report.skipped == {
        "mtp.in": "quantized in the source, but not a linear layer of a transformer block"
    }
    assert report.kept == {DOWN: "not quantized in the source"}
    before, after = tensors_of(source), tensors_of(tmp_path / "out")
    assert after["mtp.in.weight"].dtype == FP8
    assert after["mtp.in.weight_scale"].shape == (LLAMA.vocabulary, 1)
    assert_same_bits(after[f"{DOWN}.weight"], before[f"{DOWN}.weight"])
    assert after["lm_head.weight"].dtype == torch.bfloat16
    assert not any(name.startswith("lm_head.weight_scale") for name in after)
    error = after["lm_head.weight"].float() - tensors["lm_head.weight"].float()
    assert error.abs().max() <= tensors["lm_head.weight"].abs().max() / 16  # that of FP8's three bits
    check_block(tmp_path / "out", "fp8", {"lm_head", DOWN})


@pytest.mark.parametrize("block", [(32, 16), None])
def test_fp8_experts_are_rewritten_unpruned(tmp_path: Path, block: tuple[int, int] | None) -> None:
    model = MODELS["qwen3"]
    layers = [*model.linears(), *model.experts()]
    source = fp8(
        tmp_path / "source", block, True, tensors=model.tensors(), config=model.settings(), layers=layers
    )
    if block:
        edit_json(
            source / "config.json",
            quantization_config={**config_of(source)["quantization_config"], "activation_scheme": "dynamic"},
        )
    report = convert(source, tmp_path / "out")
    assert report.experts == {"w8a8": 24, "kept": 0}
    before, after = tensors_of(source), tensors_of(tmp_path / "out")
    for layer in layers:
        pruned = layer not in model.experts()
        if block:
            scale = before[f"{layer}.weight_scale_inv"]
            check_blocks(before, after, layer, scale, block, pruned=pruned)
        else:
            check_codes(before, after, layer, pruned)
    assert not any(name.endswith(("_inv", "input_scale")) for name in after)
    check_block(tmp_path / "out", "fp8", {"lm_head", *model.routers()})
    refused(source, "--ignore covers model.layers.0.mlp.experts", out="x", ignore=[r"\.experts\."])


def test_per_tensor_scales_of_experts_become_per_channel(tmp_path: Path) -> None:
    """vLLM requires scales per channel for experts with activations quantized per token."""
    model = MODELS["mixtral"]
    layers = [*model.linears(), *model.experts()]
    source = fp8(tmp_path / "source", tensors=model.tensors(), config=model.settings(), layers=layers)
    block = quantization_config("fp8", "tensor")
    block["ignore"] = ["re:.*gate", "lm_head"]
    edit_json(source / "config.json", quantization_config=block)
    report = convert(source, tmp_path / "out")
    assert report.rewritten == "32 layers: per-tensor scales expanded to per-channel, which experts need"
    before, after = tensors_of(source), tensors_of(tmp_path / "out")
    for layer in layers:
        check_codes(before, after, layer, layer in model.linears())
    check_block(tmp_path / "out", "fp8", set(block["ignore"]))


BAD = {
    "fmt": ({"fmt": "e5m2"}, "fmt 'e5m2'"),
    "scheme": ({"activation_scheme": "other"}, "activation_scheme 'other'"),
    "size": ({"weight_block_size": [128]}, "weight_block_size [128]"),
    "other size": (
        {"weight_block_size": [16, 16]},
        "weight_scale_inv is F32 [2, 6]; scales per block of 64 rows are [4, 6]",
    ),
    "list": ({"modules_to_not_convert": "lm_head"}, "modules_to_not_convert list"),
}


@pytest.mark.parametrize("name", BAD)
def test_invalid_fp8_configs_are_refused(tmp_path: Path, name: str) -> None:
    source = fp8(tmp_path / "source", (32, 16))
    change, fact = BAD[name]
    block = config_of(source)["quantization_config"]
    edit_json(source / "config.json", quantization_config={**block, **change})
    refused(source, fact)


def test_quantized_layer_without_a_group_is_refused(tmp_path: Path) -> None:
    source = fp8(tmp_path / "source")
    block = quantization_config("fp8", "tensor")
    block["config_groups"]["group_0"]["targets"] = ["re:.*mlp.*"]  # type: ignore[index]
    edit_json(source / "config.json", quantization_config=block)
    refused(source, "self_attn", "is F8_E4M3, but by quantization_config the layer is not quantized")
