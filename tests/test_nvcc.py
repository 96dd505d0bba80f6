"""Finding nvcc and compiling the kernels for Hopper, by an nvcc that only pretends."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import shutil
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path

import pytest
import torch
from hopper_stand_in import shared_stages

from slidesparse import nvcc, toolchain
from slidesparse.backends import Facts, probe
from slidesparse.gemm import hopper_native
from slidesparse.gemm.hopper_configs import (
    RESIDENT,
    SHARERS,
    SPLIT,
    SPLITS,
    STREAM,
    STRIPS,
    TOKENS,
    Config,
)
from slidesparse.nvcc import Unit
from slidesparse.toolchain import ToolchainError

# Writes what it was asked to the output, and lines to runs/ so that they can be counted and put in order.
NVCC = """#!/bin/sh
if [ "$1" = --version ]; then echo 'Cuda compilation tools, release {release}, V{release}.1'; exit; fi
out= ; words="$*"
while [ $# -gt 0 ]; do if [ "$1" = -o ]; then out=$2; fi; shift; done
echo "$words" >> "{root}/runs"
echo "$words" > "$out"
"""
NOTHING = ("SLIDESPARSE_NVCC", "CUDA_HOME", "CUDA_PATH", "NVCC_CCBIN", "MAX_JOBS", "CXX")


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def pretender(root: Path, place: Path, release: str = "13.0") -> Path:
    return program(place, NVCC.format(root=root, release=release))


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with sources, a C++ compiler and an empty cache, and a machine without any nvcc."""
    for name in NOTHING:
        monkeypatch.delenv(name, raising=False)
    sources = tmp_path / "csrc"
    shutil.copytree(nvcc.sources(), sources / "hopper")
    (sources / "library.h").touch()
    monkeypatch.setattr(toolchain, "sources", lambda: sources)
    monkeypatch.setattr(toolchain, "__file__", str(tmp_path / "package" / "toolchain.py"))
    monkeypatch.setattr(nvcc, "USUAL", str(tmp_path / "usual" / "bin" / "nvcc"))
    monkeypatch.setattr(nvcc, "WHEELS", ())
    monkeypatch.setenv("PATH", f"{tmp_path / 'path'}{os.pathsep}/usr/bin{os.pathsep}/bin")
    monkeypatch.setenv("SLIDESPARSE_CACHE", str(tmp_path / "cache"))
    program(tmp_path / "path" / "c++", "#!/bin/sh\necho one\n")
    return tmp_path


def runs(root: Path) -> list[str]:
    return (root / "runs").read_text().splitlines() if (root / "runs").exists() else []


def test_what_was_tried_is_told(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvcc, "WHEELS", ("no-such-wheel",))
    monkeypatch.setenv("CUDA_HOME", "/nowhere")
    with pytest.raises(ToolchainError) as error:
        nvcc.find()
    for word in (
        *("nvcc was not found: tried SLIDESPARSE_NVCC (not set)", "/nowhere/bin/nvcc (of CUDA_HOME)"),
        *("CUDA_PATH (not set)", "the PATH", f"{root}/usual/bin/nvcc", "no-such-wheel (not installed)"),
    ):
        assert word in error.value.what
    assert "pip install nvidia-cuda-nvcc" in error.value.remedy
    assert "SLIDESPARSE_NVCC" in error.value.remedy
    for ask in (nvcc.library, nvcc.state):
        with pytest.raises(ToolchainError, match="nvcc was not found"):
            ask()


def test_the_first_of_the_places_counts(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of these goes before those that are there already."""

    class Wheel:
        version = "13.0.88"
        files = (
            importlib.metadata.PackagePath("nvidia/bin/ptxas"),
            importlib.metadata.PackagePath("bin/nvcc"),
        )

        def locate_file(self, file: object) -> Path:
            return root / "wheel" / str(file)

    monkeypatch.setattr(nvcc, "WHEELS", ("a-wheel",))
    monkeypatch.setattr(nvcc.importlib.metadata, "distribution", lambda name: Wheel())
    with pytest.raises(ToolchainError, match="a-wheel 13.0.88 \\(no nvcc that runs is in it"):
        nvcc.find()
    pretender(root, root / "wheel" / "bin" / "nvcc")
    assert nvcc.find() == toolchain.Found(str(root / "wheel" / "bin" / "nvcc"), "a-wheel", "13.0.88")
    pretender(root, root / "usual" / "bin" / "nvcc")
    assert nvcc.find().source == "system"
    on_path = pretender(root, root / "path" / "nvcc")
    assert nvcc.find() == toolchain.Found(str(on_path), "PATH", None)
    for variable in ("CUDA_PATH", "CUDA_HOME"):
        pretender(root, root / variable / "bin" / "nvcc")
        monkeypatch.setenv(variable, str(root / variable))
        assert nvcc.find() == toolchain.Found(str(root / variable / "bin" / "nvcc"), variable, None)
    chosen = pretender(root, root / "chosen")
    monkeypatch.setenv("SLIDESPARSE_NVCC", str(chosen))
    assert nvcc.find() == toolchain.Found(str(chosen), "SLIDESPARSE_NVCC", None)
    chosen.chmod(0o644)
    with pytest.raises(ToolchainError, match="SLIDESPARSE_NVCC=.*/chosen is not a program; set it to"):
        nvcc.find()


def test_versions(root: Path) -> None:
    place = root / "path" / "nvcc"
    assert nvcc.version(str(pretender(root, place, "12.2"))) == "12.2"
    with pytest.raises(ToolchainError, match=r"is of CUDA 11.8; the kernels need 12.2 or later; pip install"):
        nvcc.version(str(pretender(root, place, "11.8")))
    with pytest.raises(ToolchainError, match="does not say its release: 'broken'"):
        nvcc.version(str(program(place, "#!/bin/sh\necho broken\n")))


def test_the_units_of_the_kernels() -> None:
    """Every source is compiled, and every kernel's source with each combination of its macros."""
    units = nvcc.units()
    folder = nvcc.sources()
    assert {unit.source for unit in units} == {path.name for path in folder.glob("*.cu")}
    assert len(set(units)) == len(units)
    assert Unit("instance.cu", ("SLIDESPARSE_TYPE=Fp8", "SLIDESPARSE_TOKENS=64")) in units


@pytest.mark.parametrize("line", ["none.cu", "about.cu NAME", "about.cu NAME="])
def test_a_line_that_lists_no_unit(line: str, root: Path) -> None:
    (root / "csrc" / "hopper" / "units.txt").write_text(f"# words\nabout.cu A=1,2 # more\n{line}\n")
    with pytest.raises(ToolchainError, match=f"line 3: '{line}' is not a source of this folder"):
        nvcc.units()
    (root / "csrc" / "hopper" / "units.txt").write_text("# words\nabout.cu A=1,2 # more\n\n")
    assert nvcc.units() == [Unit("about.cu", ("A=1",)), Unit("about.cu", ("A=2",))]


def test_the_library_is_compiled_once(root: Path) -> None:
    path = pretender(root, root / "path" / "nvcc")
    state = nvcc.state()
    assert state.state == "can be built when first used"
    assert not (root / "cache").exists()
    made = nvcc.library()
    assert made == nvcc.library() == Path(state.path or "")
    assert nvcc.state() == toolchain.Extension("built in the cache", str(made))
    *compiles, link = runs(root)
    assert len(compiles) == len(nvcc.units())
    for words in compiles:
        assert "-gencode=arch=compute_90a,code=sm_90a" in words
        assert f"-ccbin={root / 'path' / 'c++'}" in words
        assert f"-DSLIDESPARSE_SOURCES={nvcc.sources_digest()}" in words
    assert sum("-DSLIDESPARSE_TYPE=Int8 -DSLIDESPARSE_TOKENS=16 -c" in words for words in compiles) == 1
    objects = [words.split()[words.split().index("-o") + 1] for words in compiles]
    assert set(objects) <= set(link.split())
    assert "-shared -cudart=static" in link
    assert path.exists()


def test_an_installed_library_counts_when_its_sources_are_these(root: Path) -> None:
    """Then no nvcc is needed."""
    installed = root / "package" / "gemm" / nvcc.file_name()
    installed.parent.mkdir(parents=True)
    installed.write_bytes(b"\x7fELF " + nvcc.sources_digest().encode() + b"\0")
    assert nvcc.library() == installed
    assert nvcc.state() == toolchain.Extension("installed", str(installed))
    (root / "csrc" / "hopper" / "gemm.cuh").write_text("changed")
    with pytest.raises(ToolchainError, match="nvcc was not found"):
        nvcc.library()
    pretender(root, root / "path" / "nvcc")
    assert nvcc.state().note == f"{installed} was built from other sources and is not used"


CHANGES: dict[str, Callable[[Path, pytest.MonkeyPatch], object]] = {
    "a source": lambda root, patch: (root / "csrc" / "hopper" / "instance.cu").write_text("other"),
    "a header": lambda root, patch: (root / "csrc" / "hopper" / "gemm.cuh").write_text("other"),
    "a new header": lambda root, patch: (root / "csrc" / "hopper" / "new.cuh").write_text("other"),
    "the units": lambda root, patch: (root / "csrc" / "hopper" / "units.txt").write_text("about.cu"),
    "nvcc's version": lambda root, patch: pretender(root, root / "path" / "nvcc", "13.1"),
    "the C++ compiler": lambda root, patch: program(root / "path" / "c++", "#!/bin/sh\necho two\n"),
    "options": lambda root, patch: patch.setattr(nvcc, "FLAGS", (*nvcc.FLAGS, "-lineinfo")),
    "the machine": lambda root, patch: patch.setattr(nvcc.platform, "machine", lambda: "riscv64"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_can_change_the_result_changes_the_key(
    change: str, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretender(root, root / "path" / "nvcc")
    before = nvcc._cached()
    assert nvcc._cached() == before
    CHANGES[change](root, monkeypatch)
    assert nvcc._cached().parent != before.parent
    assert nvcc._cached().name == before.name


def test_other_files_do_not(root: Path) -> None:
    pretender(root, root / "path" / "nvcc")
    before = nvcc._cached()
    (root / "csrc" / "hopper" / "notes.md").write_text("other")
    (root / "csrc" / "library.h").write_text("other")
    assert nvcc._cached() == before


def test_what_nvcc_says_is_told_and_nothing_is_left(root: Path) -> None:
    text = NVCC.format(root=root, release="13.0").replace("out= ;", "echo 'error: no such type' >&2; exit 1;")
    program(root / "path" / "nvcc", text)
    with pytest.raises(
        ToolchainError, match=r"(?s)the compiler failed: .*no such type.*SLIDESPARSE_NVCC cho"
    ):
        nvcc.library()
    assert [path.suffix for path in (root / "cache").rglob("*") if path.is_file()] == [".lock"]


def test_the_compiler_behind_nvcc(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = program(root / "path" / "other", "#!/bin/sh\necho other\n")
    monkeypatch.setenv("CXX", f"{other} -O1")
    assert nvcc._host() == [f"-ccbin={other}", "-Xcompiler=-O1"]
    pretender(root, root / "path" / "nvcc")
    before = nvcc._cached()
    monkeypatch.setenv("NVCC_CCBIN", str(other))
    assert nvcc._host() == []
    assert nvcc._cached() != before


def test_how_many_are_compiled_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvcc.os, "sched_getaffinity", lambda process: set(range(6)), raising=False)
    for value, jobs in (("4", 4), ("64", 6), ("many", 6)):
        monkeypatch.setenv("MAX_JOBS", value)
        assert nvcc._jobs() == jobs
    monkeypatch.delenv("MAX_JOBS")
    assert nvcc._jobs() == 6


def test_doctor_tells_what_lacks(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from slidesparse import doctor, doctor_words

    monkeypatch.setattr(doctor, "_torch", lambda: {"version": None})
    found = doctor.collect()
    text = doctor_words.render(found)
    assert text.count("nvcc was not found: tried") == 2  # of nvcc itself and of the kernels
    facts = Facts("2.11.0", None, "13.0", True, True, True, (9, 0), doctor._facts(found).lacks)
    usable, lacks, remedy = probe("hopper", facts)
    assert (usable, len(lacks)) == (False, 1)
    assert lacks[0].startswith("nvcc was not found")
    assert remedy == nvcc.INSTALL
    pretender(root, root / "path" / "nvcc")
    found = doctor.collect()
    assert "nvcc" in found["libraries"]
    assert found["libraries"]["nvcc"]["version"] == "13.0"
    assert "Hopper kernels      can be built when first used" in doctor_words.render(found)


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 0), (12, 0)])
def test_doctor_on_gpus_that_are_not_hopper(capability: tuple[int, int]) -> None:
    _, lacks, remedy = probe("hopper", Facts("2.11.0", None, "13.0", True, True, True, capability))
    assert lacks == [
        f"the GPU has compute capability {capability[0]}.{capability[1]}; the kernels are for 9.0 (Hopper) alone"
    ]
    assert remedy == "use the backend cusparselt, or a Hopper GPU"


def every_configuration() -> Iterator[Config]:
    """Those that have a kernel and those that have none."""
    for sizes in product(TOKENS, STRIPS, SHARERS, RESIDENT):
        tokens, strips, sharers, resident = sizes
        yield Config(STREAM, strips, tokens, sharers, 1, resident)
        for splits in SPLITS:
            yield Config(SPLIT, strips, tokens, sharers, splits, resident)


# What cannot be packed, and is refused before a GPU is asked.
REFUSED = {
    "an odd length": (hopper_native.Pack(n=1, k=8, length=7, blocks=1), "blocks of 7 columns at phase 0"),
    "too short": (hopper_native.Pack(n=1, k=8, length=2, blocks=1), "an even length of 4 or more"),
    "a whole block before": (hopper_native.Pack(n=1, k=8, length=8, phase=8, blocks=1), "a phase below it"),
    "no such size": (hopper_native.Pack(n=-1, k=8, length=8, blocks=1), "[-1, 8] in 1 blocks a strip"),
    "long rows": (hopper_native.Pack(n=1, k=8, length=8, blocks=1 << 23), "no such sizes can be packed"),
    "a large grid": (hopper_native.Pack(n=1 << 30, k=8, length=8, blocks=128), "in 128 blocks a strip"),
}


@pytest.mark.slow
def test_the_real_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled and loaded; it knows the digest of its sources, which stands in the file as text."""
    try:
        nvcc.version(nvcc.find().path)
    except ToolchainError as error:
        pytest.skip(str(error))
    monkeypatch.setenv("SLIDESPARSE_CACHE", str(tmp_path))
    made = toolchain.publish(nvcc._cached(), nvcc.compile_to)
    assert nvcc.sources_digest().encode() in made.read_bytes()
    library = ctypes.CDLL(str(made))
    library.slidesparse_hopper_sources.restype = ctypes.c_char_p
    assert library.slidesparse_hopper_sources().decode() == nvcc.sources_digest()
    for name in ("gemm", "stream", "quantize", "linear", "pack", "workspace", "unusable"):
        assert hasattr(library, f"slidesparse_hopper_{name}")
    fit, stages, clusters = library.slidesparse_hopper_fit, ctypes.c_int32(), ctypes.c_int32()
    for config in every_configuration():
        call = hopper_native.call_of(config, torch.int8)  # says where it fits also where there is no GPU
        fit(ctypes.byref(call), config.design == STREAM, ctypes.byref(stages), ctypes.byref(clusters))
        assert stages.value == shared_stages(config), config
    pack = library.slidesparse_hopper_pack
    pack.restype = ctypes.c_char_p
    for call, words in REFUSED.values():
        assert words in (pack(ctypes.byref(call)) or b"").decode()
    assert pack(ctypes.byref(hopper_native.Pack(n=0, k=8, length=4, blocks=1))) is None  # nothing to do
