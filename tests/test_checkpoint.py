"""Files written here are what the safetensors library reads, and the other way round; inspect and verify."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoints import DOWN, MODEL, Q, bert, config_of, edit_json, llama, tensors_of, w8a8, write
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load, load_file, save_file
from strategies import assert_same_bits
from torch import Tensor

from slidesparse import checkpoint as checkpoint_module
from slidesparse.checkpoint import DTYPES, NAMES, Checkpoint, TensorSpec, Writer, plan_file, read_header
from slidesparse.convert import convert, is_finite
from slidesparse.inspection import RATIOS, inspect, verify
from slidesparse.pattern import SlidePattern
from slidesparse.prune import prune
from slidesparse.slide import bits
from slidesparse.stored import DamagedError

SIX_EIGHT = SlidePattern.parse("6:8")
shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)
dtypes = st.sampled_from(sorted(DTYPES))
specs = st.lists(st.tuples(dtypes, shapes), max_size=6).map(
    lambda found: [TensorSpec(f"t{i}", *spec) for i, spec in enumerate(found)]
)


def random_tensor(spec: TensorSpec, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    high = 2 if spec.dtype == "BOOL" else 256
    raw = torch.randint(0, high, (spec.nbytes,), generator=generator, dtype=torch.uint8)
    return raw.view(DTYPES[spec.dtype]).reshape(spec.shape)


@given(specs, st.integers(0, 99))
def test_written_files_are_read_by_the_safetensors_library(
    tmp_path_factory: pytest.TempPathFactory, planned: list[TensorSpec], seed: int
) -> None:
    path = tmp_path_factory.mktemp("written") / MODEL
    writer = Writer(path, planned)
    tensors = {spec.name: random_tensor(spec, seed) for spec in planned}
    for spec in planned:
        rows = tensors[spec.name].reshape(spec.rows, spec.columns)
        for row in reversed(range(spec.rows)):  # in any order
            writer.write(spec.name, row, rows[row : row + 1])
    writer.close()
    assert plan_file(planned)[2] == path.stat().st_size
    for name, tensor in load(path.read_bytes()).items():
        assert_same(tensor, tensors.pop(name))
    assert tensors == {}
    starts = [(stored.start, DTYPES[stored.spec.dtype].itemsize) for stored in read_header(path)]
    assert all(start % size == 0 for start, size in starts)  # aligned, whatever the mixture


@given(specs, st.integers(0, 99))
def test_files_of_the_safetensors_library_are_read(
    tmp_path_factory: pytest.TempPathFactory, planned: list[TensorSpec], seed: int
) -> None:
    tensors = {spec.name: random_tensor(spec, seed) for spec in planned}
    folder = write(tmp_path_factory.mktemp("read"), {}, tensors)
    found = Checkpoint.open(folder)
    assert set(found.tensors) == set(tensors)
    with found.reader() as reader:
        for name, tensor in tensors.items():
            assert_same(reader.whole(name), tensor)


def assert_same(found: Tensor, expected: Tensor) -> None:
    """Bit for bit, for the dtypes `assert_same_bits` does not know too."""
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    assert torch.equal(*(t.contiguous().view(-1).view(torch.uint8) for t in (found, expected)))


@given(st.integers(0, 40), st.integers(0, 3000))
def test_chunks_cover_each_row_once_and_stay_small(rows: int, columns: int) -> None:
    chunks = list(TensorSpec("t", "F32", (rows, columns)).chunks())
    assert [row for chunk in chunks for row in range(chunk.start, chunk.stop)] == list(range(rows))
    limit = checkpoint_module.CHUNK_ELEMENTS
    assert all((chunk.stop - chunk.start) * columns <= max(limit, columns) for chunk in chunks)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("value", [torch.nan, -torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("place", [0, 31, 32, 1000])
def test_one_value_that_is_not_finite_is_seen(dtype: torch.dtype, value: float, place: int) -> None:
    x = torch.randn(1001).to(dtype)
    assert is_finite(x)
    x[place] = value
    assert not is_finite(x)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_each_byte_of_fp8_is_judged_as_torch_does(dtype: torch.dtype) -> None:
    for code in range(-128, 128):
        x = torch.tensor([1, code, 2], dtype=torch.int8).view(dtype)
        assert is_finite(x) == bool(torch.isfinite(x.float()).all())
    assert is_finite(torch.ones(0, 4).to(dtype))
    assert is_finite(torch.tensor([127, -1], dtype=torch.int8))


def test_symbolic_links_to_files_are_followed(tmp_path: Path) -> None:
    """A download cache keeps its files elsewhere and links to them."""
    source = llama(tmp_path / "source")
    (tmp_path / "blobs").mkdir()
    (source / MODEL).rename(tmp_path / "blobs" / "0123")
    (source / MODEL).symlink_to("../blobs/0123")
    convert(source, tmp_path / "out", pattern=SIX_EIGHT)
    assert not (tmp_path / "out" / MODEL).is_symlink()
    assert verify(tmp_path / "out", tmp_path / "out").equal


# inspect


@pytest.mark.parametrize("layout", ["dense", "slided"])
def test_inspect_of_a_converted_checkpoint(tmp_path: Path, layout: str) -> None:
    convert(
        llama(tmp_path / "source"), tmp_path / "out", pattern=SIX_EIGHT, layout=layout, ignore=["0.*down"]
    )
    report = inspect(tmp_path / "out")
    assert (report.pattern, report.layout, report.violations) == ("6:8", layout, 0)
    layers = {layer.name: layer for layer in report.layers}
    assert len(layers) == 14
    q, down = layers[Q], layers[DOWN]
    assert (q.out_features, q.in_features, q.dtype) == (64, 64, "I8")
    assert (q.pattern, q.satisfies, q.violations, q.first_violation, q.expansion) == (
        "6:8",
        "6:8",
        0,
        None,
        1.5,
    )
    stored = tensors_of(tmp_path / "out")
    assert q.bytes == stored[f"{Q}.weight"].nbytes + stored[f"{Q}.weight_scale"].nbytes
    assert (down.pattern, down.satisfies, down.dtype, down.expansion) == (None, None, "BF16", None)
    assert (down.out_features, down.in_features) == (64, 88)


@pytest.mark.parametrize("ratio", RATIOS)
def test_inspect_finds_the_pattern_of_weights_that_claim_none(
    tmp_path: Path, ratio: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_module, "CHUNK_ELEMENTS", 640)
    pattern = SlidePattern.parse(ratio)
    source = w8a8(tmp_path / "source")
    tensors = tensors_of(source)
    tensors[f"{Q}.weight"] = prune(tensors[f"{Q}.weight"], pattern)
    write(source, config_of(source), tensors)
    layers = {layer.name: layer for layer in inspect(source).layers}
    assert (layers[Q].pattern, layers[Q].satisfies, layers[Q].violations) == (None, ratio, 0)
    assert layers[Q].expansion == pattern.layout(64).slided / 64
    assert layers[DOWN].satisfies is None


@pytest.mark.parametrize("layout", ["dense", "slided"])
def test_inspect_counts_violations_over_all_chunks(
    tmp_path: Path, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_module, "CHUNK_ELEMENTS", 640)
    out = tmp_path / "out"
    convert(llama(tmp_path / "source"), out, pattern=SIX_EIGHT, layout=layout)
    tensors = tensors_of(out)
    for row in (11, 45):  # of different chunks
        tensors[f"{Q}.weight"][row] = 1
    write(out, config_of(out), tensors)
    report = inspect(out)
    (broken,) = (layer for layer in report.layers if layer.violations)
    assert (broken.name, broken.violations, broken.satisfies) == (Q, 16, None)  # 2 rows of 64 / 8 blocks
    assert broken.first_violation is not None
    assert broken.first_violation.startswith(f"{Q}: row 11, block 0 (columns from 0) has 8 non-zeros")
    assert report.violations == 16
    assert report.to_json()["violations"] == 16


def test_inspect_of_an_unknown_architecture_takes_all_matrices(tmp_path: Path) -> None:
    source = bert(tmp_path / "source", architecture="NewModel")
    names = [layer.name for layer in inspect(source).layers]
    assert len(names) == 13
    assert "pooler.dense" in names
    assert not any("embed" in name for name in names)


# verify


@pytest.fixture
def both(tmp_path: Path) -> tuple[Path, Path]:
    """The same model in both layouts, in one file and in three."""
    convert(llama(tmp_path / "one"), tmp_path / "dense", pattern=SIX_EIGHT)
    convert(llama(tmp_path / "three", shards=3), tmp_path / "slided", pattern=SIX_EIGHT, layout="slided")
    return tmp_path / "dense", tmp_path / "slided"


def test_verify_sees_through_layouts_and_shards(both: tuple[Path, Path]) -> None:
    for pair in (both, both[::-1]):
        found = verify(*pair)
        assert (found.equal, found.difference, found.slided) == (True, None, 14)
        assert found.tensors == len(tensors_of(both[0]))


@pytest.mark.parametrize("name", [f"{Q}.weight", f"{Q}.weight_scale", "lm_head.weight", f"{DOWN}.bias"])
def test_verify_names_the_first_difference(
    both: tuple[Path, Path], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_module, "CHUNK_ELEMENTS", 640)
    tensors = tensors_of(both[0])
    flat = bits(tensors[name]).view(-1, tensors[name].shape[-1] if tensors[name].dim() > 1 else 1)
    row, column = next(divmod(int(i), flat.shape[1]) for i in flat[30:].flatten().nonzero().flatten())
    row += 30
    flat[row, column] ^= 1
    expected = flat[row, column].item(), flat[row, column].item() ^ 1
    write(both[0], config_of(both[0]), tensors)
    difference = verify(*both).difference
    assert difference is not None
    assert (difference.tensor, difference.row, difference.column) == (name, row, column)
    assert difference.first != difference.second
    if name == f"{Q}.weight":
        assert (difference.first, difference.second) == tuple(map(str, expected))


def test_verify_tells_zeros_apart(tmp_path: Path) -> None:
    for name, zero in (("a", 0.0), ("b", -0.0)):
        write(tmp_path / name, {}, {"x": torch.tensor([[1.0, zero]]).bfloat16()})
    difference = verify(tmp_path / "a", tmp_path / "b").difference
    assert str(difference) == "x: row 0, column 1: 0 (bits 0x0000) and -0 (bits 0x8000)"


@pytest.mark.parametrize("reverse", [False, True])
def test_verify_misses_no_tensor(both: tuple[Path, Path], reverse: bool) -> None:
    tensors = tensors_of(both[0])
    del tensors[f"{DOWN}.bias"]
    write(both[0], config_of(both[0]), tensors)
    difference = verify(*(both[::-1] if reverse else both)).difference
    assert str(difference) == f"{DOWN}.bias: is in {both[1]} but not in {both[0]}"


def test_verify_compares_dtypes_and_shapes(tmp_path: Path) -> None:
    for name, tensor in (("a", torch.ones(2, 3)), ("b", torch.ones(3, 2)), ("c", torch.ones(2, 3).half())):
        write(tmp_path / name, {}, {"x": tensor})
    assert str(verify(tmp_path / "a", tmp_path / "b").difference) == "x: is F32 [2, 3] and F32 [3, 2]"
    assert str(verify(tmp_path / "a", tmp_path / "c").difference) == "x: is F32 [2, 3] and F16 [2, 3]"


def test_verify_refuses_slided_rows_that_hide_something(both: tuple[Path, Path]) -> None:
    path = next(p for p in both[1].glob("*.safetensors") if f"{Q}.weight" in load_file(p))
    tensors = load_file(path)
    row = tensors[f"{Q}.weight"][7].view(-1, 3, 4)
    block, pair = next(
        (b, p) for b in range(len(row)) for p in (0, 1) if row[b, 1, p] != 0 and row[b, 0, p + 2] == 0
    )
    row[block, 0, pair + 2] = row[block, 1, pair]
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(DamagedError, match="row 7 is not the slided form of any weight"):
        verify(*both)


def test_older_config_name_is_read(tmp_path: Path) -> None:
    convert(llama(tmp_path / "source"), tmp_path / "out", pattern=SIX_EIGHT)
    block = config_of(tmp_path / "out")["quantization_config"]
    edit_json(tmp_path / "out" / "config.json", quantization_config=None, compression_config=block)
    assert inspect(tmp_path / "out").pattern == "6:8"


def test_dtype_names_are_those_of_the_library(tmp_path: Path) -> None:
    save_file({name: torch.zeros(1, dtype=dtype) for name, dtype in DTYPES.items()}, tmp_path / MODEL)
    assert {stored.spec.name: stored.spec.dtype for stored in read_header(tmp_path / MODEL)} == {
        name: name for name in NAMES.values()
    }


def test_bits_of_rows_survive(tmp_path: Path) -> None:
    weight = torch.tensor([[0.0, -0.0, 1.0, torch.finfo(torch.float32).tiny]])
    with Checkpoint.open(write(tmp_path, {}, {"x": weight})).reader() as reader:
        assert_same_bits(reader.rows("x", slice(0, 1)), weight)
