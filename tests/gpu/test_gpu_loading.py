"""Time and GPU memory of loading a sparse 7B model, against stock vLLM loading the dense one.

Checkpoints have random weights in 28 layers of Qwen2.5-7B's shapes. Each load runs in its own process and reads from
the page cache; dense and sparse loads alternate.
"""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

import pytest
from engines import STOCK, Engines
from gpu_engines import MEMORY
from gpu_layers import require_served

from slidesparse.pattern import SlidePattern
from slidesparse.synth import synth
from slidesparse.tune.shapes import find_model

pytestmark = [pytest.mark.gpu, pytest.mark.vllm, pytest.mark.slow, pytest.mark.alone]

MODEL = "Qwen2.5-7B"
ROUNDS = 3
TIMES = 1.2  # of the dense load, at most
# Size of a packed 6:8 weight relative to the dense one (half of 1.5 K values, and two bits for each), and the share of
# the saving that must be visible: torch allocates blocks of 2 MiB, which weights of 11 to 122 MiB do not fill.
PACKED, SEEN = 15 / 16, 0.8
MIB = 1 << 20
LAYERS = 28
LAYER_MIB = sum(shape.n * shape.k for shape in find_model(MODEL)[1]) / MIB  # of a layer's weights, in bytes


def load(engines: Engines, folder: Path, stock: bool) -> dict[str, Any]:
    options = {"dtype": "bfloat16", "max_model_len": 1024, **MEMORY}
    env = STOCK if stock else {}
    answer = engines.serve(folder, task="loading", registered="timed_loading", env=env, options=options)
    assert bool(answer.summary) != stock, answer.summary
    return answer.data


@pytest.mark.parametrize("quant", ["int8", "fp8"])
def test_sparse_7b_loads_in_time_and_memory_of_the_dense_one(
    engines: Engines, tmp_path: Path, quant: str
) -> None:
    """Its peak is at most one decoder layer higher, and less memory is allocated afterwards."""
    backend = require_served()
    dense, sparse = tmp_path / "dense", tmp_path / "sparse"
    synth(MODEL, dense, quant=quant)
    synth(MODEL, sparse, quant=quant, pattern=SlidePattern.parse("6:8"))
    stock_loads, sparse_loads = [], []
    for _ in range(ROUNDS):
        stock_loads.append(load(engines, dense, stock=True))
        sparse_loads.append(load(engines, sparse, stock=False))
    seconds = [median(result["seconds"] for result in side) for side in (stock_loads, sparse_loads)]
    peaks = [max(result["peak"] for result in side) / MIB for side in (stock_loads, sparse_loads)]
    resident = [side[0]["after"] / MIB for side in (stock_loads, sparse_loads)]
    spread = [sorted(round(result["seconds"], 2) for result in side) for side in (stock_loads, sparse_loads)]
    print(
        f"{quant} by {backend}: stock {seconds[0]:.2f} s {spread[0]}, peak {peaks[0]:.0f} MiB, then {resident[0]:.0f}; "
        f"6:8, {seconds[1]:.2f} s {spread[1]}, peak {peaks[1]:.0f} MiB, then {resident[1]:.0f}; "
        f"a layer {LAYER_MIB:.0f} MiB"
    )
    assert peaks[1] <= peaks[0] + LAYER_MIB
    assert resident[0] - resident[1] >= SEEN * (1 - PACKED) * LAYERS * LAYER_MIB
    assert seconds[1] <= TIMES * seconds[0]
