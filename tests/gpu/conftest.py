"""Fixtures of the tests that need a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from gpu_engines import AT_A_TIME, GpuEngines, needed
from gpu_layers import require_hopper


@pytest.fixture(scope="module")
def gpu_engines(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GpuEngines]:
    """Start the engines that the selected tests of a module need; it may have TASKS and AT_A_TIME of its own."""
    if hasattr(request.config, "workerinput"):  # pytest-xdist
        pytest.fail("each process would start all engines, which one GPU does not hold: run these without -n")
    tasks = getattr(request.module, "TASKS", {})
    at_a_time = getattr(request.module, "AT_A_TIME", AT_A_TIME)
    started = GpuEngines(tmp_path_factory.mktemp("models"), tasks, at_a_time)
    for engine in needed(request):
        started.start(engine)
    yield started
    started.close()


@pytest.fixture(scope="module")
def on_hopper() -> None:
    require_hopper()
