"""A new backend needs a module and a line in the registry; it serves a model without any other change."""

from __future__ import annotations

from pathlib import Path

import pytest
from engines import Engines
from models import QWEN, converted, write_w8a8

pytestmark = pytest.mark.vllm


def test_a_registered_backend_serves(engines: Engines, tmp_path: Path) -> None:
    model = converted(write_w8a8(QWEN, tmp_path / "plain"), tmp_path / "pruned", "6:8")
    reference = engines.serve(model)
    toy = engines.serve(model, env={"SLIDESPARSE_BACKEND": "toy"}, registered="toy_backend")
    assert "backend toy: SLIDESPARSE_BACKEND=toy" in toy.summary
    assert "8 layers sparse" in toy.summary
    assert toy.tokens == reference.tokens
