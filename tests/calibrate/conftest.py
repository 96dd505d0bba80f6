"""A source model and its calibration data; calibration caches into a temporary folder."""

from __future__ import annotations

from pathlib import Path

import pytest
from calibration import write_ids
from checkpoints import llama


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIDESPARSE_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama(tmp_path_factory.mktemp("llama") / "source")


@pytest.fixture
def ids(tmp_path: Path) -> str:
    return write_ids(tmp_path / "ids.npy")
