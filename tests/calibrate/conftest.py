"""Source models and texts, of as many samples as a module asks for; caches are temporary folders."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from calibration import TOKENS, save, write_ids, write_layer_times
from checkpoints import llama

from slidesparse.convert import budget


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIDESPARSE_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(autouse=True, scope="module")
def own_layer_times(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(budget, "FILE", write_layer_times(tmp_path_factory.mktemp("times") / "times.csv"))
        yield


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama(tmp_path_factory.mktemp("llama") / "source")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    save("llama", folder := tmp_path_factory.mktemp("model") / "source")
    return folder


@pytest.fixture
def ids(tmp_path: Path, request: pytest.FixtureRequest) -> str:
    return write_ids(tmp_path / "ids.npy", getattr(request.module, "ID_SAMPLES", TOKENS[0]))


@pytest.fixture
def text(tmp_path: Path, request: pytest.FixtureRequest) -> tuple[str, ...]:
    return (write_ids(tmp_path / "text.npy", request.module.TEXT_SAMPLES),)
