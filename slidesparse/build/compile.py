"""Compile the targets in csrc/ just in time, once per machine, into a cache.  Standard library only.

    $SLIDESPARSE_CACHE/extensions/KEY/_cusparselt.cpython-312-x86_64-linux-gnu.so

KEY is a digest of everything that can change the result: sources, CUDA's and torch's headers, compilers, command
lines, Python's ABI and the machine.  The bindings (C++) and the Hopper kernels (CUDA, with the runtime linked
statically) need neither torch nor a GPU to be compiled, and one build of them serves any torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import platform
import re
import stat
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from slidesparse.build import find
from slidesparse.build.find import ToolchainError

FLAGS = ("-std=c++17", "-O2", "-fPIC", "-shared", "-fvisibility=hidden")
HOPPER = ("-gencode=arch=compute_90a,code=sm_90a",)
LAUNCHERS = ("ccache", "sccache", "distcc")  # before the compiler's name in $CXX
NVCC_FLAGS = ("-std=c++17", "-O3", "-Xcompiler=-fPIC,-fvisibility=hidden")
NVCC_LINK_FLAGS = ("-shared", "-cudart=static")
COMPILE_SECONDS = 900  # time limit of one compiler run
REMEDY = f"$CXX chooses another C++ compiler, {find.NVCC} another nvcc"

_logger = logging.getLogger("slidesparse")


@dataclass(frozen=True)
class Target:
    """A shared library that is compiled from csrc/.

    The first of ``sources`` is compiled by the C++ compiler, or, if named units.txt, lists the sources for nvcc.
    """

    name: str  # the file is _NAME.EXT_SUFFIX
    title: str  # the name in messages
    sources: tuple[str, ...]  # glob patterns of all its source files, in csrc/
    headers: tuple[str, ...] = ()  # CUDA headers that it includes
    module: bool = False  # whether it is a Python module, by pybind11
    torch: tuple[int, int] | None = None  # the oldest torch whose stable headers have what it uses
    gpus: tuple[str, ...] = HOPPER  # nvcc's options for the target architectures


TARGETS = {
    target.name: target
    for target in (
        Target(
            "cusparselt",
            "cuSPARSELt extension",
            ("cusparselt.cpp", "library.h"),
            headers=("cusparseLt.h", "cusparse.h", "cuda_runtime_api.h"),
            module=True,
        ),
        Target(
            "cublaslt",
            "cuBLASLt extension",
            ("cublaslt.cpp", "library.h"),
            headers=("cublasLt.h", "cuda_runtime_api.h"),
            module=True,
        ),
        Target("hopper", "Hopper kernels", ("hopper/units.txt", "hopper/*.cu", "hopper/*.cuh")),
        Target(
            "hopper_operators",
            "operators of the Hopper kernels",
            ("hopper/operators.cpp", "hopper/interface.cuh"),
            torch=(2, 10),
        ),
    )
}


@dataclass(frozen=True)
class Recipe:
    """The command lines that make one file; they name their outputs relative to the folder they run in."""

    compiles: tuple[tuple[str, ...], ...]  # may run in parallel
    link: tuple[str, ...]
    file: str
    key: str


def build(target: str | Target) -> Path:
    """Compile a target, or the one of TARGETS with this name, unless the cache holds it.  Raises ToolchainError.

    A finished file is published by one rename; concurrent processes wait for the first one to compile it.
    """
    target = TARGETS[target] if isinstance(target, str) else target
    recipe = _recipe(target)
    place = _recipe_path(recipe)
    try:
        if not place.is_file():
            make_folder(place.parent)
            _require_trusted(place.parent)
            with _file_lock(place.with_name(f"{place.name}.lock")):
                if not place.is_file():
                    _logger.info("compiling the %s, once, into %s", target.title, place)
                    _run_recipe(recipe, place)
        _require_trusted(place)
    except OSError as error:
        raise _unwritable(place.parent, error) from None
    return place


def target_path(name: str) -> Path:
    """Return the path of target ``name`` in the cache, built or not.  Raises ToolchainError."""
    return _recipe_path(_recipe(TARGETS[name]))


def cache_folder() -> Path:
    """Return $SLIDESPARSE_CACHE, else slidesparse in $XDG_CACHE_HOME or ~/.cache.

    Raises ToolchainError for a user without a home folder.
    """
    explicit = os.environ.get("SLIDESPARSE_CACHE")
    if explicit:
        return Path(explicit)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "slidesparse"
    except RuntimeError:  # neither $HOME nor an entry of the user
        raise ToolchainError(
            "this user has no home folder for a cache", "set SLIDESPARSE_CACHE to a folder"
        ) from None


def sources_folder() -> Path:
    """Return the folder csrc/ of the package or the clone.  Raises ToolchainError when it is missing."""
    package = Path(__file__).parent.parent
    for folder in (package / "csrc", package.parent / "csrc"):
        if (folder / "library.h").is_file():
            return folder
    raise ToolchainError(f"the folder csrc/ with the sources is not in {package}", "reinstall slidesparse")


def compile_with(command: Sequence[str], folder: Path | None = None) -> None:
    """Run a compiler's command line in ``folder``.  Raises ToolchainError with its output when it fails."""
    try:
        process = subprocess.run(
            command,
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=COMPILE_SECONDS,
            errors="replace",
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ToolchainError(
            f"the compiler took more than {COMPILE_SECONDS} s: {' '.join(command)}", REMEDY
        ) from None
    if process.returncode:
        errors = "\n".join(re.split(r"\r?\n", process.stderr.strip())[:20])  # the first error is the cause
        raise ToolchainError(f"the compiler failed: {' '.join(command)}\n{errors}", REMEDY)


def make_folder(path: Path) -> None:
    """Make a folder in the cache, and the cache itself, writable by this user alone under any umask.

    Raises ToolchainError where it cannot be made, or written.
    """
    try:
        parents = [parent for parent in path.parents if parent.is_relative_to(cache_folder())]
        for folder in reversed([path, *parents]):
            if not folder.is_dir():
                folder.parent.mkdir(parents=True, exist_ok=True)
                with contextlib.suppress(FileExistsError):  # another process made it meanwhile
                    folder.mkdir(mode=0o755)
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        raise _unwritable(path, error) from None


def _unwritable(folder: Path, error: OSError) -> ToolchainError:
    return ToolchainError(
        f"the cache {folder} cannot be written: {error.strerror or error}",
        "set SLIDESPARSE_CACHE to a folder that can",
    )


def _require_trusted(path: Path) -> None:
    """Raise ToolchainError where another user could have put ``path`` into the cache, or could change it.

    Compiled code runs as the user.  Links are not followed within the cache, which itself may lie behind one.
    """
    cache = cache_folder()
    paths = [path, *(folder for folder in path.parents if folder.is_relative_to(cache))]
    for place in paths:
        status = (place if place != cache else cache.resolve()).lstat()
        if stat.S_ISLNK(status.st_mode):
            raise ToolchainError(f"{place} in the cache is a symbolic link", "remove it")
        foreign = status.st_uid not in (os.getuid(), 0)
        if foreign or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            remedy = f"chown -R {os.getuid()} {cache}" if foreign else f"chmod -R go-w {cache}"
            raise ToolchainError(
                f"{place} belongs to user {status.st_uid} with mode {stat.S_IMODE(status.st_mode):o}, so another "
                "user may be able to replace the compiled code in it",
                f"{remedy} if you trust what is in it, else remove it; or set SLIDESPARSE_CACHE",
            )


def _recipe(target: Target) -> Recipe:
    file = f"_{target.name}{sysconfig.get_config_var('EXT_SUFFIX') or '.so'}"
    folder = sources_folder()
    inputs: list[Path] = []
    for pattern in target.sources:
        matched = sorted(folder.glob(pattern))
        if not matched:
            raise ToolchainError(f"{folder / pattern} is not there", "reinstall slidesparse")
        inputs += matched
    if target.sources[0].endswith("units.txt"):
        nvcc = find.find_nvcc().path
        find.nvcc_version(nvcc)
        compilers = [[nvcc], _host_compiler()]
        compiles, link = _cuda_commands(nvcc, folder / target.sources[0], target.gpus, file)
    else:
        compilers = [find.compiler()]
        compiles, (link, headers) = [], _cpp_command(target, folder / target.sources[0], file)
        inputs += headers
    digest = hashlib.sha256()
    for line in (*compiles, link):
        digest.update("\0".join(line).encode() + b"\n")
    for path in inputs:
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    for compiler in compilers:
        digest.update(find.version_text(*compiler).encode())
    digest.update(f"{sysconfig.get_config_var('SOABI')}\0{platform.machine()}".encode())
    return Recipe(tuple(map(tuple, compiles)), tuple(link), file, digest.hexdigest()[:20])


def _recipe_path(recipe: Recipe) -> Path:
    return cache_folder() / "extensions" / recipe.key / recipe.file


def _cpp_command(target: Target, source: Path, file: str) -> tuple[list[str], list[Path]]:
    """Return the command line of a C++ target, and the headers outside csrc/ that are part of the key."""
    defines, folders, key_files, links = [], [], [], ["-ldl"]
    if target.module:
        defines.append(f"-DSLIDESPARSE_MODULE=_{target.name}")
        folders += find.python_headers()
        key_files.append(folders[0] / "pybind11" / "detail" / "common.h")  # holds pybind11's version
    if target.torch:  # resolved against the torch that is loaded first
        torch = find.torch_folder(target.torch)
        folders.append(torch / "include")
        key_files.append(torch / "version.py")
        links += [f"-L{torch / 'lib'}", "-ltorch_cpu", "-lc10"]
    if target.headers:
        cuda = find.cuda_headers(target.headers, target.title)
        folders += cuda
        key_files += [folder / header for folder in cuda for header in target.headers]
    includes = [word for folder in folders for word in ("-isystem", str(folder))]
    command = [*find.compiler(), *FLAGS, *defines, *includes, str(source), "-o", file, *links]
    return command, [path for path in key_files if path.is_file()]


def _cuda_commands(
    nvcc: str, units: Path, gpus: Sequence[str], file: str
) -> tuple[list[list[str]], list[str]]:
    """Return the command lines that compile the units of a CUDA target, and the one that links them."""
    host = [] if os.environ.get("NVCC_CCBIN") else _host_compiler()
    if host and Path(host[0]).name in LAUNCHERS:
        host = host[1:]  # nvcc runs the compiler itself
    options = [f"-ccbin={word}" if n == 0 else f"-Xcompiler={word}" for n, word in enumerate(host)]
    compiles = [
        [nvcc, *options, *NVCC_FLAGS, *gpus, *macros, "-c", str(source), "-o", f"{index}.o"]
        for index, (source, macros) in enumerate(_read_units(units))
    ]
    home = Path(nvcc).resolve().parent.parent  # a wheel's libraries are in lib/, where its nvcc does not look
    places = [f"-L{place}" for place in (home / "lib64", home / "lib") if place.is_dir()]
    objects = [command[-1] for command in compiles]
    return compiles, [nvcc, *options, *NVCC_LINK_FLAGS, *gpus, *places, "-o", file, *objects, "-ldl"]


def _host_compiler() -> list[str]:
    """Return the C++ compiler that nvcc runs; nvcc reads NVCC_CCBIN itself."""
    chosen = os.environ.get("NVCC_CCBIN")
    return [chosen] if chosen else find.compiler()


def _read_units(listed: Path) -> list[tuple[Path, list[str]]]:
    """Return the sources that units.txt lists with their options, for every combination of their macros' values.

    Raises ToolchainError for a line that is not ``SOURCE MACRO=VALUE,VALUE ...``.
    """
    units = []
    for number, line in enumerate(listed.read_text().splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        macros = [word.partition("=") for word in words[1:]]
        if not (listed.parent / words[0]).is_file() or any(not values for _, _, values in macros):
            raise ToolchainError(
                f"{listed}, line {number}: {line!r} is not a source of this folder and MACRO=VALUE,VALUE",
                "reinstall slidesparse",
            )
        choices = [[f"-D{name}={value}" for value in values.split(",")] for name, _, values in macros]
        units += [(listed.parent / words[0], list(chosen)) for chosen in product(*choices)]
    return units


def _run_recipe(recipe: Recipe, target: Path) -> None:
    """Run the command lines in a folder of their own, and publish the file that they make."""
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="building-") as scratch:
        folder = Path(scratch)
        with ThreadPoolExecutor(max(1, min(len(recipe.compiles), _max_jobs()))) as pool:
            futures = [pool.submit(compile_with, command, folder) for command in recipe.compiles]
            try:
                for future in futures:
                    future.result()
            except BaseException:  # also on KeyboardInterrupt: start no further compiler
                pool.shutdown(cancel_futures=True)
                raise
        compile_with(recipe.link, folder)
        library = folder / recipe.file
        with library.open("rb") as file:
            os.fsync(file.fileno())
        library.chmod(0o755)
        os.replace(library, target)


def _max_jobs() -> int:
    """Return the number of compilers to run at once: $MAX_JOBS, or one for each processor."""
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(ValueError):
        return min(processors, int(os.environ["MAX_JOBS"])) if "MAX_JOBS" in os.environ else processors
    return processors


@contextlib.contextmanager
def _file_lock(path: Path) -> Iterator[None]:
    import fcntl  # POSIX only; imported late so that doctor runs everywhere

    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with contextlib.suppress(OSError):  # a file system without locks: two processes may compile the same
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)
