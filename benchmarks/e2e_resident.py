"""The end-to-end benchmark with all engines loaded side by side, taking turns.

Starting an engine takes longer than measuring it, and with one process per figure, a table of R rounds at m values of M
would start each engine R * m times.  Here each system and pattern has one persistent process (`benchmarks.e2e_worker`),
and all have to fit on the GPU together.  They run the same benchmark of vLLM with the same arguments, on an engine
whose limits are the largest of all its runs.
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from benchmarks.e2e import DECODE, Run, Size, command, environment
from benchmarks.e2e_runs import (
    E2eBench,
    Figures,
    RunError,
    check_log,
    check_room,
    end_process,
    log_path,
    read_figures,
)
from slidesparse.checkpoint.storage import text_config

BLOCK = 16  # tokens of a block of vLLM's KV cache
CACHE_HEADROOM = 1.1  # relative to what the runs need: finished sequences are still there when new ones begin
MIN_CACHE = 4096  # tokens; with less than two of a CPU's blocks, which are larger, vLLM waits forever
ROOT = Path(__file__).resolve().parents[1]  # the folder from which engines import this package
WORKER = (sys.executable, "-m", "benchmarks.e2e_worker")
# --gpu-memory-utilization: the cache's size is given, so this only has to be free at the start.
MEMORY_SHARE = 0.05


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
        return f"engine-{self.folder.name}-{self.system}-{self.pattern}".replace(":", "_")


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

    def __init__(self, arguments: Sequence[str], env: dict[str, str], log: Path) -> None:
        self.log = log
        self.answer: dict[str, Any] = {}  # to the last run: its energy and steps
        self._sink: IO[str] = log.open("w", encoding="utf-8")
        self._process = subprocess.Popen(
            WORKER,
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._sink,
            start_new_session=True,
        )
        self.send(arguments)

    def send(self, message: object) -> None:
        """Send a line.  Raises RunError when the process has ended."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise RunError(f"the engine's process ended; its log is {self.log}") from None

    def wait(self, seconds: float | None) -> bool:
        """Wait for the answer to a line; return False after a timeout.  Raises RunError when the process ends."""
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            if not selector.select(seconds):
                return False
        line = self._process.stdout.readline()
        if not line:
            raise RunError(f"the engine's process ended; its log is {self.log}")
        self.answer = json.loads(line) or {}
        return True

    def text(self) -> str:
        """Return the output of the process so far."""
        return self.log.read_text(encoding="utf-8", errors="replace")

    def close(self) -> None:
        """End the process and its children."""
        end_process(self._process)
        self._sink.close()


@dataclass
class ResidentBench(E2eBench):
    """`E2eBench` with engines that stay; `close` ends them."""

    _workers: dict[Engine, Worker] = field(default_factory=dict)
    _broken: dict[Engine, str] = field(default_factory=dict)

    def close(self) -> None:
        """End the engines."""
        for worker in self._workers.values():
            worker.close()

    def run(self, runs: Sequence[Run]) -> bool:
        """See `E2eBench.run`; first starts, in parallel, the engines for all runs that are not in the table."""
        missing = [run for run in runs if not self.records.has(run.key)]
        by_engine: dict[Engine, list[Run]] = {}
        for run in missing:
            by_engine.setdefault(Engine.of(run), []).append(run)
        for engine, its_runs in by_engine.items():
            self.begin(len(runs) - len(missing), f"starting {len(by_engine)} engines")
            self._workers[engine] = self._start(engine, its_runs)
        started = time.monotonic()
        for engine, worker in self._workers.items():
            try:
                if not worker.wait(self._seconds(started)):
                    self._broken[engine] = "the engine did not start in time"
            except RunError as error:
                self._broken[engine] = str(error)
        return super().run(runs)

    def _start(self, engine: Engine, runs: Sequence[Run]) -> Worker:
        run = runs[0]
        arguments = self.arguments(run, largest(runs))
        cache = cache_tokens(runs) * bytes_per_token(engine.folder)
        arguments += ["--kv-cache-memory-bytes", str(cache), "--gpu-memory-utilization", str(MEMORY_SHARE)]
        env = environment(run.system, os.environ)
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), env.get("PYTHONPATH")]))
        # vLLM's caches of compiled code do not support processes that write the same entry concurrently
        env["VLLM_CACHE_ROOT"] = str((self.out / "cache" / engine.file_name).resolve())
        return Worker(arguments, env, self.out / "logs" / f"{engine.file_name}.log")

    def arguments(self, run: Run, size: Size) -> list[str]:
        """Return the arguments of ``vllm bench throughput``."""
        result = log_path(self.out, run).with_suffix(".json")
        return command(self.vllm, self.version, run, self.workload, result, size)[3:]

    def _seconds(self, started: float) -> float:
        left = self.deadline.seconds_left
        limit = max(0.0, self.run_seconds - (time.monotonic() - started))
        return limit if left is None else min(left, limit)

    def _measure(self, run: Run) -> tuple[Figures | None, str]:
        engine = Engine.of(run)
        worker, log = self._workers[engine], log_path(self.out, run)
        result = log.with_suffix(".json")
        result.unlink(missing_ok=True)
        log.write_text(f"the engine's log is {worker.log}\n", encoding="utf-8")
        if engine in self._broken:
            raise RunError(self._broken[engine])
        try:
            worker.send([run.m if run.stage != DECODE else 0, self.arguments(run, run.size)])
            answered = worker.wait(self._seconds(time.monotonic()))
        except RunError as error:
            self._broken[engine] = str(error)
            raise
        if not answered:
            self._broken[engine] = "an earlier run of the engine did not end in time"
            if self.deadline.passed:
                return None, ""
            raise RunError(f"it took more than the {self.run_seconds:g} s of --run-limit")
        text = worker.text()
        line = check_log(run, text)
        check_room(run, text)
        return read_figures(run, json.loads(result.read_text(encoding="utf-8")), worker.answer), line
