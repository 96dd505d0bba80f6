"""Engines on a GPU for tests: a trained model in every pattern, and many engines at a time, each with one task.

A test declares with `needs` which engines it compares.  The engines of all selected tests are submitted at once and
run a dozen at a time, because an engine for a small model mostly waits for its own Python code.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import bitnets
import numpy as np
import pytest
import torch
import trained
from engines import STOCK, Answer, EnginePool, Request
from gpu_layers import require_served
from safetensors.torch import load_file, save_file
from torch import Tensor

from slidesparse.checkpoint.metadata import KEY, LayerEntry, Metadata
from slidesparse.convert.options import ConvertOptions
from slidesparse.convert.stream import convert
from slidesparse.flags import BACKEND
from slidesparse.pattern import MixedPattern, Pattern, parse_pattern
from slidesparse.prune import prune

AT_A_TIME = 12
GIB = 1 << 30
SEQUENCES, BATCHED_TOKENS = 32, 512

# vLLM pads decode batches to the sizes that it has captured; none of these crosses a bucket of tokens (`plans.bucket`),
# so that a padded batch runs by the same algorithm as one that is not.
CAPTURED = [1, 2, 4, 8, 16, 32, 48, 64, 128, 256, 512]
MODES: dict[str, dict[str, Any]] = {
    "eager": {"enforce_eager": True},
    # split and captured as always, with PyTorch's and vLLM's kernels between the operators instead of Inductor's
    "graphs": {"compilation_config": {"backend": "eager", "cudagraph_capture_sizes": CAPTURED}},
    "compiled": {"compilation_config": {"cudagraph_capture_sizes": CAPTURED}, "async_scheduling": True},
}
PARALLEL: dict[str, dict[str, Any]] = {
    "": {},
    "tp": {"tensor_parallel_size": 2, "disable_custom_all_reduce": True},
    "pp": {"pipeline_parallel_size": 2},
    "tp4": {"tensor_parallel_size": 4, "disable_custom_all_reduce": True},
    "pp2tp2": {"pipeline_parallel_size": 2, "tensor_parallel_size": 2, "disable_custom_all_reduce": True},
}
# A size given makes vLLM skip the measurement of free memory, which other engines would disturb; at the start it only
# asks whether this share of all memory is free.
MEMORY: dict[str, Any] = {"kv_cache_memory_bytes": GIB, "gpu_memory_utilization": 0.02}
COMMON: dict[str, Any] = {**MEMORY, "enforce_eager": False, "enable_prefix_caching": False}
COMMON |= {"max_model_len": 512, "max_num_seqs": SEQUENCES, "max_num_batched_tokens": BATCHED_TOKENS}
COMMON |= {"async_scheduling": False}
STOCK_KERNELS = {"quantization": "compressed-tensors"}  # vLLM's, under a model that only the plugin has
CODES = torch.int8, torch.float8_e4m3fn
YARDSTICKS = {"exact": "float64", "rounded": "bfloat16"}

# Prompts and what is generated stay within one block of keys of FlashAttention 3 (128 for heads of 64), which it cannot
# split, however many splits a captured graph allows for.
PROMPTS, PROMPT_LENGTH, NEW_TOKENS = 16, 64, 48
WINDOWS, WINDOW_LENGTH = 40, 257  # 10,240 positions

F = TypeVar("F", bound=Callable[..., None])


@dataclass(frozen=True)
class Engine:
    """One engine: a checkpoint of the trained model, the way it is served, and its task."""

    quant: str
    pattern: str
    dtype: str
    layout: str = "dense"
    mode: str = "eager"  # of MODES
    # "sparse", "stock", or "exact" and "rounded": our operators by the reference backend, see `Request`
    system: str = "sparse"
    task: str = "prove"
    negated: bool = False  # the codes of o_proj are negated, which gives other weights of the same pattern
    skip: str = ""  # layers that are quantized and not pruned, one of the four kinds
    parallel: str = ""  # of PARALLEL
    fuse: bool = False  # norms and activations with quantization, where the model is compiled
    bitnet: bool = False  # a BitNet with random weights and the trained model's shape, instead of that
    head: bool = False  # whether the lm_head is quantized, too

    @property
    def layers(self) -> str:
        """The count of sparse layers in the summary; in a pipeline each of two processes counts its own."""
        count = trained.LAYERS // 2 if self.parallel.startswith("pp") else trained.LAYERS
        kind = "in blocks" if self.pattern == "dense" else "sparse"
        return f"{count * 3 // 4 if self.skip else count} layers {kind}"


@dataclass(frozen=True)
class Best:
    """The best and the second-best token at a position."""

    token: int
    logprob: float
    second: int
    second_logprob: float

    @property
    def margin(self) -> float:
        return self.logprob - self.second_logprob


def needs(engines: Callable[..., list[Engine]]) -> Callable[[F], F]:
    """Decorate a test with the engines that it needs, as a function of its parameters."""

    def mark(test: F) -> F:
        test.engines = engines  # type: ignore[attr-defined]
        return test

    return mark


def needed(request: pytest.FixtureRequest) -> Iterable[Engine]:
    """Yield the engines that the selected tests of the requesting module need."""
    for item in request.session.items:
        engines = getattr(getattr(item, "function", None), "engines", None)
        skipped = any(mark.args and mark.args[0] for mark in item.iter_markers("skipif"))
        if engines and not skipped and item.module is request.module:  # type: ignore[attr-defined]
            callspec = getattr(item, "callspec", None)
            yield from engines(**(callspec.params if callspec else {}))


class GpuEngines:
    """The trained model, its converted checkpoints, and engines that serve them."""

    def __init__(
        self,
        folder: Path,
        tasks: dict[str, Callable[[GpuEngines], dict[str, Any]]],
        at_a_time: int = AT_A_TIME,
    ) -> None:
        """Train the model.

        ``tasks`` map a task other than "prove" to a function that returns its arguments, among which "env" and
        "options" are for the engine.  ``at_a_time`` is the largest number of engines that run at once.
        """
        self.folder, self.source, self.tasks = folder, folder / "trained", tasks
        # the servers import vLLM during the training
        self.pool = EnginePool(min(at_a_time, 3 * (os.cpu_count() or 1) // 4 or 1))
        command = [sys.executable, trained.__file__, str(self.source)]
        run = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=300, check=True)
        self.outcome = trained.Outcome(**json.loads(run.stdout.splitlines()[-1]))
        self.text = np.load(self.source / trained.HELD_OUT)
        self.backend = require_served()  # of the engines that are sparse
        self._answers: dict[Engine, Future[Answer]] = {}

    def start(self, engine: Engine) -> Future[Answer]:
        """Start an engine, unless it was started before, and return its future answer."""
        if engine not in self._answers:
            self._answers[engine] = self.pool.submit(self._request(engine))
        return self._answers[engine]

    def answer(self, engine: Engine) -> Answer:
        """Wait for the engine's answer, and check that the engine ran as requested."""
        answer = self.start(engine).result()
        assert not answer.error, f"{engine}: {answer.error}\n{answer.log[-6000:]}"
        if engine.system == "stock":
            assert not answer.summary, "stock vLLM was meant, but the plugin served"
        else:
            backend = self.backend if engine.system == "sparse" else "reference"
            assert engine.layers in answer.summary, f"{engine}: {answer.summary}"
            assert f"{engine.layout} layout; backend {backend}" in answer.summary, engine
        return answer

    def answers(self, engines: Iterable[Engine]) -> list[Answer]:
        return [self.answer(engine) for engine in engines]

    def wait(self) -> None:
        """Wait until no engine runs."""
        wait(self._answers.values())

    def checkpoint(self, engine: Engine) -> Path:
        """The checkpoint that the engine serves, converted at its first use."""
        model = "bitnet" if engine.bitnet else "trained"
        name = f"{model}-{engine.quant}-{engine.pattern.replace(':', '_')}-{engine.layout}{engine.skip}"
        out = self.folder / f"{name}{'-negated' * engine.negated}{'-head' * engine.head}"
        if not out.exists():
            pattern, unpruned = parse_pattern(engine.pattern), parse_pattern("dense")
            mixed = isinstance(pattern, MixedPattern)  # which `convert` does not write
            names = [engine.skip] * bool(engine.skip) + ["lm_head"] * engine.head
            skipped = tuple((name, unpruned) for name in names)
            written = unpruned if mixed else pattern
            options = ConvertOptions(written, engine.quant, engine.layout, layer_patterns=skipped)
            convert(self._bitnet() if engine.bitnet else self.source, out, options)
            if mixed:
                prune_codes(out, pattern)
            if engine.negated:
                edit_codes(out, "o_proj", torch.neg)
        return out

    def _bitnet(self) -> Path:
        """Master weights of a BitNet with the vocabulary and shape of the trained model."""
        folder = self.folder / "bitnet"
        if not folder.exists():
            shape = {"vocab_size": trained.VOCABULARY, **trained.SHAPE}
            # Top-1 tokens depend on the context, and float16 instead of float32 changes 6% of them; at 3, 16%.
            bitnets.write_master(folder, blocks=1.5, **shape)
        return folder

    def windows(self, count: int, length: int) -> list[list[int]]:
        """Windows of held-out text."""
        return trained.windows_of(self.text, count, length).tolist()  # type: ignore[no-any-return]

    def _request(self, engine: Engine) -> Request:
        work: dict[str, Any] = {"prompts": self.windows(PROMPTS, PROMPT_LENGTH), "tokens": NEW_TOKENS}
        if engine.task in self.tasks:
            work |= self.tasks[engine.task](self)
        else:  # captured attention may split long contexts, so that only short ones can be compared with eager
            work["windows"] = [] if engine.mode == "graphs" else self.windows(WINDOWS, WINDOW_LENGTH)
        stock = engine.system == "stock"
        return Request(
            str(self.checkpoint(engine)),
            env={
                **(STOCK if stock and not engine.bitnet else {}),
                BACKEND: "" if engine.system in YARDSTICKS else os.environ.get(BACKEND, ""),
                "SLIDESPARSE_FUSE": "1" if engine.fuse else "0",
                **work.pop("env", {}),
            },
            options={
                **COMMON,
                "dtype": engine.dtype,
                **MODES[engine.mode],
                **PARALLEL[engine.parallel],
                **(STOCK_KERNELS if stock and engine.bitnet else {}),
                **work.pop("options", {}),
            },
            task=engine.task,
            work=work,
            yardstick=YARDSTICKS.get(engine.system, ""),
            seconds=400,
        )

    def close(self) -> None:
        self.pool.close()


def edit_codes(folder: Path, layers: str, change: Callable[[Tensor], Tensor]) -> None:
    """Change the quantized weights of layers with ``layers`` in their names, as floats."""
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        for name, tensor in tensors.items():
            if layers in name and tensor.dtype in CODES:
                tensors[name] = change(tensor.float()).to(tensor.dtype)
        save_file(tensors, path, metadata={"format": "pt"})


def prune_codes(folder: Path, pattern: Pattern) -> None:
    """Prune a checkpoint's quantized layers by magnitude, and list them in its metadata."""
    edit_codes(folder, "_proj", lambda codes: prune(codes, pattern))
    config = json.loads((folder / "config.json").read_text())
    block = config["quantization_config"]
    layers = {}
    for path in folder.glob("*.safetensors"):
        for name, tensor in load_file(path).items():
            if tensor.dtype in CODES:
                layers[name.removesuffix(".weight")] = LayerEntry(pattern, tensor.shape[1])
    block[KEY] = Metadata(pattern, "dense", layers).to_json()
    if pattern == parse_pattern("dense"):
        del block[KEY]  # as other tools write it, which is served without a flag
    (folder / "config.json").write_text(json.dumps(config))


def teacher_forced(answer: Answer) -> list[Best]:
    """Return the top-1 token at each of the 10,240 positions of the windows."""
    return [Best(*row) for row in answer.data["forced"]]


def greedy(answer: Answer) -> list[list[Best]]:
    """Return the tokens generated after each prompt."""
    return [[Best(*row) for row in rows] for rows in answer.data["greedy"]]


def differences(actual: Sequence[object], expected: Sequence[object]) -> str:
    """Describe how many entries differ and the first that does; an empty text if none differs."""
    assert len(actual) == len(expected)
    places = [i for i, (a, b) in enumerate(zip(actual, expected, strict=True)) if a != b]
    if not places:
        return ""
    first = places[0]
    return f"{len(places)} of {len(actual)} differ, first number {first}: {actual[first]}, expected {expected[first]}"


def same_share(left: list[Best], right: list[Best]) -> float:
    """The share of positions with the same best token."""
    return sum(a.token == b.token for a, b in zip(left, right, strict=True)) / len(left)


def largest_change(left: list[Best], right: list[Best]) -> float:
    """The largest difference of a log-probability between two runs on the same text."""
    pairs = list(zip(left, right, strict=True))
    return max(max(abs(a.logprob - b.logprob), abs(a.second_logprob - b.second_logprob)) for a, b in pairs)


def mean_error(actual: list[Best], expected: list[Best]) -> float:
    """Mean distance between the best log-probabilities."""
    return float(np.mean([abs(a.logprob - b.logprob) for a, b in zip(actual, expected, strict=True)]))


def compiled_beside_stock(engine: Engine) -> list[Engine]:
    """List the four engines that `require_only_rounding` compares."""
    stock = replace(engine, system="stock", layout="dense")
    return [replace(variant, mode=mode) for variant in (stock, engine) for mode in ("eager", "compiled")]


def require_only_rounding(stock: Answer, stock_compiled: Answer, eager: Answer, compiled: Answer) -> None:
    """Check that compiled tokens equal eager ones except where Inductor's rounding can decide between two tokens.

    There the margin of the best token is at most twice the largest change of a log-probability by which compilation
    moves stock vLLM, once for each of the two tokens.  The number of such positions is bounded by stock's own count,
    doubled because our layers round once more, plus four standard deviations of such a count.
    """
    bound = 2 * largest_change(teacher_forced(stock), teacher_forced(stock_compiled))
    differing = differing_positions(teacher_forced(eager), teacher_forced(compiled))
    stock_differing = len(differing_positions(teacher_forced(stock), teacher_forced(stock_compiled)))
    texts = [differing_positions(*pair) for pair in zip(greedy(eager), greedy(compiled), strict=True)]
    diverged = [positions[0] for positions in texts if positions]
    largest = max((best.margin for best in differing + diverged), default=0.0)
    print(
        f"{len(differing)} of {len(teacher_forced(stock))} top-1 tokens differ, stock's {stock_differing}; "
        f"{len(diverged)} of {len(texts)} texts diverge; largest margin {largest:.4f} of {bound:.4f}"
    )
    assert largest <= bound
    assert len(differing) <= 2 * stock_differing + 4 * (2 * stock_differing) ** 0.5 + 4


def differing_positions(left: list[Best], right: list[Best]) -> list[Best]:
    """Positions of ``left`` at which ``right`` has another token; in generated text only the first is comparable."""
    return [a for a, b in zip(left, right, strict=True) if a.token != b.token]
