"""Names of tensors and layers in checkpoints, and of layers in vLLM.

vLLM stacks the matrices of a layer's routed experts, which therefore all have one pattern and type.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import regex  # type: ignore[import-untyped]

from slidesparse.checkpoint.storage import MODULES, CheckpointError, is_embedding_model
from slidesparse.errors import listed, shown

# The matrix of one routed expert, and a tensor that holds several experts of a layer
EXPERT = re.compile(r"\A(.*\bexperts)\.(\d+)\.\w+\Z")
_JOINED = re.compile(r"\A(.*\b(?:experts|\w*moe\w*))\.[\w.]+\Z")

HEAD = re.compile(r"(^|\.)lm_head\Z")

WEIGHT, BIAS = ".weight", ".bias"
SCALE = ".weight_scale"
ZERO_POINT = ".weight_zero_point"  # vLLM cannot load it with W8A8; 0 for symmetric weights


# Layers that most models of vLLM fuse, by the names of the fused ones
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def fused_name(layer: str) -> str | None:
    """Return the name of the layer that most models of vLLM fuse a layer into, or None; experts have no names there."""
    head, _, last = layer.rpartition(".")
    fused = next((name for name, parts in FUSED.items() if last in parts), None)
    return f"{head}.{fused}" if head and fused and not is_expert(layer) else None


def fused_parts(layer: str) -> list[str]:
    """Return the names of the layers that most models of vLLM fuse into one, of which a layer is one, or none."""
    head, _, last = (fused_name(layer) or "").rpartition(".")
    return [f"{head}.{part}" for part in FUSED.get(last, ())]


def layer_names(tensors: Iterable[str]) -> list[str]:
    """Return the names of tensors that are weights, without ``.weight``."""
    return [name.removesuffix(WEIGHT) for name in tensors if name.endswith(WEIGHT)]


CAUSAL, MULTIMODAL = "ForCausalLM", "ForConditionalGeneration"  # ends of the names of language models


def is_expert(layer: str) -> bool:
    """Return whether a layer is the matrix of one routed expert."""
    return EXPERT.match(layer) is not None


def experts(tensors: Iterable[str]) -> dict[str, list[str]]:
    """Return the routed experts' matrices among tensor names, without ``.weight``, grouped by their layer."""
    matrices: dict[str, list[str]] = {}
    for layer in layer_names(tensors):
        if match := EXPERT.match(layer):
            matrices.setdefault(match[1], []).append(layer)
    return matrices


def inside(module: str) -> str:
    """Return an ignore-list entry that matches all experts of ``module``, whatever vLLM calls the modules around them.

    vLLM renames the layers of a checkpoint's ignore list along with its tensors, but not regexes.
    """
    from_blocks = re.escape(re.sub(r"\A(.*\.)?(?=layers\.\d)", "", module))
    return "re:.*" + re.sub(r"(?<=\d)\\\.\w+\\\.experts\Z", r"\\..*\\bexperts", from_blocks) + r"\."


def joined_experts(tensor: str) -> str | None:
    """Return the module of experts that a three-dimensional tensor belongs to by its name, or None."""
    match = _JOINED.match(tensor)
    return match[1] if match else None


def search(text: str, names: Iterable[str], option: str) -> set[str]:
    """Return the ``names`` in which an untrusted regular expression is found.

    Raises CheckpointError, which names the ``option`` it came from, for one that does not compile or takes too long.
    """
    try:
        if len(text) > MAX_REGEX:
            raise regex.error(f"it has {len(text)} characters, more than {MAX_REGEX}")
        pattern = regex.compile(text)
        return {name for name in names if pattern.search(name, timeout=SECONDS)}
    except TimeoutError:
        raise CheckpointError(
            f"{option} {shown(text)} takes more than {SECONDS:g} s to be searched in the name of a layer; write it "
            "without nested repetitions"
        ) from None
    except (regex.error, RecursionError, OverflowError) as error:
        raise CheckpointError(
            f"{option} {shown(text)} is not a regular expression: {error}; it is searched in layer names such as "
            "model.layers.0.mlp.down_proj"
        ) from error


SECONDS = 2.0  # limit for a name; a search takes microseconds
MAX_REGEX = 1000  # characters


def architecture_of(config: Mapping[str, Any]) -> str | None:
    """Return the first of config.json's ``architectures``, or None if there is none."""
    names = config.get("architectures")
    return names[0] if isinstance(names, list) and names and isinstance(names[0], str) else None


def serving_options(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of ``vllm serve`` for a model: without a head it embeds texts, which vLLM must be told.

    Otherwise (0.28 at least) it takes a LlamaModel for a LlamaForCausalLM, and ends while it loads the embedding.
    """
    return {"runner": "pooling"} if (architecture_of(config) or "").endswith("Model") else {}


def other_use(folder: Path, config: Mapping[str, Any]) -> str | None:
    """Return what in its files says that a model does not predict tokens, as text, or None if nothing does."""
    architecture = architecture_of(config) or ""
    if not architecture.endswith((CAUSAL, MULTIMODAL, "LMHeadModel")):
        return f"config.json names {architecture or 'no architecture'}"
    if is_embedding_model(folder):
        return f"{MODULES} marks this as an embedding model"
    return None


def matched(text: str, layers: Sequence[str], option: str) -> set[str]:
    """Return the layers that a regex of ``option`` matches, as `search` does; also raises CheckpointError for none."""
    if matches := search(text, layers, option):
        return matches
    example = f", such as {layers[0]}" if layers else ""
    raise CheckpointError(f"{option} {shown(text)} matches none of the {len(layers)} linear layers{example}")


def require_alike(groups: Iterable[tuple[str, ...]], given: Mapping[str, object], option: str) -> None:
    """Raise CheckpointError if ``option`` has ``given`` values to some of the layers of a group, or different ones.

    vLLM may fuse these, and the parts of one matrix must be treated alike.
    """
    for group in groups:
        values = {name: given[name] for name in group if name in given}
        covered = [name for name in values if values[name] == next(iter(values.values()))]
        if covered and len(covered) < len(group):
            uncovered = [name for name in group if name not in covered]
            raise CheckpointError(
                f"{option} covers {listed(covered)} but not {listed(uncovered)}, which read the same input "
                "and may be fused into one matrix; cover all of them alike, or none"
            )


def serving_names(layer: str) -> list[str]:
    """Return the names that vLLM may use for a layer, its own first.

    vLLM adds the prefix ``model.`` to the names of bare models, and (0.28 at least) calls the attention of BERT-like
    encoders ``attention.output``, like the layer after it.  The routed experts of a layer, which vLLM fuses and
    renames, are covered by one regex.
    """
    match = EXPERT.match(layer)
    if match:
        return [inside(match[1])]
    names = [layer]
    if "." in layer and not layer.startswith("model."):
        names.append("model." + re.sub(r"^(bert|roberta)\.", "", layer))
    return names + [
        name.replace(".attention.self.", ".attention.output.") for name in names if ".attention.self." in name
    ]
