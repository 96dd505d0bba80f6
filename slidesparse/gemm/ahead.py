"""Get what packs weights ready in the background, while vLLM reads the weights.

The first launch of a Triton kernel in a process, as weights for cuSPARSELt take, is late even when the kernel has long
been compiled: Triton hashes itself for the key of its cache.  The first weight of a process was packed in 0.6 s then,
and in 2.4 s with an empty cache (Triton 3.6, beside an H200), while a 7B model in the page cache is read in two.
Libraries have code to load as well.

Nothing depends on it: what goes wrong here goes wrong again, and is raised, when a weight is packed.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from slidesparse import gemm
from slidesparse.pattern import SlideLayout, SlidePattern

# As many as cuSPARSELt's weights are packed by at a time: of fewer it would not be asked what it is asked of layers.
ROWS = 128

logger = logging.getLogger("vllm.slidesparse")

_begun: set[Hashable] = set()
_pool: ThreadPoolExecutor | None = None
_jobs: list[Future[None]] = []


def begin(name: str, weight: Tensor, pattern: SlidePattern, phase: int) -> None:
    """Start getting ready what the backend ``name`` packs weights like ``weight`` with, and return at once.

    Nothing for backends that need nothing, for weights on a CPU, and for what was begun before.

    Args:
        name: of a sparse backend that can run (`gemm.require`).
        weight: [N, K] INT8 or FP8; its values are not looked at.
        pattern: which `gemm.slide_and_pack` will be given; 2:4 for windows.
        phase: as there.
    """
    global _pool
    backend, (_, k) = gemm.provider(name), weight.shape
    if not weight.is_cuda or not isinstance(backend, gemm.SlidingProvider) or not weight.numel():
        return
    layout = pattern.layout(k, phase)
    key = (name, layout, weight.dtype, weight.device)
    if key in _begun:
        return
    _begun.add(key)
    _pool = _pool or ThreadPoolExecutor(1, thread_name_prefix="slidesparse")
    _jobs.append(_pool.submit(_run, backend, k, layout, weight.dtype, weight.device))


def finish() -> None:
    """Wait until all that was begun is ready, or has failed."""
    global _pool
    if _pool is None:
        return
    pool, _pool = _pool, None
    pool.shutdown()
    for job in _jobs:
        if error := job.exception():
            logger.debug("getting ready to pack weights: %s", error)
    _jobs.clear()


def _run(
    backend: gemm.SlidingProvider, k: int, layout: SlideLayout, dtype: torch.dtype, device: torch.device
) -> None:
    backend.slide_and_pack(torch.zeros(ROWS, k, dtype=torch.int8, device=device).view(dtype), layout)
