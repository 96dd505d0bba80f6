"""The plan of an end-to-end benchmark: checkpoints, systems, and the steps that ``vllm bench throughput`` takes.

M is the number of tokens of one step of the engine: every linear layer multiplies activations [M, K].  After appendix
E.3 of arXiv 2603.05232:

prefill
    S = M / P prompts of P tokens per step, with one output token each, which the prefill itself produces, so no step
    decodes.  ``--max-num-batched-tokens M`` bounds a step.  ``--max-num-seqs`` is at least twice S, because a request
    occupies its slot until the result of its step is back, and the scheduler prepares the next step before that.
decode
    ``--max-num-seqs M`` and M prompts, which are prefilled in steps of at most PREFILL_TOKENS tokens, short ones in one
    step; every later step produces one token for each of the M sequences.

Prefix caching is off: of thousands of random prompts, two may share a prefix, which would be skipped.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import entry_points
from pathlib import Path

from packaging.version import Version

from benchmarks.e2e_models import DENSE, E2eError, Model, Variant
from slidesparse.convert.synth_model import TOKENIZER
from slidesparse.flags import BACKEND, DISABLE, FUSE, SPARSITY, USE_CUBLASLT, USE_CUSPARSELT

PREFILL, DECODE = "prefill", "decode"
STAGES = (PREFILL, DECODE)
TOKENS = {
    PREFILL: (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536),
    DECODE: (64, 128, 256, 512),
}
STOCK, CUBLASLT = "stock", "cublaslt"
BLOCKS = "dense"  # an unpruned checkpoint with the kernels for sparse ones
# The systems that run a pattern: as the plugin does by default, by cuSPARSELt, and with norms and activations unfused.
SPARSE, CUSPARSELT, UNFUSED = "sparse", "cusparselt", "unfused"
SLIDED_SYSTEMS = (SPARSE, CUSPARSELT, UNFUSED)
# Our flags that each system sets; for stock the plugin is not even loaded (`environment`).
SYSTEMS: dict[str, dict[str, str]] = {
    STOCK: {},
    CUBLASLT: {USE_CUBLASLT: "1"},
    BLOCKS: {USE_CUSPARSELT: "1", SPARSITY: "dense"},
    SPARSE: {USE_CUSPARSELT: "1"},
    CUSPARSELT: {USE_CUSPARSELT: "1", BACKEND: "cusparselt"},
    UNFUSED: {USE_CUSPARSELT: "1", FUSE: "0"},
}
FLAGS = (USE_CUSPARSELT, USE_CUBLASLT, DISABLE, SPARSITY, BACKEND, FUSE)

PLUGIN, PLUGINS = "slidesparse", "VLLM_PLUGINS"
# The groups of entry points that vLLM loads whole when VLLM_PLUGINS is not set.
PLUGIN_GROUPS = tuple(
    f"vllm.{kind}_plugins" for kind in ("general", "platform", "io_processor", "stat_logger")
)

DECODE_PROMPT_LEN = 16  # tokens, by default
# Of a step that prefills the prompts of decode: vLLM's own limit for offline use on these GPUs.
PREFILL_TOKENS = 16384
WARMUP_STEPS = 2  # of prefill, before the clock starts; decode warms up with all its sequences
MIN_SEQUENCES = 256  # vLLM's own limit while serving: the CUDA graphs it captures depend on it
# Room for prompts, beyond a quarter of their length: a random one may be longer than requested, and vLLM refuses a text
# with more characters than the longest token's times the tokens that fit, not counting spaces between tokens.
SLACK_TOKENS = 32  # tokens
# The first vLLM with --random-input-len, which it prefers to --input-len.
RANDOM_LENGTHS_VERSION = Version("0.14")
WARMUPS_VERSION = Version("0.22")  # the first vLLM with --num-warmups


@dataclass(frozen=True)
class Workload:
    """The sizes that all runs of a table share."""

    prompt_len: int = 1024  # the largest P of prefill: a smaller M is one prompt of M tokens
    prefill_steps: int = 128
    decode_steps: int = 256  # output tokens of a sequence
    decode_prompt_len: int = DECODE_PROMPT_LEN
    vllm_args: tuple[str, ...] = ()

    @property
    def conditions(self) -> dict[str, object]:
        """The sizes as plain values."""
        return {**asdict(self), "vllm_args": list(self.vllm_args)}

    def size(self, stage: str, m: int) -> Size:
        """Return the request that makes steps of ``m`` tokens.  Raises E2eError."""
        if stage == DECODE:
            prompt = self.decode_prompt_len
            return Size(prompt, self.decode_steps, m, m, max(m, min(prompt * m, PREFILL_TOKENS)), m)
        prompt = min(m, self.prompt_len)
        if m % prompt:
            raise E2eError(
                f"prefill M {m} is no multiple of the prompt length {prompt}; "
                "take one that is, or set --prompt-len to a divisor of it"
            )
        together = m // prompt
        sequences = min(m, max(2 * together, MIN_SEQUENCES))
        return Size(prompt, 1, self.prefill_steps * together, sequences, m, WARMUP_STEPS * together)


@dataclass(frozen=True)
class Size:
    """One run of ``vllm bench throughput``; lengths in tokens."""

    prompt: int
    output: int
    prompts: int
    sequences: int  # --max-num-seqs
    batched: int  # --max-num-batched-tokens
    warmups: int  # prompts before the clock starts


@dataclass(frozen=True)
class Run:
    """One measurement: a system at one M, in one round."""

    model: str
    dtype: str
    stage: str
    m: int
    pattern: str  # "6:8", or "dense"
    system: str
    round: int  # from 1
    variant: Variant
    size: Size

    @property
    def key(self) -> dict[str, object]:
        """The key columns of its row."""
        names = {"model": self.model, "dtype": self.dtype, "stage": self.stage, "M": self.m}
        return {**names, "pattern": self.pattern, "system": self.system, "round": self.round}

    @property
    def label(self) -> str:
        """The run as text: ``prefill M 512, sparse 6:8, round 1``."""
        which = self.system if self.pattern == DENSE else f"{self.system} {self.pattern}"
        return f"{self.stage} M {self.m}, {which}, round {self.round}"

    @property
    def file_name(self) -> str:
        """The name of its log, without suffix."""
        return re.sub(r"[^\w.-]", "_", "-".join(map(str, self.key.values())))


def runs(
    model: Model,
    stages: Sequence[str],
    tokens: Mapping[str, Sequence[int]],
    systems: Sequence[str],
    rounds: int,
    workload: Workload,
    first: int = 1,
) -> list[Run]:
    """Return all runs in order: round by round, the systems of a cell in turn, every other round in reverse.

    ``tokens`` has the M of each stage, ``first`` is the number of the first round.  Raises E2eError for an M that
    cannot be run.
    """
    columns = [(system, DENSE, model.dense) for system in systems if system not in SLIDED_SYSTEMS]
    for system in (name for name in systems if name in SLIDED_SYSTEMS):
        columns += [(system, pattern, variant) for pattern, variant in model.sparse.items()]
    planned = []
    for number in range(first, first + rounds):
        for stage in stages:
            for m in tokens[stage]:
                size = workload.size(stage, m)
                for system, pattern, variant in columns[:: 1 if number % 2 else -1]:
                    _require_fit(variant, size, f"{stage} M {m}")
                    planned.append(
                        Run(model.name, model.dtype, stage, m, pattern, system, number, variant, size)
                    )
    return planned


def _require_fit(variant: Variant, size: Size, label: str) -> None:
    needed = size.prompt + size.output
    if variant.positions is not None and needed > variant.positions:
        raise E2eError(
            f"{label} needs sequences of {needed} tokens, {variant.folder} takes {variant.positions}; "
            "set --prompt-len, --decode-prompt-len or --decode-steps lower"
        )


def command(
    vllm: str, version: Version | None, run: Run, workload: Workload, result: Path, size: Size | None = None
) -> list[str]:
    """Return the command line of a run, equal for all systems but for the checkpoint; ``result`` gets vLLM's JSON.

    ``version`` None: unknown, and assumed to be recent.  ``size`` None is that of the run.
    """
    size = size or run.size
    longest = (size.prompt + size.output) * 5 // 4 + SLACK_TOKENS
    if run.variant.positions is not None:
        longest = min(longest, run.variant.positions)
    arguments = [vllm, "bench", "throughput", "--model", str(run.variant.folder), "--dataset-name", "random"]
    stand_in = run.variant.folder / TOKENIZER
    if stand_in.is_dir() and not (run.variant.folder / "tokenizer.json").exists():
        arguments += ["--tokenizer", str(stand_in)]
    arguments += ["--input-len", str(size.prompt), "--output-len", str(size.output)]
    if version is None or version >= RANDOM_LENGTHS_VERSION:
        arguments += ["--random-input-len", str(size.prompt), "--random-output-len", str(size.output)]
    arguments += ["--num-prompts", str(size.prompts), "--seed", "0"]
    if version is None or version >= WARMUPS_VERSION:
        arguments += ["--num-warmups", str(size.warmups)]
    arguments += ["--max-num-seqs", str(size.sequences), "--max-num-batched-tokens", str(size.batched)]
    arguments += ["--max-model-len", str(longest), "--no-enable-prefix-caching", "--output-json", str(result)]
    return [*arguments, *workload.vllm_args]


def environment(system: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Return ``environ`` with the flags of ``system`` and no other SlideSparse flags.

    ``stock`` is vLLM without us: VLLM_PLUGINS names all other plugins, so that none of our code is imported.
    """
    cleaned = {name: value for name, value in environ.items() if name not in FLAGS}
    listed = environ.get(PLUGINS)
    names = _other_plugins() if listed is None else [name for name in listed.split(",") if name != PLUGIN]
    if system == STOCK:
        cleaned[PLUGINS] = ",".join(names)
    elif listed is not None:
        cleaned[PLUGINS] = ",".join([*names, PLUGIN])
    return cleaned | SYSTEMS[system]


def _other_plugins() -> list[str]:
    names = {entry.name for group in PLUGIN_GROUPS for entry in entry_points(group=group)}
    return sorted(names - {PLUGIN})


def differences(system: str, environ: Mapping[str, str]) -> list[str]:
    """Return arguments of ``env`` that turn ``environ`` into that of ``system``: ``-u NAME`` and ``NAME=VALUE``."""
    variables = environment(system, environ)
    unset = [word for name in FLAGS if name in environ and name not in variables for word in ("-u", name)]
    changed = [f"{name}={value}" for name, value in variables.items() if environ.get(name) != value]
    return [*unset, *changed]
