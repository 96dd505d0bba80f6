"""Norms and activations fused with quantization in compiled models on a GPU, against unfused models."""

from __future__ import annotations

from dataclasses import replace

import pytest
from gpu_engines import (
    Engine,
    GpuEngines,
    compiled_beside_stock,
    needs,
    require_only_rounding,
    same_share,
    teacher_forced,
)

pytestmark = [pytest.mark.gpu, pytest.mark.vllm, pytest.mark.slow]


def engines(quant: str) -> list[Engine]:
    """Return stock engines, eager and compiled, and ours: eager, compiled, and compiled with fusion."""
    engine = Engine(quant, "6:8", "bfloat16")
    return [*compiled_beside_stock(engine), replace(engine, mode="compiled", fuse=True)]


@needs(engines)
@pytest.mark.parametrize("quant", ["int8", "fp8"])
def test_fused_models_match_compiled_ones(gpu_engines: GpuEngines, quant: str) -> None:
    """The bound is that of models compiled without fusion, as fusion may change only the same roundings."""
    stock, stock_compiled, eager, compiled, fused = gpu_engines.answers(engines(quant))
    share = same_share(teacher_forced(fused), teacher_forced(compiled))
    of_stock = same_share(teacher_forced(stock), teacher_forced(stock_compiled))
    print(
        f"{quant}: {share:.2%} of the top-1 tokens are those without fusion, "
        f"stock's compiled are its eager ones in {of_stock:.2%}"
    )
    require_only_rounding(stock, stock_compiled, eager, fused)
