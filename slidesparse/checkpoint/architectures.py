"""Find the linear layers among a model's tensors, and the groups of them that vLLM fuses.

The regexes name what is taken, so lm_head, embeddings, norms, routers, poolers and classifiers never are.  The experts
that a router chooses among run on vLLM's own kernels, which gain nothing from the pattern: they are never pruned.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slidesparse.checkpoint.storage import CheckpointError

# Output heads, embeddings and routers of experts are never pruned, even if a regex of the user matches them
_NEVER = re.compile(r"(^|\.)(lm_head|embed\w*|\w*embeddings?|wte|wpe|router|gate)(\.|$)")

# A matrix of one routed expert, and several of a layer's in one tensor
_EXPERT = re.compile(r"\A(.*\bexperts)\.\d+\.\w+\Z")
_JOINED = re.compile(r"\A(.*\b(?:experts|\w*moe\w*))\.[\w.]+\Z")

WEIGHT = ".weight"
SCALE = ".weight_scale"


@dataclass(frozen=True)
class Family:
    """Models that name their layers alike."""

    linear: re.Pattern[str]  # searched in layer names, without ".weight"
    fused: tuple[tuple[str, ...], ...] = ()  # last name parts of layers that vLLM joins to one matrix

    def layers(self, tensors: Iterable[str]) -> list[str]:
        """Return the linear layers among tensor names, in their order, without ``.weight``."""
        names = (name.removesuffix(WEIGHT) for name in tensors if name.endswith(WEIGHT))
        found = [name for name in names if self.linear.search(name) and not _NEVER.search(name)]
        return [name for name in found if not is_expert(name)]

    def groups(self, layers: Iterable[str]) -> list[tuple[str, ...]]:
        """Return the groups that vLLM fuses, each in the order of the layers."""
        found: dict[tuple[str, int], list[str]] = {}
        for name in layers:
            parent, _, last = name.rpartition(".")
            for number, group in enumerate(self.fused):
                if last in group:
                    found.setdefault((parent, number), []).append(name)
        return [tuple(names) for names in found.values()]


DECODER = Family(
    re.compile(r"\A(model\.)?layers\.\d+\.(self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj)\Z"),
    (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")),
)
MOE_DECODER = Family(
    re.compile(
        r"\A(model\.)?layers\.\d+\.(self_attn\.[qkvo]_proj|mlp\.(shared_experts?\.)?(gate|up|down)_proj)\Z"
    ),
    DECODER.fused,
)
FUSED_DECODER = Family(
    re.compile(r"\A(model\.)?layers\.\d+\.(self_attn\.(qkv|o)_proj|mlp\.(gate_up|down)_proj)\Z")
)
ENCODER = Family(
    re.compile(
        r"\A((bert|roberta|model)\.)?encoder\.layer\.\d+\."
        r"(attention\.self\.(query|key|value)|attention\.output\.dense|intermediate\.dense|output\.dense)\Z"
    ),
    (("query", "key", "value"),),
)

_DECODERS = ("Llama", "Mistral", "Qwen2", "Qwen3", "Gemma", "Gemma2", "Granite", "Olmo2")
_MOES = ("Mixtral", "Qwen2Moe", "Qwen3Moe", "Olmoe", "PhiMoE", "Glm4Moe")
_ENCODERS = ("Bert", "Roberta", "XLMRoberta")
FAMILIES: Mapping[str, Family] = {
    **{f"{name}{head}": DECODER for name in _DECODERS for head in ("ForCausalLM", "Model")},
    **{f"{name}ForSequenceClassification": DECODER for name in _DECODERS},
    "Gemma3ForCausalLM": DECODER,
    "BitNetForCausalLM": DECODER,
    "Phi3ForCausalLM": FUSED_DECODER,
    **{f"{name}{head}": MOE_DECODER for name in _MOES for head in ("ForCausalLM", "Model")},
    **{f"{name}{head}": ENCODER for name in _ENCODERS for head in ("Model", "ForMaskedLM")},
    **{f"{name}ForSequenceClassification": ENCODER for name in _ENCODERS},
    **{f"{name}ForTokenClassification": ENCODER for name in _ENCODERS},
}


def is_expert(layer: str) -> bool:
    """Whether a layer is a matrix of one routed expert."""
    return _EXPERT.match(layer) is not None


def experts(tensors: Iterable[str]) -> dict[str, list[str]]:
    """Return the matrices of routed experts among tensor names, without ``.weight``, by the layer that has them."""
    found: dict[str, list[str]] = {}
    for name in tensors:
        match = _EXPERT.match(name.removesuffix(WEIGHT)) if name.endswith(WEIGHT) else None
        if match:
            found.setdefault(match[1], []).append(match[0])
    return found


def inside(module: str) -> str:
    """Return the entry of an ignore list for all layers in a module, whatever prefix vLLM has before its name."""
    return f"re:.*{re.escape(module.removeprefix('model.'))}\\."


def joined_experts(tensor: str) -> str | None:
    """Return the layer of experts that a three-dimensional tensor is of, by its name; None where it is of none."""
    match = _JOINED.match(tensor)
    return match[1] if match else None


def compile_regex(text: str, option: str) -> re.Pattern[str]:
    """Compile a regular expression of the user's.  CheckpointError names the ``option`` it came from."""
    try:
        return re.compile(text)
    except re.error as error:
        raise CheckpointError(
            f"{option} {text!r} is not a Python regular expression: {error}; "
            "it is searched in layer names such as model.layers.0.mlp.down_proj"
        ) from error


def architecture_of(config: Mapping[str, Any]) -> str | None:
    """Return the first of config.json's ``architectures``, or None when it names none."""
    found = config.get("architectures")
    return found[0] if isinstance(found, list) and found and isinstance(found[0], str) else None


def family_of(config: Mapping[str, Any], linear: str | None = None) -> Family:
    """Return the family of a model by its config.json, or one made of ``linear``, a regex searched in layer names.

    Raises CheckpointError for architectures that are not known.
    """
    found = architecture_of(config)
    if linear is not None:
        return Family(compile_regex(linear, "--linear"), DECODER.fused + ENCODER.fused)
    if found is None or found not in FAMILIES:
        what = f"architecture {found!r} is not known" if found else "config.json names no architecture"
        raise CheckpointError(
            f"{what}; known are {', '.join(sorted(FAMILIES))}. "
            "For another, name its linear layers yourself: --linear REGEX, searched in layer names"
        )
    return FAMILIES[found]


def matched(
    layers: Sequence[str], groups: Iterable[tuple[str, ...]], regexes: Sequence[str], option: str
) -> set[str]:
    """Return the layers that the regexes of ``option`` match, searched in names without ``.weight``.

    Raises CheckpointError for a regex that does not compile or matches nothing, and for one that takes a
    part of a group that vLLM fuses, as the parts of one matrix must be treated alike.
    """
    found: set[str] = set()
    for text in regexes:
        regex = compile_regex(text, option)
        these = {name for name in layers if regex.search(name)}
        if not these:
            example = f", such as {layers[0]}" if layers else ""
            raise CheckpointError(
                f"{option} {text!r} matches none of the {len(layers)} linear layers{example}"
            )
        found |= these
    for group in groups:
        inside = [name for name in group if name in found]
        if inside and len(inside) < len(group):
            outside = [name for name in group if name not in found]
            raise CheckpointError(
                f"{option} covers {', '.join(inside)} but not {', '.join(outside)}; vLLM joins them to one "
                f"matrix, so {_VERBS[option]} all of them or none"
            )
    return found


_VERBS = {"--ignore": "ignore", "--skip": "skip", "--layer": "name"}


def serving_names(layer: str) -> list[str]:
    """Return the names that vLLM may know a layer by, its own first.

    Bare models lack the ``model.`` that vLLM puts before their names, and vLLM (0.28 at least) calls the
    attention of BERT-like encoders ``attention.output``, like the layer after it.  Routed experts, which vLLM joins
    and calls by names that not every checkpoint has, go by one regex a layer of them.
    """
    match = _EXPERT.match(layer)
    if match:
        return [inside(match[1])]
    names = [layer]
    if "." in layer and not layer.startswith("model."):
        names.append("model." + re.sub(r"^(bert|roberta)\.", "", layer))
    return names + [
        name.replace(".attention.self.", ".attention.output.") for name in names if ".attention.self." in name
    ]
