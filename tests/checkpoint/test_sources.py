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
    block_of,
    config_of,
    convert,
    edit_block,
    edit_json,
    llama,
    refused,
    rewrite,
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
from slidesparse.checkpoint.w8a8 import parse_block
from slidesparse.errors import CalibrationError
from slidesparse.pattern import SlidePattern
from slidesparse.prune import prune
from slidesparse.quantize import FP8, INT8, NAMES, quantize_rows
from slidesparse.slide import slide

SIX_EIGHT = SlidePattern.parse("6:8")
LINEARS = sorted(LLAMA.linears())
O0 = "model.layers.0.self_attn.o_proj"
CACHE = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}


def scale_of(tensors: dict[str, Tensor], layer: str) -> Tensor:
    return tensors.get(f"{layer}.weight_scale", tensors.get(f"{layer}.weight_scale_inv"))


def check_codes(before: dict[str, Tensor], after: dict[str, Tensor], layer: str, pruned: bool = True) -> None:
    """Check that codes are pruned, and that the scale of each row is the source's."""
    codes, scale = before[f"{layer}.weight"], scale_of(before, layer)
    assert_same_bits(after[f"{layer}.weight"], prune(codes, SIX_EIGHT) if pruned else codes)
    scales = scale.float().reshape(1, 1).repeat(len(codes), 1) if scale.numel() == 1 else scale
    assert_same_bits(after[f"{layer}.weight_scale"], scales)


def by_block(codes: Tensor, scale: Tensor, block: tuple[int, int]) -> Tensor:
    """Return codes times the scales of their blocks, in float32."""
    n, k = codes.shape
    scales = scale.float().repeat_interleave(block[0], 0)[:n].repeat_interleave(block[1], 1)[:, :k]
    return codes.float() * scales


def check_blocks(
    before: dict[str, Tensor],
    after: dict[str, Tensor],
    layer: str,
    block: tuple[int, int],
    quant: str = "fp8",
    pruned: bool = True,
) -> None:
    """Check that weights are codes times scales of their blocks, pruned and quantized per channel."""
    floats = by_block(before[f"{layer}.weight"], scale_of(before, layer), block)
    weight, scales = quantize_rows(prune(floats, SIX_EIGHT) if pruned else floats, NAMES[quant])
    assert_same_bits(after[f"{layer}.weight"], weight)
    assert_same_bits(after[f"{layer}.weight_scale"], scales)


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


# W8A8 of compressed-tensors


@pytest.mark.parametrize("quant", ["int8", "fp8"])
@pytest.mark.parametrize(("strategy", "layout"), [("channel", "slided"), ("tensor", "dense")])
def test_codes_scales_and_ignores_are_kept(tmp_path: Path, quant: str, strategy: str, layout: str) -> None:
    """Unpruned and ignored layers are checked, too.  AutoRound writes negative scales, the plugin a stamp in memory."""
    source = w8a8(tmp_path / "source", quant, strategy)
    rewrite(source, **{f"{Q}.weight_scale": -tensors_of(source)[f"{Q}.weight_scale"]})
    edit_block(source, ignore=[r"re:.*\p{Ll}m_head", DOWN])  # no regex of Python's own
    old = block_of(source)
    edit_block(source, slidesparse_serving={"pattern": "4:6"})
    options = {"layer": ["o_proj=dense"], "ignore": ["0.self_attn.[qkv]_proj"]}
    report = convert(source, tmp_path / "out", layout=layout, **options)
    assert report.plan.quant == quant
    assert {name.split(".")[-1] for name in report.plan.skipped} == {"o_proj"}
    assert {report.plan.kept[name] for name in (DOWN, "lm_head")} == {"not quantized in the source"}
    assert sum(reason == "--ignore" for reason in report.plan.kept.values()) == 3
    expected = tensors_of(source)
    for name in report.plan.patterns:
        codes = prune(expected[f"{name}.weight"], SIX_EIGHT)
        expected[f"{name}.weight"] = slide(codes, SIX_EIGHT) if layout == "slided" else codes
    assert_same_tensors(tensors_of(tmp_path / "out"), expected)
    new = block_of(tmp_path / "out")
    assert set(new.pop("slidesparse")["layers"]) == set(report.plan.patterns)
    assert new == {**old, "quant_method": {"dense": "compressed-tensors", "slided": "slidesparse"}[layout]}


@pytest.mark.parametrize(
    ("strategy", "stored", "written"),
    [
        ("channel", (64,), (64, 1)),
        ("channel", (1, 64), (64, 1)),
        ("tensor", (1, 1), (1,)),
        ("tensor", (), (1,)),
    ],
)
def test_scales_have_the_shape_that_vllm_loads(
    tmp_path: Path, strategy: str, stored: tuple[int, ...], written: tuple[int, ...]
) -> None:
    source, name = w8a8(tmp_path / "source", strategy=strategy), f"{Q}.weight_scale"
    scale = tensors_of(source)[name]
    rewrite(source, **{name: scale.reshape(stored)})
    convert(source, tmp_path / "out")
    assert_same_bits(tensors_of(tmp_path / "out")[name], scale.reshape(written))


@pytest.mark.parametrize("quant", ["int8", "fp8"])
def test_zero_points_of_symmetric_weights_are_dropped_or_refused(tmp_path: Path, quant: str) -> None:
    """vLLM cannot load them; others than zeros are refused."""
    source = w8a8(tmp_path / "source", quant)
    before = tensors_of(source)
    scales = {name: scale for name, scale in before.items() if name.endswith(".weight_scale")}
    dtype = {"int8": INT8, "fp8": FP8}[quant]
    zeros = {n.replace("scale", "zero_point"): torch.zeros(s.shape, dtype=dtype) for n, s in scales.items()}
    (source / MODEL).unlink()
    write(source, config_of(source), before | zeros, shards=3)
    report = convert(source, tmp_path / "out")
    assert report.plan.rewritten == "13 zero points removed, as the weights are symmetric"
    assert set(tensors_of(tmp_path / "out")) == set(before)
    assert set(json.loads((tmp_path / "out" / INDEX).read_text())["weight_map"]) == set(before)
    zeros[f"{Q}.weight_zero_point"][5] = 1
    write(source, config_of(source), before | zeros, shards=3)
    refused(source, f"tensor {Q}.weight_zero_point in", "is not 0 everywhere", "symmetric", out="x")


@pytest.mark.vllm
@pytest.mark.parametrize("preset", ["W8A8", "FP8_DYNAMIC", "FP8_BLOCK"])
def test_quantized_lm_head_is_dequantized_unless_a_target_names_it(tmp_path: Path, preset: str) -> None:
    """vLLM loads a quantized head only by its name or class; for one that the class Linear matches it has no scale."""
    sizes = {"block_structure": [32, 16]} if "BLOCK" in preset else {}
    source = compressed(tmp_path / "source", {"group_0": scheme(preset, ["Linear"], **sizes)}, [])
    report = convert(source, tmp_path / "out")
    assert "lm_head dequantized, as vLLM loads a quantized one only if a target" in report.plan.rewritten
    assert "lm_head" not in {**report.plan.kept, **report.plan.skipped}
    before, after = tensors_of(source), tensors_of(tmp_path / "out")
    head = by_block(before["lm_head.weight"], before["lm_head.weight_scale"], (32, 16) if sizes else (1, 64))
    assert_same_bits(after["lm_head.weight"], head.bfloat16())
    assert [name for name in after if "lm_head" in name] == ["lm_head.weight"]
    assert block_of(tmp_path / "out")["ignore"] == ["lm_head"]
    refused(source, "quantized already; let a target in its quant", out="asked", layer=["lm_head=dense"])
    named = {"group_0": scheme("W8A8", ["Linear"]), "group_1": scheme("FP8_DYNAMIC", ["re:.*lm_head"])}
    for target in ("re:.*lm_head", "ParallelLMHead") if preset == "W8A8" else ():
        source, out = compressed(tmp_path / target[-4:], named, []), tmp_path / f"as {target[-4:]}"
        groups = block_of(source)["config_groups"]
        groups["group_1"]["targets"] = [target]
        edit_block(source, config_groups=groups)
        assert not convert(source, out).plan.rewritten
        check_codes(tensors_of(source), tensors_of(out), "lm_head", pruned=False)


@pytest.mark.vllm
def test_quantization_groups_of_several_kinds(tmp_path: Path) -> None:
    """Targets are a class, a regex and a name, in INT8 and FP8; one group targets only the KV cache's attention."""
    groups = {
        "group_0": scheme("W8A8", ["Linear"]),
        "group_1": scheme("FP8_BLOCK", [r"re:.*mlp\..*_proj"], block_structure=[32, 16]),
        "group_2": scheme("FP8", [O0]),
    }
    source = compressed(tmp_path / "source", groups, ["lm_head"])
    attention = {"targets": ["LlamaAttention"], "weights": None, "input_activations": CACHE}
    norms = {"targets": ["re:.*norm"], "weights": None, "input_activations": None}
    groups = {**block_of(source)["config_groups"], "group_3": attention, "group_4": norms}
    edit_block(source, config_groups=groups, kv_cache_scheme=CACHE)
    report = convert(source, tmp_path / "out")
    block, before, after = block_of(tmp_path / "out"), tensors_of(source), tensors_of(tmp_path / "out")
    assert report.plan.quant == "fp8 and int8"
    assert (block["kv_cache_scheme"], block["format"]) == (CACHE, "mixed-precision")
    assert set(block["config_groups"]) == {f"group_{i}" for i in range(4)}
    assert block["config_groups"]["group_3"] == attention
    config = vllm_config(block)
    for layer in LINEARS:
        if ".mlp." in layer:
            check_blocks(before, after, layer, (32, 16))
        else:
            check_codes(before, after, layer)
        chosen = config.get_scheme_dict(torch.nn.Linear(1, 1), layer)
        assert (chosen["weights"].strategy, chosen["input_activations"].strategy) == ("channel", "token")
        assert chosen["input_activations"].dynamic is True
        kind, dtype = ("float", FP8) if ".mlp." in layer or layer == O0 else ("int", INT8)
        assert (chosen["weights"].type, chosen["format"]) == (kind, f"{kind}-quantized")
        assert after[f"{layer}.weight"].dtype == dtype
    refused(source, "--quant int8 contradicts the source, which has fp8 weights", out="x", quant="int8")


def test_arguments_are_read_as_by_compressed_tensors(tmp_path: Path) -> None:
    """It takes groups of -1 columns for channels, and types in capitals."""
    source = w8a8(tmp_path / "source")
    convert(source, tmp_path / "expected")
    groups = block_of(source)["config_groups"]
    del groups["group_0"]["weights"]["strategy"]
    groups["group_0"]["weights"] |= {"group_size": -1, "type": "INT"}
    groups["group_0"]["input_activations"]["type"] = "INT"
    edit_block(source, config_groups=groups)
    convert(source, tmp_path / "out")
    assert_same_tensors(tensors_of(tmp_path / "out"), tensors_of(tmp_path / "expected"))
    assert block_of(tmp_path / "out") == block_of(tmp_path / "expected")


# Sources whose layers are treated alike


def static_int8(folder: Path) -> Path:
    """Asymmetric static activations, as SmoothQuant recipes have them."""
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    inputs = QuantizationArgs(num_bits=8, symmetric=False, dynamic=False, strategy="tensor")
    weights = QuantizationArgs(num_bits=8, strategy="channel")
    group = QuantizationScheme(targets=["Linear"], weights=weights, input_activations=inputs)
    return compressed(folder, {"group_0": group}, ["lm_head"])


def asymmetric_int8(folder: Path) -> Path:
    """llmcompressor 0.14 stores nothing else for dynamic asymmetric activations, whose zero points are per token."""
    groups = block_of(w8a8(folder))["config_groups"]
    groups["group_0"]["input_activations"] |= {"symmetric": False, "zp_dtype": "torch.int8"}
    edit_block(folder, config_groups=groups)
    return folder


def some_groups(folder: Path) -> Path:
    """Layers outside of all groups are float."""
    by_channel = scheme("W8A8", [r"re:.*self_attn\..*_proj"])
    return compressed(folder, {"a": by_channel, "b": scheme("W8A8", [DOWN], strategy="tensor")}, [])


def renamed(folder: Path) -> Path:
    """Scales have their names in transformers, as in Ministral 3."""
    names = {"weight_scale": "weight_scale_inv", "input_scale": "activation_scale"}
    tensors = tensors_of(fp8(folder, static=True))
    parts = ((name.rpartition("."), tensor) for name, tensor in tensors.items())
    tensors = {f"{layer}.{names.get(last, last)}": t for (layer, _, last), t in parts}
    return write(folder, config_of(folder), tensors)


def experts(folder: Path, name: str, block: tuple[int, int] | None, static: bool) -> Path:
    model = MODELS[name]
    config, tensors = model.read()
    layers = [*model.linears(), *model.experts()]
    return fp8(folder, block, static, tensors=tensors, config=config, layers=layers)


def mixtral(folder: Path) -> Path:
    """vLLM requires scales per channel for experts with activations quantized per token."""
    experts(folder, "mixtral", None, False)
    block = {**quantization_config("fp8", "tensor"), "ignore": ["re:.*gate", "lm_head"]}
    edit_json(folder / "config.json", quantization_config=block)
    return folder


def ct_block(folder: Path) -> Path:
    group = scheme("FP8_BLOCK", ["Linear"], block_structure=[32, 16])
    return compressed(folder, {"group_0": group}, ["lm_head", "re:.*layers.0.*o_proj"])


def classes(folder: Path) -> Path:
    """Targets are classes of vLLM, or a regex that matches a class."""
    group = block_of(w8a8(folder))["config_groups"]["group_0"]
    targets = (["RowParallelLinear", "QKVParallelLinear"], ["re:.*Linear$"])
    edit_block(folder, config_groups={str(i): {**group, "targets": names} for i, names in enumerate(targets)})
    return folder


def other_group(folder: Path) -> Path:
    """A group of 4-bit weights whose layers, such as those of images, this checkpoint lacks."""
    groups = block_of(w8a8(folder))["config_groups"]
    weights = {**groups["group_0"]["weights"], "num_bits": 4, "strategy": "group", "group_size": 128}
    other = {"targets": ["re:.*vision.*", "LlamaAttention"], "weights": weights, "format": "pack-quantized"}
    edit_block(folder, config_groups={"group_1": other, **groups})
    return folder


def one_regex(folder: Path) -> Path:
    """A target and scales per tensor that would be the lm_head's, too, were it not ignored."""
    groups = block_of(w8a8(folder, strategy="tensor"))["config_groups"]
    groups["group_0"]["targets"] = ["re:.*"]
    edit_block(folder, config_groups=groups)
    return folder


STATIC = "static activation scales removed, as activations are now quantized dynamically per token"
DEQUANTIZED = "dequantized from blocks of 32 x 16 and quantized again per channel"
# How to make a source, its block size, options, and words of what was changed
ALIKE: dict[str, tuple[Callable[[Path], Path], tuple[int, int] | None, dict[str, Any], str]] = {
    "static int8": (static_int8, None, {}, f"14 layers: {STATIC}"),
    "static fp8": (lambda f: compressed(f, {"a": scheme("FP8", ["Linear"])}, ["lm_head"]), None, {}, STATIC),
    "asymmetric": (asymmetric_int8, None, {}, "13 layers: activations are now quantized symmetrically"),
    "some groups": (some_groups, None, {}, ""),
    "classes": (classes, None, {}, ""),
    "one regex": (one_regex, None, {}, ""),
    "group without layers": (other_group, None, {}, ""),
    "block": (ct_block, (32, 16), {}, f"13 layers: {DEQUANTIZED}"),
    "block to int8": (ct_block, (32, 16), {"quant": "int8"}, DEQUANTIZED),
    "deepseek": (lambda f: fp8(f, (32, 16)), (32, 16), {"layer": ["0.*o_proj=dense"]}, DEQUANTIZED),
    "large blocks": (lambda f: fp8(f, (128, 128), scale_dtype=torch.bfloat16), (128, 128), {}, "128 x 128"),
    "powers of two": (
        lambda f: fp8(f, (32, 16), scale_dtype=torch.float8_e8m0fnu),
        (32, 16),
        {},
        DEQUANTIZED,
    ),
    "fp8": (fp8, None, {}, "14 layers: activations are now quantized per token instead of per tensor"),
    "fp8 static": (lambda f: fp8(f, static=True), None, {}, STATIC),
    "fp8 of transformers": (renamed, None, {}, STATIC),
    "experts by block": (lambda f: experts(f, "qwen3", (32, 16), False), (32, 16), {}, DEQUANTIZED),
    "static experts": (lambda f: experts(f, "qwen3", None, True), None, {}, f"32 layers: {STATIC}"),
    "experts by tensor": (mixtral, None, {}, "per-tensor scales expanded to per-channel, which experts need"),
}


@pytest.mark.vllm
@pytest.mark.parametrize("name", ALIKE)
def test_weights_have_the_sources_codes_or_those_of_codes_times_scales(tmp_path: Path, name: str) -> None:
    make, block, options, words = ALIKE[name]
    source = make(tmp_path / "source")
    plan = convert(source, tmp_path / "out", **options).plan
    before, after = tensors_of(source), tensors_of(tmp_path / "out")
    assert words in plan.rewritten
    for layer in (*plan.patterns, *plan.skipped):
        if block:
            check_blocks(before, after, layer, block, plan.quant, layer in plan.patterns)
        elif plan.rewritten:
            check_codes(before, after, layer, layer in plan.patterns)
        else:  # scales stay as they are, per channel or per tensor
            assert_same_bits(after[f"{layer}.weight"], prune(before[f"{layer}.weight"], SIX_EIGHT))
            assert_same_bits(after[f"{layer}.weight_scale"], before[f"{layer}.weight_scale"])
    for layer in plan.kept:
        assert_same_bits(after[f"{layer}.weight"], before[f"{layer}.weight"])
    assert {name.rpartition(".")[2] for name in after} <= {"weight", "weight_scale", "bias"}
    written, read = block_of(tmp_path / "out"), block_of(source)
    group = quantization_config(plan.quant)["config_groups"]["group_0"]  # type: ignore[index]
    for entry in written["config_groups"].values() if plan.rewritten else ():
        assert entry == {**entry, **group, "targets": entry["targets"]}
    unquantized = {layer for layer in plan.kept if not parse_block(read, before).ignores(layer)}
    listed = {*(read.get("ignore") or ["lm_head"]), *unquantized}
    assert not plan.rewritten or set(written["ignore"]) == listed
    vllm_config(written)
    if plan.rewritten:
        refused(source, "--ignore covers", out="x", ignore=["experts" if "experts" in name else "self_attn"])
    check_head(source, tmp_path / "head", after, **{**options, "layer": options.get("layer", [])})


def check_head(source: Path, out: Path, others: dict[str, Tensor], layer: list[str], **options: Any) -> None:
    """Check that a float lm_head of a source is quantized if an option says so, and all else is as in ``others``."""
    plan = convert(source, out, layer=[*layer, "lm_head=dense"], **options).plan
    after, quant = tensors_of(out), plan.source_of("lm_head").quant("lm_head")
    head = {"lm_head.weight": after.pop("lm_head.weight"), "lm_head.scale": after.pop("lm_head.weight_scale")}
    for actual, expected in zip(
        head.values(), quantize_rows(others["lm_head.weight"].float(), NAMES[quant]), strict=True
    ):
        assert_same_bits(actual, expected)
    assert_same_tensors(after, {name: x for name, x in others.items() if name != "lm_head.weight"})
    assert quant in plan.quant
    written = parse_block(block_of(out), after)
    assert written.loads_head("lm_head")
    found = written.scheme("lm_head", "I8" if quant == "int8" else "F8_E4M3")
    assert (found.quant, found.strategy, found.activations) == (quant, "channel", "per token")
    assert "head" not in plan.rewritten
    vllm_config(block_of(out))


@pytest.mark.parametrize(("block", "listed"), [((32, 16), []), (None, [DOWN])])
def test_fp8_layers_outside_blocks(tmp_path: Path, block: tuple[int, int] | None, listed: list[str]) -> None:
    """The head is written as float; float layers stay float, whether or not the source's list names them."""
    layers, tensors = [*(set(LINEARS) - {DOWN}), "lm_head", "mtp.in"], float_tensors(LLAMA)
    tensors["mtp.in.weight"] = tensors["lm_head.weight"].roll(1)
    source = fp8(tmp_path / "source", block, tensors=tensors, layers=layers)
    edit_block(source, ignored_layers=listed)
    report = convert(source, tmp_path / "out")
    words = "quantized in the source, but not a linear layer of a transformer block"
    assert report.plan.skipped == {"mtp.in": words}
    assert report.plan.kept == {DOWN: "not quantized in the source"}
    after = tensors_of(tmp_path / "out")
    assert after["mtp.in.weight"].dtype == FP8
    assert after["mtp.in.weight_scale"].shape == (LLAMA.vocabulary, 1)
    assert_same_bits(after[f"{DOWN}.weight"], tensors[f"{DOWN}.weight"])
    assert after["lm_head.weight"].dtype == torch.bfloat16
    error = after["lm_head.weight"].float() - tensors["lm_head.weight"].float()
    assert error.abs().max() <= tensors["lm_head.weight"].abs().max() / 16  # that of FP8's three bits
    assert set(block_of(tmp_path / "out")["ignore"]) == {"lm_head", DOWN}


# What other tools leave behind

PRUNED = {"format": "dense", "global_sparsity": 0.48, "sparsity_structure": "2:4", "targets": ["Linear"]}
ATTENTION = {"targets": ["LlamaAttention"], "weights": None, "input_activations": CACHE}
COMPRESSED = {"quant_method": "compressed-tensors"}
LEFT: dict[str, dict[str, Any]] = {
    "sparsity_config": {"quantization_config": {**COMPRESSED, "sparsity_config": PRUNED}},
    "no groups": {"quantization_config": {**COMPRESSED, "config_groups": None, "format": "dense"}},
    "compression_config": {"compression_config": {"sparsity_config": PRUNED}},
    "KV cache": {"quantization_config": {**COMPRESSED, "config_groups": {}, "kv_cache_scheme": CACHE}},
    "attention": {"quantization_config": {**COMPRESSED, "config_groups": {"a": ATTENTION}}},
}


@pytest.mark.vllm
@pytest.mark.parametrize("name", LEFT)
def test_floats_with_leftover_metadata_are_floats(tmp_path: Path, name: str) -> None:
    """vLLM itself no longer loads some of these, such as the 2:4 models of SparseML."""
    source = llama(tmp_path / "source")
    convert(source, tmp_path / "expected")
    edit_json(source / "config.json", **LEFT[name])
    convert(source, tmp_path / "out")
    assert_same_tensors(tensors_of(tmp_path / "out"), tensors_of(tmp_path / "expected"))
    cache = {"kv_cache_scheme": CACHE} if name == "KV cache" else {}
    assert block_of(tmp_path / "out") == {**block_of(tmp_path / "expected"), **cache}
    vllm_config(block_of(tmp_path / "out"))


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("stored", "written"),
    [
        (["kv_scale"], ["k_scale", "v_scale"]),
        (["k_proj.output_scale", "v_proj.output_scale"], ["k_scale", "v_scale"]),
        (["k_proj.k_scale", "v_proj.v_scale"], ["k_scale", "v_scale"]),
        (["q_scale", "k_scale"], ["q_scale", "k_scale"]),
    ],
)
@pytest.mark.parametrize("make", [lambda f: fp8(f, static=True), w8a8, llama], ids=["fp8", "w8a8", "float"])
def test_kv_cache_scales_are_written_by_names_that_vllm_loads(
    tmp_path: Path, make: Callable[[Path], Path], stored: list[str], written: list[str]
) -> None:
    """AutoFP8's "static" is translated; vLLM gives values a scale of 1 if only that of keys is there."""
    source, prefix = make(tmp_path / "source"), "model.layers.0.self_attn."
    rewrite(source, **{prefix + name: torch.tensor(0.05 + i) for i, name in enumerate(stored)})
    block = config_of(source).get("quantization_config", {**COMPRESSED, "config_groups": {}})
    scheme = "static" if block["quant_method"] == "fp8" else {**CACHE, "observer": "minmax"}
    edit_json(source / "config.json", quantization_config={**block, "kv_cache_scheme": scheme})
    convert(source, tmp_path / "out")
    after = tensors_of(tmp_path / "out")
    found = {name: float(after[name]) for name in after if name.endswith(("k_scale", "v_scale", "q_scale"))}
    values = [0.05 + i for i in range(len(stored))] * (2 if stored == ["kv_scale"] else 1)
    assert found == pytest.approx({prefix + name: value for name, value in zip(written, values, strict=True)})
    config = vllm_config(block_of(tmp_path / "out"))
    assert config.kv_cache_scheme["strategy"] == "tensor"
    mapped = {config.get_cache_scale_mapper()._map_name(name) for name in found}
    assert mapped == {f"{prefix}attn.{name}" for name in written}


@pytest.mark.parametrize("make", [w8a8, llama], ids=["w8a8", "float"])
def test_tensors_that_w8a8_lacks_are_dropped(tmp_path: Path, make: Callable[[Path], Path]) -> None:
    """Such as the order of columns of actorder, and what observers of activations saw: vLLM loads none of them."""
    source = make(tmp_path / "source")
    if make is w8a8:
        groups = block_of(source)["config_groups"]
        groups["group_0"]["weights"] |= {"actorder": "static", "observer": "minmax"}
        edit_block(source, config_groups=groups)
    convert(source, tmp_path / "expected")
    left = ("weight_g_idx", "input_global_scale", "weight_observer.min_vals")
    rewrite(source, **{f"{Q}.{name}": torch.ones(3) for name in left})
    report = convert(source, tmp_path / "out")
    assert_same_tensors(tensors_of(tmp_path / "out"), tensors_of(tmp_path / "expected"))
    assert all(f"1 .{name} tensors removed, which W8A8 lacks" in report.plan.rewritten for name in left)
    assert "actorder" not in json.dumps(block_of(tmp_path / "out"))


@pytest.mark.parametrize("make", [w8a8, llama], ids=["w8a8", "float"])
@pytest.mark.parametrize("name", ["lora_A.weight", "rms_norm.weight", "weight_g"])
def test_learned_tensors_are_not_dropped(tmp_path: Path, make: Callable[[Path], Path], name: str) -> None:
    """Their part of the outputs would be lost; vLLM serves no such model."""
    source = make(tmp_path / "source")
    rewrite(source, **{f"{Q}.{name}": torch.ones(3)})
    refused(source, f"tensor {Q}.{name} is no part of a linear layer", "merge adapters into the weights")


@pytest.mark.vllm
def test_layers_are_named_by_what_vllm_fuses_them_into(tmp_path: Path) -> None:
    """By the fused name alone in an ignore list, by that or a regex of it among targets, as in vLLM."""
    fused = Q.replace("q_proj", "qkv_proj")
    parts = [Q.replace("q_proj", f"{part}_proj") for part in "qkv"]
    source = compressed(tmp_path / "source", {"group_0": scheme("W8A8", ["Linear"])}, ["lm_head", *parts])
    edit_block(source, ignore=["lm_head", fused])
    report = convert(source, tmp_path / "out")
    assert {report.plan.kept[part] for part in parts} == {"not quantized in the source"}
    assert block_of(tmp_path / "out")["ignore"] == ["lm_head", fused]
    edit_block(source, ignore=["lm_head", "re:.*qkv_proj"])  # to vLLM, they are quantized
    refused(source, f"tensor {Q}.weight is BF16, but quantization_config promises I8", out="x")

    source = compressed(tmp_path / "named", {"group_0": scheme("W8A8", parts)}, ["lm_head"])
    groups = block_of(source)["config_groups"]
    for number, target in enumerate((fused, "re:.*1.self_attn.qkv_proj$")):
        groups["group_0"]["targets"] = [target]
        edit_block(source, config_groups=groups)
        report = convert(source, tmp_path / f"named {number}")
        assert report.plan.patterns.keys() == {*parts}
        assert report.plan.kept.keys() == {"lm_head", *LINEARS} - {*parts}


def transforms(*locations: str) -> dict[str, Any]:
    """Return a transform_config with a rotation for each location."""
    schemes = [{"apply": [{"location": location, "targets": ["re:.*down_proj$"]}]} for location in locations]
    return {"config_groups": {f"R{i}": {"type": "hadamard", **scheme} for i, scheme in enumerate(schemes)}}


def test_rotation_folded_into_the_weights_is_accepted(tmp_path: Path) -> None:
    """SpinQuant's R1 and R2 need nothing while serving, so stock vLLM serves them; R4 rotates activations."""
    source = w8a8(tmp_path / "source")
    convert(source, tmp_path / "expected")
    edit_block(source, transform_config=transforms("weight_output", "weight_input"))
    report = convert(source, tmp_path / "out")
    assert report.plan.rewritten == "transform_config removed, as its rotations are folded into the weights"
    assert_same_tensors(tensors_of(tmp_path / "out"), tensors_of(tmp_path / "expected"))
    assert block_of(tmp_path / "out") == block_of(tmp_path / "expected")


# Refusals

Change = Callable[[Path], Any]


def block(**changed: Any) -> Change:
    return lambda source: edit_block(source, **changed)


def group(**changed: Any) -> Change:
    """Change group_0, or below it "weights" and "inputs"."""

    def change(source: Path) -> None:
        groups = block_of(source)["config_groups"]
        entry = groups["group_0"]
        for name, value in changed.items():
            name = {"inputs": "input_activations"}.get(name, name)
            entry[name] = {**entry[name], **value} if isinstance(value, dict) and name in entry else value
        edit_block(source, config_groups=groups)

    return change


def tensor(suffix: str, change: Callable[[Tensor], Tensor | None]) -> Change:
    """Change a tensor of layer Q, or remove it with None."""
    name = f"{Q}.{suffix}"
    return lambda source: rewrite(source, **{name: change(tensors_of(source)[name])})


# A change of a W8A8 source in INT8, and words of the message
INT8_SOURCES: dict[str, tuple[Change, str]] = {
    "method": (block(quant_method="gptq"), "'gptq'"),
    "no method": (block(quant_method=None), "a method that quantization_config does not name"),
    "static per token": (group(inputs={"dynamic": False}), "not quantized per token"),
    "per group": (group(inputs={"strategy": "group"}), "not quantized per token"),
    "w8a16": (group(inputs=None), "W8A16"),
    "w4": (group(weights={"num_bits": 4}), "4-bit 'int' weights in 'group_0'"),
    "block": (group(weights={"strategy": "block"}), "per 'block'"),
    "zero points": (group(weights={"symmetric": False}), "asymmetric or dynamic weights"),
    "outputs": (group(output_activations={"num_bits": 8}), "outputs"),
    "no targets": (group(targets=None), "no list of targets in 'group_0'"),
    "bad target": (group(targets=["re:mlp.(up"]), "targets: 'mlp.(up'"),
    "bad block": (group(weights={"strategy": "block", "block_structure": [128]}), "block_structure in"),
    "groups a list": (block(config_groups=[1]), "config_groups [1]"),
    "weights a text": (group(weights="int8"), "no objects in 'group_0'"),
    "sparsity a text": (block(sparsity_config="dense, I think"), "'dense, I think'"),
    "marlin": (block(sparsity_config={"format": "marlin-24"}), "sparse-24-bitmask, sparse-bitmask"),
    "packed": (block(format="pack-quantized"), "'pack-quantized'"),
    "packed group": (group(format="pack-quantized"), "'pack-quantized' in 'group_0'"),
    "rotated": (block(transform_config=transforms("weight_input", "input")), "of rotations while serving"),
    "ignore a text": (block(ignore="lm_head"), "ignore list"),
    "bad regex": (block(ignore=["re:mlp.(down"]), "'mlp.(down'"),
    "slow regex": (block(ignore=[DOWN, "re:(.|.)*q$"]), "ignore list: '(.|.)*q$' takes more than"),
    "FP4 cache": (
        block(kv_cache_scheme={**CACHE, "num_bits": 4}),
        "{'num_bits': 4, 'strategy': 'tensor', 'symmetric': True, 'type': 'float'}",
    ),
    "cache a text": (block(kv_cache_scheme="static"), "kv_cache_scheme 'static'"),
    "float layer": (block(ignore=["lm_head"]), f"{DOWN}.weight is BF16, but quantization_config promises I8"),
    "one scale": (
        tensor("weight_scale", lambda t: t[0].clone()),
        f"{Q}.weight_scale is BF16 [1]; scales per channel of 64 rows are 64",
    ),
    "integer scales": (tensor("weight_scale", lambda t: t.to(torch.int32)), f"{Q}.weight_scale is I32"),
    "no scale": (tensor("weight_scale", lambda t: None), f"no tensor {Q}.weight_scale"),
    "no groups": (block(config_groups=None), "by its config.json no weights are quantized"),
    "no metadata": (block(quant_method="slidesparse"), "has no quantization_config.slidesparse"),
}
FP8_SOURCES: dict[str, tuple[Change, str]] = {
    "another type": (group(weights={"type": "int"}, inputs={"type": "int"}), "F8_E4M3, but"),
    "outside all groups": (group(targets=["re:.*mlp.*"]), "the layer is not quantized"),
}
BLOCK_SOURCES: dict[str, tuple[Change, str]] = {
    "fmt": (block(fmt="e5m2"), "fmt 'e5m2'"),
    "scheme": (block(activation_scheme="other"), "activation_scheme 'other'"),
    "size": (block(weight_block_size=[128]), "weight_block_size [128]"),
    "another size": (block(weight_block_size=[16, 16]), "F32 [2, 4]; scales per block of 64 rows are [4, 4]"),
    "list": (block(modules_to_not_convert="lm_head"), "modules_to_not_convert list"),
    "FP8 cache": (block(kv_cache_scheme="dynamic"), "kv_cache_scheme 'dynamic' is not served by vLLM"),
}
REFUSED = {name: (w8a8, *case) for name, case in INT8_SOURCES.items()}
REFUSED |= {name: (lambda folder: w8a8(folder, "fp8"), *case) for name, case in FP8_SOURCES.items()}
REFUSED |= {name: (lambda folder: fp8(folder, (32, 16)), *case) for name, case in BLOCK_SOURCES.items()}


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_sources_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr("slidesparse.checkpoint.names.SECONDS", 0.2)
    make, change, words = REFUSED[name]
    source = make(tmp_path / "source")
    change(source)
    assert len(refused(source, words)) < 600


def test_options_for_floats_are_refused_for_quantized_sources(tmp_path: Path) -> None:
    source = w8a8(tmp_path / "source")
    refused(source, "--quant fp8", "int8 weights already", quant="fp8")
    calibration = Calibration(("random",), samples=1, seqlen=8)
    refused(source, "those of the source are quantized", error=CalibrationError, calibration=calibration)
