"""A platform plugin for vLLM: its CPU platform with a resource name for Ray, which the original lacks.

Ray allocates only devices of kinds that it knows, so the workers' resources are called GPUs; Ray does not verify their
number.
"""

from __future__ import annotations

from vllm.platforms.cpu import CpuPlatform


class RayOnCpu(CpuPlatform):
    """The part of a platform that `initialize_ray_cluster` asks for."""

    ray_device_key = "GPU"


def activate() -> str:
    """Return the platform's class name; vLLM calls this entry point in every process, including Ray's workers."""
    return f"{RayOnCpu.__module__}.{RayOnCpu.__name__}"
