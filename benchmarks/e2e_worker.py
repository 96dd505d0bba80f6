"""One vLLM engine that stays loaded and runs ``vllm bench throughput`` again and again.

Run as a program, it is the process of one system (see `benchmarks.e2e_resident`).  It reads JSON lines from stdin:
first the arguments of a ``vllm bench throughput`` command, which configure the engine, then ``[M, arguments]``, each a
command to run on that engine with steps of at most M tokens.  When done, it answers each line with a JSON line on
stdout: the energy in joules that the GPU used for the timed generation, or ``null`` if the GPU does not measure it.
vLLM's own code generates the prompts, measures the time and writes the JSON of ``--output-json``.

vLLM fixes the maximum tokens of a step when an engine starts.  `StepScheduler` is vLLM's scheduler with a limit that
can be changed between runs, through a file of eight bytes that both processes map.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
import tempfile
from collections.abc import Callable
from typing import Any

LIMIT_FILE = "BENCHMARKS_STEP_FILE"  # environment variable, for the engine's process
BYTES = 8


def _map(path: str) -> mmap.mmap:
    with open(path, "r+b") as file:
        return mmap.mmap(file.fileno(), BYTES)


def __getattr__(name: str) -> Any:
    """Create `StepScheduler` on demand, because this module is also imported without vLLM."""
    if name == "StepScheduler":
        return _scheduler()
    raise AttributeError(name)


def _scheduler() -> type:
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    class StepScheduler(AsyncScheduler):
        """vLLM's scheduler with the limit of tokens per step from the file; 0 is the engine's own limit."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._most: int = self.max_num_scheduled_tokens
            self._limit = _map(os.environ[LIMIT_FILE])

        def schedule(self, *args: Any, **kwargs: Any) -> Any:
            limit = int.from_bytes(self._limit[:BYTES], "little")
            self.max_num_scheduled_tokens: int = min(self._most, limit or self._most)
            return super().schedule(*args, **kwargs)

    return StepScheduler


class Meter:
    """The energy counter of the GPU that the engine runs on."""

    joules: float | None = None  # of the last generation

    def __init__(self) -> None:
        from vllm.platforms import current_platform

        self._nvml: Any = None
        if current_platform.is_cuda():
            from vllm.third_party import pynvml

            pynvml.nvmlInit()
            self._gpu = pynvml.nvmlDeviceGetHandleByIndex(current_platform.device_id_to_physical_device_id(0))
            self._nvml = pynvml

    def __call__(self, generate: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``generate`` to record the energy of each call, without warm-up and idle time."""

        def metered(*args: Any, **kwargs: Any) -> Any:
            before = self._read()
            outputs = generate(*args, **kwargs)
            after = self._read()
            self.joules = None if before is None or after is None else (after - before) / 1000
            return outputs

        return metered

    def _read(self) -> int | None:
        return self._nvml and int(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._gpu))  # millijoules


def main() -> None:
    """Start the engine, then run commands until stdin ends."""
    answers = os.dup(1)
    os.dup2(2, 1)  # output of libraries is not an answer
    with tempfile.NamedTemporaryFile(suffix=".step") as file:
        file.write(bytes(BYTES))
        file.flush()
        os.environ[LIMIT_FILE] = file.name
        limit = _map(file.name)

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
        meter = Meter()
        llm.generate = meter(llm.generate)
        os.write(answers, b"null\n")
        for line in sys.stdin:
            tokens, arguments = json.loads(line)
            limit[:BYTES] = int(tokens).to_bytes(BYTES, "little")
            throughput.main(parser.parse_args(arguments))
            os.write(answers, json.dumps(meter.joules).encode() + b"\n")


if __name__ == "__main__":
    main()
