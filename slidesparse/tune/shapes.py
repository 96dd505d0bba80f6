"""Shapes to measure: the fused linear layers of models, token counts M, and patterns."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import filterfalse
from pathlib import Path
from typing import Any

import torch

from slidesparse.calibrate.model import Model
from slidesparse.checkpoint.converted import open_checkpoint
from slidesparse.checkpoint.names import WEIGHT
from slidesparse.checkpoint.skeleton import Skeleton
from slidesparse.checkpoint.storage import FLOATS
from slidesparse.checkpoint.w8a8 import parse_block
from slidesparse.errors import SlideSparseError, shown
from slidesparse.gemm.problem import ALL_2_4, ALL_DENSE, CODED, coded_columns, stored_pattern
from slidesparse.pattern import SlidePattern, parse_pattern, round_up
from slidesparse.synth import PUBLIC

SIZE = "[1-9][0-9]{0,8}"  # as a regex
VOCABULARY = 64  # vLLM adds rows to an lm_head until they are a multiple
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
    converted checkpoint, and a quantized lm_head.
    """
    if name in MODELS:
        return name, MODELS[name]
    if not (name and Path(name).is_dir()):
        raise ShapeError(f"{name!r} is neither one of the models {', '.join(MODELS)} nor a folder of one")
    checkpoint, metadata = open_checkpoint(name)
    skeleton = Skeleton(checkpoint)
    layers: dict[tuple[int, int], Layer] = {}
    heads = [
        (name,)
        for name in skeleton.head_names[:1]
        if name + WEIGHT in checkpoint.tensors
        and checkpoint.require(name + WEIGHT).dtype not in FLOATS
        and parse_block(checkpoint.quantization_config() or {}, checkpoint.tensors).loads_head(name)
    ]
    fused = Model(skeleton, torch.device("cpu")).fused()
    listed = ([name for name in group if metadata is None or name in metadata.layers] for group in fused)
    for unit in [*filter(None, listed), *heads]:
        specs = [checkpoint.tensors[name + WEIGHT].spec for name in unit]
        entry = metadata.layers.get(unit[0]) if metadata else None
        if specs[0].dtype in FLOATS and metadata:
            continue
        rows = sum(round_up(spec.rows, VOCABULARY) if unit in heads else spec.rows for spec in specs)
        shape = rows, entry.in_features if entry else specs[0].columns
        layers.setdefault(shape, Layer("+".join(name.rpartition(".")[2] for name in unit), *shape))
    if not layers:
        raise ShapeError(f"{name} has no linear layers to tune: give them with --shapes NxK,NxK instead")
    return Path(name).resolve().name, tuple(layers.values())


def parse_shapes(text: str) -> tuple[Layer, ...]:
    """Parse shapes N x K, ``"4608x3584,3584x18944"``, into layers with these names.  Raises ShapeError."""
    is_shape = re.compile(f"{SIZE}[xX]{SIZE}").fullmatch
    words = _words("--shapes", text, is_shape, "a shape: use N x K of weights, such as 4608x3584")
    sizes = [tuple(map(int, word.lower().split("x"))) for word in words]
    return tuple(Layer(f"{n}x{k}", n, k) for n, k in sizes)


def parse_tokens(text: str) -> tuple[int, ...]:
    """Parse token counts: ``"64,128"`` -> (64, 128).  Raises ShapeError."""
    is_count = re.compile(SIZE).fullmatch
    return tuple(map(int, _words("--m", text, is_count, "a token count of 1 or more, such as 1024")))


def parse_patterns(text: str, mixed: bool = False) -> tuple[str, ...]:
    """Parse "6:8,2_10" into ("6:8", "8:10"), with ``mixed`` also "2:4@50%".  Raises PatternError or ShapeError."""
    parse = parse_pattern if mixed else SlidePattern.parse
    return tuple(parse(word).ratio for word in _words("--pattern", text, bool, "a pattern such as 6:8"))


def parse_choice(option: str, text: str, allowed: tuple[str, ...]) -> tuple[str, ...]:
    """Parse comma-separated words, each one of ``allowed``.  Raises ShapeError."""
    return tuple(_words(option, text, allowed.__contains__, f"one of {', '.join(allowed)}"))


def _words(option: str, text: str, is_allowed: Callable[[str], object], allowed: str) -> list[str]:
    """Return the words of a list.  Raises ShapeError for one that is not allowed, or if there is none."""
    words = split_list(text)
    for wrong in filterfalse(is_allowed, words or [""]):
        raise ShapeError(f"{option} {shown(wrong)} is not {allowed}")
    return words


def split_list(text: str) -> list[str]:
    """The words of a comma-separated list."""
    return [word.strip() for word in text.split(",") if word.strip()]
