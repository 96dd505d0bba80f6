"""Compile the targets in csrc/ just in time, once per machine, into a cache.  Standard library only.

    $SLIDESPARSE_CACHE/extensions/KEY/_hopper.cpython-312-x86_64-linux-gnu.so

KEY is a digest of everything that can change the result: sources, torch's headers, compilers, command lines, Python's
ABI and the machine.  The Hopper kernels (CUDA, with the runtime linked statically) need neither torch nor a GPU to be
compiled, and one build of them serves any torch.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import re
import stat
import subprocess
import sysconfig
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from slidesparse.build import find
from slidesparse.build.find import ToolchainError
from slidesparse.errors import LOGGER
from slidesparse.files import SHARED, locked, own_folder, sync, write_atomically

FLAGS = ("-std=c++17", "-O2", "-fPIC", "-shared", "-fvisibility=hidden")
HOPPER = ("-gencode=arch=compute_90a,code=sm_90a",)
LAUNCHERS = ("ccache", "sccache", "distcc")  # before the compiler's name in $CXX
NVCC_FLAGS = ("-std=c++17", "-O3", "-Xcompiler=-fPIC,-fvisibility=hidden", "-Xptxas=-v")
NVCC_LINK_FLAGS = ("-shared", "-cudart=static")
COMPILE_SECONDS = 900  # time limit of one compiler run
REMEDY = f"$CXX chooses another C++ compiler, {find.NVCC} another nvcc"

_logger = logging.getLogger(LOGGER)


@dataclass(frozen=True)
class Target:
    """A shared library that is compiled from csrc/.

    The first of ``sources`` is compiled by the C++ compiler, or, if named units.txt, lists the sources for nvcc.
    """

    name: str  # the file is _NAME.EXT_SUFFIX
    title: str  # the name in messages
    sources: tuple[str, ...]  # glob patterns of all its source files, in csrc/
    torch: bool = False  # whether it is compiled against torch's stable headers
    python: bool = False  # whether it is a Python extension, by the pybind11 that torch brings
    gpus: tuple[str, ...] = HOPPER  # nvcc's options for the target architectures


TARGETS = {
    target.name: target
    for target in (
        Target("hopper", "Hopper kernels", ("hopper/units.txt", "hopper/*.cu", "hopper/*.cuh")),
        Target(
            "hopper_operators",
            "operators of the Hopper kernels",
            ("hopper/operators.cpp", "hopper/interface.cuh"),
            torch=True,
        ),
        Target("cusparselt", "bindings of cuSPARSELt", ("cusparselt.cpp",), python=True),
    )
}


@dataclass(frozen=True)
class Recipe:
    """The command lines that make one file; they name their outputs relative to the folder they run in."""

    compiles: tuple[tuple[str, ...], ...]  # may run in parallel
    link: tuple[str, ...]
    place: Path  # of the file in the cache


def build(target: str | Target) -> Path:
    """Compile a target, or the one of TARGETS with this name, unless the cache holds it.  Raises EnvironmentFault.

    A finished file is published by one rename; concurrent processes wait for the first one to compile it.
    """
    target = TARGETS[target] if isinstance(target, str) else target
    recipe = _recipe(target)
    place = recipe.place
    try:
        if not place.is_file():
            make_folder(place.parent)
            _require_trusted(place.parent)
            with locked(place.with_name(f"{place.name}.lock")):
                if not place.is_file():
                    _logger.info("compiling the %s, once, into %s", target.title, place)
                    _run_recipe(recipe)
        _require_trusted(place)
    except OSError as error:
        raise ToolchainError(
            f"the cache {place.parent} cannot be written: {error.strerror or error}",
            "set SLIDESPARSE_CACHE to another folder",
        ) from None
    return place


def target_path(name: str) -> Path:
    """Return the path of target ``name`` in the cache, built or not.  Raises ToolchainError."""
    return _recipe(TARGETS[name]).place


def said_path(place: Path) -> Path:
    """Return the path of what the compiler said of each unit of a target's file, a list of texts in JSON."""
    return place.with_name(f"{place.name}.json")


def sources_folder() -> Path:
    """Return the folder csrc/ of the package or the clone.  Raises ToolchainError when it is missing."""
    package = Path(__file__).parent.parent
    for folder in (package / "csrc", package.parent / "csrc"):
        if (folder / "hopper").is_dir():
            return folder
    raise ToolchainError(f"the folder csrc/ with the sources is not in {package}", "reinstall slidesparse")


# ---- the cache


def cache_folder() -> Path:
    """Return $SLIDESPARSE_CACHE, else slidesparse in $XDG_CACHE_HOME or ~/.cache.

    Raises ToolchainError for a user without a home folder.
    """
    if explicit := find.path_of("SLIDESPARSE_CACHE"):
        return explicit
    xdg = Path(os.environ.get("XDG_CACHE_HOME", ""))  # counts only if absolute
    try:
        return (xdg if xdg.is_absolute() else Path.home() / ".cache") / "slidesparse"
    except RuntimeError:  # neither $HOME nor an entry of the user
        raise ToolchainError(
            "this user has no home folder for a cache", "set SLIDESPARSE_CACHE to a folder"
        ) from None


def make_folder(path: Path) -> Path:
    """Make a folder in the cache, and the cache itself, writable by this user alone under any umask; return it.

    Raises EnvironmentFault where it cannot be made, or written.
    """
    return own_folder(path, "set SLIDESPARSE_CACHE to a folder that can be written")


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
        if foreign or status.st_mode & SHARED:
            remedy = f"chown -R {os.getuid()} {cache}" if foreign else f"chmod -R go-w {cache}"
            raise ToolchainError(
                f"{place} belongs to user {status.st_uid} with mode {stat.S_IMODE(status.st_mode):o}, so another "
                "user may be able to replace the compiled code in it",
                f"{remedy} if you trust what is in it, else remove it; or set SLIDESPARSE_CACHE",
            )


# ---- command lines


def _recipe(target: Target) -> Recipe:
    file = f"_{target.name}{sysconfig.get_config_var('EXT_SUFFIX') or '.so'}"
    folder = sources_folder()
    inputs: list[Path] = []
    for pattern in target.sources:
        matched = sorted(folder.glob(pattern))
        if not matched:
            raise ToolchainError(f"{folder / pattern} is not there", "reinstall slidesparse")
        inputs += matched
    source = folder / target.sources[0]
    if source.name == "units.txt":
        nvcc = find.find_nvcc().path
        find.nvcc_version(nvcc)
        compilers = [[nvcc], _host_compiler()]
        compiles, link = cuda_commands(nvcc, source, target.gpus, file)
    else:
        compilers, compiles = [find.compiler()], []
        link = [*compilers[0], *FLAGS]
        links = ["-ldl"]
        if target.torch or target.python:
            torch = find.torch_folder()
            inputs.append(torch / "version.py")
            link += ["-isystem", str(torch / "include")]
            if target.torch:  # resolved against the torch that is loaded first
                links += [f"-L{torch / 'lib'}", "-ltorch_cpu", "-lc10"]
            if target.python:
                link += ["-isystem", str(find.python_headers())]
        link += [str(source), "-o", file, *links]
    digest = hashlib.sha256()
    for line in (*compiles, link):
        digest.update("\0".join(line).encode() + b"\n")
    for path in inputs:
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    for compiler in compilers:
        digest.update(find.version_text(*compiler).encode())
    digest.update(f"{sysconfig.get_config_var('SOABI')}\0{platform.machine()}".encode())
    place = cache_folder() / "extensions" / digest.hexdigest()[:20] / file
    return Recipe(tuple(map(tuple, compiles)), tuple(link), place)


def cuda_commands(
    nvcc: str, units: Path, gpus: Sequence[str], file: str
) -> tuple[list[list[str]], list[str]]:
    """Return the command lines that compile the units of a CUDA target, and the one that links them."""
    host = [] if os.environ.get("NVCC_CCBIN") else _host_compiler()
    if host and Path(host[0]).name in LAUNCHERS:
        host = host[1:]  # nvcc runs the compiler itself
    options = [f"-ccbin={word}" if n == 0 else f"-Xcompiler={word}" for n, word in enumerate(host)]
    compiles = [
        [nvcc, *options, *NVCC_FLAGS, *gpus, *macros, "-c", str(source), "-o", f"{index}.o"]
        for index, (source, macros) in enumerate(read_units(units))
    ]
    home = Path(nvcc).resolve().parent.parent  # a wheel's libraries are in lib/, where its nvcc does not look
    places = [f"-L{place}" for place in (home / "lib64", home / "lib") if place.is_dir()]
    objects = [command[-1] for command in compiles]
    return compiles, [nvcc, *options, *NVCC_LINK_FLAGS, *gpus, *places, "-o", file, *objects, "-ldl"]


def _host_compiler() -> list[str]:
    """Return the C++ compiler that nvcc runs; nvcc reads NVCC_CCBIN itself."""
    chosen = os.environ.get("NVCC_CCBIN")
    return [chosen] if chosen else find.compiler()


def read_units(listed: Path) -> list[tuple[Path, list[str]]]:
    """Return the sources that units.txt lists, ``SOURCE MACRO=VALUE,VALUE ...``, with every choice of their macros."""
    units = []
    for line in listed.read_text().splitlines():
        source, *macros = line.partition("#")[0].split() or [""]
        if source:
            named = (macro.partition("=") for macro in macros)
            choices = [[f"-D{name}={value}" for value in values.split(",")] for name, _, values in named]
            units += [(listed.parent / source, list(chosen)) for chosen in product(*choices)]
    return units


# ---- running them


def _run_recipe(recipe: Recipe) -> None:
    """Run the command lines in a folder of their own, and publish the file that they make."""
    place = recipe.place
    with tempfile.TemporaryDirectory(dir=place.parent, prefix="building-") as scratch:
        folder = Path(scratch)
        processors, wanted = len(os.sched_getaffinity(0)), os.environ.get("MAX_JOBS", "")
        jobs = min(processors, int(wanted)) if wanted.isdecimal() and int(wanted) else processors
        with ThreadPoolExecutor(jobs) as pool:
            futures = [pool.submit(compile_with, command, folder) for command in recipe.compiles]
            try:
                said = [future.result() for future in futures]
            except BaseException:  # also on KeyboardInterrupt: start no further compiler
                pool.shutdown(cancel_futures=True)
                raise
        compile_with(recipe.link, folder)
        write_atomically(said_path(place), json.dumps(said).encode())
        (folder / place.name).chmod(0o755)
        sync(folder / place.name)
        os.replace(folder / place.name, place)


def compile_with(command: Sequence[str], folder: Path | None = None) -> str:
    """Run a compiler in ``folder`` and return what it says.  Raises ToolchainError with that when it fails."""
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
    return process.stderr
