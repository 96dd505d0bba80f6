"""The hand-written N:M kernels on a GPU: exact where sums are exact, else within the bound, and deterministic."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from spmm_cases import PATTERNS, SHAPES, bound, integers, operands

from benchmarks.spmm.kernels import STRIP, VARIANTS, decompress, reference, spmm

pytestmark = pytest.mark.gpu

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
STRIPS = pytest.mark.parametrize("strip", [1, STRIP])
LARGE = [(96, 4608, 3584), (2048, 256, 18944), (1000, 1000, 1000)]  # many tiles, a long K, no full tile


@STRIPS
@DTYPES
@pytest.mark.parametrize(("kept", "group"), PATTERNS)
def test_every_variant_is_exact_on_integers(kept: int, group: int, dtype: torch.dtype, strip: int) -> None:
    for m, n, k in (*SHAPES, (100, 260, 200)):
        x, weight = integers(m, n, k, kept, group, dtype, strip)
        expected = (x.double() @ decompress(weight).double().t()).to(dtype)
        for variant in VARIANTS:
            for splits in (1, 2, 5):
                output = spmm(x.cuda(), weight.to("cuda"), variant, splits)
                assert torch.equal(output.cpu(), expected), (m, n, k, variant, splits)


@STRIPS
@DTYPES
@pytest.mark.parametrize(("m", "n", "k"), LARGE)
def test_large_products_stay_within_the_bound(m: int, n: int, k: int, dtype: torch.dtype, strip: int) -> None:
    """Variants are bitwise equal, and split products are deterministic, as kernels use no atomic additions."""
    for kept, group in ((2, 4), (6, 8)):
        x, weight = operands(m, n, k, kept, group, dtype, strip)
        x, weight = x.cuda(), weight.to("cuda")
        exact, allowed = bound(x, weight)
        baseline = spmm(x, weight, "baseline")
        for variant in VARIANTS:
            assert torch.equal(spmm(x, weight, variant), baseline)
            for splits in (2, 8):
                split_output = spmm(x, weight, variant, splits)
                assert bool(((split_output.double() - exact).abs() <= allowed).all())
                for _ in range(3):
                    assert torch.equal(spmm(x, weight, variant, splits), split_output)
        assert bool(((baseline.double() - exact).abs() <= allowed).all())
        assert float((baseline.double() - exact).abs().amax() / exact.abs().amax()) < 1e-3


@DTYPES
def test_operands_of_any_memory_layout(dtype: torch.dtype) -> None:
    """Tokens are contiguous or strided, unaligned, and between NaN; values and offsets lie within larger tensors."""
    x, weight = integers(13, 21, 90, 2, 4, dtype)
    expected = reference(x, weight)
    wide = torch.full((92, 40), torch.nan, dtype=dtype, device="cuda")
    wide[1:91, 3:16] = x.t().cuda()
    beside = torch.full((92, 16), torch.nan, dtype=dtype, device="cuda")
    beside[1:91, :13] = x.t().cuda()
    values = torch.full((47, 48), torch.nan, dtype=dtype, device="cuda")
    offsets = torch.full((47, 48), 0xFF, dtype=torch.uint8, device="cuda")
    values[:46, :21], offsets[:46, :21] = weight.values.cuda(), weight.offsets.cuda()
    poisoned = replace(weight, values=values[:46, :21], offsets=offsets[:46, :21])
    for tokens in (x.cuda(), wide[1:91, 3:16].t(), beside[1:91, :13].t()):
        for variant in VARIANTS:
            for splits in (1, 2):
                assert torch.equal(spmm(tokens, poisoned, variant, splits).cpu(), expected)


def test_product_in_a_graph_on_another_stream() -> None:
    x, weight = operands(64, 96, 512, 2, 4, torch.float32)
    x, weight = x.cuda(), weight.to("cuda")
    expected = spmm(x, weight, "double", 4)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        spmm(x, weight, "double", 4)
        with torch.cuda.graph(graph, stream=stream):
            output = spmm(x, weight, "double", 4)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(output, expected)
