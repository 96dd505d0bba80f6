"""The reference implementation: exact accumulators at the extremes, the order of scaling, empty shapes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import Case, assert_same_bits, cases
from torch import Tensor

from slidesparse import reference
from slidesparse.pattern import SlidePattern
from slidesparse.quantize import FP8, INT8, quantize_rows
from slidesparse.reference import dequant_bias, matmul, quant_slide
from slidesparse.slide import lift, slide

SIX_EIGHT = SlidePattern.parse("6:8")
LARGE = 3 * reference.EXACT_COLUMNS + 4  # three chunks of columns and a remainder


def two_four(rows: int, columns: int, seed: int) -> Tensor:
    """Return random INT8 weights with two non-zeros in every group of four."""
    generator = torch.Generator().manual_seed(seed)
    keep = torch.rand(rows, columns // 4, 4, generator=generator).argsort(-1) < 2
    values = torch.randint(-128, 128, keep.shape, generator=generator)
    return torch.where(keep, values, 0).to(INT8).reshape(rows, columns)


def exact(q: Tensor, w: Tensor) -> Tensor:
    return torch.from_numpy(q.numpy().astype(np.int64) @ w.numpy().astype(np.int64).T)


@pytest.mark.parametrize("tokens", [2, 6])
def test_int8_sums_of_many_columns_or_outputs_are_exact(tokens: int) -> None:
    """With one 126 among 127s, a chunk of a few more columns would have an odd sum above 2^24."""
    for columns in (LARGE - 1, LARGE):
        q, w = (torch.full((rows, columns), 127, dtype=INT8) for rows in (tokens, 3))
        w[:, 0] -= 1
        assert matmul(q, w).tolist() == [[127 * (127 * columns - 1)] * 3] * tokens
    outputs = reference._CHUNK_ELEMENTS // reference.EXACT_COLUMNS + 3
    q = torch.full((tokens, reference.EXACT_COLUMNS + 4), -128, dtype=INT8)
    w = two_four(outputs, reference.EXACT_COLUMNS + 4, seed=0)
    assert torch.equal(matmul(q, w).long(), exact(q, w))


@pytest.mark.parametrize("dtype", [INT8, FP8])
@pytest.mark.parametrize("shape", [(0, 4, 8), (1, 0, 8), (3, 0, 8), (2, 3, 0), (9, 3, 0), (0, 0, 0)])
def test_empty_products_are_zero(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    m, n, k = shape
    acc = matmul(torch.zeros(m, k).to(dtype), torch.zeros(n, k).to(dtype))
    assert acc.tolist() == [[0] * n] * m
    assert acc.dtype == (torch.int32 if dtype == INT8 else torch.float32)
    y = dequant_bias(acc, torch.ones(m, 1), torch.ones(n, 1), torch.arange(float(n)), torch.bfloat16)
    assert y.tolist() == [list(range(n))] * m


@given(cases(dtypes=(INT8,)), st.integers(0, 6), st.integers(0, 2**20))
def test_slided_layer_has_the_dense_accumulators(case: Case, tokens: int, seed: int) -> None:
    pattern, phase, w = case
    x = torch.randn(tokens, w.shape[1], generator=torch.Generator().manual_seed(seed)).bfloat16()
    q, scale = quant_slide(x, pattern.layout(w.shape[1], phase), INT8)
    dense, dense_scale = quantize_rows(x, INT8)
    assert_same_bits(scale, dense_scale)
    assert_same_bits(q, lift(dense, pattern.layout(dense.shape[1], phase)))
    assert torch.equal(matmul(q, slide(w, pattern, phase)).long(), exact(dense, w))


@pytest.mark.parametrize("outputs", [5, reference._CHUNK_ELEMENTS // 1536 + 2])
def test_fp8_sums_are_within_the_error_of_float32_summation(outputs: int) -> None:
    """E4M3 products are exact in float32 (4 + 4 bits); K' additions err by at most K' * 2^-24 * sum |a b|."""
    generator = torch.Generator().manual_seed(outputs)
    q = quantize_rows(torch.randn(3, 1024, generator=generator), FP8)[0]
    pruned = two_four(outputs, 1024, seed=1).float() / 128  # 2:4 obeys 6:8 too
    w = quantize_rows(pruned, FP8)[0]
    lifted, slided = lift(q, SIX_EIGHT.layout(q.shape[1])), slide(w, SIX_EIGHT)
    assert slided.shape[1] == 1536
    acc = matmul(lifted, slided)
    assert acc.dtype == torch.float32
    a, b = q.float().double(), w.float().double()
    bound = 1536 * 2.0**-24 * (a.abs() @ b.abs().t())
    assert bool(((acc.double() - a @ b.t()).abs() <= bound).all())
    assert bool(((a @ b.t()).abs() > bound).any(-1).all())  # fails for a token whose result is zero


def test_dequant_scales_by_the_channel_first_and_rounds_once() -> None:
    """The result is (acc * s_w) * s_x + bias in float32, rounded once; the other order differs on some inputs."""
    generator = np.random.default_rng(0)
    acc = generator.integers(-(2**30), 2**30, (64, 96)).astype(np.int32)
    s_x, s_w = generator.random((64, 1), np.float32), generator.random((96, 1), np.float32)
    bias = generator.standard_normal(96).astype(np.float32) * 2.0**28
    expected = (acc.astype(np.float32) * s_w.T) * s_x + bias.astype(np.float32)
    tensors = [torch.from_numpy(value) for value in (acc, s_x, s_w, bias.astype(np.float32))]
    assert_same_bits(dequant_bias(*tensors, torch.float32, "cpu"), torch.from_numpy(expected))
    assert_same_bits(dequant_bias(*tensors, torch.bfloat16, "cpu"), torch.from_numpy(expected).bfloat16())
    # CUDA fuses the last product and the bias: exact in the 64-bit mantissa of a long double, rounded once
    product = (acc.astype(np.float32) * s_w.T).astype(np.longdouble) * s_x.astype(np.longdouble)
    fused = (product + bias.astype(np.longdouble)).astype(np.float32)
    assert int((fused != expected).sum()) > 100
    assert_same_bits(dequant_bias(*tensors, torch.float32, "cuda"), torch.from_numpy(fused))
    token_first = (acc.astype(np.float32) * s_x) * s_w.T + bias.astype(np.float32)
    assert int((expected != token_first).sum()) > 100
    twice = (torch.from_numpy(expected - bias).bfloat16() + tensors[3].bfloat16()).bfloat16()
    assert not torch.equal(twice, torch.from_numpy(expected).bfloat16())


def test_dequant_accepts_scale_shapes_and_bias_dtypes() -> None:
    acc = torch.tensor([[3, -5], [7, 11]], dtype=torch.int32)
    s_x, s_w = torch.tensor([[0.5], [2.0]]), torch.tensor([0.25, 4.0])
    expected = [[0.375, -10.0], [3.5, 88.0]]
    assert dequant_bias(acc, s_x, s_w, None, torch.float32).tolist() == expected
    assert dequant_bias(acc, s_x, s_w[:, None], None, torch.float32).tolist() == expected
    bias = torch.tensor([1.0, 2.0], dtype=torch.bfloat16)
    assert dequant_bias(acc, s_x, s_w, bias, torch.float32).tolist() == [[1.375, -8.0], [4.5, 90.0]]
    assert acc.tolist() == [[3, -5], [7, 11]]
