"""Checkpoints of random weights have the form of a conversion's output, or of its source."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from architectures import MOE
from checkpoints import assert_same_tensors, config_of, convert, tensors_of
from commands import Done
from tiny import SIZES, tiny

from slidesparse import synth as module
from slidesparse.blocks import dense_blocks
from slidesparse.checkpoint.inspection import inspect
from slidesparse.checkpoint.names import is_expert
from slidesparse.checkpoint.storage import Checkpoint
from slidesparse.pattern import SlidePattern, parse_pattern
from slidesparse.synth import synth
from slidesparse.tune.shapes import MODELS

SIX = SlidePattern(8)
PROJECTIONS = [f"self_attn.{p}_proj" for p in "qkvo"] + [f"mlp.{p}_proj" for p in ("gate", "up", "down")]
LINEARS = [f"model.layers.{i}.{name}" for i in range(2) for name in PROJECTIONS]


def config_file(folder: Path, kind: str = "qwen2", **changed: Any) -> Path:
    """Write the config.json of a tiny model."""
    config = transformers.CONFIG_MAPPING[kind](**{**SIZES, "initializer_range": 0.05, **changed})
    config.architectures = [transformers.AutoModelForCausalLM._model_mapping[type(config)].__name__]
    config.save_pretrained(folder)
    return folder / "config.json"


def shapes(folder: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {name: stored.spec[1:] for name, stored in Checkpoint.open(folder).tensors.items()}


SETTINGS: dict[str, dict[str, Any]] = {"qwen3_moe": MOE, "bitnet": {"hidden_act": "relu2"}}


@pytest.mark.parametrize(
    ("kind", "quant", "pattern", "layout"),
    [
        ("qwen2", "int8", "6:8", "dense"),
        ("llama", "fp8", "4:6", "slided"),  # K = 64 and 96
        ("qwen3_moe", "int8", "2:4", "slided"),
        ("gemma3_text", "int8", "2_inf", "dense"),
        ("bitnet", "int8", "6:8", "dense"),
        ("llama", "bf16", None, "dense"),
    ],
)
def test_form_of_the_output(tmp_path: Path, kind: str, quant: str, pattern: str | None, layout: str) -> None:
    """Names, dtypes, shapes and config are equal, and the weights obey the pattern."""
    expected = source = tiny(kind, tmp_path / "source", **SETTINGS.get(kind, {}))
    parsed = SlidePattern.parse(pattern) if pattern else None
    if parsed:
        expected = tmp_path / "expected"
        options: dict[str, Any] = {"quant": quant} if kind != "bitnet" else {}
        options |= {"layer": [rf"\.experts\.={pattern}"]} if kind == "qwen3_moe" else {}
        convert(source, expected, parsed, layout=layout, **options)
    plan, _ = synth(source, tmp_path / "out", pattern=parsed, quant=quant, layout=layout)
    assert shapes(tmp_path / "out") == shapes(expected)
    assert config_of(tmp_path / "out") == config_of(expected)
    assert plan.bytes_out == sum(values.nbytes for values in tensors_of(tmp_path / "out").values())
    inspected = inspect(tmp_path / "out")
    assert (inspected.pattern, inspected.violations) == (pattern, 0)


@pytest.mark.parametrize("pattern", ["6:8", "2:4@50%"])
def test_routed_experts_are_pruned_for_measuring(tmp_path: Path, pattern: str) -> None:
    """Unlike those of `convert`, without an option.  The metadata name patterns that need no flag to be served."""
    parsed = parse_pattern(pattern)
    config = config_file(tmp_path, "mixtral", num_local_experts=4, intermediate_size=128, hidden_size=256)
    synth(config, tmp_path / "out", pattern=parsed)
    weights = tensors_of(tmp_path / "out")
    matrices = [weight for name, weight in weights.items() if is_expert(name.removesuffix(".weight"))]
    assert len(matrices) == 2 * 4 * 3
    for weight in matrices:
        assert float((weight == 0).float().mean()) == pytest.approx(0.25, abs=0.02)
    named = config_of(tmp_path / "out")["quantization_config"]["slidesparse"].get("experts")
    assert named == (["6:8"] if pattern == "6:8" else None)


@pytest.mark.parametrize("quant", ["int8", "fp8"])
def test_share_of_blocks_is_pruned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quant: str) -> None:
    """`convert` has no such pattern.  Chunks are less than two strips."""
    half = parse_pattern("2:4@50%")
    monkeypatch.setattr("slidesparse.slide.CHUNK_ELEMENTS", 256 * 100)
    config = config_file(tmp_path, hidden_size=256, intermediate_size=512)
    synth(config, tmp_path / "out", pattern=half, quant=quant)
    weights, report = tensors_of(tmp_path / "out"), inspect(tmp_path / "out")
    assert (report.pattern, report.violations) == ("2:4@50%", 0)
    assert {(layer.pattern, layer.satisfies) for layer in report.layers} == {("2:4@50%", "2:4@50%")}
    for name in LINEARS:
        weight = weights[f"{name}.weight"]
        assert float((~dense_blocks(weight)).float().mean()) == 0.5, name


def test_fewer_layers_are_the_first_ones(tmp_path: Path) -> None:
    config = config_file(tmp_path, "gemma3_text", head_dim=16)
    for name, layers in (("two", None), ("one", 1)):
        synth(config, tmp_path / name, pattern=SIX, layers=layers)
    shortened = config_of(tmp_path / "one")
    assert (shortened["num_hidden_layers"], len(shortened["layer_types"])) == (1, 1)
    first = {name: t for name, t in tensors_of(tmp_path / "two").items() if ".layers.1." not in name}
    assert_same_tensors(tensors_of(tmp_path / "one"), first)


def test_what_a_config_leaves_out_is_transformers_default(tmp_path: Path) -> None:
    """So do published configs of models of images and text, whose language model has a config of its own."""
    text = {**SIZES, "head_dim": 16, "layer_types": ["full_attention"] * 2}
    del text["vocab_size"]
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"model_type": "siglip_vision_model"}
    values = {"model_type": "llava", "text_config": {**text, "model_type": "llama"}, "vision_config": vision}
    values["architectures"] = ["LlavaForConditionalGeneration"]
    (tmp_path / "config.json").write_text(json.dumps(values))
    result = Done("synth", tmp_path / "config.json", tmp_path / "out", "--layers", 1, "--quant", "bf16")
    assert (result.code, result.err) == (0, "")
    assert "LlavaForConditionalGeneration, 1 layers in bf16" in result.out
    vocabulary = json.loads((tmp_path / "out" / "tokenizer" / "tokenizer.json").read_text())["model"]["vocab"]
    assert len(vocabulary) == transformers.LlamaConfig().vocab_size


def test_output_without_pattern_is_a_source(tmp_path: Path) -> None:
    """A config may have a quantization of its own, a tied head and code."""
    own = {"quantization_config": {"quant_method": "fp8"}, "auto_map": {"AutoConfig": "a.B"}}
    config = config_file(tmp_path, "llama", tie_word_embeddings=True, **own)
    synth(config, tmp_path / "plain", quant="fp8")
    written = config_of(tmp_path / "plain")
    assert "auto_map" not in written
    assert "slidesparse" not in written["quantization_config"]
    assert "lm_head.weight" not in tensors_of(tmp_path / "plain")
    assert convert(tmp_path / "plain", tmp_path / "out").plan.quant == "fp8"


def test_layers_that_an_option_prunes_are_listed(tmp_path: Path) -> None:
    options = ("--layer", "down_proj=6:8", "--layer", "lm_head=dense")
    result = Done("synth", config_file(tmp_path), tmp_path / "out", *options)
    assert "in int8 W8A8, not pruned, but for --layer\n" in result.out
    pruned = [layer.name for layer in inspect(tmp_path / "out").layers if layer.pattern == "6:8"]
    assert pruned == [LINEARS[6], LINEARS[13]]
    assert tensors_of(tmp_path / "out")["lm_head.weight"].dtype == torch.int8


def test_ternary_weights_have_the_zeros_of_trained_ones(tmp_path: Path) -> None:
    config = config_file(tmp_path, "bitnet", hidden_size=256, hidden_act="relu2")
    synth(config, tmp_path / "out")
    weights = tensors_of(tmp_path / "out")
    for name in LINEARS:
        codes, scale = weights[f"{name}.weight"], weights[f"{name}.weight_scale"]
        assert sorted(codes.unique().tolist()) == [-1, 0, 1]
        assert len(scale.unique()) == 1
        # a share p of n has a deviation of sqrt(p (1 - p) / n), of which five are allowed
        drawn = min(len(codes), module.SAMPLE) * codes.shape[1]
        assert abs(float((codes == 0).float().mean()) - 0.42) < 5 * math.sqrt(0.42 * 0.58 / drawn)


# Parameter counts of the model cards; like safetensors, they count tied embeddings once
PARAMETERS = {
    "Llama3.2-1B": 1_235_814_400,
    "Llama3.2-3B": 3_212_749_824,
    "Llama3.1-8B": 8_030_261_248,
    "Qwen2.5-7B": 7_615_616_512,
    "Qwen2.5-14B": 14_770_033_664,
    "BitNet-2B": 2_412_820_480,
    "Qwen3-30B-A3B": 30_532_122_624,
    "Qwen1.5-MoE-A2.7B": 14_315_784_192,
    "Mixtral-8x7B": 46_702_792_704,
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_public_configs_have_sizes_of_the_published_models(tmp_path: Path, name: str) -> None:
    values = module._config(name, "bf16", None)
    (tmp_path / "config.json").write_text(json.dumps(values))
    sizes = {name: stored.spec.shape for name, stored in module._source(tmp_path, values)[0].tensors.items()}
    assert sum(math.prod(shape) for shape in sizes.values()) == PARAMETERS[name]
    fused = {"qkv": PROJECTIONS[:3], "o": PROJECTIONS[3:4]}
    fused |= {"gate_up": PROJECTIONS[4:6], "down": PROJECTIONS[6:]}
    for layer in MODELS.get(name, ()):
        parts = [sizes[f"model.layers.0.{part}.weight"] for part in fused[layer.name]]
        assert (sum(n for n, _ in parts), {k for _, k in parts}) == (layer.n, {layer.k})


def test_tokenizer_keeps_the_length_of_prompts(tmp_path: Path) -> None:
    synth(config_file(tmp_path), tmp_path / "out", layers=1)
    folder = tmp_path / "out" / "tokenizer"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert transformers.AutoConfig.from_pretrained(folder)  # vLLM loads it too
    tokens = [1, 0, 7, 7, 127]
    assert len(tokenizer) == 128
    assert tokenizer.decode(tokens) == "t1 t0 t7 t7 t127"
    assert tokenizer.encode(tokenizer.decode(tokens), add_special_tokens=False) == tokens
