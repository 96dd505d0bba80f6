"""Our transformer blocks against those of transformers, and unsupported models."""

from __future__ import annotations

import contextlib
import json
import math
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from calibration import calibrated, random_model, write_ids
from checkpoints import llama
from safetensors.torch import load_file, save_file

from slidesparse.calibrate import models
from slidesparse.calibrate.models import DECODERS, ENCODERS, Block, LayeredModel, open_model, rms_norm
from slidesparse.checkpoint.inspection import inspect
from slidesparse.checkpoint.storage import Checkpoint, CheckpointError
from slidesparse.cli.convert import CALIBRATED_METHODS
from slidesparse.errors import CalibrationError, SlideSparseError

transformers = pytest.importorskip(
    "transformers", reason="transformers, which comes with vLLM, is not installed"
)

CPU = torch.device("cpu")
README = Path(__file__).parents[2] / "README.md"
COMMON = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_hidden_layers": 2}
COMMON |= {"vocab_size": 100, "max_position_embeddings": 128}
DECODER = {**COMMON, "num_key_value_heads": 2}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0}
LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 32}
LONGROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.75}
LONGROPE |= {"short_factor": [1.0, 1.25, 1.5, 2.0, 2.5, 3.0], "long_factor": [4.0] * 6}
# 32 of the 50 tokens are within the original length; channels are stretched, kept, and in between
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
YARN |= {"beta_fast": 4.0}
YARN_MORE = {**YARN, "truncate": False, "mscale": 0.8, "mscale_all_dim": 0.5, "beta_slow": 0.5}
YARN_LESS = {**YARN, "truncate": False, "beta_fast": None, "factor": None, "attention_factor": 1.3}
YARN_LESS |= {"original_max_position_embeddings": 2048}
WINDOW = {"sliding_window": 20, "use_sliding_window": True}
GEMMA = {**DECODER, "head_dim": 24, "query_pre_attn_scalar": 40, "sliding_window": 20}
PHI = {**DECODER, "original_max_position_embeddings": 64, "pad_token_id": 0}
GRANITE = {**DECODER, "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "attention_multiplier": 0.1}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0}
VISION = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
VISION |= {"image_size": 28, "patch_size": 14}
QWEN_VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64}
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
QWEN3_VISION = {**QWEN_VISION, "deepstack_visual_indexes": [0], "num_position_embeddings": 16}
SIGLIP = {**VISION, "model_type": "siglip_vision_model"}


def multimodal(
    kind: str, text: dict[str, Any], vision: dict[str, Any], **settings: Any
) -> tuple[str, str, dict[str, Any]]:
    configs = {"text_config": {**DECODER, **text}, "vision_config": vision}
    return f"{kind}ForConditionalGeneration", f"{kind}Config", {**configs, **settings}


MULTIMODAL = {
    "gemma3 vision": multimodal("Gemma3", {**GEMMA, "sliding_window_pattern": 2}, VISION),
    "llava": multimodal("Llava", {"model_type": "llama"}, SIGLIP),
    "mistral3": multimodal(
        "Mistral3", {"model_type": "mistral", "head_dim": 24}, {**VISION, "model_type": "pixtral"}
    ),
    "llava next": multimodal("LlavaNext", {"model_type": "qwen2"}, SIGLIP),
    "idefics3": multimodal("Idefics3", {"model_type": "llama"}, VISION, pad_token_id=0),
    "internvl": multimodal(
        "InternVL",
        {"model_type": "qwen3", "head_dim": 24},
        {**VISION, "image_size": [28, 28], "patch_size": [14, 14]},
    ),
    "qwen2 vl": multimodal(
        "Qwen2VL",
        {"rope_parameters": MROPE},
        {"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2},
    ),
    "qwen2.5 vl": multimodal("Qwen2_5_VL", {"rope_parameters": MROPE}, QWEN_VISION),
    "qwen3 vl": multimodal("Qwen3VL", {"head_dim": 16, "rope_parameters": MROPE}, QWEN3_VISION),
}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", DECODER),
    "llama 3 rope": ("LlamaForCausalLM", "LlamaConfig", {**DECODER, "rope_parameters": LLAMA3}),
    "linear rope": ("LlamaForCausalLM", "LlamaConfig", {**DECODER, "rope_parameters": LINEAR}),
    "yarn rope": ("Qwen2ForCausalLM", "Qwen2Config", {**DECODER, "rope_parameters": YARN}),
    "yarn rope, all keys": ("LlamaForCausalLM", "LlamaConfig", {**DECODER, "rope_parameters": YARN_MORE}),
    "yarn rope, few keys": (
        "Qwen3ForCausalLM",
        "Qwen3Config",
        {**DECODER, "head_dim": 24, "max_position_embeddings": 8192, "rope_parameters": YARN_LESS},
    ),
    "llama biased": (
        "LlamaForCausalLM",
        "LlamaConfig",
        {**DECODER, "attention_bias": True, "mlp_bias": True},
    ),
    "llama bare": ("LlamaModel", "LlamaConfig", DECODER),
    "mistral": ("MistralForCausalLM", "MistralConfig", {**DECODER, "sliding_window": 20}),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", {**DECODER, **WINDOW, "max_window_layers": 1}),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**DECODER, "head_dim": 24}),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", {**GEMMA, "attn_logit_softcapping": 2.0}),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", {**GEMMA, "sliding_window_pattern": 2}),
    "gemma3 scaled rope": (
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {**GEMMA, "sliding_window_pattern": 2, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    ),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", {**PHI, "sliding_window": 20}),
    "phi3 long": ("Phi3ForCausalLM", "Phi3Config", {**PHI, "rope_parameters": LONGROPE}),
    "granite": ("GraniteForCausalLM", "GraniteConfig", GRANITE),
    "olmo2": ("Olmo2ForCausalLM", "Olmo2Config", DECODER),
    "bert": ("BertModel", "BertConfig", COMMON),
    "bert tanh": ("BertModel", "BertConfig", {**COMMON, "hidden_act": "gelu_new"}),
    "bert prefixed": ("BertForSequenceClassification", "BertConfig", COMMON),
    "roberta": ("RobertaModel", "RobertaConfig", COMMON),
    "xlm roberta": ("XLMRobertaForSequenceClassification", "XLMRobertaConfig", COMMON),
    **MULTIMODAL,
}


def save_random_model(name: str, folder: Path) -> Any:
    model = random_model(*MODELS[name])
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("name", MODELS)
@torch.inference_mode()
def test_block_outputs_equal_transformers(name: str, tmp_path: Path) -> None:
    reference = save_random_model(name, tmp_path)
    ids = torch.randint(3, 100, (2, 50), generator=torch.Generator().manual_seed(1))
    outputs = reference(ids, output_hidden_states=True)
    expected = outputs.hidden_states
    model = open_model(Checkpoint.open(tmp_path))
    with model.checkpoint.reader() as reader:
        x = model.embedder(reader, [ids], CPU)(ids)
        assert_near(x, expected[0])
        for number in range(model.blocks):
            x = model.load(reader, number, CPU).output(x)
            last = number + 1 == model.blocks
            if last and model.is_language_model:
                assert_near(model.logits(reader, CPU)(x), outputs.logits)
            if last and model.is_decoder:  # transformers shows the last one after the final norm
                offset, sizes = DECODERS[model.kind].norm_offset, model.sizes[number]
                x = rms_norm(x, reader.whole(f"{model.root}norm.weight") + offset, sizes.eps)
            assert_near(x, expected[number + 1])


@torch.inference_mode()
def test_norms_of_the_first_bert_models(tmp_path: Path) -> None:
    """Such as bert-base-uncased, whose norms have a gamma and a beta."""
    save_random_model("bert prefixed", tmp_path)
    ids = torch.randint(3, 100, (1, 20))
    outputs = []
    for _ in range(2):
        model = open_model(Checkpoint.open(tmp_path))
        with model.checkpoint.reader() as reader:
            outputs.append(model.load(reader, 0, CPU).output(model.embedder(reader, [ids], CPU)(ids)))
        old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
        tensors = load_file(tmp_path / "model.safetensors")
        for new, former in old.items():
            tensors = {name.replace(new, former): tensor for name, tensor in tensors.items()}
        save_file(tensors, tmp_path / "model.safetensors")
    assert torch.equal(*outputs)


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "phi3", "granite", "olmo2"])
def test_calibrated_conversion_of_other_architectures(name: str, tmp_path: Path) -> None:
    reference = save_random_model(name, tmp_path / "source")
    ids = write_ids(tmp_path / "ids.npy")
    report = calibrated(tmp_path / "source", tmp_path / "out", ids, finetune=1)
    linears = [n for n, module in reference.model.named_modules() if isinstance(module, torch.nn.Linear)]
    assert {row["name"] for row in report.layers} == {f"model.{n}" for n in linears}
    assert all(0 < row["block_error_finetuned"] <= row["block_error"] < 1 for row in report.layers)
    inspection = inspect(tmp_path / "out")
    assert inspection.violations == 0
    assert {layer.name: layer.pattern for layer in inspection.layers} == dict.fromkeys(report.pruned, "6:8")


@pytest.mark.parametrize("name", MULTIMODAL)
def test_language_model_of_a_multimodal_one_is_calibrated(name: str, tmp_path: Path) -> None:
    save_random_model(name, tmp_path / "source")
    model = open_model(Checkpoint.open(tmp_path / "source"))
    report = calibrated(tmp_path / "source", tmp_path / "out", write_ids(tmp_path / "ids.npy"), finetune=1)
    assert {row["name"] for row in report.layers} == {*model.linears(0), *model.linears(1)}
    assert all(0 < row["block_error_finetuned"] <= row["block_error"] < 1 for row in report.layers)
    assert any("vis" in layer for layer in report.kept)
    assert inspect(tmp_path / "out").violations == 0


def test_readme_lists_supported_architectures() -> None:
    assert CALIBRATED_METHODS.split(", ") == [*DECODERS, *ENCODERS]
    row = next(line for line in README.read_text().splitlines() if line.startswith("| with `--calib` |"))
    assert row == f"| with `--calib` | {CALIBRATED_METHODS} |"


def assert_near(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Assert equality up to rounding of float32 sums of about 100 terms: 100 * 2^-24 of the largest value."""
    assert actual.shape == expected.shape
    assert float((actual - expected).abs().max()) <= 100 * 2**-24 * float(expected.abs().max())


def in_older_format(name: str, config: dict[str, Any]) -> dict[str, Any]:
    """Return the config as transformers before 5 wrote it, without rope_parameters and layer_types."""
    if name == "qwen2.5 vl":  # its text_config was the config
        config = {**config, **config.pop("text_config"), "model_type": config["model_type"]}
    ropes = config.pop("rope_parameters")
    config.pop("layer_types", None)
    if name == "qwen2.5 vl":
        ropes = {**ropes, "type": "mrope", "rope_type": None}
    if name.startswith("gemma3"):
        local, ropes = ropes["sliding_attention"], ropes["full_attention"]
        config |= {"rope_local_base_freq": local["rope_theta"], "sliding_window_pattern": 2}
    beside = {key: ropes.pop(key) for key in ("rope_theta", "partial_rotary_factor") if key in ropes}
    return {**config, **beside, "rope_scaling": ropes}


@pytest.mark.parametrize(
    "name",
    ["llama 3 rope", "yarn rope", "qwen2", "gemma2", "gemma3 scaled rope", "phi3 long", "qwen2.5 vl"],
)
def test_configs_of_older_transformers_are_equivalent(name: str, tmp_path: Path) -> None:
    save_random_model(name, tmp_path)
    path = tmp_path / "config.json"
    new = open_model(Checkpoint.open(tmp_path))
    path.write_text(json.dumps(in_older_format(name, json.loads(path.read_text()))))
    old = open_model(Checkpoint.open(tmp_path))
    assert old.longest == new.longest == (64 if name == "phi3 long" else 128)
    same_sizes(old, new)


@pytest.mark.parametrize("kind", DECODERS)
def test_missing_keys_have_the_defaults_of_transformers(kind: str, tmp_path: Path) -> None:
    source = llama(tmp_path / "source")
    explicit = {**DECODER, "num_hidden_layers": 12, "architectures": [f"{kind}ForCausalLM"]}
    explicit = {key: value for key, value in explicit.items() if key not in DECODERS[kind].defaults}
    config_class = getattr(transformers, f"{kind}{'Text' * (kind == 'Gemma3')}Config")
    opened = []
    for config in explicit, json.loads(config_class(**explicit).to_json_string(use_diff=False)):
        (source / "config.json").write_text(json.dumps(config))
        opened.append(open_model(Checkpoint.open(source)))
    same_sizes(*opened)
    assert opened[0].longest == opened[1].longest
    assert opened[0].vocabulary == opened[1].vocabulary


def same_sizes(actual: LayeredModel, expected: LayeredModel) -> None:
    for sizes, expected_sizes in zip(actual.sizes, expected.sizes, strict=True):
        assert sizes.rotary is not None
        assert expected_sizes.rotary is not None
        assert torch.equal(sizes.rotary.frequencies, expected_sizes.rotary.frequencies)
        assert sizes.rotary.factor == expected_sizes.rotary.factor
        assert replace(sizes, rotary=None) == replace(expected_sizes, rotary=None)


def test_stage_inputs_equal_layer_inputs_of_transformers(tmp_path: Path) -> None:
    """A hook on each linear layer of transformers' model records the reference."""
    reference = save_random_model("qwen3", tmp_path)
    ids = torch.randint(3, 100, (1, 20))
    inputs: dict[str, torch.Tensor] = {}
    for name, module in reference.model.layers[0].named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_hook(lambda _, x, __, name=name: inputs.update({name: x[0]}))
    model = open_model(Checkpoint.open(tmp_path))
    with torch.inference_mode(), model.checkpoint.reader() as reader:
        reference(ids)
        x = model.embedder(reader, [ids], CPU)(ids)
        block: Block = model.load(reader, 0, CPU)
        for stage, names in enumerate(block.stages):
            for name in names:
                assert_near(block.input(stage, x), inputs[name])
    assert {name for stage in block.stages for name in stage} == set(inputs)


# Unsupported models


@pytest.mark.parametrize("name", ["qwen2", "phi3"])
@torch.inference_mode()
def test_suspended_block_keeps_no_other_activations(name: str, tmp_path: Path) -> None:
    """All batches are suspended at once; with three activations of MLP width each, they filled a GPU of 141 GB."""
    save_random_model(name, tmp_path)
    model = open_model(Checkpoint.open(tmp_path))
    with model.checkpoint.reader() as reader:
        block = model.load(reader, 0, CPU)
    outputs: list[weakref.ref[torch.Tensor]] = []

    def note(_: str, out: torch.Tensor) -> torch.Tensor:
        outputs.append(weakref.ref(out))
        return out

    block.wrote = note
    steps = block.steps(torch.randn(2, 8, model.hidden))
    for _ in range(4):
        waiting = next(steps)
        assert not [output for ref in outputs if (output := ref()) is not None and output is not waiting]
    assert len(outputs) >= 3


@pytest.mark.parametrize(
    ("change", "fact"),
    [
        ({"architectures": ["GemmaForCausalLM"]}, "'GemmaForCausalLM'"),
        ({"hidden_act": "xielu"}, "'xielu'"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor is None; it must be a number above 0"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor is None"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": -8.0}}, "factor is -8.0"),
        (
            {"rope_scaling": {**LONGROPE, "original_max_position_embeddings": 1}},
            "is 1; it must be a number above 1",
        ),
        ({"rope_scaling": {**LONGROPE, "original_max_position_embeddings": 64}}, "it must be 12 numbers"),
        ({"rope_parameters": {"full_attention": {}}, "layer_types": ["sliding_attention"] * 2}, "an object"),
        ({"partial_rotary_factor": 1.5}, "48 of the 32 channels"),
        ({"head_dim": 10**12}, "1000000000000"),
        ({"rope_theta": "fast"}, "'fast'"),
        ({"rms_norm_eps": [1]}, "rms_norm_eps is [1]"),
        ({"rope_scaling": [1]}, "[1]; they must be an object"),
        ({"use_bidirectional_attention": True}, "bidirectional attention"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "'linear_attention'"),
        ({"layer_types": ["full_attention"]}, "2 in all"),
        ({"num_attention_heads": None}, "num_attention_heads is None"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers is 1000000000000"),
        ({"num_hidden_layers": 3}, "model.layers.2.self_attn.q_proj.weight"),
        ({"num_attention_heads": 8}, "model.layers.0.self_attn"),
        ({"num_key_value_heads": None}, "model.layers.0.self_attn.k_proj.weight"),
        ({"head_dim": 7}, "model.layers.0.self_attn.q_proj.weight"),
    ],
)
def test_unsupported_models_are_refused(tmp_path: Path, change: dict[str, Any], fact: str) -> None:
    source = llama(tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | change))
    with pytest.raises((CalibrationError, CheckpointError)) as error:
        open_model(Checkpoint.open(source)).require_rows()
    assert fact in str(error.value)


BAD_VALUES = (-1, 0, 0.5, 10**400, math.nan, math.inf, "", "many", [], [1], [[1]], {}, {"a": []}, True)
ROPE_KINDS = (
    LLAMA3,
    LINEAR,
    YARN_MORE,
    {**LONGROPE, "short_factor": [2.0] * 12, "original_max_position_embeddings": 64, "attention_factor": 1.5},
)


@pytest.mark.parametrize("kind", ["Llama", "Gemma3", "Qwen2", "Granite", "Roberta"])
def test_invalid_config_values_raise_only_own_errors(kind: str, tmp_path: Path) -> None:
    """Callers catch no other exceptions."""
    source = llama(tmp_path / "source")
    checkpoint = Checkpoint.open(source)
    values = {
        **DECODERS.get(kind, DECODERS["Llama"]).defaults,
        **GRANITE,
        **checkpoint.config,
        "layer_types": None,
    }
    values |= {"attn_logit_softcapping": 1.0, "pad_token_id": 0, "layer_norm_eps": 1e-5}
    values |= {"architectures": [f"{kind}ForCausalLM" if kind in DECODERS else f"{kind}Model"]}
    for rope in ROPE_KINDS:
        full_config = {**values, "rope_scaling": rope}
        changed = [{**full_config, key: value} for key in values for value in BAD_VALUES]
        changed += [
            {**full_config, "rope_scaling": {**rope, key: value}}
            for key in rope
            for value in (*BAD_VALUES, None)
        ]
        for config in changed:
            with contextlib.suppress(SlideSparseError):
                open_model(replace(checkpoint, config=config))


def test_internal_errors_are_not_reported_as_config_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "_make_rotary", lambda rope: None)
    with pytest.raises(TypeError):
        open_model(Checkpoint.open(llama(tmp_path)))
