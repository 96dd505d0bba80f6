"""Reading and writing of safetensors files, compared with the safetensors library, and damaged files."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bitnets
import pytest
import torch
from checkpoints import INDEX, Q, convert, edit_json, llama, refused, rewrite, snapshot, write
from hypothesis import given
from hypothesis import strategies as st
from models import MODEL
from safetensors.torch import load_file, save_file
from strategies import assert_same_bits
from torch import Tensor

from slidesparse.checkpoint import storage
from slidesparse.checkpoint.inspection import inspect
from slidesparse.checkpoint.storage import DTYPES, Checkpoint, CheckpointError, TensorSpec, read_header

shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)
dtypes = st.sampled_from(sorted(DTYPES))
specs = st.lists(st.tuples(dtypes, shapes), max_size=6).map(
    lambda entries: [TensorSpec(f"t{i}", *entry) for i, entry in enumerate(entries)]
)


def random_tensor(spec: TensorSpec, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    high = 2 if spec.dtype == "BOOL" else 256
    raw = torch.randint(0, high, (spec.nbytes,), generator=generator, dtype=torch.uint8)
    return raw.view(DTYPES[spec.dtype]).reshape(spec.shape)


@given(specs, st.integers(0, 99))
def test_writer_output_is_read_by_safetensors(
    tmp_path_factory: pytest.TempPathFactory, planned: list[TensorSpec], seed: int
) -> None:
    path = tmp_path_factory.mktemp("written") / MODEL
    tensors = {spec.name: random_tensor(spec, seed) for spec in planned}
    with storage.Writer(path, planned) as writer:
        for spec in planned:
            rows = tensors[spec.name].reshape(spec.rows, spec.columns)
            for row in reversed(range(spec.rows)):  # in any order
                writer.write(spec.name, row, rows[row : row + 1])
    assert storage.plan_file(planned)[2] == path.stat().st_size
    loaded = load_file(path)
    assert loaded.keys() == tensors.keys()
    for name, tensor in loaded.items():
        assert_same_bits(tensor, tensors[name])
    starts = [(stored.start, DTYPES[stored.spec.dtype].itemsize) for stored in read_header(path)]
    assert all(start % size == 0 for start, size in starts)  # aligned for every mixture of dtypes


@given(specs, st.integers(0, 99))
def test_reader_reads_files_of_safetensors(
    tmp_path_factory: pytest.TempPathFactory, planned: list[TensorSpec], seed: int
) -> None:
    tensors = {spec.name: random_tensor(spec, seed) for spec in planned}
    checkpoint = Checkpoint.open(write(tmp_path_factory.mktemp("read"), {}, tensors))
    assert {name: stored.spec for name, stored in checkpoint.tensors.items()} == {s.name: s for s in planned}
    with checkpoint.reader() as reader:
        for name, tensor in tensors.items():
            assert_same_bits(reader.whole(name), tensor)
            half = slice(checkpoint.require(name).rows // 2, checkpoint.require(name).rows)
            if tensor.numel():
                columns = checkpoint.require(name).columns
                assert_same_bits(reader.rows(name, half).flatten(), tensor.view(-1, columns)[half].flatten())


# Links


def test_reader_that_cannot_open_all_files_closes_them(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(llama(tmp_path, shards=3))
    (tmp_path / checkpoint.files[-1]).unlink()
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(FileNotFoundError), checkpoint.reader():
        pass
    assert len(os.listdir("/proc/self/fd")) == before


def test_links_in_a_hub_cache_are_followed(tmp_path: Path) -> None:
    """Files link to ``blobs`` of the repository (tests/commands/test_hub.py), here on to those of the whole cache."""
    repository = tmp_path / "models--org--name"
    source = llama(repository / "snapshots" / "abc")
    for folder in (tmp_path / "blobs" / "01", repository / "blobs"):
        folder.mkdir(parents=True)
    for number, path in enumerate(sorted(source.iterdir())):
        path.rename(tmp_path / "blobs" / "01" / f"{number}")
        (repository / "blobs" / f"{number}").symlink_to(f"../../blobs/01/{number}")
        path.symlink_to(f"../../blobs/{number}")
    (source / MODEL).rename(source / "x")
    (source / MODEL).symlink_to("x")  # within the folder
    convert(source, tmp_path / "out")
    assert set(snapshot(tmp_path / "out")) == {"config.json", "tokenizer.json", MODEL}
    assert not any(path.is_symlink() for path in (tmp_path / "out").iterdir())


@pytest.mark.parametrize("name", ["config.json", MODEL])
@pytest.mark.parametrize("place", ["elsewhere", "models--org--other/blobs"])
def test_links_out_of_the_folder_are_refused(tmp_path: Path, name: str, place: str) -> None:
    source = llama(tmp_path / "models--org--name" / "snapshots" / "abc")
    (tmp_path / place).mkdir(parents=True)
    (source / name).rename(tmp_path / place / name)
    (source / name).symlink_to(tmp_path / place / name)
    refused(source, f"{source / name} is a link out of its folder, to {tmp_path / place / name}")


# Damage to a checkpoint of three shards, or of one, and words of the message

SHARD = "model-00001-of-00003.safetensors"
OTHER = "model-00002-of-00003.safetensors"
NO_FILE = "is not the name of a .safetensors file in its folder"
Damage = Callable[[Path], Any]


def place(file: str, name: str = f"{Q}.weight") -> Damage:
    """Let the index place a tensor in another file."""

    def change(source: Path) -> None:
        shutil.copy(source / SHARD, source.parent / "other.safetensors")
        index = json.loads((source / INDEX).read_text())
        edit_json(source / INDEX, weight_map={**index["weight_map"], name: file})

    return change


def truncate(size: int, file: str = SHARD) -> Damage:
    return lambda source: os.truncate(source / file, size)


def text(content: str, file: str = "config.json") -> Damage:
    return lambda source: (source / file).write_text(content)


def pipe(source: Path) -> None:
    (source / "config.json").unlink()
    os.mkfifo(source / "config.json")


def adapter(source: Path) -> None:
    """Training tools may save the base model's config.json with an adapter."""
    (source / MODEL).rename(source / "adapter_model.safetensors")
    (source / "adapter_config.json").touch()


DEEP = '{"a":' + "[" * 100_000 + "]" * 100_000 + "}"
SHARDED: dict[str, tuple[Damage, str]] = {
    "no config": (lambda s: (s / "config.json").unlink(), "config.json"),
    "config no JSON": (text("{"), "config.json"),
    "config a list": (text("[]"), "found []"),
    "config with a byte order mark": (text("\ufeff{}"), "is not JSON: Unexpected UTF-8 BOM"),
    "config too deep": (text(DEEP), "nested too deeply"),
    "config a pipe": (pipe, "config.json is not a file"),
    "config too large": (
        truncate(storage.JSON_LIMIT + 1, "config.json"),
        f"at most {storage.JSON_LIMIT} are",
    ),
    "no index": (lambda s: (s / INDEX).unlink(), f"no {INDEX}"),
    "empty map": (lambda s: edit_json(s / INDEX, weight_map={}), "weight_map"),
    "map a list": (lambda s: edit_json(s / INDEX, weight_map=[]), "weight_map"),
    "absent tensor": (place(SHARD, "ghost"), "ghost"),
    "no file name": (place("a\nb.safetensors"), NO_FILE),
    "file name too long": (place("a" * 300 + ".safetensors"), NO_FILE),
    "another kind of file": (place("pytorch_model.bin"), NO_FILE),
    "above": (place("../other.safetensors"), NO_FILE),
    "above on Windows": (place("..\\other.safetensors"), NO_FILE),
    "missing shard": (lambda s: (s / SHARD).unlink(), SHARD),
    "truncated": (truncate(30_000), SHARD),
}
SINGLE: dict[str, tuple[Damage, str]] = {
    "no weights": (lambda s: (s / MODEL).rename(s / "pytorch_model.bin"), "pytorch_model.bin"),
    "a pointer": (text("version https://git-lfs\noid x\n", MODEL), "LFS"),
    "name of two lines": (lambda s: rewrite(s, **{"a\nb": torch.zeros(1)}), "'a\\nb'"),
    "unknown dtype": (lambda s: rewrite(s, x=torch.zeros(1, dtype=torch.complex64)), "has dtype C64"),
    "quantized, it says": (
        lambda s: edit_json(s / "config.json", quantization_config="int8"),
        "found 'int8'",
    ),
    "modelopt": (text("{}", "hf_quant_config.json"), "already quantized by 'modelopt'"),
    "adapter": (adapter, "of a whole model (it has adapter_config.json: it is a LoRA adapter"),
}


@pytest.mark.parametrize("name", [*SHARDED, *SINGLE])
def test_damaged_checkpoints_are_refused(tmp_path: Path, name: str) -> None:
    source = llama(tmp_path / "source", shards=3 if name in SHARDED else 1)
    damage, words = {**SHARDED, **SINGLE}[name]
    damage(source)
    message = refused(source, words)
    assert message.isprintable()
    assert len(message) < 600


def test_file_that_only_others_may_read_is_not_called_damaged(tmp_path: Path) -> None:
    """The safetensors library says that there is no such file."""
    (llama(tmp_path / "source") / MODEL).chmod(0)
    user = os.geteuid()
    os.seteuid(user or 65534)  # root may read all
    try:
        with pytest.raises(CheckpointError, match=f"{MODEL} cannot be read: Permission denied; ask"):
            read_header(tmp_path / "source" / MODEL)
    finally:
        os.seteuid(user)


def test_index_says_which_of_two_copies_counts(tmp_path: Path) -> None:
    """A tool that wrote some shards again left the old tensor in another."""
    source = llama(tmp_path / "source", shards=3)
    index = json.loads((source / INDEX).read_text())["weight_map"]
    stale = next(name for name, file in index.items() if file == SHARD and "_proj.weight" in name)
    save_file({**load_file(source / OTHER), stale: torch.zeros(8, 8)}, source / OTHER)
    convert(source, tmp_path / "out")
    convert(llama(tmp_path / "fresh", shards=3), tmp_path / "expected")
    assert snapshot(tmp_path / "out") == snapshot(tmp_path / "expected")
    unlisted = json.loads((source / INDEX).read_text())
    del unlisted["weight_map"][stale]
    (source / INDEX).write_text(json.dumps(unlisted))
    refused(source, f"tensor {stale} is in {SHARD} and in {OTHER}", out="x")


@pytest.mark.parametrize("write_model", [llama, bitnets.write_master])
def test_fingerprints_of_finetuned_models_of_one_time_differ(
    tmp_path: Path, write_model: Callable[[Path], Path]
) -> None:
    """As in images of containers, where all files have one time: what is cached of one is not taken for another."""
    folder = write_model(tmp_path / "source")
    prints = set()
    for change in (0, 0, 1):
        tensors = load_file(folder / MODEL)
        tensors[f"{Q}.weight"].view(torch.uint8)[0, 0] += change
        save_file(tensors, folder / MODEL)
        for path in folder.iterdir():
            os.utime(path, (1, 1))
        prints.add(Checkpoint.open(folder).fingerprint)
    assert len(prints) == 2


def test_rows_too_long_to_be_read_are_refused_at_once(tmp_path: Path) -> None:
    """The file is sparse: its 2^37 zeros take no space."""
    source = llama(tmp_path / "source")
    entry = {"dtype": "I8", "shape": [1, 2**37], "data_offsets": [0, 2**37]}
    header = json.dumps({f"{Q}.weight": entry}).encode()
    (source / MODEL).write_bytes(struct.pack("<Q", len(header)) + header)
    os.truncate(source / MODEL, 8 + len(header) + 2**37)
    with pytest.raises(CheckpointError, match=f"tensor {Q}.weight has rows of 137438953472 bytes"):
        inspect(source)


def test_folder_of_another_format_is_refused(tmp_path: Path) -> None:
    for file, words in {
        "adapter_config.json": "LoRA adapter",
        "snapshots": "folder of a revision",
        "params.json": "Mistral or Meta",
        "model.Q4_K_M.gguf": "llama.cpp",
        "pytorch_model.bin": "as safetensors",
    }.items():
        (tmp_path / file).touch()
        with pytest.raises(CheckpointError, match=f"config.json .* is missing .it has {file}: .*{words}"):
            Checkpoint.open(tmp_path)
        (tmp_path / file).unlink()
    with pytest.raises(CheckpointError, match="missing is not a folder"):
        Checkpoint.open(tmp_path / "missing")


def test_consolidated_weights_of_mistral_are_skipped(tmp_path: Path) -> None:
    """Mistral's models come in two formats."""
    source = llama(tmp_path / "source")
    shutil.copy(source / MODEL, source / "consolidated.safetensors")
    assert Checkpoint.open(source).files == (MODEL,)


@pytest.mark.parametrize(("file", "make"), [(MODEL, bitnets.write_master), ("config.json", llama)])
def test_source_that_changes_is_refused(tmp_path: Path, file: str, make: Callable[[Path], Path]) -> None:
    """Such as by a download that goes on: half of the output would be another model's."""
    source = make(tmp_path / "source")

    def change(phase: str, done: int, total: int) -> None:
        os.utime(source / file)

    with pytest.raises(CheckpointError, match=f"{file} was changed while it was read"):
        convert(source, tmp_path / "out", progress=change)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_file_truncated_while_it_is_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A memory map would end in a bus error, which kills the process."""
    source = llama(tmp_path / "source")
    size = (source / MODEL).stat().st_size
    opened = storage.Reader.__enter__

    def cut(self: storage.Reader) -> storage.Reader:
        os.truncate(source / MODEL, size - 100)
        return opened(self)

    monkeypatch.setattr(storage.Reader, "__enter__", cut)
    with pytest.raises(CheckpointError, match=f"{MODEL} became shorter"):
        convert(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()
