"""Models that run block by block give what transformers' whole model gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES, VISION, multimodal
from calibration import IDS, open_model, save
from checkpoints import bert, config_of, llama, tensors_of, write
from torch import Tensor

from slidesparse.calibrate.model import fused_layers
from slidesparse.checkpoint.storage import Checkpoint, CheckpointError
from slidesparse.errors import CalibrationError


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_blocks_and_logits_equal_those_of_the_whole_model(name: str, tmp_path: Path) -> None:
    """The same operations in the same order: equal bit for bit, also the inputs of all layers of a group."""
    whole = save(name, tmp_path)
    model = open_model(tmp_path)
    inputs: dict[str, Tensor] = {}
    outputs: dict[str, Tensor] = {}

    def keep(path: str, args: tuple[Any, ...], out: Any) -> None:
        outputs[path] = out[0] if isinstance(out, tuple) else out
        if args:
            inputs[path] = args[0]

    for path, module in whole.named_modules():
        module.register_forward_hook(lambda _, args, out, path=path: keep(path, args, out))
    with torch.inference_mode(), model.checkpoint.reader() as reader:
        whole(input_ids=IDS)
        ends = model.ends(reader)
        x = ends.embed(IDS)
        for number in range(model.blocks):
            block, prefix = model.load(reader, number), model.skeleton.prefix(number)
            grouped = [name for group in block.groups for name in group]
            assert sorted(grouped) == sorted(
                n for n in model.skeleton.linears(number) if prefix + n in inputs
            )
            for group in block.groups:
                layer_input = block.input(group[0], x)
                assert all(torch.equal(layer_input, inputs[prefix + name]) for name in group), group
            x = block.output(x)
            assert torch.equal(x, outputs[prefix.removesuffix(".")])
        if model.skeleton.generates:
            assert torch.equal(ends.logits(x), outputs[""].logits)


@torch.inference_mode()
def test_norms_of_the_first_bert_models(tmp_path: Path) -> None:
    """Such as bert-base-uncased, whose norms have a gamma and a beta."""
    save("bert", tmp_path / "new")
    tensors = tensors_of(tmp_path / "new")
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    for new, former in old.items():
        tensors = {name.replace(new, former): tensor for name, tensor in tensors.items()}
    write(tmp_path / "old", config_of(tmp_path / "new"), tensors)
    outputs = []
    for folder in (tmp_path / "new", tmp_path / "old"):
        model = open_model(folder)
        with model.checkpoint.reader() as reader:
            outputs.append(model.load(reader, 1).output(model.ends(reader).embed(IDS)))
    assert torch.equal(*outputs)


def test_tensors_outside_of_blocks_may_be_missing_if_nothing_reads_them(tmp_path: Path) -> None:
    """Such as a pooler; a missing norm or embedding is refused by name."""
    folder = bert(tmp_path / "bert")
    tensors = tensors_of(folder)

    def embed(*missing: str) -> Tensor:
        kept = {name: t for name, t in tensors.items() if name not in missing}
        model = open_model(write(folder, config_of(folder), kept))
        with model.checkpoint.reader() as reader:
            return model.ends(reader).embed(torch.arange(8)[None])

    assert torch.equal(embed(), embed("pooler.dense.weight"))
    for name in ("embeddings.LayerNorm.bias", "embeddings.word_embeddings.weight"):
        with pytest.raises(CheckpointError, match=name):
            embed(name)
    model = open_model(llama(tmp_path / "llama", model__norm__weight=None))
    with model.checkpoint.reader() as reader, pytest.raises(CheckpointError, match="model.norm.weight"):
        model.ends(reader)


@pytest.mark.parametrize(
    ("name", "settings", "longest"),
    [
        ("llama", {}, 256),
        ("roberta", {"pad_token_id": 1}, 254),
        ("phi3 longrope", {}, 64),
        ("mamba", {}, 256),
    ],
)
def test_longest_sequence(name: str, settings: dict[str, Any], longest: int, tmp_path: Path) -> None:
    """RoBERTa numbers positions from behind the padding token; LongRoPE's short factors end earlier."""
    save(name, tmp_path, **settings)
    assert open_model(tmp_path).longest == longest


def test_fused_layers_are_those_that_share_input_and_parent(tmp_path: Path) -> None:
    save("cohere", tmp_path)
    attention, mlp = "model.layers.0.self_attn.", "model.layers.0.mlp."
    assert fused_layers(Checkpoint.open(tmp_path), None)[:4] == [
        [f"{attention}{x}_proj" for x in "qkv"],
        [f"{mlp}{x}_proj" for x in ("gate", "up")],
        [f"{attention}o_proj"],
        [f"{mlp}down_proj"],
    ]


# Models that cannot be run


SIZES = dict.fromkeys(("vision_output_dim", "projector_input_dim", "projector_output_dim"), 32)
LLAMA4 = multimodal({**VISION, **SIZES}, num_local_experts=2, intermediate_size_mlp=96)


@pytest.mark.parametrize(
    ("kind", "settings", "words"),
    [
        ("mpnet", {}, "the blocks of MPNetModel read more than hidden states and positions"),
        (
            "llama4",
            LLAMA4,
            r"transformers cannot run Llama4ForConditionalGeneration on text \(AttributeError",
        ),
    ],
)
def test_models_that_cannot_be_run_are_refused(
    kind: str, settings: dict[str, Any], words: str, tmp_path: Path
) -> None:
    """MPNet's blocks share a bias that depends on weights; 5.24 looks for an image that Llama 4 was not given."""
    save(kind, tmp_path, **settings)

    def logits() -> Tensor:
        model = open_model(tmp_path)
        with model.checkpoint.reader() as reader:
            return model.ends(reader).logits(torch.zeros(1, 4, model.hidden))

    with pytest.raises(CalibrationError, match=rf"{words}.*without --calib"):
        logits()
