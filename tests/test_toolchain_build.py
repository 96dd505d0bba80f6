"""Building the extensions by a compiler that only pretends: the cache's key, several processes, interruptions."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from slidesparse import toolchain
from slidesparse.toolchain import ToolchainError

ROOT = Path(__file__).parent.parent
NAME = "cusparselt"

# Writes its output in two parts, some time apart, and counts its runs.
COMPILER = """#!/bin/sh
if [ "$1" = --version ]; then echo version one; exit; fi
echo run >> "{root}/runs"
while [ "$1" != -o ]; do shift; done
printf 'first ' > "$2"
sleep {seconds}
echo second >> "$2"
"""
CHILD = """
import sys
from pathlib import Path
from slidesparse import toolchain
root = Path(sys.argv[1])
toolchain.pybind11_include = lambda: root
paths = toolchain.sysconfig.get_paths
toolchain.sysconfig.get_paths = lambda *some: {**paths(*some), "include": str(root)}
made = toolchain.build(sys.argv[2])
print(made, made.read_text())
"""


def compiler(root: Path, seconds: float = 0.0, name: str = "c++") -> Path:
    """A script that takes so long to compile."""
    script = root / name
    script.write_text(COMPILER.format(root=root, seconds=seconds))
    script.chmod(0o755)
    return script


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Sources, empty headers, a compiler and an empty cache, all of them in the folder returned."""
    shutil.copytree(toolchain.sources(), tmp_path / "csrc")
    (tmp_path / "include").mkdir()
    for headers in toolchain.HEADERS.values():
        for header in headers:
            (tmp_path / "include" / header).touch()
    (tmp_path / "Python.h").touch()
    monkeypatch.setenv("SLIDESPARSE_CUDA_INCLUDE", str(tmp_path / "include"))
    monkeypatch.setenv("SLIDESPARSE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", str(compiler(tmp_path)))
    monkeypatch.setattr(toolchain, "sources", lambda: tmp_path / "csrc")
    monkeypatch.setattr(toolchain, "pybind11_include", lambda: tmp_path)
    paths, include = toolchain.sysconfig.get_paths, {"include": str(tmp_path)}
    monkeypatch.setattr(toolchain.sysconfig, "get_paths", lambda *some: {**paths(*some), **include})
    return tmp_path


def where() -> Path:
    """Where the cache would have the extension."""
    return toolchain._cached(NAME)[1]


def another_version(root: Path, patch: pytest.MonkeyPatch) -> None:
    script = root / "c++"
    script.write_text(script.read_text().replace("version one", "version two"))


def another_abi(root: Path, patch: pytest.MonkeyPatch) -> None:
    """Only the ABI's name: the suffix of files stays."""
    original = toolchain.sysconfig.get_config_var
    patch.setattr(
        toolchain.sysconfig, "get_config_var", lambda name: "other" if name == "SOABI" else original(name)
    )


CHANGES: dict[str, Callable[[Path, pytest.MonkeyPatch], object]] = {
    "a source": lambda root, patch: (root / "csrc" / "cusparselt.cpp").write_text("other"),
    "the sources' header": lambda root, patch: (root / "csrc" / "library.h").write_text("other"),
    "the library's header": lambda root, patch: (root / "include" / "cusparseLt.h").write_text("other"),
    "CUDA's header": lambda root, patch: (root / "include" / "cuda_runtime_api.h").write_text("other"),
    "the compiler": lambda root, patch: patch.setenv("CXX", str(compiler(root, name="clang++"))),
    "the compiler's version": another_version,
    "options": lambda root, patch: patch.setattr(toolchain, "FLAGS", (*toolchain.FLAGS, "-g")),
    "Python's ABI": another_abi,
    "the machine": lambda root, patch: patch.setattr(toolchain.platform, "machine", lambda: "riscv64"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_can_change_the_result_changes_the_key(
    change: str, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = where()
    assert where() == before
    CHANGES[change](root, monkeypatch)
    after = where()
    assert after.parent != before.parent
    assert after.name == before.name


def test_times_of_files_and_headers_of_others_do_not(root: Path) -> None:
    before = where()
    (root / "csrc" / "cusparselt.cpp").touch()
    (root / "include" / "cublasLt.h").write_text("other")
    assert where() == before
    assert toolchain._cached("cublaslt")[1].parent != before.parent


def start(root: Path) -> subprocess.Popen[str]:
    """A process that builds the extension, with the real sources."""
    command = [sys.executable, "-c", CHILD, str(root), NAME]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=ROOT, text=True, stdout=pipe, stderr=pipe, start_new_session=True)


def runs(root: Path) -> int:
    """How often the compiler was run."""
    log = root / "runs"
    return len(log.read_text().splitlines()) if log.exists() else 0


def test_processes_that_build_at_once_get_one_whole_file(root: Path) -> None:
    compiler(root, seconds=0.5)
    both = [start(root), start(root)]
    said = [process.communicate(timeout=60) for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    assert said[0][0] == said[1][0]
    assert said[0][0].endswith(".so first second\n\n")
    assert runs(root) == 1


def test_a_build_that_is_killed_leaves_no_module(root: Path) -> None:
    """The next one waits for nobody, and builds."""
    compiler(root, seconds=30)
    process = start(root)
    deadline = time.monotonic() + 30
    while not runs(root) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)  # the compiler with it
    process.communicate(timeout=30)
    file = toolchain.file_name(NAME)
    assert runs(root) == 1
    assert [
        path for path in (root / "cache").rglob(file) if not path.parent.name.startswith("building-")
    ] == []
    compiler(root)
    again = start(root)
    out, error = again.communicate(timeout=30)
    assert out.endswith("first second\n\n"), error
    assert runs(root) == 2


def test_a_compiler_that_hangs(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "COMPILE_SECONDS", 0.2)
    script = root / "c++"
    script.write_text('#!/bin/sh\nif [ "$1" = --version ]; then exit; fi\nexec sleep 30\n')
    with pytest.raises(ToolchainError, match=r"took more than 0.2 s: .*/c\+\+ .*; \$CXX chooses another"):
        toolchain.build(NAME)
    assert not where().exists()


def test_only_the_beginning_of_what_a_compiler_says_is_told(root: Path) -> None:
    """The first of its errors is the cause; templates make the rest long."""
    (root / "c++").write_text("#!/bin/sh\nfor i in $(seq 100); do echo line $i end >&2; done\nexit 1\n")
    with pytest.raises(ToolchainError) as error:
        toolchain.build(NAME)
    assert "line 1 end" in error.value.what
    assert "line 20 end" in error.value.what
    assert "line 21 end" not in error.value.what


def test_the_compiler_is_the_chosen_one_else_the_first_there_is(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = root / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    assert toolchain.compiler() == [str(root / "c++")]
    monkeypatch.setenv("CXX", f"{root / 'c++'} -O0")
    assert toolchain.compiler() == [str(root / "c++"), "-O0"]
    monkeypatch.setenv("CXX", "nowhere")
    with pytest.raises(ToolchainError, match="CXX=nowhere was not found; correct CXX"):
        toolchain.compiler()
    monkeypatch.delenv("CXX")
    with pytest.raises(ToolchainError, match=r"no C\+\+ compiler was found .*; install one"):
        toolchain.compiler()
    for name in ("clang++", "g++", "c++"):  # each goes before those made so far
        compiler(folder, name=name)
        assert toolchain.compiler() == [str(folder / name)]


def test_what_else_a_build_needs(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (root / "Python.h").unlink()
    with pytest.raises(ToolchainError, match="needs .*/Python.h; install Python's headers"):
        toolchain.build(NAME)
    monkeypatch.undo()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ToolchainError, match="needs pybind11; pip install pybind11"):
        toolchain.pybind11_include()


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("SLIDESPARSE_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert toolchain.cache_folder() == tmp_path / ".cache" / "slidesparse"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert toolchain.cache_folder() == tmp_path / "xdg" / "slidesparse"
    monkeypatch.setenv("SLIDESPARSE_CACHE", str(tmp_path / "mine"))
    assert toolchain.cache_folder() == tmp_path / "mine"


def test_the_wheel_of_the_cuda_version_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked in this order; the one without a suffix is CUDA 13's, or an older one of any."""
    asked: list[str] = []

    def distribution(name: str) -> object:
        asked.append(name)
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(toolchain.importlib.metadata, "distribution", distribution)
    monkeypatch.setattr(toolchain.ctypes.util, "find_library", lambda name: name)
    monkeypatch.delenv("SLIDESPARSE_CUBLASLT", raising=False)
    first = {}
    for major in (None, 12, 13):
        asked.clear()
        assert toolchain.find_library("cublaslt", major).source == "system"
        assert sorted(asked) == ["nvidia-cublas", "nvidia-cublas-cu12", "nvidia-cublas-cu13"]
        first[major] = asked[0]
    assert first == {None: "nvidia-cublas", 12: "nvidia-cublas-cu12", 13: "nvidia-cublas-cu13"}
