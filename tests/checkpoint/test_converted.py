"""Converted checkpoints, read by `inspect` and `convert`: dense, slided, and those packed by version 0.2.

``stored_sparse`` holds checkpoints of one random Llama layer at 2:4 by compressed-tensors 0.14.0, which stored weights
without their zeros too: ``weights.json`` has the SHA-256 of each weight as its own decompressors restored it.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import (
    DOWN,
    Q,
    assert_same_tensors,
    block_of,
    config_of,
    convert,
    converted,
    edit_json,
    llama,
    refused,
    rewrite,
    snapshot,
    tensors_of,
    w8a8,
    write,
)
from hypothesis import given
from hypothesis import strategies as st
from strategies import assert_same_bits, patterns
from torch import Tensor

from slidesparse.calibrate.task import Calibration
from slidesparse.checkpoint import metadata
from slidesparse.checkpoint.converted import DamagedError
from slidesparse.checkpoint.inspection import RATIOS, LayerReport, inspect
from slidesparse.checkpoint.metadata import LayerEntry, Metadata, MetadataError
from slidesparse.checkpoint.storage import Checkpoint
from slidesparse.errors import SlideSparseError
from slidesparse.pattern import PatternError, SlidePattern
from slidesparse.prune import prune
from slidesparse.quantize import NAMES, quantize_rows
from slidesparse.slide import obeys

STORED = Path(__file__).parent / "stored_sparse"
FORMATS = ("sparse-24-bitmask", "sparse-bitmask")
LAYOUTS = ("dense", "slided", "packed")


def make(folder: Path, layout: str, pattern: str = "6:8", **options: Any) -> Path:
    """Convert the float model beside ``folder``, and write it there in any layout."""
    source = folder.parent / "float"
    if not source.exists():
        llama(source)
    return converted(source, folder, pattern, layout, **options)


def dense(folder: Path) -> dict[str, Tensor]:
    """Read all tensors of a checkpoint as conversions do, with packed weights unpacked."""
    checkpoint = Checkpoint.open(folder)
    with checkpoint.reader() as reader:
        return {name: reader.whole(name) for name in checkpoint.tensors}


def layers_of(folder: Path) -> dict[str, LayerReport]:
    return {layer.name: layer for layer in inspect(folder).layers}


def damage(folder: Path, **changed: Tensor | None) -> None:
    """Replace tensors of layer Q, or remove them with None."""
    rewrite(folder, **{f"{Q}.{name}": tensor for name, tensor in changed.items()})


# Layouts


@pytest.mark.parametrize(
    ("ratio", "quant"), [("2:4", "int8"), ("4:6", "fp8"), ("6:8", "int8"), ("14:16", "fp8")]
)
def test_converting_between_layouts_is_lossless(tmp_path: Path, ratio: str, quant: str) -> None:
    """K is 64 and 88: blocks of 6 and 16 leave tails.  Unpruned layers lie between pruned ones."""
    for layout in LAYOUTS:
        make(tmp_path / layout, layout, ratio, quant=quant, layer=["o_proj=dense"])
    changes = ("packed", "dense"), ("packed", "slided"), ("dense", "slided"), ("slided", "dense")
    for source, layout in changes:
        convert(tmp_path / source, tmp_path / f"{source} {layout}", ratio, layout=layout)
        assert snapshot(tmp_path / f"{source} {layout}") == snapshot(tmp_path / layout)


def test_dense_checkpoint_is_a_source_that_is_not_pruned_yet(tmp_path: Path) -> None:
    convert(llama(tmp_path / "float"), tmp_path / "dense", "dense")
    assert {(x.pattern, x.satisfies) for x in inspect(tmp_path / "dense").layers} == {("dense", None)}
    convert(tmp_path / "dense", tmp_path / "out")
    before, after = tensors_of(tmp_path / "dense"), tensors_of(tmp_path / "out")
    assert_same_bits(after[f"{Q}.weight"], prune(before[f"{Q}.weight"], SlidePattern(8)))
    report = inspect(tmp_path / "out")
    assert ({layer.pattern for layer in report.layers}, report.violations) == ({"6:8"}, 0)


# inspect


@pytest.mark.parametrize("layout", LAYOUTS)
def test_inspect_shows_the_layers_of_a_converted_checkpoint(tmp_path: Path, layout: str) -> None:
    out = make(tmp_path / "out", layout, ignore=["0.*down"])
    report, layers, stored = inspect(out), layers_of(out), tensors_of(out)
    assert (report.pattern, report.layout, report.violations) == ("6:8", layout, 0)
    assert len(layers) == 13  # those of the metadata
    q = layers[Q]
    assert (q.out_features, q.in_features, q.dtype, q.expansion) == (64, 64, "I8", 1.5)
    assert (q.pattern, q.satisfies, q.violations, q.first_violation) == ("6:8", "6:8", 0, None)
    names = ("compressed", "bitmask", "shape") if layout == "packed" else ("weight",)
    assert q.bytes == sum(stored[f"{Q}.{name}"].nbytes for name in (*names, "weight_scale"))


@pytest.mark.parametrize("ratio", RATIOS)
def test_inspect_finds_the_pattern_of_weights_without_metadata(
    tmp_path: Path, ratio: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Patterns that are less sparse, which it implies, are not looked for in each chunk as well: that takes minutes."""
    pattern, source, obeyed = SlidePattern.parse(ratio), w8a8(tmp_path / "source"), list[SlidePattern]()
    damage(source, weight=prune(tensors_of(source)[f"{Q}.weight"], pattern))

    def record(w: Tensor, pattern: SlidePattern) -> bool:
        found = obeys(w, pattern)
        obeyed.extend([pattern] * found)
        return found

    monkeypatch.setattr("slidesparse.checkpoint.inspection.obeys", record)
    layers = layers_of(source)
    assert obeyed == [pattern] * 7  # chunks
    assert (layers[Q].pattern, layers[Q].satisfies, layers[Q].violations) == (None, ratio, 0)
    assert layers[Q].expansion == pattern.layout(64).slided / 64
    assert (layers[DOWN].satisfies, layers[DOWN].dtype, layers[DOWN].expansion) == (None, "BF16", None)


@pytest.mark.parametrize("suffix", ["weight_packed", "_weight_qdata"])
def test_inspect_counts_weights_in_formats_of_other_tools(tmp_path: Path, suffix: str) -> None:
    """llmcompressor 0.14 with W4A16 stores eight codes of four bits in an INT32; torchao 0.18 names all codes so."""
    source = llama(tmp_path / "source")
    damage(source, weight=None, **{suffix: torch.zeros(64, 8, dtype=torch.int32)})
    report = inspect(source)
    assert (report.unread, len(report.layers)) == (1, 13)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_violations_are_counted_over_all_chunks(tmp_path: Path, layout: str) -> None:
    out = make(tmp_path / "out", layout)
    stored = tensors_of(out)
    for row in (11, 45):  # of different chunks
        if layout == "packed":  # a block of eight, and one of four, in the same number of values
            stored[f"{Q}.bitmask"][row, :2] = torch.tensor([0xFF, 0x0F], dtype=torch.uint8)
            stored[f"{Q}.compressed"][row] = 1
        else:
            stored[f"{Q}.weight"][row] = 1
    write(out, config_of(out), stored)
    report, broken = inspect(out), layers_of(out)[Q]
    expected = 2 if layout == "packed" else 16  # 2 rows of 64 / 8 blocks
    assert report.violations == broken.violations == expected
    assert broken.satisfies is None
    assert f"{Q}: row 11, block 0 (columns from 0) has 8 non-zeros" in str(broken.first_violation)
    refused(out, f"{Q}: row 11", error=PatternError, out="x")


def test_slided_rows_with_split_weights_are_found(tmp_path: Path) -> None:
    """The two positions of one weight hold parts of its bits, which unslide would combine to a plausible weight."""
    out = make(tmp_path / "out", "slided")
    weight = tensors_of(out)[f"{Q}.weight"]
    row = weight[7].view(-1, 3, 4)
    b, p = next((b, p) for b in range(len(row)) for p in (0, 1) if row[b, 1, p] and not row[b, 0, p + 2])
    row[b, 0, p + 2] = row[b, 1, p]
    damage(out, weight=weight)
    assert "row 7 is not the slided form of any weight" in str(layers_of(out)[Q].first_violation)
    refused(out, f"{Q}: row 7 ", error=DamagedError, out="x")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"pattern": "4:6"}, "--sparsity 4:6"),
        ({"ignore": ["down"]}, "--ignore"),
        ({"layer": ["down_proj=8:10"]}, "--layer"),
        ({"quant": "int8"}, "--quant"),
        ({"calibration": Calibration(("random",), samples=1, seqlen=8)}, "--calib"),
    ],
)
def test_options_that_change_weights_are_refused(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    refused(make(tmp_path / "out", "dense"), words, "already pruned", out="x", **options)


# Damage, found with the same words by `inspect` and `convert`


def commands_refuse(folder: Path, words: str) -> None:
    assert "\n" not in refused(folder, words, error=SlideSparseError, out="x")
    with pytest.raises(SlideSparseError) as error:
        inspect(folder)
    assert words in str(error.value)


def slidesparse(**changed: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda block: block["slidesparse"].update(changed)


def entry(name: str = Q, **changed: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda block: block["slidesparse"]["layers"].setdefault(name, {"pattern": "6:8"}).update(changed)


def group(part: str, **changed: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda block: block["config_groups"]["group_0"][part].update(changed)


# The layout, a false entry in quantization_config, and words of the message
METADATA: dict[str, tuple[str, Callable[[dict[str, Any]], Any], str]] = {
    "absent layer": ("dense", entry("ghost", in_features=64), "no tensor ghost.weight"),
    "another size": ("slided", entry(in_features=72), "72 in-features"),
    "no layer": ("dense", slidesparse(layers={}), "lists no layer"),
    "newer": ("slided", slidesparse(version=99), "version: found 99"),
    "no groups": ("dense", lambda b: b.update(config_groups={}), "the layer is not quantized"),
    "another type": ("slided", group("weights", type="float"), "activations of another type"),
    "another scale": ("dense", group("weights", strategy="tensor"), "scales per tensor"),
    "an embedding": ("dense", entry("model.embed_tokens", in_features=64), "embed_tokens.weight is BF16"),
    "dense as slided": ("dense", slidesparse(layout="slided"), "in the slided layout have"),
    "packed as dense": ("packed", slidesparse(layout="dense"), "is stored in the packed form, but"),
}


@pytest.mark.parametrize("name", METADATA)
def test_metadata_that_contradict_the_tensors_are_refused(tmp_path: Path, name: str) -> None:
    layout, change, words = METADATA[name]
    out = make(tmp_path / "out", layout)
    block = block_of(out)
    change(block)
    edit_json(out / "config.json", quantization_config=block)
    commands_refuse(out, words)


def test_slided_weight_that_metadata_do_not_list_is_refused(tmp_path: Path) -> None:
    """It would be copied as it is."""
    out = make(tmp_path / "out", "slided")
    block = block_of(out)
    del block["slidesparse"]["layers"][DOWN]
    edit_json(out / "config.json", quantization_config=block)
    refused(out, "but config.json describes [64, 88]", out="x")


def cast(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda tensor: tensor.to(dtype)


def third(value: float) -> Callable[[Tensor], Tensor]:
    return lambda tensor: tensor.index_fill(0, torch.tensor(3), value)


# The layout, a tensor of layer Q, a change of it, and words of the message
TENSORS: list[tuple[str, str, Callable[[Tensor], Tensor | None], str]] = [
    ("dense", "weight", lambda t: None, f"no tensor {Q}.weight"),
    ("slided", "weight", cast(torch.bfloat16), f"{Q}.weight is BF16"),
    ("slided", "weight_scale", lambda t: None, f"no tensor {Q}.weight_scale"),
    ("dense", "weight_scale", cast(torch.int8), f"{Q}.weight_scale is I8"),
    ("dense", "weight_scale", third(torch.nan), f"{Q}.weight_scale holds NaN"),
    ("dense", "bias", third(torch.inf), f"{Q}.bias holds NaN or Inf"),
    ("packed", "bitmask", lambda t: None, f"no tensor {Q}.bitmask"),
    ("packed", "shape", lambda t: torch.tensor([64, 63]), "has shape [64, 63]; 64 in-features"),
    ("packed", "shape", lambda t: torch.tensor([64, 65]), "stores a weight of 64 x 65 as"),
    ("packed", "shape", lambda t: torch.tensor([63, 64]), "stores a weight of 63 x 64 as"),
    ("packed", "shape", lambda t: torch.tensor([-1, 64]), "shapes or dtypes are inconsistent"),
    ("packed", "shape", cast(torch.int32), f"{Q}.shape I32 [2, 1]"),
    ("packed", "compressed", lambda t: t[:, 1:].contiguous(), "bits set for 470 values, 47 in each row"),
    ("packed", "compressed", lambda t: t[1:].clone(), "shapes or dtypes are inconsistent"),
    ("packed", "compressed", lambda t: t.flatten(), "shapes or dtypes are inconsistent"),  # without offsets
    ("packed", "weight", lambda t: torch.zeros(64, 64, dtype=torch.int8), f"holds both {Q}.weight and"),
]


@pytest.mark.parametrize(("layout", "name", "change", "words"), TENSORS)
def test_damaged_tensors_are_refused(
    tmp_path: Path, layout: str, name: str, change: Callable[[Tensor], Tensor | None], words: str
) -> None:
    out = make(tmp_path / "out", layout)
    damage(out, **{name: change(tensors_of(out).get(f"{Q}.{name}", torch.zeros(1)))})
    commands_refuse(out, words)


# Sparse formats of compressed-tensors


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("quant", ["int8", "fp8", "bf16"])
def test_sparse_formats_have_the_weights_of_compressed_tensors(tmp_path: Path, quant: str, form: str) -> None:
    source = STORED / f"{quant}-{form}"
    expected = dense(source)
    assert json.loads((source / "weights.json").read_text()) == {
        name: hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, tensor in expected.items()
        if name.endswith("_proj.weight")
    }
    found = inspect(source)
    assert (found.pattern, found.layout) == (None, form)
    assert {layer.satisfies for layer in found.layers} == {"2:4"}  # up_proj, which is stored dense, too
    plan = convert(source, tmp_path / "out", "2:4", **({"quant": "fp8"} if quant == "bf16" else {})).plan
    assert len(plan.patterns) == 7
    for name in plan.patterns if quant == "bf16" else ():
        weight, scale = quantize_rows(expected[f"{name}.weight"], NAMES["fp8"])
        expected |= {f"{name}.weight": weight, f"{name}.weight_scale": scale}
    assert_same_tensors(tensors_of(tmp_path / "out"), expected)
    block = block_of(tmp_path / "out")
    assert (block["quant_method"], "sparsity_config" in block) == ("compressed-tensors", False)


@pytest.mark.parametrize(
    ("part", "change", "words"),
    [
        ("row_offsets", lambda t: t.flip(0), "row_offsets does not ascend from 0 to"),
        ("row_offsets", lambda t: t + 1, "bits set for"),
        ("row_offsets", lambda t: t - 1, "row_offsets does not ascend"),
        ("row_offsets", lambda t: t[1:], "shapes or dtypes are inconsistent"),
        ("compressed", lambda t: t[:-1], "bits set for"),
    ],
)
def test_damaged_sparse_bitmasks_are_refused(tmp_path: Path, part: str, change: Any, words: str) -> None:
    source = tmp_path / "source"
    shutil.copytree(STORED / "int8-sparse-bitmask", source)
    name = f"model.layers.0.mlp.down_proj.{part}"  # K is 20: its bits end within a byte
    rewrite(source, **{name: change(tensors_of(source)[name]).contiguous()})
    commands_refuse(source, words)


# The metadata block of config.json

LAYERS = {"fc": {"pattern": "6:8", "in_features": 64}}
VALID: dict[str, Any] = {"version": 1, "pattern": "6:8", "layout": "dense", "layers": LAYERS, "tool": "0.1"}
layers = st.dictionaries(
    st.text(min_size=1).filter(str.isprintable),
    st.builds(LayerEntry, patterns(), st.integers(1, metadata.MAX_IN_FEATURES)),
    max_size=4,
)


@given(st.builds(Metadata, patterns(), st.sampled_from(metadata.LAYOUTS), layers, st.text()))
def test_metadata_round_trip_through_json(block: Metadata) -> None:
    assert Metadata.from_json(json.loads(json.dumps(block.to_json()))) == block
    assert Metadata.from_json(VALID).to_json() == VALID  # as earlier versions wrote it


def layer(**changed: Any) -> dict[str, Any]:
    return {"layers": {"fc": {**LAYERS["fc"], **changed}}}


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (None, "must be an object, found None"),
        ({"version": 2}, "version: found 2, this slidesparse reads 1"),
        ({"version": True}, "version: found True"),
        ({"pattern": 6.8}, "pattern: must be a text, found 6.8"),
        ({"layout": ["dense"]}, "layout: must be a text"),
        ({"layout": "zipped"}, "'zipped'"),
        ({"layers": [["fc", {}]]}, "layers: must be an object"),
        ({"layers": {"fc": "6:8"}}, "'fc': must be an object, found '6:8'"),
        ({"layers": {"": {}}}, "'': a layer's name"),
        ({"layers": {"\x1b[31mfc": {}}}, "'\\x1b[31mfc': a layer's name"),
        ({"layers": {"x" * 1001: {}}}, "1 to 1000"),
        (layer(in_features=0), "in_features is 0"),
        (layer(in_features=float("nan")), "in_features is nan"),
        (layer(in_features=2**24 + 1), "from 1 to 16777216"),
        (layer(pattern="5:7"), "'fc': pattern"),
        ({**layer(pattern="2:4@50%"), "layout": "slided"}, "which cannot store it"),
        ({"tool": 7}, "tool: must be a text, found 7"),
    ],
)
def test_damaged_metadata_are_refused(changed: dict[str, Any] | None, words: str) -> None:
    with pytest.raises(MetadataError) as error:
        Metadata.from_json(None if changed is None else {**VALID, **changed})
    assert str(error.value).startswith("quantization_config.slidesparse: ")
    assert words in str(error.value)
    assert str(error.value).isprintable()
    assert len(str(error.value)) < 500
