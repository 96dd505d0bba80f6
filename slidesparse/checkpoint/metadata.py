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
      "tool": "slidesparse 0.1.0"
    }

``dense``: weights [N, K], plain compressed-tensors (``quant_method: compressed-tensors``), which stock vLLM serves.
``slided``: weights of the layers listed are [N, K'] (``quant_method: slidesparse``), which stock vLLM refuses by name.
``packed``: those weights are stored without their zeros (`slidesparse.bitmask`); refused as slided ones are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from slidesparse.errors import SlideSparseError
from slidesparse.pattern import PatternError, SlidePattern

KEY = "slidesparse"  # in quantization_config
QUANT_METHOD = "slidesparse"  # names the layouts but dense, and the plugin inside vLLM
VERSION = 1
LAYOUTS = ("dense", "slided", "packed")
SPARSE_FORMATS = (
    "sparse-24-bitmask",
    "sparse-bitmask",
)  # of compressed-tensors up to 0.14, as `slidesparse.bitmask`


class MetadataError(SlideSparseError, ValueError):
    """The metadata are incomplete, contradict themselves, or come from a newer version."""


@dataclass(frozen=True)
class LayerEntry:
    """One pruned layer: its pattern and K, its in-features before sliding."""

    pattern: SlidePattern
    in_features: int

    def __post_init__(self) -> None:
        if self.in_features < 0:
            raise MetadataError(
                f"in_features is {self.in_features}, it must be at least 0; convert the checkpoint again"
            )

    def columns(self, layout: str) -> int:
        """Columns of the stored weight: K' in the slided layout, K in the others."""
        return self.pattern.layout(self.in_features).slided if layout == "slided" else self.in_features


@dataclass(frozen=True)
class Metadata:
    """The parsed ``slidesparse`` block of a checkpoint."""

    pattern: SlidePattern
    layout: str
    layers: Mapping[str, LayerEntry] = field(default_factory=dict)
    tool: str = ""

    def __post_init__(self) -> None:
        if self.layout not in LAYOUTS:
            raise MetadataError(f"layout {self.layout!r} is not known; the layouts are {', '.join(LAYOUTS)}")

    def to_json(self) -> dict[str, Any]:
        """Return the block as config.json holds it."""
        layers = {
            name: {"pattern": entry.pattern.ratio, "in_features": entry.in_features}
            for name, entry in sorted(self.layers.items())
        }
        return {
            "version": VERSION,
            "pattern": self.pattern.ratio,
            "layout": self.layout,
            "layers": layers,
            "tool": self.tool,
        }

    @classmethod
    def from_json(cls, block: Any) -> Metadata:
        """Parse the block.  Raises MetadataError that names the field, what it holds and what is allowed."""
        if not isinstance(block, Mapping):
            raise MetadataError(f"quantization_config.{KEY} must be an object, found {type(block).__name__}")
        version = block.get("version")
        if version != VERSION:
            raise MetadataError(
                f"quantization_config.{KEY}.version is {version!r}, this slidesparse reads {VERSION}; "
                "upgrade slidesparse or convert the checkpoint again"
            )
        try:
            layers = {
                str(name): LayerEntry(SlidePattern.parse(entry["pattern"]), int(entry["in_features"]))
                for name, entry in dict(block["layers"]).items()
            }
            return cls(
                SlidePattern.parse(block["pattern"]), block["layout"], layers, str(block.get("tool", ""))
            )
        except MetadataError:
            raise
        except PatternError as error:
            raise MetadataError(f"quantization_config.{KEY}: {error}") from error
        except (KeyError, TypeError, ValueError) as error:
            raise MetadataError(
                f"quantization_config.{KEY} is incomplete ({type(error).__name__}: {error}); it needs version, "
                "pattern, layout and layers {name: {pattern, in_features}}; convert the checkpoint again"
            ) from error

    @classmethod
    def of_config(cls, quantization_config: Mapping[str, Any] | None) -> Metadata | None:
        """Return the metadata of a ``quantization_config``, or None when it carries none."""
        block = (quantization_config or {}).get(KEY)
        return None if block is None else cls.from_json(block)


def sparsity_of(quantization_config: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return format and structure (2:4) of weights that compressed-tensors stored without zeros, or None."""
    found = quantization_config.get("sparsity_config")
    if not isinstance(found, Mapping) or found.get("format") not in SPARSE_FORMATS:
        return None
    return found["format"], str(found.get("sparsity_structure"))
