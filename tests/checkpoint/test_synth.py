"""Checkpoints of random weights have the form of a conversion's output, or of its source."""

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
from checkpoints import config_of, convert, snapshot, tensors_of
from commands import Done
from engines import Engines, Request
from models import LLAMA, QWEN, Decoder, write_float

from slidesparse.calibrate.task import Calibration
from slidesparse.checkpoint import storage
from slidesparse.checkpoint.inspection import inspect, verify
from slidesparse.checkpoint.storage import Checkpoint, CheckpointError
from slidesparse.convert import synth as synth_module
from slidesparse.convert.synth import MARK, synth
from slidesparse.convert.synth_model import PUBLIC, read_config, tensors
from slidesparse.errors import EnvironmentFault
from slidesparse.pattern import SlidePattern
from slidesparse.quantize import dequantize_rows
from slidesparse.tune.shapes import MODELS

SIX = SlidePattern.parse("6:8")
SIZES: dict[str, int] = {"hidden": 64, "intermediate": 88, "heads": 2, "kv_heads": 1, "vocabulary": 90}
SMALL = {"qwen2": replace(QWEN, **SIZES), "llama": replace(LLAMA, **SIZES)}


def config_file(folder: Path, model: Decoder = SMALL["qwen2"], **changed: Any) -> Path:
    """Write a config.json; ``changed`` entries are replaced, or removed if None."""
    path = folder / "config.json"
    config = {**model.config(), **changed}
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))
    return path


def shapes(folder: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {name: stored.spec[1:] for name, stored in Checkpoint.open(folder).tensors.items()}


# Output


@pytest.mark.parametrize(
    ("family", "quant", "pattern"),
    [("qwen2", "int8", "6:8"), ("llama", "fp8", "4:6"), ("llama", "int8", "2_inf"), ("qwen2", "fp8", "6:8")],
)
def test_synth_output_has_the_form_of_a_conversion(
    tmp_path: Path, family: str, quant: str, pattern: str
) -> None:
    """Names, dtypes, shapes and config of all layouts are equal; their weights are the same and obey the
    pattern.

    K is 64 and 88: 4:6 leaves tails.
    """
    model, parsed = SMALL[family], SlidePattern.parse(pattern)
    source = write_float(model, tmp_path / "source")
    for layout in ("dense", "slided", "packed"):
        expected, out = tmp_path / f"converted-{layout}", tmp_path / layout
        convert(source, expected, pattern, quant=quant, layout=layout)
        synth(source, out, pattern=parsed, quant=quant, layout=layout)
        assert shapes(out) == shapes(expected)
        config = config_of(out)
        assert config.pop(MARK)["weights"] == "random"
        assert config == config_of(expected)
        report = inspect(out)
        assert (report.pattern, report.layout, report.violations) == (pattern, layout, 0)
        assert [layer.name for layer in report.layers] == [layer.name for layer in inspect(expected).layers]
    result = verify(tmp_path / "dense", tmp_path / "slided")
    assert result.equal, result.difference
    assert result.slided == len(model.linears())


@pytest.mark.parametrize("quant", ["int8", "fp8"])
def test_synth_rows_differ_and_have_only_needed_zeros(tmp_path: Path, quant: str) -> None:
    synth(config_file(tmp_path), tmp_path / "out", pattern=SIX, quant=quant)
    weights = tensors_of(tmp_path / "out")
    for name, values in weights.items():
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
    layers = [weights[f"model.layers.{i}.mlp.up_proj.weight"].float() for i in range(2)]
    assert not layers[0].equal(layers[1])


@pytest.mark.parametrize("quant", ["int8", "bf16"])
def test_synth_weights_have_the_initializers_deviation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quant: str
) -> None:
    """A linear layer preserves the scale of its input; other tensors have the initializer's deviation.

    The deviation of n normal values has a relative error of 1/sqrt(2n), of which five are allowed; rounding to 8 bits
    or BF16 adds at most 1e-4.
    """
    drawn = 2**14  # random numbers that are drawn; all tensors are made of them
    monkeypatch.setattr(storage, "CHUNK_ELEMENTS", drawn)
    model = replace(QWEN, hidden=256, intermediate=512, heads=8, layers=2)
    synth(config_file(tmp_path, model, initializer_range=0.05), tmp_path / "out", quant=quant)
    weights = tensors_of(tmp_path / "out")
    deviations = {f"{layer}.weight": k**-0.5 for layer, (_, k) in model.linears().items()}
    deviations |= dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), 0.05)
    deviations["model.layers.0.self_attn.q_proj.bias"] = 0.05
    for name, std in deviations.items():
        values, scale = weights[name], weights.get(f"{name}_scale")
        values = values.float() if scale is None else dequantize_rows(values, scale)
        tolerance = 5 / math.sqrt(2 * min(values.numel(), drawn)) + 1e-4
        assert abs(float(values.pow(2).mean().sqrt()) / std - 1) < tolerance, name
        assert len(values.unique(dim=0)) == len(values) or values.dim() == 1, name
    for name in ("model.norm.weight", "model.layers.0.input_layernorm.weight"):
        assert weights[name].eq(1).all()


@pytest.mark.parametrize("quant", ["int8", "bf16"])
def test_output_does_not_depend_on_number_of_processors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quant: str
) -> None:
    config, pattern = config_file(tmp_path), SIX if quant == "int8" else None
    for count, seed in ((1, 7), (4, 7), (4, 8)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, count=count: set(range(count)))
        synth(config, tmp_path / f"{count}-{seed}", quant=quant, pattern=pattern, seed=seed)
    assert snapshot(tmp_path / "4-7") == snapshot(tmp_path / "1-7")
    other = tensors_of(tmp_path / "4-8")
    for name, values in tensors_of(tmp_path / "1-7").items():
        assert values.view(torch.uint8).equal(other[name].view(torch.uint8)) == ("norm" in name), name
    assert config_of(tmp_path / "4-8")[MARK]["seed"] == 8


def test_synth_shards_equal_one_file(tmp_path: Path) -> None:
    config, limit, written = config_file(tmp_path), 20_000, []
    report = synth(
        config,
        tmp_path / "many",
        pattern=SIX,
        shard_bytes=limit,
        progress=lambda *call: written.append(call[1:]),
    )
    synth(config, tmp_path / "one", pattern=SIX)
    assert verify(tmp_path / "one", tmp_path / "many").equal
    checkpoint = Checkpoint.open(tmp_path / "many")
    assert checkpoint.index is not None
    assert checkpoint.index["metadata"]["total_size"] == report.bytes_out
    assert len(checkpoint.files) == report.files > 2
    assert checkpoint.files[0] == f"model-00001-of-{report.files:05}.safetensors"
    for file in checkpoint.files:
        sizes = [stored.spec.nbytes for stored in checkpoint.tensors.values() if stored.file == file]
        assert sum(sizes) <= limit, file
    for name, stored in checkpoint.tensors.items():
        if name.endswith("_scale"):
            assert stored.file == checkpoint.tensors[name.removesuffix("_scale")].file
    assert written == sorted(written)
    assert written[-1] == (report.bytes_out, report.bytes_out)
    assert not (tmp_path / "one" / "model.safetensors.index.json").exists()
    synth(config, tmp_path / "each", shard_bytes=1)  # tensors above the limit have a file of their own
    checkpoint = Checkpoint.open(tmp_path / "each")
    assert len(checkpoint.files) == len([name for name in checkpoint.tensors if not name.endswith("_scale")])


def test_synth_with_fewer_layers_keeps_the_first(tmp_path: Path) -> None:
    """The remaining layers are equal; config.json counts fewer."""
    config = config_file(tmp_path, layer_types=["full_attention"] * 2)
    assert synth(config, tmp_path / "two", pattern=SIX).layers == 2
    assert synth(config, tmp_path / "one", pattern=SIX, layers=1).layers == 1
    shortened = config_of(tmp_path / "one")
    assert (shortened["num_hidden_layers"], shortened["layer_types"]) == (1, ["full_attention"])
    two_layers, one_layer = tensors_of(tmp_path / "two"), tensors_of(tmp_path / "one")
    assert set(one_layer) == {name for name in two_layers if ".layers.1." not in name}
    assert all(values.equal(two_layers[name]) for name, values in one_layer.items())


def test_synth_without_pattern_writes_unpruned_w8a8(tmp_path: Path) -> None:
    """The converter accepts it as a source, and can change the layout of the result."""
    synth(config_file(tmp_path), tmp_path / "plain", quant="fp8")
    report = inspect(tmp_path / "plain")
    assert report.pattern is None
    assert {layer.satisfies for layer in report.layers} == {None}
    assert "slidesparse" not in config_of(tmp_path / "plain")["quantization_config"]
    convert(tmp_path / "plain", tmp_path / "dense")
    convert(tmp_path / "dense", tmp_path / "slided", layout="slided")
    assert inspect(tmp_path / "dense").violations == 0
    assert verify(tmp_path / "dense", tmp_path / "slided").equal
    assert MARK in config_of(tmp_path / "slided")


def test_tied_embeddings_and_other_dtypes(tmp_path: Path) -> None:
    config = config_file(tmp_path, tie_word_embeddings=True, torch_dtype=None, dtype="float16")
    synth(config, tmp_path / "out", pattern=SIX)
    weights = tensors_of(tmp_path / "out")
    assert "lm_head.weight" not in weights
    assert {str(v.dtype) for v in weights.values()} == {"torch.int8", "torch.float32", "torch.float16"}


def test_synth_replaces_quantization_of_the_config(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    assert synth(config_file(tmp_path), first, pattern=SIX, quant="fp8").replaced is None
    assert synth(first, second, pattern=SlidePattern.parse("2:4")).replaced == "compressed-tensors"
    assert inspect(second).pattern == "2:4"
    assert {layer.dtype for layer in inspect(second).layers} == {"I8"}


# Float checkpoints


@pytest.mark.parametrize("family", SMALL)
def test_synth_bf16_has_tensors_and_config_of_the_float_model(tmp_path: Path, family: str) -> None:
    source = write_float(SMALL[family], tmp_path / "source")
    report = synth(source, tmp_path / "out", quant="bf16")
    assert shapes(tmp_path / "out") == shapes(source)
    assert (report.quant, report.pattern) == ("bf16", None)
    assert report.bytes_out == sum(values.nbytes for values in tensors_of(tmp_path / "out").values())
    config = config_of(tmp_path / "out")
    assert config.pop(MARK)["weights"] == "random"
    assert config == config_of(source) | {"torch_dtype": "bfloat16"}


@pytest.mark.parametrize("named", [{"torch_dtype": "float16"}, {"torch_dtype": None, "dtype": "float32"}, {}])
def test_synth_bf16_overrides_dtype_and_quantization(tmp_path: Path, named: dict[str, Any]) -> None:
    """The names of custom code are dropped as well."""
    own = {"quantization_config": {"quant_method": "fp8"}, "auto_map": {"AutoConfig": "configuration.Config"}}
    config = config_file(tmp_path, **own, **named)
    assert synth(config, tmp_path / "out", quant="bf16").replaced == "fp8"
    assert {str(values.dtype) for values in tensors_of(tmp_path / "out").values()} == {"torch.bfloat16"}
    written = config_of(tmp_path / "out")
    assert "auto_map" not in written
    assert written["torch_dtype"] == "bfloat16"
    assert not written.keys() & {"dtype", "quantization_config"}


@pytest.mark.parametrize("calibration", [None, Calibration("random", samples=4, seqlen=16, device="cpu")])
def test_convert_takes_synth_bf16(tmp_path: Path, calibration: Calibration | None) -> None:
    synth(config_file(tmp_path), tmp_path / "float", quant="bf16", shard_bytes=40_000)
    report = convert(tmp_path / "float", tmp_path / "out", calibration=calibration, check=True)
    assert report.method == ("sparsegpt" if calibration else "magnitude")
    inspected = inspect(tmp_path / "out")
    assert (inspected.pattern, inspected.violations) == ("6:8", 0)
    assert len(inspected.layers) == len(SMALL["qwen2"].linears())
    if calibration:
        assert all(0 < row["error_quantized"] < 0.5 for row in report.layers)


# Refusals


@pytest.mark.parametrize(
    ("changed", "fact"),
    [
        ({"architectures": ["GemmaForCausalLM"]}, "'GemmaForCausalLM'"),
        ({"architectures": None}, "None"),
        ({"hidden_size": None}, "hidden_size is None"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"vocab_size": "90"}, "vocab_size is '90'"),
        ({"torch_dtype": "int4"}, "torch_dtype is 'int4'"),
        ({"model_type": None}, "model_type"),
        ({"initializer_range": "wide"}, "initializer_range is 'wide'"),
    ],
)
def test_synth_refuses_unsupported_configs(tmp_path: Path, changed: dict[str, Any], fact: str) -> None:
    config = config_file(tmp_path, **changed)
    with pytest.raises(CheckpointError, match=fact):
        synth(config, tmp_path / "out", pattern=SIX)
    assert list(tmp_path.iterdir()) == [config]


@pytest.mark.parametrize(
    ("options", "fact"),
    [
        (["BitNet-2B", "--quant", "fp8"], "INT8 activations"),
        (["Qwen9-7B"], "'Qwen9-7B'"),
        (["--quant", "int4"], "int8, fp8, bf16"),
        (["--sparsity", "5:8"], "5:8"),
        (["--layout", "slided"], "--layout slided"),
        (["--layout", "packed"], "--layout packed needs a pattern"),
        (["--layers", "3"], "--layers 3 must be from 1 to 2"),
        (["--layers", "0"], "--layers 0"),
        (["--shard-size", "4"], "--shard-size '4'"),
        (["--shard-size", "0MB"], "--shard-size is 0 bytes"),
        (["--quant", "bf16", "--sparsity", "6:8"], "slidesparse convert"),
        (["--quant", "bf16", "--sparsity", "2_inf"], "slidesparse convert"),
        (["--quant", "bf16", "--layout", "slided"], "slidesparse convert"),
    ],
)
def test_synth_command_refuses_invalid_options(tmp_path: Path, options: list[str], fact: str) -> None:
    config = config_file(tmp_path)
    arguments = options if not options[0].startswith("-") else [str(config), *options]
    result = Done("synth", arguments[0], tmp_path / "out", *arguments[1:])
    assert result.code == 2
    assert fact in result.err
    assert list(tmp_path.iterdir()) == [config]


def test_synth_removes_output_if_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Insufficient space is detected beforehand, or while writing."""
    config, usage, write, calls = config_file(tmp_path), shutil.disk_usage(tmp_path), os.pwrite, []
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
        with pytest.raises(EnvironmentFault, match="no space left"):
            synth(config, tmp_path / "out")

    def full(*args: Any) -> int:
        calls.append(args)
        if len(calls) > 20:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(*args)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(EnvironmentFault, match="nothing is left behind"):
        synth(config, tmp_path / "out")
    assert list(tmp_path.iterdir()) == [config]


def test_synth_command_prints_result_and_next_command(tmp_path: Path) -> None:
    out, config = tmp_path / "out", config_file(tmp_path)
    options = ("--sparsity", "2_8", "--quant", "fp8", "--layers", 1, "--layout", "slided")
    result = Done("synth", config.parent, out, *options)
    assert "Qwen2ForCausalLM, 1 layers in fp8 W8A8, pruned to 6:8" in result.out, result.err
    assert result.out.splitlines()[-1].endswith(f"vllm serve {out} --tokenizer {out}/tokenizer")
    result = Done("synth", config, tmp_path / "float", "--quant", "bf16")
    assert f"slidesparse convert {tmp_path / 'float'} PRUNED --sparsity 6:8" in result.out


# Public models, transformers and vLLM

# Parameter counts of the model cards; like safetensors, they count tied embeddings once
PARAMETERS = {
    "Llama3.2-1B": 1_235_814_400,
    "Llama3.2-3B": 3_212_749_824,
    "Qwen2.5-7B": 7_615_616_512,
    "Qwen2.5-14B": 14_770_033_664,
    "BitNet-2B": 2_412_820_480,
}


def test_public_configs_have_sizes_of_the_published_models() -> None:
    for name, config in PUBLIC.items():
        sizes = {spec.name: spec.shape for spec in tensors(config)}
        assert sum(math.prod(shape) for shape in sizes.values()) == PARAMETERS[name]
        fused = {
            "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            "o": ("self_attn.o_proj",),
            "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
            "down": ("mlp.down_proj",),
        }
        for layer in MODELS[name]:
            parts = [sizes[f"model.layers.0.{part}.weight"] for part in fused[layer.name]]
            assert (sum(n for n, _ in parts), {k for _, k in parts}) == (layer.n, {layer.k})
    assert read_config("Qwen2.5-7B") == PUBLIC["Qwen2.5-7B"]


def test_synth_tokenizer_round_trip_keeps_prompt_length(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    synth(config_file(tmp_path), tmp_path / "out", layers=1)
    folder = tmp_path / "out" / "tokenizer"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    size = config_of(tmp_path / "out")["vocab_size"]
    assert transformers.AutoConfig.from_pretrained(folder)  # vLLM loads it too
    tokens = [1, 0, 7, 7, size - 1]
    assert len(tokenizer) == size
    assert tokenizer.decode(tokens) == f"t1 t0 t7 t7 t{size - 1}"
    assert tokenizer.encode(tokenizer.decode(tokens), add_special_tokens=False) == tokens


PLAIN = {**QWEN.config(), "attention_bias": False, "sliding_window": None}
FAMILIES = {
    "qwen2": QWEN.config(),
    "llama": LLAMA.config(),
    "qwen3": {**PLAIN, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
    "mistral": {**PLAIN, "architectures": ["MistralForCausalLM"], "model_type": "mistral"},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_synth_tensors_equal_those_of_transformers(tmp_path: Path, family: str) -> None:
    transformers = pytest.importorskip("transformers")
    config_file(tmp_path, **FAMILIES[family])
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.from_pretrained(tmp_path)
        )
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    assert {spec.name: spec.shape for spec in tensors(read_config(tmp_path))} == expected


@pytest.mark.vllm
@pytest.mark.parametrize("layout", ["dense", "slided"])
def test_vllm_serves_synth_checkpoints(engines: Engines, tmp_path: Path, layout: str) -> None:
    """Stock vLLM serves the dense layout, the plugin the slided one.

    Their tokens are not compared: on CPUs without VNNI stock vLLM's INT8 kernel saturates with codes this
    large.
    """
    synth(config_file(tmp_path, QWEN), tmp_path / layout, pattern=SIX, layout=layout)
    env = {"DISABLE_SLIDESPARSE": "1"} if layout == "dense" else {}
    answer = engines.ask(Request(str(tmp_path / layout), env=env))
    assert not answer.error, f"{answer.error}\n{answer.log[-4000:]}"
    assert len({tuple(tokens) for tokens in answer.tokens}) == len(answer.tokens)
    assert ("8 layers sparse" in answer.summary) == (layout == "slided")


@pytest.mark.vllm
@pytest.mark.parametrize("name", PUBLIC)
def test_vllm_accepts_the_public_configs(engines: Engines, tmp_path: Path, name: str) -> None:
    plan = synth_module._plan(read_config(name), "int8", SIX, "dense", 0, 4 * 10**9)
    for file, content in plan.small_files():
        (tmp_path / file).write_bytes(content)
    answer = engines.ask(Request(str(tmp_path), task="config_hash", options={"dtype": "bfloat16"}))
    assert not answer.error, f"{answer.error}\n{answer.log[-4000:]}"
    assert answer.config_hash
