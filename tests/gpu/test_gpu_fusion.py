"""Norms and activations fused with quantization in compiled models on a GPU, against unfused models."""

from __future__ import annotations

import re
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


@needs(engines)
@pytest.mark.parametrize("quant", ["int8", "fp8"])
def test_all_layers_but_o_proj_are_fused(gpu_engines: GpuEngines, quant: str) -> None:
    """vLLM splits a model at its attention layers; in each piece, only the operator of o_proj is unfused."""
    *_, compiled, fused = gpu_engines.answers(engines(quant))
    assert fused.summary.endswith("; norms and activations fused")
    assert "SlideSparse fusion" not in compiled.log
    graphs = re.findall("SlideSparse fusion in a graph: (.*)", fused.log)
    print(graphs)
    counts = [{name: int(count) for count, name in re.findall(r"(\d+) (\w+)", graph)} for graph in graphs]
    fused_names = {f"{producer}_linear" for producer in ("rms_norm", "add_rms_norm", "silu_mul")}
    assert {name for graph in counts for name in graph} == {"linear", *fused_names}
    for graph in counts:
        assert graph.get("linear", 0) == graph.get("silu_mul_linear", 0)
        assert sum(graph.values()) > graph.get("linear", 0)
