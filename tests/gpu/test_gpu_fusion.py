"""Norms and activations fused with quantization in compiled models on a GPU, against unfused models."""

from __future__ import annotations

from dataclasses import replace

import pytest
from gpu_engines import Engine, GpuEngines, compiled_beside_stock, needs, require_only_rounding

pytestmark = [pytest.mark.gpu, pytest.mark.vllm, pytest.mark.slow]


def engines(quant: str) -> list[Engine]:
    """Return stock engines, eager and compiled, and ours: eager, and compiled with fusion."""
    engine = Engine(quant, "6:8", "bfloat16")
    return [*compiled_beside_stock(engine)[:3], replace(engine, mode="compiled", fuse=True)]


@needs(engines)
@pytest.mark.parametrize("quant", ["int8", "fp8"])
def test_fused_models_round_as_compiled_ones(gpu_engines: GpuEngines, quant: str) -> None:
    """The bound is that of models compiled without fusion, as fusion may change only the same roundings."""
    stock, stock_compiled, eager, fused = gpu_engines.answers(engines(quant))
    assert fused.summary.endswith("; norms and activations fused")
    require_only_rounding(stock, stock_compiled, eager, fused)
