"""Find the linear layers among a model's tensors, and the groups of them that vLLM fuses.

The regexes list the layers to prune; lm_head, embeddings, norms, routers, poolers and classifiers match none of them.
Routed experts run on vLLM's own kernels, which gain nothing from the pattern, so they are never pruned.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from slidesparse.checkpoint.storage import (
    MAX_DIMENSION_SIZE,
    MODULES,
    CheckpointError,
    is_embedding_model,
    text_config,
)
from slidesparse.errors import shown

# Output heads, embeddings and routers are never pruned, even if a user's regex matches them
_NEVER = re.compile(r"(^|\.)(lm_head|embed\w*|\w*embeddings?|wte|wpe|router|gate)(\.|$)")

# The matrix of one routed expert, and a tensor that holds several experts of a layer
_EXPERT = re.compile(r"\A(.*\bexperts)\.\d+\.\w+\Z")
_JOINED = re.compile(r"\A(.*\b(?:experts|\w*moe\w*))\.[\w.]+\Z")

HEAD = re.compile(r"(^|\.)lm_head\Z")

WEIGHT = ".weight"
SCALE = ".weight_scale"
ZERO_POINT = ".weight_zero_point"  # vLLM cannot load it with W8A8; 0 for symmetric weights


def layer_names(tensors: Iterable[str]) -> list[str]:
    """Return the names of tensors that are weights, without ``.weight``."""
    return [name.removesuffix(WEIGHT) for name in tensors if name.endswith(WEIGHT)]


@dataclass(frozen=True)
class Family:
    """Models that share a naming scheme for their layers."""

    linear: re.Pattern[str]  # searched in layer names, without ".weight"
    fused: tuple[tuple[str, ...], ...] = ()  # last name parts of layers that vLLM fuses into one matrix

    def layers(self, tensors: Iterable[str]) -> list[str]:
        """Return the linear layers among tensor names, in order, without ``.weight``."""
        return [
            name
            for name in layer_names(tensors)
            if self.linear.search(name) and not _NEVER.search(name) and not is_expert(name)
        ]

    def prefix(self, tensors: Iterable[str]) -> str | None:
        """Return what precedes the expected name of a linear layer, such as ``module.``, or None."""
        for name in layer_names(tensors):
            for start in (dot.end() for dot in re.finditer(r"\.", name)):
                if self.linear.search(name[start:]):
                    return name[:start]
        return None

    def groups(self, layers: Iterable[str]) -> list[tuple[str, ...]]:
        """Return the groups of layers that vLLM fuses, each in order."""
        members: dict[tuple[str, int], list[str]] = {}
        for name in layers:
            parent, _, last = name.rpartition(".")
            for number, group in enumerate(self.fused):
                if last in group:
                    members.setdefault((parent, number), []).append(name)
        return [tuple(names) for names in members.values()]

    def missing(self, layers: Iterable[str]) -> list[str]:
        """Return the layers that are absent although others of their group are present."""
        absent = []
        for group in self.groups(layers):
            parent, _, last = group[0].rpartition(".")
            (parts,) = (names for names in self.fused if last in names)
            absent += [name for name in (f"{parent}.{part}" for part in parts) if name not in group]
        return absent


# What precedes the tensors of a decoder: nothing else, or the names of multimodal models for their language model
ROOT = r"(?:(?:model\.)?(?:language|text)_model\.)?(?:model\.)?"
_BLOCKS = rf"\A{ROOT}layers\.\d+\."
DECODER = Family(
    re.compile(_BLOCKS + r"(self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj)\Z"),
    (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")),
)
MOE_DECODER = Family(
    re.compile(_BLOCKS + r"(self_attn\.[qkvo]_proj|mlp\.(shared_experts?\.)?(gate|up|down)_proj)\Z"),
    DECODER.fused,
)
FUSED_DECODER = Family(re.compile(_BLOCKS + r"(self_attn\.(qkv|o)_proj|mlp\.(gate_up|down)_proj)\Z"))
ENCODER = Family(
    re.compile(
        r"\A((bert|roberta|model)\.)?encoder\.layer\.\d+\."
        r"(attention\.self\.(query|key|value)|attention\.output\.dense|intermediate\.dense|output\.dense)\Z"
    ),
    (("query", "key", "value"),),
)
UNKNOWN = Family(re.compile(""), DECODER.fused + ENCODER.fused)  # all weights, fused by the usual names

_DECODERS = ("Llama", "Mistral", "Qwen2", "Qwen3", "Gemma", "Gemma2", "Granite", "Olmo2")
_BY_MAGNITUDE = ("Cohere", "Cohere2", "Exaone4", "Ministral3", "Olmo3", "SeedOss", "SmolLM3", "StableLm")
_MOES = ("Mixtral", "Qwen2Moe", "Qwen3Moe", "Olmoe", "PhiMoE", "Glm4Moe")
_MULTIMODAL = (
    "Gemma3",
    "Idefics3",
    "InternVL",
    "Llava",
    "LlavaNext",
    "Mistral3",
    "Qwen2VL",
    "Qwen2_5_VL",
    "Qwen3VL",
)
_ENCODERS = ("Bert", "Roberta", "XLMRoberta")
FAMILIES: Mapping[str, Family] = {
    **{f"{name}{head}": DECODER for name in _DECODERS for head in ("ForCausalLM", "Model")},
    **{f"{name}ForSequenceClassification": DECODER for name in _DECODERS},
    "Gemma3ForCausalLM": DECODER,
    **{f"{name}ForCausalLM": DECODER for name in _BY_MAGNITUDE},
    "BitNetForCausalLM": DECODER,
    "Phi3ForCausalLM": FUSED_DECODER,
    **{f"{name}{head}": MOE_DECODER for name in _MOES for head in ("ForCausalLM", "Model")},
    **{f"{name}ForConditionalGeneration": DECODER for name in _MULTIMODAL},
    "Qwen3VLMoeForConditionalGeneration": MOE_DECODER,
    **{f"{name}{head}": ENCODER for name in _ENCODERS for head in ("Model", "ForMaskedLM")},
    **{f"{name}ForSequenceClassification": ENCODER for name in _ENCODERS},
    **{f"{name}ForTokenClassification": ENCODER for name in _ENCODERS},
}


CAUSAL, MULTIMODAL = "ForCausalLM", "ForConditionalGeneration"  # ends of the names of language models


def _kind(architecture: str) -> str:
    """Return the name of an architecture without its head."""
    return re.sub(r"(Model|For[A-Z]\w+)\Z", "", architecture)


_KINDS = dict.fromkeys(map(_kind, FAMILIES))


def is_expert(layer: str) -> bool:
    """Return whether a layer is the matrix of one routed expert."""
    return _EXPERT.match(layer) is not None


def experts(tensors: Iterable[str]) -> dict[str, list[str]]:
    """Return the routed experts' matrices among tensor names, without ``.weight``, grouped by their layer."""
    matrices: dict[str, list[str]] = {}
    for name in tensors:
        match = _EXPERT.match(name.removesuffix(WEIGHT)) if name.endswith(WEIGHT) else None
        if match:
            matrices.setdefault(match[1], []).append(match[0])
    return matrices


def inside(module: str) -> str:
    """Return an ignore-list entry that matches all layers of a module, whatever vLLM calls the model around it.

    vLLM renames the layers of a checkpoint's ignore list along with its tensors, but not regexes.
    """
    from_blocks = re.sub(r"\A(.*\.)?(?=layers\.\d)", "", module)
    return f"re:.*{re.escape(from_blocks)}\\."


def joined_experts(tensor: str) -> str | None:
    """Return the module of experts that a three-dimensional tensor belongs to by its name, or None."""
    match = _JOINED.match(tensor)
    return match[1] if match else None


_HIDDEN = "q_proj k_proj v_proj qkv_proj gate_proj up_proj gate_up_proj query key value"
_INPUTS = {
    **dict.fromkeys(_HIDDEN.split(), "hidden_size"),
    "attention.output.dense": "hidden_size",
    "intermediate.dense": "hidden_size",
    "o_proj": "heads",
    "down_proj": "intermediate_size",
    "output.dense": "intermediate_size",
}


def in_features(config: Mapping[str, Any], layer: str) -> int | None:
    """Return K of a linear layer of a known architecture from the sizes in config.json, or None if they are missing."""
    if architecture_of(config) not in FAMILIES or "expert" in layer:
        return None
    config = text_config(config)
    key = next((key for name, key in _INPUTS.items() if layer.endswith(f".{name}")), None)
    hidden, heads, head = (config.get(name) for name in ("hidden_size", "num_attention_heads", "head_dim"))
    if key == "heads" and type(heads) is int and heads > 0:
        size = heads * head if type(head) is int else hidden
    else:
        size = config.get(str(key))
    return size if type(size) is int and size > 0 else None


def compile_regexes(texts: Iterable[str], option: str, names: Iterable[str]) -> list[re.Pattern[str]]:
    """Compile untrusted regular expressions, which will be searched in ``names``.

    Raises CheckpointError, which names the ``option`` they came from, for one that does not compile and for one whose
    search takes longer than SECONDS; the search is tried in a process that can be stopped.
    """
    texts = list(texts)
    regexes = [_compile(text, option) for text in texts]
    slow = [text for text in texts if len(re.findall(r"[*+?{|()]", text)) > 1]
    request = json.dumps({"texts": slow, "names": list(names) if slow else []})
    command = [sys.executable, "-I", "-S", "-c", _SEARCH]
    try:
        if slow:
            subprocess.run(command, input=request.encode(), capture_output=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        text = slow[len((error.stdout or b"").splitlines())]
        raise CheckpointError(
            f"{option} {shown(text)} takes more than {SECONDS:.0f} s to be searched in the names of layers; write it "
            "without nested repetitions"
        ) from None
    return regexes


SECONDS = 10.0  # limit for all regular expressions of an option; a search takes microseconds
MAX_REGEX = 1000  # characters
# Prints a line after each expression that has been searched in all names
_SEARCH = """
import json, re, sys
request = json.load(sys.stdin)
for text in request["texts"]:
    regex = re.compile(text)
    any([regex.search(name) for name in request["names"]] + [regex.match(name) for name in request["names"]])
    print(flush=True)
"""


def _compile(text: str, option: str) -> re.Pattern[str]:
    try:
        if len(text) > MAX_REGEX:
            raise re.error(f"it has {len(text)} characters, more than {MAX_REGEX}")
        return re.compile(text)
    except (re.error, RecursionError, OverflowError) as error:
        raise CheckpointError(
            f"{option} {shown(text)} is not a Python regular expression: {error}; "
            "it is searched in layer names such as model.layers.0.mlp.down_proj"
        ) from error


def architecture_of(config: Mapping[str, Any]) -> str | None:
    """Return the first of config.json's ``architectures``, or None if there is none."""
    names = config.get("architectures")
    return names[0] if isinstance(names, list) and names and isinstance(names[0], str) else None


def other_use(folder: Path, config: Mapping[str, Any]) -> str | None:
    """Return what in its files says that a model is not a language model, as text, or None if nothing does.

    Of unknown architectures, some that predict the next token are called Model, too.
    """
    architecture = architecture_of(config) or ""
    headless = _kind(architecture) in _KINDS and not architecture.endswith((CAUSAL, MULTIMODAL))
    if headless or re.search(r"Bert|Roberta", architecture):
        return f"config.json names {architecture}"
    if is_embedding_model(folder):
        return f"{MODULES} marks this as an embedding model"
    return None


def size_of(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """Return a size from config.json, or ``default`` if it is missing.  Raises CheckpointError for an invalid size."""
    value = default if config.get(key) is None else config[key]
    if type(value) is not int or not 1 <= value <= MAX_DIMENSION_SIZE:
        raise CheckpointError(
            f"config.json: {key} is {shown(value)}; it must be a whole number from 1 to {MAX_DIMENSION_SIZE}: fetch "
            "the config again"
        )
    return value


def known_family(config: Mapping[str, Any]) -> Family | None:
    """Return the family of a model by its architecture, or None for an unknown one."""
    return FAMILIES.get(architecture_of(config) or "")


def family_of(config: Mapping[str, Any], tensors: Iterable[str] = (), linear: str | None = None) -> Family:
    """Return the family of a model, or one made from ``linear``, a regex searched in layer names.

    Raises CheckpointError for unknown architectures.
    """
    architecture = architecture_of(config)
    if architecture and architecture.startswith("GPT2"):
        raise CheckpointError(
            f"{architecture} stores its weights transposed, [K, N] instead of [N, K]; such models cannot be converted"
        )
    if linear is not None:
        (regex,) = compile_regexes([linear], "--linear", layer_names(tensors))
        return replace(UNKNOWN, linear=regex)
    if architecture is None or architecture not in FAMILIES:
        problem = (
            f"architecture {architecture!r} is not known"
            if architecture
            else "config.json names no architecture"
        )
        raise CheckpointError(
            f"{problem}; known are {', '.join(_KINDS)}, each with its usual heads. For another, name its linear layers "
            "yourself: --linear REGEX, searched in the names that slidesparse inspect shows"
        )
    return FAMILIES[architecture]


def matched(
    layers: Sequence[str], groups: Iterable[tuple[str, ...]], regexes: Sequence[str], option: str
) -> set[str]:
    """Return the layers that the regexes of ``option`` match, searched in names without ``.weight``.

    Raises CheckpointError for a regex that does not compile or matches nothing, and if a group that vLLM fuses is
    matched only in part, because the parts of one matrix must be treated alike.
    """
    selected: set[str] = set()
    for text, regex in zip(regexes, compile_regexes(regexes, option, layers), strict=True):
        matches = {name for name in layers if regex.search(name)}
        if not matches:
            example = f", such as {layers[0]}" if layers else ""
            raise CheckpointError(
                f"{option} {shown(text)} matches none of the {len(layers)} linear layers{example}"
            )
        selected |= matches
    for group in groups:
        covered = [name for name in group if name in selected]
        if covered and len(covered) < len(group):
            uncovered = [name for name in group if name not in selected]
            raise CheckpointError(
                f"{option} covers {', '.join(covered)} but not {', '.join(uncovered)}; vLLM fuses them into "
                f"one matrix, so {_VERBS[option]} all of them or none"
            )
    return selected


_VERBS = {"--ignore": "ignore", "--skip": "skip", "--layer": "name", "--linear": "name"}


def serving_names(layer: str) -> list[str]:
    """Return the names that vLLM may use for a layer, its own first.

    vLLM adds the prefix ``model.`` to the names of bare models, and (0.28 at least) calls the attention of BERT-like
    encoders ``attention.output``, like the layer after it.  The routed experts of a layer, which vLLM fuses and
    renames, are covered by one regex.
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
