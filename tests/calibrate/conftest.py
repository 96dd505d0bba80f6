"""Keep what calibration caches out of the user's folder."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIDESPARSE_CACHE", str(tmp_path_factory.mktemp("cache")))
