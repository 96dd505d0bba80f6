"""What doctor says of the GEMM libraries and of the extensions that call them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from slidesparse import doctor, doctor_words, nvcc, toolchain
from slidesparse.backends import BACKENDS, Facts, probe

GPU = Facts("2.11.0", None, "13.0", True, True, True, (9, 0))


@pytest.fixture(autouse=True)
def no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing it takes seconds, and nothing here depends on it."""
    monkeypatch.setattr(doctor, "_torch", lambda: {"version": None})


def test_every_part_of_the_libraries_may_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that cannot be found leaves the others, and what is wrong is the backend's lack."""

    def broken(*_: object) -> None:
        raise OSError("the disk is gone")

    monkeypatch.setattr(toolchain, "find_library", broken)
    monkeypatch.setattr(toolchain, "extension_state", broken)
    found = doctor.collect()
    lacks = doctor._facts(found).lacks
    assert set(lacks) == {*toolchain.EXTENSIONS, nvcc.NAME}
    for name in toolchain.EXTENSIONS:
        said = lacks[name]
        assert said == (("OSError: the disk is gone", "mend what the message names"),) * 2
        assert probe(name, replace(GPU, lacks=lacks))[1] == ["OSError: the disk is gone"] * 2
    assert found["libraries"]["nvcc"] == doctor._missing(doctor._nvcc)


@pytest.mark.parametrize(
    ("version", "words"),
    [
        ("0.7.1", "cuSPARSELt 0.7.1 was found, 0.8 to 0.10 is supported"),
        ("0.11.0", "cuSPARSELt 0.11.0 was found"),
        ("0.10.4.1", "0.10.4.1 (a wheel) lib.so"),
        (None, "(a wheel) lib.so"),
    ],
)
def test_the_library_found_and_its_version(
    version: str | None, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []

    def find(name: str, major: int | None) -> toolchain.Found:
        asked.append(major)
        return toolchain.Found("lib.so", "a wheel", version)

    monkeypatch.setattr(toolchain, "find_library", find)
    found = doctor._libraries({"cuda_build": "13.0"})
    assert doctor_words._found_words(found["cusparselt"]).startswith(words)
    assert ("remedy" in found["cusparselt"]) == ("was found" in words)
    assert asked == [13, 13]
    doctor._libraries({"cuda_build": None})
    assert asked == [13, 13, None, None]


def test_what_lacks_is_said_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIDESPARSE_CUSPARSELT", "/nowhere/libcusparseLt.so.0")
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(toolchain, "include_folders", lambda name: [])
    monkeypatch.setattr(toolchain, "pybind11_include", lambda: Path())
    monkeypatch.setattr(toolchain, "file_name", lambda name: "none.so")
    found = doctor.collect()
    text = doctor_words.render(found)
    assert "SLIDESPARSE_CUSPARSELT=/nowhere/libcusparseLt.so.0 is not a file" in text
    for name in toolchain.EXTENSIONS:
        assert found["libraries"]["extensions"][name]["lack"].startswith("no C++ compiler was found")
    assert text.count("no C++ compiler was found") >= len(toolchain.EXTENSIONS)
    _, lacks, remedy = probe("cusparselt", replace(GPU, lacks=doctor._facts(found).lacks))
    assert [words.partition(":")[0] for words in lacks] == [
        "cuSPARSELt was not found",
        "no C++ compiler was found (tried $CXX, c++, g++, clang++)",
    ]
    assert remedy == "set it to the path of a libcusparseLt.so, or unset it"


def test_the_words_on_versions_are_those_that_are_checked() -> None:
    (needs,) = (backend.needs for backend in BACKENDS if backend.name == "cusparselt")
    library = toolchain.LIBRARIES["cusparselt"]
    assert library.newest
    versions = (".".join(map(str, version)) for version in (library.oldest, library.newest))
    assert f"cuSPARSELt {' to '.join(versions)}" in needs
