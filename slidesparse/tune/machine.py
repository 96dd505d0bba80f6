"""The machine that is measured: its GPU and its GEMM libraries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch

from slidesparse import gemm
from slidesparse.errors import EnvironmentFault
from slidesparse.gemm import cuda
from slidesparse.gemm.cuda import CudaBackend
from slidesparse.gemm.tuned import Subject

SERVED_DTYPES = ("int8", "fp8")  # the operand types that serving runs


@dataclass(frozen=True)
class Gpu:
    """A device to measure."""

    device: torch.device
    name: str
    capability: tuple[int, int]
    l2_bytes: int
    uuid: str = ""

    def subject(self, library: CudaBackend) -> Subject:
        """The subject of the table of tuned algorithms for ``library`` on this GPU."""
        return Subject(library.name, library.version(), self.name, self.capability)


def require_gpu() -> Gpu:
    """Return the current CUDA device.  Raises EnvironmentFault without one."""
    if reason := cuda.no_gpu():
        raise EnvironmentFault(f"this command measures an NVIDIA GPU, but {reason}")
    device = torch.device("cuda", torch.cuda.current_device())
    properties = torch.cuda.get_device_properties(device)
    return Gpu(
        device,
        properties.name,
        (properties.major, properties.minor),
        int(properties.L2_cache_size),
        str(getattr(properties, "uuid", "")),
    )


def tunable_names() -> tuple[str, ...]:
    """Return the names of the GPU backends; those of the sparse path have algorithms to choose from."""
    return tuple(name for name in gemm.REGISTRY if hasattr(gemm.get(name), "algorithms"))


def require_libraries(gpu: Gpu, names: Sequence[str]) -> list[CudaBackend]:
    """Return the backends of these names.  Raises BackendError with the reason when one cannot run on ``gpu``."""
    return [cast("CudaBackend", gemm.require(name, gpu.device)) for name in names]
