"""One vLLM engine that stays loaded and runs ``vllm bench throughput`` again and again.

Run as a program, it is the process of one system (see `benchmarks.e2e_resident`).  It reads JSON lines from stdin:
first the arguments of a ``vllm bench throughput`` command, which configure the engine, then ``[M, arguments]``, each a
command to run on that engine with steps of at most M tokens.  When done, it answers each line with a JSON line on
stdout, about the timed generation: ``joules``, the energy that the GPU used, or ``null`` if it does not measure it, and
``steps``, a list of [tokens, seconds] for each step of the engine but the first, from the end of the step before.
vLLM's own code generates the prompts, measures the time and writes the JSON of ``--output-json``.

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
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

STEP_FILE = "BENCHMARKS_STEP_FILE"  # environment variable, for the engine's process
HEADER, STEP = struct.Struct("<qq"), struct.Struct("<qd")
MOST_STEPS = 1 << 16  # recorded in a generation


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
    """Records the energy and the steps of each generation of an engine."""

    def __init__(self, file: StepFile) -> None:
        self._file = file
        self.answer: dict[str, Any] = {"joules": None, "steps": []}  # of the last generation
        from vllm.platforms import current_platform

        self._nvml: Any = None
        if current_platform.is_cuda():
            from vllm.third_party import pynvml

            pynvml.nvmlInit()
            self._gpu = pynvml.nvmlDeviceGetHandleByIndex(current_platform.device_id_to_physical_device_id(0))
            self._nvml = pynvml

    def __call__(self, generate: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``generate`` to record each call, without warm-up and idle time."""

        def metered(*args: Any, **kwargs: Any) -> Any:
            self._file.clear()
            before = self._read()
            outputs = generate(*args, **kwargs)
            after = self._read()
            joules = None if before is None or after is None else (after - before) / 1000
            self.answer = {"joules": joules, "steps": self._file.steps()}
            return outputs

        return metered

    def _read(self) -> int | None:
        return self._nvml and int(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._gpu))  # millijoules


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

        if not hasattr(LLM, "from_engine_args"):
            sys.exit(
                "this vLLM's benchmark makes its engine in another way (docs/compatibility.md): leave --resident out, "
                "or use a later vLLM"
            )
        parser = FlexibleArgumentParser()
        throughput.add_cli_args(parser)
        arguments = EngineArgs.from_cli_args(parser.parse_args(json.loads(sys.stdin.readline())))
        arguments.scheduler_cls = "benchmarks.e2e_worker.StepScheduler"
        llm = LLM.from_engine_args(arguments)
        LLM.from_engine_args = lambda *args, **kwargs: llm
        meter = Meter(step_file)
        llm.generate = meter(llm.generate)
        answer(answers, None)
        for line in sys.stdin:
            step_file.limit, arguments = json.loads(line)
            throughput.main(parser.parse_args(arguments))
            answer(answers, meter.answer)


def answer(file: int, message: object) -> None:
    """Write a JSON line to a file descriptor."""
    with open(file, "w", encoding="utf-8", closefd=False) as stream:
        stream.write(json.dumps(message) + "\n")


if __name__ == "__main__":
    main()
