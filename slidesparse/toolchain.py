"""Find NVIDIA's GEMM libraries and build the extensions in csrc/ that call them.  Standard library only.

The extensions are host code without torch or CUDA behind them, so one build serves any torch.  They are built when
the package is installed, if a compiler and the headers are there, and otherwise just in time, once, into a cache::

    $SLIDESPARSE_CACHE/extensions/KEY/_cusparselt.cpython-312-x86_64-linux-gnu.so

KEY digests what can change the result: sources, headers, compiler, options, Python's ABI and the machine.
"""

from __future__ import annotations

import contextlib
import ctypes.util
import hashlib
import importlib.metadata
import importlib.util
import logging
import os
import platform
import re
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

EXTENSIONS = ("cusparselt", "cublaslt")
FLAGS = ("-std=c++17", "-O2", "-fPIC", "-shared", "-fvisibility=hidden")
COMPILE_SECONDS = 300

_logger = logging.getLogger("slidesparse")


class ToolchainError(RuntimeError):
    """A library, a header or a compiler is missing or broken: what was found and tried, and the remedy."""

    def __init__(self, what: str, remedy: str) -> None:
        super().__init__(f"{what}; {remedy}")
        self.what, self.remedy = what, remedy


@dataclass(frozen=True)
class SharedLibrary:
    """Where a CUDA library may come from."""

    name: str  # as people write it
    file: str  # the beginning of its file name
    soname: str  # what to ask the loader for, without lib and .so
    variable: str  # environment variable with an explicit path
    wheels: tuple[str, ...]
    oldest: tuple[int, int] = (0, 0)  # major and minor version
    newest: tuple[int, int] | None = None  # the last whose binary interface is the one we call


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
HEADERS = {
    "cusparselt": ("cusparseLt.h", "cusparse.h", "cuda_runtime_api.h"),
    "cublaslt": ("cublasLt.h", "cuda_runtime_api.h"),
}
HEADER_WHEELS = (
    *(wheel for library in LIBRARIES.values() for wheel in library.wheels),
    *("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu13", "nvidia-cuda-runtime-cu12"),
    *("nvidia-cusparse", "nvidia-cusparse-cu13", "nvidia-cusparse-cu12"),
    *("nvidia-cuda-crt", "nvidia-cuda-nvcc", "nvidia-cuda-nvcc-cu12", "nvidia-cuda-cccl"),
)


@dataclass(frozen=True)
class Found:
    """A library that was found."""

    path: str  # what to hand to dlopen
    source: str  # the wheel's name, the variable's name, or "system"
    version: str | None  # of the wheel


def find_library(name: str, cuda_major: int | None = None) -> Found:
    """The library ``name`` of LIBRARIES: an explicit path, else a wheel, else what the loader finds.

    Among wheels, that of CUDA ``cuda_major`` goes first.  Raises ToolchainError with what was tried.
    """
    library = LIBRARIES[name]
    tried = []
    explicit = os.environ.get(library.variable)
    if explicit:
        if Path(explicit).is_file():
            return Found(explicit, library.variable, None)
        raise ToolchainError(
            f"{library.name} was not found: {library.variable}={explicit} is not a file",
            f"set it to the path of a {library.file}, or unset it",
        )
    tried.append(f"{library.variable} (not set)")
    for wheel in sorted(library.wheels, key=lambda wheel: not wheel.endswith(f"-cu{cuda_major}")):
        try:
            distribution = importlib.metadata.distribution(wheel)
        except importlib.metadata.PackageNotFoundError:
            tried.append(f"the wheel {wheel} (not installed)")
            continue
        for path in _files_of(distribution, lambda file: file.startswith(library.file)):
            return Found(str(path), wheel, distribution.version)
        tried.append(f"the wheel {wheel} {distribution.version} (its {library.file} is missing)")
    found = ctypes.util.find_library(library.soname)
    if found:
        return Found(found, "system", None)
    tried.append(f"the loader's search path for lib{library.soname} (nothing)")
    raise ToolchainError(
        f"{library.name} was not found: tried {', '.join(tried)}",
        f"pip install {library.wheels[0]} ({library.wheels[-1]} beside a CUDA 12 build of torch)",
    )


def require_supported(name: str, version: Sequence[int]) -> None:
    """Raise ToolchainError for a version, such as (0, 7, 1), of library ``name`` whose interface is not ours."""
    library = LIBRARIES[name]
    found = tuple(version[:2])
    if library.newest is None or library.oldest <= found <= library.newest:
        return
    (major, minor), oldest = library.newest, ".".join(map(str, library.oldest))
    wheel = f"'{library.wheels[0]}>={oldest},<{major}.{minor + 1}'"
    raise ToolchainError(
        f"{library.name} {'.'.join(map(str, version))} was found, {oldest} to {major}.{minor} is supported",
        f"pip install {wheel} (or -cu12), or set {library.variable} to the path of such a {library.file}",
    )


def numbers(version: str) -> tuple[int, ...]:
    """``0.8.0.4rc1`` -> (0, 8, 0, 4)."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def _files_of(distribution: importlib.metadata.Distribution, wanted: Callable[[str], bool]) -> Iterator[Path]:
    for file in distribution.files or ():
        if wanted(file.name):
            path = Path(str(distribution.locate_file(file)))
            if path.is_file():
                yield path


def sources() -> Path:
    """The folder csrc/, in an installed package or in a clone.  Raises ToolchainError when it is not there."""
    package = Path(__file__).parent
    for folder in (package / "csrc", package.parent / "csrc"):
        if (folder / "library.h").is_file():
            return folder
    raise ToolchainError(f"the extensions' sources are not in {package}", "reinstall slidesparse")


def sources_digest() -> str:
    """A digest of csrc/, built into each extension so that a stale one is noticed."""
    digest = hashlib.sha256()
    for path in sorted(sources().iterdir()):
        if path.suffix in (".h", ".cpp"):
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def include_folders(name: str) -> list[Path]:
    """Folders that together hold the headers extension ``name`` needs.  Raises ToolchainError naming what lacks."""
    places = [Path(part) for part in os.environ.get("SLIDESPARSE_CUDA_INCLUDE", "").split(os.pathsep) if part]
    for wheel in HEADER_WHEELS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            distribution = importlib.metadata.distribution(wheel)
            places += {path.parent for path in _files_of(distribution, _TOP_HEADERS.__contains__)}
    for home in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), _nvcc_home(), "/usr/local/cuda"):
        if home:
            places.append(Path(home) / "include")
    folders: list[Path] = []
    missing = []
    for header in HEADERS[name]:
        folder = next((place for place in places if (place / header).is_file()), None)
        if folder is None:
            missing.append(header)
        elif folder not in folders:
            folders.append(folder)
    if missing:
        where = ", ".join(map(str, places)) or "no folder at all"
        raise ToolchainError(
            f"building the {LIBRARIES[name].name} extension needs {', '.join(missing)}, found in none of {where}",
            "the wheels nvidia-cusparselt-cu13, nvidia-cublas, nvidia-cusparse and nvidia-cuda-runtime carry them, as "
            "does the CUDA toolkit; or name the folders in SLIDESPARSE_CUDA_INCLUDE",
        )
    extra = [
        place for place in places if (place / "crt" / "host_defines.h").is_file() and place not in folders
    ]
    return folders + extra[:1]


_TOP_HEADERS = frozenset(header for headers in HEADERS.values() for header in headers)


def _nvcc_home() -> str | None:
    nvcc = shutil.which("nvcc")
    return str(Path(nvcc).resolve().parent.parent) if nvcc else None


def compiler() -> list[str]:
    """The C++ compiler, as the beginning of a command line: $CXX, else c++, g++ or clang++.  Raises ToolchainError."""
    chosen = shlex.split(os.environ.get("CXX", ""))
    if chosen:
        if shutil.which(chosen[0]):
            return chosen
        raise ToolchainError(
            f"the compiler CXX={shlex.join(chosen)} was not found", "correct CXX, or unset it"
        )
    found = next((path for path in map(shutil.which, ("c++", "g++", "clang++")) if path), None)
    if found is None:
        raise ToolchainError(
            "no C++ compiler was found (tried $CXX, c++, g++, clang++)",
            "install one (apt install g++), or install slidesparse where one is and copy the environment",
        )
    return [found]


def pybind11_include() -> Path:
    """The folder of pybind11's headers.  Raises ToolchainError."""
    spec = importlib.util.find_spec("pybind11")
    if spec is None or not spec.origin:
        raise ToolchainError("building the extensions needs pybind11", "pip install pybind11")
    return Path(spec.origin).parent / "include"


def command(name: str, target: Path) -> list[str]:
    """The compiler's command line that builds extension ``name`` into ``target``.  Raises ToolchainError."""
    python = Path(sysconfig.get_paths()["include"])
    if not (python / "Python.h").is_file():
        raise ToolchainError(
            f"building the extensions needs {python}/Python.h",
            "install Python's headers (apt install python3-dev)",
        )
    folders = [pybind11_include(), python, *include_folders(name)]
    includes = [word for folder in folders for word in ("-isystem", str(folder))]
    defines = [f"-DSLIDESPARSE_MODULE=_{name}", f'-DSLIDESPARSE_SOURCES="{sources_digest()}"']
    return [
        *compiler(),
        *FLAGS,
        *defines,
        *includes,
        str(sources() / f"{name}.cpp"),
        "-o",
        str(target),
        "-ldl",
    ]


def cache_folder() -> Path:
    """$SLIDESPARSE_CACHE, else slidesparse in $XDG_CACHE_HOME or ~/.cache."""
    explicit = os.environ.get("SLIDESPARSE_CACHE")
    if explicit:
        return Path(explicit)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "slidesparse"


def build(name: str) -> Path:
    """Compile extension ``name`` unless the cache has it; the path of the module.  Raises ToolchainError."""
    words, target = _cached(name)
    return publish(
        target, lambda made: compile_with([str(made) if word == target.name else word for word in words])
    )


def publish(target: Path, make: Callable[[Path], None]) -> Path:
    """``target``, written by ``make`` unless it is there.  Raises ToolchainError when its folder cannot be written.

    A finished file appears under its name by one rename, and processes that want the same one wait for the first.
    """
    if target.is_file():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _lock(target.with_name(f"{target.name}.lock")):
            if not target.is_file():
                _publish(target, make)
    except OSError as error:
        raise _unwritable(target.parent, error.strerror or str(error)) from None
    return target


def _publish(target: Path, make: Callable[[Path], None]) -> None:
    _logger.info("building %s", target)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="building-") as scratch:
        made = Path(scratch) / target.name
        make(made)
        with made.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(made, target)


def _unwritable(folder: Path, why: str) -> ToolchainError:
    return ToolchainError(
        f"the extension cache {folder} cannot be written: {why}",
        "set SLIDESPARSE_CACHE to a folder that can",
    )


def file_name(name: str) -> str:
    """Of the compiled extension, such as ``_cublaslt.cpython-312-x86_64-linux-gnu.so``."""
    return f"_{name}{sysconfig.get_config_var('EXT_SUFFIX') or '.so'}"


def _cached(name: str) -> tuple[list[str], Path]:
    """The compiler's command line, and where the cache has what it makes or would have it."""
    words = command(name, Path(file_name(name)))
    return words, cache_folder() / "extensions" / _key(name, words) / file_name(name)


@dataclass(frozen=True)
class Extension:
    """Whether an extension is there."""

    state: str  # "installed", "built in the cache" or "can be built when first used"
    path: str | None  # where it is or will be
    note: str = ""  # on a build of older sources that was installed and is not used


def installed(file: str, digest: str) -> Path | None:
    """What was compiled at installation as ``file``, unless it was from other sources than those of ``digest``.

    The digest stands in the file as text; importing a module would need its package, and so torch.
    """
    found = Path(__file__).parent / "gemm" / file
    return found if found.is_file() and digest.encode() in found.read_bytes() else None


def state(file: str, digest: str, cached: Callable[[], Path]) -> Extension:
    """What asking for ``file`` will do; ``cached`` says where the cache has it.  Raises ToolchainError."""
    if there := installed(file, digest):
        return Extension("installed", str(there))
    stale = Path(__file__).parent / "gemm" / file
    note = f"{stale} was built from other sources and is not used" if stale.is_file() else ""
    target = cached()
    if target.is_file():
        return Extension("built in the cache", str(target), note)
    parent = next(folder for folder in target.parents if folder.exists())
    if not (parent.is_dir() and os.access(parent, os.W_OK)):
        raise _unwritable(target.parent, f"{parent} is no folder that may be written")
    return Extension("can be built when first used", str(target), note)


def extension_state(name: str) -> Extension:
    """`state` of extension ``name``."""
    return state(file_name(name), sources_digest(), lambda: _cached(name)[1])


def _key(name: str, words: list[str]) -> str:
    digest = hashlib.sha256("\0".join(words).encode())
    for folder in include_folders(name):
        for header in HEADERS[name]:
            if (folder / header).is_file():
                digest.update((folder / header).read_bytes())
    version = subprocess.run([*compiler(), "--version"], capture_output=True, text=True, check=False).stdout
    bindings = pybind11_include() / "pybind11" / "detail" / "common.h"  # says which version it is
    digest.update(bindings.read_bytes() if bindings.is_file() else b"")
    digest.update(f"{version}\0{sysconfig.get_config_var('SOABI')}\0{platform.machine()}".encode())
    return digest.hexdigest()[:20]


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    import fcntl  # late: of POSIX, and doctor answers everywhere

    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def compile_with(
    words: Sequence[str], seconds: float | None = None, remedy: str = "$CXX chooses another compiler"
) -> None:
    """Run a compiler's command line.  Raises ToolchainError with its words when it fails."""
    seconds = COMPILE_SECONDS if seconds is None else seconds
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        raise ToolchainError(f"the compiler took more than {seconds} s: {' '.join(words)}", remedy) from None
    if done.returncode:
        said = "\n".join(re.split(r"\r?\n", done.stderr.strip())[:20])
        raise ToolchainError(f"the compiler failed: {' '.join(words)}\n{said}", remedy)
