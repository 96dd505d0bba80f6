"""Reading and writing of safetensors files, compared with the safetensors library, and damaged files."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import (
    INDEX,
    MODEL,
    Q,
    convert,
    edit_header,
    edit_json,
    llama,
    refused,
    snapshot,
    tensors_of,
    write,
)
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load, save_file
from torch import Tensor

from slidesparse.checkpoint import storage
from slidesparse.checkpoint.inspection import verify
from slidesparse.checkpoint.storage import (
    DTYPES,
    NAMES,
    Checkpoint,
    CheckpointError,
    TensorSpec,
    Writer,
    plan_file,
    read_header,
)
from slidesparse.checkpoint.w8a8 import parse_block

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
    with Writer(path, planned) as writer:
        for spec in planned:
            rows = tensors[spec.name].reshape(spec.rows, spec.columns)
            for row in reversed(range(spec.rows)):  # in any order
                writer.write(spec.name, row, rows[row : row + 1])
    assert plan_file(planned)[2] == path.stat().st_size
    for name, tensor in load(path.read_bytes()).items():
        assert_same(tensor, tensors.pop(name))
    assert tensors == {}
    starts = [(stored.start, DTYPES[stored.spec.dtype].itemsize) for stored in read_header(path)]
    assert all(start % size == 0 for start, size in starts)  # aligned for every mixture of dtypes


@given(specs, st.integers(0, 99))
def test_reader_reads_files_of_safetensors(
    tmp_path_factory: pytest.TempPathFactory, planned: list[TensorSpec], seed: int
) -> None:
    tensors = {spec.name: random_tensor(spec, seed) for spec in planned}
    folder = write(tmp_path_factory.mktemp("read"), {}, tensors)
    checkpoint = Checkpoint.open(folder)
    assert set(checkpoint.tensors) == set(tensors)
    with checkpoint.reader() as reader:
        for name, tensor in tensors.items():
            assert_same(reader.whole(name), tensor)


def assert_same(actual: Tensor, expected: Tensor) -> None:
    """Check for equal bits, in any dtype."""
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    assert torch.equal(*(t.contiguous().view(-1).view(torch.uint8) for t in (actual, expected)))


@given(st.integers(0, 40), st.integers(0, 3000))
def test_chunks_cover_each_row_once_and_stay_small(rows: int, columns: int) -> None:
    chunks = list(TensorSpec("t", "F32", (rows, columns)).chunks())
    assert [row for chunk in chunks for row in range(chunk.start, chunk.stop)] == list(range(rows))
    limit = storage.CHUNK_ELEMENTS
    assert all((chunk.stop - chunk.start) * columns <= max(limit, columns) for chunk in chunks)


def test_dtype_names_equal_those_of_safetensors(tmp_path: Path) -> None:
    save_file({name: torch.zeros(1, dtype=dtype) for name, dtype in DTYPES.items()}, tmp_path / MODEL)
    assert {stored.spec.name: stored.spec.dtype for stored in read_header(tmp_path / MODEL)} == {
        name: name for name in NAMES.values()
    }


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
    convert(source, tmp_path / "out")
    assert set(snapshot(tmp_path / "out")) == {"config.json", "tokenizer.json", MODEL}
    assert not any(path.is_symlink() for path in (tmp_path / "out").iterdir())
    assert verify(tmp_path / "out", tmp_path / "out").equal


@pytest.mark.parametrize("name", ["config.json", MODEL])
@pytest.mark.parametrize("place", ["elsewhere", "models--org--other/blobs"])
def test_links_out_of_the_folder_are_refused(tmp_path: Path, name: str, place: str) -> None:
    source = llama(tmp_path / "models--org--name" / "snapshots" / "abc")
    (tmp_path / place).mkdir(parents=True)
    (source / name).rename(tmp_path / place / name)
    (source / name).symlink_to(tmp_path / place / name)
    refused(source, f"{source / name} is a link out of its folder, to {tmp_path / place / name}")


def test_links_within_the_folder_are_followed(tmp_path: Path) -> None:
    source = llama(tmp_path / "source")
    (source / "below").mkdir()
    (source / MODEL).rename(source / "below" / MODEL)
    (source / MODEL).symlink_to(f"below/{MODEL}")
    convert(source, tmp_path / "out")


# Damage to a checkpoint of three shards, or of one, and the fact that the error must name

SHARD = "model-00001-of-00003.safetensors"
OTHER = "model-00002-of-00003.safetensors"


def places(source: Path, **files: object) -> None:
    """Change the index's files of tensors."""
    index = json.loads((source / INDEX).read_text())
    index["weight_map"].update({name.replace("__", "."): file for name, file in files.items()})
    (source / INDEX).write_text(json.dumps(index))


def double_a_tensor(source: Path) -> None:
    tensors, index = tensors_of(source), json.loads((source / INDEX).read_text())["weight_map"]
    shard = {name: tensors[name] for name, file in index.items() if file == OTHER}
    doubled = next(name for name, file in index.items() if file == SHARD)
    save_file({**shard, doubled: tensors[doubled]}, source / OTHER)


def append(source: Path) -> None:
    with (source / SHARD).open("ab") as file:
        file.write(b"more")


def outside(file: str) -> Callable[[Path], None]:
    def change(source: Path) -> None:
        shutil.copy(source / SHARD, source.parent / "other.safetensors")
        places(source, **{Q.replace(".", "__") + "__weight": file})

    return change


def truncate(size: int) -> Callable[[Path], None]:
    return lambda source: os.truncate(source / SHARD, size)


def deep(path: Path) -> None:
    path.write_text('{"a":' + "[" * 100_000 + "]" * 100_000 + "}")


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def pipe(path: Path) -> None:
    """Replace the file by a pipe; reading it would wait for a writer."""
    path.unlink()
    os.mkfifo(path)


SHARDED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no config": (lambda source: (source / "config.json").unlink(), "config.json"),
    "config no JSON": (lambda source: (source / "config.json").write_text("{"), "config.json"),
    "config a list": (lambda source: (source / "config.json").write_text("[]"), "found []"),
    "config too deep": (lambda source: deep(source / "config.json"), "nested too deeply"),
    "config a number of 5000 digits": (
        lambda source: (source / "config.json").write_text(f'{{"a": {"9" * 5000}}}'),
        "4300 digits",
    ),
    "config half a pair": (
        lambda source: (source / "config.json").write_text('{"a": "\\ud800"}'),
        "surrogate",
    ),
    "config a folder": (lambda source: folder(source / "config.json"), "config.json is not a file"),
    "config a pipe": (lambda source: pipe(source / "config.json"), "config.json is not a file"),
    "config too large": (
        lambda source: os.truncate(source / "config.json", storage.JSON_LIMIT + 1),
        f"at most {storage.JSON_LIMIT} are read",
    ),
    "index too deep": (lambda source: deep(source / INDEX), "nested too deeply"),
    "no file name": (lambda source: places(source, ghost="a\nb.safetensors"), "names no file"),
    "file name too long": (lambda source: places(source, ghost="a" * 300 + ".safetensors"), "names no file"),
    "shard a pipe": (lambda source: pipe(source / SHARD), f"{SHARD}"),
    "no index": (lambda source: (source / INDEX).unlink(), f"no {INDEX}"),
    "index no JSON": (lambda source: (source / INDEX).write_text("{"), INDEX),
    "no map": (lambda source: edit_json(source / INDEX, weight_map=None), "weight_map"),
    "empty map": (lambda source: edit_json(source / INDEX, weight_map={}), "weight_map"),
    "map a list": (lambda source: edit_json(source / INDEX, weight_map=[]), "weight_map"),
    "absent tensor": (lambda source: places(source, ghost=SHARD), "ghost"),
    "another kind of file": (lambda source: places(source, ghost="pytorch_model.bin"), "pytorch_model.bin"),
    "above": (outside("../other.safetensors"), "outside the folder"),
    "elsewhere": (outside("/etc/other.safetensors"), "outside the folder"),
    "below": (outside("a/b.safetensors"), "outside the folder"),
    "above on Windows": (outside("..\\other.safetensors"), "outside the folder"),
    "missing shard": (lambda source: (source / SHARD).unlink(), SHARD),
    "truncated": (truncate(30_000), "is 30000 bytes"),
    "truncated in the header": (truncate(1000), "is 1000 bytes"),
    "truncated at once": (truncate(4), "is 4 bytes"),
    "trailing data": (append, "followed by other data"),
    "a tensor twice": (double_a_tensor, OTHER),
}
ENTRY = f"{Q}.weight".replace(".", "__")
SINGLE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no weights": (lambda source: (source / MODEL).rename(source / "pytorch_model.bin"), "pytorch_model.bin"),
    "a pointer": (lambda source: (source / MODEL).write_text("version https://git-lfs\noid x\n"), "LFS"),
    "header a list": (lambda source: edit_header(source / MODEL, "[1]"), "found [1]"),
    "header no JSON": (lambda source: edit_header(source / MODEL, "{"), MODEL),
    "a name twice": (lambda source: edit_header(source / MODEL, '{"a": {}, "a": {}}'), "'a' appears twice"),
    "header too deep": (lambda source: edit_header(source / MODEL, '{"a":' * 100_000), "nested too deeply"),
    "name of two lines": (lambda source: edit_header(source / MODEL, '{"a\\nb": {}}'), "'a\\nb'"),
    "name half a pair": (lambda source: edit_header(source / MODEL, '{"\\ud800": {}}'), "printable"),
    "empty and endless": (
        lambda source: edit_header(source / MODEL, **{ENTRY: {"shape": [2**62, 0]}}),
        "whole numbers from 0 to",
    ),
    "many dimensions": (
        lambda source: edit_header(source / MODEL, **{ENTRY: {"shape": [1] * 9}}),
        "at most 8",
    ),
    "shape a text": (lambda source: edit_header(source / MODEL, **{ENTRY: {"shape": "64"}}), "at most 8"),
    "shape of yes": (lambda source: edit_header(source / MODEL, **{ENTRY: {"shape": [True, 64]}}), "True"),
    "notes a text": (lambda source: edit_header(source / MODEL, '{"__metadata__": "x"}'), "__metadata__"),
    "a note a number": (
        lambda source: edit_header(source / MODEL, '{"__metadata__": {"a": 1}}'),
        "of strings",
    ),
    "entry no object": (lambda source: edit_header(source / MODEL, '{"a": 3}'), MODEL),
    "unknown dtype": (lambda source: edit_header(source / MODEL, **{ENTRY: {"dtype": "F4"}}), "'F4'"),
    "too few bytes": (lambda source: edit_header(source / MODEL, **{ENTRY: {"shape": [3, 3]}}), "18 bytes"),
    "negative shape": (lambda source: edit_header(source / MODEL, **{ENTRY: {"shape": [-1, 64]}}), "-1"),
    "overlap": (lambda source: edit_header(source / MODEL, **{ENTRY: {"data_offsets": [0, 2]}}), MODEL),
    "no offsets": (lambda source: edit_header(source / MODEL, **{ENTRY: {"data_offsets": None}}), MODEL),
    "quantization no object": (
        lambda source: edit_json(source / "config.json", quantization_config="int8"),
        "found 'int8'",
    ),
}


@pytest.mark.parametrize("name", [*SHARDED, *SINGLE])
def test_damaged_checkpoints_are_refused(tmp_path: Path, name: str) -> None:
    sharded = name in SHARDED
    source = llama(tmp_path / "source", shards=3 if sharded else 1)
    damage, fact = (SHARDED if sharded else SINGLE)[name]
    damage(source)
    before = snapshot(source)
    with pytest.raises(CheckpointError) as error:
        Checkpoint.open(source).quantization_config()
    assert fact in str(error.value)
    assert snapshot(source) == before


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("adapter_config.json", "LoRA adapter"),
        ("snapshots", "folder of a revision"),
        ("params.json", "Mistral or Meta"),
        ("model.Q4_K_M.gguf", "llama.cpp"),
        ("pytorch_model.bin", "as safetensors"),
    ],
)
def test_folder_of_another_format_is_refused(tmp_path: Path, file: str, message: str) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / file).touch()
    with pytest.raises(CheckpointError, match=f"config.json .* is missing .it has {file}: .*{message}"):
        Checkpoint.open(source)


def test_adapter_that_has_a_config_is_refused(tmp_path: Path) -> None:
    """Training tools may save the base model's config.json with it."""
    source = llama(tmp_path / "source")
    (source / MODEL).rename(source / "adapter_model.safetensors")
    (source / "adapter_config.json").touch()
    refused(source, "no .safetensors file of a whole model (it has adapter_config.json: it is a LoRA adapter")


def test_consolidated_weights_of_mistral_are_skipped(tmp_path: Path) -> None:
    """Mistral's models come in two formats."""
    source = llama(tmp_path / "source")
    shutil.copy(source / MODEL, source / "consolidated.safetensors")
    assert Checkpoint.open(source).files == (MODEL,)


@pytest.mark.parametrize(
    ("file", "tool"),
    [("hf_quant_config.json", "modelopt"), ("quantize_config.json", "gptq"), ("quant_config.json", "awq")],
)
def test_quantization_config_files_of_other_tools_are_refused(tmp_path: Path, file: str, tool: str) -> None:
    source = llama(tmp_path / "source")
    (source / file).write_text("{}")
    with pytest.raises(CheckpointError, match=f"already quantized by '{tool}'"):
        parse_block(Checkpoint.open(source).quantization_config() or {})


@pytest.mark.parametrize("dtype", [torch.uint32, torch.float8_e8m0fnu])
def test_dtypes_of_other_quantizations_are_not_called_damage(tmp_path: Path, dtype: torch.dtype) -> None:
    source = llama(tmp_path / "source", extra=torch.zeros(4, dtype=torch.uint8).view(dtype))
    with pytest.raises(CheckpointError, match="tensor extra has dtype .*; start from the original") as error:
        Checkpoint.open(source)
    assert "damaged" not in str(error.value)


def test_empty_tensors_have_at_most_one_chunk() -> None:
    """Otherwise they would be read in many empty chunks."""
    assert len(list(TensorSpec("t", "F32", (2**40, 0)).chunks())) == 1
    assert list(TensorSpec("t", "F32", (0, 5)).chunks()) == []


def test_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="missing"):
        Checkpoint.open(tmp_path / "missing")


def test_file_truncated_while_reading_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
