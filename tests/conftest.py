"""Hypothesis settings and fixtures of all tests, and markers of tests that need a GPU or vLLM."""

from __future__ import annotations

import importlib.util
import logging
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

from slidesparse.errors import warn_once
from slidesparse.flags import DISABLE, MODE, REQUESTS
from slidesparse.serving import Skeletons

# What the user has set for servers and terminals must not reach the tests
for _name in (MODE, DISABLE, *REQUESTS, "FORCE_COLOR", "COLUMNS"):
    os.environ.pop(_name, None)

# Processes that tests start import this checkout and the helpers beside it, not an installed package.
ROOT = Path(__file__).resolve().parents[1]
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(ROOT), str(ROOT / "tests" / "support"), *filter(None, [os.environ.get("PYTHONPATH")])]
)

# Examples are the same in every run, so that a change causes any new failure; HYPOTHESIS_PROFILE=explore draws new
# examples.
_SLOW = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large]}
settings.register_profile("fixed", derandomize=True, max_examples=150, **_SLOW)
settings.register_profile("explore", max_examples=1000, **_SLOW)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))


@cache
def missing_gpu() -> str | None:
    """Return the reason why GPU tests cannot run here, or None."""
    if shutil.which("nvidia-smi") is None:
        return "no NVIDIA GPU: nvidia-smi is not on the PATH"
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60, check=False)
    if listed.returncode or "GPU" not in listed.stdout:
        return "no NVIDIA GPU: `nvidia-smi -L` lists none"
    import torch

    return None if torch.cuda.is_available() else f"this torch ({torch.__version__}) cannot use the GPU"


@cache
def missing_vllm() -> str | None:
    """Return the reason why tests inside vLLM cannot run here, or None."""
    return None if importlib.util.find_spec("vllm") else "vLLM is not installed: see docs/install.md"


@pytest.fixture(scope="session")
def engines() -> Iterator[Engines]:
    """Provide one process with vLLM imported, which forks an engine per request."""
    process = Engines()
    yield process
    process.close()


@pytest.fixture(scope="session")
def skeletons() -> Iterator[Skeletons]:
    """Provide one process with vLLM imported, which says how vLLM would serve a checkpoint."""
    with Skeletons() as process:
        yield process


@pytest.fixture
def warm(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Let commands ask the process that has imported vLLM already, where it is installed."""
    if missing_vllm() is None:
        process = request.getfixturevalue("skeletons")
        monkeypatch.setattr(Skeletons, "__enter__", lambda _: process)
        monkeypatch.setattr(Skeletons, "__exit__", lambda *_: None)


@pytest.fixture(autouse=True)
def logs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `caplog` see what is logged below vLLM's logger, which is the root's once vLLM is imported, in each test."""
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    warn_once.cache_clear()


@pytest.fixture(autouse=True)
def stance() -> Iterator[None]:
    """Reset the stance of torch.compile, which holds for the process, after each test."""
    yield
    if torch := sys.modules.get("torch"):
        torch.compiler.set_stance("default")


NEEDS = {"gpu": missing_gpu, "vllm": missing_vllm}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip tests that need a GPU or vLLM where it is missing.

    Workers of pytest-xdist start with the files of vLLM, which take longest, so that both finish together.
    """
    for item in items:
        for name, missing in NEEDS.items():
            reason = missing() if item.get_closest_marker(name) else None
            if reason:
                item.add_marker(pytest.mark.skip(reason=reason))
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: item.get_closest_marker("vllm") is None)
