"""Checkpoints of random weights: what they hold is what a conversion of such a model writes."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import config_of, snapshot, tensors_of
from models import LLAMA, QWEN, write_float
from synth_configs import SMALL, config_file, small_chunks  # noqa: F401  the fixture is used by being here
from typer.testing import CliRunner
from zygote import Request, Zygote

from slidesparse import checkpoint as checkpoint_module
from slidesparse import synth as synth_module
from slidesparse.architectures import ArchitectureError
from slidesparse.bench.shapes import MODELS
from slidesparse.checkpoint import Checkpoint, CheckpointError
from slidesparse.cli import app
from slidesparse.convert import convert
from slidesparse.decoder import NOT_SERVED, PUBLIC, read_config, tensors
from slidesparse.inspection import inspect, verify
from slidesparse.pattern import SlidePattern
from slidesparse.publish import SpaceError
from slidesparse.quantize import dequantize_rows
from slidesparse.synth import MARK, synth

SIX = SlidePattern.parse("6:8")


def shapes(folder: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {name: stored.spec[1:] for name, stored in Checkpoint.open(folder).tensors.items()}


@pytest.mark.parametrize("pattern", ["6:8", "4:6", "2_inf"])  # K is 64 and 88: 4:6 leaves tails
@pytest.mark.parametrize("quant", ["int8", "fp8"])
@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_it_is_what_a_conversion_writes(tmp_path: Path, family: str, quant: str, pattern: str) -> None:
    """Names, dtypes, shapes and config of both layouts; their weights are the same and obey the pattern."""
    model, parsed = SMALL[family], SlidePattern.parse(pattern)
    source = write_float(model, tmp_path / "source")
    for layout in ("dense", "slided"):
        expected, out = tmp_path / f"converted-{layout}", tmp_path / layout
        convert(source, expected, pattern=parsed, quant=quant, layout=layout)
        synth(source, out, pattern=parsed, quant=quant, layout=layout)
        assert shapes(out) == shapes(expected)
        config = config_of(out)
        assert config.pop(MARK)["weights"] == "random"
        assert config == config_of(expected)
        report = inspect(out)
        assert (report.pattern, report.layout, report.violations) == (pattern, layout, 0)
        assert [layer.name for layer in report.layers] == [layer.name for layer in inspect(expected).layers]
    found = verify(tmp_path / "dense", tmp_path / "slided")
    assert found.equal, found.difference
    assert found.slided == len(model.linears())


@pytest.mark.parametrize("quant", ["int8", "fp8"])
def test_rows_differ_and_are_pruned_no_further_than_needed(tmp_path: Path, quant: str) -> None:
    synth(config_file(tmp_path), tmp_path / "out", pattern=SIX, quant=quant)
    found = tensors_of(tmp_path / "out")
    for name, values in found.items():
        if values.dim() != 2 or name.endswith("_scale"):
            continue
        dense = values.float()
        assert len(dense.unique(dim=0)) == len(dense), name
        if "proj" in name:
            assert dense.abs().amax(1).eq({"int8": 127, "fp8": 448}[quant]).all(), name
            zeros = (dense == 0).unflatten(1, (-1, 8)).sum(-1)
            assert zeros.min() == 2, name
            assert (zeros == 2).float().mean() > 0.99, name  # a third weight that rounds to zero is rare
            assert 0.3 < (dense[dense != 0] > 0).float().mean() < 0.7, name
    layers = [found[f"model.layers.{i}.mlp.up_proj.weight"].float() for i in range(2)]
    assert not layers[0].equal(layers[1])


@pytest.mark.parametrize("quant", ["int8", "fp8"])
def test_every_row_is_one_of_the_sample_turned_by_whole_blocks_and_perhaps_negated(quant: str) -> None:
    """With 4:6, of which 64 columns have ten blocks and a tail that stays where it is."""
    config = {**SMALL["qwen2"].config(), "num_hidden_layers": 1}
    plan = synth_module._plan(config, quant, SlidePattern.parse("4:6"), "dense", 0, 10**9)
    recipe = synth_module._Recipe(plan, 0.02, 0)
    part = next(part for part in plan.parts if part.layer and part.layer.endswith("up_proj"))
    sample = recipe.draw(part)
    assert (sample.rows, sample.turns) == (10, 10)
    generator = torch.Generator().manual_seed(1)
    original, _ = sample.make(10, 0, torch.Generator().manual_seed(1))
    values, scale = sample.make(10, 3, generator)
    turned = torch.cat([original[:, 18:60], original[:, :18], original[:, 60:]], 1)
    assert values.view(torch.uint8).equal(turned.view(torch.uint8))
    kept = sample.turning[:10, :60].view(values.dtype).float()
    signs = set()
    for row, factor in zip(original.float()[:, :60], scale, strict=True):
        same = (kept == row).all(1) | (kept == -row).all(1)
        assert same.sum() == 1
        assert sample.scale[same].item() == factor.item()
        signs.add(bool((kept == row).all(1).any()))
    assert signs == {True, False}
    if quant == "fp8":
        assert not (values.view(torch.uint8) == 0x80).any()  # -0.0, which slides in another way


def test_scales_are_those_of_trained_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A linear layer keeps the scale of its input; the rest has the initializer's deviation.

    The deviation of n normal values is known to 1/sqrt(2n), of which five are allowed; 8 bits add 1e-4 at most.
    """
    monkeypatch.setattr(checkpoint_module, "CHUNK_ELEMENTS", 2**20)
    model = replace(QWEN, hidden=256, intermediate=512, heads=8, layers=1)
    synth(config_file(tmp_path, model, initializer_range=0.05), tmp_path / "out")
    found = tensors_of(tmp_path / "out")

    def deviates(values: torch.Tensor, std: float) -> float:
        return abs(float(values.float().pow(2).mean().sqrt()) / std - 1) - 5 / math.sqrt(2 * values.numel())

    for layer, (_, k) in model.linears().items():
        scale = found[f"{layer}.weight_scale"]
        assert deviates(dequantize_rows(found[f"{layer}.weight"], scale), k**-0.5) < 1e-4, layer
        assert (scale > 0).all()
    for name in ("model.embed_tokens.weight", "lm_head.weight", "model.layers.0.self_attn.q_proj.bias"):
        assert deviates(found[name], 0.05) < 1e-4, name
    for name in ("model.norm.weight", "model.layers.0.input_layernorm.weight"):
        assert found[name].eq(1).all()


def test_same_seed_same_bytes_with_any_number_of_processors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_file(tmp_path)
    for count, seed in ((1, 7), (4, 7), (4, 8)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, count=count: set(range(count)))
        synth(config, tmp_path / f"{count}-{seed}", pattern=SIX, seed=seed)
    first = snapshot(tmp_path / "1-7")
    assert snapshot(tmp_path / "4-7") == first
    other = tensors_of(tmp_path / "4-8")
    for name, values in tensors_of(tmp_path / "1-7").items():
        assert values.view(torch.uint8).equal(other[name].view(torch.uint8)) == ("norm" in name), name
    assert config_of(tmp_path / "4-8")[MARK]["seed"] == 8


def test_shards(tmp_path: Path) -> None:
    config, limit, written = config_file(tmp_path), 20_000, []
    report = synth(
        config,
        tmp_path / "many",
        pattern=SIX,
        shard_bytes=limit,
        progress=lambda done, total: written.append((done, total)),
    )
    synth(config, tmp_path / "one", pattern=SIX)
    assert verify(tmp_path / "one", tmp_path / "many").equal
    opened = Checkpoint.open(tmp_path / "many")
    assert opened.index is not None
    assert opened.index["metadata"]["total_size"] == report.bytes_out
    assert len(opened.files) == report.files > 2
    assert opened.files[0] == f"model-00001-of-{report.files:05}.safetensors"
    for file in opened.files:
        held = [stored.spec.nbytes for stored in opened.tensors.values() if stored.file == file]
        assert sum(held) <= limit, file
    for name, stored in opened.tensors.items():
        if name.endswith("_scale"):
            assert stored.file == opened.tensors[name.removesuffix("_scale")].file
    assert written == sorted(written)
    assert written[-1] == (report.bytes_out, report.bytes_out)
    assert [path.name for path in (tmp_path / "one").iterdir()].count("model.safetensors.index.json") == 0


def test_a_tensor_above_the_shard_size_has_a_file_of_its_own(tmp_path: Path) -> None:
    synth(config_file(tmp_path), tmp_path / "out", shard_bytes=1)
    opened = Checkpoint.open(tmp_path / "out")
    assert len(opened.files) == len([name for name in opened.tensors if not name.endswith("_scale")])


def test_fewer_layers(tmp_path: Path) -> None:
    """The layers that stay are the same ones, except that config.json counts fewer."""
    config = config_file(tmp_path, layer_types=["full_attention"] * 2)
    assert synth(config, tmp_path / "two", pattern=SIX).layers == 2
    assert synth(config, tmp_path / "one", pattern=SIX, layers=1).layers == 1
    cut = config_of(tmp_path / "one")
    assert (cut["num_hidden_layers"], cut["layer_types"]) == (1, ["full_attention"])
    every, kept = tensors_of(tmp_path / "two"), tensors_of(tmp_path / "one")
    assert set(kept) == {name for name in every if ".layers.1." not in name}
    assert all(values.equal(every[name]) for name, values in kept.items())


def test_without_a_pattern_it_is_an_ordinary_w8a8_checkpoint(tmp_path: Path) -> None:
    """One that the converter takes as a source; --layout of what it made changes as ever."""
    config = config_file(tmp_path)
    synth(config, tmp_path / "plain", quant="fp8")
    report = inspect(tmp_path / "plain")
    assert report.pattern is None
    assert {layer.satisfies for layer in report.layers} == {None}
    assert "slidesparse" not in config_of(tmp_path / "plain")["quantization_config"]
    convert(tmp_path / "plain", tmp_path / "dense", pattern=SIX)
    convert(tmp_path / "dense", tmp_path / "slided", pattern=SIX, layout="slided")
    assert inspect(tmp_path / "dense").violations == 0
    assert verify(tmp_path / "dense", tmp_path / "slided").equal
    assert MARK in config_of(tmp_path / "slided")


def test_tied_embeddings_and_other_dtypes(tmp_path: Path) -> None:
    config = config_file(tmp_path, tie_word_embeddings=True, torch_dtype=None, dtype="float16")
    synth(config, tmp_path / "out", pattern=SIX)
    found = tensors_of(tmp_path / "out")
    assert "lm_head.weight" not in found
    assert {str(v.dtype) for v in found.values()} == {"torch.int8", "torch.float32", "torch.float16"}


def test_its_own_quantization_gives_way(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    config = config_file(tmp_path)
    assert synth(config, first, pattern=SIX, quant="fp8").replaced is None
    assert synth(first, second, pattern=SlidePattern.parse("2:4")).replaced == "compressed-tensors"
    assert inspect(second).pattern == "2:4"
    assert {layer.dtype for layer in inspect(second).layers} == {"I8"}


# What the model cards count, as safetensors does: tied embeddings once
PARAMETERS = {
    "Llama3.2-1B": 1_235_814_400,
    "Llama3.2-3B": 3_212_749_824,
    "Qwen2.5-7B": 7_615_616_512,
    "Qwen2.5-14B": 14_770_033_664,
}


def test_the_public_models_are_those_of_the_benchmarks() -> None:
    assert {*PUBLIC, *NOT_SERVED} == set(MODELS)
    for name, config in PUBLIC.items():
        found = {spec.name: spec.shape for spec in tensors(config)}
        assert sum(math.prod(shape) for shape in found.values()) == PARAMETERS[name]
        block = "model.layers.0."
        fused = {
            "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            "o": ("self_attn.o_proj",),
            "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
            "down": ("mlp.down_proj",),
        }
        for layer in MODELS[name].layers:
            parts = [found[f"{block}{part}.weight"] for part in fused[layer.name]]
            assert (sum(n for n, _ in parts), {k for _, k in parts}) == (layer.n, {layer.k})
    assert read_config("Qwen2.5-7B") == PUBLIC["Qwen2.5-7B"]


@pytest.mark.parametrize(
    ("changed", "error", "words"),
    [
        ({"architectures": ["BitNetForCausalLM"]}, ArchitectureError, ["'BitNetForCausalLM'", "Qwen2For"]),
        ({"architectures": None}, ArchitectureError, ["None"]),
        ({"hidden_size": None}, CheckpointError, ["hidden_size is None"]),
        ({"num_hidden_layers": 0}, CheckpointError, ["num_hidden_layers is 0"]),
        ({"vocab_size": "90"}, CheckpointError, ["vocab_size is '90'"]),
        ({"torch_dtype": "int4"}, CheckpointError, ["torch_dtype is 'int4'", "bfloat16"]),
        ({"model_type": None}, CheckpointError, ["model_type"]),
        ({"initializer_range": "wide"}, CheckpointError, ["initializer_range is 'wide'"]),
    ],
)
def test_configs_that_do_not_do(
    tmp_path: Path, changed: dict[str, Any], error: type[Exception], words: list[str]
) -> None:
    config = config_file(tmp_path, **changed)
    with pytest.raises(error) as caught:
        synth(config, tmp_path / "out", pattern=SIX)
    assert all(word in str(caught.value) for word in words), caught.value
    assert list(tmp_path.iterdir()) == [config]


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (["BitNet-2B"], 2, ["not served by stock vLLM's W8A8 path", "Qwen2.5-7B"]),
        (["Qwen9-7B"], 2, ["'Qwen9-7B' is neither one of Llama3.2-1B", "config.json"]),
        (["--quant", "int4"], 2, ["--quant 'int4'", "int8, fp8"]),
        (["--sparsity", "5:8"], 2, ["5:8"]),
        (["--layout", "slided"], 2, ["--layout slided needs a pattern"]),
        (["--layers", "3"], 2, ["--layers 3 is not from 1 to 2"]),
        (["--layers", "0"], 2, ["--layers 0 is not from 1 to 2"]),
        (["--shard-size", "4"], 2, ["--shard-size '4' is not a size"]),
        (["--shard-size", "0MB"], 2, ["--shard-size is 0 bytes"]),
    ],
)
def test_commands_that_do_not_do(tmp_path: Path, options: list[str], code: int, words: list[str]) -> None:
    config = config_file(tmp_path)
    given = options if not options[0].startswith("-") else [str(config), *options]
    result = CliRunner().invoke(app, ["synth", given[0], str(tmp_path / "out"), *given[1:]])
    assert result.exit_code == code, result.output
    assert all(word in result.output for word in words), result.output
    assert list(tmp_path.iterdir()) == [config]


def test_an_output_that_exists_is_left_alone(tmp_path: Path) -> None:
    config, out = config_file(tmp_path), tmp_path / "out"
    out.mkdir()
    (out / "precious").write_text("kept")
    with pytest.raises(CheckpointError, match="not empty"):
        synth(config, out)
    assert snapshot(out) == {"precious": b"kept"}


def test_no_space_is_seen_beforehand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, usage = config_file(tmp_path), shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    result = CliRunner().invoke(app, ["synth", str(config), str(tmp_path / "out")])
    assert result.exit_code == 3
    assert "no space left" in result.output
    assert list(tmp_path.iterdir()) == [config]


def test_no_space_while_writing_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, calls, write = config_file(tmp_path), [], os.pwrite

    def full(*args: Any) -> int:
        calls.append(args)
        if len(calls) > 20:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(*args)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(SpaceError, match="nothing is left behind"):
        synth(config, tmp_path / "out")
    assert list(tmp_path.iterdir()) == [config]


def test_the_command_says_what_it_made_and_how_to_serve_it(tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = ["--sparsity", "2_8", "--quant", "fp8", "--layers", "1", "--layout", "slided"]
    result = CliRunner().invoke(app, ["synth", str(config_file(tmp_path).parent), str(out), *options])
    assert "Qwen2ForCausalLM, 1 layers in fp8 W8A8, pruned to 6:8" in result.stdout, result.output
    assert result.stdout.splitlines()[-1].endswith(f"vllm serve {out} --tokenizer {out}/tokenizer")


def test_the_tokenizer_keeps_the_lengths_of_prompts(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    synth(config_file(tmp_path), tmp_path / "out", layers=1)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out" / "tokenizer")
    size = json.loads((tmp_path / "out" / "config.json").read_text())["vocab_size"]
    assert transformers.AutoConfig.from_pretrained(
        tmp_path / "out" / "tokenizer"
    )  # vLLM asks for it, and again
    tokens = [1, 0, 7, 7, size - 1]
    assert len(tokenizer) == size
    assert tokenizer.decode(tokens) == f"t1 t0 t7 t7 t{size - 1}"
    assert tokenizer.encode(tokenizer.decode(tokens), add_special_tokens=False) == tokens


PLAIN = {**QWEN.config(), "attention_bias": False, "sliding_window": None}
SERVED = {
    "qwen2": QWEN.config(),
    "llama": LLAMA.config(),
    "qwen3": {**PLAIN, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
    "mistral": {**PLAIN, "architectures": ["MistralForCausalLM"], "model_type": "mistral"},
}


@pytest.mark.vllm
@pytest.mark.parametrize("family", SERVED)
def test_vllm_serves_it(zygote: Zygote, tmp_path: Path, family: str) -> None:
    """Stock vLLM the dense layout, the plugin the slided one.

    Their tokens are not compared: on CPUs without VNNI stock vLLM's INT8 kernel saturates with codes this large.
    """
    config = tmp_path / "config.json"
    config.write_text(json.dumps(SERVED[family]))
    for layout, env in (("dense", {"DISABLE_SLIDESPARSE": "1"}), ("slided", {})):
        synth(config, tmp_path / layout, pattern=SIX, layout=layout)
        answer = zygote.ask(Request(str(tmp_path / layout), env=env))
        assert not answer.error, f"{answer.error}\n{answer.log[-4000:]}"
        assert len({tuple(tokens) for tokens in answer.tokens}) == len(answer.tokens)
        assert ("8 layers sparse" in answer.summary) == (layout == "slided")


@pytest.mark.vllm
@pytest.mark.parametrize("name", PUBLIC)
def test_vllm_accepts_the_public_configs(zygote: Zygote, tmp_path: Path, name: str) -> None:
    plan = synth_module._plan(read_config(name), "int8", SIX, "dense", 0, 4 * 10**9)
    for file, content in plan.small_files():
        (tmp_path / file).write_bytes(content)
    answer = zygote.ask(Request(str(tmp_path), task="config_hash", options={"dtype": "bfloat16"}))
    assert not answer.error, f"{answer.error}\n{answer.log[-4000:]}"
    assert answer.config_hash
