"""Memory layouts with the real libraries on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.layout import WRONG_PRODUCT, LayoutBench, products
from slidesparse.tune.inputs import Inputs
from slidesparse.tune.machine import require_gpu, require_libraries
from slidesparse.tune.measure import CudaClock, Deadline
from slidesparse.tune.session import Session
from slidesparse.tune.shapes import Layer

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", ["cublaslt", "cusparselt"])
def test_accepted_layouts_give_correct_products(name: str, tmp_path: Path) -> None:
    """The layout of serving is accepted. Others may be refused, but accepted ones give correct products."""
    gpu = require_gpu()
    libraries = require_libraries(gpu, [name])
    todo = products(libraries, [Layer("layer", 256, 512)], ["int8", "fp8", "bf16"])
    with CudaClock(gpu.device) as clock:
        session = Session(gpu, clock, Inputs(gpu.device, gpu.l2_bytes), Deadline(None))
        bench = LayoutBench(session, tmp_path, todo, [64])
        assert bench.run()
    assert len(bench.records.rows) == 3 * 8
    assert [row for row in bench.records.rows if row["reason"] == WRONG_PRODUCT] == []
    served = [
        row for row in bench.records.rows if row["weight"] + row["activations"] + row["output"] == "KKN"
    ]
    assert [row["taken"] for row in served] == ["yes"] * 3
    assert all(float(row["p50_us"]) > 0 and row["heuristic_us"] for row in served)
