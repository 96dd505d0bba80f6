"""A platform plugin for vLLM: its CPU platform, which names no resource of Ray's, with one named, and nothing else.

Ray hands out devices of the kinds that it knows, so the workers' places are called GPUs; Ray takes their number on
trust.
"""

from __future__ import annotations

from vllm.platforms.cpu import CpuPlatform


class RayOnCpu(CpuPlatform):
    """The part of a platform that `initialize_ray_cluster` asks for."""

    ray_device_key = "GPU"


def activate() -> str:
    """The entry point; vLLM calls it in every process, Ray's workers among them."""
    return f"{RayOnCpu.__module__}.{RayOnCpu.__name__}"
