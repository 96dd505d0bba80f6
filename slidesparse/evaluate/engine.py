"""Run vLLM for one checkpoint in a separate process, and read its results and its log."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from slidesparse.errors import INSTALL, EnvironmentFault, SlideSparseError
from slidesparse.resolve import SUMMARY
from slidesparse.serving import find_errors

WORKER = "slidesparse.evaluate.worker"
# The log must contain the plugin's line, whatever the user configured
LOGGING = {"VLLM_CONFIGURE_LOGGING": "1", "VLLM_LOGGING_LEVEL": "INFO"}
LOGGING_CONFIG = "VLLM_LOGGING_CONFIG_PATH"


def summaries(log: str) -> list[dict[str, Any]]:
    """Return what the plugin wrote of each model that it served: `slidesparse.vllm_patch.summary.Facts`."""
    return [json.loads(line.partition(SUMMARY)[2]) for line in log.splitlines() if SUMMARY in line]


@dataclass(frozen=True)
class Scored:
    """The arrays computed by an engine, and the plugin's words on the served layers, "" if it did not serve."""

    arrays: Mapping[str, np.ndarray]
    served_by: str


def score(
    model: Path,
    ids: Sequence[Sequence[int]],
    top: int,
    options: Mapping[str, Any] | None = None,
    log: Path | None = None,
) -> Scored:
    """Serve a checkpoint, and compute the arrays of `slidesparse.evaluate.worker` for samples of token ``ids``.

    Args:
        top: number of most likely tokens per position, or -1 for all.
        options: arguments of vllm.LLM.
        log: file to append the engine's output to; None discards it.

    Raises SlideSparseError with the cause from the engine's log, EnvironmentFault without vLLM.
    """
    if importlib.util.find_spec("vllm") is None:
        raise EnvironmentFault(f"evaluation serves the model, but vLLM is not installed: {INSTALL}")
    longest = max(len(sample) for sample in ids) + 1  # vLLM generates one token
    options = {"enforce_eager": True, "max_model_len": longest, **(options or {})}
    request = {"model": str(model), "ids": ids, "top": top, "options": options}
    with tempfile.TemporaryDirectory() as folder:
        out, log = Path(folder) / "out.npz", log or Path(folder) / "log"
        with log.open("ab") as sink:
            sink.write(f"# {model}\n".encode())
            sink.flush()
            start = sink.tell()
            process = subprocess.run(
                [sys.executable, "-m", WORKER, str(out)],
                input=json.dumps(request).encode(),
                env=_environment(),
                stdout=sink,
                stderr=sink,
                check=False,
            )
        text = log.read_bytes()[start:].decode(errors="replace")
        if process.returncode or not out.exists():
            raise SlideSparseError(f"vLLM could not evaluate {model}:\n{find_errors(text)}")
        with np.load(out) as archive:
            arrays = {name: archive[name] for name in archive.files}
    served = summaries(text)
    return Scored(arrays, served[-1]["words"] if served else "")


def vllm_command() -> str:
    """Return the ``vllm`` command of this Python's environment, else of the PATH.  Raises EnvironmentFault."""
    sibling = Path(sys.executable).with_name("vllm")
    command = str(sibling) if sibling.is_file() else shutil.which("vllm")
    if not command:
        raise EnvironmentFault(f"the vllm command is not installed: {INSTALL}")
    return command


def _environment() -> dict[str, str]:
    """Return the environment of the worker: offline, and on CPUs not bound to cores, which others may use."""
    defaults = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
    }
    forced = {"HF_HUB_OFFLINE": "1", **LOGGING}
    return {name: v for name, v in {**defaults, **os.environ, **forced}.items() if name != LOGGING_CONFIG}
