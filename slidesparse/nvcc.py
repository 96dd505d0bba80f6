"""Find nvcc and compile the kernels in csrc/hopper/ with it.  Standard library only.

What comes of it is a plain shared library for compute capability 9.0, with the CUDA runtime in it and without torch or
Python behind it, so one build serves any torch.  It is compiled at installation when nvcc is found, and otherwise when
it is first needed, into the cache of `slidesparse.toolchain`::

    $SLIDESPARSE_CACHE/extensions/KEY/_hopper.cpython-312-x86_64-linux-gnu.so

KEY digests what can change the result: sources, macros, nvcc, the C++ compiler behind it, options and the machine.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from slidesparse import toolchain
from slidesparse.toolchain import Extension, Found, ToolchainError

NAME = "hopper"
VARIABLE = "SLIDESPARSE_NVCC"  # environment variable with an explicit path
HOMES = ("CUDA_HOME", "CUDA_PATH")
USUAL = "/usr/local/cuda/bin/nvcc"
WHEELS = ("nvidia-cuda-nvcc", "nvidia-cuda-nvcc-cu12")
OLDEST = (12, 2)  # the first whose PTX, 8.2, has Hopper's sparse products of integers
SECONDS = 900  # of one unit
FLAGS = (
    "-std=c++17",
    "-O3",
    "-gencode=arch=compute_90a,code=sm_90a",
    "-Xcompiler=-fPIC,-fvisibility=hidden",
)
LINK_FLAGS = ("-shared", "-cudart=static", "-gencode=arch=compute_90a,code=sm_90a")
REMEDY = f"{VARIABLE} chooses another nvcc, $CXX the C++ compiler behind it"
INSTALL = (
    "pip install nvidia-cuda-nvcc nvidia-cuda-cccl (CUDA 13), install the CUDA toolkit 12.2 or later, "
    f"or set {VARIABLE} to an nvcc"
)


@dataclass(frozen=True)
class Unit:
    """What one run of the compiler compiles."""

    source: str  # in csrc/hopper/
    macros: tuple[str, ...]  # NAME=VALUE


def find() -> Found:
    """nvcc: that of the environment variables, of the PATH, of the usual place, of a wheel; without its version.

    Raises ToolchainError with what was tried.
    """
    explicit = os.environ.get(VARIABLE)
    if explicit:
        if _runs(explicit):
            return Found(explicit, VARIABLE, None)
        raise ToolchainError(
            f"nvcc was not found: {VARIABLE}={explicit} is not a program",
            "set it to the path of an nvcc, or unset it",
        )
    tried = [f"{VARIABLE} (not set)"]
    for variable in HOMES:
        home = os.environ.get(variable)
        path = str(Path(home or "") / "bin" / "nvcc")
        if home and _runs(path):
            return Found(path, variable, None)
        tried.append(f"{path} (of {variable})" if home else f"{variable} (not set)")
    on_path = shutil.which("nvcc")
    if on_path:
        return Found(on_path, "PATH", None)
    tried.append("the PATH")
    if _runs(USUAL):
        return Found(USUAL, "system", None)
    tried.append(USUAL)
    for wheel in WHEELS:
        try:
            distribution = importlib.metadata.distribution(wheel)
        except importlib.metadata.PackageNotFoundError:
            tried.append(f"the wheel {wheel} (not installed)")
            continue
        for file in distribution.files or ():
            found = str(distribution.locate_file(file))
            if file.name == "nvcc" and _runs(found):
                return Found(found, wheel, distribution.version)
        tried.append(f"the wheel {wheel} {distribution.version} (no nvcc that runs is in it)")
    raise ToolchainError(f"nvcc was not found: tried {', '.join(tried)}", INSTALL)


def _runs(path: str) -> bool:
    return Path(path).is_file() and os.access(path, os.X_OK)


def version(path: str) -> str:
    """Of the nvcc at ``path``, such as "13.0".  Raises ToolchainError for one that is too old or does not say."""
    said = _said(path)
    match = re.search(r"release (\d+\.\d+)", said)
    if match is None:
        raise ToolchainError(f"{path} --version does not say its release: {said.strip()[-200:]!r}", REMEDY)
    if toolchain.numbers(match[1]) < OLDEST:
        raise ToolchainError(
            f"{path} is of CUDA {match[1]}; the kernels need {'.'.join(map(str, OLDEST))} or later", INSTALL
        )
    return match[1]


def _said(*program: str) -> str:
    """What ``program --version`` prints; why it does not, when it does not."""
    try:
        done = subprocess.run(
            [*program, "--version"], capture_output=True, text=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return done.stdout or done.stderr


def sources() -> Path:
    """The folder of the kernels.  Raises ToolchainError when it is not there."""
    folder = toolchain.sources() / NAME
    if not (folder / "units.txt").is_file():
        raise ToolchainError(f"the kernels' sources are not in {folder}", "reinstall slidesparse")
    return folder


def sources_digest() -> str:
    """A digest of the kernels' folder, compiled into the library so that a stale one is noticed."""
    digest = hashlib.sha256()
    for path in sorted(sources().iterdir()):
        if path.suffix in (".cu", ".cuh", ".txt"):
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def units() -> list[Unit]:
    """What units.txt lists: a source and its macros a line, once for each combination of their values.

    Raises ToolchainError for a line that is not so.
    """
    folder = sources()
    found = []
    for number, line in enumerate((folder / "units.txt").read_text().splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        macros = [word.partition("=") for word in words[1:]]
        if not (folder / words[0]).is_file() or any(not values for _, _, values in macros):
            raise ToolchainError(
                f"{folder / 'units.txt'}, line {number}: {line!r} is not a source of this folder and MACRO=VALUE,VALUE",
                "reinstall slidesparse",
            )
        choices = [[f"{name}={value}" for value in values.split(",")] for name, _, values in macros]
        found += [Unit(words[0], chosen) for chosen in product(*choices)]
    return found


def commands(nvcc: str, target: Path, folder: Path) -> tuple[list[list[str]], list[str]]:
    """Command lines that compile the units into ``folder``, and the one that links them to ``target``.

    Raises ToolchainError.
    """
    begin = [nvcc, *_host(), *FLAGS, f"-DSLIDESPARSE_SOURCES={sources_digest()}"]
    compiles, objects = [], []
    for index, unit in enumerate(units()):
        made = str(folder / f"{index}.o")
        macros = [f"-D{macro}" for macro in unit.macros]
        compiles.append([*begin, *macros, "-c", str(sources() / unit.source), "-o", made])
        objects.append(made)
    home = Path(nvcc).resolve().parent.parent  # a wheel's libraries are in lib/, where its nvcc does not look
    places = [f"-L{place}" for place in (home / "lib64", home / "lib") if place.is_dir()]
    return compiles, [nvcc, *_host(), *LINK_FLAGS, *places, "-o", str(target), *objects, "-ldl"]


def _host() -> list[str]:
    """The options that choose the C++ compiler; none when NVCC_CCBIN, which nvcc reads itself, does."""
    if os.environ.get("NVCC_CCBIN"):
        return []
    first, *rest = toolchain.compiler()
    return [f"-ccbin={first}", *(f"-Xcompiler={word}" for word in rest)]


def compile_to(target: Path) -> None:
    """Compile the kernels, as many units at once as there are processors ($MAX_JOBS limits them), to ``target``.

    Raises ToolchainError with nvcc's words when it fails.
    """
    nvcc = find().path
    version(nvcc)
    with tempfile.TemporaryDirectory(prefix="slidesparse-hopper-") as scratch:
        compiles, link = commands(nvcc, target, Path(scratch))
        with ThreadPoolExecutor(max(1, min(len(compiles), _jobs()))) as pool:
            running = [pool.submit(toolchain.compile_with, words, SECONDS, REMEDY) for words in compiles]
            try:
                for one in running:
                    one.result()
            except ToolchainError:
                for one in running:
                    one.cancel()
                raise
        toolchain.compile_with(link, SECONDS, REMEDY)


def _jobs() -> int:
    there = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(ValueError):
        return min(there, int(os.environ["MAX_JOBS"])) if "MAX_JOBS" in os.environ else there
    return there


def file_name() -> str:
    """Of the library; Python does not import it, but wheels and caches name it as its neighbours."""
    return toolchain.file_name(NAME)


def library() -> Path:
    """The compiled kernels: those of the installation, of the cache, or compiled now.  Raises ToolchainError."""
    there = toolchain.installed(file_name(), sources_digest())
    return there or toolchain.publish(_cached(), compile_to)


def state() -> Extension:
    """What `library` will do, without doing it.  Raises ToolchainError when it will fail."""
    return toolchain.state(file_name(), sources_digest(), _cached)


def _cached() -> Path:
    """Where the cache has the library or would have it.  Raises ToolchainError without nvcc or a C++ compiler."""
    nvcc = find().path
    version(nvcc)
    compiles, link = commands(nvcc, Path(file_name()), Path())
    return toolchain.cache_folder() / "extensions" / _key(nvcc, [*compiles, link]) / file_name()


def _key(nvcc: str, words: Sequence[Sequence[str]]) -> str:
    host = os.environ.get("NVCC_CCBIN")
    said = [_said(nvcc), _said(*([host] if host else toolchain.compiler()))]
    lines = ["\0".join(line) for line in words]
    digest = hashlib.sha256("\n".join([*lines, *said, platform.machine()]).encode())
    return digest.hexdigest()[:20]
