"""Conversions: what they write is what pruning, quantizing and sliding the whole tensors gives."""

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
    llama,
    snapshot,
    tensors_of,
    w8a8,
    write,
)
from models import float_tensors, quantization_config
from safetensors import safe_open
from strategies import NAMED, assert_same_bits

from slidesparse import checkpoint as checkpoint_module
from slidesparse.checkpoint import CheckpointError
from slidesparse.convert import convert
from slidesparse.metadata import Metadata
from slidesparse.pattern import SlidePattern
from slidesparse.prune import prune
from slidesparse.quantize import NAMES, quantize_rows
from slidesparse.slide import slide, violations

SIX_EIGHT = SlidePattern.parse("6:8")
LINEARS = sorted(LLAMA.linears())


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny tensors, but several chunks each, the last one short."""
    monkeypatch.setattr(checkpoint_module, "CHUNK_ELEMENTS", 1000)


@pytest.mark.parametrize("ratio", NAMED)
@pytest.mark.parametrize("quant", ["int8", "fp8"])
@pytest.mark.parametrize("layout", ["dense", "slided"])
def test_float_source(tmp_path: Path, ratio: str, quant: str, layout: str) -> None:
    source, pattern = llama(tmp_path / "source"), SlidePattern.parse(ratio)
    report = convert(source, tmp_path / "out", pattern=pattern, quant=quant, layout=layout)
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
def test_the_config_is_the_one_that_vllm_serves_in_other_tests(tmp_path: Path, quant: str) -> None:
    source, out = llama(tmp_path / "source"), tmp_path / "out"
    convert(source, out, pattern=SIX_EIGHT, quant=quant, ignore=["0.*down_proj"])
    config = config_of(out)
    block = config.pop("quantization_config")
    assert config == config_of(source)
    assert Metadata.of_config(block)
    del block["slidesparse"]
    assert block == {**quantization_config(quant), "ignore": ["lm_head", DOWN]}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_float_dtypes(tmp_path: Path, dtype: torch.dtype) -> None:
    source = llama(tmp_path / "source", dtype=dtype)
    convert(source, tmp_path / "out", pattern=SIX_EIGHT)
    weight, scale = quantize_rows(prune(tensors_of(source)[f"{Q}.weight"], SIX_EIGHT), torch.int8)
    after = tensors_of(tmp_path / "out")
    assert_same_bits(after[f"{Q}.weight"], weight)
    assert_same_bits(after[f"{Q}.weight_scale"], scale)
    assert after["model.norm.weight"].dtype == dtype


@pytest.mark.parametrize("quant", ["int8", "fp8"])
@pytest.mark.parametrize("strategy", ["channel", "tensor"])
@pytest.mark.parametrize("layout", ["dense", "slided"])
def test_w8a8_source_keeps_scales_and_ignore(tmp_path: Path, quant: str, strategy: str, layout: str) -> None:
    source = w8a8(tmp_path / "source", quant, strategy)
    report = convert(source, tmp_path / "out", pattern=SIX_EIGHT, layout=layout)
    before, after = tensors_of(source), tensors_of(tmp_path / "out")
    assert report.quant == quant
    assert report.kept == dict.fromkeys((DOWN, "lm_head"), "the source's ignore list")
    assert set(after) == set(before)
    for name, tensor in before.items():
        if name.removesuffix(".weight") in LINEARS and not name.startswith(DOWN):
            tensor = prune(tensor, SIX_EIGHT)
            tensor = slide(tensor, SIX_EIGHT) if layout == "slided" else tensor
        assert_same_bits(after[name], tensor)
    old, new = (config_of(folder)["quantization_config"] for folder in (source, tmp_path / "out"))
    assert new.pop("slidesparse")["layout"] == layout
    assert new.pop("quant_method") == {"dense": "compressed-tensors", "slided": "slidesparse"}[layout]
    assert new == {name: value for name, value in old.items() if name != "quant_method"}


def test_ignored_layers_of_a_w8a8_source_stay_quantized(tmp_path: Path) -> None:
    source = w8a8(tmp_path / "source")
    report = convert(source, tmp_path / "out", pattern=SIX_EIGHT, ignore=["o_proj", "self_attn.[qkv]_proj"])
    assert {name.split(".")[-2] for name in report.pruned} == {"mlp"}
    assert_same_bits(tensors_of(tmp_path / "out")[f"{Q}.weight"], tensors_of(source)[f"{Q}.weight"])
    block = config_of(tmp_path / "out")["quantization_config"]
    assert block["ignore"] == config_of(source)["quantization_config"]["ignore"]
    assert Q not in block["slidesparse"]["layers"]


def test_layouts_turn_into_each_other_byte_for_byte(tmp_path: Path) -> None:
    source = llama(tmp_path / "source", shards=2)
    for layout in ("dense", "slided"):
        convert(source, tmp_path / layout, pattern=SIX_EIGHT, layout=layout)
    convert(tmp_path / "dense", tmp_path / "slided again", pattern=SIX_EIGHT, layout="slided")
    convert(tmp_path / "slided", tmp_path / "dense again", pattern=SIX_EIGHT)
    for layout in ("dense", "slided"):
        assert snapshot(tmp_path / f"{layout} again") == snapshot(tmp_path / layout)


@pytest.mark.parametrize("shards", [1, 3])
def test_same_input_same_bytes(tmp_path: Path, shards: int) -> None:
    source = llama(tmp_path / "source", shards=shards)
    for out in ("a", "b"):
        convert(source, tmp_path / out, pattern=SIX_EIGHT, method="random", seed=3)
    assert snapshot(tmp_path / "a") == snapshot(tmp_path / "b")
    convert(source, tmp_path / "c", pattern=SIX_EIGHT, method="random", seed=4)
    different = snapshot(tmp_path / "c")
    assert different.keys() == snapshot(tmp_path / "a").keys()
    assert different != snapshot(tmp_path / "a")


def test_same_bytes_with_any_number_of_processors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = llama(tmp_path / "source")
    for count in (1, 2, 7):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, count=count: set(range(count)))
        convert(source, tmp_path / f"{count}", pattern=SIX_EIGHT, method="random")
    assert snapshot(tmp_path / "1") == snapshot(tmp_path / "2") == snapshot(tmp_path / "7")


def test_random_is_independent_of_shards_and_obeys(tmp_path: Path) -> None:
    for shards in (1, 3):
        source = llama(tmp_path / f"source{shards}", shards=shards)
        convert(source, tmp_path / f"out{shards}", pattern=SIX_EIGHT, method="random", seed=3)
    one, three = tensors_of(tmp_path / "out1"), tensors_of(tmp_path / "out3")
    assert one.keys() == three.keys()
    for name, tensor in one.items():
        assert_same_bits(three[name], tensor)
    masks = {tuple((one[f"{name}.weight"][:32, :64] != 0).flatten().tolist()) for name in LINEARS}
    assert len(masks) == len(LINEARS)  # each tensor draws for itself
    assert all(violations(one[f"{name}.weight"], SIX_EIGHT) is None for name in LINEARS)


def test_shards_keep_their_names_and_get_a_right_index(tmp_path: Path) -> None:
    source = llama(tmp_path / "source", shards=3)
    convert(source, tmp_path / "out", pattern=SIX_EIGHT)
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == sorted(p.name for p in source.iterdir())
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    found, total = {}, 0
    for path in (tmp_path / "out").glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            assert file.metadata() == {"format": "pt"}
            for name in file.keys():  # noqa: SIM118
                found[name], total = path.name, total + file.get_tensor(name).nbytes
    assert index["weight_map"] == found
    assert index["metadata"] == {"total_size": total, "note": "kept"}


def test_bert_layers_and_other_files(tmp_path: Path) -> None:
    source = bert(tmp_path / "source")
    (source / "pytorch_model.bin").write_bytes(b"weights in another format")
    (source / ".gitattributes").write_text("hidden")
    (source / "onnx").mkdir()
    (source / "onnx" / "model.onnx").write_bytes(b"too")
    (source / "2_Dense").mkdir()
    for name in ("config.json", MODEL):
        (source / "2_Dense" / name).write_bytes(b"a module of sentence-transformers, with its weights")
    modules = [{"path": path} for path in ("", "1_Pooling", "2_Dense")]
    (source / "modules.json").write_text(json.dumps(modules))
    (source / "checkpoint-500").mkdir()
    for name in ("config.json", MODEL, "optimizer.pt"):
        (source / "checkpoint-500" / name).write_bytes(b"of the training")
    report = convert(source, tmp_path / "out", pattern=SlidePattern.parse("4:6"), ignore=["1.intermediate"])
    assert len(report.pruned) == 11
    assert report.kept == {
        "encoder.layer.1.intermediate.dense": "--ignore",
        "pooler.dense": "not a linear layer of a block",
    }
    kept = {"1_Pooling/config.json", "2_Dense/config.json", f"2_Dense/{MODEL}", "tokenizer.json"}
    kept |= {"modules.json", "checkpoint-500/config.json"}
    assert set(snapshot(tmp_path / "out")) == kept | {"config.json", MODEL}
    ignore = config_of(tmp_path / "out")["quantization_config"]["ignore"]
    assert ignore == [  # vLLM puts "model." before the names of a bare encoder
        "lm_head",
        "encoder.layer.1.intermediate.dense",
        "model.encoder.layer.1.intermediate.dense",
        "model.pooler.dense",
        "pooler.dense",
    ]


def test_ignored_attention_of_an_encoder_has_the_names_vllm_gives_it(tmp_path: Path) -> None:
    convert(bert(tmp_path / "source"), tmp_path / "out", pattern=SIX_EIGHT, ignore=["0.attention.self"])
    ignore = config_of(tmp_path / "out")["quantization_config"]["ignore"]
    for last in ("query", "key", "value"):
        assert f"model.encoder.layer.0.attention.self.{last}" in ignore
        assert f"model.encoder.layer.0.attention.output.{last}" in ignore


@pytest.mark.parametrize(
    ("prefix", "architecture"),
    [("bert.", "BertForSequenceClassification"), ("roberta.", "XLMRobertaForSequenceClassification")],
)
def test_prefixed_encoders(tmp_path: Path, prefix: str, architecture: str) -> None:
    report = convert(bert(tmp_path / "source", prefix, architecture), tmp_path / "out", pattern=SIX_EIGHT)
    assert len(report.pruned) == 12
    assert all(name.startswith(f"{prefix}encoder.layer.") for name in report.pruned)


def test_phi3_names(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    names = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
    tensors = {f"model.layers.0.{n}.weight": torch.randn(16, 24, generator=generator) for n in names}
    source = write(tmp_path / "source", {"architectures": ["Phi3ForCausalLM"]}, tensors)
    report = convert(source, tmp_path / "out", pattern=SIX_EIGHT, ignore=["qkv"])
    assert sorted(report.pruned) == sorted(f"model.layers.0.{name}" for name in names[1:])


def test_linear_names_the_layers_of_an_unknown_architecture(tmp_path: Path) -> None:
    tensors = {"blocks.0.fc1.weight": torch.randn(16, 24), "head.weight": torch.randn(16, 24)}
    source = write(tmp_path / "source", {"architectures": ["NewModel"]}, tensors)
    report = convert(source, tmp_path / "out", pattern=SIX_EIGHT, linear=r"\.fc\d$")
    assert report.pruned == ("blocks.0.fc1",)
    assert report.kept == {"head": "not a linear layer of a block"}
    assert config_of(tmp_path / "out")["quantization_config"]["ignore"] == ["lm_head", "head"]
    again = convert(tmp_path / "out", tmp_path / "slided", pattern=SIX_EIGHT, layout="slided")
    assert again.pruned == report.pruned
    assert again.kept == {"head": "the source's ignore list"}


def test_the_older_config_name_is_replaced(tmp_path: Path) -> None:
    source = w8a8(tmp_path / "source")
    config = config_of(source)
    config["compression_config"] = config.pop("quantization_config")
    (source / "config.json").write_text(json.dumps(config))
    convert(source, tmp_path / "out", pattern=SIX_EIGHT)
    assert "compression_config" not in config_of(tmp_path / "out")
    assert config_of(tmp_path / "out")["quantization_config"]["slidesparse"]["pattern"] == "6:8"


def test_an_empty_folder_may_be_filled_and_parents_are_made(tmp_path: Path) -> None:
    source = llama(tmp_path / "source")
    (tmp_path / "empty").mkdir()
    convert(source, tmp_path / "empty", pattern=SIX_EIGHT)
    convert(source, tmp_path / "new" / "below" / "out", pattern=SIX_EIGHT)
    (tmp_path / "target").mkdir()
    for name in ("target", "dangling"):  # a link to a folder on another disk, say
        (tmp_path / f"to {name}").symlink_to(name)
        convert(source, tmp_path / f"to {name}", pattern=SIX_EIGHT)
        assert snapshot(tmp_path / name) == snapshot(tmp_path / "empty")
    assert snapshot(tmp_path / "empty") == snapshot(tmp_path / "new" / "below" / "out")


def test_progress_counts_both_passes_in_bytes(tmp_path: Path) -> None:
    calls: list[tuple[str, int, int]] = []
    report = convert(
        llama(tmp_path / "source"),
        tmp_path / "out",
        pattern=SIX_EIGHT,
        progress=lambda *call: calls.append(call),
    )
    total = sum(tensor.nbytes for tensor in float_tensors(LLAMA).values())
    assert report.bytes_in == total
    for phase in ("checking", "writing"):
        done = [call[1] for call in calls if call[0] == phase]
        assert done == sorted(done)
        assert done[-1] == total
    assert {call[2] for call in calls} == {total}


KILLED = """
import os, signal, sys
from slidesparse import checkpoint, convert
from slidesparse.pattern import SlidePattern
checkpoint.CHUNK_ELEMENTS = 1000
written, write = 0, checkpoint.Writer.write
def write_then_die(self, *arguments):
    global written
    write(self, *arguments)
    written += 1
    if written == 40:
        os.kill(os.getpid(), signal.SIGKILL)
checkpoint.Writer.write = write_then_die
convert.convert(sys.argv[1], sys.argv[2], pattern=SlidePattern.parse("6:8"))
"""


def test_a_killed_conversion_leaves_nothing_that_looks_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = llama(tmp_path / "source")
    out = tmp_path / "out"
    command = [sys.executable, "-c", KILLED, str(source), str(out)]
    done = subprocess.run(command, cwd=Path(__file__).parent.parent, timeout=120, check=False)
    assert done.returncode == -signal.SIGKILL
    assert not out.exists()
    (partial,) = (path for path in tmp_path.iterdir() if path != source)
    assert re.fullmatch(r"\.out\.partial-\w+", partial.name)
    assert (partial / MODEL).exists()
    assert not (partial / "config.json").exists()
    usage = shutil.disk_usage(tmp_path)  # what was left does not count as space that is taken
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=0) if partial.exists() else usage)
    convert(source, out, pattern=SIX_EIGHT)  # the same again just works, and cleans up
    assert {path.name for path in tmp_path.iterdir()} == {"source", "out"}
    convert(source, tmp_path / "other", pattern=SIX_EIGHT)
    assert snapshot(out) == snapshot(tmp_path / "other")


def test_a_running_conversion_is_not_mistaken_for_a_killed_one(tmp_path: Path) -> None:
    source, out = llama(tmp_path / "source"), tmp_path / "out"
    refused: list[str] = []

    def interfere(phase: str, done: int, total: int) -> None:
        if phase == "writing" and not refused:
            with pytest.raises(CheckpointError, match="another conversion is writing") as error:
                convert(source, out, pattern=SIX_EIGHT)
            refused.append(str(error.value))

    convert(source, out, pattern=SIX_EIGHT, progress=interfere)
    assert len(refused) == 1
    assert (out / "config.json").exists()


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_errors_and_interrupts_clean_up(tmp_path: Path, error: type[BaseException]) -> None:
    def stop(phase: str, done: int, total: int) -> None:
        if phase == "writing":
            raise error

    source = llama(tmp_path / "source")
    with pytest.raises(error):
        convert(source, tmp_path / "out", pattern=SIX_EIGHT, progress=stop)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_config_is_the_last_file_and_everything_is_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    convert(llama(tmp_path / "source"), tmp_path / "out", pattern=SIX_EIGHT)
    names = [Path(name).name for name in synced]
    assert {MODEL, "config.json", "tokenizer.json"} <= set(names[: names.index("rename")])
    assert synced[-1] == str(tmp_path)


def test_torch_threads_are_as_before(tmp_path: Path) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)  # threads of the pool have 1, which may be the number before
        convert(llama(tmp_path / "source"), tmp_path / "out", pattern=SIX_EIGHT)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
