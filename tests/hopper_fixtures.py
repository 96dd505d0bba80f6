"""The fixture of tests that name this file in ``pytest_plugins``: a machine that seems to have a Hopper GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from hopper_stand_in import SMS, StandIn, fit

from slidesparse.gemm import hopper_native, hopper_plans, plans


@pytest.fixture
def standing_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[StandIn]:
    """A machine that seems to have an H200 and the kernels, with tuned tables of its own."""
    native = StandIn()
    monkeypatch.setattr(hopper_native, "native", lambda: native)
    monkeypatch.setattr(hopper_native, "multiprocessors", lambda index: SMS)
    monkeypatch.setattr(hopper_native, "fit", fit)
    monkeypatch.setattr(hopper_plans, "workspace", lambda index, stream: 1 << 20)
    monkeypatch.setattr(plans, "on_device", lambda index: nullcontext())
    monkeypatch.setattr(plans, "index_of", lambda device: 0)
    monkeypatch.setattr(plans, "stream_of", lambda index: 77)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA Test 100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setenv("SLIDESPARSE_CACHE", str(tmp_path))
    plans._local.caches.clear()
    yield native
    plans._local.caches.clear()
