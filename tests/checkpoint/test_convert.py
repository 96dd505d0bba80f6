"""What a conversion writes: pruned and quantized layers, copied tensors and files, and nothing after a kill."""

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
import transformers
from checkpoints import (
    DOWN,
    INDEX,
    LLAMA,
    MODEL,
    assert_same_tensors,
    bert,
    block_of,
    config_of,
    convert,
    edit_json,
    llama,
    snapshot,
    tensors_of,
)
from models import float_tensors, quantization_config
from safetensors import safe_open
from strategies import assert_same_bits

from slidesparse.checkpoint import storage
from slidesparse.checkpoint.metadata import Metadata
from slidesparse.checkpoint.storage import CheckpointError
from slidesparse.convert.stream import is_finite
from slidesparse.pattern import SlidePattern
from slidesparse.prune import prune
from slidesparse.quantize import NAMES, quantize_rows
from slidesparse.slide import slide, violations

LINEARS = sorted(LLAMA.linears())


# What is written


@pytest.mark.parametrize(
    ("ratio", "layout", "quant", "dtype"),
    [
        ("2:4", "dense", "int8", torch.bfloat16),
        ("4:6", "slided", "int8", torch.float16),  # K = 64 and 88 leave tails
        ("6:8", "dense", "fp8", torch.float32),
        ("6:8", "slided", "fp8", torch.bfloat16),
        ("14:16", "slided", "int8", torch.float32),
        ("2_inf", "dense", "int8", torch.float16),
        ("2_inf", "slided", "fp8", torch.bfloat16),
    ],
)
def test_chunks_equal_pruning_quantizing_and_sliding_whole_tensors(
    tmp_path: Path, ratio: str, layout: str, quant: str, dtype: torch.dtype
) -> None:
    source, pattern = llama(tmp_path / "source", dtype=dtype), SlidePattern.parse(ratio)
    report = convert(source, tmp_path / "out", pattern, quant=quant, layout=layout)
    before, after = tensors_of(source), tensors_of(tmp_path / "out")
    assert sorted(report.pruned) == LINEARS
    for name in LINEARS:
        weight, scale = quantize_rows(prune(before.pop(f"{name}.weight"), pattern), NAMES[quant])
        assert violations(weight, pattern) is None
        expected = slide(weight, pattern) if layout == "slided" else weight
        assert_same_bits(after.pop(f"{name}.weight"), expected)
        assert_same_bits(after.pop(f"{name}.weight_scale"), scale)
    assert_same_tensors(after, before)
    metadata = Metadata.of_config(config_of(tmp_path / "out")["quantization_config"])
    assert metadata is not None
    assert (metadata.pattern, metadata.layout) == (pattern, layout)
    widths = {name: entry.in_features for name, entry in metadata.layers.items()}
    assert widths == {name: k for name, (_, k) in LLAMA.linears().items()}


@pytest.mark.parametrize("quant", ["int8", "fp8"])
def test_quantization_config_is_the_one_that_serving_tests_serve(tmp_path: Path, quant: str) -> None:
    source, out = llama(tmp_path / "source"), tmp_path / "out"
    convert(source, out, quant=quant, ignore=["0.*down_proj"])
    config = config_of(out)
    block = config.pop("quantization_config")
    assert config == config_of(source)
    assert block.pop("slidesparse")["layers"].keys() == set(LINEARS) - {DOWN}
    assert block == {**quantization_config(quant), "ignore": ["lm_head", DOWN]}


def test_layer_option_sets_the_pattern_of_the_last_match(tmp_path: Path) -> None:
    layers = ["down_proj=8:10", "0.mlp.down_proj=4:6", "o_proj=dense"]
    report = convert(llama(tmp_path / "source"), tmp_path / "out", layer=layers)
    ratios = {name: pattern.ratio for name, pattern in report.patterns.items()}
    assert (ratios[DOWN], ratios[DOWN.replace("0", "1")]) == ("4:6", "8:10")
    assert set(report.skipped) == {name for name in LINEARS if "o_proj" in name}
    stored = tensors_of(tmp_path / "out")[f"{next(iter(report.skipped))}.weight"]
    assert stored.dtype == torch.int8
    assert (stored == 0).float().mean() < 0.1


def test_output_does_not_depend_on_processors_chunks_or_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for count, elements, shards in ((1, 640, 1), (7, 640, 3), (2, 2**20, 1)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, count=count: set(range(count)))
        monkeypatch.setattr(storage, "CHUNK_ELEMENTS", elements)
        source = llama(tmp_path / f"source{count}", shards=shards)
        convert(source, tmp_path / f"out{count}")
    first = tensors_of(tmp_path / "out1")
    assert_same_tensors(tensors_of(tmp_path / "out7"), first)
    assert snapshot(tmp_path / "out2") == snapshot(tmp_path / "out1")


def test_shards_keep_their_names_and_are_indexed(tmp_path: Path) -> None:
    source = llama(tmp_path / "source", shards=3)
    convert(source, tmp_path / "out")
    assert snapshot(tmp_path / "out").keys() == snapshot(source).keys()
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    weight_map, total = {}, 0
    for path in (tmp_path / "out").glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            assert file.metadata() == {"format": "pt"}
            for name in file.keys():  # noqa: SIM118
                weight_map[name], total = path.name, total + file.get_tensor(name).nbytes
    assert index["weight_map"] == weight_map
    assert index["metadata"] == {"total_size": total, "note": "kept"}


def test_progress_counts_the_bytes_of_both_passes(tmp_path: Path) -> None:
    calls: list[tuple[str, int, int]] = []
    report = convert(llama(tmp_path / "source"), tmp_path / "out", progress=lambda *call: calls.append(call))
    total = sum(tensor.nbytes for tensor in float_tensors(LLAMA).values())
    assert report.bytes_in == total
    for phase in ("checking", "writing"):
        counts = [call[1] for call in calls if call[0] == phase]
        assert counts == sorted(counts)
        assert counts[-1] == total
    assert {call[2] for call in calls} == {total}


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
)
def test_each_value_that_is_not_finite_is_found_anywhere(dtype: torch.dtype) -> None:
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int16)
    every = bits.view(torch.uint8).unique().view(dtype) if dtype.itemsize == 1 else bits.view(dtype)
    every = (
        torch.tensor([torch.nan, -torch.nan, torch.inf, -torch.inf, 1.0]) if dtype.itemsize == 4 else every
    )
    for value in every[~every.float().isfinite()][:: max(1, len(every) // 256)]:
        for place in (0, 31, 32, 1000):
            x = torch.ones(1001).to(dtype)
            x[place] = value
            assert not is_finite(x)
    assert is_finite(every[every.float().isfinite()])
    assert is_finite(torch.ones(0, 4).to(dtype))


# Files beside the weights


def test_encoder_with_files_beside_the_weights_but_no_code_or_links_out(tmp_path: Path) -> None:
    source = bert(tmp_path / "source")
    (tmp_path / "secret.json").write_text("of somebody else")
    beside = ("vocab.txt", "LICENSE", "chat_template.jinja", "2_Dense/config.json", f"2_Dense/{MODEL}")
    beside += ("checkpoint-500/config.json",)
    left_out = ("modeling_bert.py", "LICENSE.py", "tokenizer.pkl", "pytorch_model.bin", "onnx/model.onnx")
    left_out += (f"checkpoint-500/{MODEL}", "checkpoint-500/optimizer.pt")
    for name in (*beside, *left_out, ".gitattributes"):
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text("beside")
    (source / "added_tokens.json").symlink_to(tmp_path / "secret.json")
    (source / "special_tokens_map.json").symlink_to("vocab.txt")
    modules = [{"path": path} for path in ("", "1_Pooling", "2_Dense")]
    (source / "modules.json").write_text(json.dumps(modules))
    report = convert(source, tmp_path / "out", "4:6", ignore=["1.intermediate", "0.attention.self"])
    names = {*beside, "1_Pooling/config.json", "modules.json", "special_tokens_map.json"}
    assert set(snapshot(tmp_path / "out")) == names | {"config.json", "tokenizer.json", MODEL}
    assert set(report.left_out) == {*left_out, "added_tokens.json"}
    ignore = set(
        block_of(tmp_path / "out")["ignore"]
    )  # vLLM puts "model." before the names of a bare encoder,
    assert {"model.encoder.layer.1.intermediate.dense", "pooler.dense", "model.pooler.dense"} <= ignore
    for attention in ("attention.self", "attention.output"):  # and calls its attention by another name
        assert {f"model.encoder.layer.0.{attention}.{last}" for last in ("query", "key", "value")} <= ignore


def test_code_that_config_names_is_not_needed_by_the_output(tmp_path: Path) -> None:
    """With --trust-remote-code, transformers would search for the code, which is not copied."""
    source = llama(tmp_path / "source")
    edit_json(source / "config.json", auto_map={"AutoConfig": "configuration_own.OwnConfig"})
    (source / "configuration_own.py").write_text("raise SystemExit")
    assert convert(source, tmp_path / "out").left_out == ("configuration_own.py",)
    config = transformers.AutoConfig.from_pretrained(tmp_path / "out", trust_remote_code=True)
    assert type(config) is transformers.LlamaConfig


def test_output_may_be_an_empty_folder_a_link_or_below_new_parents(tmp_path: Path) -> None:
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


def test_errors_remove_partial_output_and_restore_torch_threads(tmp_path: Path) -> None:
    """Interrupts are tested in tests/commands/test_cli.py."""

    def stop(phase: str, done: int, total: int) -> None:
        if phase == "writing":
            raise ZeroDivisionError

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)  # threads of the pool have 1, which may be the number before
        with pytest.raises(ZeroDivisionError):
            convert(llama(tmp_path / "source"), tmp_path / "out", progress=stop)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_config_is_written_last_and_all_is_synced_before_the_rename(
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
    convert(llama(tmp_path / "source"), tmp_path / "out")
    names = [Path(name).name for name in synced]
    assert {MODEL, "config.json", "tokenizer.json"} <= set(names[: names.index("rename")])
    assert synced[-1] == str(tmp_path)
