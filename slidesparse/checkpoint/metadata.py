"""The metadata of a converted checkpoint: ``config.json -> quantization_config.slidesparse``.

This file needs the standard library only.

::

    "slidesparse": {
      "version": 1,                          # of this block; a reader refuses newer ones
      "pattern": "6:8",
      "layout": "dense",                     # or "slided", "packed"
      "layers": {                            # the pruned layers, by checkpoint name without ".weight"
        "model.layers.0.mlp.down_proj": {"pattern": "6:8", "in_features": 4864}
      },
      "experts": ["6:8"],                    # the patterns of pruned routed experts, if any: their weights tell which
      "tool": "slidesparse 0.1.0"
    }

``dense``: weights are [N, K] in plain compressed-tensors (``quant_method: compressed-tensors``), served by stock vLLM.
``slided``: the listed layers' weights are [N, K'] (``quant_method: slidesparse``, which stock vLLM refuses by name).
``packed``: the listed layers' weights are stored without zeros (`slidesparse.bitmask`), and refused likewise.
A share of 2:4 blocks, such as ``2:4@50%``, exists in the dense layout only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from slidesparse.errors import SlideSparseError, shown
from slidesparse.pattern import MixedPattern, Pattern, PatternError, parse_pattern

KEY = "slidesparse"  # in quantization_config
QUANT_METHOD = "slidesparse"  # quant_method of the layouts other than dense, and of the plugin inside vLLM
COMPRESSED_TENSORS = "compressed-tensors"  # the quant_method of the dense layout
VERSION = 1
LAYOUTS = ("dense", "slided", "packed")
WRITTEN_LAYOUTS = LAYOUTS[:2]  # the packed one, written up to version 0.2, is only read
SPARSE_FORMATS = ("sparse-24-bitmask", "sparse-bitmask")  # formats of compressed-tensors up to 0.14
STAMP = "slidesparse_serving"  # in quantization_config, in memory only: the decisions of the plugin
MAX_IN_FEATURES = 2**24
MAX_NAME = 1000  # characters of a layer's name

T = TypeVar("T")


class MetadataError(SlideSparseError, ValueError):
    """The metadata are incomplete, contradictory, or from a newer version."""


@dataclass(frozen=True)
class LayerEntry:
    """One pruned layer: its pattern and K, its in-features before sliding."""

    pattern: Pattern
    in_features: int

    def __post_init__(self) -> None:
        if type(self.in_features) is not int or not 1 <= self.in_features <= MAX_IN_FEATURES:
            raise MetadataError(
                f"in_features is {shown(self.in_features)}, it must be a whole number from 1 to {MAX_IN_FEATURES}; "
                "convert the checkpoint again"
            )

    def columns(self, layout: str) -> int:
        """Return the columns of the stored weight: K' in the slided layout, K in the others."""
        if layout != "slided" or isinstance(self.pattern, MixedPattern):
            return self.in_features
        return self.pattern.layout(self.in_features).slided


@dataclass(frozen=True)
class Metadata:
    """The parsed ``slidesparse`` block of a checkpoint."""

    pattern: Pattern
    layout: str
    layers: Mapping[str, LayerEntry] = field(default_factory=dict)
    tool: str = ""
    experts: tuple[Pattern, ...] = ()

    def __post_init__(self) -> None:
        if self.layout not in LAYOUTS:
            raise MetadataError(
                f"layout {shown(self.layout)} is not known; the layouts are {', '.join(LAYOUTS)}"
            )
        if self.layout != "dense":
            for name, entry in self.layers.items():
                if isinstance(entry.pattern, MixedPattern):
                    raise MetadataError(
                        f"{shown(name)} is {entry.pattern.ratio} in the {self.layout} layout, which cannot store it; "
                        "convert the original model again with --layout dense"
                    )

    def to_json(self) -> dict[str, Any]:
        """Return the block as config.json holds it."""
        layers = {
            name: {"pattern": entry.pattern.ratio, "in_features": entry.in_features}
            for name, entry in sorted(self.layers.items())
        }
        experts = {"experts": [pattern.ratio for pattern in self.experts]} if self.experts else {}
        return {
            "version": VERSION,
            "pattern": self.pattern.ratio,
            "layout": self.layout,
            "layers": layers,
            **experts,
            "tool": self.tool,
        }

    @classmethod
    def from_json(cls, block: Any) -> Metadata:
        """Parse the block from an untrusted file and validate every field.

        Raises MetadataError, which names the field, its value and what is allowed.
        """
        with _at(f"quantization_config.{KEY}"):
            fields = _of(dict, block)
            with _at("version"):
                if type(fields.get("version")) is not int or fields["version"] != VERSION:
                    raise MetadataError(
                        f"found {shown(fields.get('version'))}, this slidesparse reads {VERSION}; upgrade "
                        "slidesparse, or convert the checkpoint again"
                    )
            with _at("pattern"):
                pattern = _pattern(fields.get("pattern"))
            with _at("layout"):
                layout = _of(str, fields.get("layout"))
            with _at("layers"):
                layers = {
                    name: _entry(name, entry) for name, entry in _of(dict, fields.get("layers")).items()
                }
            with _at("tool"):
                tool = _of(str, fields.get("tool", ""))
            with _at("experts"):
                experts = tuple(map(_pattern, _of(list, fields.get("experts", []))))
            return cls(pattern, layout, layers, tool, experts)

    @classmethod
    def of_config(cls, quantization_config: Mapping[str, Any] | None) -> Metadata | None:
        """Return the metadata of a ``quantization_config``, or None if it has none."""
        with _at("quantization_config"):
            block = _of(dict, quantization_config or {}).get(KEY)
        return None if block is None else cls.from_json(block)


def sparsity_of(quantization_config: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the format and structure (2:4) of weights that compressed-tensors stored without zeros, or None."""
    sparsity = quantization_config.get("sparsity_config")
    if not isinstance(sparsity, Mapping) or sparsity.get("format") not in SPARSE_FORMATS:
        return None
    return sparsity["format"], str(sparsity.get("sparsity_structure"))


@contextmanager
def _at(place: str) -> Iterator[None]:
    """Prefix errors with the name of a field."""
    try:
        yield
    except (MetadataError, PatternError) as error:
        raise MetadataError(f"{place}: {error}") from error


def _of(kind: type[T], value: object) -> T:
    if not isinstance(value, kind):
        expected = "an object" if kind is dict else "a list" if kind is list else "a text"
        raise MetadataError(f"must be {expected}, found {shown(value)}; convert the checkpoint again")
    return value


def _pattern(value: object) -> Pattern:
    return parse_pattern(_of(str, value))


def _entry(name: str, value: object) -> LayerEntry:
    with _at(shown(name)):
        if not name.isprintable() or not 0 < len(name) <= MAX_NAME:
            raise MetadataError(f"a layer's name has 1 to {MAX_NAME} printable characters")
        entry = _of(dict, value)
        with _at("pattern"):
            pattern = _pattern(entry.get("pattern"))
        return LayerEntry(pattern, entry.get("in_features"))  # type: ignore[arg-type]  # validated there
