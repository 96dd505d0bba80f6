"""The table of configurations of a Hopper layer: which tuned one serves a number of tokens, where no GPU is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from slidesparse.gemm import cuda, tuned
from slidesparse.gemm.hopper import backend as hopper
from slidesparse.gemm.hopper import native
from slidesparse.gemm.hopper.backend import Hopper
from slidesparse.gemm.problem import ALL_DENSE, CODED, MIXED, Layer, LibraryError, Problem
from slidesparse.gemm.tuned import Subject
from slidesparse.pattern import SlidePattern
from slidesparse.quantize import INT8

CPU = torch.device("cpu")
SUBJECT = Subject("hopper", hopper.VERSION, "NVIDIA Test 100", (9, 0))
PROBLEM = Problem("int8", "bf16", 64, 256, 1, "both")
DENSE = Layer.of(64, 256, None, 0, INT8, 128)
# us, by the cost model
PREDICTED = {"split:2x64/1x4/2": 1.0, "stream:3x128/2/1": 1.05, "stream:1x64/1/1": 1.3}
BEST, NEAR, SLOW = PREDICTED


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a Hopper GPU without shipped tables, for which the cost model predicts PREDICTED."""

    def fit(text: str, dtype: torch.dtype) -> None:
        if text.startswith("split:9"):
            raise LibraryError(f"no kernel was compiled for configuration {text}")

    hopper._predictions.cache_clear()
    monkeypatch.setenv(tuned.CACHE_VARIABLE, str(tmp_path))
    monkeypatch.setattr(cuda, "subject_of", lambda backend, device: SUBJECT)
    monkeypatch.setattr(cuda, "device_index", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(native, "fit", fit)
    monkeypatch.setattr(native, "candidates", lambda layer, m, most, blocks: list(PREDICTED.items())[:most])


def table(layer: Layer) -> dict[int, tuple[str, ...]]:
    return dict(hopper.configuration_table(layer, CPU))


def save(*results: tuple[int, str], problem: Problem = PROBLEM) -> None:
    tuned.save(SUBJECT, [(replace(problem, m=m), name) for m, name in results])


def test_each_row_is_for_the_tokens_that_a_tuned_configuration_serves(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A configuration that does not fit is logged, and the best by the cost model is in its place."""
    looked_up: list[int] = []
    select = tuned.select_algorithm
    monkeypatch.setattr(tuned, "select_algorithm", lambda *a: looked_up.append(a[1].m) or select(*a))
    save((1, "few"), (16, "some"), (64, "split:9x9/1x1/1"), *((m, "many") for m in (300, 512, 4096, 16384)))
    expected = {1: "few", 16: "some", 64: BEST, 1 << 15: "many"}
    assert table(DENSE) == {m: (name,) * 3 for m, name in expected.items()}
    assert looked_up == sorted({*hopper.TABLE_TOKENS, 300})  # once for each row
    assert "refuses the algorithm split:9x9/1x1/1" in caplog.text
    assert "no tuned algorithm" not in caplog.text


def test_dense_blocks_have_their_own_configurations() -> None:
    """Above the tuned token counts and without tuning, they use those of 2:4 blocks; others have none.

    What was tuned for fewer tokens serves more only if the cost model agrees.
    """
    save((64, "sparse"))
    save((16, "dense"), problem=replace(PROBLEM, blocks=ALL_DENSE))
    save((64, "mixed"), problem=replace(PROBLEM, blocks=MIXED))
    assert table(DENSE)[16] == ("sparse", "mixed", "dense")
    assert table(DENSE)[64] == ("sparse", "mixed", "sparse")
    slid = table(Layer.of(64, 192, SlidePattern(6), 0, INT8, 128))  # of as many columns
    assert all(len(set(row)) == 1 for row in slid.values())
    save((16, "coded"), problem=replace(PROBLEM, blocks=CODED))
    coded = table(Layer.of(64, 250, SlidePattern(8), 3, INT8, 128, Hopper.coded))
    assert coded == {16: ("coded",) * 3, 1 << 15: (BEST,) * 3}


def test_untuned_layers_use_near_shapes_where_the_cost_model_agrees(caplog: pytest.LogCaptureFixture) -> None:
    for name, expected in ((NEAR, NEAR), (SLOW, BEST)):
        save(*((m, name) for m in hopper.TABLE_TOKENS), problem=replace(PROBLEM, n=128))
        assert table(DENSE) == {1 << 15: (expected,) * 3}
    assert "no tuned algorithm for int8 weights [64, 256]" in caplog.text
    assert hopper.configuration_table(DENSE._replace(n=0), CPU) == []
