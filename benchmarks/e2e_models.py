"""The checkpoints that an end-to-end benchmark runs: one model, pruned to some patterns and perhaps not at all."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slidesparse.checkpoint.metadata import Metadata
from slidesparse.checkpoint.storage import CheckpointError, text_config
from slidesparse.checkpoint.w8a8 import parse_block
from slidesparse.errors import SlideSparseError
from slidesparse.pattern import Pattern, parse_pattern

DENSE = "dense"  # the pattern of unpruned checkpoints and of dense systems


class E2eError(SlideSparseError, ValueError):
    """The options or checkpoints cannot be measured together."""


@dataclass(frozen=True)
class Variant:
    """A checkpoint of the model."""

    folder: Path
    pattern: Pattern | None  # None: it has none
    layout: str
    dtype: str  # "int8" or "fp8"
    positions: int | None  # longest supported sequence; None: unknown


@dataclass(frozen=True)
class Model:
    """One model to measure, pruned to some patterns, and the checkpoint that dense systems run."""

    name: str
    dtype: str
    sparse: Mapping[str, Variant]  # by pattern, such as "6:8"
    dense: Variant


def find_model(
    folder: Path, name: str | None, patterns: Sequence[str] | None, *, dense: bool, sparse: bool
) -> Model:
    """Return the model of ``--model``: a checkpoint, or a folder of them named by pattern.

    Dense systems run the checkpoint called ``dense``, or else the least pruned one, because zeros save power.
    ``dense`` and ``sparse`` tell whether such systems are requested.

    Raises E2eError for what cannot be measured together, and MetadataError and PatternError.
    """
    variants = _read_variants(folder)
    kinds = {variant.dtype for variant in variants.values()}
    if len(kinds) > 1:
        raise E2eError(f"the checkpoints are of {' and '.join(sorted(kinds))}; measure one type at a time")
    pruned = {key: variant for key, variant in variants.items() if key != DENSE}
    selected = sorted(pruned, key=lambda key: _density(pruned[key])) if patterns is None else list(patterns)
    if not sparse:
        selected = []
    elif not selected:
        raise E2eError("no checkpoint carries a pattern: slidesparse convert SRC OUT --sparsity 6:8")
    if missing := [key for key in selected if key not in pruned]:
        raise E2eError(f"no checkpoint of {', '.join(missing)}; those found are {', '.join(variants)}")
    densest = variants.get(DENSE) or max(pruned.values(), key=_density)
    if dense and densest.layout != "dense":
        raise E2eError(
            f"{densest.folder} holds slided weights, which no dense system runs; convert with --layout dense"
        )
    return Model(name or _name(folder, densest), kinds.pop(), {key: pruned[key] for key in selected}, densest)


def _density(variant: Variant) -> float:
    return float(variant.pattern.density) if variant.pattern else 1.0


def _read_variants(folder: Path) -> dict[str, Variant]:
    if (folder / "config.json").is_file():
        variant = read_variant(folder)
        return {variant.pattern.ratio if variant.pattern else DENSE: variant}
    spelled = re.compile(rf"{DENSE}|2_inf|\d+[:_]\d+|2[:_]4@\d+%")
    variants: dict[str, Variant] = {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        if not (spelled.fullmatch(path.name) and (path / "config.json").is_file()):
            continue
        variant = read_variant(path)
        pattern = None if path.name == DENSE else parse_pattern(path.name)
        if pattern and variant.pattern != pattern:
            raise E2eError(f"{path} is named {pattern}, but was pruned to {variant.pattern or 'no pattern'}")
        variants[pattern.ratio if pattern else DENSE] = variant
    if not variants:
        raise E2eError(
            f"{folder} holds neither a config.json nor checkpoints in folders named by pattern, such as 2_8"
        )
    return variants


def read_variant(folder: Path) -> Variant:
    """Read ``config.json`` of a W8A8 checkpoint.  Raises E2eError and MetadataError."""
    path = folder / "config.json"
    try:
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        block = config["quantization_config"]
        longest = text_config(config).get("max_position_embeddings")
        positions = int(longest) if longest else None
    except OSError as error:
        raise E2eError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise E2eError(
            f"{path} is not that of a W8A8 checkpoint ({type(error).__name__}: {error}); "
            "convert the model first: slidesparse convert SRC OUT --sparsity 6:8"
        ) from error
    try:
        dtype = parse_block(block).quant
    except CheckpointError as error:
        raise E2eError(f"{folder}: {error}") from error
    metadata = Metadata.of_config(block)
    pattern, layout = (metadata.pattern, metadata.layout) if metadata else (None, "dense")
    return Variant(folder, pattern, layout, dtype, positions)


def _name(folder: Path, variant: Variant) -> str:
    """Return the name of the folder; for a single checkpoint without its pattern."""
    path = folder.resolve()
    if not (folder / "config.json").is_file():
        return path.name
    ends = [DENSE, *([variant.pattern.flag, variant.pattern.ratio] if variant.pattern else [])]
    stem = re.sub(rf"(^|[-_.])({'|'.join(map(re.escape, ends))})$", "", path.name)
    return stem or path.parent.name
