"""Simulated machines with a GPU."""

from __future__ import annotations

import pytest
import torch

from slidesparse import gemm
from slidesparse.gemm.backend import Backend


def with_gpu(monkeypatch: pytest.MonkeyPatch, **missing: str) -> None:
    """Simulate a machine whose GPU backends can run, except those for which ``missing`` gives a reason."""

    def unusable(self: Backend, device: torch.device, capability: object = None) -> str | None:
        return missing.get(self.name) if device.type == "cuda" else "it needs an NVIDIA GPU"

    for name in gemm.REGISTRY:
        backend = type(gemm.get(name))
        if backend.device_type == "cuda":
            monkeypatch.setattr(backend, "unusable", unusable)
