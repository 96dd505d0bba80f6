"""Find CUDA libraries, headers and compilers on this machine.  Standard library only.

An environment variable takes precedence, then this Python's wheels, then the system.  If nothing is found, a
ToolchainError lists what was tried.
"""

from __future__ import annotations

import contextlib
import ctypes.util
import importlib.metadata
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sysconfig
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from slidesparse.errors import EnvironmentFault
from slidesparse.versions import numbers

NVCC = "SLIDESPARSE_NVCC"
NVCC_MIN_VERSION = (12, 2)  # the first whose PTX, 8.2, has Hopper's sparse wgmma for integers
NVCC_HOMES = ("CUDA_HOME", "CUDA_PATH")
NVCC_DEFAULT_PATH = "/usr/local/cuda/bin/nvcc"
NVCC_WHEELS = ("nvidia-cuda-nvcc", "nvidia-cuda-nvcc-cu12")
NVCC_INSTALL = (
    "pip install nvidia-cuda-nvcc nvidia-cuda-cccl (CUDA 13), install the CUDA toolkit 12.2 or later, "
    f"or set {NVCC} to an nvcc"
)
INCLUDE = "SLIDESPARSE_CUDA_INCLUDE"


class ToolchainError(EnvironmentFault, RuntimeError):
    """A library, a header or a compiler is missing or broken: what was found and tried, and the remedy."""

    def __init__(self, what: str, remedy: str) -> None:
        super().__init__(f"{what}; {remedy}")
        self.what, self.remedy = what, remedy


@dataclass(frozen=True)
class SharedLibrary:
    """The places where a CUDA library may be, and the versions with the binary interface that csrc/ calls."""

    name: str  # the name in messages
    file: str  # the beginning of its file name
    soname: str  # the name to ask the loader for, without lib and .so
    variable: str  # environment variable with an explicit path
    wheels: tuple[str, ...]
    oldest: tuple[int, int] = (0, 0)  # major and minor version
    newest: tuple[int, int] | None = None  # None: any


LIBRARIES = {
    "cusparselt": SharedLibrary(
        "cuSPARSELt",
        "libcusparseLt.so",
        "cusparseLt",
        "SLIDESPARSE_CUSPARSELT",
        ("nvidia-cusparselt-cu13", "nvidia-cusparselt-cu12"),
        oldest=(0, 8),
        newest=(0, 10),
    ),
    "cublaslt": SharedLibrary(
        "cuBLASLt",
        "libcublasLt.so",
        "cublasLt",
        "SLIDESPARSE_CUBLASLT",
        ("nvidia-cublas", "nvidia-cublas-cu13", "nvidia-cublas-cu12"),
    ),
}
HEADER_WHEELS = (
    *(wheel for library in LIBRARIES.values() for wheel in library.wheels),
    *("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu13", "nvidia-cuda-runtime-cu12"),
    *("nvidia-cusparse", "nvidia-cusparse-cu13", "nvidia-cusparse-cu12"),
    *("nvidia-cuda-crt", "nvidia-cuda-nvcc", "nvidia-cuda-nvcc-cu12", "nvidia-cuda-cccl"),
)


@dataclass(frozen=True)
class FoundFile:
    """A library or a program that was found."""

    path: str  # a file, or a name that the loader knows
    source: str  # a wheel's or a variable's name, "PATH" or "system"
    version: str | None  # version of the wheel


def find_library(name: str, cuda_major: int | None = None) -> FoundFile:
    """Find the library ``name`` of LIBRARIES; the wheel of CUDA ``cuda_major`` is preferred.

    Raises ToolchainError.
    """
    library = LIBRARIES[name]

    def places() -> Iterator[FoundFile | str]:
        yield _from_variable(library.name, library.variable, lambda path: path.is_file(), "a file")
        for wheel in sorted(library.wheels, key=lambda wheel: not wheel.endswith(f"-cu{cuda_major}")):
            yield _find_in_wheel(
                wheel, library.file, lambda path: path.name.startswith(library.file) and path.is_file()
            )
        loaded = ctypes.util.find_library(library.soname)
        yield (
            FoundFile(loaded, "system", None)
            if loaded
            else f"the loader's search path for lib{library.soname}"
        )

    alternative = f"{library.wheels[-1]} with a CUDA 12 build of torch"
    return _first_found(library.name, f"pip install {library.wheels[0]} ({alternative})", places())


def require_supported(name: str, version: Sequence[int]) -> None:
    """Raise ToolchainError unless csrc/ supports ``version``, such as (0, 7, 1), of library ``name``."""
    library = LIBRARIES[name]
    if library.newest is None or library.oldest <= tuple(version[:2]) <= library.newest:
        return
    (major, minor), oldest = library.newest, ".".join(map(str, library.oldest))
    wheel = f"'{library.wheels[0]}>={oldest},<{major}.{minor + 1}'"
    raise ToolchainError(
        f"{library.name} {'.'.join(map(str, version))} was found, but only {oldest} to {major}.{minor} is supported",
        f"pip install {wheel} (or -cu12), or set {library.variable} to the path of such a {library.file}",
    )


def find_nvcc() -> FoundFile:
    """Find the first nvcc that is recent enough, or else any (see `nvcc_version`).  Raises ToolchainError.

    The one of $SLIDESPARSE_NVCC is taken whatever its version.
    """

    def places() -> Iterator[FoundFile | str]:
        yield _from_variable("nvcc", NVCC, _is_executable, "a program")
        for variable in NVCC_HOMES:
            home = os.environ.get(variable)
            path = Path(home or "") / "bin" / "nvcc"
            tried = f"{path} (from {variable})" if home else f"{variable} (not set)"
            yield FoundFile(str(path), variable, None) if home and _is_executable(path) else tried
        on_path = shutil.which("nvcc")
        yield FoundFile(on_path, "PATH", None) if on_path else "the PATH"
        yield (
            FoundFile(NVCC_DEFAULT_PATH, "system", None)
            if _is_executable(Path(NVCC_DEFAULT_PATH))
            else NVCC_DEFAULT_PATH
        )
        for wheel in NVCC_WHEELS:
            yield _find_in_wheel(wheel, "nvcc", lambda path: path.name == "nvcc" and _is_executable(path))

    def recent() -> Iterator[FoundFile | str]:
        refused = []
        for place in places():
            if isinstance(place, FoundFile) and place.source != NVCC:
                try:
                    nvcc_version(place.path)
                except ToolchainError as error:
                    refused.append(place)
                    yield error.what
                    continue
            yield place
        yield from refused

    return _first_found("nvcc", NVCC_INSTALL, recent())


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
    chosen = shlex.split(os.environ.get("CXX", ""))
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


def python_headers() -> list[Path]:
    """Return the folders of pybind11's and Python's headers.  Raises ToolchainError."""
    bindings, python = importlib.util.find_spec("pybind11"), Path(sysconfig.get_paths()["include"])
    if bindings is None or not bindings.origin:
        raise ToolchainError("building the extensions needs pybind11", "pip install pybind11")
    if not (python / "Python.h").is_file():
        raise ToolchainError(
            f"building the extensions needs {python}/Python.h",
            "install Python's headers (apt install python3-dev)",
        )
    return [Path(bindings.origin).parent / "include", python]


def torch_folder(oldest: tuple[int, int]) -> Path:
    """Return the folder of the installed torch without importing it.  Raises ToolchainError if it is too old."""
    spec, needed = importlib.util.find_spec("torch"), ".".join(map(str, oldest))
    if spec is None or not spec.origin:
        raise ToolchainError("building the operators needs torch", f"install torch {needed} or later first")
    folder = Path(spec.origin).parent
    match = re.search(r"^__version__ = '(.+)'", (folder / "version.py").read_text(), re.M)
    if match is None or numbers(match[1])[:2] < oldest:
        installed = match[1] if match else "of an unknown version"
        raise ToolchainError(
            f"torch {installed} was found; its headers are too old", f"install torch {needed} or later"
        )
    return folder


def cuda_headers(headers: Collection[str], title: str) -> list[Path]:
    """Return the folders of CUDA's ``headers``, with which ``title`` is built.  Raises ToolchainError."""
    places = [Path(part) for part in os.environ.get(INCLUDE, "").split(os.pathsep) if part]
    for wheel in HEADER_WHEELS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            distribution = importlib.metadata.distribution(wheel)
            files = [file for file in distribution.files or () if file.name in (*headers, "host_defines.h")]
            parents = (Path(str(distribution.locate_file(file))).parent for file in files)
            places += dict.fromkeys(folder.parent if folder.name == "crt" else folder for folder in parents)
    nvcc = shutil.which("nvcc")
    homes = [os.environ.get(variable) for variable in NVCC_HOMES]
    homes += [str(Path(nvcc).resolve().parent.parent) if nvcc else None, "/usr/local/cuda"]
    places += [Path(home) / "include" for home in homes if home]
    folders: dict[Path, None] = {}
    missing = []
    for header in headers:
        folder = next((place for place in places if (place / header).is_file()), None)
        if folder:
            folders[folder] = None
        else:
            missing.append(header)
    if missing:
        where = ", ".join(map(str, places)) or "no folder at all"
        raise ToolchainError(
            f"building the {title} needs {', '.join(missing)}, found in none of {where}",
            "the wheels nvidia-cusparselt-cu13, nvidia-cublas, nvidia-cusparse and nvidia-cuda-runtime carry them, as "
            f"does the CUDA toolkit; or name the folders in {INCLUDE}",
        )
    # These headers include others, which wheels may install in a folder of their own.
    extra = next((place for place in places if (place / "crt" / "host_defines.h").is_file()), None)
    return [*folders, *([extra] if extra and extra not in folders else [])]


def _first_found(name: str, remedy: str, places: Iterator[FoundFile | str]) -> FoundFile:
    """Return the first file that was found in ``places``.  Raises ToolchainError, which lists the places tried."""
    tried = []
    for place in places:
        if isinstance(place, FoundFile):
            return place
        tried.append(place)
    raise ToolchainError(f"{name} was not found: tried {', '.join(tried)}", remedy)


def _from_variable(name: str, variable: str, accepted: Callable[[Path], bool], kind: str) -> FoundFile | str:
    """Return the path in an environment variable.  Raises ToolchainError if it is set to another kind of path."""
    path = os.environ.get(variable)
    if not path:
        return f"{variable} (not set)"
    if accepted(Path(path)):
        return FoundFile(path, variable, None)
    raise ToolchainError(
        f"{name} was not found: {variable}={path} is not {kind}",
        f"set {variable} to the path of one, or unset it",
    )


def _find_in_wheel(wheel: str, file: str, accepted: Callable[[Path], bool]) -> FoundFile | str:
    try:
        distribution = importlib.metadata.distribution(wheel)
    except importlib.metadata.PackageNotFoundError:
        return f"the wheel {wheel} (not installed)"
    for entry in distribution.files or ():
        path = Path(str(distribution.locate_file(entry)))
        if accepted(path):
            return FoundFile(str(path), wheel, distribution.version)
    return f"the wheel {wheel} {distribution.version} (no {file} in it)"


def _is_executable(path: Path) -> bool:
    return path.is_file() and os.access(path, os.X_OK)
