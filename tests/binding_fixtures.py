"""The fixtures of tests that name this file in ``pytest_plugins``; ``native`` is each binding of csrc/ in turn."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from bindings import FAKES, LACKS, NAMES, Built, Fake, Native, build_fake, fresh

from slidesparse import toolchain


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Built]:
    """Both extensions by `toolchain.build`, and the fake libraries, compiled side by side."""
    root = tmp_path_factory.mktemp("bindings")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLIDESPARSE_CUDA_INCLUDE", str(FAKES / "include"))
        patch.setenv("SLIDESPARSE_CACHE", str(root / "cache"))
        for name in NAMES:
            try:
                toolchain.command(name, Path("unused"))
            except toolchain.ToolchainError as error:
                pytest.skip(f"the bindings cannot be built here: {error}")
        libraries = {name: root / f"lib{name}.so" for name in NAMES}
        lacking = {name: root / "old" / f"lib{name}.so" for name in NAMES}
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            modules = {name: pool.submit(toolchain.build, name) for name in NAMES}
            rest = [pool.submit(build_fake, name, libraries[name]) for name in NAMES]
            for name in NAMES:
                other_name = f"-D{LACKS[name]}=another"
                rest.append(pool.submit(build_fake, name, lacking[name], other_name))
            for done in rest:
                done.result()
            extensions = {name: module.result() for name, module in modules.items()}
        yield Built(extensions, libraries, lacking, root / "cache")


@pytest.fixture(scope="session")
def loaded(built: Built, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Native]:
    found = {}
    for name in NAMES:
        module = fresh(built, name, tmp_path_factory.mktemp(name))
        module.load(str(built.libraries[name]))
        found[name] = Native(name, module, Fake(built.libraries[name]))
    return found


def watched(native: Native) -> Iterator[Native]:
    """The binding with its library at the beginning; at the end nothing may live, and no call was a wrong one."""
    native.fake.forget()
    native.fake.set(algorithms=8)
    yield native
    assert native.fake.alive() == []
    native.fake.calls()
    assert native.fake.planned() == 0


@pytest.fixture(params=NAMES)
def native(loaded: dict[str, Native], request: pytest.FixtureRequest) -> Iterator[Native]:
    yield from watched(loaded[request.param])


@pytest.fixture
def cusparselt(loaded: dict[str, Native]) -> Iterator[Native]:
    yield from watched(loaded["cusparselt"])


@pytest.fixture
def cublaslt(loaded: dict[str, Native]) -> Iterator[Native]:
    yield from watched(loaded["cublaslt"])
