"""Our transformer blocks against transformers', and the models that cannot be run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import llama

from slidesparse.calibrate.models import Block, open_model, rms_norm
from slidesparse.checkpoint.storage import Checkpoint
from slidesparse.errors import CalibrationError

transformers = pytest.importorskip(
    "transformers", reason="transformers, which comes with vLLM, is not installed"
)

CPU = torch.device("cpu")
COMMON = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_hidden_layers": 2}
COMMON |= {"vocab_size": 100, "max_position_embeddings": 128}
DECODER = {**COMMON, "num_key_value_heads": 2}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0}
LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 32}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", DECODER),
    "llama 3 rope": ("LlamaForCausalLM", "LlamaConfig", {**DECODER, "rope_parameters": LLAMA3}),
    "linear rope": ("LlamaForCausalLM", "LlamaConfig", {**DECODER, "rope_parameters": LINEAR}),
    "llama biased": (
        "LlamaForCausalLM",
        "LlamaConfig",
        {**DECODER, "attention_bias": True, "mlp_bias": True},
    ),
    "llama bare": ("LlamaModel", "LlamaConfig", DECODER),
    "mistral": ("MistralForCausalLM", "MistralConfig", {**DECODER, "sliding_window": None}),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", DECODER),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**DECODER, "head_dim": 24}),
    "bert": ("BertModel", "BertConfig", COMMON),
    "bert tanh": ("BertModel", "BertConfig", {**COMMON, "hidden_act": "gelu_new"}),
    "bert prefixed": ("BertForSequenceClassification", "BertConfig", COMMON),
    "roberta": ("RobertaModel", "RobertaConfig", COMMON),
    "xlm roberta": ("XLMRobertaForSequenceClassification", "XLMRobertaConfig", COMMON),
}


def saved(name: str, folder: Path) -> Any:
    """A random model of transformers, written to ``folder``; norms and biases differ from their defaults."""
    model_class, config_class, settings = MODELS[name]
    torch.manual_seed(0)
    model = getattr(transformers, model_class)(getattr(transformers, config_class)(**settings)).float().eval()
    for parameter in model.parameters():
        parameter.data.normal_(0.0, 0.3) if parameter.dim() > 1 else parameter.data.uniform_(0.3, 1.5)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("name", MODELS)
@torch.inference_mode()
def test_layers_equal_transformers(name: str, tmp_path: Path) -> None:
    theirs = saved(name, tmp_path)
    ids = torch.randint(3, 100, (2, 50), generator=torch.Generator().manual_seed(1))
    expected = theirs(ids, output_hidden_states=True).hidden_states
    model = open_model(Checkpoint.open(tmp_path))
    with model.checkpoint.reader() as reader:
        x = model.embedder(reader, [ids], CPU)(ids)
        close(x, expected[0])
        for number in range(model.blocks):
            x = model.load(reader, number, CPU).output(x)
            last = number + 1 == model.blocks
            if last and model.is_decoder:  # transformers shows the last one after the final norm
                x = rms_norm(x, reader.whole(f"{model.root}norm.weight"), model.sizes.eps)
            close(x, expected[number + 1])


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal up to float32 rounding of sums of some hundred terms: 2^-24 * 100 of the largest value."""
    assert found.shape == expected.shape
    assert float((found - expected).abs().max()) <= 100 * 2**-24 * float(expected.abs().max())


def test_older_configs_name_rotary_embeddings_otherwise(tmp_path: Path) -> None:
    saved("llama 3 rope", tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    new = open_model(Checkpoint.open(tmp_path)).sizes.frequencies
    scaling = config.pop("rope_parameters")
    path.write_text(json.dumps({**config, "rope_theta": scaling.pop("rope_theta"), "rope_scaling": scaling}))
    old = open_model(Checkpoint.open(tmp_path)).sizes.frequencies
    assert new is not None
    assert old is not None
    assert torch.equal(old, new)


def test_stages_are_the_inputs_of_their_layers(tmp_path: Path) -> None:
    """They are what a hook on each linear layer of transformers' model sees."""
    theirs = saved("qwen3", tmp_path)
    ids = torch.randint(3, 100, (1, 20))
    seen: dict[str, torch.Tensor] = {}
    for name, module in theirs.model.layers[0].named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_hook(lambda _, x, __, name=name: seen.update({name: x[0]}))
    model = open_model(Checkpoint.open(tmp_path))
    with torch.inference_mode(), model.checkpoint.reader() as reader:
        theirs(ids)
        x = model.embedder(reader, [ids], CPU)(ids)
        block: Block = model.load(reader, 0, CPU)
        for stage, names in enumerate(block.stages):
            for name in names:
                close(block.input(stage, x), seen[name])
    assert {name for stage in block.stages for name in stage} == set(seen)


# Models that are not run


@pytest.mark.parametrize(
    ("change", "fact"),
    [
        ({"architectures": ["GemmaForCausalLM"]}, "'GemmaForCausalLM'"),
        ({"hidden_act": "xielu"}, "'xielu'"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "'yarn'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "'factor'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "'llama3'"),
        ({"partial_rotary_factor": 0.5}, "partial"),
        ({"num_attention_heads": None}, "num_attention_heads is None"),
    ],
)
def test_models_that_cannot_be_run_are_refused(tmp_path: Path, change: dict[str, Any], fact: str) -> None:
    source = llama(tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(CalibrationError) as error:
        open_model(Checkpoint.open(source))
    assert fact in str(error.value)


def test_samples_end_where_a_sliding_window_does(tmp_path: Path) -> None:
    source = llama(tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    for change, longest in (
        ({"sliding_window": 48}, 48),
        ({"sliding_window": 48, "use_sliding_window": False}, config["max_position_embeddings"]),
        ({"sliding_window": None}, config["max_position_embeddings"]),
    ):
        (source / "config.json").write_text(json.dumps(config | change))
        assert open_model(Checkpoint.open(source)).longest == longest
