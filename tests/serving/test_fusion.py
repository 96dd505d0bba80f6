"""The compiler pass that fuses norms and activations with quantization, on graphs like those of vLLM."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from slidesparse import ops, reference
from slidesparse.gemm.problem import Layer
from slidesparse.pattern import SlidePattern
from slidesparse.quantize import INT8

pytestmark = pytest.mark.vllm

M, K, EPS = 7, 40, 1e-5
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
N = 12
LAYER = Layer.of(N, K, SlidePattern(8), 0, INT8, 4)
Results = tuple[Tensor, ...]


def quant(x: Tensor) -> Results:
    return (layer(x),)


def layer(x: Tensor, backend: str = "reference") -> Tensor:
    weight = (torch.arange(N * LAYER.columns) % 17 - 8).to(INT8).view(N, LAYER.columns)
    return ops.linear(x, weight, torch.arange(1, N + 1).float().view(N, 1), None, LAYER, backend)


def norm(x: Tensor, weight: Tensor | None, part: int | None = None) -> Tensor:
    """Return vLLM's norm, as it is in the graph until after the pass."""
    normed: Tensor = torch.ops.vllm_ir.rms_norm(x, weight, EPS, part)
    return normed


def add_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    normed, total = torch.ops.vllm_ir.fused_add_rms_norm(x, residual, weight, EPS)
    return normed, total


def decomposed_silu_mul(x: Tensor) -> Tensor:
    k = x.shape[-1] // 2
    return torch.nn.functional.silu(x[..., :k]) * x[..., k:]


def block(x: Tensor, y: Tensor, gate_up: Tensor, weight: Tensor) -> Results:
    """Run the path of a residual through a layer, with each product replaced by an addition."""
    first = quant(norm(x, weight))
    normed, residual = add_norm(y, x, weight)
    second = quant(normed)
    third = quant(decomposed_silu_mul(gate_up))
    normed, residual = add_norm(y + 1, residual, weight)
    return *first, *second, *third, *quant(normed), residual, *quant(y)


def expected_of_block(x: Tensor, y: Tensor, gate_up: Tensor, weight: Tensor) -> Results:
    second, residual = reference.rms_norm(y, weight, EPS, x)
    last, final = reference.rms_norm(y + 1, weight, EPS, residual)
    first = reference.rms_norm(x, weight, EPS)[0]
    act = reference.silu_mul(gate_up)
    return *quant(first), *quant(second), *quant(act), *quant(last), final, *quant(y)


def inputs(dtype: torch.dtype) -> Results:
    generator = torch.Generator().manual_seed(0)
    shapes = ((M, K), (M, K), (M, 2 * K), (K,))
    return tuple(torch.randn(*shape, generator=generator).to(dtype) for shape in shapes)


def traced(run: Callable[..., Any], arguments: Results) -> torch.fx.GraphModule:
    """The graph of ATen operators that Inductor would compile, for any number of tokens."""
    from torch._inductor.decomposition import select_decomp_table
    from vllm import ir  # noqa: F401  registers the operators of norms

    mode = FakeTensorMode(shape_env=ShapeEnv())
    any_tokens = StatelessSymbolicContext([DimDynamic.DUCK, DimDynamic.STATIC])
    fakes = [
        mode.from_tensor(tensor, symbolic_context=any_tokens if tensor.dim() == 2 else None)
        for tensor in arguments
    ]
    with mode:
        return make_fx(run, select_decomp_table())(*fakes)


def fused(run: Callable[..., Any], arguments: Results) -> tuple[dict[str, int], torch.fx.GraphModule]:
    from slidesparse.vllm_patch.fusion import fuse

    module = traced(run, arguments)
    counts = fuse(module.graph)
    module.graph.lint()
    module.recompile()
    return dict(counts), module


BLOCK_COUNTS = {"rms_norm_linear": 1, "add_rms_norm_linear": 2, "silu_mul_linear": 1, "linear": 1}


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_and_activations_are_fused(dtype: torch.dtype) -> None:
    """All nodes of each are replaced, and the graph computes the reference's results."""
    counts, module = fused(block, inputs(dtype))
    assert counts == BLOCK_COUNTS
    assert not [node for node in module.graph.nodes if "vllm_ir" in str(node.target)]
    assert "aten.exp.default" not in [str(node.target) for node in module.graph.nodes]
    for actual, expected in zip(module(*inputs(dtype)), expected_of_block(*inputs(dtype)), strict=True):
        assert torch.equal(actual, expected)


def test_residual_sum_used_before_quantization_is_fused() -> None:
    def run(x: Tensor, y: Tensor, gate_up: Tensor, weight: Tensor) -> Results:
        normed, residual = add_norm(y, x, weight)
        return (residual * 2).sum(), *quant(normed)

    counts, module = fused(run, inputs(torch.bfloat16))
    assert counts == {"add_rms_norm_linear": 1}
    total = inputs(torch.bfloat16)[0] + inputs(torch.bfloat16)[1]
    assert torch.equal(module(*inputs(torch.bfloat16))[0], (total * 2).sum())


def _also_returned(x: Tensor, y: Tensor, gate_up: Tensor, weight: Tensor) -> Results:
    normed = norm(x, weight)
    return normed, *quant(normed)


silu, gelu, HALF = torch.nn.functional.silu, torch.nn.functional.gelu, K // 2
SIMILAR: dict[str, Callable[..., Results]] = {
    "a norm that is also returned": _also_returned,
    "a norm of a part": lambda x, y, g, w: quant(norm(x, w, HALF)),
    "a norm without weight": lambda x, y, g, w: quant(norm(x, None)),
    "a residual of one row": lambda x, y, g, w: quant(add_norm(x[:1], y, w)[0]),
    "GELU": lambda x, y, g, w: quant(gelu(g[:, :K]) * g[:, K:]),
    "swapped halves": lambda x, y, g, w: quant(silu(g[:, K:]) * g[:, :K]),
    "parts that overlap": lambda x, y, g, w: quant(silu(x[:, :HALF]) * g[:, HALF : 2 * HALF]),
    "parts of the columns": lambda x, y, g, w: quant(silu(g[:, :HALF]) * g[:, -HALF:]),
    "a weight of another dtype": lambda x, y, g, w: quant(norm(x.half(), w)),
    "a backend without fusion": lambda x, y, g, w: (layer(norm(x, w), "cusparselt"),),
}


@pytest.mark.parametrize("name", SIMILAR)
def test_similar_subgraphs_are_not_fused(name: str) -> None:
    run = SIMILAR[name]
    before = str(traced(run, inputs(torch.float32)).graph)
    counts, module = fused(run, inputs(torch.float32))
    assert counts == ({} if "backend" in name else {"linear": 1})
    assert str(module.graph) == before
