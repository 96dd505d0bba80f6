"""Run the plan of `benchmarks.e2e.plan` with all engines loaded side by side, taking turns.

Starting an engine takes longer than measuring it, and a machine changes over minutes.  Each system and pattern
therefore has one process that stays (`benchmarks.e2e.worker`), and all have to fit on the GPU together.  They run the
same benchmark of vLLM with the same arguments, on an engine whose limits are the largest of all its runs.
"""

from __future__ import annotations

import json
import os
import re
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import IO, Any

from benchmarks.conditions import cpu_conditions, gpu_conditions, usable_libraries
from benchmarks.e2e.plan import (
    CUBLASLT,
    DECODE,
    PLUGIN_SYSTEMS,
    Run,
    Size,
    Workload,
    arguments,
    environment,
)
from benchmarks.records import E2E, SHARED_CONDITIONS, Records
from slidesparse.checkpoint.storage import text_config
from slidesparse.errors import EnvironmentFault
from slidesparse.evaluate.engine import summaries
from slidesparse.gemm import DENSE as DENSE_PATH
from slidesparse.gemm import SPARSE as SPARSE_PATH
from slidesparse.tune import machine

CONDITIONS = (*SHARED_CONDITIONS, "cpu", "workload")  # that all rows of a table share
RUN_SECONDS = 1800.0  # of starting an engine, and of one run
END_SECONDS = 15  # between SIGTERM and SIGKILL
LAST_LINES = 8
BLOCK = 16  # tokens of a block of vLLM's KV cache
CACHE_HEADROOM = 1.1  # relative to what the runs need: finished sequences are still there when new ones begin
MIN_CACHE = 4096  # tokens; with less than two of a CPU's blocks, which are larger, vLLM waits forever
ROOT = Path(__file__).resolve().parents[2]  # the folder from which engines import this package
WORKER = (sys.executable, "-m", "benchmarks.e2e.worker")
# --gpu-memory-utilization: the cache's size is given, so this only has to be free at the start.
MEMORY_SHARE = 0.05


class RunError(RuntimeError):
    """A run failed; the message is the reason."""


def conditions() -> dict[str, Any]:
    """Return the conditions of this machine, queried in a child process, because this one must not use GPU memory."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(_conditions).result()


def _conditions() -> dict[str, Any]:
    try:
        gpu = machine.require_gpu()
    except EnvironmentFault:
        return cpu_conditions()
    usable, _ = usable_libraries(gpu)
    return gpu_conditions(gpu, {library.name: library.version() for library in usable})


def read_figures(run: Run, document: Mapping[str, Any], answer: Mapping[str, Any]) -> dict[str, float | None]:
    """Return a run's figures by column, from the JSON of ``vllm bench throughput`` and the engine's answer.

    prefill: ``total_num_tokens / elapsed_time``, prompt tokens as vLLM counted them and one output token a prompt.
    decode:  ``num_requests * output length / elapsed_time``, output tokens only.  Their number is exact, as the
    benchmark ignores ends of sequence; the time includes the steps that prefill the prompts.

    ``elapsed_time`` is wall time in seconds from handing all prompts to the engine until the last output is there:
    tokenizing, scheduling, attention, sampling and detokenizing included; loading, compiling, CUDA graph capture and
    warm-up not.  Raises RunError when the JSON is not of this run, or when its prompts were too short for M.
    """
    try:
        elapsed, total = float(document["elapsed_time"]), int(document["total_num_tokens"])
        requests = int(document["num_requests"])
    except (KeyError, TypeError, ValueError) as error:
        raise RunError(f"vLLM's JSON has no usable {error}: {json.dumps(document)[:300]}") from error
    size = run.size
    if elapsed <= 0 or requests != size.prompts:
        raise RunError(
            f"vLLM's JSON tells of {requests} requests in {elapsed} s; {size.prompts} were asked for"
        )
    prompts = total - requests * size.output
    if run.stage != DECODE and prompts * size.sequences < run.m * requests:
        raise RunError(
            f"prompts had {prompts / requests:.1f} tokens, not {size.prompt}, so that no step had {run.m}: "
            "the tokenizer does not keep the lengths of random prompts"
        )
    rate = (requests * size.output if run.stage == DECODE else total) / elapsed
    # The median of the steps of M tokens that follow another one: steps that waited for a busy CPU do not count, as
    # long as most did not.
    steps = [s for (before, _), (tokens, s) in pairwise(answer["steps"]) if before == tokens == run.m]
    watts = answer["watts"]
    return {
        "step_ms": 1000 * median(steps) if steps else None,
        "tokens_per_s": rate,
        "tokens_per_joule": rate / watts if watts else None,
        "graph_ms": answer["graph_ms"] if run.stage == DECODE else None,
    }


def check_log(run: Run, text: str) -> str:
    """Return the plugin's words on what it serves, "" for a system without it.  Raises RunError for another system."""
    served = summaries(text)
    if run.system not in PLUGIN_SYSTEMS:
        if served:
            raise RunError(f"the plugin served {served[0]['words']}, though {run.system} is vLLM without it")
        return ""
    if not served:
        raise RunError(
            "the plugin did not count its layers in the log: it is not installed in this environment, or "
            "VLLM_LOGGING_LEVEL hides its line"
        )
    facts = served[-1]
    path = DENSE_PATH if run.system == CUBLASLT else SPARSE_PATH
    layers = sum(facts["layers"].values()) if path == DENSE_PATH else facts["layers"].get(run.pattern, 0)
    if facts["path"] != path or not layers or (path == SPARSE_PATH and facts["pattern"] != run.pattern):
        raise RunError(f"the plugin served {facts['words']}, not {run.label}")
    return str(facts["words"])


@dataclass(frozen=True)
class Engine:
    """The key of an engine's process: runs with equal keys share one."""

    system: str
    pattern: str
    folder: Path

    @classmethod
    def of(cls, run: Run) -> Engine:
        """Return the engine that ``run`` needs."""
        return cls(run.system, run.pattern, run.variant.folder)

    @property
    def file_name(self) -> str:
        """The name of its log and its cache, without suffix."""
        checkpoint = f"{self.folder.parent.name}-{self.folder.name}"
        return f"engine-{checkpoint}-{self.system}-{self.pattern}".replace(":", "_")


def largest(runs: Sequence[Run]) -> Size:
    """Return the size of an engine that can do all of ``runs``."""
    sizes = [run.size for run in runs]
    return Size(
        prompt=max(size.prompt + size.output for size in sizes) - 1,
        output=1,
        prompts=1,
        sequences=max(size.sequences for size in sizes),
        batched=max(size.batched for size in sizes),
        warmups=0,
    )


def cache_tokens(runs: Sequence[Run]) -> int:
    """Return the tokens that the KV cache of an engine for ``runs`` must hold."""
    needed = 0
    for run in runs:
        size = run.size
        tokens = -(-(size.prompt + size.output) // BLOCK) * BLOCK
        sequences = run.m if run.stage == DECODE else min(size.sequences, 2 * run.m // size.prompt + 1)
        needed = max(needed, tokens * sequences)
    return max(int(needed * CACHE_HEADROOM), MIN_CACHE)


def bytes_per_token(folder: Path) -> int:
    """Return the bytes of a token in the KV cache of a decoder in 16 bits, by its config.json."""
    config = text_config(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    heads = int(config["num_attention_heads"])
    head = int(config.get("head_dim") or int(config["hidden_size"]) // heads)
    kv_heads = int(config.get("num_key_value_heads") or heads)
    return 2 * int(config["num_hidden_layers"]) * kv_heads * head * 2


class Worker:
    """A process with an engine."""

    def __init__(self, words: Sequence[str], env: Mapping[str, str], log: Path) -> None:
        self.log = log
        self.answer: dict[str, Any] = {}  # to the last run: its power and steps
        self._sink: IO[str] = log.open("w", encoding="utf-8")
        self._process = subprocess.Popen(
            WORKER,
            env=dict(env),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._sink,
            start_new_session=True,
        )
        self.send(words)

    def send(self, message: object) -> None:
        """Send a line.  Raises RunError when the process has ended."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise RunError("the engine's process ended") from None

    def wait(self, seconds: float | None) -> bool:
        """Wait for the answer to a line; return False after a timeout.  Raises RunError when the process ends."""
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            if not selector.select(seconds):
                return False
        line = self._process.stdout.readline()
        if not line:
            raise RunError("the engine's process ended")
        self.answer = json.loads(line) or {}
        return True

    def text(self) -> str:
        """Return the output of the process so far."""
        return self.log.read_text(encoding="utf-8", errors="replace")

    def close(self) -> None:
        """End the process and its group: an engine process that outlives its parent keeps its GPU memory."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(END_SECONDS)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._sink.close()


class E2eBench:
    """Fills OUT/e2e.csv.  `close` ends the engines.

    ``begin`` is called with the number of runs done and the label of the next one, ``say`` with each result.
    """

    def __init__(
        self, out: Path, workload: Workload, deadline: float, run_seconds: float = RUN_SECONDS
    ) -> None:
        self._out, self._workload, self._deadline, self._run_seconds = out, workload, deadline, run_seconds
        self.records = Records(out, E2E)
        self.failures: list[str] = []
        self.served: dict[str, str] = {}  # the plugin's words on each system
        self.begin: Callable[[int, str], None] = lambda done, label: None
        self.say: Callable[[str], None] = lambda line: None
        self._workers: dict[Engine, Worker] = {}
        self._broken: dict[Engine, str] = {}

    def close(self) -> None:
        """End the engines."""
        for worker in self._workers.values():
            worker.close()

    def run(self, runs: Sequence[Run]) -> bool:
        """Measure what is not in the table, and note failed runs; return False if the time limit was reached."""
        missing = [run for run in runs if not self.records.has(run.key)]
        self._start(missing, len(runs) - len(missing))
        for done, run in enumerate(missing, len(runs) - len(missing)):
            self.begin(done, run.label)
            if time.monotonic() >= self._deadline:
                return False
            try:
                figures = self._measure(run)
            except RunError as error:
                log = self._workers[Engine.of(run)].log
                lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
                self.failures.append(
                    "\n".join([f"{run.label}: {error}; {log} ends with", *lines[-LAST_LINES:]])
                )
                self.say(f"{run.label}: failed, {error}")
                continue
            if figures is None:
                return False
            self.records.add({**run.key, **figures})
            self.say(f"{run.label}: {figures['tokens_per_s']:.0f} tokens/s")
        return True

    def _start(self, missing: Sequence[Run], done: int) -> None:
        """Start the engines for all runs that are not in the table, in parallel."""
        by_engine: dict[Engine, list[Run]] = {}
        for run in missing:
            by_engine.setdefault(Engine.of(run), []).append(run)
        (self._out / "logs").mkdir(exist_ok=True)
        for engine, its_runs in by_engine.items():
            self.begin(done, f"starting {len(by_engine)} engines")
            words = self._arguments(its_runs[0], largest(its_runs))
            cache = cache_tokens(its_runs) * bytes_per_token(engine.folder)
            words += ["--kv-cache-memory-bytes", str(cache), "--gpu-memory-utilization", str(MEMORY_SHARE)]
            env = environment(engine.system, os.environ, engine.folder)
            env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), env.get("PYTHONPATH")]))
            # vLLM's caches of compiled code do not support processes that write the same entry concurrently
            env["VLLM_CACHE_ROOT"] = str((self._out / "cache" / engine.file_name).resolve())
            self._workers[engine] = Worker(words, env, self._out / "logs" / f"{engine.file_name}.log")
        started = time.monotonic()
        for engine, worker in self._workers.items():
            try:
                if not worker.wait(self._seconds(started)):
                    self._broken[engine] = "the engine did not start in time"
            except RunError as error:
                self._broken[engine] = str(error)

    def _arguments(self, run: Run, size: Size) -> list[str]:
        return arguments(run, self._workload, self._result(run), size)

    def _result(self, run: Run) -> Path:
        name = re.sub(r"[^\w.-]", "_", "-".join(map(str, run.key.values())))
        return self._out / "logs" / f"{name}.json"

    def _seconds(self, started: float) -> float:
        return max(0.0, min(self._deadline, started + self._run_seconds) - time.monotonic())

    def _measure(self, run: Run) -> dict[str, float | None] | None:
        """Return a run's figures, or None if the command's time limit was reached.  Raises RunError."""
        engine = Engine.of(run)
        if engine in self._broken:
            raise RunError(self._broken[engine])
        worker, result = self._workers[engine], self._result(run)
        result.unlink(missing_ok=True)
        try:
            worker.send([run.m if run.stage != DECODE else 0, self._arguments(run, run.size)])
            answered = worker.wait(self._seconds(time.monotonic()))
        except RunError as error:
            self._broken[engine] = str(error)
            raise
        if not answered:
            self._broken[engine] = "an earlier run of the engine did not end in time"
            if time.monotonic() >= self._deadline:
                return None
            raise RunError(f"it took more than the {self._run_seconds:g} s of --run-limit")
        if line := check_log(run, worker.text()):
            self.served[f"{run.model} {run.dtype} {run.pattern} {run.system}"] = line
        return read_figures(run, json.loads(result.read_text(encoding="utf-8")), worker.answer)
