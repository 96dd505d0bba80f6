"""The fixture for tests that name this file in ``pytest_plugins``: a simulated machine with a Hopper GPU."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from hopper_stand_in import StandIn

from slidesparse.gemm import cuda
from slidesparse.gemm.hopper import backend, native


@pytest.fixture
def standing_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> StandIn:
    """Replace the kernels by a stand-in with its own cache of tuned tables; CPU tensors count as GPU tensors."""
    library = StandIn()
    backend._predictions.cache_clear()
    monkeypatch.setattr(native, "library", lambda: library)
    monkeypatch.setattr(backend, "MAX_TABLE_TOKENS", 1 << 10)  # tables are made in less time
    monkeypatch.setattr(cuda, "on_device", lambda index: nullcontext())
    monkeypatch.setattr(cuda, "device_index", lambda device: 0)
    monkeypatch.setattr(cuda, "current_stream", lambda index: 77)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA Test 100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setenv("SLIDESPARSE_CACHE", str(tmp_path))
    return library
