"""Models of all kinds are converted by what transformers' modules are, whatever their layers are called.

Routed experts are pruned if each is stored as a tensor, and otherwise left as they are; routers always are.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from architectures import ARCHITECTURES, HEAD, MROPE, QWEN_VISION, VISION, multimodal
from calibration import calibrated
from checkpoints import (
    assert_same_tensors,
    block_of,
    config_of,
    convert,
    refused,
    rewrite,
    tensors_of,
    write,
)
from commands import Done
from moe import EXPERTS, LAYERS, PRUNED, ROUTERS
from moe import MODELS as MIXTURES
from strategies import assert_same_bits
from tiny import SIZES, build, fill, tiny
from torch import nn

from slidesparse.checkpoint.inspection import inspect
from slidesparse.checkpoint.names import is_expert
from slidesparse.checkpoint.skeleton import Skeleton
from slidesparse.checkpoint.storage import Checkpoint
from slidesparse.errors import CalibrationError
from slidesparse.pattern import SlidePattern
from slidesparse.prune import prune
from slidesparse.quantize import INT8, dequantize_rows, quantize_rows
from slidesparse.slide import violations

QWEN3_VISION = {**QWEN_VISION, "deepstack_visual_indexes": [0], "num_position_embeddings": 16}
MODELS = {**ARCHITECTURES, "qwen3_vl": multimodal(QWEN3_VISION, **HEAD, **MROPE)}
del MODELS["bitnet"]  # of another quantization, in test_bitnet.py
IN_BLOCKS = re.compile(r"(?:^|\.)(?:layers|layer|h|blocks)\.\d+\.")
OTHERS = re.compile(r"vision|visual|\.(?:router|gate|router\.layer|gate\.wg|shared_expert_gate)\Z")
SPLIT = {"nomic_bert": re.compile(r"self_attn\.[qkv]_proj\Z")}  # stored as one matrix, Wqkv


def is_pruned(name: str, path: str, module: nn.Module) -> bool:
    """Return whether a module of a model is a linear layer of a transformer block of its text model."""
    if not isinstance(module, nn.Linear) or not IN_BLOCKS.search(path) or OTHERS.search(path):
        return False
    return not (name in SPLIT and SPLIT[name].search(path))


@pytest.mark.parametrize("name", MODELS)
def test_linear_layers_of_blocks_are_pruned_and_all_else_is_unchanged(name: str, tmp_path: Path) -> None:
    """The output, dequantized, is loaded into transformers' model again."""
    model = build(name.split()[0], **MODELS[name])
    fill(model)
    model.bfloat16().save_pretrained(tmp_path / "source")
    before = tensors_of(tmp_path / "source")
    experts = PRUNED if any(is_expert(name.removesuffix(".weight")) for name in before) else ()
    report = convert(tmp_path / "source", tmp_path / "out", layer=experts)
    floats = tensors_of(tmp_path / "out")
    assert not report.plan.skipped
    for layer in report.plan.patterns:
        codes, scale = floats.pop(f"{layer}.weight"), floats.pop(f"{layer}.weight_scale")
        original = before.pop(f"{layer}.weight")
        floats[f"{layer}.weight"] = dequantize_rows(codes, scale)
        if is_expert(layer):
            assert_same_bits(codes, quantize_rows(prune(original, SlidePattern(8)), INT8)[0])
    assert_same_tensors({name: tensor for name, tensor in floats.items() if name in before}, before)
    write(tmp_path / "floats", config_of(tmp_path / "source"), floats)
    options = {"dtype": torch.float32, "output_loading_info": True, "experts_implementation": "eager"}
    loaded, information = type(model).from_pretrained(tmp_path / "floats", **options)
    assert not any(information.values()), information
    originals = dict(model.float().named_parameters())
    pruned = {path: m.weight.data for path, m in loaded.named_modules() if is_pruned(name, path, m)}
    assert len(pruned) == sum(not is_expert(layer) for layer in report.plan.patterns)
    for path, weight in pruned.items():
        original = originals[f"{path}.weight"].data
        assert violations(weight, SlidePattern(8)) is None, path
        error = (weight - prune(original, SlidePattern(8))).abs().amax(1)
        assert bool((error <= original.abs().amax(1) / 254 + 1e-6).all()), path  # half a step of 127


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("deepseek_v3", {"ignore": ["q_a_proj"]}, "q_a_proj but not model.layers.0.self_attn.kv_a_proj"),
        ("deepseek_v2", {"layer": ["kv_a_proj=2:4"]}, "with_mqa but not model.layers.0.self_attn.q_a_proj"),
        ("lfm2", {"layer": [r"\.w1$=dense"]}, "feed_forward.w1 but not model.layers.0.feed_forward.w3"),
        ("qwen3_5_text", {"ignore": ["in_proj_qkv"]}, "_qkv but not model.layers.0.linear_attn.in_proj"),
        ("llama", {"ignore": ["k_proj"]}, "k_proj but not model.layers.0.self_attn.q_proj"),
    ],
)
def test_fused_layers_are_alike(tmp_path: Path, name: str, options: dict[str, Any], words: str) -> None:
    refused(tiny(name, tmp_path / "source", **MODELS[name]), words, **options)


EXPERT_DOWN = "model.layers.0.mlp.experts.down_proj"


def vllm_ignores(folder: Path, layer: str) -> bool:
    """Return whether vLLM's own reading of the ignore list covers the layer."""
    from vllm.model_executor.layers.quantization.compressed_tensors.utils import should_ignore_layer

    return should_ignore_layer(layer, config_of(folder)["quantization_config"]["ignore"])


@pytest.mark.vllm
@pytest.mark.parametrize("name", MIXTURES)
def test_ignored_experts_are_ignored_by_the_names_of_vllm(tmp_path: Path, name: str) -> None:
    model = MIXTURES[name]
    source = model.write(tmp_path / "source")
    report = convert(source, tmp_path / "out", ignore=[r"layers\.1\..*\.experts\."])
    ignored = {layer for layer in model.experts() if "layers.1." in layer}
    assert {layer for layer, reason in report.plan.kept.items() if reason == "--ignore"} == ignored
    assert {*filter(is_expert, report.plan.skipped)} == set(model.experts()) - ignored
    before, after = tensors_of(source), tensors_of(tmp_path / "out")
    assert all(torch.equal(after[f"{layer}.weight"], before[f"{layer}.weight"]) for layer in ignored)
    for i in range(LAYERS):
        # As vLLM renames the model around the experts of Qwen3-VL-MoE, and the module around those of Phi-MoE
        for module in (f"model.layers.{i}.{model.module}", f"language_model.layers.{i}.mlp"):
            assert vllm_ignores(tmp_path / "out", f"{module}.experts.0.gate_proj") == (i == 1)
    assert not vllm_ignores(tmp_path / "out", "model.layers.1.mlp.shared_expert.gate_proj")
    routers = {name.removesuffix(".weight") for name in before if name.endswith(ROUTERS)}
    assert {"lm_head", *routers} <= set(block_of(tmp_path / "out")["ignore"])


def test_inspect_shows_the_patterns_of_experts(tmp_path: Path) -> None:
    """No metadata tell them by name, so that a damaged one was not seen; here they list no layer at all."""
    source = MIXTURES["qwen3"].write(tmp_path / "source")
    assert not inspect(source).expert_patterns
    convert(
        source,
        tmp_path / "out",
        layer=["attn=dense", *PRUNED, "experts.*down_proj=2:4", r"layers\.1\..*(gate|up)_proj=dense"],
    )
    assert block_of(tmp_path / "out")["slidesparse"]["layers"] == {}
    found = inspect(tmp_path / "out").expert_patterns
    assert found == {"2:4": LAYERS * EXPERTS, "6:8": 2 * EXPERTS}
    name = "model.layers.0.mlp.experts.3.up_proj.weight"
    rewrite(tmp_path / "out", **{name: torch.ones_like(tensors_of(tmp_path / "out")[name])})
    assert inspect(tmp_path / "out").expert_patterns == {**found, "6:8": 2 * EXPERTS - 1}
    result = Done("inspect", tmp_path / "out")
    assert result.code == 0, result.err
    assert "24 weights of routed experts in I8" in result.out
    assert "8 of them satisfy 2:4\n7 of them satisfy 6:8\n" in result.out


@pytest.mark.vllm
def test_experts_stored_in_one_tensor_are_written_one_by_one(tmp_path: Path) -> None:
    """Ignored ones, and those in codes, which no tool writes so, stay as they are or are refused."""
    model = MIXTURES["qwen3"]
    config, tensors = model.read()[0], model.joined()
    convert(model.write(tmp_path / "single"), tmp_path / "expected", layer=PRUNED)
    source = write(tmp_path / "source", config, tensors)
    convert(source, tmp_path / "out", layer=PRUNED)
    assert_same_tensors(tensors_of(tmp_path / "out"), tensors_of(tmp_path / "expected"))
    assert block_of(tmp_path / "out") == block_of(tmp_path / "expected")
    convert(source, tmp_path / "ignored", ignore=[r"\.experts\."])
    assert_same_bits(tensors_of(tmp_path / "ignored")[EXPERT_DOWN], tensors[EXPERT_DOWN])
    assert len(tensors_of(tmp_path / "ignored")) == len(tensors) + 8  # scales
    assert vllm_ignores(tmp_path / "ignored", "model.layers.0.mlp.experts.0.gate_proj")
    assert not vllm_ignores(tmp_path / "ignored", "model.layers.0.self_attn.o_proj")
    write(source, config, {**tensors, EXPERT_DOWN: tensors[EXPERT_DOWN].to(torch.float8_e4m3fn)})
    refused(source, f"{EXPERT_DOWN} holds several routed experts in F8_E4M3", out="x")


def test_layer_patterns_apply_to_all_experts_of_a_layer(tmp_path: Path) -> None:
    """In vLLM gate and up of all experts are one matrix, down another."""
    source = MIXTURES["qwen2"].write(tmp_path / "source")
    layers = [r"down_proj=8:10", r"layers\.1.*experts\..*(gate|up)_proj=dense"]
    report = convert(source, tmp_path / "out", layer=layers)
    assert {p.ratio for name, p in report.plan.patterns.items() if name.endswith("down_proj")} == {"8:10"}
    assert len(report.plan.skipped) == 8
    assert config_of(tmp_path / "out")["quantization_config"]["slidesparse"]["experts"] == ["8:10"]
    refused(source, "--ignore covers", "experts.0.gate_proj but not", out="x", ignore=[r"experts\.0\.gate"])
    refused(source, "--layer covers", "experts.0.gate_proj but not", out="x", layer=[r"experts\.0\.gate=2:4"])


@pytest.mark.parametrize(
    ("lacking", "changed", "words"),
    [
        ("", {"num_local_experts": 8}, "has 4 matrices of experts, but config.json describes 8"),
        ("", {"moe_intermediate_size": 32}, "has shape [128, 64], but by config.json [128, 32]"),
        ("layers.1.mlp.experts.3.up_proj", {}, "gate_up_proj has 7 matrices of experts"),
        ("layers.1.mlp.gate", {}, "layers.1.mlp.gate.weight is missing (1 such)"),
        ("layers.1.input_layernorm", {}, "layers.1.input_layernorm.weight is missing (1 such)"),
    ],
)
def test_wrong_mixture_is_refused(tmp_path: Path, lacking: str, changed: dict[str, int], words: str) -> None:
    """vLLM would cut experts to what it needs, and leave what is missing uninitialized."""
    config, tensors = MIXTURES["qwen3"].read()
    tensors.pop(f"model.{lacking}.weight", None)
    refused(write(tmp_path / "source", {**config, **changed}, tensors), words)


def test_sizes_for_each_layer_are_no_counts_of_layers(tmp_path: Path) -> None:
    """Such as those of Gemma 3n and Gemma 4."""
    settings = {"head_dim": 16, "vocab_size_per_layer_input": 4096, "hidden_size_per_layer_input": 16}
    source = tiny("gemma4_text", tmp_path / "source", **settings)
    assert len(convert(source, tmp_path / "out").plan.patterns) == 18


@pytest.mark.parametrize("name", ["llama4_text", "deepseek_v3"])
def test_models_are_made_without_memory_for_experts(tmp_path: Path, name: str) -> None:
    """A layer of DeepSeek-V3's needs 30 GB in float32, and Llama 4's are filled with zeros."""
    settings = {**SIZES, **MODELS[name]}
    settings |= dict.fromkeys({"num_local_experts", "n_routed_experts"} & settings.keys(), 2**14)
    settings["moe_intermediate_size" if "moe_intermediate_size" in settings else "intermediate_size"] = 2**20
    config = transformers.CONFIG_MAPPING[name](**settings)
    architecture = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__
    (tmp_path / "config.json").write_text(json.dumps({**config.to_dict(), "architectures": [architecture]}))
    values = config_of(tmp_path)
    skeleton = Skeleton(Checkpoint(tmp_path, values, None, (), {}))
    assert max(parameter.numel() for parameter in skeleton.model.parameters()) >= 2**40


def test_names_that_transformers_would_rename_in_vain_are_kept(tmp_path: Path) -> None:
    """DeepSeek-V4's norm, written by transformers, has the name of a part that is renamed."""
    settings = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}
    settings |= {"q_lora_rank": 32, "qk_rope_head_dim": 8}
    report = convert(tiny("deepseek_v4", tmp_path / "source", **settings), tmp_path / "out")
    assert "model.layers.1.attn.wq_a" in report.plan.patterns


def test_blocks_that_text_does_not_reach_are_converted_by_magnitude(tmp_path: Path) -> None:
    """Mllama runs some of its blocks for images alone; which layers vLLM may fuse is then not known."""
    vision = {**VISION, "model_type": "mllama_vision_model", "vision_output_dim": 64, "num_global_layers": 1}
    vision |= {"intermediate_layers_indices": [0], "supported_aspect_ratios": [[1, 1]], "max_num_tiles": 1}
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    text = {"cross_attention_layers": [1], "pad_token_id": 0, **rope}
    source = tiny("mllama", tmp_path / "source", **multimodal(vision, **text))
    convert(source, tmp_path / "out")
    with pytest.raises(CalibrationError, match="does not run its block 1 on text"):
        calibrated(source, tmp_path / "calibrated", "random", samples=1, seqlen=8)
    encoder = {**VISION, "num_hidden_layers": 2}
    convert(tiny("git", tmp_path / "git", vision_config=encoder), tmp_path / "no text at all")


def test_limits_of_a_clamp_may_be_infinite(tmp_path: Path) -> None:
    """They are no weights: Gemma 4 stores those of its audio encoder, which are infinite until they are learned."""
    source = tiny("gemma4_audio", tmp_path / "source")
    convert(source, tmp_path / "out")
    before, after = tensors_of(source), tensors_of(tmp_path / "out")
    limits = {name: x for name, x in before.items() if name.endswith(("_min", "_max"))}
    assert any(map(torch.isinf, limits.values()))
    assert_same_tensors({name: after[name] for name in limits}, limits)
    name = min(limits)
    rewrite(source, **{name: torch.full_like(limits[name], torch.nan)})
    refused(source, f"tensor {name} in model.safetensors is not finite", out="nan")
    # of routers, biases are buffers, too
    routed = tiny("glm4_moe", tmp_path / "routed", **ARCHITECTURES["glm4_moe"])
    name = next(name for name in tensors_of(routed) if name.endswith("e_score_correction_bias"))
    rewrite(routed, **{name: torch.full_like(tensors_of(routed)[name], torch.inf)})
    refused(routed, f"tensor {name} in model.safetensors is not finite", out="inf")


def test_head_may_be_tied_by_the_language_models_config_alone(tmp_path: Path) -> None:
    """As transformers 4 wrote it, and as vLLM reads it."""
    settings = {**MODELS["idefics3"], "tie_word_embeddings": True}
    source = tiny("idefics3", tmp_path / "source", **settings)
    config = config_of(source)
    del config["tie_word_embeddings"]
    config["text_config"]["tie_word_embeddings"] = True
    tensors = {name: tensor for name, tensor in tensors_of(source).items() if "lm_head" not in name}
    convert(write(source, config, tensors), tmp_path / "out")
    assert config_of(tmp_path / "out")["text_config"]["tie_word_embeddings"] is True
    assert not any("lm_head" in name for name in tensors_of(tmp_path / "out"))
