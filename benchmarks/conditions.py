"""The conditions that are kept beside every table: GPU or CPU, clocks, versions of libraries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from slidesparse import __version__, doctor
from slidesparse.gemm.backend import Tunable
from slidesparse.tune.machine import Gpu

# name in the conditions -> field of nvidia-smi
SMI_FIELDS = {
    "driver": "driver_version",
    "sm_clock_mhz": "clocks.sm",
    "memory_clock_mhz": "clocks.mem",
    "max_sm_clock_mhz": "clocks.max.sm",
    "max_memory_clock_mhz": "clocks.max.mem",
    "power_limit_w": "power.limit",
    "temperature_c": "temperature.gpu",
}


def gpu_conditions(gpu: Gpu, libraries: Sequence[Tunable]) -> dict[str, Any]:
    """Return the conditions that figures of a GPU depend on; the version of a missing package is None."""
    return {
        "gpu": gpu.name,
        "capability": ".".join(map(str, gpu.capability)),
        "l2_bytes": gpu.l2_bytes,
        **_query_smi(gpu),
        "versions": {**_versions(), **{library.name: library.version() for library in libraries}},
    }


def cpu_conditions() -> dict[str, Any]:
    """Return the conditions that figures of a machine without a GPU depend on."""
    system = doctor.system()
    return {
        "gpu": None,
        "capability": None,
        "cpu": system["cpu"],
        "cores": system["cores"],
        "versions": _versions(),
    }


def _versions() -> dict[str, str | None]:
    return {
        "slidesparse": __version__,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": doctor.version_of("triton"),
        "vllm": doctor.version_of("vllm"),
    }


def _query_smi(gpu: Gpu) -> dict[str, str | float | None]:
    """Query nvidia-smi about the GPU; all fields are None if that fails."""
    # Without an id it lists all GPUs, and the first is this one only if there is just one.
    chosen = [f"--id=GPU-{gpu.uuid.removeprefix('GPU-')}"] if gpu.uuid else []
    rows, _ = doctor.query_smi(SMI_FIELDS.values(), *chosen)
    if not rows:
        return dict.fromkeys(SMI_FIELDS)
    fields = dict(zip(SMI_FIELDS, rows[0], strict=True))
    return {name: word if name == "driver" else _parse_number(word) for name, word in fields.items()}


def _parse_number(word: str) -> float | None:
    """Parse ``"1980"`` as 1980.0; return None for unknown values, such as ``"[N/A]"``."""
    try:
        return float(word)
    except ValueError:
        return None
