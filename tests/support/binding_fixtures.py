"""The fixtures of tests that name this file in ``pytest_plugins``; ``native`` is each binding of csrc/ in turn."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from bindings import FAKES, NAMES, Native, build_fake

from slidesparse.build import compile, find


@pytest.fixture(scope="session")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Native]:
    """Both extensions by `compile.build`, on the fake libraries."""
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
    """The binding with its library at the beginning; at the end nothing may live, and no call was a wrong one."""
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
