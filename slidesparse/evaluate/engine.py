"""Run vLLM for one checkpoint in a separate process, and read its results and its log."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from slidesparse.errors import INSTALL, EnvironmentFault, SlideSparseError
from slidesparse.resolve import SUMMARY
from slidesparse.serving import find_errors, is_available

WORKER = "slidesparse.evaluate.worker"
DONE = b"prompts done: "  # what the worker prints before their number
# The log must contain the plugin's line, whatever the user configured
LOGGING = {"VLLM_CONFIGURE_LOGGING": "1", "VLLM_LOGGING_LEVEL": "INFO"}
LOGGING_CONFIG = "VLLM_LOGGING_CONFIG_PATH"


def summaries(log: str) -> list[dict[str, Any]]:
    """Return what the plugin wrote of each model that it served, by `slidesparse.vllm_patch.summary`."""
    return [json.loads(line.partition(SUMMARY)[2]) for line in log.splitlines() if SUMMARY in line]


@dataclass(frozen=True)
class Scored:
    """An answer of an engine, and the plugin's words on the served layers, "" if it did not serve."""

    logprobs: np.ndarray  # float32 [tokens] of all tokens but the first of each sample
    outputs: list[list[int]]  # the ids that continue each prompt
    served_by: str


def run(
    model: Path,
    request: Mapping[str, Any],
    options: Mapping[str, Any],
    log: Path | None = None,
    environment: Mapping[str, str] | None = None,
    report: Callable[[int], None] | None = None,
) -> Scored:
    """Serve a checkpoint, and compute what a ``request`` asks of `slidesparse.evaluate.worker`.

    Args:
        options: arguments of vllm.LLM.
        log: file to append the engine's output to; None discards it.
        environment: variables of the worker, besides those of this process.
        report: called with the number of prompts that are done.

    Raises SlideSparseError with the cause from the engine's log, EnvironmentFault without vLLM.
    """
    if not is_available():
        raise EnvironmentFault(f"this serves the model, but vLLM is not installed: {INSTALL}")
    request = {**request, "model": str(model), "options": dict(options)}
    with tempfile.TemporaryDirectory() as folder:
        out, log = Path(folder) / "out.json", log or Path(folder) / "log"
        with log.open("ab") as sink:
            sink.write(f"# {model}\n".encode())
            sink.flush()
            start = sink.tell()
            with subprocess.Popen(
                [sys.executable, "-m", WORKER, str(out)],
                env={**_environment(), **(environment or {})},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=sink,
            ) as process:
                assert process.stdin
                assert process.stdout
                with contextlib.suppress(BrokenPipeError):  # it has ended already
                    process.stdin.write(json.dumps(request).encode())
                    process.stdin.close()
                for line in process.stdout:
                    sink.write(line)
                    sink.flush()
                    if report and line.startswith(DONE):
                        report(int(line.removeprefix(DONE)))
        text = log.read_bytes()[start:].decode(errors="replace")
        # Where there is an answer, the exit code tells only how threads of vLLM ended: at times by an abort
        if not out.exists():
            raise SlideSparseError(f"vLLM could not run {model}:\n{find_errors(text)}")
        found = json.loads(out.read_bytes())
    served = summaries(text)
    words = served[-1]["words"] if served else ""
    return Scored(np.asarray(found["logprobs"], np.float32), found["outputs"], words)


def _environment() -> dict[str, str]:
    """Return the environment of the worker: offline, and on CPUs not bound to cores, which others may use."""
    defaults = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
    }
    forced = {"HF_HUB_OFFLINE": "1", **LOGGING}
    return {name: v for name, v in {**defaults, **os.environ, **forced}.items() if name != LOGGING_CONFIG}
