"""The metadata block of config.json: round trip, and what each damaged form says."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import patterns

from slidesparse import metadata
from slidesparse.metadata import LayerEntry, Metadata, MetadataError
from slidesparse.pattern import SlidePattern

GOOD: dict[str, Any] = {
    "version": 1,
    "pattern": "6:8",
    "layout": "dense",
    "layers": {"model.layers.0.mlp.down_proj": {"pattern": "6:8", "in_features": 4864}},
    "tool": "slidesparse 0.1.0",
}


def test_the_documented_block_is_read() -> None:
    found = Metadata.from_json(GOOD)
    assert found == Metadata(
        SlidePattern(8),
        "dense",
        {"model.layers.0.mlp.down_proj": LayerEntry(SlidePattern(8), 4864)},
        "slidesparse 0.1.0",
    )
    assert found.to_json() == GOOD


layers = st.dictionaries(
    st.text(min_size=1), st.builds(LayerEntry, patterns(), st.integers(1, 2**31)), max_size=4
)


@given(st.builds(Metadata, patterns(), st.sampled_from(metadata.LAYOUTS), layers, st.text()))
def test_round_trip_through_json(block: Metadata) -> None:
    text = json.dumps(block.to_json())
    assert Metadata.from_json(json.loads(text)) == block
    assert json.dumps(Metadata.from_json(json.loads(text)).to_json()) == text


def test_layers_are_written_in_order_whatever_order_they_came_in() -> None:
    entry = LayerEntry(SlidePattern(8), 64)
    forward, backward = (dict.fromkeys(names, entry) for names in ("abc", "cba"))
    texts = {
        json.dumps(Metadata(SlidePattern(8), "dense", layers).to_json()) for layers in (forward, backward)
    }
    assert len(texts) == 1


def test_of_config() -> None:
    assert Metadata.of_config(None) is None
    assert Metadata.of_config({"quant_method": "compressed-tensors"}) is None
    assert Metadata.of_config({metadata.KEY: GOOD}) == Metadata.from_json(GOOD)
    with pytest.raises(MetadataError, match="must be an object, found str"):
        Metadata.of_config({metadata.KEY: "6:8"})


def without(key: str) -> dict[str, Any]:
    return {name: value for name, value in GOOD.items() if name != key}


@pytest.mark.parametrize(
    ("block", "words"),
    [
        (None, ["must be an object, found NoneType"]),
        ([], ["must be an object, found list"]),
        ({**GOOD, "version": 2}, ["version is 2, this slidesparse reads 1", "upgrade"]),
        (without("version"), ["version is None"]),
        (without("pattern"), ["incomplete", "'pattern'", "convert the checkpoint again"]),
        (without("layout"), ["incomplete", "'layout'"]),
        (without("layers"), ["incomplete", "'layers'", "needs version, pattern, layout and layers"]),
        ({**GOOD, "layers": 3}, ["incomplete"]),
        ({**GOOD, "layers": {"fc": {}}}, ["incomplete", "'pattern'"]),
        ({**GOOD, "layers": {"fc": {"pattern": "6:8", "in_features": "many"}}}, ["incomplete", "'many'"]),
        ({**GOOD, "pattern": "2:8"}, ["quantization_config.slidesparse: ", "did you mean 6:8"]),
        ({**GOOD, "layers": {"fc": {"pattern": "5:7", "in_features": 7}}}, ["'5:7'", "block length 7"]),
        ({**GOOD, "layout": "packed"}, ["layout 'packed' is not known", "dense and slided"]),
    ],
)
def test_a_damaged_block_says_what_is_wrong(block: Any, words: list[str]) -> None:
    before = copy.deepcopy(block)
    with pytest.raises(MetadataError) as error:
        Metadata.from_json(block)
    assert [word for word in words if word not in str(error.value)] == []
    assert block == before


def test_negative_in_features() -> None:
    layers = {"a": {"pattern": "6:8", "in_features": -8}}
    block = {"version": 1, "pattern": "6:8", "layout": "dense", "layers": layers}
    with pytest.raises(MetadataError, match="in_features is -8, it must be at least 0"):
        Metadata.from_json(block)
