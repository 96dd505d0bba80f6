"""Norms and activations fused with quantization in a compiled model on a GPU, beside the same model without."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

import pytest
from gpu_engines import (
    Engine,
    GpuEngines,
    compiled_beside_stock,
    needed,
    needs,
    require_only_rounding,
    same_share,
    teacher_forced,
)

pytestmark = [pytest.mark.gpu, pytest.mark.vllm, pytest.mark.slow]


@pytest.fixture(scope="module")
def gpu_engines(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GpuEngines]:
    made = GpuEngines(tmp_path_factory.mktemp("models"), {})
    for engine in needed(request):
        made.start(engine)
    yield made
    made.close()


def engines(quant: str) -> list[Engine]:
    """Stock eager and compiled, ours eager, compiled, and compiled with fusion."""
    ours = Engine(quant, "6:8", "bfloat16")
    return [*compiled_beside_stock(ours), replace(ours, mode="compiled", fuse=True)]


@needs(engines)
@pytest.mark.parametrize("quant", ["int8", "fp8"])
def test_fused_models_match_compiled_ones(gpu_engines: GpuEngines, quant: str) -> None:
    """The bound is that for models compiled without fusion, which may move the same roundings, and no others."""
    stock, stock_compiled, eager, compiled, fused = gpu_engines.answers(engines(quant))
    same = same_share(teacher_forced(fused), teacher_forced(compiled))
    of_stock = same_share(teacher_forced(stock), teacher_forced(stock_compiled))
    print(
        f"{quant}: {same:.2%} of the top-1 tokens are those without fusion, "
        f"stock's compiled are its eager ones in {of_stock:.2%}"
    )
    require_only_rounding(stock, stock_compiled, eager, fused)


@needs(engines)
@pytest.mark.parametrize("quant", ["int8", "fp8"])
def test_all_layers_but_o_proj_are_fused(gpu_engines: GpuEngines, quant: str) -> None:
    """vLLM cuts a model at its attentions; of each piece only what quantizes for o_proj stays as it is."""
    *_, compiled, fused = gpu_engines.answers(engines(quant))
    assert fused.summary.endswith("; norms and activations fused")
    assert "SlideSparse fusion" not in compiled.log
    graphs = re.findall("SlideSparse fusion in a graph: (.*)", fused.log)
    print(graphs)
    found = [{name: int(count) for count, name in re.findall(r"(\d+) (\w+)", graph)} for graph in graphs]
    alone = "linear" if "backend hopper" in fused.summary else "quant_slide"
    fused_names = [f"{before}_{alone}" for before in ("rms_norm", "add_rms_norm", "silu_mul")]
    assert {name for graph in found for name in graph} == {*fused_names, alone}
    for graph in found:
        assert graph.get(alone, 0) == graph.get(f"silu_mul_{alone}", 0)
        assert sum(graph.values()) > graph.get(alone, 0)
