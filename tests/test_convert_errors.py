"""Bad input to a conversion: the message says what to do, and nothing is written."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import (
    INDEX,
    LLAMA,
    MODEL,
    Q,
    bert,
    config_of,
    edit_header,
    edit_json,
    llama,
    refused,
    set_value,
    snapshot,
    tensors_of,
    w8a8,
    write,
)
from models import float_tensors
from safetensors.torch import save_file

from slidesparse import checkpoint as checkpoint_module
from slidesparse.architectures import ArchitectureError
from slidesparse.checkpoint import CheckpointError
from slidesparse.convert import convert
from slidesparse.pattern import SlidePattern
from slidesparse.publish import SpaceError
from slidesparse.slide import bits

SIX_EIGHT = SlidePattern.parse("6:8")
FIRST_SHARD = "model-00001-of-00003.safetensors"


# The folder and its files


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match="missing is not a folder; give a Hugging Face checkpoint folder"
    ):
        convert(tmp_path / "missing", tmp_path / "out", pattern=SIX_EIGHT)
    assert list(tmp_path.iterdir()) == []


def test_no_config(tmp_path: Path) -> None:
    source = llama(tmp_path / "source")
    (source / "config.json").unlink()
    refused(source, "config.json", "is missing; give a Hugging Face checkpoint folder")


@pytest.mark.parametrize(("text", "words"), [("{", "is not JSON"), ("[]", "must hold an object, found list")])
@pytest.mark.parametrize("name", ["config.json", INDEX])
def test_broken_json(tmp_path: Path, name: str, text: str, words: str) -> None:
    source = llama(tmp_path / "source", shards=3)
    (source / name).write_text(text)
    refused(source, name, words)


def test_no_weights(tmp_path: Path) -> None:
    source = llama(tmp_path / "source")
    (source / MODEL).rename(source / "pytorch_model.bin")
    refused(source, "holds no .safetensors file", "pytorch_model.bin", "safe_serialization=True")


def test_shards_without_index(tmp_path: Path) -> None:
    source = llama(tmp_path / "source", shards=3)
    (source / INDEX).unlink()
    refused(source, "3 .safetensors files", f"no {INDEX}", "fetch the index")


def test_missing_shard(tmp_path: Path) -> None:
    source = llama(tmp_path / "source", shards=3)
    (source / FIRST_SHARD).unlink()
    refused(source, "lacks 1 of the 3 files", FIRST_SHARD, "fetch them again")


@pytest.mark.parametrize("cut", [1, 1000, 10**6])
def test_truncated_shard(tmp_path: Path, cut: int) -> None:
    """Whether the cut leaves most of the data, little of it, or not even the header."""
    source = llama(tmp_path / "source", shards=3)
    path = source / FIRST_SHARD
    size = path.stat().st_size
    os.truncate(path, max(4, size - cut))
    refused(source, FIRST_SHARD, f"is {max(4, size - cut)} bytes", "truncated", "fetch it again")


def test_trailing_data(tmp_path: Path) -> None:
    source = llama(tmp_path / "source")
    with (source / MODEL).open("ab") as file:
        file.write(b"more")
    refused(source, MODEL, "followed by other data")


def test_a_file_cut_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = llama(tmp_path / "source")
    size = (source / MODEL).stat().st_size
    opened = checkpoint_module.Reader.__enter__

    def cut(self: checkpoint_module.Reader) -> checkpoint_module.Reader:
        os.truncate(source / MODEL, size - 100)
        return opened(self)

    monkeypatch.setattr(checkpoint_module.Reader, "__enter__", cut)
    with pytest.raises(CheckpointError, match=f"{MODEL} became shorter while it was read"):
        convert(source, tmp_path / "out", pattern=SIX_EIGHT)
    assert not (tmp_path / "out").exists()


# The index


@pytest.mark.parametrize(
    "file", ["../other.safetensors", "/etc/other.safetensors", "a/b.safetensors", "..\\x.safetensors"]
)
def test_index_outside_the_folder(tmp_path: Path, file: str) -> None:
    source = llama(tmp_path / "source", shards=3)
    shutil.copy(source / FIRST_SHARD, tmp_path / "other.safetensors")
    index = json.loads((source / INDEX).read_text())
    index["weight_map"][f"{Q}.weight"] = file
    (source / INDEX).write_text(json.dumps(index))
    refused(
        source, INDEX, f"{Q}.weight", repr(file), "outside the folder", "only files beside the index are read"
    )


def test_index_names_an_absent_tensor(tmp_path: Path) -> None:
    source = llama(tmp_path / "source", shards=3)
    index = json.loads((source / INDEX).read_text())
    index["weight_map"]["model.ghost.weight"] = FIRST_SHARD
    (source / INDEX).write_text(json.dumps(index))
    refused(source, INDEX, f"places tensor model.ghost.weight in {FIRST_SHARD}, which does not hold it")


@pytest.mark.parametrize("weight_map", [None, {}, []])
def test_index_without_map(tmp_path: Path, weight_map: object) -> None:
    source = llama(tmp_path / "source", shards=3)
    edit_json(source / INDEX, weight_map=weight_map)
    refused(source, INDEX, "has no weight_map")


def test_index_naming_another_kind_of_file(tmp_path: Path) -> None:
    source = llama(tmp_path / "source", shards=3)
    edit_json(source / INDEX, weight_map={f"{Q}.weight": "pytorch_model.bin"})
    refused(source, "'pytorch_model.bin', which is not a .safetensors file")


def test_a_tensor_in_two_shards(tmp_path: Path) -> None:
    source = llama(tmp_path / "source", shards=3)
    tensors = tensors_of(source)
    second = "model-00002-of-00003.safetensors"
    index = json.loads((source / INDEX).read_text())["weight_map"]
    held = {name: tensors[name] for name, file in index.items() if file == second}
    doubled = next(name for name, file in index.items() if file == FIRST_SHARD)
    save_file({**held, doubled: tensors[doubled]}, source / second)
    refused(source, f"tensor {doubled} is both in {FIRST_SHARD} and in {second}")


# Headers


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"dtype": "F4"}, "'F4', the dtypes read are"),
        ({"shape": [3, 3]}, "(BF16 [3, 3], 18 bytes) lies at bytes"),
        ({"shape": [-1, 64]}, "must be whole numbers from 0"),
        ({"data_offsets": [0, 2]}, "damaged header"),
        ({"data_offsets": None}, "damaged header"),
    ],
)
def test_damaged_entries(tmp_path: Path, entry: dict[str, Any], words: str) -> None:
    source = llama(tmp_path / "source")
    edit_header(source / MODEL, **{f"{Q}.weight".replace(".", "__"): entry})
    refused(source, MODEL, words, "fetch it again")


@pytest.mark.parametrize("text", ["[1]", "not json", '{"a": {}, "a": {}}', '{"a": 3}'])
def test_damaged_header(tmp_path: Path, text: str) -> None:
    source = llama(tmp_path / "source")
    edit_header(source / MODEL, text)
    message = refused(source, MODEL, "damaged header", "fetch it again")
    assert ("'a' appears twice" in message) == ('"a": {}, "a"' in text)


def test_a_pointer_file_instead_of_weights(tmp_path: Path) -> None:
    source = llama(tmp_path / "source")
    (source / MODEL).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    refused(source, MODEL, "Git LFS pointer", "fetch it again")


# Values, dtypes, shapes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_finite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, value: float
) -> None:
    monkeypatch.setattr(checkpoint_module, "CHUNK_ELEMENTS", 640)  # ten rows of q_proj
    weight = set_value(set_value(float_tensors(LLAMA)[f"{Q}.weight"].to(dtype), 41, 7, value), 63, 0, value)
    source = llama(tmp_path / "source", dtype=dtype, **{f"{Q}.weight".replace(".", "__"): weight})
    words = f"tensor {Q}.weight in {MODEL} holds 2 values that are not finite"
    refused(source, words, f"the first at row 41, column 7 ({value})", "fetch the checkpoint again")


def test_other_tensors_must_be_finite_too(tmp_path: Path) -> None:
    norm = torch.ones(64, dtype=torch.bfloat16)
    norm[5] = torch.nan
    source = llama(tmp_path / "source", model__norm__weight=norm)
    refused(source, "tensor model.norm.weight", "1 values that are not finite, the first at element 5 (nan)")


@pytest.mark.parametrize("code", [0x7F, -1])
def test_fp8_codes_that_are_nan(tmp_path: Path, code: int) -> None:
    source = w8a8(tmp_path / "source", "fp8")
    tensors = tensors_of(source)
    bits(tensors[f"{Q}.weight"])[3, 4] = code
    write(source, config_of(source), tensors)
    refused(source, f"tensor {Q}.weight", "1 values that are not finite, the first at row 3, column 4 (nan)")


@pytest.mark.parametrize("dtype", [torch.int32, torch.float64, torch.int8])
def test_wrong_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    source = llama(tmp_path / "source", **{f"{Q}.weight".replace(".", "__"): torch.ones(64, 64, dtype=dtype)})
    name = {torch.int32: "I32", torch.float64: "F64", torch.int8: "I8"}[dtype]
    refused(source, f"tensor {Q}.weight is {name}", "the dtypes taken are F32, F16, BF16")


@pytest.mark.parametrize("shape", [(64,), (2, 4, 8), (0, 64)])
def test_wrong_shape(tmp_path: Path, shape: tuple[int, ...]) -> None:
    source = llama(tmp_path / "source", **{f"{Q}.weight".replace(".", "__"): torch.ones(shape).bfloat16()})
    refused(source, f"tensor {Q}.weight has shape {list(shape)}; a linear layer's is [N, K]")


# Architectures and options


def test_unknown_architecture(tmp_path: Path) -> None:
    source = llama(tmp_path / "source")
    edit_json(source / "config.json", architectures=["MambaForCausalLM"])
    refused(
        source, "'MambaForCausalLM' is not known", "known are", "LlamaForCausalLM", "BertModel",
        "--linear REGEX", error=ArchitectureError,
    )  # fmt: skip


@pytest.mark.parametrize("value", [None, [], "LlamaForCausalLM", {"a": 1}, [["LlamaForCausalLM"]]])
def test_no_architecture(tmp_path: Path, value: object) -> None:
    source = llama(tmp_path / "source")
    edit_json(source / "config.json", architectures=value)
    refused(source, "config.json names no architecture", "--linear REGEX", error=ArchitectureError)


@pytest.mark.parametrize("by_name", [True, False])
def test_mixture_of_experts(tmp_path: Path, by_name: bool) -> None:
    expert = "model.layers.0.mlp.experts.0.down_proj.weight"
    extra = {} if by_name else {expert.replace(".", "__"): torch.ones(8, 8)}
    source = llama(tmp_path / "source", **extra)
    if by_name:
        edit_json(source / "config.json", architectures=["Qwen3MoeForCausalLM"])
    message = refused(source, "is a mixture of experts", "not supported", error=ArchitectureError)
    assert (expert in message) != by_name


def test_names_that_do_not_fit_the_architecture(tmp_path: Path) -> None:
    source = bert(tmp_path / "source", architecture="LlamaForCausalLM")
    refused(source, "none of the", "is a linear layer by the names expected", "--linear REGEX")


@pytest.mark.parametrize("option", ["ignore", "linear"])
def test_regex_that_does_not_compile(tmp_path: Path, option: str) -> None:
    value = ["mlp.(down"] if option == "ignore" else "mlp.(down"
    words = f"--{option} 'mlp.(down' is not a Python regular expression", "unterminated subpattern"
    refused(llama(tmp_path / "source"), *words, error=ArchitectureError, **{option: value})


def test_ignore_that_matches_nothing(tmp_path: Path) -> None:
    words = "--ignore 'down_porj' matches none of the 14 linear layers, such as model.layers.0."
    refused(llama(tmp_path / "source"), words, error=ArchitectureError, ignore=["o_proj", "down_porj"])


def test_ignore_of_a_part_of_a_fused_group(tmp_path: Path) -> None:
    words = (
        "--ignore covers model.layers.1.mlp.gate_proj but not model.layers.1.mlp.up_proj",
        "all of them or none",
    )
    refused(
        llama(tmp_path / "source"), *words, error=ArchitectureError, ignore=["1.mlp.gate", "0.mlp.(gate|up)"]
    )
    source = bert(tmp_path / "bert")
    message = refused(source, error=ArchitectureError, ignore=["0.*(query|value)"])
    assert "query" in message
    assert "but not encoder.layer.0.attention.self.key;" in message


def test_everything_ignored(tmp_path: Path) -> None:
    refused(llama(tmp_path / "source"), "nothing is left to prune", ignore=["."])


@pytest.mark.parametrize(
    ("option", "allowed"),
    [("quant", "int8, fp8"), ("layout", "dense, slided"), ("method", "sparsegpt, wanda, magnitude, random")],
)
def test_unknown_choices(tmp_path: Path, option: str, allowed: str) -> None:
    refused(llama(tmp_path / "source"), f"--{option} 'x' is not known; use one of {allowed}", **{option: "x"})


# The output


def test_output_not_empty(tmp_path: Path) -> None:
    source = llama(tmp_path / "source")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("kept")
    refused(source, f"output folder {tmp_path / 'out'} is not empty; name a new one")
    assert (tmp_path / "out" / "mine.txt").read_text() == "kept"
    refused(source, "is not empty", out="source")


def test_output_is_a_file(tmp_path: Path) -> None:
    source = llama(tmp_path / "source")
    (tmp_path / "out").write_text("")
    refused(source, "is a file; name a new folder")
    refused(source, f"lies below {tmp_path / 'out'}, which is a file", out="out/new/below")


def test_modules_that_cannot_be_read(tmp_path: Path) -> None:
    source = llama(tmp_path / "source")
    (source / "modules.json").write_text('[{"name": "1"}]')
    refused(source, "modules.json is not a list of modules with their paths", "fetch it again")


def test_output_inside_the_source(tmp_path: Path) -> None:
    refused(llama(tmp_path / "source"), "lies inside the source", out="source/out")


def test_output_filled_meanwhile(tmp_path: Path) -> None:
    source, out = llama(tmp_path / "source"), tmp_path / "out"

    def fill(phase: str, done: int, total: int) -> None:
        out.mkdir(exist_ok=True)
        (out / "theirs").write_text("kept")

    with pytest.raises(CheckpointError, match="was filled by somebody else meanwhile"):
        convert(source, out, pattern=SIX_EIGHT, progress=fill)
    assert snapshot(tmp_path).keys() == {*(f"source/{name}" for name in snapshot(source)), "out/theirs"}


def test_no_space_is_seen_beforehand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = llama(tmp_path / "source")
    convert(source, tmp_path / "first", pattern=SIX_EIGHT)
    needed = sum(len(raw) for name, raw in snapshot(tmp_path / "first").items() if name != "config.json")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=needed - 1))
    refused(source, "no space left", f"it needs {needed / 1e6:.1f} MB", "MB free", error=SpaceError)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=needed))
    convert(source, tmp_path / "out", pattern=SIX_EIGHT)


@pytest.mark.parametrize("call", [0, 1, 20])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_no_space_while_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int, number: int
) -> None:
    """pwrite fails as on a full disk: at the header, at the first tensor, in the middle."""
    calls, pwrite = [], os.pwrite

    def full(descriptor: int, view: memoryview, position: int) -> int:
        calls.append(position)
        if len(calls) > call:
            raise OSError(number, os.strerror(number))
        return pwrite(descriptor, view, position)

    monkeypatch.setattr(os, "pwrite", full)
    source = llama(tmp_path / "source")
    refused(source, "no space left in", str(tmp_path), "run the same command again", error=SpaceError)
    assert len(calls) > call


def test_no_space_when_syncing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    refused(llama(tmp_path / "source"), "no space left in", error=SpaceError)
