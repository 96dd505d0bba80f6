"""Weights stored without their zeros: the packed layout, and the sparse formats of compressed-tensors up to 0.14.

``stored_sparse`` holds checkpoints made by its release 0.14.0 (tests/support/stored_sparse.py).
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import (
    DOWN,
    Q,
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
from safetensors.torch import load_file, save_file
from strategies import assert_same_bits
from torch import Tensor

from slidesparse.bitmask import places
from slidesparse.checkpoint.inspection import inspect, verify
from slidesparse.checkpoint.metadata import Metadata
from slidesparse.checkpoint.storage import Checkpoint, CheckpointError
from slidesparse.pattern import SlidePattern
from slidesparse.quantize import NAMES, quantize_rows

STORED = Path(__file__).parent / "stored_sparse"
FORMATS = ("sparse-24-bitmask", "sparse-bitmask")
STORED_DOWN = "model.layers.0.mlp.down_proj"  # K is 20: its bits end within a byte


def dense(folder: Path) -> dict[str, Tensor]:
    """Read all tensors of a checkpoint as conversions do, with packed weights unpacked."""
    checkpoint = Checkpoint.open(folder)
    with checkpoint.reader() as reader:
        return {
            name: torch.cat([reader.rows(name, rows) for rows in stored.spec.chunks()]).view(
                stored.spec.shape
            )
            for name, stored in checkpoint.tensors.items()
        }


# The packed layout


@pytest.mark.parametrize("quant", ["int8", "fp8"])
@pytest.mark.parametrize("ratio", ["2:4", "4:6", "6:8", "14:16"])
def test_converting_between_layouts_is_lossless(tmp_path: Path, ratio: str, quant: str) -> None:
    """K is 64 and 88: blocks of 6 and 16 leave tails.  Unpacked layers lie between packed ones."""
    source = llama(tmp_path / "source", shards=2)
    for layout in ("dense", "packed", "slided"):
        convert(source, tmp_path / layout, ratio, quant=quant, layout=layout, skip=["o_proj"])
    convert(tmp_path / "dense", tmp_path / "from dense", ratio, layout="packed")
    convert(tmp_path / "slided", tmp_path / "from slided", ratio, layout="packed")
    convert(tmp_path / "dense", tmp_path / "slided again", ratio, layout="slided")
    convert(tmp_path / "slided", tmp_path / "dense again", ratio)
    convert(tmp_path / "packed", tmp_path / "back", ratio)
    assert snapshot(tmp_path / "from dense") == snapshot(tmp_path / "packed")
    assert snapshot(tmp_path / "from slided") == snapshot(tmp_path / "packed")
    assert snapshot(tmp_path / "slided again") == snapshot(tmp_path / "slided")
    assert snapshot(tmp_path / "dense again") == snapshot(tmp_path / "back") == snapshot(tmp_path / "dense")
    for other in ("dense", "slided"):
        assert verify(tmp_path / "packed", tmp_path / other).equal


@pytest.mark.parametrize("ratio", ["2:4", "4:6", "6:8"])
def test_packed_layout_tensors(tmp_path: Path, ratio: str) -> None:
    convert(w8a8(tmp_path / "source"), tmp_path / "out", ratio, layout="packed", skip=["o_proj"])
    tensors, pattern = tensors_of(tmp_path / "out"), SlidePattern.parse(ratio)
    layer = DOWN.replace("0", "1")  # K is 88; DOWN itself is left in 16 bits
    assert tensors[f"{layer}.compressed"].shape == (64, places(pattern, 88))
    assert (tensors[f"{layer}.bitmask"].shape, tensors[f"{layer}.bitmask"].dtype) == ((64, 11), torch.uint8)
    assert tensors[f"{layer}.shape"].tolist() == [[64], [88]]
    unpacked = [name for name in tensors if name.endswith("_proj.weight")]
    assert sorted(unpacked) == [
        f"{DOWN}.weight",
        *(f"model.layers.{i}.self_attn.o_proj.weight" for i in range(2)),
    ]
    block = config_of(tmp_path / "out")["quantization_config"]
    metadata = Metadata.of_config(block)
    assert metadata
    assert (block["quant_method"], metadata.layout, metadata.layers[layer].in_features) == (
        "slidesparse",
        "packed",
        88,
    )
    report = inspect(tmp_path / "out")
    (inspected,) = (row for row in report.layers if row.name == layer)
    assert (report.layout, report.violations) == ("packed", 0)
    assert (inspected.in_features, inspected.pattern) == (88, ratio)
    stored = (
        tensors[f"{layer}.{part}"].nbytes for part in ("compressed", "bitmask", "shape", "weight_scale")
    )
    assert inspected.bytes == sum(stored)


def test_packed_layout_is_refused_where_vllm_may_reorder_rows(tmp_path: Path) -> None:
    """vLLM reorders the rows of Llama 4's q_proj and k_proj by the names of weights and scales, and missed packed ones:
    answers were wrong.
    """
    source = llama(tmp_path / "source")
    edit_json(source / "config.json", architectures=["Llama4ForConditionalGeneration"])
    options: dict[str, Any] = {"out": "x", "layout": "packed", "linear": "_proj"}
    refused(source, "--layout packed", "'Llama4ForConditionalGeneration', which is not known", **options)
    convert(source, tmp_path / "out", layout="slided", linear="_proj")


def test_packed_weight_that_violates_its_pattern_is_found(tmp_path: Path) -> None:
    """The bitmask has a block with eight bits set, and one with four."""
    convert(llama(tmp_path / "source"), tmp_path / "out", layout="packed")
    tensors = tensors_of(tmp_path / "out")
    tensors[f"{Q}.bitmask"][11, :2] = torch.tensor([0xFF, 0x0F], dtype=torch.uint8)
    tensors[f"{Q}.compressed"][11] = 1
    write(tmp_path / "out", config_of(tmp_path / "out"), tensors)
    report = inspect(tmp_path / "out")
    assert report.violations == 1
    (violation,) = (row.first_violation for row in report.layers if row.violations)
    assert violation is not None
    assert f"{Q}: row 11, block 0 (columns from 0) has 8 non-zeros" in violation


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"bitmask": None}, f"no tensor {Q}.bitmask"),
        ({"shape": None}, f"no tensor {Q}.shape"),
        ({"shape": torch.tensor([64, 63])}, "has shape [64, 63]; 64 in-features"),
        ({"shape": torch.tensor([64, 65])}, "stores a weight of 64 x 65 as"),
        ({"shape": torch.tensor([63, 64])}, "stores a weight of 63 x 64 as"),
        ({"shape": torch.tensor([-1, 64])}, "shapes or dtypes are inconsistent"),
        ({"shape": torch.tensor([64, 64], dtype=torch.int32)}, f"{Q}.shape I32 [2]"),
        ({"weight": torch.zeros(64, 64, dtype=torch.int8)}, f"holds both {Q}.weight and {Q}.compressed"),
        ({"compressed": torch.ones(64, 47, dtype=torch.int8)}, "bits set for 470 values, 47 in each row"),
        ({"compressed": torch.ones(63, 48, dtype=torch.int8)}, "shapes or dtypes are inconsistent"),
        (
            {"compressed": torch.ones(64 * 48, dtype=torch.int8)},
            "shapes or dtypes are inconsistent",
        ),  # flat, without offsets
    ],
)
def test_damaged_packed_tensors_are_refused(
    tmp_path: Path, changed: dict[str, Tensor | None], message: str
) -> None:
    out = tmp_path / "out"
    convert(llama(tmp_path / "source"), out, layout="packed")
    named = {f"{Q}.{part}": tensor for part, tensor in changed.items()}
    tensors = {name: tensor for name, tensor in {**tensors_of(out), **named}.items() if tensor is not None}
    write(out, config_of(out), tensors)
    with pytest.raises(CheckpointError) as caught:
        inspect(out)
    assert message in str(caught.value)


# Sparse formats of compressed-tensors


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("quant", ["int8", "fp8", "bf16"])
def test_weights_equal_those_of_compressed_tensors(quant: str, form: str) -> None:
    folder = STORED / f"{quant}-{form}"
    expected, actual = json.loads((folder / "weights.json").read_text()), dense(folder)
    assert set(expected) == {name for name in actual if name.endswith("_proj.weight")}
    for name, digest in expected.items():
        assert (
            hashlib.sha256(actual[name].contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
            == digest
        ), name
    report = inspect(folder)
    assert (report.pattern, report.layout) == (None, form)
    assert {(layer.satisfies, layer.name.endswith("up_proj")) for layer in report.layers} == {
        ("2:4", False),
        ("2:4", True),
    }


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("quant", ["int8", "fp8"])
def test_convert_keeps_codes_and_scales_of_sparse_formats(tmp_path: Path, quant: str, form: str) -> None:
    source = STORED / f"{quant}-{form}"
    report = convert(source, tmp_path / "out", "2:4")
    assert (len(report.pruned), report.quant) == (7, quant)
    before, after = dense(source), tensors_of(tmp_path / "out")
    assert set(after) == set(before)
    for name, tensor in before.items():
        assert_same_bits(after[name], tensor)
    block = config_of(tmp_path / "out")["quantization_config"]
    assert block["quant_method"] == "compressed-tensors"
    assert "sparsity_config" not in block


@pytest.mark.parametrize("form", FORMATS)
def test_convert_quantizes_sparse_formats_in_16_bits(tmp_path: Path, form: str) -> None:
    source = STORED / f"bf16-{form}"
    convert(source, tmp_path / "out", "2:4", quant="fp8", layout="packed")
    name = f"{STORED_DOWN}.weight"
    weight, scale = quantize_rows(dense(source)[name], NAMES["fp8"])
    assert_same_bits(dense(tmp_path / "out")[name], weight)
    assert_same_bits(tensors_of(tmp_path / "out")[f"{STORED_DOWN}.weight_scale"], scale)


def test_packed_2_4_layout_equals_sparse_24_bitmask(tmp_path: Path) -> None:
    """Names, dtypes and shapes equal those of the release itself, which left up_proj dense."""
    source = STORED / "int8-sparse-24-bitmask"
    convert(source, tmp_path / "out", "2:4", layout="packed")
    expected, actual = tensors_of(source), tensors_of(tmp_path / "out")
    form = {name: (tensor.dtype, tensor.shape) for name, tensor in actual.items() if "up_proj" not in name}
    assert form == {
        name: (tensor.dtype, tensor.shape) for name, tensor in expected.items() if "up_proj" not in name
    }


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        ("row_offsets", lambda t: t.flip(0), "row_offsets does not ascend from 0 to"),
        ("row_offsets", lambda t: t + 1, "bits set for"),
        ("row_offsets", lambda t: t - 1, "row_offsets does not ascend"),
        ("row_offsets", lambda t: t[1:], "shapes or dtypes are inconsistent"),
        ("compressed", lambda t: t[:-1], "bits set for"),
    ],
)
def test_damaged_sparse_bitmask_tensors_are_refused(
    tmp_path: Path, part: str, change: Any, message: str
) -> None:
    tensors = load_file(STORED / "int8-sparse-bitmask" / "model.safetensors")
    tensors[f"{STORED_DOWN}.{part}"] = change(tensors[f"{STORED_DOWN}.{part}"]).contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((STORED / "int8-sparse-bitmask" / "config.json").read_text())
    with pytest.raises(CheckpointError) as caught:
        inspect(tmp_path)
    assert message in str(caught.value)


def test_other_sparse_formats_are_refused(tmp_path: Path) -> None:
    block = json.loads((STORED / "int8-sparse-24-bitmask" / "config.json").read_text())["quantization_config"]
    block["sparsity_config"]["format"] = "sparse-48-bitmask"
    source = w8a8(tmp_path / "source")
    edit_json(source / "config.json", quantization_config=block)
    refused(
        source,
        "weights stored as 'sparse-48-bitmask'",
        "plain ones and sparse-24-bitmask, sparse-bitmask are",
    )
