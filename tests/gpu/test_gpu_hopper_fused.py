"""Hopper layers fused with the norm or activation before them, on a GPU: as exact as Triton's kernels.

A norm has one inexact number per row, the factor 1 / sqrt(mean square): another summation order and an approximate root
change its last bits.  Everything after it is exact, so a kernel must equal, bit for bit, the reference for *some*
factor within the bound below of the exact one.  The activation has no inexact number.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch
from gpu_layers import SILU_MUL, RmsNorm, gpu, hopper_quantize, layer, normal
from strategies import assert_same_bits
from token_rows import HOPPER_GEOMETRIES, HOPPER_LARGE, INF, NAN, assert_same_codes, rows, without_nan_signs
from torch import Tensor

from slidesparse import ops, reference
from slidesparse.gemm.problem import Layer
from slidesparse.pattern import SlideLayout, SlidePattern
from slidesparse.quantize import FP8, INT8

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("on_hopper")]

OURS = getattr(torch.ops, ops.NAMESPACE)
ALIGNMENT = 128  # of rows of codes
CASES = [(12, *geometry) for geometry in HOPPER_GEOMETRIES]
CASES += [(m, *geometry) for geometry in (*HOPPER_LARGE, ("4:6", 8192, 0)) for m in (12, 150, 600)]
TYPES = [(torch.bfloat16, INT8), (torch.bfloat16, FP8), (torch.float16, INT8), (torch.float16, FP8)]


EPS = 1e-6
# A sum of squares errs by no more than its longest chain of additions, each by 2^-24: at most 16 steps of 4, then a
# tree over at most 2^15 lanes, so 80.  The root halves that and adds its own error and those of the mean and of eps: 4.
REACH = 44  # units of the last place, of 2^-24 to 2^-23


def factors(sums: Tensor) -> Tensor:
    """[M, 1] float32: the exact 1 / sqrt(mean square + eps); 0 where float32 cannot hold the square."""
    mean = sums.double().pow(2).mean(-1, keepdim=True)
    mean = torch.where(mean > torch.finfo(torch.float32).max, INF, mean)
    return (mean + EPS).rsqrt().float()


def moved(factor: Tensor, ulps: int) -> Tensor:
    return (factor.view(torch.int32) + ulps).view(torch.float32)


def assert_norm_of_some_factor(
    actual: tuple[Tensor, Tensor], sums: Tensor, weight: Tensor, source: torch.dtype, layout: SlideLayout
) -> int:
    """Check that each row of codes and scales is the reference's for a factor within REACH.

    Returns the largest distance that was needed, in units of the last place.
    """
    codes, scales = without_nan_signs(actual[0].cpu()), actual[1].cpu()
    exact = factors(sums)
    unexplained = torch.ones(sums.shape[0], dtype=torch.bool)
    for ulps in sorted(range(-REACH, REACH + 1), key=abs):
        remaining = unexplained.nonzero().flatten()
        normed = (sums[remaining] * moved(exact[remaining], ulps) * weight.float()).to(source)
        q, scale = reference.quant_slide(normed, layout, actual[0].dtype)
        equal = without_nan_signs(q) == codes[remaining]
        if actual[0].dtype == FP8:  # a row of NaNs: its padding may be NaN too
            equal |= exact[remaining].isnan() & (codes[remaining] == 0x7F)
        matches = equal.all(1) & (scale == scales[remaining]).flatten()
        unexplained[remaining[matches]] = False
        if not unexplained.any():
            return abs(ulps)
    raise AssertionError(f"rows {unexplained.nonzero().flatten().tolist()} are no norm of x: exact {exact}")


@cache
def compiled_activation() -> Callable[[Tensor], Tensor]:
    """Return silu(gate) * up as Inductor compiles vLLM's SiluAndMul, once for all shapes of a dtype."""

    def act(x: Tensor) -> Tensor:
        d = x.shape[-1] // 2
        return torch.nn.functional.silu(x[..., :d]) * x[..., d:]

    return torch.compile(act, dynamic=True)


def wide_of(x: Tensor, start: int) -> Tensor:
    """Return x in rows with gaps of NaN, which begin ``start`` elements after a multiple of 16 bytes."""
    wide = torch.full((x.shape[0], x.shape[1] + 24), NAN, dtype=x.dtype, device=x.device)
    view = wide[:, start : start + x.shape[1]]
    view.copy_(x)
    return view


@pytest.mark.parametrize(("source", "dtype"), TYPES)
@pytest.mark.parametrize(("m", "pattern", "k", "phase"), CASES)
def test_quantize_with_norms_is_within_rounding(
    m: int, pattern: str, k: int, phase: int, source: torch.dtype, dtype: torch.dtype
) -> None:
    """Each row has a factor within rounding of the exact one, and the sum is rounded once."""
    generator = torch.Generator().manual_seed(k)
    x, residual = rows(m, k, source), torch.randn(m, k, generator=generator).to(source)
    weight = torch.randn(k, generator=generator).to(source)
    windows = Layer.of(0, k, SlidePattern.parse(pattern), phase, dtype, ALIGNMENT)
    layout = windows.layout
    exact, sums = x.float(), x.float() + residual.float()
    for place in (lambda t: t, lambda t: wide_of(t, 8), lambda t: wide_of(t, 3)):
        tokens, addend = place(x.to(gpu())), place(residual.to(gpu()))
        total = torch.full((m, k), NAN, dtype=source, device=gpu())
        q, scale = hopper_quantize(tokens, windows, RmsNorm(weight.to(gpu()), EPS))
        assert_norm_of_some_factor((q[:, : layout.slided], scale), exact, weight, source, layout)
        q, scale = hopper_quantize(tokens, windows, RmsNorm(weight.to(gpu()), EPS, addend, total))
        assert_norm_of_some_factor((q[:, : layout.slided], scale), sums, weight, source, layout)
        finite = sums.isfinite().all(1).to(gpu())
        assert not bool(q[finite, layout.slided :].view(INT8).any())
        expected = sums.to(source)
        assert torch.equal(total.cpu().isnan(), expected.isnan())
        assert_same_bits(total.cpu().nan_to_num(nan=0.0), expected.nan_to_num(nan=0.0))


@pytest.mark.parametrize(("source", "dtype"), TYPES)
@pytest.mark.parametrize(("m", "pattern", "k", "phase"), CASES)
def test_quantize_with_activations_equals_inductor(
    m: int, pattern: str, k: int, phase: int, source: torch.dtype, dtype: torch.dtype
) -> None:
    """Codes are bitwise those of vLLM's SiluAndMul compiled by Inductor."""
    x = torch.cat([rows(m, k, source), rows(m, k, source).flip(1)], 1).to(gpu())
    windows = Layer.of(0, k, SlidePattern.parse(pattern), phase, dtype, ALIGNMENT)
    layout = windows.layout
    expected = reference.quant_slide(compiled_activation()(x).cpu(), layout, dtype)
    for tokens in (x, wide_of(x, 8), wide_of(x, 3)):
        q, scale = hopper_quantize(tokens, windows, SILU_MUL)
        assert_same_codes((q[:, : layout.slided], scale), expected)
        assert not bool(q[:, layout.slided :].view(INT8).any())


def test_quantize_with_activations_of_every_bfloat16_gate() -> None:
    """Every BF16 gate is multiplied by values of all sizes."""
    gate = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    for size in (1.0, 1e-3, 30.0, INF):
        up = (normal(1, 2**16, 3, torch.float32)[0] * size).to(torch.bfloat16)
        x = torch.stack([gate.to(gpu()), up], 1).reshape(64, 1024, 2).transpose(1, 2).reshape(64, 2048)
        expected = reference.quant_slide(compiled_activation()(x).cpu(), SlidePattern(6).layout(1024), INT8)
        q, scale = hopper_quantize(x, Layer.of(0, 1024, SlidePattern(6), 0, INT8, ALIGNMENT), SILU_MUL)
        assert_same_codes((q[:, : expected[0].shape[1]], scale), expected)


@pytest.mark.parametrize("dtype", [INT8, FP8])
@pytest.mark.parametrize(("pattern", "k"), [("6:8", 1003), ("4:6", 1024), ("2:4", 2048), ("6:8", 8200)])
def test_fused_operators_equal_two_calls(pattern: str, k: int, dtype: torch.dtype) -> None:
    """One call is bitwise equal to two."""
    n = 648
    packed_layer = layer("hopper", pattern, dtype, n, k)
    for m in (1, 17, 64, 300, 2049):
        for source in (torch.bfloat16, torch.float16):
            x, residual = (normal(m, k, seed, source) for seed in (1, 2))
            gate_up = normal(m, 2 * k, 4, source)
            norm, bias = normal(1, k, 3, source)[0], normal(1, n, 1)[0].to(source)
            total = torch.empty_like(x)
            parts = []
            inputs = (x, RmsNorm(norm, EPS)), (x, RmsNorm(norm, EPS, residual, total)), (gate_up, SILU_MUL)
            for tokens, producer in inputs:
                q, scale_x = hopper_quantize(tokens, packed_layer.layer, producer)
                parts.append(packed_layer.product(q, scale_x, bias, source))
            expected = [*parts[:2], total, parts[2]]
            of_layer = packed_layer.arguments(bias, source)
            actual = [
                OURS.rms_norm_linear(x, norm, EPS, *of_layer),
                *OURS.add_rms_norm_linear(x, residual, norm, EPS, *of_layer),
                OURS.silu_mul_linear(gate_up, *of_layer),
            ]
            for output, expected_output in zip(actual, expected, strict=True):
                assert bool(expected_output.any())
                assert_same_bits(output, expected_output)


def test_graph_of_decoder_blocks_equals_eager() -> None:
    """As in a decoder, the sum of one layer is the residual of the next, and kernels overlap."""
    k = 1024
    up_layer, down_layer = layer("hopper", "6:8", INT8, 2 * k, k), layer("hopper", "4:6", INT8, k, k)
    norm = normal(1, k, 3)[0]
    up, down = (packed_layer.arguments(None, torch.bfloat16) for packed_layer in (up_layer, down_layer))

    def model(tokens: Tensor) -> tuple[Tensor, Tensor]:
        residual = tokens * 0.5
        for _ in range(4):
            gate_up, residual = OURS.add_rms_norm_linear(tokens, residual, norm, EPS, *up)
            tokens = OURS.silu_mul_linear(gate_up * 2.0**-9, *down)
        return tokens, residual

    for m in (1, 64, 300):
        static = normal(m, k, 1)
        model(static)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = model(static)
        for seed in range(5):
            static.copy_(normal(m, k, seed))
            graph.replay()
            for output, expected in zip(out, model(normal(m, k, seed)), strict=True):
                assert bool(expected.isfinite().all())
                assert bool(expected.any())
                assert_same_bits(output, expected)
