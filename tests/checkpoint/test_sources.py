"""Quantized sources of several tools: the output has their codes, or is computed from exact codes times scales."""

from __future__ import annotations

import copy
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
    assert_same_tensors,
    config_of,
    convert,
    edit_json,
    llama,
    refused,
    tensors_of,
    w8a8,
    write,
)
from models import float_tensors, quantization_config
from moe import MODELS
from strategies import assert_same_bits
from tool_sources import compressed, fp8
from torch import Tensor

from slidesparse.calibrate.task import Calibration
from slidesparse.checkpoint.inspection import inspect
from slidesparse.checkpoint.w8a8 import parse_block
from slidesparse.errors import CalibrationError
from slidesparse.pattern import SlidePattern
from slidesparse.prune import prune
from slidesparse.quantize import FP8, INT8, NAMES, quantize_rows
from slidesparse.slide import bits, slide

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
    floats = (
        codes.float() * scale.float().repeat_interleave(block[0], 0)[:n].repeat_interleave(block[1], 1)[:, :k]
    )
    weight, scales = quantize_rows(prune(floats, SIX_EIGHT) if pruned else floats, NAMES[quant])
    assert_same_bits(after[f"{layer}.weight"], weight)
    assert_same_bits(after[f"{layer}.weight_scale"], scales)


def check_block(folder: Path, quant: str, ignore: set[str]) -> None:
    """Check that the quantization_config equals that of a converted float source."""
    block = block_of(folder)
    group = quantization_config(quant)["config_groups"]["group_0"]  # type: ignore[index]
    assert [dict(entry) for entry in block["config_groups"].values()] == [
        {**entry, **group, "targets": entry["targets"]} for entry in block["config_groups"].values()
    ]
    assert block["quant_method"] == "compressed-tensors"
    assert block["format"] == quantization_config(quant)["format"]
    assert set(block["ignore"]) == ignore
    assert all(scheme.native for scheme in parse_block(block).schemes)


def block_of(folder: Path) -> dict[str, Any]:
    return config_of(folder)["quantization_config"]


def edit_block(folder: Path, **changed: Any) -> None:
    """Replace entries of quantization_config, or remove them with None."""
    block = {name: value for name, value in {**block_of(folder), **changed}.items() if value is not None}
    edit_json(folder / "config.json", quantization_config=block)


def rewrite(folder: Path, **changed: Tensor | None) -> None:
    """Replace tensors, or remove them with None; ``__`` stands for a dot."""
    named = {name.replace("__", "."): tensor for name, tensor in changed.items()}
    tensors = {name: tensor for name, tensor in {**tensors_of(folder), **named}.items() if tensor is not None}
    write(folder, config_of(folder), tensors)


def vllm_config(block: dict[str, Any]) -> Any:
    """Return vLLM's reading of a quantization_config, which refuses KV caches when the attention is made."""
    from vllm.model_executor.layers.quantization.compressed_tensors import compressed_tensors

    config = compressed_tensors.CompressedTensorsConfig.from_config(copy.deepcopy(block))
    compressed_tensors.CompressedTensorsKVCacheMethod(config)
    config.packed_modules_mapping = {}
    return config


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


# W8A8 of compressed-tensors


@pytest.mark.parametrize("quant", ["int8", "fp8"])
@pytest.mark.parametrize("strategy", ["channel", "tensor"])
@pytest.mark.parametrize("layout", ["dense", "slided"])
def test_w8a8_source_keeps_scales_and_ignore(tmp_path: Path, quant: str, strategy: str, layout: str) -> None:
    """Layers that are not pruned, or ignored, keep their codes, too."""
    source = w8a8(tmp_path / "source", quant, strategy)
    options = {"layer": ["o_proj=dense"], "ignore": ["self_attn.[qkv]_proj"]}
    report = convert(source, tmp_path / "out", layout=layout, **options)
    assert report.quant == quant
    assert {name.split(".")[-1] for name in report.skipped} == {"o_proj"}
    assert {report.kept[name] for name in (DOWN, "lm_head")} == {"not quantized in the source"}
    assert report.kept[Q] == "--ignore"
    assert {name.split(".")[-2] for name in report.pruned} == {"mlp"}
    expected = tensors_of(source)
    for name in report.pruned:
        codes = prune(expected[f"{name}.weight"], SIX_EIGHT)
        expected[f"{name}.weight"] = slide(codes, SIX_EIGHT) if layout == "slided" else codes
    assert_same_tensors(tensors_of(tmp_path / "out"), expected)
    old, new = block_of(source), block_of(tmp_path / "out")
    assert set(new["slidesparse"]["layers"]) == set(report.pruned)
    assert new.pop("slidesparse")["layout"] == layout
    assert new.pop("quant_method") == {"dense": "compressed-tensors", "slided": "slidesparse"}[layout]
    assert new == {name: value for name, value in old.items() if name != "quant_method"}


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
    removed = (
        "14 layers: static activation scales removed, as activations are now quantized dynamically per token"
    )
    assert report.rewritten == removed
    refused(source, f"--ignore covers {DOWN}", "--layer", out="x", ignore=["0.mlp.down_proj"])


def test_asymmetric_activations_become_symmetric(tmp_path: Path) -> None:
    """llmcompressor 0.14 stores nothing else for dynamic asymmetric activations, whose zero points are per token."""
    source = w8a8(tmp_path / "source")
    groups = block_of(source)["config_groups"]
    groups["group_0"]["input_activations"] |= {"symmetric": False, "zp_dtype": "torch.int8"}
    edit_block(source, config_groups=groups)
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
    scale = tensors_of(source)[f"{Q}.weight_scale"]
    scale[::2] *= -1
    rewrite(source, **{f"{Q}.weight_scale".replace(".", "__"): scale})
    convert(source, tmp_path / "out", layout="slided")
    convert(tmp_path / "out", tmp_path / "dense")
    check_codes(tensors_of(source), tensors_of(tmp_path / "dense"), Q)
    assert inspect(tmp_path / "dense").violations == 0


def test_float_head_need_not_be_ignored(tmp_path: Path) -> None:
    """AutoRound 0.15 writes an empty ignore list with FP8, and a float lm_head, which is not Linear for vLLM."""
    source = w8a8(tmp_path / "source", "fp8")
    edit_block(source, ignore=[DOWN])
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
    weight, _ = quantize_rows(prune(dequantize(codes, scale, args=block_scheme.weights), SIX_EIGHT), FP8)
    assert_same_bits(tensors_of(tmp_path / "fp8")[f"{Q}.weight"], weight)


@pytest.mark.vllm
@pytest.mark.parametrize("preset", ["W8A8", "FP8_DYNAMIC", "FP8_BLOCK"])
def test_quantized_lm_head_is_dequantized(tmp_path: Path, preset: str) -> None:
    """vLLM loads a quantized head only if a target names it; one that only the class Linear matches is dequantized."""
    by_class = scheme(preset, ["Linear"], **({"block_structure": [32, 16]} if "BLOCK" in preset else {}))
    source = compressed(tmp_path / "source", {"group_0": by_class}, [])
    report = convert(source, tmp_path / "slided", layout="slided")
    dequantized = "lm_head dequantized, as vLLM loads a quantized one only if a target names it"
    assert report.rewritten.endswith(dequantized)
    assert "lm_head" not in {**report.kept, **report.skipped}
    convert(tmp_path / "slided", tmp_path / "out")
    before, after = tensors_of(source), tensors_of(tmp_path / "out")
    scale = before["lm_head.weight_scale"].float()
    if "BLOCK" in preset:
        n, k = before["lm_head.weight"].shape
        scale = scale.repeat_interleave(32, 0)[:n].repeat_interleave(16, 1)[:, :k]
    assert_same_bits(after["lm_head.weight"], (before["lm_head.weight"].float() * scale).bfloat16())
    assert [name for name in after if "lm_head" in name] == ["lm_head.weight"]
    assert block_of(tmp_path / "out")["ignore"] == ["lm_head"]


@pytest.mark.vllm
def test_lm_head_that_a_target_names_stays_quantized(tmp_path: Path) -> None:
    by_name = scheme("W8A8", ["Linear", "re:.*lm_head"])
    source = compressed(tmp_path / "named", {"group_0": by_name}, [])
    assert not convert(source, tmp_path / "out").rewritten
    check_codes(tensors_of(source), tensors_of(tmp_path / "out"), "lm_head", pruned=False)
    assert block_of(tmp_path / "out")["ignore"] == []


CACHE = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}


@pytest.mark.vllm
def test_quantization_groups_of_several_kinds(tmp_path: Path) -> None:
    """Targets are a class, a regex and a name, in INT8 and FP8; one group targets only the KV cache's attention."""
    groups = {
        "group_0": scheme("W8A8", ["Linear"]),
        "group_1": scheme("FP8_BLOCK", [r"re:.*mlp\..*_proj"], block_structure=[32, 16]),
        "group_2": scheme("FP8", [O0]),
    }
    source = compressed(tmp_path / "source", groups, ["lm_head"], kv_cache_scheme=CACHE)
    assert block_of(source)["format"] == "mixed-precision"
    attention = {"targets": ["LlamaAttention"], "weights": None, "input_activations": CACHE}
    norms = {"targets": ["re:.*norm"], "weights": None, "input_activations": None}
    edit_block(
        source, config_groups={**block_of(source)["config_groups"], "group_3": attention, "group_4": norms}
    )
    report = convert(source, tmp_path / "out")
    before, after = tensors_of(source), tensors_of(tmp_path / "out")
    assert report.quant == "fp8 and int8"
    for layer in LINEARS:
        if ".mlp." in layer:
            check_blocks(before, after, layer, before[f"{layer}.weight_scale"], (32, 16))
        else:
            check_codes(before, after, layer)
    block = block_of(tmp_path / "out")
    assert (block["kv_cache_scheme"], block["format"]) == (CACHE, "mixed-precision")
    assert set(block["config_groups"]) == {f"group_{i}" for i in range(4)}
    assert block["config_groups"]["group_3"] == attention
    refused(
        source, "--quant int8 contradicts the source, whose weights are fp8 and int8", out="x", quant="int8"
    )
    config = vllm_config(block)
    for layer in LINEARS:
        chosen = config.get_scheme_dict(torch.nn.Linear(1, 1), layer)
        assert (chosen["weights"].strategy, chosen["input_activations"].strategy) == ("channel", "token")
        assert chosen["input_activations"].dynamic is True
        is_fp8 = ".mlp." in layer or layer == O0
        assert (chosen["weights"].type, chosen["format"]) == (
            ("float", "float-quantized") if is_fp8 else ("int", "int-quantized")
        )
        assert after[f"{layer}.weight"].dtype == (FP8 if is_fp8 else INT8)


@pytest.mark.vllm
def test_layers_outside_all_groups_are_float_and_unchanged(tmp_path: Path) -> None:
    """Groups have scales per channel or per tensor."""
    groups = {
        "group_0": scheme("W8A8", [r"re:.*self_attn\..*_proj"]),
        "group_1": scheme("W8A8", [DOWN], strategy="tensor"),
    }
    source = compressed(tmp_path / "source", groups, [])
    report = convert(source, tmp_path / "out")
    assert not report.rewritten
    named = {layer for layer in LINEARS if "self_attn" in layer} | {DOWN}
    assert set(report.pruned) == named
    expected = tensors_of(source)
    expected |= {f"{layer}.weight": prune(expected[f"{layer}.weight"], SIX_EIGHT) for layer in named}
    assert_same_tensors(tensors_of(tmp_path / "out"), expected)
    config = vllm_config(block_of(tmp_path / "out"))
    assert config.get_scheme_dict(torch.nn.Linear(1, 1), DOWN)["weights"].strategy == "tensor"


def test_target_that_names_a_layer_takes_precedence_as_in_vllm() -> None:
    """A name takes precedence over a class, and the first matching name wins; other and ignored layers have no
    scheme.
    """
    group = quantization_config("int8")["config_groups"]["group_0"]  # type: ignore[index]
    by_tensor = {**group, "weights": {**group["weights"], "strategy": "tensor"}}
    groups = {
        "a": {**group, "targets": ["Linear"]},
        "b": {**by_tensor, "targets": ["re:.*o_proj", "m.q_proj"]},
        "c": {**group, "targets": ["re:.*[oq]_proj"]},
        "d": {"targets": ["re:.*v_proj"], "weights": None},
    }
    block = {**quantization_config("int8"), "config_groups": groups, "ignore": ["lm_head", "re:m2.*"]}
    parsed = parse_block(block)
    expected = dict.fromkeys(("m.q_proj", "m.o_proj"), "tensor")
    expected |= dict.fromkeys(("m.k_proj", "n.q_proj"), "channel")
    expected |= dict.fromkeys(("m2.q_proj", "lm_head", "m.v_proj"))
    found = {layer: parsed.scheme(layer, "I8") for layer in expected}
    assert {layer: scheme and scheme.strategy for layer, scheme in found.items()} == expected
    del groups["a"]
    assert parse_block(block).scheme("m.k_proj", "BF16") is None


def test_compression_config_is_an_older_name(tmp_path: Path) -> None:
    source = w8a8(tmp_path / "source")
    convert(source, tmp_path / "expected")
    edit_json(source / "config.json", quantization_config=None, compression_config=block_of(source))
    convert(source, tmp_path / "out")
    assert config_of(tmp_path / "out") == config_of(tmp_path / "expected")
    assert_same_tensors(tensors_of(tmp_path / "out"), tensors_of(tmp_path / "expected"))


def test_serving_stamp_is_dropped(tmp_path: Path) -> None:
    """The plugin writes the stamp into the config, in memory."""
    source = w8a8(tmp_path / "source")
    edit_block(source, slidesparse_serving={"pattern": "4:6"})
    convert(source, tmp_path / "out")
    convert(tmp_path / "out", tmp_path / "again", layout="slided")
    for name in ("out", "again"):
        assert "slidesparse_serving" not in block_of(tmp_path / name)


# quant_method fp8


@pytest.mark.parametrize(("block", "dtype"), [((32, 16), torch.float32), ((128, 128), torch.bfloat16)])
def test_fp8_block_scales_of_deepseek_and_qwen(
    tmp_path: Path, block: tuple[int, int], dtype: torch.dtype
) -> None:
    """Some blocks extend beyond the layers' edges, and some are larger than the layers."""
    source = fp8(tmp_path / "source", block, scale_dtype=dtype)
    report = convert(source, tmp_path / "out", layer=["0.*o_proj=dense"])
    before, after = tensors_of(source), tensors_of(tmp_path / "out")
    assert report.quant == "fp8"
    assert set(after) == {name.replace("_scale_inv", "_scale") for name in before}
    for layer in LINEARS:
        check_blocks(before, after, layer, before[f"{layer}.weight_scale_inv"], block, pruned=layer != O0)
    check_block(tmp_path / "out", "fp8", {"lm_head"})
    convert(source, tmp_path / "int8", quant="int8")
    after = tensors_of(tmp_path / "int8")
    check_blocks(before, after, Q, before[f"{Q}.weight_scale_inv"], block, "int8")


@pytest.mark.parametrize("static", [False, True])
def test_fp8_per_tensor_scales_keep_codes(tmp_path: Path, static: bool) -> None:
    """q, k and v each have their own scale; codes are kept."""
    source = fp8(tmp_path / "source", static=static)
    report = convert(source, tmp_path / "out")
    before, after = tensors_of(source), tensors_of(tmp_path / "out")
    assert not any("input_scale" in name for name in after)
    for layer in LINEARS:
        check_codes(before, after, layer)
    message = "static activation scales" if static else "activations are now quantized per token"
    assert message in report.rewritten
    refused(source, "--quant int8 contradicts the source", out="x", quant="int8")
    check_block(tmp_path / "out", "fp8", {"lm_head"})


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
    assert_same_tensors(tensors_of(tmp_path / "again"), tensors_of(tmp_path / "out"))


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
    edit_block(source, ignored_layers=listed)
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
    tensors, config = model.tensors(), model.settings()
    source = fp8(tmp_path / "source", block, True, tensors=tensors, config=config, layers=layers)
    edit_block(source, activation_scheme="dynamic" if block else "static")
    report = convert(source, tmp_path / "out")
    assert report.experts == {"w8a8": 24, "kept": 0}
    before, after = tensors_of(source), tensors_of(tmp_path / "out")
    for layer in layers:
        pruned = layer not in model.experts()
        if block:
            check_blocks(before, after, layer, before[f"{layer}.weight_scale_inv"], block, pruned=pruned)
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
    block = {**quantization_config("fp8", "tensor"), "ignore": ["re:.*gate", "lm_head"]}
    edit_json(source / "config.json", quantization_config=block)
    report = convert(source, tmp_path / "out")
    assert report.rewritten == "32 layers: per-tensor scales expanded to per-channel, which experts need"
    before, after = tensors_of(source), tensors_of(tmp_path / "out")
    for layer in layers:
        check_codes(before, after, layer, layer in model.linears())
    check_block(tmp_path / "out", "fp8", set(block["ignore"]))


# What other tools leave behind

PRUNED = {"format": "dense", "global_sparsity": 0.48, "sparsity_structure": "2:4", "targets": ["Linear"]}
ATTENTION = {"targets": ["LlamaAttention"], "weights": None, "input_activations": CACHE}


@pytest.mark.vllm
@pytest.mark.parametrize(
    "left",
    [
        {"quantization_config": {"quant_method": "compressed-tensors", "sparsity_config": PRUNED}},
        {
            "quantization_config": {
                "quant_method": "compressed-tensors",
                "config_groups": None,
                "format": "dense",
            }
        },
        {"compression_config": {"sparsity_config": PRUNED}},
        {
            "quantization_config": {
                **quantization_config("int8"),
                "config_groups": {},
                "kv_cache_scheme": CACHE,
            }
        },
        {"quantization_config": {**quantization_config("int8"), "config_groups": {"a": ATTENTION}}},
    ],
    ids=["sparsity_config", "no groups", "compression_config", "KV cache", "attention"],
)
def test_floats_with_leftover_metadata_are_floats(tmp_path: Path, left: dict[str, Any]) -> None:
    """vLLM itself no longer loads some of these, such as the 2:4 models of SparseML."""
    source = llama(tmp_path / "source")
    convert(source, tmp_path / "expected")
    expected = block_of(tmp_path / "expected")
    edit_json(source / "config.json", **left)
    convert(source, tmp_path / "out")
    assert_same_tensors(tensors_of(tmp_path / "out"), tensors_of(tmp_path / "expected"))
    block = block_of(tmp_path / "out")
    cache = left.get("quantization_config", {}).get("kv_cache_scheme")
    assert block == {**expected, **({"kv_cache_scheme": cache} if cache else {})}
    vllm_config(block)


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("stored", "written"),
    [
        (["self_attn.kv_scale"], ["self_attn.k_scale", "self_attn.v_scale"]),
        (
            ["self_attn.k_proj.output_scale", "self_attn.v_proj.output_scale"],
            ["self_attn.k_scale", "self_attn.v_scale"],
        ),
        (
            ["self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale"],
            ["self_attn.k_scale", "self_attn.v_scale"],
        ),
        (["self_attn.q_scale", "self_attn.k_scale"], ["self_attn.q_scale", "self_attn.k_scale"]),
    ],
)
@pytest.mark.parametrize("make", [lambda f: fp8(f, static=True), w8a8, llama], ids=["fp8", "w8a8", "float"])
def test_kv_cache_scales_are_written_by_names_that_vllm_loads(
    tmp_path: Path, make: Callable[[Path], Path], stored: list[str], written: list[str]
) -> None:
    """AutoFP8's "static" is translated; vLLM gives values a scale of 1 if only that of keys is there."""
    source = make(tmp_path / "source")
    scales = {f"model.layers.0.{name}": torch.tensor(0.05 + i) for i, name in enumerate(stored)}
    rewrite(source, **{name.replace(".", "__"): scale for name, scale in scales.items()})
    block = config_of(source).get("quantization_config", {**quantization_config("int8"), "config_groups": {}})
    scheme = "static" if block["quant_method"] == "fp8" else {**CACHE, "observer": "minmax"}
    edit_json(source / "config.json", quantization_config={**block, "kv_cache_scheme": scheme})
    convert(source, tmp_path / "out")
    after = tensors_of(tmp_path / "out")
    found = {name: float(after[name]) for name in after if name.endswith(("k_scale", "v_scale", "q_scale"))}
    values = [float(value) for value in scales.values()]
    values = values * 2 if len(values) < len(written) else values
    assert found == {f"model.layers.0.{name}": value for name, value in zip(written, values, strict=True)}
    config = vllm_config(block_of(tmp_path / "out"))
    assert config.kv_cache_scheme["strategy"] == "tensor"
    mapper = config.get_cache_scale_mapper()
    assert {mapper._map_name(name) for name in found} == {
        f"model.layers.0.{name.replace('self_attn', 'self_attn.attn')}" for name in written
    }


@pytest.mark.parametrize("make", [w8a8, llama], ids=["w8a8", "float"])
def test_tensors_that_w8a8_lacks_are_dropped_with_a_line(
    tmp_path: Path, make: Callable[[Path], Path]
) -> None:
    """Such as the order of columns of --actorder, and what observers of activations saw: vLLM loads none of them."""
    source = make(tmp_path / "source")
    if make is w8a8:
        groups = block_of(source)["config_groups"]
        groups["group_0"]["weights"] |= {"actorder": "static", "observer": "minmax"}
        edit_block(source, config_groups=groups)
    convert(source, tmp_path / "expected")
    left = ("weight_g_idx", "input_global_scale", "weight_observer.min_vals")
    rewrite(source, **{f"{Q}.{name}".replace(".", "__"): torch.ones(3) for name in left})
    report = convert(source, tmp_path / "out")
    assert_same_tensors(tensors_of(tmp_path / "out"), tensors_of(tmp_path / "expected"))
    for name in left:
        assert f"1 .{name} tensors removed, which W8A8 lacks" in report.rewritten
    assert "actorder" not in json.dumps(block_of(tmp_path / "out"))


R1 = [
    {"location": "weight_output", "targets": ["re:.*o_proj$"]},
    {"location": "weight_input", "targets": ["lm_head"]},
]
R4 = [
    {"location": "input", "targets": ["re:.*down_proj$"]},
    {"location": "weight_input", "targets": ["re:.*down_proj$"]},
]


def transforms(*applied: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "config_groups": {f"R{i}": {"type": "hadamard", "apply": apply} for i, apply in enumerate(applied)}
    }


@pytest.mark.vllm
def test_rotation_folded_into_the_weights_is_accepted(tmp_path: Path) -> None:
    """SpinQuant's R1 needs nothing while serving, so stock vLLM serves it; R4 rotates activations."""
    source = w8a8(tmp_path / "source")
    convert(source, tmp_path / "expected")
    edit_block(source, transform_config=transforms(R1))
    report = convert(source, tmp_path / "out")
    assert report.rewritten == "transform_config removed, as its rotations are folded into the weights"
    assert_same_tensors(tensors_of(tmp_path / "out"), tensors_of(tmp_path / "expected"))
    assert block_of(tmp_path / "out") == block_of(tmp_path / "expected")


# Refusals


def group(**changed: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda block: block["config_groups"]["group_0"].update(changed)


def part(name: str, **changed: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda block: block["config_groups"]["group_0"][name].update(changed)


def weights(**changed: Any) -> Callable[[dict[str, Any]], Any]:
    return part("weights", **changed)


def inputs(**changed: Any) -> Callable[[dict[str, Any]], Any]:
    return part("input_activations", **changed)


def block(**changed: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda block: block.update(changed)


def second_group(block: dict[str, Any]) -> None:
    four = {
        **block["config_groups"]["group_0"]["weights"],
        "num_bits": 4,
        "strategy": "group",
        "group_size": 128,
    }
    block["config_groups"]["group_1"] = {"targets": ["re:.*mlp.*"], "weights": four}


# A change of a W8A8 quantization_config, and words of the message
BLOCKS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "method": (block(quant_method="gptq"), "'gptq'"),
    "no method": (block(quant_method=None), "a method that quantization_config does not name"),
    "static per token": (inputs(dynamic=False), "not quantized per token"),
    "per group": (inputs(strategy="group"), "not quantized per token"),
    "local": (inputs(dynamic="local"), "not quantized per token"),
    "w8a16": (group(input_activations=None), "W8A16"),
    "a16 float": (inputs(type="float"), "another type"),
    "w4": (weights(num_bits=4), "4-bit 'int'"),
    "block": (weights(strategy="block"), "per 'block'"),
    "zero points": (weights(symmetric=False), "asymmetric or dynamic weights"),
    "outputs": (group(output_activations={"num_bits": 8}), "outputs"),
    "groups": (second_group, "4-bit 'int' weights in 'group_1'"),
    "no targets": (group(targets=None), "no list of targets in 'group_0'"),
    "bad target": (group(targets=["re:mlp.(up"]), "targets: 'mlp.(up'"),
    "bad block": (weights(strategy="block", block_structure=[128]), "block_structure in 'group_0' [128]"),
    "groups a list": (block(config_groups=[1]), "config_groups [1]"),
    "groups a text": (block(config_groups="W8A8"), "config_groups 'W8A8'"),
    "bits a list": (weights(num_bits=[8]), "[8]-bit"),
    "bad weights": (group(weights="int8"), "no objects in 'group_0'"),
    "bad sparsity": (block(sparsity_config="dense, I think"), "'dense, I think'"),
    "bad group": (lambda b: b["config_groups"].update(group_0=3), "group_0"),
    "packed": (block(format="pack-quantized"), "'pack-quantized'"),
    "marlin": (block(sparsity_config={"format": "marlin-24"}), "marlin-24"),
    "another bitmask": (
        block(sparsity_config={"format": "sparse-48-bitmask"}),
        "sparse-24-bitmask, sparse-bitmask",
    ),
    "packed group": (group(format="pack-quantized"), "'pack-quantized' in 'group_0'"),
    "rotated": (block(transform_config=transforms(R1, R4)), "transform_config of rotations while serving"),
    "rotated, I think": (block(transform_config={"config_groups": ["R1"]}), "transform_config"),
    "ignore": (block(ignore="lm_head"), "ignore list"),
    "bad regex": (block(ignore=["re:mlp.(down"]), "'mlp.(down'"),
    "INT8 cache": (block(kv_cache_scheme={**CACHE, "type": "int"}), "is not served by vLLM"),
    "FP4 cache": (block(kv_cache_scheme={**CACHE, "num_bits": 4}), "kv_cache_scheme {"),
    "cache per group": (block(kv_cache_scheme={**CACHE, "strategy": "group"}), "is not served by vLLM"),
    "asymmetric cache": (block(kv_cache_scheme={**CACHE, "symmetric": False}), "is not served by vLLM"),
    "cache a text": (block(kv_cache_scheme="static"), "kv_cache_scheme 'static'"),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_unsupported_quantization_configs_are_refused(tmp_path: Path, name: str) -> None:
    source = w8a8(tmp_path / "source")
    change, words = BLOCKS[name]
    changed = block_of(source)
    change(changed)
    edit_json(source / "config.json", quantization_config=changed)
    assert len(refused(source, words)) < 600


WEIGHT, WEIGHT_SCALE = (f"{Q}.{name}".replace(".", "__") for name in ("weight", "weight_scale"))


def tensors(**changed: Tensor | None) -> Callable[[Path], None]:
    return lambda source: rewrite(source, **changed)


def nan_code(code: int) -> Callable[[Path], None]:
    def change(source: Path) -> None:
        weight = tensors_of(source)[f"{Q}.weight"]
        bits(weight)[3, 4] = code
        rewrite(source, **{WEIGHT: weight})

    return change


def edited(*changes: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def change(source: Path) -> None:
        changed = block_of(source)
        for edit in changes:
            edit(changed)
        edit_json(source / "config.json", quantization_config=changed)

    return change


def blocked(**changed: Any) -> tuple[Callable[[Path], Path], Callable[[Path], None]]:
    return lambda folder: fp8(folder, (32, 16)), lambda source: edit_block(source, **changed)


# A source, a change of it, and words of the message
SOURCES: dict[str, tuple[Callable[[Path], Path], Callable[[Path], None], str]] = {
    "float layer": (w8a8, lambda s: edit_block(s, ignore=["lm_head"]), f"{DOWN}.weight is BF16, but"),
    "63 scales": (w8a8, tensors(**{WEIGHT_SCALE: torch.ones(63, 1)}), f"{Q}.weight_scale is F32 [63, 1]"),
    "one scale": (w8a8, tensors(**{WEIGHT_SCALE: torch.ones(1)}), "scales per channel of 64 rows are 64"),
    "integer scales": (
        w8a8,
        tensors(**{WEIGHT_SCALE: torch.ones(64, 1, dtype=torch.int32)}),
        f"{Q}.weight_scale is I32",
    ),
    "no scale": (w8a8, tensors(**{WEIGHT_SCALE: None}), f"no tensor {Q}.weight_scale"),
    "no quantization": (
        w8a8,
        lambda s: edit_json(s / "config.json", quantization_config=None),
        "_proj.weight_scale, but by its config.json no weights are quantized",
    ),
    "no groups": (w8a8, lambda s: edit_block(s, config_groups=None), "no weights are quantized"),
    "NaN code": (lambda f: w8a8(f, "fp8"), nan_code(0x7F), "row 3, column 4 (nan)"),
    "negative NaN code": (lambda f: w8a8(f, "fp8"), nan_code(-1), "row 3, column 4 (nan)"),
    "another type": (
        lambda f: w8a8(f, "fp8"),
        edited(weights(type="int"), inputs(type="int")),
        "F8_E4M3, but quantization_config promises I8",
    ),
    "outside all groups": (
        lambda f: w8a8(f, "fp8", "tensor"),
        edited(group(targets=["re:.*mlp.*"])),
        "is F8_E4M3, but by quantization_config the layer is not quantized",
    ),
    "slow regex": (
        w8a8,
        lambda s: edit_block(s, ignore=[DOWN, r"re:.*\.(lm_head|.*norm)$", "re:(.|.)*q$"]),
        "the source's ignore list: '(.|.)*q$' takes more than",
    ),
    "fmt": (*blocked(fmt="e5m2"), "fmt 'e5m2'"),
    "scheme": (*blocked(activation_scheme="other"), "activation_scheme 'other'"),
    "size": (*blocked(weight_block_size=[128]), "weight_block_size [128]"),
    "other size": (
        *blocked(weight_block_size=[16, 16]),
        "weight_scale_inv is F32 [2, 4]; scales per block of 64 rows are [4, 4]",
    ),
    "list": (*blocked(modules_to_not_convert="lm_head"), "modules_to_not_convert list"),
    "FP8 cache": (*blocked(kv_cache_scheme="dynamic"), "kv_cache_scheme 'dynamic' is not served by vLLM"),
    "no metadata": (
        w8a8,
        lambda s: edit_block(s, quant_method="slidesparse"),
        "'slidesparse' but has no quantization_config.slidesparse",
    ),
}


@pytest.mark.parametrize("name", SOURCES)
def test_sources_that_contradict_their_config_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr("slidesparse.checkpoint.names.SECONDS", 0.2)
    make, change, words = SOURCES[name]
    source = make(tmp_path / "source")
    change(source)
    refused(source, words)


def test_options_for_floats_are_refused_for_quantized_sources(tmp_path: Path) -> None:
    source = w8a8(tmp_path / "source")
    refused(source, "--quant fp8", "int8 already", quant="fp8")
    calibration = Calibration(("random",), samples=1, seqlen=8)
    refused(source, "int8 ones", error=CalibrationError, calibration=calibration)
