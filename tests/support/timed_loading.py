"""Measures how an engine's process loads its weights: `engines.Request.registered`, for the task "loading" alone."""

from __future__ import annotations

import time
from typing import Any

import torch
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

ENTRY: dict[str, Any] = {}  # of our registry of backends: none
# ``seconds`` of vLLM's ``load_model``, which includes packing; ``peak`` and ``after``, bytes that torch had allocated
MEASURED: dict[str, float] = {}

_load = BaseModelLoader.load_model


def _timed(self: Any, *args: Any, **kwargs: Any) -> Any:
    torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    model = _load(self, *args, **kwargs)
    torch.cuda.synchronize()
    MEASURED["seconds"] = time.perf_counter() - began
    MEASURED["peak"], MEASURED["after"] = torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()
    return model


BaseModelLoader.load_model = _timed  # type: ignore[method-assign]
