"""One vLLM engine that stays loaded and runs ``vllm bench throughput`` again and again.

This program is the process of one system (see `benchmarks.e2e.run`).  It reads JSON lines from stdin: first the
arguments of a ``vllm bench throughput`` command, which configure the engine, then ``[M, arguments]``, each a command to
run on that engine with steps of at most M tokens.  When done, it answers each line with a JSON line on stdout about the
timed generation: ``watts``, the mean power of the engine's GPUs, or ``null`` if they do not measure it, ``steps``, a
list of [tokens, seconds] for each step of the engine but the first, from the end of the step before, and ``graph_ms``,
what the GPU takes for a step of the warm-up (see `benchmarks.e2e.graphs`), or ``null``.  vLLM's own code generates the
prompts, measures the time and writes the JSON of ``--output-json``.

vLLM fixes the maximum tokens of a step when an engine starts.  `StepScheduler` is vLLM's scheduler with a limit that
can be changed between runs.  It also records when each step ended.  Both go through a file that both processes map.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from benchmarks.energy import EnergyCounter

STEP_FILE = "BENCHMARKS_STEP_FILE"  # environment variable, for the engine's process
HEADER, STEP = struct.Struct("<qq"), struct.Struct("<qd")
MOST_STEPS = 1 << 16  # recorded in a generation
POLL_SECONDS = 0.005


class StepFile:
    """A mapped file: the limit of tokens per step, and the tokens and end of each step since `clear`."""

    SIZE = HEADER.size + MOST_STEPS * STEP.size

    def __init__(self, path: str) -> None:
        with open(path, "r+b") as file:
            file.truncate(self.SIZE)
            self._bytes = mmap.mmap(file.fileno(), self.SIZE)

    @property
    def limit(self) -> int:
        """The most tokens of a step; 0 is the engine's own limit."""
        return self._header()[0]

    @limit.setter
    def limit(self, tokens: int) -> None:
        HEADER.pack_into(self._bytes, 0, tokens, self._header()[1])

    def clear(self) -> None:
        """Forget all steps."""
        HEADER.pack_into(self._bytes, 0, self.limit, 0)

    def add(self, tokens: int) -> None:
        """Record that a step of ``tokens`` ends now; beyond MOST_STEPS, do nothing."""
        limit, count = self._header()
        if count < MOST_STEPS:
            STEP.pack_into(self._bytes, HEADER.size + count * STEP.size, tokens, time.perf_counter())
            HEADER.pack_into(self._bytes, 0, limit, count + 1)

    def steps(self) -> list[tuple[int, float]]:
        """Return the tokens of each step but the first, and the seconds since the end of the step before."""
        count = self._header()[1]
        ends = list(STEP.iter_unpack(self._bytes[HEADER.size : HEADER.size + count * STEP.size]))
        return [(tokens, end - before) for (_, before), (tokens, end) in pairwise(ends)]

    def _header(self) -> tuple[int, int]:
        limit, count = HEADER.unpack_from(self._bytes)
        return limit, count


def __getattr__(name: str) -> Any:
    """Create `StepScheduler` on demand, because this module is also imported without vLLM."""
    if name == "StepScheduler":
        return _scheduler()
    raise AttributeError(name)


def _scheduler() -> type:
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    class StepScheduler(AsyncScheduler):
        """vLLM's scheduler with the limit of tokens per step from the file, which records its steps."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._most: int = self.max_num_scheduled_tokens
            self._file = StepFile(os.environ[STEP_FILE])

        def schedule(self, *args: Any, **kwargs: Any) -> Any:
            self.max_num_scheduled_tokens: int = min(self._most, self._file.limit or self._most)
            return super().schedule(*args, **kwargs)

        def update_from_output(self, scheduled: Any, *args: Any, **kwargs: Any) -> Any:
            if scheduled.total_num_scheduled_tokens:
                self._file.add(scheduled.total_num_scheduled_tokens)
            return super().update_from_output(scheduled, *args, **kwargs)

    return StepScheduler


class Meter:
    """Records the power and the steps of each generation of an engine."""

    def __init__(self, file: StepFile, counters: list[EnergyCounter]) -> None:
        self._file, self._counters = file, counters
        self.answer: dict[str, Any] = {"watts": None, "steps": []}  # of the last generation

    def __call__(self, generate: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``generate`` to record each call, without warm-up and idle time."""

        def metered(*args: Any, **kwargs: Any) -> Any:
            self._file.clear()
            for counter in self._counters:
                counter.restart()
            ended = threading.Event()
            poller = threading.Thread(target=self._poll, args=(ended,))
            poller.start()
            try:
                outputs = generate(*args, **kwargs)
            finally:
                ended.set()
                poller.join()
            watts = [counter.watts for counter in self._counters]
            known = sum(power for power in watts if power) if watts and all(watts) else None
            self.answer = {"watts": known, "steps": self._file.steps()}
            return outputs

        return metered

    def _poll(self, ended: threading.Event) -> None:
        while all(counter.poll() for counter in self._counters) and not ended.wait(POLL_SECONDS):
            pass


def energy_counters(count: int) -> list[EnergyCounter]:
    """Return the counters of the first ``count`` GPUs that vLLM uses; none on a CPU."""
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        return []
    return [EnergyCounter(current_platform.device_id_to_physical_device_id(i)) for i in range(count)]


def main() -> None:
    """Start the engine, then run commands until stdin ends."""
    answers = os.dup(1)
    os.dup2(2, 1)  # output of libraries is not an answer
    with tempfile.NamedTemporaryFile(suffix=".step") as file:
        os.environ[STEP_FILE] = file.name
        step_file = StepFile(file.name)

        from vllm import LLM
        from vllm.benchmarks import throughput
        from vllm.engine.arg_utils import EngineArgs
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        parser = FlexibleArgumentParser()
        throughput.add_cli_args(parser)
        arguments = EngineArgs.from_cli_args(parser.parse_args(json.loads(sys.stdin.readline())))
        arguments.scheduler_cls = "benchmarks.e2e.worker.StepScheduler"
        arguments.worker_extension_cls = "benchmarks.e2e.graphs.GraphClock"
        llm = LLM.from_engine_args(arguments)
        LLM.from_engine_args = lambda *args, **kwargs: llm
        meter = Meter(step_file, energy_counters(arguments.tensor_parallel_size))
        llm.generate = meter(llm.generate)
        llm.collective_rpc("watch_graphs")
        answer(answers, None)
        for line in sys.stdin:
            step_file.limit, words = json.loads(line)
            llm.collective_rpc("arm_graph_clock")
            throughput.main(parser.parse_args(words))
            times = llm.collective_rpc("read_graph_clock")
            answer(answers, {**meter.answer, "graph_ms": None if None in times else max(times)})


def answer(file: int, message: object) -> None:
    """Write a JSON line to a file descriptor."""
    with open(file, "w", encoding="utf-8", closefd=False) as stream:
        stream.write(json.dumps(message) + "\n")


if __name__ == "__main__":
    main()
