"""Sources that are already quantized or pruned, and why they are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from checkpoints import DOWN, Q, config_of, edit_json, llama, refused, tensors_of, w8a8, write

from slidesparse import checkpoint as checkpoint_module
from slidesparse.architectures import ArchitectureError
from slidesparse.checkpoint import CheckpointError
from slidesparse.convert import convert
from slidesparse.inspection import inspect, verify
from slidesparse.metadata import MetadataError
from slidesparse.pattern import PatternError, SlidePattern

SIX_EIGHT = SlidePattern.parse("6:8")


def test_quant_contradicting_the_source(tmp_path: Path) -> None:
    words = "--quant fp8 contradicts the source, whose weights are int8 already"
    refused(w8a8(tmp_path / "source"), words, "leave --quant out", quant="fp8")


class Edit(NamedTuple):
    """A change of a W8A8 quantization_config and what is said about it."""

    change: Callable[[dict[str, Any]], Any]
    words: str


def group(block: dict[str, Any], part: str) -> dict[str, Any]:
    return block["config_groups"]["group_0"][part]


EDITS = {
    "method": Edit(lambda b: b.update(quant_method="gptq"), "already quantized by 'gptq'"),
    "static": Edit(
        lambda b: group(b, "input_activations").update(strategy="tensor", dynamic=False), "static activations"
    ),
    "per group": Edit(
        lambda b: group(b, "input_activations").update(strategy="group", group_size=128),
        "not quantized per token",
    ),
    "local": Edit(lambda b: group(b, "input_activations").update(dynamic="local"), "not quantized per token"),
    "asymmetric": Edit(
        lambda b: group(b, "input_activations").update(symmetric=False), "asymmetric activations"
    ),
    "w8a16": Edit(lambda b: b["config_groups"]["group_0"].update(input_activations=None), "(W8A16)"),
    "a16 float": Edit(
        lambda b: group(b, "input_activations").update(type="float"), "another type than the weights"
    ),
    "w4": Edit(lambda b: group(b, "weights").update(num_bits=4), "4-bit int weights"),
    "block": Edit(lambda b: group(b, "weights").update(strategy="block"), "weight scales per block"),
    "zero points": Edit(
        lambda b: group(b, "weights").update(symmetric=False), "asymmetric or dynamic weights"
    ),
    "outputs": Edit(
        lambda b: b["config_groups"]["group_0"].update(output_activations={"num_bits": 8}),
        "quantized outputs",
    ),
    "groups": Edit(
        lambda b: b["config_groups"].update(
            group_1={
                "weights": {**group(b, "weights"), "strategy": "tensor"},
                "input_activations": group(b, "input_activations"),
            }
        ),
        "groups with different arguments (int8 per channel and int8 per tensor)",
    ),
    "no groups": Edit(lambda b: b.pop("config_groups"), "no config_groups"),
    "bad weights": Edit(
        lambda b: b["config_groups"]["group_0"].update(weights="int8"),
        "weights or input_activations that are no",
    ),
    "bad sparsity": Edit(lambda b: b.update(sparsity_config="dense, I think"), "'dense, I think'"),
    "bad group": Edit(lambda b: b["config_groups"].update(group_0=3), "group_0 that is not an object"),
    "packed": Edit(lambda b: b.update(format="pack-quantized"), "format 'pack-quantized'"),
    "frozen": Edit(lambda b: b.update(quantization_status="frozen"), "status 'frozen'"),
    "bitmask": Edit(
        lambda b: b.update(sparsity_config={"format": "sparse-24-bitmask"}), "'sparse-24-bitmask'"
    ),
    "rotated": Edit(lambda b: b.update(transform_config={"config_groups": {}}), "transform_config"),
    "ignore": Edit(lambda b: b.update(ignore="lm_head"), "ignore list that is not a list of names"),
}


@pytest.mark.parametrize("name", EDITS)
def test_w8a8_of_another_kind(tmp_path: Path, name: str) -> None:
    source = w8a8(tmp_path / "source")
    block = config_of(source)["quantization_config"]
    EDITS[name].change(block)
    edit_json(source / "config.json", quantization_config=block)
    refused(source, EDITS[name].words, "tart from the original checkpoint")


def test_ignore_list_with_a_bad_regex(tmp_path: Path) -> None:
    source = w8a8(tmp_path / "source")
    block = config_of(source)["quantization_config"]
    edit_json(source / "config.json", quantization_config={**block, "ignore": ["re:mlp.(down"]})
    words = "the source's ignore list: 'mlp.(down' is not a Python regular expression"
    refused(source, words, error=ArchitectureError)


def test_w8a8_layer_that_is_float_and_not_ignored(tmp_path: Path) -> None:
    source = w8a8(tmp_path / "source")
    block = config_of(source)["quantization_config"]
    block["ignore"] = ["lm_head"]
    edit_json(source / "config.json", quantization_config=block)
    refused(
        source, f"tensor {DOWN}.weight is BF16, but quantization_config promises I8", "does not ignore it"
    )


def test_w8a8_with_codes_of_another_dtype(tmp_path: Path) -> None:
    source = w8a8(tmp_path / "source", "fp8")
    block = config_of(source)["quantization_config"]
    for part in ("weights", "input_activations"):
        group(block, part)["type"] = "int"
    edit_json(source / "config.json", quantization_config=block)
    refused(source, "is F8_E4M3, but quantization_config promises I8")


def test_w8a8_without_its_scale(tmp_path: Path) -> None:
    source = w8a8(tmp_path / "source")
    tensors = tensors_of(source)
    del tensors[f"{Q}.weight_scale"]
    write(source, config_of(source), tensors)
    refused(source, f"has no tensor {Q}.weight_scale")


@pytest.mark.parametrize("scale", [torch.ones(63, 1), torch.ones(1), torch.ones(64, 1, dtype=torch.int32)])
def test_w8a8_with_a_wrong_scale(tmp_path: Path, scale: torch.Tensor) -> None:
    source = w8a8(tmp_path / "source")
    write(source, config_of(source), {**tensors_of(source), f"{Q}.weight_scale": scale})
    refused(source, f"tensor {Q}.weight_scale is", "scales per channel of 64 rows are 64 of F32, F16, BF16")


def test_w8a8_weights_without_their_config(tmp_path: Path) -> None:
    source = llama(tmp_path / "source", **{f"{Q}.weight_scale".replace(".", "__"): torch.ones(64, 1)})
    refused(
        source, f"the source has {Q}.weight_scale but no quantization_config", "fetch its config.json again"
    )


def test_quantization_config_that_is_no_object(tmp_path: Path) -> None:
    source = llama(tmp_path / "source")
    edit_json(source / "config.json", quantization_config="int8")
    refused(source, "quantization_config", "must be an object, found str")


# Sources that are already pruned


@pytest.fixture(params=["dense", "slided"])
def converted(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    convert(llama(tmp_path / "source"), tmp_path / "converted", pattern=SIX_EIGHT, layout=request.param)
    return tmp_path / "converted"


def test_another_pattern(converted: Path) -> None:
    refused(
        converted, "already pruned to 6:8 (2 of every 8 pruned)", "asks for 4:6 (2 of every 6 pruned)",
        "start from the original checkpoint", "--sparsity 6:8", pattern=SlidePattern.parse("4:6"),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("option", "value"), [("--ignore", ["down"]), ("--linear", "down"), ("--method random", "random")]
)
def test_choices_for_a_pruned_source(converted: Path, option: str, value: object) -> None:
    words = f"{option} does not go with a source that is already pruned"
    refused(converted, words, **{option.split()[0].removeprefix("--"): value})


def test_violated_pattern(converted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_module, "CHUNK_ELEMENTS", 640)
    tensors = tensors_of(converted)
    tensors[f"{Q}.weight"][45] = 0
    tensors[f"{Q}.weight"][45, 16:24] = 1  # a whole block; in the slided layout two whole windows
    write(converted, config_of(converted), tensors)
    message = refused(converted, f"{Q}: row 45", error=PatternError)
    if config_of(converted)["quantization_config"]["slidesparse"]["layout"] == "dense":
        assert (
            "row 45, block 2 (columns from 16) has 8 non-zeros, 6:8 (2 of every 8 pruned) allows 6" in message
        )


def test_slided_rows_that_nothing_slides_to(tmp_path: Path) -> None:
    """The two places of one weight hold parts of its bits, which unslide would join to a plausible weight."""
    source = tmp_path / "converted"
    convert(llama(tmp_path / "source"), source, pattern=SIX_EIGHT, layout="slided")
    tensors = tensors_of(source)
    row = tensors[f"{Q}.weight"][7].view(-1, 3, 4)
    block, pair = next(
        (b, p) for b in range(len(row)) for p in (0, 1) if row[b, 1, p] != 0 and row[b, 0, p + 2] == 0
    )
    row[block, 0, pair + 2] = row[block, 1, pair]
    write(source, config_of(source), tensors)
    refused(source, f"{Q}: row 7 is not the slided form of any weight at 6:8", error=PatternError)


def test_metadata_of_layers_that_are_not_there(converted: Path) -> None:
    block = config_of(converted)["quantization_config"]
    block["slidesparse"]["layers"]["model.ghost"] = {"pattern": "6:8", "in_features": 64}
    edit_json(converted / "config.json", quantization_config=block)
    refused(converted, "has no tensor model.ghost.weight")


def test_metadata_of_another_size(converted: Path) -> None:
    block = config_of(converted)["quantization_config"]
    block["slidesparse"]["layers"][Q]["in_features"] = 72
    edit_json(converted / "config.json", quantization_config=block)
    words = f"tensor {Q}.weight has", "72 in-features at 6:8"
    refused(converted, *words)
    for read in (inspect, lambda folder: verify(folder, folder)):
        with pytest.raises(CheckpointError, match=words[1]):
            read(converted)


def test_metadata_without_layers(converted: Path) -> None:
    block = config_of(converted)["quantization_config"]
    block["slidesparse"]["layers"] = {}
    edit_json(converted / "config.json", quantization_config=block)
    refused(converted, "lists no layer; start from the original checkpoint")


def test_metadata_of_a_newer_version(converted: Path) -> None:
    block = config_of(converted)["quantization_config"]
    block["slidesparse"]["version"] = 99
    edit_json(converted / "config.json", quantization_config=block)
    refused(converted, "version is 99", "upgrade slidesparse", error=MetadataError)


def test_slidesparse_method_without_metadata(converted: Path) -> None:
    block = config_of(converted)["quantization_config"]
    block["quant_method"] = "slidesparse"
    del block["slidesparse"]
    edit_json(converted / "config.json", quantization_config=block)
    refused(converted, "quant_method 'slidesparse' but has no quantization_config.slidesparse")
