"""Tensors are read and written in several chunks, as those of real models are."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Split each tiny tensor into several chunks that cut blocks of rows, the last one short."""
    monkeypatch.setattr("slidesparse.slide.CHUNK_ELEMENTS", 640)  # ten rows of Q
