"""The metadata block of config.json: round trip, and what each damaged form says."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import patterns

from slidesparse.checkpoint import metadata
from slidesparse.checkpoint.metadata import LayerEntry, Metadata, MetadataError
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


def test_of_config() -> None:
    assert Metadata.of_config(None) is None
    assert Metadata.of_config({"quant_method": "compressed-tensors"}) is None
    assert Metadata.of_config({metadata.KEY: GOOD}) == Metadata.from_json(GOOD)
    with pytest.raises(MetadataError, match="must be an object, found str"):
        Metadata.of_config({metadata.KEY: "6:8"})


def without(key: str) -> dict[str, Any]:
    return {name: value for name, value in GOOD.items() if name != key}


@pytest.mark.parametrize(
    ("block", "fact"),
    [
        (None, "NoneType"),
        ([], "list"),
        ({**GOOD, "version": 2}, "version is 2"),
        (without("version"), "version is None"),
        (without("pattern"), "'pattern'"),
        (without("layout"), "'layout'"),
        (without("layers"), "'layers'"),
        ({**GOOD, "layers": 3}, "incomplete"),
        ({**GOOD, "layers": {"fc": {}}}, "'pattern'"),
        ({**GOOD, "layers": {"fc": {"pattern": "6:8", "in_features": "many"}}}, "'many'"),
        ({**GOOD, "layers": {"fc": {"pattern": "6:8", "in_features": -8}}}, "-8"),
        ({**GOOD, "pattern": "2:8"}, "did you mean 6:8"),
        ({**GOOD, "layers": {"fc": {"pattern": "5:7", "in_features": 7}}}, "'5:7'"),
        ({**GOOD, "layout": "folded"}, "'folded' is not known; the layouts are dense, slided, packed"),
    ],
)
def test_a_damaged_block_says_what_is_wrong(block: Any, fact: str) -> None:
    before = copy.deepcopy(block)
    with pytest.raises(MetadataError) as error:
        Metadata.from_json(block)
    assert fact in str(error.value)
    assert block == before
