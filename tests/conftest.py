"""What all tests share: hypothesis settings and the markers that need more than this machine may have."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from engines import Engines
from hypothesis import HealthCheck, settings

# Processes that tests start import this checkout and the helpers beside it, not an installed package.
ROOT = Path(__file__).resolve().parents[1]
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(ROOT), str(ROOT / "tests" / "support"), *filter(None, [os.environ.get("PYTHONPATH")])]
)

# Threads of OpenMP wait for each other busily: those of two workers on two cores take ten times as long as one each.
# Before anything imports torch; the processes that tests start inherit it.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# The same examples every time, so that a failure is the change's; HYPOTHESIS_PROFILE=explore looks for new
# ones.
_SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]
settings.register_profile(
    "fixed", deadline=None, derandomize=True, max_examples=150, suppress_health_check=_SLOW
)
settings.register_profile("explore", deadline=None, max_examples=1000, suppress_health_check=_SLOW)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))


@cache
def missing_gpu() -> str | None:
    """Why GPU tests cannot run here, or None."""
    if shutil.which("nvidia-smi") is None:
        return "no NVIDIA GPU: nvidia-smi is not on the PATH"
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60, check=False)
    if listed.returncode or "GPU" not in listed.stdout:
        return "no NVIDIA GPU: `nvidia-smi -L` lists none"
    import torch

    return None if torch.cuda.is_available() else f"this torch ({torch.__version__}) cannot use the GPU"


@cache
def missing_vllm() -> str | None:
    """Why tests inside vLLM cannot run here, or None."""
    return None if importlib.util.find_spec("vllm") else "vLLM is not installed: pip install '.[cpu]'"


@pytest.fixture(scope="session")
def engines() -> Iterator[Engines]:
    """One process with vLLM imported, which forks an engine per request."""
    process = Engines()
    yield process
    process.close()


@pytest.fixture(autouse=True)
def stance() -> Iterator[None]:
    """End what a test has told torch.compile for the whole process, such as to run everything eagerly."""
    yield
    if torch := sys.modules.get("torch"):
        torch.compiler.set_stance("default")


NEEDS = {"gpu": missing_gpu, "vllm": missing_vllm}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip, with the reason, what needs a GPU or vLLM where there is none.

    A worker of pytest-xdist begins with vLLM's files, the longest ones: short ones at the end fill both workers.
    """
    for item in items:
        for name, missing in NEEDS.items():
            reason = missing() if item.get_closest_marker(name) else None
            if reason:
                item.add_marker(pytest.mark.skip(reason=reason))
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: item.get_closest_marker("vllm") is None)
