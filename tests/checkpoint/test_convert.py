"""Conversions equal pruning, quantizing and sliding whole tensors; kills and interrupts leave no output."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkpoints import (
    DOWN,
    INDEX,
    LLAMA,
    MODEL,
    Q,
    bert,
    config_of,
    convert,
    edit_json,
    llama,
    refused,
    snapshot,
    tensors_of,
    w8a8,
    write,
)
from commands import Done
from models import float_tensors, quantization_config
from safetensors import safe_open
from strategies import NAMED, assert_same_bits

from slidesparse import methods
from slidesparse.checkpoint.inspection import inspect
from slidesparse.checkpoint.metadata import Metadata
from slidesparse.checkpoint.names import family_of
from slidesparse.checkpoint.storage import CheckpointError
from slidesparse.convert.stream import is_finite
from slidesparse.pattern import SlidePattern
from slidesparse.prune import prune
from slidesparse.quantize import NAMES, quantize_rows
from slidesparse.slide import slide, violations

SIX_EIGHT = SlidePattern.parse("6:8")
LINEARS = sorted(LLAMA.linears())


# What is written


@pytest.mark.parametrize("ratio", NAMED)
@pytest.mark.parametrize("layout", ["dense", "slided"])
def test_convert_float_source_equals_whole_tensor_computation(
    tmp_path: Path, ratio: str, layout: str
) -> None:
    dtype = (torch.bfloat16, torch.float16, torch.float32)[NAMED.index(ratio) % 3]
    source, pattern = llama(tmp_path / "source", dtype=dtype), SlidePattern.parse(ratio)
    quant = "fp8" if (NAMED.index(ratio) % 2 == 0) == (layout == "slided") else "int8"
    report = convert(source, tmp_path / "out", pattern, quant=quant, layout=layout)
    before, after = tensors_of(source), tensors_of(tmp_path / "out")
    assert sorted(report.pruned) == LINEARS
    assert set(after) == set(before) | {f"{name}.weight_scale" for name in LINEARS}
    for name in LINEARS:
        weight, scale = quantize_rows(prune(before.pop(f"{name}.weight"), pattern), NAMES[quant])
        assert violations(weight, pattern) is None
        expected = slide(weight, pattern) if layout == "slided" else weight
        assert_same_bits(after[f"{name}.weight"], expected)
        assert_same_bits(after[f"{name}.weight_scale"], scale)
    for name, tensor in before.items():
        assert_same_bits(after[name], tensor)
    metadata = Metadata.of_config(config_of(tmp_path / "out")["quantization_config"])
    assert metadata is not None
    assert (metadata.pattern, metadata.layout) == (pattern, layout)
    assert {name: entry.in_features for name, entry in metadata.layers.items()} == {
        name: shape[1] for name, shape in LLAMA.linears().items()
    }


@pytest.mark.parametrize("quant", ["int8", "fp8"])
def test_convert_writes_the_quantization_config_of_serving_tests(tmp_path: Path, quant: str) -> None:
    source, out = llama(tmp_path / "source"), tmp_path / "out"
    convert(source, out, quant=quant, ignore=["0.*down_proj"])
    config = config_of(out)
    block = config.pop("quantization_config")
    assert config == config_of(source)
    assert Metadata.of_config(block)
    del block["slidesparse"]
    assert block == {**quantization_config(quant), "ignore": ["lm_head", DOWN]}


@pytest.mark.parametrize("quant", ["int8", "fp8"])
@pytest.mark.parametrize("strategy", ["channel", "tensor"])
@pytest.mark.parametrize("layout", ["dense", "slided"])
def test_w8a8_source_keeps_scales_and_ignore(tmp_path: Path, quant: str, strategy: str, layout: str) -> None:
    """Layers that are skipped or ignored keep their codes, too."""
    source = w8a8(tmp_path / "source", quant, strategy)
    report = convert(
        source, tmp_path / "out", layout=layout, skip=["o_proj"], ignore=["self_attn.[qkv]_proj"]
    )
    before, after = tensors_of(source), tensors_of(tmp_path / "out")
    assert report.quant == quant
    assert {name.split(".")[-1] for name in report.skipped} == {"o_proj"}
    assert {report.kept[name] for name in (DOWN, "lm_head")} == {"not quantized in the source"}
    assert report.kept[Q] == "--ignore"
    assert {name.split(".")[-2] for name in report.pruned} == {"mlp"}
    assert set(after) == set(before)
    for name, tensor in before.items():
        if name.removesuffix(".weight") in report.pruned:
            tensor = prune(tensor, SIX_EIGHT)
            tensor = slide(tensor, SIX_EIGHT) if layout == "slided" else tensor
        assert_same_bits(after[name], tensor)
    old, new = (config_of(folder)["quantization_config"] for folder in (source, tmp_path / "out"))
    assert set(new["slidesparse"]["layers"]) == set(report.pruned)
    assert new.pop("slidesparse")["layout"] == layout
    assert new.pop("quant_method") == {"dense": "compressed-tensors", "slided": "slidesparse"}[layout]
    assert new == {name: value for name, value in old.items() if name != "quant_method"}


@pytest.mark.parametrize("method", ["random", "magnitude"])
def test_output_does_not_depend_on_number_of_processors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    source, runs = llama(tmp_path / "source"), []
    for count, seed in ((1, 3), (7, 3), (2, 4)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, count=count: set(range(count)))
        convert(source, tmp_path / f"{count}", method=method, seed=seed)
        runs.append(snapshot(tmp_path / f"{count}"))
    assert runs[0] == runs[1]
    assert (runs[0] == runs[2]) == (method == "magnitude")  # magnitude does not use the seed


def test_random_pruning_does_not_depend_on_shards(tmp_path: Path) -> None:
    for shards in (1, 3):
        source = llama(tmp_path / f"source{shards}", shards=shards)
        convert(source, tmp_path / f"out{shards}", method="random", seed=3)
    single, sharded = tensors_of(tmp_path / "out1"), tensors_of(tmp_path / "out3")
    assert single.keys() == sharded.keys()
    for name, tensor in single.items():
        assert_same_bits(sharded[name], tensor)
    masks = {tuple((single[f"{name}.weight"][:32, :64] != 0).flatten().tolist()) for name in LINEARS}
    assert len(masks) == len(LINEARS)  # each tensor has its own random numbers
    assert all(violations(single[f"{name}.weight"], SIX_EIGHT) is None for name in LINEARS)


TOY = """
from slidesparse.methods.method import Method
from slidesparse.prune import prune_by_importance

class Leftmost(Method):
    calibration = "optional"

    def prune(self, w, pattern, seed):
        columns = w.new_ones(w.shape).cumsum(-1)
        return prune_by_importance(w, columns, pattern)
"""


def test_registered_custom_method_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A toy method prunes the two leftmost weights of each block, with and without calibration data."""
    (tmp_path / "leftmost.py").write_text(TOY)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(methods.METHODS, "leftmost", "leftmost:Leftmost")
    source = llama(tmp_path / "source")
    data = ("--calib", "random", "--samples", 2, "--seqlen", 8, "--device", "cpu")
    for name, more in (("plain", ()), ("calibrated", data)):
        out = tmp_path / name
        result = Done("convert", source, out, "-s", "6:8", "--method", "leftmost", *more)
        assert result.code == 0, result.err
        report = inspect(out)
        assert report.violations == 0
        for layer in report.layers:
            weight = tensors_of(out)[f"{layer.name}.weight"]
            zeros = (weight[:, : weight.shape[1] // 8 * 8] == 0).unflatten(1, (-1, 8)).float().mean((0, 1))
            assert (zeros[:2] == 1).all() == (layer.pattern is not None)
    assert "leftmost, calibrated with random tokens" in result.out
    assert (
        Done("convert", source, tmp_path / "x", "-s", "6:8", "--method", "leftmost", "--sweeps", 1).code == 2
    )


def test_convert_keeps_shard_names_and_writes_an_index(tmp_path: Path) -> None:
    source = llama(tmp_path / "source", shards=3)
    convert(source, tmp_path / "out")
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == sorted(p.name for p in source.iterdir())
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    weight_map, total = {}, 0
    for path in (tmp_path / "out").glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            assert file.metadata() == {"format": "pt"}
            for name in file.keys():  # noqa: SIM118
                weight_map[name], total = path.name, total + file.get_tensor(name).nbytes
    assert index["weight_map"] == weight_map
    assert index["metadata"] == {"total_size": total, "note": "kept"}


# Architectures and files beside the weights


def test_convert_bert_copies_other_files(tmp_path: Path) -> None:
    source = bert(tmp_path / "source")
    (source / "pytorch_model.bin").write_bytes(b"weights in another format")
    (source / ".gitattributes").write_text("hidden")
    (source / "onnx").mkdir()
    (source / "onnx" / "model.onnx").write_bytes(b"too")
    (source / "2_Dense").mkdir()
    for name in ("config.json", MODEL):
        (source / "2_Dense" / name).write_bytes(b"a module of sentence-transformers, with its weights")
    for name in (
        "modeling_bert.py",
        "LICENSE.py",
        "tokenizer.pkl",
        "vocab.txt",
        "LICENSE",
        "chat_template.jinja",
    ):
        (source / name).write_text("beside")
    (tmp_path / "secret.json").write_text("of somebody else")
    (source / "added_tokens.json").symlink_to(tmp_path / "secret.json")
    (source / "special_tokens_map.json").symlink_to("vocab.txt")
    modules = [{"path": path} for path in ("", "1_Pooling", "2_Dense")]
    (source / "modules.json").write_text(json.dumps(modules))
    (source / "checkpoint-500").mkdir()
    for name in ("config.json", MODEL, "optimizer.pt"):
        (source / "checkpoint-500" / name).write_bytes(b"of the training")
    report = convert(source, tmp_path / "out", "4:6", ignore=["1.intermediate", "0.attention.self"])
    assert len(report.pruned) == 8
    kept = {name: reason for name, reason in report.kept.items() if "attention" not in name}
    assert kept == {
        "encoder.layer.1.intermediate.dense": "--ignore",
        "pooler.dense": "not a linear layer of a transformer block",
    }
    names = {"1_Pooling/config.json", "2_Dense/config.json", f"2_Dense/{MODEL}", "tokenizer.json"}
    names |= {"modules.json", "checkpoint-500/config.json", "vocab.txt", "LICENSE", "chat_template.jinja"}
    names |= {"special_tokens_map.json"}
    assert set(snapshot(tmp_path / "out")) == names | {"config.json", MODEL}
    assert set(report.left_out) == {
        "LICENSE.py",
        "added_tokens.json",
        "checkpoint-500/model.safetensors",
        "checkpoint-500/optimizer.pt",
        "modeling_bert.py",
        "onnx/model.onnx",
        "pytorch_model.bin",
        "tokenizer.pkl",
    }
    ignore = config_of(tmp_path / "out")["quantization_config"]["ignore"]
    for name in ("encoder.layer.1.intermediate.dense", "pooler.dense"):
        assert {name, f"model.{name}"} <= set(ignore)  # vLLM puts "model." before the names of a bare encoder
    for last in ("query", "key", "value"):  # and calls the attention by another name
        assert f"model.encoder.layer.0.attention.self.{last}" in ignore
        assert f"model.encoder.layer.0.attention.output.{last}" in ignore


def test_linear_layers_of_embedding_modules_are_ignored(tmp_path: Path) -> None:
    """VLLM would quantize them, in Llama 4 and Gemma 4; tables are not linear layers and need no entry."""
    linears = {"vision_model.patch_embedding.linear", "embed_vision.embedding_projection", "embed_out"}
    tables = {"visual.pos_embed", "vision.embeddings.position_embedding", "model.embed_tokens_per_layer"}
    weights = {name.replace(".", "__") + "__weight": torch.ones(4, 8) for name in linears | tables}
    report = convert(llama(tmp_path / "source", **weights), tmp_path / "out")
    assert set(report.kept) == {"lm_head", *linears}
    assert linears < set(config_of(tmp_path / "out")["quantization_config"]["ignore"])


def test_convert_drops_auto_map_of_known_architectures(tmp_path: Path) -> None:
    """With --trust-remote-code, transformers would search for the code named in config.json, which is not copied."""
    code = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnModel"}
    source = llama(tmp_path / "source")
    edit_json(source / "config.json", auto_map=code)
    (source / "configuration_own.py").write_text("raise SystemExit")
    assert convert(source, tmp_path / "out").left_out == ("configuration_own.py",)
    assert "auto_map" not in config_of(tmp_path / "out")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = transformers.AutoConfig.from_pretrained(tmp_path / "out", trust_remote_code=True)
    assert type(config) is transformers.LlamaConfig

    edit_json(source / "config.json", architectures=["OwnForCausalLM"])
    convert(source, tmp_path / "own", linear=r"_proj\Z")
    assert config_of(tmp_path / "own")["auto_map"] == code


@pytest.mark.parametrize(
    ("architecture", "first", "linears"),
    [
        (
            "Qwen2ForCausalLM",
            "model.layers.0.",
            "self_attn.q_proj self_attn.o_proj mlp.up_proj mlp.down_proj",
        ),
        ("Phi3ForCausalLM", "model.layers.0.", "self_attn.qkv_proj self_attn.o_proj mlp.gate_up_proj"),
        ("Gemma3ForCausalLM", "model.layers.0.", "self_attn.v_proj mlp.down_proj"),
        ("Olmo2ForCausalLM", "model.layers.0.", "self_attn.k_proj mlp.gate_proj"),
        ("SmolLM3ForCausalLM", "model.layers.0.", "self_attn.k_proj mlp.gate_proj"),
        ("LlamaModel", "layers.0.", "self_attn.k_proj mlp.gate_proj"),
        (
            "Gemma3ForConditionalGeneration",
            "language_model.model.layers.0.",
            "self_attn.k_proj mlp.gate_proj",
        ),
        ("Qwen3VLForConditionalGeneration", "model.language_model.layers.0.", "self_attn.k_proj mlp.up_proj"),
        ("Qwen2_5_VLForConditionalGeneration", "model.layers.0.", "self_attn.k_proj mlp.gate_proj"),
        ("Idefics3ForConditionalGeneration", "model.text_model.layers.0.", "self_attn.o_proj mlp.gate_proj"),
        ("BertForSequenceClassification", "bert.encoder.layer.0.", "attention.self.query output.dense"),
        ("XLMRobertaForSequenceClassification", "roberta.encoder.layer.0.", "attention.output.dense"),
    ],
)
def test_linear_layers_of_each_architecture(architecture: str, first: str, linears: str) -> None:
    expected = [first + name for name in linears.split()]
    others = (
        "lm_head",
        "visual.blocks.0.attn.proj",
        "vision_tower.vision_model.encoder.layers.0.self_attn.k_proj",
        "model.vision_tower.layers.0.self_attn.k_proj",
        "embed_tokens",
        f"{first}mlp.gate",
        f"{first}norm",
        "pooler.dense",
        "classifier.dense",
    )
    names = [f"{name}.weight" for name in (*others, *expected)]
    assert family_of({"architectures": [architecture]}).layers(names) == expected


def test_multimodal_model_is_converted_like_its_language_model(tmp_path: Path) -> None:
    text, vision = llama(tmp_path / "text"), "vision_tower.encoder.layers.0.self_attn.q_proj"
    tensors = {f"language_model.{name}": tensor for name, tensor in tensors_of(text).items()}
    wrapper = {"architectures": ["LlavaForConditionalGeneration"], "text_config": config_of(text)}
    source = write(tmp_path / "source", wrapper, tensors | {f"{vision}.weight": torch.ones(8, 8)})
    report = convert(source, tmp_path / "out", layout="packed")
    assert report.kept == dict.fromkeys(
        ("language_model.lm_head", vision), "not a linear layer of a transformer block"
    )
    convert(text, tmp_path / "expected", layout="packed")
    out = tensors_of(tmp_path / "out")
    assert bool(out.pop(f"{vision}.weight").eq(1).all())
    expected = tensors_of(tmp_path / "expected")
    assert out.keys() == {f"language_model.{name}" for name in expected}
    assert all(torch.equal(out[f"language_model.{name}"], tensor) for name, tensor in expected.items())
    edit_json(source / "config.json", text_config={**config_of(text), "num_hidden_layers": 3})
    refused(source, "num_hidden_layers is 3, but", "has linear layers of 2 blocks", out="other")


def test_linear_option_selects_layers_of_unknown_architecture(tmp_path: Path) -> None:
    tensors = {"blocks.0.fc1.weight": torch.randn(16, 24), "head.weight": torch.randn(16, 24)}
    source = write(tmp_path / "source", {"architectures": ["NewModel"]}, tensors)
    report = convert(source, tmp_path / "out", linear=r"\.fc\d$")
    assert report.pruned == ("blocks.0.fc1",)
    assert report.kept == {"head": "not a linear layer of a transformer block"}
    assert config_of(tmp_path / "out")["quantization_config"]["ignore"] == ["lm_head", "head"]
    second_report = convert(tmp_path / "out", tmp_path / "slided", layout="slided")
    assert second_report.pruned == report.pruned
    assert second_report.kept == {"head": "not quantized in the source"}


def test_linear_option_prunes_only_matrices(tmp_path: Path) -> None:
    source = llama(tmp_path / "source")
    report = convert(source, tmp_path / "out", linear=r"layers\.\d")
    assert set(report.pruned) == set(LINEARS)


def test_convert_replaces_compression_config(tmp_path: Path) -> None:
    source = w8a8(tmp_path / "source")
    config = config_of(source)
    config["compression_config"] = config.pop("quantization_config")
    (source / "config.json").write_text(json.dumps(config))
    convert(source, tmp_path / "out")
    assert "compression_config" not in config_of(tmp_path / "out")
    assert config_of(tmp_path / "out")["quantization_config"]["slidesparse"]["pattern"] == "6:8"


def test_quantization_in_the_config_of_the_language_model_is_read_and_moved(tmp_path: Path) -> None:
    """As in some multimodal models; of the two places vLLM prefers the outer one, which is written."""
    source = w8a8(tmp_path / "source")
    config = config_of(source)
    config["text_config"] = {"quantization_config": config.pop("quantization_config"), "hidden_size": 64}
    (source / "config.json").write_text(json.dumps(config))
    convert(source, tmp_path / "out")
    assert config_of(tmp_path / "out")["text_config"] == {"hidden_size": 64}
    assert config_of(tmp_path / "out")["quantization_config"]["slidesparse"]["pattern"] == "6:8"


def test_convert_fills_empty_folders_and_makes_parents(tmp_path: Path) -> None:
    source = llama(tmp_path / "source")
    (tmp_path / "empty").mkdir()
    convert(source, tmp_path / "empty")
    convert(source, tmp_path / "new" / "below" / "out")
    (tmp_path / "target").mkdir()
    for name in ("target", "dangling"):  # a link to a folder on another disk, say
        (tmp_path / f"to {name}").symlink_to(name)
        convert(source, tmp_path / f"to {name}")
        assert snapshot(tmp_path / name) == snapshot(tmp_path / "empty")
    assert snapshot(tmp_path / "empty") == snapshot(tmp_path / "new" / "below" / "out")


def test_progress_counts_both_passes_in_bytes(tmp_path: Path) -> None:
    calls: list[tuple[str, int, int]] = []
    source = llama(tmp_path / "source")
    report = convert(source, tmp_path / "out", progress=lambda *call: calls.append(call))
    total = sum(tensor.nbytes for tensor in float_tensors(LLAMA).values())
    assert report.bytes_in == total
    for phase in ("checking", "writing"):
        counts = [call[1] for call in calls if call[0] == phase]
        assert counts == sorted(counts)
        assert counts[-1] == total
    assert {call[2] for call in calls} == {total}


def test_check_option_reports_layers_without_calibration(tmp_path: Path) -> None:
    source = llama(tmp_path / "source")
    report = convert(source, tmp_path / "out", check=True)
    (row,) = (row for row in report.layers if row["name"] == Q)
    codes, scale = quantize_rows(prune(tensors_of(source)[f"{Q}.weight"], SIX_EIGHT), torch.int8)
    assert row["zeros"] == int((codes == 0).sum())
    assert (row["scale_min"], row["scale_max"]) == (float(scale.min()), float(scale.max()))
    assert (row["method"], row["error_pruned"], report.sensitivity) == ("magnitude", None, [])


def test_zero_columns_of_the_source_are_not_reported_dead(tmp_path: Path) -> None:
    weight = tensors_of(llama(tmp_path / "first"))[f"{Q}.weight"]
    weight[:, 5] = 0
    source = llama(tmp_path / "source", **{f"{Q}.weight".replace(".", "__"): weight})
    report = convert(source, tmp_path / "out", check=True)
    assert [row["dead_columns"] for row in report.layers] == [0] * len(LINEARS)
    weight = torch.full((64, 64), 1.0).bfloat16()
    weight[:, 8] = 1e-3  # the smallest of its block in each row
    source = llama(tmp_path / "other", **{f"{Q}.weight".replace(".", "__"): weight})
    report = convert(source, tmp_path / "again", check=True)
    assert {row["dead_columns"] for row in report.layers if row["name"] == Q} == {16}  # ties: the leftmost go


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("value", [torch.nan, -torch.nan, torch.inf, -torch.inf])
def test_is_finite_finds_a_single_nonfinite_value(dtype: torch.dtype, value: float) -> None:
    for place in (0, 31, 32, 1000):
        x = torch.randn(1001).to(dtype)
        assert is_finite(x)
        x[place] = value
        assert not is_finite(x)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_is_finite_equals_torch_for_every_fp8_code(dtype: torch.dtype) -> None:
    for code in range(-128, 128):
        x = torch.tensor([1, code, 2], dtype=torch.int8).view(dtype)
        assert is_finite(x) == bool(torch.isfinite(x.float()).all())
    assert is_finite(torch.ones(0, 4).to(dtype))
    assert is_finite(torch.tensor([127, -1], dtype=torch.int8))


# Kills and interrupts

KILLED = """
import os, signal, sys
from slidesparse.checkpoint import storage
from slidesparse.convert.options import ConvertOptions
from slidesparse.convert.stream import convert
from slidesparse.pattern import SlidePattern
storage.CHUNK_ELEMENTS = 1000
written, write = 0, storage.Writer.write
def write_then_die(self, *arguments):
    global written
    write(self, *arguments)
    written += 1
    if written == 40:
        os.kill(os.getpid(), signal.SIGKILL)
storage.Writer.write = write_then_die
convert(sys.argv[1], sys.argv[2], ConvertOptions(SlidePattern.parse("6:8")))
"""


def test_killed_conversion_leaves_no_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = llama(tmp_path / "source")
    out = tmp_path / "out"
    command = [sys.executable, "-c", KILLED, str(source), str(out)]
    process = subprocess.run(command, cwd=Path(__file__).parents[2], timeout=120, check=False)
    assert process.returncode == -signal.SIGKILL
    assert not out.exists()
    (partial,) = (path for path in tmp_path.iterdir() if path != source)
    assert re.fullmatch(r"\.out\.partial-\w+", partial.name)
    assert (partial / MODEL).exists()
    assert not (partial / "config.json").exists()
    usage = shutil.disk_usage(tmp_path)  # the leftover folder does not count as used space
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=0) if partial.exists() else usage)
    convert(source, out)  # a second run succeeds and removes the leftover folder
    assert {path.name for path in tmp_path.iterdir()} == {"source", "out"}
    convert(source, tmp_path / "other")
    assert snapshot(out) == snapshot(tmp_path / "other")


def test_concurrent_conversion_is_refused(tmp_path: Path) -> None:
    source, out = llama(tmp_path / "source"), tmp_path / "out"
    refused: list[str] = []

    def interfere(phase: str, done: int, total: int) -> None:
        if phase == "writing" and not refused:
            with pytest.raises(CheckpointError, match="another conversion is writing") as error:
                convert(source, out)
            refused.append(str(error.value))

    convert(source, out, progress=interfere)
    assert len(refused) == 1
    assert (out / "config.json").exists()


def test_errors_remove_partial_output(tmp_path: Path) -> None:
    """Interrupts are tested in tests/commands/test_cli.py."""

    def stop(phase: str, done: int, total: int) -> None:
        if phase == "writing":
            raise ZeroDivisionError

    source = llama(tmp_path / "source")
    with pytest.raises(ZeroDivisionError):
        convert(source, tmp_path / "out", progress=stop)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_config_is_written_last_and_files_are_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    fsync = os.fsync
    monkeypatch.setattr(
        os, "fsync", lambda fd: (synced.append(os.readlink(f"/proc/self/fd/{fd}")), fsync(fd))
    )
    rename = os.rename

    def renamed(partial: Path, out: Path) -> None:
        newest = max(partial.rglob("*"), key=lambda path: path.stat().st_mtime_ns)
        assert newest.name == "config.json"
        synced.append("rename")
        rename(partial, out)

    monkeypatch.setattr(os, "rename", renamed)
    convert(llama(tmp_path / "source"), tmp_path / "out")
    names = [Path(name).name for name in synced]
    assert {MODEL, "config.json", "tokenizer.json"} <= set(names[: names.index("rename")])
    assert synced[-1] == str(tmp_path)


def test_convert_restores_number_of_torch_threads(tmp_path: Path) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)  # threads of the pool have 1, which may be the number before
        convert(llama(tmp_path / "source"), tmp_path / "out")
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
