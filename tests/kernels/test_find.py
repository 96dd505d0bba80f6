"""Search orders of libraries and compilers, and errors that name what is missing."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest

from slidesparse.build import find
from slidesparse.build.find import FoundFile, ToolchainError


class Wheel:
    """An installed distribution that holds one file."""

    def __init__(self, path: Path, version: str) -> None:
        self.path, self.version, self.files = path, version, [importlib.metadata.PackagePath(path.name)]

    def locate_file(self, file: object) -> Path:
        return self.path


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the only folder that searches see; PATH is its subfolder ``path``."""
    for name in ("SLIDESPARSE_NVCC", "CUDA_HOME", "CUDA_PATH", "CXX", "SLIDESPARSE_CUSPARSELT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(find.ctypes.util, "find_library", lambda name: None)
    monkeypatch.setattr(find, "NVCC_DEFAULT_PATH", str(tmp_path / "usual" / "bin" / "nvcc"))
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    return tmp_path


@pytest.fixture
def wheels(root: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Wheel]:
    """Return the installed wheels by name, which a test fills."""
    installed: dict[str, Wheel] = {}

    def distribution(name: str) -> Wheel:
        if name not in installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(find.importlib.metadata, "distribution", distribution)
    return installed


def program(path: Path, output: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\necho '{output}'\n")
    path.chmod(0o755)
    return path


def test_search_of_cusparselt(root: Path, wheels: dict[str, Wheel], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each place that is added comes before those that are there already."""
    with pytest.raises(ToolchainError) as error:
        find.find_cusparselt()
    for fact in ("SLIDESPARSE_CUSPARSELT", "nvidia-cusparselt-cu13", "libcusparseLt"):
        assert fact in error.value.what
    assert error.value.remedy.startswith("pip install nvidia-cusparselt-cu13")
    monkeypatch.setattr(find.ctypes.util, "find_library", lambda name: f"lib{name}.so.0")
    assert find.find_cusparselt() == FoundFile("libcusparseLt.so.0", "system", None)
    for cuda, version in ((12, "0.8.1"), (13, "0.9.0")):
        wheels[f"nvidia-cusparselt-cu{cuda}"] = Wheel(root / str(cuda) / "libcusparseLt.so.0", version)
        program(root / str(cuda) / "libcusparseLt.so.0")
    assert find.find_cusparselt(12).version == "0.8.1"
    assert find.find_cusparselt().version == "0.9.0"
    library = root / "mine.so"
    monkeypatch.setenv("SLIDESPARSE_CUSPARSELT", str(library))
    with pytest.raises(ToolchainError, match=r"mine.so is not a file"):
        find.find_cusparselt()
    library.touch()
    assert find.find_cusparselt() == FoundFile(str(library), "SLIDESPARSE_CUSPARSELT", None)


def test_require_supported_checks_version_ranges() -> None:
    for version in ((0, 8, 0), (0, 9, 9, 1), (0, 10)):
        find.require_supported(version)
    for version in ((0, 7, 9), (0, 11, 0), (1, 0), ()):
        with pytest.raises(ToolchainError, match=r"cusparselt-cu13>=0\.8,<0\.11"):
            find.require_supported(version)


def test_search_of_nvcc(root: Path, wheels: dict[str, Wheel], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each place that is added comes before those that are there already; one that is too old comes last."""
    with pytest.raises(ToolchainError, match=r"CUDA_HOME.*usual/bin/nvcc.*nvidia-cuda-nvcc-cu12"):
        find.find_nvcc()
    old = program(root / "old" / "nvcc", "release 11.8, V11")
    monkeypatch.setenv("SLIDESPARSE_NVCC", str(old))
    assert find.find_nvcc().source == "SLIDESPARSE_NVCC"
    monkeypatch.delenv("SLIDESPARSE_NVCC")
    wheels["nvidia-cuda-nvcc"] = Wheel(old, "11.8")
    assert find.find_nvcc().path == str(old)
    places = {"system": "usual/bin/nvcc", "PATH": "path/nvcc"}
    places |= {"CUDA_PATH": "path home/bin/nvcc", "CUDA_HOME": "home/bin/nvcc"}
    for source, place in places.items():
        path = program(root / place, "release 11.8")
        if "CUDA" in source:
            monkeypatch.setenv(source, str(path.parents[1]))
        program(path, "release 13.0")
        assert (find.find_nvcc().path, find.find_nvcc().source) == (str(path), source)
    monkeypatch.setenv("SLIDESPARSE_NVCC", str(root))
    with pytest.raises(ToolchainError, match=f"SLIDESPARSE_NVCC={root} is not a file"):
        find.find_nvcc()


def test_nvcc_version_is_parsed_and_checked(root: Path) -> None:
    def version(output: str) -> str:
        find.version_text.cache_clear()  # as in another process
        return find.nvcc_version(str(program(root / "nvcc", output)))

    assert version("Cuda compilation tools, release 12.2, V12.2.1") == "12.2"
    with pytest.raises(ToolchainError, match=r"CUDA 11\.8.* 12\.2 or later"):
        version("release 11.8, V11.8.1")
    with pytest.raises(ToolchainError, match="'broken'"):
        version("broken")


def test_search_of_a_compiler(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ToolchainError, match=r"no C\+\+ compiler was found"):
        find.compiler()
    for name in ("clang++", "g++", "c++"):  # each precedes the earlier ones
        path = program(root / "path" / name)
        assert find.compiler() == [str(path)]
    monkeypatch.setenv("CXX", f"{path} -O0")
    assert find.compiler() == [str(path), "-O0"]
    monkeypatch.setenv("CXX", "nowhere")
    with pytest.raises(ToolchainError, match="CXX=nowhere"):
        find.compiler()
