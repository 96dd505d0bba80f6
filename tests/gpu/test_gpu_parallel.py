"""Tensor and pipeline parallelism on two and four GPUs, against stock vLLM with the same parallelism.

INT8 in float16 is compared bitwise, as on one GPU: each rank's layers give stock's bits, and ranks are summed in one
order. A row-parallel shard of K = 256 or 704 has 128 or 352 columns: full blocks of 4 and 8, but not of 6 and 10.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from gpu_engines import (
    Engine,
    GpuEngines,
    compiled_beside_stock,
    differences,
    greedy,
    mean_error,
    needs,
    require_only_rounding,
    teacher_forced,
)

TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two GPUs are needed")
pytestmark = [pytest.mark.gpu, pytest.mark.vllm, pytest.mark.slow, TWO]

AT_A_TIME = 6  # two processes each, whose all-reduces wait for one another across time slices of the GPUs
TP = Engine("int8", "6:8", "float16", parallel="tp")
PP = Engine("int8", "6:8", "float16", parallel="pp")
FOUR = pytest.mark.skipif(torch.cuda.device_count() < 4, reason="four GPUs are needed")


def beside_stock(engine: Engine) -> list[Engine]:
    return [replace(engine, system="stock", layout="dense"), engine]


@needs(beside_stock)
@pytest.mark.parametrize(
    "engine",
    [
        *(pytest.param(replace(TP, pattern=p), id=f"TP {p}") for p in ("2:4", "4:6", "6:8", "8:10")),
        *(pytest.param(replace(TP, pattern=p, layout="slided"), id=f"TP {p} slided") for p in ("2:4", "6:8")),
        pytest.param(replace(TP, mode="graphs"), id="TP 6:8 graphs"),
        pytest.param(replace(TP, pattern="2:4@50%"), id="TP 2:4@50%"),
        pytest.param(replace(TP, skip="down_proj"), id="TP unpruned beside pruned"),
        pytest.param(replace(PP, pattern="2:4@50%"), id="PP 2:4@50%"),
        pytest.param(PP, id="PP 6:8"),
        pytest.param(replace(PP, layout="slided"), id="PP 6:8 slided"),
        pytest.param(replace(PP, mode="graphs"), id="PP 6:8 graphs"),
        *(
            pytest.param(
                Engine("int8", pattern, "float16", parallel=ranks), id=f"{ranks} {pattern}", marks=FOUR
            )
            for ranks in ("tp4", "pp2tp2")
            for pattern in ("dense", "6:8", "2:4", "2:4@50%")
        ),
    ],
)
def test_int8_float16_outputs_equal_stock(gpu_engines: GpuEngines, engine: Engine) -> None:
    stock, sparse = gpu_engines.answers(beside_stock(engine))
    assert not differences(greedy(sparse), greedy(stock))
    assert not differences(teacher_forced(sparse), teacher_forced(stock))


def fp8() -> list[Engine]:
    engine = replace(TP, quant="fp8", dtype="bfloat16")
    return [replace(engine, system=name) for name in ("stock", "exact", "sparse", "rounded")]


@needs(fp8)
def test_fp8_error_is_at_most_twice_that_of_stock(gpu_engines: GpuEngines) -> None:
    """See the test of this name in test_gpu_serving.py."""
    stock, exact, sparse, rounded = map(teacher_forced, gpu_engines.answers(fp8()))
    same_arithmetic = rounded if gpu_engines.backend == "cusparselt" else exact
    sparse_error, stock_error = mean_error(sparse, same_arithmetic), mean_error(stock, exact)
    print(f"FP8 6:8 TP=2: mean error {sparse_error:.2e}, stock's {stock_error:.2e}")
    assert sparse_error <= 2 * stock_error


@needs(compiled_beside_stock)
@pytest.mark.parametrize("engine", [pytest.param(TP, id="TP"), pytest.param(PP, id="PP")])
def test_compiled_tokens_match_eager(gpu_engines: GpuEngines, engine: Engine) -> None:
    require_only_rounding(*gpu_engines.answers(compiled_beside_stock(engine)))
