"""Weights that are replaced while a server runs: each layer stays sparse or dense, as it was at first.

Tokens after a reload are compared on GPUs (test_gpu_serving), because vLLM's own CPU layers keep their first weights.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoints import converted
from edits import SPARSE_FLAGS, edited
from engines import STOCK, Engines, Request
from models import QWEN, write_w8a8

pytestmark = pytest.mark.vllm

DOWN = "model.layers.0.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_w8a8(QWEN, tmp_path_factory.mktemp("reload") / "source")


@pytest.fixture(scope="module")
def pruned(source: Path) -> Path:
    """A 6:8 checkpoint in dense layout with metadata."""
    return converted(source, source.with_name("pruned"), "6:8")


@pytest.fixture(scope="module")
def partly_pruned(pruned: Path) -> str:
    """A checkpoint without metadata, of which one layer breaks the pattern."""
    return edited(pruned, pruned.with_name("partly"), {DOWN: dense_weight()}, {"slidesparse": None})


@pytest.fixture(scope="module")
def fully_pruned(pruned: Path) -> str:
    """A checkpoint without metadata, all layers of which obey the pattern."""
    return edited(pruned, pruned.with_name("fully"), {}, {"slidesparse": None})


def dense_weight() -> torch.Tensor:
    """A weight of DOWN that breaks 6:8."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(1, 60, (QWEN.hidden, QWEN.intermediate), dtype=torch.int8, generator=generator)


def test_weights_loaded_after_dummy_ones_are_not_pruned(engines: Engines, source: Path, pruned: Path) -> None:
    """Dummy weights are pruned to the pattern; weights that are loaded later into the same engine must obey it."""
    dummy = {"load_format": "dummy"}
    reloaded = engines.serve(pruned, options=dummy, task="reload_after_dummy")
    assert reloaded.tokens == engines.serve(pruned).tokens
    answer = engines.ask(Request(str(source), env=SPARSE_FLAGS, options=dummy, task="reload_after_dummy"))
    message = answer.error + answer.log
    assert "has 8 non-zeros, 6:8 (2 of every 8 pruned)" in message
    assert "The layer has been sparse since the server started; restart it to serve these weights" in message


def test_reload_refuses_dense_weights_in_a_sparse_layer(
    engines: Engines, fully_pruned: str, partly_pruned: str
) -> None:
    answer = engines.ask(
        Request(
            fully_pruned,
            env=SPARSE_FLAGS,
            task="reload_other",
            work={"other": partly_pruned, "model": fully_pruned},
        )
    )
    message = answer.error + answer.log
    assert "model.layers.0.mlp.down_proj" in message
    assert "The layer has been sparse since the server started" in message


def test_reload_keeps_a_dense_layer_dense(engines: Engines, fully_pruned: str, partly_pruned: str) -> None:
    work = {"other": fully_pruned, "model": partly_pruned}
    answer = engines.serve(partly_pruned, env=SPARSE_FLAGS, task="reload_other", work=work)
    assert "7 layers sparse, 2 dense (1 lm_head, 1 whose weights break the pattern)" in answer.summary
    assert answer.data["turns"][0] == engines.serve(partly_pruned, env=STOCK).tokens
