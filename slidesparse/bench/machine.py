"""The machine that is measured: its GPU, its GEMM libraries, and the conditions that go beside every table."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from slidesparse import __version__
from slidesparse.backends import HOPPER_CAPABILITY, INSTALL_CUDA
from slidesparse.gemm.library import OPERANDS, Library, LibraryError
from slidesparse.gemm.tuned import Subject

LIBRARIES = {
    "cublaslt": "slidesparse.gemm.cublaslt",
    "cusparselt": "slidesparse.gemm.cusparselt",
    "hopper": "slidesparse.gemm.hopper",
}
NVIDIAS = ("cublaslt", "cusparselt")  # which run on any GPU that serves
SERVED = ("int8", "fp8")  # the operand types that serving runs
TOOL_SECONDS = 20
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


class MissingError(RuntimeError):
    """This machine lacks what a command needs; says what, and the remedy."""


@dataclass(frozen=True)
class Gpu:
    """A device to measure."""

    device: torch.device
    name: str
    capability: tuple[int, int]
    l2_bytes: int
    uuid: str = ""

    def subject(self, library: Library) -> Subject:
        """What the table of tuned algorithms for ``library`` on this GPU is about."""
        return Subject(library.name, library.version(), self.name, self.capability)


def require_gpu() -> Gpu:
    """The current CUDA device.  Raises MissingError."""
    if torch.version.cuda is None:
        raise MissingError(
            f"this command measures an NVIDIA GPU, but torch {torch.__version__} is built without CUDA; "
            f"on a machine with an NVIDIA GPU: {INSTALL_CUDA}"
        )
    if not torch.cuda.is_available():
        raise MissingError(
            f"this command measures an NVIDIA GPU, but torch {torch.__version__} finds none that it can use; "
            "`nvidia-smi` should list one, and `slidesparse doctor` tells what is missing"
        )
    device = torch.device("cuda", torch.cuda.current_device())
    properties = torch.cuda.get_device_properties(device)
    return Gpu(
        device,
        properties.name,
        (properties.major, properties.minor),
        int(properties.L2_cache_size),
        str(getattr(properties, "uuid", "")),
    )


def libraries_of(gpu: Gpu) -> tuple[str, ...]:
    """The names of the GEMM libraries that there are for a GPU like this."""
    return tuple(LIBRARIES) if gpu.capability == HOPPER_CAPABILITY else NVIDIAS


def require_libraries(gpu: Gpu, names: Sequence[str] = NVIDIAS) -> list[Library]:
    """The GEMM libraries of these names.  Raises MissingError with the reason when one cannot run on ``gpu``."""
    found = []
    for name in names:
        library: Library = import_module(LIBRARIES[name]).LIBRARY
        reason = library.unusable(gpu.device)
        if reason:
            raise MissingError(f"{name} cannot run on {gpu.name}: {reason}")
        found.append(library)
    return found


def usable_libraries(gpu: Gpu) -> list[Library]:
    """The GEMM libraries that run on ``gpu``."""
    found: list[Library] = [import_module(LIBRARIES[name]).LIBRARY for name in libraries_of(gpu)]
    return [library for library in found if not library.unusable(gpu.device)]


def served_by(gpu: Gpu) -> tuple[str, ...]:
    """The name of the library that serves layers on ``gpu`` when no flag chooses, if it is ours, else NVIDIA's two."""
    if "hopper" in libraries_of(gpu) and not import_module(LIBRARIES["hopper"]).LIBRARY.unusable(gpu.device):
        return ("hopper",)
    return NVIDIAS


def outputs(library: Library, dtype: str) -> tuple[str, ...]:
    """The output types of ``library`` for operands of ``dtype``; none when it does not take them."""
    assert dtype in OPERANDS, dtype
    try:
        return tuple(library.outputs(dtype))
    except LibraryError:
        return ()


def conditions(gpu: Gpu, libraries: Sequence[Library]) -> dict[str, Any]:
    """What figures of this machine depend on.  A version is None when the package is not installed."""
    return {
        "gpu": gpu.name,
        "capability": ".".join(map(str, gpu.capability)),
        "l2_bytes": gpu.l2_bytes,
        **_smi(gpu),
        "versions": {**_versions(), **{library.name: library.version() for library in libraries}},
    }


def cpu_conditions() -> dict[str, Any]:
    """The same of a machine without a GPU."""
    info = Path("/proc/cpuinfo").read_text(errors="replace") if Path("/proc/cpuinfo").is_file() else ""
    model = re.search(r"^model name\s*:\s*(.+)$", info, re.M)
    return {
        "gpu": None,
        "capability": None,
        "cpu": model[1].strip() if model else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "versions": _versions(),
    }


def _versions() -> dict[str, str | None]:
    return {
        "slidesparse": __version__,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": _installed("triton"),
        "vllm": _installed("vllm"),
    }


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _smi(gpu: Gpu) -> dict[str, str | float | None]:
    """What nvidia-smi says of the GPU; None for all when it cannot be asked."""
    program = shutil.which("nvidia-smi")
    unknown: dict[str, str | float | None] = dict.fromkeys(SMI_FIELDS)
    if program is None:
        return unknown
    command = [program, f"--query-gpu={','.join(SMI_FIELDS.values())}", "--format=csv,noheader,nounits"]
    # Without an id it lists all GPUs, and the first is this one only where there is one.
    command += [f"--id=GPU-{gpu.uuid.removeprefix('GPU-')}"] if gpu.uuid else []
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TOOL_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return unknown
    lines = done.stdout.strip().splitlines()
    words = [word.strip() for word in lines[0].split(",")] if lines and not done.returncode else []
    if len(words) != len(SMI_FIELDS):
        return unknown
    found = dict(zip(SMI_FIELDS, words, strict=True))
    return {name: word if name == "driver" else _number(word) for name, word in found.items()}


def _number(word: str) -> float | None:
    """``"1980"`` -> 1980.0; None for what nvidia-smi does not know, such as ``"[N/A]"``."""
    try:
        return float(word)
    except ValueError:
        return None
