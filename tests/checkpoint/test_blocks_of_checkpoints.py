"""Conversion, inspection, damage and synthesis of checkpoints in which a share of the blocks is 2:4."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from calibration import calibrated, write_ids
from checkpoints import MODEL, config_of, convert, refused, tensors_of
from models import Decoder, write_float, write_w8a8
from safetensors.torch import save_file
from strategies import assert_same_bits

from slidesparse.blocks import BLOCK, STRIP, dense_blocks, obeys
from slidesparse.checkpoint import storage
from slidesparse.checkpoint.inspection import inspect
from slidesparse.checkpoint.metadata import KEY, Metadata, MetadataError
from slidesparse.checkpoint.storage import CheckpointError
from slidesparse.convert.synth import synth
from slidesparse.errors import CheckFailed
from slidesparse.pattern import parse_pattern
from slidesparse.quantize import NAMES, quantize_rows

WIDE = Decoder("LlamaForCausalLM", hidden=256, intermediate=512, head_dim=64, vocabulary=64)
HALF = parse_pattern("2:4@50%")
UP = "model.layers.1.mlp.up_proj"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_float(WIDE, tmp_path_factory.mktemp("blocks") / "source")


def shares(folder: Path) -> dict[str, float]:
    """The share of 2:4 blocks of each linear layer."""
    return {
        name: float((~dense_blocks(w)).float().mean())
        for name, w in tensors_of(folder).items()
        if name.endswith("_proj.weight")
    }


@pytest.mark.parametrize("quant", ["int8", "fp8"])
def test_convert_prunes_half_of_the_blocks(
    tmp_path: Path, source: Path, quant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = convert(source, tmp_path / "out", "2_4@50%", quant=quant)
    assert report.pattern == HALF
    assert set(shares(tmp_path / "out").values()) == {0.5}
    block = config_of(tmp_path / "out")["quantization_config"]
    assert block["quant_method"] == "compressed-tensors"  # stock vLLM serves it
    assert Metadata.from_json(block[KEY]).layers[UP].pattern == HALF
    inspected = inspect(tmp_path / "out")
    assert (inspected.pattern, inspected.violations) == ("2:4@50%", 0)
    layers = {layer.name: layer for layer in inspected.layers}
    assert (layers[UP].pattern, layers[UP].satisfies, layers[UP].expansion) == ("2:4@50%", None, 1.0)
    monkeypatch.setattr(storage, "CHUNK_ELEMENTS", 256 * 100)  # a hundred rows, less than two strips
    convert(source, tmp_path / "again", "2:4@50%", quant=quant)
    assert inspect(tmp_path / "again").violations == 0
    codes = convert(write_w8a8(WIDE, tmp_path / "w8a8"), tmp_path / "codes", "2:4@50%", layer=["down=4:6"])
    assert codes.patterns["model.layers.0.mlp.down_proj"].ratio == "4:6"
    assert shares(tmp_path / "codes")[f"{UP}.weight"] == 0.5


@pytest.mark.parametrize("quant", ["int8", "fp8"])
def test_dense_conversion_only_quantizes(tmp_path: Path, source: Path, quant: str) -> None:
    """It writes the codes that 2_inf has, also with calibration if no channels are scaled."""
    report = convert(source, tmp_path / "dense", "dense", quant=quant)
    assert report.pattern == parse_pattern("dense")
    assert {layer.pattern for layer in inspect(tmp_path / "dense").layers} == {"dense"}
    convert(source, tmp_path / "2_inf", "2_inf", quant=quant)
    tensors, floats = tensors_of(tmp_path / "dense"), tensors_of(source)
    for name in report.patterns:
        codes, scale = quantize_rows(floats[f"{name}.weight"], NAMES[quant])
        assert_same_bits(tensors[f"{name}.weight"], codes)
        assert torch.equal(tensors[f"{name}.weight_scale"].flatten(), scale.flatten())
    ids = write_ids(tmp_path / "ids.npy")
    unchanged = calibrated(source, tmp_path / "calibrated", ids, pattern="dense", quant=quant)
    assert not unchanged.rotation
    for folder in ("2_inf", "calibrated"):
        other = tensors_of(tmp_path / folder)
        assert other.keys() == tensors.keys()
        assert all(torch.equal(other[name], tensor) for name, tensor in tensors.items()), folder
    scaled = calibrated(source, tmp_path / "scaled", ids, pattern="dense", quant=quant, rotate="auto")
    assert not scaled.rotation
    assert bool(scaled.smoothing) == (quant == "int8")
    convert(tmp_path / "dense", tmp_path / "again", "dense")
    assert all(torch.equal(tensors_of(tmp_path / "again")[name], w) for name, w in tensors.items())
    convert(tmp_path / "dense", tmp_path / "pruned", "6:8")
    assert {layer.pattern for layer in inspect(tmp_path / "pruned").layers} == {"6:8"}
    assert inspect(tmp_path / "pruned").violations == 0


@pytest.mark.parametrize("method", ["sparsegpt", "wanda"])
def test_calibrated_conversion_of_a_share_of_blocks(tmp_path: Path, source: Path, method: str) -> None:
    ids = write_ids(tmp_path / "ids.npy")
    third = "2:4@33.3%"
    report = calibrated(source, tmp_path / "out", ids, pattern=third, method=method, check=True)
    assert inspect(tmp_path / "out").violations == 0
    for name, w in tensors_of(tmp_path / "out").items():
        if name.endswith("_proj.weight"):
            assert obeys(w, parse_pattern(third))
            assert 0.33 < float((~dense_blocks(w)).float().mean()) <= 0.5
    pruned_all = calibrated(source, tmp_path / "all", ids, pattern="2:4", method=method, check=True)
    for row, other in zip(report.layers, pruned_all.layers, strict=True):
        assert row["violations"] == 0
        assert row["error_pruned"] < 0.8 * other["error_pruned"], row["name"]


def test_inspect_and_convert_find_violations(tmp_path: Path, source: Path) -> None:
    convert(source, tmp_path / "out", "2:4@50%")
    tensors = tensors_of(tmp_path / "out")
    strip, block = (int(i) for i in (~dense_blocks(tensors[f"{UP}.weight"])).nonzero()[3])
    tensors[f"{UP}.weight"][STRIP * strip, BLOCK * block : BLOCK * (block + 1)] = 1
    save_file(tensors, tmp_path / "out" / MODEL, metadata={"format": "pt"})
    violated = {layer.name: layer for layer in inspect(tmp_path / "out").layers if layer.violations}
    assert list(violated) == [UP]
    assert violated[UP].violations == 1
    assert "2:4@50% needs 1 more" in str(violated[UP].first_violation)
    with pytest.raises(CheckFailed, match="needs 1 more"):
        convert(tmp_path / "out", tmp_path / "again", "2:4@50%", check=True)


def test_convert_refuses_block_patterns_it_cannot_store(tmp_path: Path, source: Path) -> None:
    for layout in ("slided", "packed"):
        refused(source, f"--layout {layout}", "2:4@50%", "--layout dense", pattern="2:4@50%", layout=layout)
        refused(source, f"--layout {layout}", "2:4@50%", layer=["down=2:4@50%"], layout=layout)
        refused(source, f"--layout {layout}", "not dense;", pattern="dense", layout=layout)
    convert(source, tmp_path / "out", "2:4@50%")
    refused(tmp_path / "out", "already pruned to 2:4@50%", error=CheckpointError, out="more", pattern="6:8")
    block = config_of(tmp_path / "out")["quantization_config"][KEY]
    with pytest.raises(MetadataError, match="cannot store it"):
        Metadata.from_json(block | {"layout": "slided"})


@pytest.mark.parametrize("quant", ["int8", "fp8"])
def test_synth_with_half_of_the_blocks_pruned(tmp_path: Path, source: Path, quant: str) -> None:
    synth(source, tmp_path / "out", pattern=HALF, quant=quant)
    convert(source, tmp_path / "expected", "2:4@50%", quant=quant)
    assert (
        config_of(tmp_path / "out")["quantization_config"]
        == config_of(tmp_path / "expected")["quantization_config"]
    )
    assert inspect(tmp_path / "out").violations == 0
    tensors = tensors_of(tmp_path / "out")
    for name, share in shares(tmp_path / "out").items():
        assert share == 0.5, name
        assert len(tensors[name].float().unique(dim=0)) == len(tensors[name]), name
    ups = [dense_blocks(tensors[f"model.layers.{i}.mlp.up_proj.weight"]) for i in range(2)]
    assert not torch.equal(*ups)
