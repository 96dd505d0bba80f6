"""Find cuSPARSELt, compilers and the headers of torch and Python on this machine.  Standard library only.

An environment variable takes precedence, then this Python's wheels, then the system.  If nothing is found, a
ToolchainError lists what was tried.
"""

from __future__ import annotations

import ctypes.util
import importlib.metadata
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sysconfig
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from slidesparse.errors import EnvironmentFault
from slidesparse.versions import numbers

CUSPARSELT = "SLIDESPARSE_CUSPARSELT"  # environment variable: the library's path
CUSPARSELT_WHEELS = ("nvidia-cusparselt-cu13", "nvidia-cusparselt-cu12")
CUSPARSELT_OLDEST, CUSPARSELT_NEWEST = (0, 8), (0, 10)  # those with the binary interface that we call
NVCC = "SLIDESPARSE_NVCC"
NVCC_MIN_VERSION = (12, 2)  # the first whose PTX, 8.2, has Hopper's sparse wgmma for integers
NVCC_HOMES = ("CUDA_HOME", "CUDA_PATH")
NVCC_DEFAULT_PATH = "/usr/local/cuda/bin/nvcc"
NVCC_WHEELS = ("nvidia-cuda-nvcc", "nvidia-cuda-nvcc-cu12")
NVCC_INSTALL = (
    "pip install nvidia-cuda-nvcc nvidia-cuda-cccl (CUDA 13), install the CUDA toolkit 12.2 or later, "
    f"or set {NVCC} to an nvcc"
)


class ToolchainError(EnvironmentFault, RuntimeError):
    """A library or a compiler is missing or broken: what was found and tried, and the remedy."""


@dataclass(frozen=True)
class FoundFile:
    """A library or a program that was found."""

    path: str  # a file, or a name that the loader knows
    source: str  # a wheel's or a variable's name, "PATH" or "system"
    version: str | None  # version of the wheel


def find_cusparselt(cuda_major: int | None = None) -> FoundFile:
    """Find cuSPARSELt; the wheel of CUDA ``cuda_major`` is preferred.  Raises ToolchainError."""
    if chosen := _chosen("cuSPARSELt", CUSPARSELT):
        return chosen
    for wheel in sorted(CUSPARSELT_WHEELS, key=lambda wheel: not wheel.endswith(f"-cu{cuda_major}")):
        if found := _find_in_wheel(wheel, "libcusparseLt.so*"):
            return found
    if loaded := ctypes.util.find_library("cusparseLt"):
        return FoundFile(loaded, "system", None)
    newest, other = CUSPARSELT_WHEELS
    raise ToolchainError(
        f"cuSPARSELt was not found: tried {CUSPARSELT}, the wheels {newest}, {other} and the loader's search path for "
        "libcusparseLt",
        f"pip install {newest} ({other} with a CUDA 12 build of torch)",
    )


def require_supported(version: Sequence[int]) -> None:
    """Raise ToolchainError unless we support a version of cuSPARSELt, such as (0, 7, 1)."""
    if CUSPARSELT_OLDEST <= tuple(version[:2]) <= CUSPARSELT_NEWEST:
        return
    (major, minor), oldest = CUSPARSELT_NEWEST, ".".join(map(str, CUSPARSELT_OLDEST))
    raise ToolchainError(
        f"cuSPARSELt {'.'.join(map(str, version))} was found, but only {oldest} to {major}.{minor} is supported",
        f"pip install '{CUSPARSELT_WHEELS[0]}>={oldest},<{major}.{minor + 1}' (or -cu12), or set {CUSPARSELT} to the "
        "path of such a libcusparseLt.so",
    )


def find_nvcc() -> FoundFile:
    """Find the first nvcc that is recent enough, or else any (see `nvcc_version`).  Raises ToolchainError.

    The one of $SLIDESPARSE_NVCC is taken whatever its version.
    """
    if chosen := _chosen("nvcc", NVCC):
        return chosen
    places = [(f"{os.environ[home]}/bin/nvcc", home) for home in NVCC_HOMES if os.environ.get(home)]
    places += [(shutil.which("nvcc") or "", "PATH"), (NVCC_DEFAULT_PATH, "system")]
    found = [FoundFile(path, source, None) for path, source in places if os.access(path, os.X_OK)]
    found += filter(None, (_find_in_wheel(wheel, "nvcc") for wheel in NVCC_WHEELS))
    if not found:
        raise ToolchainError(
            f"nvcc was not found: tried {', '.join((NVCC, *NVCC_HOMES))}, the PATH, {NVCC_DEFAULT_PATH} and the wheels "
            f"{', '.join(NVCC_WHEELS)}",
            NVCC_INSTALL,
        )
    for file in found:
        with suppress(ToolchainError):
            nvcc_version(file.path)
            return file
    return found[0]


def nvcc_version(path: str) -> str:
    """Return the release of the nvcc at ``path``, such as "13.0".

    Raises ToolchainError for one that is too old or does not say.
    """
    output = version_text(path)
    match = re.search(r"release (\d+\.\d+)", output)
    if match is None:
        raise ToolchainError(
            f"{path} --version prints no release number: {output.strip()[-200:]!r}", NVCC_INSTALL
        )
    if numbers(match[1]) < NVCC_MIN_VERSION:
        oldest = ".".join(map(str, NVCC_MIN_VERSION))
        raise ToolchainError(
            f"{path} belongs to CUDA {match[1]}; the kernels need {oldest} or later", NVCC_INSTALL
        )
    return match[1]


def compiler() -> list[str]:
    """Return the C++ compiler as the beginning of a command line: $CXX, else c++, g++ or clang++.

    Raises ToolchainError.
    """
    try:
        chosen = shlex.split(os.environ.get("CXX", ""))
    except ValueError:  # a quote without its other
        chosen = [os.environ["CXX"]]
    if chosen:
        if shutil.which(chosen[0]):
            return chosen
        raise ToolchainError(
            f"the compiler CXX={shlex.join(chosen)} was not found", "correct CXX, or unset it"
        )
    for name in ("c++", "g++", "clang++"):
        if path := shutil.which(name):
            return [path]
    raise ToolchainError(
        "no C++ compiler was found (tried $CXX, c++, g++, clang++)", "install one (apt install g++)"
    )


@cache  # vLLM waits for it while it loads a model, and each target asks again
def version_text(*program: str) -> str:
    """Return the output of ``program --version``, or the error if it cannot be run."""
    command = [*program, "--version"]
    try:
        process = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return process.stdout or process.stderr


def torch_folder() -> Path:
    """Return the folder of the installed torch without importing it.  Raises ToolchainError."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.origin:
        raise ToolchainError("it is built against torch", "install torch first")
    return Path(spec.origin).parent


def python_headers() -> Path:
    """Return the folder of Python's headers.  Raises ToolchainError."""
    folder = Path(sysconfig.get_paths()["include"])
    if not (folder / "Python.h").is_file():
        raise ToolchainError(
            f"Python's headers are not in {folder}", "install them (apt install python3-dev)"
        )
    return folder


def _chosen(name: str, variable: str) -> FoundFile | None:
    """Return the file that an environment variable names.  Raises ToolchainError if it is not there."""
    path = path_of(variable)
    if path and not path.is_file():
        raise ToolchainError(
            f"{name} was not found: {variable}={path} is not a file", f"correct {variable}, or unset it"
        )
    return FoundFile(str(path), variable, None) if path else None


def path_of(variable: str) -> Path | None:
    """Return the path in an environment variable, ``~`` expanded, or None.  Raises ToolchainError for no such user."""
    try:
        return Path(os.environ[variable]).expanduser() if os.environ.get(variable) else None
    except RuntimeError as error:
        raise ToolchainError(
            f"{variable}={os.environ[variable]}: {error}", f"set {variable} to a whole path"
        ) from None


def _find_in_wheel(wheel: str, pattern: str) -> FoundFile | None:
    """Find the first file of an installed wheel that matches ``pattern``."""
    try:
        distribution = importlib.metadata.distribution(wheel)
    except importlib.metadata.PackageNotFoundError:
        return None
    for entry in distribution.files or ():
        path = Path(str(distribution.locate_file(entry)))
        if path.match(pattern) and path.is_file():
            return FoundFile(str(path), wheel, distribution.version)
    return None
