"""Where libraries, headers and extensions are found, and what is said when they are not."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

import pytest

from slidesparse import toolchain
from slidesparse.toolchain import ToolchainError, extension_state, find_library, require_supported

NAMES = toolchain.EXTENSIONS


class Wheel:
    """An installed distribution that holds one file."""

    def __init__(self, folder: Path, file: str | None, version: str = "0.8.0") -> None:
        self.folder, self.version = folder, version
        self.files = [Path(file)] if file else []

    def locate_file(self, file: Path) -> Path:
        return self.folder / file


@pytest.fixture
def wheels(monkeypatch: pytest.MonkeyPatch) -> dict[str, Wheel]:
    """Installed wheels by name, to be filled by the test; no explicit path, nothing in the system."""
    found: dict[str, Wheel] = {}

    def distribution(name: str) -> Wheel:
        if name not in found:
            raise importlib.metadata.PackageNotFoundError(name)
        return found[name]

    monkeypatch.setattr(toolchain.importlib.metadata, "distribution", distribution)
    monkeypatch.setattr(toolchain.ctypes.util, "find_library", lambda name: None)
    for library in toolchain.LIBRARIES.values():
        monkeypatch.delenv(library.variable, raising=False)
    monkeypatch.delenv("SLIDESPARSE_CUDA_INCLUDE", raising=False)
    return found


def wheel(folder: Path, file: str | None, version: str = "0.8.0") -> Wheel:
    if file:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).touch()
    return Wheel(folder, file, version)


def test_a_library_that_is_nowhere(wheels: dict[str, Wheel], tmp_path: Path) -> None:
    wheels["nvidia-cusparselt-cu12"] = wheel(tmp_path, None, "0.9.0")
    with pytest.raises(ToolchainError) as error:
        find_library("cusparselt")
    assert "SLIDESPARSE_CUSPARSELT (not set), the wheel nvidia-cusparselt-cu13 (not installed)" in str(
        error.value
    )
    assert "nvidia-cusparselt-cu12 0.9.0 (its libcusparseLt.so is missing)" in error.value.what
    assert error.value.remedy.startswith("pip install nvidia-cusparselt-cu13")


def test_an_explicit_path_then_the_wheel_of_the_cuda_version_then_the_system(
    wheels: dict[str, Wheel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(toolchain.ctypes.util, "find_library", lambda name: f"lib{name}.so.0")
    assert find_library("cusparselt") == toolchain.Found("libcusparseLt.so.0", "system", None)
    for cuda, version in ((12, "0.8.1"), (13, "0.9.0")):
        name = f"nvidia-cusparselt-cu{cuda}"
        wheels[name] = wheel(tmp_path / name, "lib/libcusparseLt.so.0", version)
    assert find_library("cusparselt", 12).version == "0.8.1"
    assert find_library("cusparselt", 13).version == find_library("cusparselt").version == "0.9.0"
    mine = tmp_path / "mine.so"
    monkeypatch.setenv("SLIDESPARSE_CUSPARSELT", str(mine))
    with pytest.raises(ToolchainError, match=r"mine.so is not a file; set it to the path"):
        find_library("cusparselt")
    mine.touch()
    assert find_library("cusparselt") == toolchain.Found(str(mine), "SLIDESPARSE_CUSPARSELT", None)


def test_versions_that_are_supported() -> None:
    for version in ((0, 8, 0), (0, 9, 9, 1), (0, 10)):
        require_supported("cusparselt", version)
    require_supported("cublaslt", (99, 0))
    for version in ((0, 7, 9), (0, 11, 0), (1, 0), ()):
        with pytest.raises(ToolchainError, match=r"cusparselt-cu13>=0\.8,<0\.11"):
            require_supported("cusparselt", version)
    assert toolchain.numbers("0.28.0rc1+cpu") == (0, 28, 0)
    assert toolchain.numbers("dev") == ()


def test_headers_that_are_missing_are_named(
    wheels: dict[str, Wheel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """/usr/local/cuda may hold some of them on this machine, but no header is there that no toolkit has."""
    monkeypatch.setitem(toolchain.HEADERS, "cusparselt", ("cusparseLt.h", "none.h"))
    monkeypatch.setenv("SLIDESPARSE_CUDA_INCLUDE", str(tmp_path))
    (tmp_path / "cusparseLt.h").touch()
    with pytest.raises(ToolchainError, match=r"extension needs none.h, found in none of") as error:
        toolchain.include_folders("cusparselt")
    assert str(tmp_path) in error.value.what
    assert "SLIDESPARSE_CUDA_INCLUDE" in error.value.remedy
    (tmp_path / "none.h").touch()
    assert toolchain.include_folders("cusparselt")[0] == tmp_path


@pytest.fixture
def buildable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Everything that a build needs, with a compiler that copies its sources; the cache is the folder returned."""
    compiler = tmp_path / "c++"
    compiler.write_text(
        "#!/bin/sh\n"
        'if [ "$1" = --version ]; then echo one; exit; fi\n'
        f'echo run >> "{tmp_path}/runs"\n'
        'while [ "$1" != -o ]; do shift; done\n'
        'echo module > "$2"\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("SLIDESPARSE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(toolchain, "include_folders", lambda name: [])
    monkeypatch.setattr(toolchain, "pybind11_include", lambda: tmp_path)
    monkeypatch.setattr(toolchain, "__file__", str(tmp_path / "package" / "toolchain.py"))
    monkeypatch.setattr(toolchain.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    for name in ("csrc/library.h", "csrc/cusparselt.cpp", "Python.h"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("source")
    return tmp_path / "cache"


def test_an_extension_is_built_once(buildable: Path, tmp_path: Path) -> None:
    state = extension_state("cusparselt")
    assert state.state == "can be built when first used"
    assert not buildable.exists()
    made = toolchain.build("cusparselt")
    assert made.read_text() == "module\n"
    assert made == toolchain.build("cusparselt") == Path(state.path or "")
    assert extension_state("cusparselt") == toolchain.Extension("built in the cache", str(made))
    assert (tmp_path / "runs").read_text() == "run\n"
    assert [path.name for path in made.parent.iterdir() if path.name.startswith("building")] == []
    (tmp_path / "csrc" / "library.h").write_text("changed")
    assert extension_state("cusparselt").state == "can be built when first used"


def test_an_installed_extension_counts_when_its_sources_are_these(buildable: Path, tmp_path: Path) -> None:
    installed = tmp_path / "package" / "gemm" / toolchain.file_name("cusparselt")
    installed.parent.mkdir(parents=True)
    installed.write_bytes(b"\x7fELF " + toolchain.sources_digest().encode() + b" \0")
    assert extension_state("cusparselt") == toolchain.Extension("installed", str(installed))
    (tmp_path / "csrc" / "library.h").write_text("changed")
    state = extension_state("cusparselt")
    assert state.state == "can be built when first used"
    assert state.note == f"{installed} was built from other sources and is not used"


def test_what_a_compiler_says_is_told_and_nothing_is_left(buildable: Path, tmp_path: Path) -> None:
    (tmp_path / "c++").write_text("#!/bin/sh\necho 'error: no such type' >&2\nexit 1\n")
    with pytest.raises(
        ToolchainError, match=r"(?s)the compiler failed: .*error: no such type.*\$CXX chooses"
    ):
        toolchain.build("cusparselt")
    left = [path.suffix for path in buildable.rglob("*") if path.is_file()]
    assert left == [".lock"]


def test_a_cache_that_cannot_be_written(buildable: Path) -> None:
    buildable.write_text("a file, no folder")
    for ask in (extension_state, toolchain.build):
        with pytest.raises(ToolchainError, match="cannot be written: .*; set SLIDESPARSE_CACHE"):
            ask("cusparselt")


@pytest.mark.parametrize("name", NAMES)
def test_the_real_extensions_carry_the_digest_of_their_sources(name: str, tmp_path: Path) -> None:
    """As text, which is how a stale installed one is noticed; and import without their library."""
    try:
        words = toolchain.command(name, tmp_path / toolchain.file_name(name))
    except ToolchainError as error:
        pytest.skip(str(error))
    toolchain.compile_with(words)
    made = tmp_path / toolchain.file_name(name)
    assert toolchain.sources_digest().encode() in made.read_bytes()
    program = f"import _{name} as module; print(module.SOURCES)"
    done = toolchain.subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.stdout.strip(), done.stderr) == (toolchain.sources_digest(), "")
