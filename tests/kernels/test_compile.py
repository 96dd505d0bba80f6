"""Compiling into the cache with fake compilers: cache key, concurrent processes, interrupts, failures, trust."""

from __future__ import annotations

import errno
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest

from slidesparse.build import compile, find
from slidesparse.build.compile import build
from slidesparse.build.find import ToolchainError
from slidesparse.errors import EnvironmentFault

ROOT = Path(__file__).parents[2]

# Writes its arguments to its output, in two parts, and appends to the file runs, by which runs are counted.
COMPILER = """#!/bin/sh
case "$*" in *--version) echo {version}; exit;; esac
echo "$*" >> "{root}/runs"
while [ "$1" != -o ]; do shift; done
printf 'first ' > "$2"
sleep {seconds}
echo second >> "$2"
"""
CHILD = """
from pathlib import Path
from slidesparse.build import compile
path = compile.build("hopper_operators")
print(path, path.read_text())
"""


def program(root: Path, name: str, version: str = "one", seconds: float = 0, text: str = COMPILER) -> Path:
    path = root / "bin" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text.format(root=root, version=version, seconds=seconds))
    path.chmod(0o755)
    return path


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder of sources, a fake torch, fake compilers and an empty cache."""
    shutil.copytree(compile.sources_folder(), tmp_path / "csrc")
    (tmp_path / "torch" / "include").mkdir(parents=True)
    (tmp_path / "torch" / "version.py").write_text("2.11.0")
    for name in ("NVCC_CCBIN", "MAX_JOBS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLIDESPARSE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", str(program(tmp_path, "c++")))
    monkeypatch.setenv("SLIDESPARSE_NVCC", str(program(tmp_path, "nvcc", "release 13.0")))
    monkeypatch.setattr(compile, "sources_folder", lambda: tmp_path / "csrc")
    monkeypatch.setattr(find, "torch_folder", lambda: tmp_path / "torch")
    return tmp_path


def runs(root: Path) -> list[str]:
    return (root / "runs").read_text().splitlines() if (root / "runs").exists() else []


def test_build_compiles_each_target_once(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(root, "ccache")  # nvcc runs the compiler behind it
    monkeypatch.setenv("CXX", f"{root}/bin/ccache {root}/bin/c++ -O1")
    for name in ("hopper_operators", "hopper"):
        place = compile.target_path(name)
        assert build(name) == build(name) == place == compile.target_path(name)
        assert place.is_relative_to(root / "cache" / "extensions")
        assert place.read_text() == "first second\n"
        names = sorted(path.name for path in place.parent.iterdir())
        assert names == [place.name, f"{place.name}.json", f"{place.name}.lock"]
    operators, *compiles, link = runs(root)
    for options in ("-O1 -std=c++17", f"-isystem {root}/torch/include", f"-L{root}/torch/lib -ltorch_cpu"):
        assert options in operators
    for line in (*compiles, link):
        assert f"-ccbin={root}/bin/c++ -Xcompiler=-O1" in line
        assert "-gencode=arch=compute_90a,code=sm_90a" in line
    assert sum("-DSLIDESPARSE_TYPE=Int8 -DSLIDESPARSE_TOKENS=16 -c" in line for line in compiles) == 1
    objects = {line.split()[-1] for line in compiles}
    assert len(objects) == len(compiles)
    assert objects <= set(link.split())
    assert "-shared -cudart=static" in link
    names = {path.name for path in (root / "csrc" / "hopper").glob("*.cu")}
    assert {Path(line.split()[-3]).name for line in compiles} == names


def test_a_cache_without_locks_still_serves(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fcntl.flock", Mock(side_effect=OSError(errno.ENOSYS, "Function not implemented")))
    assert build("hopper_operators").is_file()


def edit(name: str) -> Callable[[Path, pytest.MonkeyPatch], object]:
    return lambda root, patch: (root / name).write_text("// other")


def another(function: str, name: str, value: str) -> Callable[[Path, pytest.MonkeyPatch], object]:
    """Make ``function(name)`` of the compile module return ``value``; other names are unchanged."""

    def change(root: Path, patch: pytest.MonkeyPatch) -> None:
        module, attribute = function.split(".")
        original = getattr(getattr(compile, module), attribute)
        changed = lambda *names: value if names in ((name,), ()) else original(*names)  # noqa: E731
        patch.setattr(f"slidesparse.build.compile.{function}", changed)

    return change


BOTH = {"hopper", "hopper_operators"}
CPP = {"hopper_operators", "cusparselt"}
ALL = BOTH | CPP
CHANGES = {
    "the operators": (edit("csrc/hopper/operators.cpp"), {"hopper_operators"}),
    "the interface": (edit("csrc/hopper/interface.cuh"), BOTH),
    "a kernel": (edit("csrc/hopper/instance.cu"), {"hopper"}),
    "a kernel's header": (edit("csrc/hopper/new.cuh"), {"hopper"}),
    "the bindings": (edit("csrc/cusparselt.cpp"), {"cusparselt"}),
    "torch's version": (edit("torch/version.py"), CPP),
    "the C++ compiler": (lambda root, patch: program(root, "c++", "two"), ALL),
    "another C++ compiler": (lambda root, patch: patch.setenv("CXX", str(program(root, "g++"))), ALL),
    "nvcc": (lambda root, patch: program(root, "nvcc", "release 13.1"), {"hopper"}),
    "the compiler behind nvcc": (
        lambda root, patch: patch.setenv("NVCC_CCBIN", str(program(root, "g++", "two"))),
        {"hopper"},
    ),
    "options": (lambda root, patch: patch.setattr(compile, "FLAGS", ("-g",)), CPP),
    "Python's ABI": (another("sysconfig.get_config_var", "SOABI", "other"), ALL),
    "the machine": (another("platform.machine", "", "riscv64"), ALL),
    "other files": (edit("csrc/hopper/notes.md"), set()),
    "times of files": (lambda root, patch: (root / "csrc" / "hopper" / "operators.cpp").touch(), set()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_cache_key_depends_on_all_inputs(change: str, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = {name: compile.target_path(name) for name in ALL}
    edit_it, changed = CHANGES[change]
    edit_it(root, monkeypatch)
    find.version_text.cache_clear()  # as in another process
    assert {name for name in ALL if compile.target_path(name).parent != paths[name].parent} == changed


def start(root: Path) -> subprocess.Popen[str]:
    """Start a process that compiles torch's operators."""
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, "-c", CHILD], cwd=ROOT, text=True, stdout=pipe, stderr=pipe, start_new_session=True
    )


def test_concurrent_builds_compile_once(root: Path) -> None:
    program(root, "c++", seconds=0.5)
    processes = [start(root), start(root)]
    outputs = [process.communicate(timeout=60) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert outputs[0][0] == outputs[1][0]
    assert outputs[0][0].endswith(".so first second\n\n")
    assert len(runs(root)) == 1


def test_killed_build_leaves_no_module(root: Path) -> None:
    """The next build does not wait for a lock, and compiles."""
    program(root, "c++", seconds=30)
    process = start(root)
    deadline = time.monotonic() + 30
    while not runs(root) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)  # and its compiler
    process.communicate(timeout=30)
    assert len(runs(root)) == 1
    found = [path for path in (root / "cache").rglob("*.so") if not path.parent.name.startswith("building-")]
    assert found == []
    program(root, "c++")
    out, error = start(root).communicate(timeout=30)
    assert out.endswith("first second\n\n"), error
    assert len(runs(root)) == 2


@pytest.mark.parametrize(("name", "compiler"), [("hopper_operators", "c++"), ("hopper", "nvcc")])
def test_failed_build_reports_the_beginning_of_compiler_output(name: str, compiler: str, root: Path) -> None:
    """The first error is the cause, while templates make the rest long. No file is left."""
    text = "#!/bin/sh\nif [ $1 = --version ]; then echo release 13.0; exit; fi\nseq -f 'line %g end' 100 >&2\nexit 1\n"
    program(root, compiler, text=text)
    with pytest.raises(ToolchainError) as error:
        build(name)
    assert re.search(r"(?s)line 1 end.*line 20 end", error.value.what)
    assert "line 21 end" not in error.value.what
    assert "$CXX" in error.value.remedy
    assert [path.suffix for path in (root / "cache").rglob("*") if path.is_file()] == [".lock"]


def test_hanging_compiler_times_out(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile, "COMPILE_SECONDS", 0.2)
    program(root, "c++", text="#!/bin/sh\nif [ $1 = --version ]; then exit; fi\nexec sleep 30\n")
    with pytest.raises(ToolchainError, match=r"took more than 0.2 s: .*/c\+\+ "):
        build("hopper_operators")


def test_unwritable_cache_and_missing_sources_are_errors(root: Path) -> None:
    (root / "cache").write_text("a file, no folder")
    with pytest.raises(EnvironmentFault, match="cannot be created: .*SLIDESPARSE_CACHE"):
        build("hopper_operators")
    (root / "csrc" / "hopper" / "operators.cpp").unlink()
    with pytest.raises(ToolchainError, match=r"operators.cpp is not there; reinstall"):
        build("hopper_operators")


def test_cache_folder_follows_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("SLIDESPARSE_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert compile.cache_folder() == tmp_path / ".cache" / "slidesparse"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # to the current folder, whatever that is
    assert compile.cache_folder() == tmp_path / ".cache" / "slidesparse"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert compile.cache_folder() == tmp_path / "xdg" / "slidesparse"
    monkeypatch.setenv("SLIDESPARSE_CACHE", str(tmp_path / "mine"))
    assert compile.cache_folder() == tmp_path / "mine"
    monkeypatch.setenv("SLIDESPARSE_CACHE", "~/mine")
    assert compile.cache_folder() == tmp_path / "mine"
    monkeypatch.setenv("SLIDESPARSE_CACHE", "~nobody-of-this-name/mine")
    with pytest.raises(ToolchainError, match="SLIDESPARSE_CACHE=~nobody.*set SLIDESPARSE_CACHE to a whole"):
        compile.cache_folder()


def test_cache_folders_are_not_writable_by_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIDESPARSE_CACHE", str(tmp_path / "made" / "cache"))
    umask = os.umask(0o002)
    try:
        compile.make_folder(compile.cache_folder() / "extensions" / "key")
    finally:
        os.umask(umask)
    for folder in ("made/cache", "made/cache/extensions", "made/cache/extensions/key"):
        assert (tmp_path / folder).stat().st_mode & 0o777 == 0o755


@pytest.mark.parametrize("planted", ["file", "folder", "extensions", "cache", "owner", "link"])
def test_modules_writable_by_others_are_not_loaded(root: Path, planted: str) -> None:
    target = build("hopper_operators")
    places = {"file": target, "folder": target.parent, "extensions": target.parent.parent}
    place = places.get(planted, compile.cache_folder())
    if planted == "link":
        target.rename(target.with_name("elsewhere"))
        target.symlink_to("elsewhere")
    elif planted == "owner":
        if os.getuid():
            pytest.skip("only root can give a file to somebody else")
        os.chown(target, 12345, -1)
        with pytest.raises(ToolchainError) as error:
            build("hopper_operators")
        assert error.value.remedy.startswith(f"chown -R 0 {compile.cache_folder()} ")
    else:
        place.chmod(place.stat().st_mode | (0o002 if planted == "file" else 0o020))
    with pytest.raises(ToolchainError, match="a symbolic link" if planted == "link" else "another user may"):
        build("hopper_operators")


def test_lock_file_does_not_follow_symlinks(root: Path, tmp_path: Path) -> None:
    target, victim = compile.target_path("hopper_operators"), tmp_path / "victim"
    victim.write_text("mine")
    compile.make_folder(target.parent)
    target.with_name(f"{target.name}.lock").symlink_to(victim)
    with pytest.raises(ToolchainError, match="cannot be written"):
        build("hopper_operators")
    assert victim.read_text() == "mine"
