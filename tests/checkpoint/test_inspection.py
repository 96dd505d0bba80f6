"""``slidesparse inspect`` and ``verify`` as functions: violations, unlisted patterns, first differences."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoints import DOWN, Q, bert, config_of, convert, llama, tensors_of, w8a8, write
from commands import Done
from safetensors.torch import load_file, save_file

from slidesparse.checkpoint.converted import DamagedError
from slidesparse.checkpoint.inspection import RATIOS, inspect, verify
from slidesparse.pattern import SlidePattern
from slidesparse.prune import prune
from slidesparse.slide import bits


@pytest.mark.parametrize("layout", ["dense", "slided"])
def test_inspect_of_a_converted_checkpoint(tmp_path: Path, layout: str) -> None:
    convert(llama(tmp_path / "source"), tmp_path / "out", layout=layout, ignore=["0.*down"])
    report = inspect(tmp_path / "out")
    assert (report.pattern, report.layout, report.violations) == ("6:8", layout, 0)
    layers = {layer.name: layer for layer in report.layers}
    assert len(layers) == 14
    q, down = layers[Q], layers[DOWN]
    assert (q.out_features, q.in_features, q.dtype, q.expansion) == (64, 64, "I8", 1.5)
    assert (q.pattern, q.satisfies, q.violations, q.first_violation) == ("6:8", "6:8", 0, None)
    stored = tensors_of(tmp_path / "out")
    assert q.bytes == stored[f"{Q}.weight"].nbytes + stored[f"{Q}.weight_scale"].nbytes
    assert (down.pattern, down.satisfies, down.dtype, down.expansion) == (None, None, "BF16", None)
    assert (down.out_features, down.in_features) == (64, 88)


@pytest.mark.parametrize("ratio", RATIOS)
def test_inspect_finds_pattern_of_weights_without_metadata(tmp_path: Path, ratio: str) -> None:
    pattern = SlidePattern.parse(ratio)
    source = w8a8(tmp_path / "source")
    tensors = tensors_of(source)
    tensors[f"{Q}.weight"] = prune(tensors[f"{Q}.weight"], pattern)
    write(source, config_of(source), tensors)
    layers = {layer.name: layer for layer in inspect(source).layers}
    assert (layers[Q].pattern, layers[Q].satisfies, layers[Q].violations) == (None, ratio, 0)
    assert layers[Q].expansion == pattern.layout(64).slided / 64
    assert layers[DOWN].satisfies is None


@pytest.mark.parametrize("suffix", [".weight_packed", "._weight_qdata"])
def test_inspect_counts_weights_in_formats_of_other_tools(tmp_path: Path, suffix: str) -> None:
    """llmcompressor 0.14 with W4A16 stores eight codes of four bits in an INT32; torchao 0.18 names all codes so."""
    source = llama(tmp_path / "source", **{f"{DOWN}.weight".replace(".", "__"): None})
    packed = {f"{DOWN}{suffix}": torch.zeros(64, 11, dtype=torch.int32)}
    write(source, config_of(source), tensors_of(source) | packed)
    report = inspect(source)
    assert (report.unread, len(report.layers)) == (1, 13)
    assert "\nweights in another tool's format, which are not read: 1\n" in Done("inspect", source).out


@pytest.mark.parametrize("layout", ["dense", "slided"])
def test_inspect_counts_violations_over_all_chunks(tmp_path: Path, layout: str) -> None:
    out = tmp_path / "out"
    convert(llama(tmp_path / "source"), out, layout=layout)
    tensors = tensors_of(out)
    for row in (11, 45):  # of different chunks
        tensors[f"{Q}.weight"][row] = 1
    write(out, config_of(out), tensors)
    report = inspect(out)
    (broken,) = (layer for layer in report.layers if layer.violations)
    assert (broken.name, broken.violations, broken.satisfies) == (Q, 16, None)  # 2 rows of 64 / 8 blocks
    assert broken.first_violation is not None
    assert f"{Q}: row 11, block 0 (columns from 0) has 8 non-zeros" in broken.first_violation
    assert report.to_json()["violations"] == 16


def test_inspect_of_an_unknown_architecture_takes_all_matrices(tmp_path: Path) -> None:
    source = bert(tmp_path / "source", architecture="NewModel")
    names = [layer.name for layer in inspect(source).layers]
    assert len(names) == 13
    assert "pooler.dense" in names
    assert not any("embed" in name for name in names)


@pytest.fixture
def dense_and_slided(tmp_path: Path) -> tuple[Path, Path]:
    """The same model in both layouts, in one file and in three."""
    convert(llama(tmp_path / "one"), tmp_path / "dense")
    convert(llama(tmp_path / "three", shards=3), tmp_path / "slided", layout="slided")
    return tmp_path / "dense", tmp_path / "slided"


def test_verify_compares_across_layouts_and_shards(dense_and_slided: tuple[Path, Path]) -> None:
    for pair in (dense_and_slided, dense_and_slided[::-1]):
        result = verify(*pair)
        assert (result.equal, result.difference, result.slided) == (True, None, 14)
        assert result.tensors == len(tensors_of(dense_and_slided[0]))


@pytest.mark.parametrize("name", [f"{Q}.weight", f"{Q}.weight_scale", "lm_head.weight", f"{DOWN}.bias"])
def test_verify_names_the_first_difference(dense_and_slided: tuple[Path, Path], name: str) -> None:
    tensors = tensors_of(dense_and_slided[0])
    flat = bits(tensors[name]).view(-1, tensors[name].shape[-1] if tensors[name].dim() > 1 else 1)
    row, column = next(divmod(int(i), flat.shape[1]) for i in flat[30:].flatten().nonzero().flatten())
    row += 30
    flat[row, column] ^= 1
    expected = flat[row, column].item(), flat[row, column].item() ^ 1
    write(dense_and_slided[0], config_of(dense_and_slided[0]), tensors)
    difference = verify(*dense_and_slided).difference
    assert difference is not None
    assert (difference.tensor, difference.row, difference.column) == (name, row, column)
    assert difference.first != difference.second
    if name == f"{Q}.weight":
        assert (difference.first, difference.second) == tuple(map(str, expected))


def test_verify_distinguishes_negative_zero(tmp_path: Path) -> None:
    for name, zero in (("a", 0.0), ("b", -0.0)):
        write(tmp_path / name, {}, {"x": torch.tensor([[1.0, zero]]).bfloat16()})
    difference = verify(tmp_path / "a", tmp_path / "b").difference
    assert str(difference) == "x: row 0, column 1: 0 (bits 0x0000) and -0 (bits 0x8000)"


@pytest.mark.parametrize("reverse", [False, True])
def test_verify_reports_missing_tensors(dense_and_slided: tuple[Path, Path], reverse: bool) -> None:
    tensors = tensors_of(dense_and_slided[0])
    del tensors[f"{DOWN}.bias"]
    write(dense_and_slided[0], config_of(dense_and_slided[0]), tensors)
    difference = verify(*(dense_and_slided[::-1] if reverse else dense_and_slided)).difference
    assert str(difference) == f"{DOWN}.bias: is in {dense_and_slided[1]} but not in {dense_and_slided[0]}"


def test_verify_compares_dtypes_and_shapes(tmp_path: Path) -> None:
    for name, tensor in (("a", torch.ones(2, 3)), ("b", torch.ones(3, 2)), ("c", torch.ones(2, 3).half())):
        write(tmp_path / name, {}, {"x": tensor})
    assert "F32 [2, 3] and F32 [3, 2]" in str(verify(tmp_path / "a", tmp_path / "b").difference)
    assert "F32 [2, 3] and F16 [2, 3]" in str(verify(tmp_path / "a", tmp_path / "c").difference)


def test_verify_refuses_slided_rows_with_split_weights(dense_and_slided: tuple[Path, Path]) -> None:
    """The two positions of one weight hold parts of its bits, which unslide would combine to a plausible weight."""
    path = next(p for p in dense_and_slided[1].glob("*.safetensors") if f"{Q}.weight" in load_file(p))
    tensors = load_file(path)
    row = tensors[f"{Q}.weight"][7].view(-1, 3, 4)
    block, pair = next(
        (b, p) for b in range(len(row)) for p in (0, 1) if row[b, 1, p] != 0 and row[b, 0, p + 2] == 0
    )
    row[block, 0, pair + 2] = row[block, 1, pair]
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(DamagedError, match=f"{Q}: row 7 "):
        verify(*dense_and_slided)
    with pytest.raises(DamagedError, match=f"{Q}: row 7 "):  # conversion refuses it too
        convert(dense_and_slided[1], dense_and_slided[1].parent / "again")
