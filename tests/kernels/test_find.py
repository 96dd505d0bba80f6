"""Search orders of libraries, headers and compilers, and errors that name what is missing."""

from __future__ import annotations

import importlib.metadata
import os
import re
from pathlib import Path

import pytest

from slidesparse.build import find
from slidesparse.build.find import FoundFile, ToolchainError


class Wheel:
    """An installed distribution that holds one file."""

    def __init__(self, folder: Path, file: str, version: str) -> None:
        self.folder, self.version, self.files = folder, version, [importlib.metadata.PackagePath(file)]
        (folder / file).parent.mkdir(parents=True, exist_ok=True)

    def locate_file(self, file: object) -> Path:
        return self.folder / str(file)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the only folder that searches see; PATH is its subfolder ``path``."""
    variables = ("SLIDESPARSE_NVCC", "SLIDESPARSE_CUDA_INCLUDE", "CUDA_HOME", "CUDA_PATH", "CXX")
    for name in (*variables, *(library.variable for library in find.LIBRARIES.values())):
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


def test_find_library_search_order(
    root: Path, wheels: dict[str, Wheel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each place that is added comes before those that are there already."""
    wheels["nvidia-cusparselt-cu12"] = Wheel(root, "lib/libcusparseLt.so.0", "0.9.0")
    with pytest.raises(ToolchainError) as error:
        find.find_library("cusparselt")
    for fact in ("SLIDESPARSE_CUSPARSELT", "nvidia-cusparselt-cu13 (not installed)", "-cu12 0.9.0 (no "):
        assert fact in error.value.what
    assert error.value.remedy.startswith("pip install nvidia-cusparselt-cu13")
    monkeypatch.setattr(find.ctypes.util, "find_library", lambda name: f"lib{name}.so.0")
    assert find.find_library("cusparselt") == FoundFile("libcusparseLt.so.0", "system", None)
    for cuda, version in ((12, "0.8.1"), (13, "0.9.0")):
        name = f"nvidia-cusparselt-cu{cuda}"
        wheels[name] = Wheel(root / name, "lib/libcusparseLt.so.0", version)
        (root / name / "lib" / "libcusparseLt.so.0").touch()
    assert find.find_library("cusparselt", 12).version == "0.8.1"
    assert find.find_library("cusparselt", 13) == find.find_library("cusparselt")
    assert find.find_library("cusparselt").version == "0.9.0"
    library = root / "mine.so"
    monkeypatch.setenv("SLIDESPARSE_CUSPARSELT", str(library))
    with pytest.raises(ToolchainError, match=r"mine.so is not a file"):
        find.find_library("cusparselt")
    library.touch()
    assert find.find_library("cusparselt") == FoundFile(str(library), "SLIDESPARSE_CUSPARSELT", None)


def test_require_supported_checks_version_ranges() -> None:
    for version in ((0, 8, 0), (0, 9, 9, 1), (0, 10)):
        find.require_supported("cusparselt", version)
    find.require_supported("cublaslt", (99, 0))
    for version in ((0, 7, 9), (0, 11, 0), (1, 0), ()):
        with pytest.raises(ToolchainError, match=r"cusparselt-cu13>=0\.8,<0\.11"):
            find.require_supported("cusparselt", version)


def test_find_nvcc_search_order(
    root: Path, wheels: dict[str, Wheel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each place that is added comes before those that are there already."""
    wheels["nvidia-cuda-nvcc"] = Wheel(root / "wheel", "bin/nvcc", "13.0.88")
    monkeypatch.setenv("CUDA_PATH", "/nowhere")
    with pytest.raises(ToolchainError) as error:
        find.find_nvcc()
    for fact in (
        *(
            "SLIDESPARSE_NVCC (not set)",
            "CUDA_HOME (not set)",
            "/nowhere/bin/nvcc (from CUDA_PATH)",
            "the PATH",
        ),
        *(f"{root}/usual/bin/nvcc", "nvidia-cuda-nvcc 13.0.88 (no nvcc in it)", "nvcc-cu12 (not installed)"),
    ):
        assert fact in error.value.what
    assert error.value.remedy == find.NVCC_INSTALL
    places = {"nvidia-cuda-nvcc": "wheel/bin/nvcc", "system": "usual/bin/nvcc", "PATH": "path/nvcc"}
    places |= {"CUDA_PATH": "path home/bin/nvcc", "CUDA_HOME": "home/bin/nvcc"}
    for source, place in places.items():
        path = program(root / place)
        if "CUDA" in source:
            monkeypatch.setenv(source, str(path.parents[1]))
        assert (find.find_nvcc().path, find.find_nvcc().source) == (str(path), source)
    monkeypatch.setenv("SLIDESPARSE_NVCC", str(root))
    with pytest.raises(ToolchainError, match=f"SLIDESPARSE_NVCC={root} is not a program"):
        find.find_nvcc()
    monkeypatch.setenv("SLIDESPARSE_NVCC", str(path))
    assert find.find_nvcc().source == "SLIDESPARSE_NVCC"


def test_an_nvcc_that_is_too_old_is_passed_over(
    root: Path, wheels: dict[str, Wheel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is found only where no other is, so that the error names its version; a variable's own is always taken."""
    release = "Cuda compilation tools, release {}, V0"
    old = program(root / "old" / "bin" / "nvcc", release.format("11.8"))
    monkeypatch.setenv("CUDA_HOME", str(old.parents[1]))
    assert find.find_nvcc().path == str(old)
    wheels["nvidia-cuda-nvcc"] = Wheel(root / "wheel", "bin/nvcc", "13.0.88")
    new = program(root / "wheel" / "bin" / "nvcc", release.format("13.0"))
    assert find.find_nvcc().path == str(new)
    monkeypatch.setenv("SLIDESPARSE_NVCC", str(old))
    assert find.find_nvcc().path == str(old)


def test_nvcc_version_is_parsed_and_checked(root: Path) -> None:
    def version(output: str) -> str:
        return find.nvcc_version(str(program(root / "nvcc", output)))

    assert version("Cuda compilation tools, release 12.2, V12.2.1") == "12.2"
    with pytest.raises(ToolchainError, match=r"CUDA 11\.8.* 12\.2 or later"):
        version("release 11.8, V11.8.1")
    with pytest.raises(ToolchainError, match="'broken'"):
        version("broken")


def test_compiler_search_order(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_cuda_headers_search_order(
    root: Path, wheels: dict[str, Wheel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Folders of the variable precede wheels. /usr/local/cuda may exist here, but has none of these headers."""
    first, second, third = (root / name for name in ("first", "second", "wheel"))
    monkeypatch.setenv("SLIDESPARSE_CUDA_INCLUDE", f"{first}{os.pathsep}{second}")
    for folder, name in ((first, "one.h"), (second, "one.h"), (second, "two.h")):
        folder.mkdir(exist_ok=True)
        (folder / name).touch()
    with pytest.raises(ToolchainError, match="the thing needs three.h, found in none of") as error:
        find.cuda_headers(("one.h", "two.h", "three.h"), "thing")
    assert str(first) in error.value.what
    assert "SLIDESPARSE_CUDA_INCLUDE" in error.value.remedy
    wheels["nvidia-cuda-runtime"] = Wheel(third, "include/three.h", "13.0")
    (third / "include" / "three.h").touch()
    (second / "crt").mkdir()
    (second / "crt" / "host_defines.h").touch()
    folders = find.cuda_headers(("one.h", "two.h", "three.h"), "thing")
    assert folders == [first, second, third / "include"]
    (second / "crt" / "host_defines.h").unlink()
    wheels["nvidia-cuda-crt"] = Wheel(third, "include/crt/host_defines.h", "13.0")
    (third / "include" / "crt" / "host_defines.h").touch()
    # one.h may include files of the wheel
    assert find.cuda_headers(("one.h",), "thing") == [first, third / "include"]


def test_missing_python_and_torch_headers_are_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    assert find.torch_folder((2, 0)) == Path(torch.__file__).parent
    with pytest.raises(
        ToolchainError, match=f"torch {re.escape(torch.__version__)} was found.* 99.1 or later"
    ):
        find.torch_folder((99, 1))
    monkeypatch.setattr(find.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    with pytest.raises(ToolchainError, match="Python.h"):
        find.python_headers()
    monkeypatch.setattr(find.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ToolchainError, match="pip install pybind11"):
        find.python_headers()
    with pytest.raises(ToolchainError, match="needs torch"):
        find.torch_folder((2, 0))
