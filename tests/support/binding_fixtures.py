"""Fixtures for tests that name this file in ``pytest_plugins``; ``native`` is parametrized over csrc/'s bindings."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from bindings import FAKES, NAMES, Native, build_fake

from slidesparse.build import compile, find


@pytest.fixture(scope="session")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Native]:
    """Build both extensions with `compile.build` and load them with the fake libraries."""
    root = tmp_path_factory.mktemp("bindings")
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(2) as pool:
        patch.setenv("SLIDESPARSE_CUDA_INCLUDE", str(FAKES / "include"))
        patch.setenv("SLIDESPARSE_CACHE", str(root / "cache"))
        try:
            find.python_headers(), find.compiler()
        except find.ToolchainError as error:
            pytest.skip(f"the bindings cannot be built here: {error}")
        extensions = list(pool.map(compile.build, NAMES))
        libraries = list(pool.map(lambda name: build_fake(name, root / f"lib{name}.so"), NAMES))
    return {name: Native(name, *files) for name, *files in zip(NAMES, extensions, libraries, strict=True)}


def watched(native: Native) -> Iterator[Native]:
    """Yield the binding with its library reset; then check that no object is alive and that every call was valid."""
    native.forget()
    yield native
    assert native.alive() == 0
    native.calls()


@pytest.fixture(params=NAMES)
def native(loaded: dict[str, Native], request: pytest.FixtureRequest) -> Iterator[Native]:
    yield from watched(loaded[request.param])


@pytest.fixture
def cusparselt(loaded: dict[str, Native]) -> Iterator[Native]:
    yield from watched(loaded["cusparselt"])


@pytest.fixture
def cublaslt(loaded: dict[str, Native]) -> Iterator[Native]:
    yield from watched(loaded["cublaslt"])
