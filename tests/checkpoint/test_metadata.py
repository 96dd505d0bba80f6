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

LAYERS = {"fc": {"pattern": "6:8", "in_features": 64}}
VALID: dict[str, Any] = {
    "version": 1,
    "pattern": "6:8",
    "layout": "dense",
    "layers": LAYERS,
    "tool": "slidesparse 0.1",
}
layers = st.dictionaries(
    st.text(min_size=1).filter(str.isprintable),
    st.builds(LayerEntry, patterns(), st.integers(1, metadata.MAX_IN_FEATURES)),
    max_size=4,
)


@given(st.builds(Metadata, patterns(), st.sampled_from(metadata.LAYOUTS), layers, st.text()))
def test_metadata_round_trip_through_json(block: Metadata) -> None:
    assert Metadata.from_json(json.loads(json.dumps(block.to_json()))) == block
    assert Metadata.from_json(VALID).to_json() == VALID  # as earlier versions wrote it


def test_configs_without_metadata() -> None:
    assert Metadata.of_config(None) is None
    assert Metadata.of_config({"quant_method": "compressed-tensors"}) is None
    with pytest.raises(MetadataError, match=r"^quantization_config: must be an object, found \[1\]"):
        Metadata.of_config([1])  # type: ignore[arg-type]


def layer(**changed: Any) -> dict[str, Any]:
    return {"layers": {"fc": {**LAYERS["fc"], **changed}}}


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (None, "must be an object, found None"),
        ({"version": 2}, "version: found 2, this slidesparse reads 1"),
        ({"version": True}, "version: found True"),
        ({"version": None}, "version: found None"),
        ({"pattern": 6.8}, "pattern: must be a text, found 6.8"),
        ({"pattern": "2:8"}, "did you mean 6:8"),
        ({"pattern": "6" * 5000 + ":8"}, "is not a pattern"),
        ({"layout": ["dense"]}, "layout: must be a text"),
        ({"layout": "zipped"}, "'zipped'"),
        ({"layers": [["fc", {}]]}, "layers: must be an object"),
        ({"layers": {"fc": "6:8"}}, "'fc': must be an object, found '6:8'"),
        ({"layers": {"": {}}}, "'': a layer's name"),
        ({"layers": {"\x1b[31mfc": {}}}, "'\\x1b[31mfc': a layer's name"),
        ({"layers": {"\ud800": {}}}, "'\\ud800': a layer's name"),
        ({"layers": {"x" * 1001: {}}}, "1 to 1000"),
        (layer(in_features="many"), "'fc': in_features is 'many'"),
        (layer(in_features=0), "in_features is 0"),
        (layer(in_features=True), "in_features is True"),
        (layer(in_features=float("nan")), "in_features is nan"),
        (layer(in_features=2**24 + 1), "from 1 to 16777216"),
        (layer(pattern="5:7"), "'fc': pattern"),
        (layer(pattern="9999999998:10000000000"), "'9999999998:10000000000' is not a pattern"),
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
