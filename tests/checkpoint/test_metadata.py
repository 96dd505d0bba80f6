"""The metadata block of config.json: round trip, and errors of damaged blocks."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import patterns

from slidesparse.checkpoint import metadata
from slidesparse.checkpoint.metadata import LayerEntry, Metadata, MetadataError
from slidesparse.pattern import SlidePattern

VALID: dict[str, Any] = {
    "version": 1,
    "pattern": "6:8",
    "layout": "dense",
    "layers": {"model.layers.0.mlp.down_proj": {"pattern": "6:8", "in_features": 4864}},
    "tool": "slidesparse 0.1.0",
}


def test_metadata_from_json_and_back() -> None:
    block = Metadata.from_json(VALID)
    assert block == Metadata(
        SlidePattern(8),
        "dense",
        {"model.layers.0.mlp.down_proj": LayerEntry(SlidePattern(8), 4864)},
        "slidesparse 0.1.0",
    )
    assert block.to_json() == VALID


layers = st.dictionaries(
    st.text(min_size=1).filter(str.isprintable),
    st.builds(LayerEntry, patterns(), st.integers(1, metadata.MAX_IN_FEATURES)),
    max_size=4,
)


@given(st.builds(Metadata, patterns(), st.sampled_from(metadata.LAYOUTS), layers, st.text()))
def test_metadata_json_round_trip(block: Metadata) -> None:
    text = json.dumps(block.to_json())
    assert Metadata.from_json(json.loads(text)) == block
    assert json.dumps(Metadata.from_json(json.loads(text)).to_json()) == text


def test_metadata_of_config() -> None:
    assert Metadata.of_config(None) is None
    assert Metadata.of_config({"quant_method": "compressed-tensors"}) is None
    assert Metadata.of_config({metadata.KEY: VALID}) == Metadata.from_json(VALID)
    with pytest.raises(MetadataError, match="must be an object, found '6:8'"):
        Metadata.of_config({metadata.KEY: "6:8"})
    with pytest.raises(MetadataError, match=r"^quantization_config: must be an object, found \[1\]"):
        Metadata.of_config([1])


def without(key: str) -> dict[str, Any]:
    return {name: value for name, value in VALID.items() if name != key}


def layer(**changed: Any) -> dict[str, Any]:
    """The block with one layer, whose entry has ``changed`` values."""
    return {**VALID, "layers": {"fc": {"pattern": "6:8", "in_features": 64, **changed}}}


@pytest.mark.parametrize(
    ("block", "facts"),
    [
        (None, ["must be an object, found None"]),
        ([], ["must be an object, found []"]),
        ({**VALID, "version": 2}, ["version: found 2", "reads 1"]),
        ({**VALID, "version": True}, ["version: found True"]),
        ({**VALID, "version": 1.0}, ["version: found 1.0"]),
        (without("version"), ["version: found None"]),
        (without("pattern"), ["pattern: must be a text, found None"]),
        (without("layout"), ["layout: must be a text, found None"]),
        (without("layers"), ["layers: must be an object, found None"]),
        ({**VALID, "pattern": ["6:8"]}, ["pattern: must be a text"]),
        ({**VALID, "pattern": 6.8}, ["pattern: must be a text, found 6.8"]),
        ({**VALID, "layout": ["dense"]}, ["layout: must be a text"]),
        ({**VALID, "layers": 3}, ["layers: must be an object, found 3"]),
        ({**VALID, "layers": [["fc", {}]]}, ["layers: must be an object"]),
        ({**VALID, "layers": {"fc": "6:8"}}, ["'fc': must be an object, found '6:8'"]),
        ({**VALID, "layers": {"fc": {}}}, ["'fc': pattern: must be a text"]),
        ({**VALID, "layers": {"": {}}}, ["'': a layer's name"]),
        ({**VALID, "layers": {"f\nc": {}}}, ["'f\\nc': a layer's name"]),
        ({**VALID, "layers": {"\x1b[31mfc": {}}}, ["'\\x1b[31mfc': a layer's name"]),
        ({**VALID, "layers": {"\ud800": {}}}, ["'\\ud800': a layer's name"]),
        ({**VALID, "layers": {"x" * 1001: {}}}, ["xxx...xxx", "1 to 1000"]),
        (layer(in_features="many"), ["'fc': in_features is 'many'"]),
        (layer(in_features=-8), ["in_features is -8"]),
        (layer(in_features=0), ["in_features is 0"]),
        (layer(in_features=True), ["in_features is True"]),
        (layer(in_features=64.0), ["in_features is 64.0"]),
        (layer(in_features=float("inf")), ["in_features is inf"]),
        (layer(in_features=float("nan")), ["in_features is nan"]),
        (layer(in_features=2**24 + 1), ["in_features is 16777217", "from 1 to 16777216"]),
        (layer(pattern="5:7"), ["'fc': pattern", "'5:7'"]),
        (layer(pattern="9999999998:10000000000"), ["'9999999998:10000000000' is not a pattern"]),
        (layer(pattern="4096:4098"), ["from 4 to 4096, found 4098"]),
        ({**VALID, "pattern": "2:8"}, ["did you mean 6:8"]),
        ({**VALID, "pattern": "6" * 5000 + ":8"}, ["pattern: sparsity '666", "is not a pattern"]),
        ({**VALID, "layout": "zipped"}, ["'zipped'"]),
        ({**VALID, "tool": 7}, ["tool: must be a text, found 7"]),
    ],
)
def test_damaged_metadata_errors_name_the_fault(block: Any, facts: list[str]) -> None:
    before = repr(block)
    with pytest.raises(MetadataError) as error:
        Metadata.from_json(block)
    message = str(error.value)
    assert message.startswith("quantization_config.slidesparse: ")
    for fact in facts:
        assert fact in message
    assert len(message) < 500
    assert "\n" not in message
    assert repr(block) == before
