"""The plan of an end-to-end benchmark: checkpoints, systems, and the steps that ``vllm bench throughput`` takes.

M is the number of tokens of one step of the engine: every linear layer multiplies activations [M, K].  After appendix
E.3 of arXiv 2603.05232:

prefill
    S = M / P prompts of P tokens per step, with one output token each, which the prefill itself produces, so no step
    decodes.  The engine's limit of tokens per step is M.  ``--max-num-seqs`` is at least twice S, because a request
    occupies its slot until the result of its step is back, and the scheduler prepares the next step before that.
decode
    ``--max-num-seqs M`` and M prompts, which are prefilled in steps of at most PREFILL_TOKENS tokens, short ones in one
    step; every later step produces one token for each of the M sequences.

Prefix caching is off: of thousands of random prompts, two may share a prefix, which would be skipped.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path

from slidesparse.checkpoint.metadata import Metadata
from slidesparse.checkpoint.storage import CheckpointError, text_config
from slidesparse.checkpoint.w8a8 import parse_block
from slidesparse.errors import SlideSparseError
from slidesparse.flags import (
    AUTO,
    BACKEND,
    DISABLE,
    FUSE,
    MODE,
    REQUIRE,
    SPARSITY,
    USE_CUBLASLT,
    USE_CUSPARSELT,
)
from slidesparse.pattern import Pattern, parse_pattern

PREFILL, DECODE = "prefill", "decode"
STAGES = (PREFILL, DECODE)
TOKENS = {
    PREFILL: (512, 1024, 2048, 4096, 8192, 16384, 32768),
    DECODE: (1, 4, 16, 32, 64, 128, 256),
}
STOCK, CUBLASLT, DENSE = "stock", "cublaslt", "dense"
SPARSE, CUSPARSELT, UNFUSED = "sparse", "cusparselt", "unfused"
# Our flags that each system sets.  stock, and any folder that is named by no pattern, such as bf16, runs without the
# plugin; dense is an unpruned checkpoint with the plugin as by default, and require has our kernels run its experts,
# too; unfused leaves norms and activations alone.
SYSTEMS: dict[str, dict[str, str]] = {
    STOCK: {},
    CUBLASLT: {USE_CUBLASLT: "1"},
    DENSE: {MODE: AUTO},
    REQUIRE: {MODE: REQUIRE},
    SPARSE: {USE_CUSPARSELT: "1"},
    CUSPARSELT: {USE_CUSPARSELT: "1", BACKEND: "cusparselt"},
    UNFUSED: {USE_CUSPARSELT: "1", FUSE: "0"},
}
PRUNED_SYSTEMS = (SPARSE, CUSPARSELT, UNFUSED)  # those that run a pattern
PLUGIN_SYSTEMS = tuple(name for name, flags in SYSTEMS.items() if flags)
FLAGS = (MODE, USE_CUSPARSELT, USE_CUBLASLT, DISABLE, SPARSITY, BACKEND, FUSE)

TOKENIZER = "tokenizer"  # the folder of the placeholder in checkpoints of `slidesparse synth`
ROUTING = "VLLM_MOE_ROUTING_SIMULATION_STRATEGY"  # vLLM's, by which it ignores the routers of a mixture
PLUGIN, PLUGINS = "slidesparse", "VLLM_PLUGINS"
# The groups of entry points that vLLM loads whole when VLLM_PLUGINS is not set.
PLUGIN_GROUPS = tuple(
    f"vllm.{kind}_plugins" for kind in ("general", "platform", "io_processor", "stat_logger")
)

# Of a step that prefills the prompts of decode: vLLM's own limit for offline use on these GPUs.
PREFILL_TOKENS = 16384
WARMUP_STEPS = 2  # of prefill, before the clock starts; decode warms up with all its sequences
MIN_SEQUENCES = 256  # vLLM's own limit while serving: the CUDA graphs it captures depend on it
# Room for prompts, beyond a quarter of their length: a random one may be longer than requested, and vLLM refuses a text
# with more characters than the longest token's times the tokens that fit, not counting spaces between tokens.
SLACK_TOKENS = 32  # tokens


class E2eError(SlideSparseError, ValueError):
    """The options or checkpoints cannot be measured together."""


@dataclass(frozen=True)
class Variant:
    """A checkpoint of the model."""

    folder: Path
    pattern: Pattern | None  # None: not pruned
    layout: str
    dtype: str  # "int8" or "fp8"; "" if it is not W8A8
    positions: int | None  # longest supported sequence; None: unknown


@dataclass(frozen=True)
class Model:
    """One model to measure: its checkpoints by system and pattern."""

    name: str
    dtype: str
    pruned: Mapping[str, Variant]  # by pattern, such as "6:8"
    dense: Variant  # what dense systems run
    others: Mapping[str, Variant]  # by the name of their folder, such as "bf16"


def find_model(folder: Path, name: str | None = None) -> Model:
    """Read a checkpoint, or a folder of them: named by pattern, ``dense``, or anything else, such as ``bf16``.

    Dense systems run the checkpoint called ``dense``, or else the least pruned one, because zeros save power.

    Raises E2eError for what cannot be measured together, and MetadataError and PatternError.
    """
    single = (folder / "config.json").is_file()
    found = [folder] if single else sorted(path.parent for path in folder.glob("*/config.json"))
    variants = {path.name: read_variant(path) for path in found}
    kinds = {variant.dtype for variant in variants.values()} - {""}
    if len(kinds) != 1:
        raise E2eError(
            f"{folder} holds {' and '.join(sorted(kinds)) or 'no'} W8A8 checkpoints; name a folder of one type, with "
            "checkpoints in folders such as dense, 2_8 and bf16"
        )
    pruned = {v.pattern.ratio: v for v in variants.values() if v.pattern}
    named = {key: v for key, v in variants.items() if not single and re.fullmatch(r"\d.*", key)}
    for key, variant in named.items():
        if parse_pattern(key) != variant.pattern:
            raise E2eError(
                f"{variant.folder} is named {key}, but was pruned to {variant.pattern or 'no pattern'}"
            )
    plain = next((v for v in variants.values() if v.dtype and not v.pattern), None)
    dense = variants.get(DENSE) or plain or max(pruned.values(), key=_density)
    others = {key: v for key, v in variants.items() if not v.dtype}
    if name is None:
        name = folder.resolve().name
        if single:  # without its pattern
            ends = [DENSE, *([dense.pattern.flag, dense.pattern.ratio] if dense.pattern else [])]
            name = re.sub(rf"(^|[-_.])({'|'.join(map(re.escape, ends))})$", "", name)
    return Model(name or folder.resolve().parent.name, kinds.pop(), pruned, dense, others)


def _density(variant: Variant) -> float:
    return float(variant.pattern.density) if variant.pattern else 1.0


def read_variant(folder: Path) -> Variant:
    """Read ``config.json`` of a checkpoint.  Raises E2eError and MetadataError."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        longest = text_config(config).get("max_position_embeddings")
        block, positions = config.get("quantization_config"), int(longest) if longest else None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise E2eError(f"{path} cannot be read ({type(error).__name__}: {error})") from error
    metadata = Metadata.of_config(block)
    try:
        schemes = parse_block(block).schemes if block else ()
        dtype = " and ".join(sorted({scheme.quant for scheme in schemes}))
    except CheckpointError:
        dtype = ""  # another quantization, such as W4A16
    pattern, layout = (metadata.pattern, metadata.layout) if metadata else (None, "dense")
    return Variant(folder, pattern, layout, dtype, positions)


@dataclass(frozen=True)
class Workload:
    """The sizes of runs."""

    prompt: int = 1024  # the largest P of prefill: a smaller M is one prompt of M tokens
    contexts: tuple[int, ...] = (16,)  # tokens of a prompt in decode
    prefill_steps: int = 128
    decode_steps: int = 256  # output tokens of a sequence
    vllm_args: tuple[str, ...] = ()

    @property
    def conditions(self) -> dict[str, object]:
        """The sizes that all rows of a table share."""
        return {
            "prefill_steps": self.prefill_steps,
            "decode_steps": self.decode_steps,
            "vllm_args": list(self.vllm_args),
        }

    def sizes(self, stage: str, m: int) -> list[Size]:
        """Return the requests that make steps of ``m`` tokens: one of prefill, one of decode for each context.

        Raises E2eError.
        """
        if stage == DECODE:
            most = {context: max(m, min(context * m, PREFILL_TOKENS)) for context in self.contexts}
            return [Size(context, self.decode_steps, m, m, batched, m) for context, batched in most.items()]
        prompt = min(m, self.prompt)
        if m % prompt:
            raise E2eError(
                f"prefill M {m} is no multiple of the prompt length {prompt}; "
                "take one that is, or set --prompt to a divisor of it"
            )
        together = m // prompt
        sequences = min(m, max(2 * together, MIN_SEQUENCES))
        return [Size(prompt, 1, self.prefill_steps * together, sequences, m, WARMUP_STEPS * together)]


@dataclass(frozen=True)
class Size:
    """One run of ``vllm bench throughput``; lengths in tokens."""

    prompt: int
    output: int
    prompts: int
    sequences: int  # --max-num-seqs
    batched: int  # --max-num-batched-tokens
    warmups: int  # prompts before the clock starts


Column = tuple[Model, str, str, Variant]  # a system and pattern of a model, and the checkpoint that they run


@dataclass(frozen=True)
class Run:
    """One measurement: a system at one M, in one round."""

    model: str
    dtype: str
    stage: str
    m: int
    system: str
    pattern: str  # "6:8", or "dense"
    round: int  # from 1
    variant: Variant
    size: Size

    @property
    def key(self) -> dict[str, object]:
        """The key columns of its row."""
        cell = {"model": self.model, "dtype": self.dtype, "stage": self.stage, "M": self.m}
        cell |= {"context": self.size.prompt, "system": self.system, "pattern": self.pattern}
        return {**cell, "round": self.round}

    @property
    def label(self) -> str:
        """The run as text: ``prefill M 512, int8 sparse 6:8, round 1``."""
        which = self.system if self.pattern == DENSE else f"{self.system} {self.pattern}"
        return f"{self.stage} M {self.m}, {self.dtype} {which}, round {self.round}"


def runs(
    models: Sequence[Model],
    stages: Sequence[str],
    tokens: Mapping[str, Sequence[int]],
    systems: Sequence[str],
    patterns: Sequence[str] | None,
    rounds: int,
    workload: Workload,
) -> list[Run]:
    """Return all runs in order: round by round, the systems of a cell in turn, every other round in reverse.

    Args:
        models: one model, or its checkpoints of several types, which take turns, too.
        tokens: M of each stage.
        patterns: those that pruned systems run; None for all.

    Raises E2eError for a system, pattern or M that cannot be run.
    """
    columns = [column for system in systems for column in _columns(models, system, patterns)]
    cells = [(stage, m, size) for stage in stages for m in tokens[stage] for size in workload.sizes(stage, m)]
    planned = []
    for number in range(1, rounds + 1):
        for stage, m, size in cells:
            for model, system, pattern, variant in columns[:: 1 if number % 2 else -1]:
                _require_fit(variant, size, f"{stage} M {m}")
                planned.append(Run(model.name, model.dtype, stage, m, system, pattern, number, variant, size))
    return planned


def _columns(models: Sequence[Model], system: str, patterns: Sequence[str] | None) -> list[Column]:
    """Return the columns of a system, of the models that have its checkpoints.  Raises E2eError if none has."""
    if system in PRUNED_SYSTEMS:
        there = {key: variant for model in models for key, variant in model.pruned.items()}
        chosen = sorted(there, key=lambda key: _density(there[key])) if patterns is None else patterns
        missing = [key for key in chosen if key not in there]
        if missing or not chosen:
            raise E2eError(
                f"no checkpoint of {', '.join(missing) or 'any pattern'}; there are {', '.join(there) or 'none'}: "
                "slidesparse convert SRC OUT --sparsity 6:8"
            )
        return [
            (model, system, key, model.pruned[key])
            for model in models
            for key in chosen
            if key in model.pruned
        ]
    if system in SYSTEMS:
        for model in models:
            if model.dense.layout != "dense":
                raise E2eError(f"{model.dense.folder} holds slided weights, which no dense system runs")
        return [(model, system, DENSE, model.dense) for model in models]
    if not (
        found := [(model, system, DENSE, model.others[system]) for model in models if system in model.others]
    ):
        others = ", ".join(name for model in models for name in model.others)
        raise E2eError(f"--systems {system!r} is neither one of {', '.join(SYSTEMS)} nor a folder: {others}")
    return found


def _require_fit(variant: Variant, size: Size, label: str) -> None:
    needed = size.prompt + size.output
    if variant.positions is not None and needed > variant.positions:
        raise E2eError(
            f"{label} needs sequences of {needed} tokens, {variant.folder} takes {variant.positions}; "
            "set --prompt, --context or --decode-steps lower"
        )


def has_placeholder(folder: Path) -> bool:
    """Return whether a checkpoint has a placeholder for a tokenizer, as those of random weights do."""
    return (folder / TOKENIZER).is_dir() and not (folder / "tokenizer.json").exists()


def arguments(run: Run, workload: Workload, result: Path, size: Size | None = None) -> list[str]:
    """Return the arguments of ``vllm bench throughput``, equal for all systems but for the checkpoint.

    ``result`` gets vLLM's JSON.  ``size`` None is that of the run.
    """
    size = size or run.size
    longest = (size.prompt + size.output) * 5 // 4 + SLACK_TOKENS
    if run.variant.positions is not None:
        longest = min(longest, run.variant.positions)
    words = ["--model", str(run.variant.folder), "--dataset-name", "random"]
    if has_placeholder(run.variant.folder):
        words += ["--tokenizer", str(run.variant.folder / TOKENIZER)]
    words += ["--random-input-len", str(size.prompt), "--random-output-len", str(size.output)]
    words += ["--num-prompts", str(size.prompts), "--num-warmups", str(size.warmups), "--seed", "0"]
    words += ["--max-num-seqs", str(size.sequences), "--max-num-batched-tokens", str(size.batched)]
    words += ["--max-model-len", str(longest), "--no-enable-prefix-caching", "--output-json", str(result)]
    return [*words, *workload.vllm_args]


def environment(system: str, environ: Mapping[str, str], folder: Path) -> dict[str, str]:
    """Return ``environ`` with the flags of ``system`` and no other SlideSparse flags, for the checkpoint ``folder``.

    Random routers send most tokens to few experts, to others in each model.  So tokens of random weights are routed
    uniformly at random in all systems, unless ``environ`` says how.

    Systems without the plugin are vLLM without us: VLLM_PLUGINS names all other plugins, so that none of our code is
    imported.
    """
    cleaned = {name: value for name, value in environ.items() if name not in FLAGS}
    listed = environ.get(PLUGINS)
    if listed is None:
        names = sorted({entry.name for group in PLUGIN_GROUPS for entry in entry_points(group=group)})
    else:
        names = listed.split(",")
    others = [name for name in names if name != PLUGIN]
    if system not in PLUGIN_SYSTEMS:
        cleaned[PLUGINS] = ",".join(others)
    elif listed is not None:
        cleaned[PLUGINS] = ",".join([*others, PLUGIN])
    if has_placeholder(folder):
        cleaned.setdefault(ROUTING, "uniform_random")
    return cleaned | SYSTEMS.get(system, {})
