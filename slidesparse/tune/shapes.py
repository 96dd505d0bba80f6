"""Shapes to measure: the fused linear layers of models, token counts M, and patterns."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slidesparse.calibrate.model import fused_layers
from slidesparse.checkpoint.converted import open_checkpoint
from slidesparse.checkpoint.names import WEIGHT
from slidesparse.checkpoint.storage import FLOATS
from slidesparse.errors import SlideSparseError, shown
from slidesparse.gemm.problem import ALL_2_4, ALL_DENSE, CODED, coded_columns, stored_pattern
from slidesparse.pattern import SlidePattern, parse_pattern, round_up
from slidesparse.synth import PUBLIC

FEW_TOKENS = (1, 2, 4, 8, 16, 32)  # also tuned for backends whose plans serve any number of tokens
TOKENS = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
PATTERNS = ("2:4", "4:6", "6:8", "8:10", "10:12", "12:14", "14:16", "2_inf")
MIXED_PATTERNS = ("2:4@50%", "dense")  # patterns with dense blocks, for backends that take them


class ShapeError(SlideSparseError, ValueError):
    """A model or a list of shapes that cannot be read."""


@dataclass(frozen=True)
class Layer:
    """A linear layer with weights [n, k]."""

    name: str
    n: int
    k: int


def decoder_layers(config: Mapping[str, Any]) -> tuple[Layer, ...]:
    """Return the four linear layers of a block of a decoder with a ``config``, q k v and gate up fused as in vLLM."""
    hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    intermediate, kv_heads = int(config["intermediate_size"]), int(config.get("num_key_value_heads") or heads)
    head = int(config.get("head_dim") or hidden // heads)
    return (
        Layer("qkv", (heads + 2 * kv_heads) * head, hidden),
        Layer("o", hidden, heads * head),
        Layer("gate_up", 2 * intermediate, hidden),
        Layer("down", hidden, intermediate),
    )


MODELS = {
    name: decoder_layers(config) for name, config in PUBLIC.items() if "num_experts_per_tok" not in config
}


def packed_columns(k: int, pattern: str, alignment: int, coded: bool = False) -> tuple[int, str]:
    """Return the columns of a packed weight of K in-features at a pattern, and its `Problem.blocks`.

    They are K' or K, rounded up to what the library takes, or `coded_columns`.  ``alignment`` and ``coded`` are its.
    """
    parsed = SlidePattern.parse(pattern)
    layout = parsed.layout(k)
    if stored_pattern(parsed, coded) is None:
        return round_up(k, alignment), ALL_DENSE
    if columns := coded_columns(layout, coded):
        return columns, CODED
    return round_up(layout.slided, alignment), ALL_2_4


def find_model(name: str) -> tuple[str, tuple[Layer, ...]]:
    """Return name and layers of one of MODELS, or of a Hugging Face folder.  Raises ShapeError or CheckpointError.

    Those of a folder are its linear layers as vLLM fuses them, one of each shape, but for the unquantized ones of a
    converted checkpoint.
    """
    if name in MODELS:
        return name, MODELS[name]
    if not Path(name).is_dir():
        raise ShapeError(f"{name!r} is neither one of the models {', '.join(MODELS)} nor a folder of one")
    checkpoint, metadata = open_checkpoint(name)
    layers: dict[tuple[int, int], Layer] = {}
    for unit in fused_layers(checkpoint, metadata):
        specs = [checkpoint.tensors[name + WEIGHT].spec for name in unit]
        entry = metadata.layers.get(unit[0]) if metadata else None
        if metadata and specs[0].dtype in FLOATS:
            continue
        shape = sum(spec.rows for spec in specs), entry.in_features if entry else specs[0].columns
        layers.setdefault(shape, Layer("+".join(name.rpartition(".")[2] for name in unit), *shape))
    if not layers:
        raise ShapeError(f"{name} has no linear layers to tune: give them with --shapes NxK,NxK instead")
    return Path(name).resolve().name, tuple(layers.values())


def parse_shapes(text: str) -> tuple[Layer, ...]:
    """Parse shapes N x K, ``"4608x3584,3584x18944"``, into layers with these names.  Raises ShapeError."""
    layers = []
    for word in split_list(text):
        match = re.fullmatch(r"([0-9]{1,9})[xX]([0-9]{1,9})", word)
        if not match or not int(match[1]) or not int(match[2]):
            raise ShapeError(
                f"--shapes {shown(word)} is not a shape; use N x K of weights, such as 4608x3584"
            )
        layers.append(Layer(f"{match[1]}x{match[2]}", int(match[1]), int(match[2])))
    if not layers:
        raise ShapeError("--shapes is empty; use N x K of weights, such as 4608x3584,3584x18944")
    return tuple(layers)


def parse_tokens(text: str) -> tuple[int, ...]:
    """Parse token counts: ``"64,128"`` -> (64, 128).  Raises ShapeError."""
    try:
        tokens = tuple(int(word) for word in split_list(text))
    except ValueError as error:
        raise ShapeError(f"--m {shown(text)} is not a list of token counts, such as 64,256,1024") from error
    if not tokens or min(tokens) < 1:
        raise ShapeError(f"--m {text!r}: token counts are at least 1")
    return tokens


def parse_patterns(text: str, mixed: bool = False) -> tuple[str, ...]:
    """Parse "6:8,2_10" into ("6:8", "8:10"), with ``mixed`` also "2:4@50%".  Raises PatternError or ShapeError."""
    parse = parse_pattern if mixed else SlidePattern.parse
    if not (words := split_list(text)):
        raise ShapeError("--pattern is empty; use patterns such as 2:4,6:8")
    return tuple(parse(word).ratio for word in words)


def parse_choice(option: str, text: str, allowed: tuple[str, ...]) -> tuple[str, ...]:
    """Parse comma-separated words, each one of ``allowed``.  Raises ShapeError."""
    words = tuple(split_list(text))
    wrong = [word for word in words if word not in allowed]
    if wrong or not words:
        raise ShapeError(f"{option} {text!r}: {wrong or 'nothing'} is not one of {', '.join(allowed)}")
    return words


def split_list(text: str) -> list[str]:
    """The words of a comma-separated list."""
    return [word.strip() for word in text.split(",") if word.strip()]
