"""Refusals of a conversion: one line names the fault, before anything is written, and the source stays as it was."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoints import (
    MODEL,
    Q,
    bert,
    config_of,
    convert,
    edit_json,
    llama,
    refused,
    rewrite,
    snapshot,
    tensors_of,
    write,
)
from torch import Tensor

from slidesparse.checkpoint import names
from slidesparse.checkpoint.storage import CheckpointError
from slidesparse.convert import stream
from slidesparse.convert.budget import Budget
from slidesparse.errors import CalibrationError, EnvironmentFault, SlideSparseError
from slidesparse.pattern import PatternError

NAN = float("nan")


def tensor(name: str, change: Callable[[Tensor], Tensor | None]) -> Callable[[Path], None]:
    """Replace one tensor, or remove it with None."""
    return lambda source: rewrite(source, **{name: change(tensors_of(source)[name])})


def q(change: Callable[[Tensor], Tensor | None]) -> Callable[[Path], None]:
    return tensor(f"{Q}.weight", change)


def at(place: list[int], number: float) -> Callable[[Tensor], Tensor]:
    return lambda t: t.index_put([torch.tensor(i) for i in place], torch.tensor(number).to(t.dtype))


def config(**values: Any) -> Callable[[Path], None]:
    return lambda source: edit_json(source / "config.json", **values)


# A change of a float Llama of two blocks, and words of the message
SOURCES: dict[str, tuple[Callable[[Path], Any], list[str]]] = {
    "NaN": (
        q(at([41, 7], NAN)),
        [f"{Q}.weight in {MODEL} holds 1 values that are not", "row 41, column 7 (nan)"],
    ),
    "NaN in a norm": (tensor("model.norm.weight", at([5], NAN)), ["model.norm.weight", "element 5 (nan)"]),
    "no part of a fused layer": (q(lambda t: None), [f"{Q}.weight is missing", "fetch it again"]),
    "I32": (q(lambda t: t.to(torch.int32)), [f"{Q}.weight is I32", "F32, F16, BF16"]),
    "a vector": (q(lambda t: t[0].clone()), [f"{Q}.weight has shape [64]"]),
    "no rows": (q(lambda t: t[:0].clone()), [f"{Q}.weight has shape [0, 64]"]),
    "transposed": (
        tensor("model.layers.0.mlp.up_proj.weight", lambda t: t.T.contiguous()),
        ["up_proj.weight has shape [64, 88], but config.json describes [88, 64]"],
    ),
    "a scale": (
        lambda source: rewrite(source, **{f"{Q}.weight_scale": torch.ones(64, 1)}),
        [f"has {Q}.weight_scale, but by its config.json no weights are quantized"],
    ),
    "a block too few": (config(num_hidden_layers=3), ["model.layers.2.", "is missing (7 such)"]),
    "a block too many": (config(num_hidden_layers=1), ["model.layers.1.", "none of the 1 blocks"]),
    "another width": (config(hidden_size=62), ["has shape", "but config.json describes"]),
    "no heads": (config(num_attention_heads=0), ["describes no model that transformers can build"]),
    "a text for a size": (config(hidden_size="64"), ["describes no model", "hidden_size"]),
    "a negative size": (config(intermediate_size=-88), ["describes no model"]),
    "endless blocks": (config(num_hidden_layers=10**12), ["num_hidden_layers is 1000000000000"]),
    "unknown model_type": (config(model_type="llama7"), ['model_type "llama7" is not known to transformers']),
    "model_type a list": (config(model_type=["llama"]), ["is not known"]),
    "encoder and decoder": (
        config(model_type="t5", architectures=["T5ForConditionalGeneration"]),
        ["is not a stack of"],
    ),
    "another model's config": (
        config(model_type="gpt2", architectures=["GPT2LMHeadModel"]),
        ["GPT2LMHeadModel"],
    ),
    "a wrapper's prefix": (
        lambda s: write(s, config_of(s), {f"_orig_mod.{name}": t for name, t in tensors_of(s).items()}),
        ["is missing"],
    ),
    "modules.json of others": (
        lambda source: (source / "modules.json").write_text('[{"name": "1"}]'),
        ["modules.json is not a list of modules"],
    ),
}


@pytest.mark.parametrize("name", SOURCES)
def test_invalid_sources_are_refused(tmp_path: Path, name: str) -> None:
    source = llama(tmp_path / "source")
    change, words = SOURCES[name]
    change(source)
    message = refused(source, *words)
    assert "\n" not in message
    assert len(message) < 700


def test_incomplete_encoder_is_refused(tmp_path: Path) -> None:
    """Nothing else shows that the first of several files, without their index, is incomplete."""
    source = bert(tmp_path / "source")
    (source / MODEL).rename(source / "model-00001-of-00002.safetensors")
    edit_json(source / "config.json", num_hidden_layers=3)
    refused(source, "layer.2.attention.self.query.weight is missing")


ENDLESS = "(.|.)*q$"
GATE = "model.layers.1.mlp.gate_proj but not model.layers.1.mlp.up_proj"

# Options, and words of the message
OPTIONS: list[tuple[dict[str, Any], list[str], type[Exception]]] = [
    ({"quant": "x"}, ["--quant 'x'", "int8, fp8"], CheckpointError),
    ({"layout": "x"}, ["--layout 'x'", "dense, slided"], CheckpointError),
    ({"layout": "packed"}, ["--layout 'packed'", "dense, slided"], CheckpointError),
    ({"pattern": "2:4@50%"}, ["2:4@50% is no pattern to convert to", "synth"], CheckpointError),
    ({"layer": ["down_proj=2:4@50%"]}, ["2:4@50% is no pattern to convert to"], CheckpointError),
    ({"pattern": "dense", "layout": "slided"}, ["--layout slided", "dense;"], CheckpointError),
    ({"ignore": ["mlp.(down"]}, ["--ignore 'mlp.(down'", "missing )"], CheckpointError),
    ({"ignore": ["(" * 999]}, ["--ignore '(((((", "is not a regular expression"], CheckpointError),
    ({"ignore": ["a{99999999999}"]}, ["--ignore", "is not a regular expression"], CheckpointError),
    ({"ignore": ["a" * 1001]}, ["--ignore", "more than 1000"], CheckpointError),
    ({"ignore": ["o_proj", "down_porj"]}, ["--ignore 'down_porj'", "14 linear layers"], CheckpointError),
    ({"ignore": ["1.mlp.gate"]}, ["--ignore covers", GATE], CheckpointError),
    ({"ignore": ["."]}, ["every linear layer is ignored"], CheckpointError),
    ({"ignore": ["o_proj", ENDLESS]}, [f"--ignore {ENDLESS!r} takes more than"], CheckpointError),
    ({"layer": [".=dense"]}, ["no linear layer is left to prune"], CheckpointError),
    ({"layer": ["down_proj"]}, ["--layer 'down_proj'", "REGEX=PATTERN"], CheckpointError),
    ({"layer": ["down_proj=7:8"]}, ["--layer 'down_proj=7:8'", "'7:8'"], PatternError),
    ({"layer": ["porj=6:8"]}, ["--layer 'porj'"], CheckpointError),
    ({"layer": ["1.mlp.gate_proj=4:6"]}, ["--layer covers", GATE], CheckpointError),
    ({"layer": [f"{ENDLESS}=8:10"]}, [f"--layer {ENDLESS!r} takes more than"], CheckpointError),
    ({"budget": Budget(zeros=0.2)}, ["--zeros 20%", "--calib"], CalibrationError),
]


@pytest.mark.parametrize(("options", "words", "error"), OPTIONS, ids=[str(o)[:40] for o, _, _ in OPTIONS])
def test_invalid_options_are_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    words: list[str],
    error: type[Exception],
) -> None:
    monkeypatch.setattr(names, "SECONDS", 0.2)
    assert len(refused(llama(tmp_path / "source"), *words, error=error, **options)) < 500


# The output


def test_invalid_outputs_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the source is read, which may take minutes, and in a dry run too."""
    source, volume = llama(tmp_path / "source"), tmp_path / "volume"
    for folder in ("full", "current", "volume"):
        (tmp_path / folder).mkdir()
    (tmp_path / "full" / "mine.txt").write_text("kept")
    (tmp_path / "file").write_text("")
    (tmp_path / ".linked.partial-1").symlink_to("full")
    monkeypatch.chdir(tmp_path / "current")
    monkeypatch.setattr(Path, "is_mount", lambda path: path == volume)
    monkeypatch.setattr(stream, "_check_values", lambda *_: pytest.fail("the source was read"))
    for out, words in {
        "full": f"{tmp_path / 'full'} is not empty",
        "source": "is not empty",
        "file": "is a file",
        "file/new/below": f"below {tmp_path / 'file'}",
        "source/out": "inside the source",
        "current": "is the current folder, which would be replaced",
        "volume": f"{volume} is where a disk or volume is mounted; name a folder in it",
    }.items():
        refused(source, words, out=out)
        refused(source, words, out=out, dry_run=True)
    refused(
        source, f"{tmp_path / '.linked.partial-1'} is a link or a file", out="linked", error=SlideSparseError
    )
    assert (tmp_path / "full" / "mine.txt").read_text() == "kept"


@pytest.mark.parametrize("out", ["closed/out", "closed/new/out"])
def test_unwritable_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, out: str) -> None:
    source, closed = llama(tmp_path / "source"), tmp_path / "closed"
    closed.mkdir()
    access = os.access  # root, who may write, runs some of these tests
    monkeypatch.setattr(os, "access", lambda path, mode: path != closed and access(path, mode))
    for dry_run in (False, True):
        refused(
            source, f"{closed} is not writable by this user", error=EnvironmentFault, out=out, dry_run=dry_run
        )


def test_read_only_disk_is_not_told_to_change_permissions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = llama(tmp_path / "source")
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_flag=os.ST_RDONLY))
    message = refused(
        source, f"{tmp_path} is mounted read-only; name a folder elsewhere", error=EnvironmentFault
    )
    assert "permissions" not in message


def test_output_filled_by_another_process_is_kept(tmp_path: Path) -> None:
    source, out = llama(tmp_path / "source"), tmp_path / "out"

    def fill(phase: str, done: int, total: int) -> None:
        out.mkdir(exist_ok=True)
        (out / "theirs").write_text("kept")

    with pytest.raises(CheckpointError, match="another process"):
        convert(source, out, progress=fill)
    assert snapshot(tmp_path).keys() == {*(f"source/{name}" for name in snapshot(source)), "out/theirs"}


def test_pickled_weights_of_a_module_are_refused_unless_there_are_others(tmp_path: Path) -> None:
    source = llama(tmp_path / "source")
    (source / "modules.json").write_text('[{"path": ""}, {"path": "2_Dense"}]')
    (source / "2_Dense").mkdir()
    (source / "2_Dense" / "pytorch_model.bin").write_bytes(b"a pickle")
    refused(source, "2_Dense/pytorch_model.bin", "safe_serialization")
    (source / "2_Dense" / MODEL).write_bytes(b"the same")
    assert convert(source, tmp_path / "out").left_out == ("2_Dense/pytorch_model.bin",)
    assert "2_Dense/model.safetensors" in snapshot(tmp_path / "out")


# Full disks


def test_disk_space_is_checked_beforehand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = llama(tmp_path / "source")
    convert(source, tmp_path / "first")
    needed = sum(len(raw) for name, raw in snapshot(tmp_path / "first").items() if name != "config.json")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=needed - 1))
    refused(source, "no space left", f"{needed / 1e6:.1f} MB", error=EnvironmentFault)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=needed))
    convert(source, tmp_path / "out")


@pytest.mark.parametrize(
    ("function", "call", "number"),
    [
        ("pwrite", 0, errno.ENOSPC),  # at the header
        ("pwrite", 1, errno.EDQUOT),  # at the first tensor
        ("pwrite", 20, errno.EFBIG),
        ("fsync", 0, errno.ENOSPC),
    ],
)
def test_full_disk_while_writing_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str, call: int, number: int
) -> None:
    calls, original = [], getattr(os, function)

    def full(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) > call:
            raise OSError(number, os.strerror(number))
        return original(*arguments)

    monkeypatch.setattr(os, function, full)
    facts = "no space left", str(tmp_path), os.strerror(number)
    refused(llama(tmp_path / "source"), *facts, error=EnvironmentFault)
    assert len(calls) > call
