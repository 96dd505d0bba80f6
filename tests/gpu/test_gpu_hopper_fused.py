"""Layers of the Hopper kernels with the norm or activation before them, on a GPU: as exact as Triton's kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import pytest
import torch
from gpu_layers import Layer, gpu, layer, normal, require_hopper
from norms import EPS, assert_norm_of_some_factor, compiled_activation
from strategies import assert_same_bits
from token_rows import GEOMETRIES, INF, LARGE, NAN, assert_same_codes, rows
from torch import Tensor

from slidesparse import gemm, ops, profiling, reference
from slidesparse.gemm.hopper.backend import Hopper
from slidesparse.gemm.problem import LibraryError
from slidesparse.kernels import RmsNorm, SiluMul
from slidesparse.pattern import SlidePattern
from slidesparse.quantize import FP8, INT8

pytestmark = pytest.mark.gpu

OURS = getattr(torch.ops, ops.NAMESPACE)
BACKEND = cast("Hopper", gemm.get("hopper"))
CASES = [(12, *geometry) for geometry in GEOMETRIES]
CASES += [(m, *geometry) for geometry in (*LARGE, ("6:8", 3584, 0), ("4:6", 8192, 0)) for m in (12, 150, 600)]
TYPES = [(torch.bfloat16, INT8), (torch.bfloat16, FP8), (torch.float16, INT8), (torch.float32, FP8)]


@pytest.fixture(autouse=True, scope="module")
def on_hopper() -> None:
    require_hopper()


def wide_of(x: Tensor, first: int) -> Tensor:
    """x in rows with gaps of NaN, which begin ``first`` elements behind a multiple of 16 bytes."""
    wide = torch.full((x.shape[0], x.shape[1] + 24), NAN, dtype=x.dtype, device=x.device)
    found = wide[:, first : first + x.shape[1]]
    found.copy_(x)
    return found


@pytest.mark.parametrize(("source", "dtype"), TYPES)
@pytest.mark.parametrize(("m", "pattern", "k", "phase"), CASES)
def test_quantize_with_norms_is_within_rounding(
    m: int, pattern: str, k: int, phase: int, source: torch.dtype, dtype: torch.dtype
) -> None:
    """Each row is that of some factor next to the exact one; the sum has the one rounding that it may have."""
    generator = torch.Generator().manual_seed(k)
    x, residual = rows(m, k, source), torch.randn(m, k, generator=generator).to(source)
    weight = torch.randn(k, generator=generator).to(source)
    layout = SlidePattern.parse(pattern).layout(k, phase)
    columns = layout.slided + -layout.slided % BACKEND.alignment
    windows = layout.length, layout.phase, dtype, columns
    plain, sums = x.float(), x.float() + residual.float()
    for place in (lambda one: one, lambda one: wide_of(one, 8), lambda one: wide_of(one, 3)):
        tokens, other = place(x.to(gpu())), place(residual.to(gpu()))
        total = torch.full((m, k), NAN, dtype=source, device=gpu())
        q, scale = BACKEND.quantize(tokens, *windows, RmsNorm(weight.to(gpu()), EPS))
        assert_norm_of_some_factor((q[:, : layout.slided], scale), plain, weight, source, layout)
        q, scale = BACKEND.quantize(tokens, *windows, RmsNorm(weight.to(gpu()), EPS, other, total))
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
    """Codes equal bit for bit those of what Inductor makes of vLLM's SiluAndMul."""
    x = torch.cat([rows(m, k, source), rows(m, k, source).flip(1)], 1).to(gpu())
    layout = SlidePattern.parse(pattern).layout(k, phase)
    expected = reference.quant_slide(compiled_activation()(x).cpu(), layout, dtype)
    columns = layout.slided + -layout.slided % BACKEND.alignment
    for tokens in (x, wide_of(x, 8), wide_of(x, 3)):
        q, scale = BACKEND.quantize(tokens, layout.length, layout.phase, dtype, columns, SiluMul())
        assert_same_codes((q[:, : layout.slided], scale), expected)
        assert not bool(q[:, layout.slided :].view(INT8).any())


def test_quantize_with_activations_of_every_bfloat16_gate() -> None:
    """Every BF16 gate there is is multiplied by values of all sizes."""
    gate = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    for size in (1.0, 1e-3, 30.0, INF):
        up = (normal(1, 2**16, 3, torch.float32)[0] * size).to(torch.bfloat16)
        x = torch.stack([gate.to(gpu()), up], 1).reshape(64, 1024, 2).transpose(1, 2).reshape(64, 2048)
        expected = reference.quant_slide(compiled_activation()(x).cpu(), SlidePattern(8).layout(1024), INT8)
        found = BACKEND.quantize(x, 8, 0, INT8, 1536, SiluMul())
        assert_same_codes(found, expected)


class Case(NamedTuple):
    """A layer's input before and what makes it."""

    x: Tensor
    residual: Tensor
    norm: Tensor
    both: Tensor


def case(m: int, k: int, source: torch.dtype) -> Case:
    return Case(
        normal(m, k, 1, source),
        normal(m, k, 2, source),
        normal(1, k, 3, source)[0],
        normal(m, 2 * k, 4, source),
    )


def arguments(made: Layer, bias: Tensor | None, out: torch.dtype) -> tuple[object, ...]:
    windows = made.layout.length, made.layout.phase, made.dtype, made.columns
    return made.packed, made.scale, bias, *windows, out, "hopper"


def run_fused_operators(given: Case, of_layer: tuple[object, ...]) -> list[Tensor]:
    return [
        OURS.rms_norm_linear(given.x, given.norm, EPS, *of_layer),
        *OURS.add_rms_norm_linear(given.x, given.residual, given.norm, EPS, *of_layer),
        OURS.silu_mul_linear(given.both, *of_layer),
    ]


@pytest.mark.parametrize("dtype", [INT8, FP8])
@pytest.mark.parametrize(("pattern", "k"), [("6:8", 1003), ("4:6", 1024), ("2:4", 2048), ("6:8", 8200)])
def test_fused_operators_equal_two_calls(pattern: str, k: int, dtype: torch.dtype) -> None:
    """They are equal bit for bit; when steps are profiled the two are two calls."""
    n = 648
    made = layer("hopper", pattern, dtype, n, k)
    windows = made.layout.length, made.layout.phase, dtype, made.columns
    for m in (1, 17, 64, 300, 2049):
        for source in (torch.bfloat16, torch.float16):
            given = case(m, k, source)
            bias = normal(1, n, 1)[0].to(source)
            total = torch.empty_like(given.x)
            parts = []
            for x, producer in (
                (given.x, RmsNorm(given.norm, EPS)),
                (given.x, RmsNorm(given.norm, EPS, given.residual, total)),
                (given.both, SiluMul()),
            ):
                q, scale_x = BACKEND.quantize(x, *windows, producer)
                parts.append(made.product(q, scale_x, bias, source))
            expected = [*parts[:2], total, parts[2]]
            of_layer = arguments(made, bias, source)
            found = run_fused_operators(given, of_layer)
            profiling.enable()
            try:
                apart = run_fused_operators(given, of_layer)
            finally:
                profiling.disable()
            for one, other, third in zip(found, expected, apart, strict=True):
                assert bool(other.any())
                assert_same_bits(one, other)
                assert_same_bits(one, third)


def test_fused_operators_of_no_tokens() -> None:
    made = layer("hopper", "6:8", INT8, 64, 64)
    for found, width in zip(
        run_fused_operators(case(0, 64, torch.bfloat16), arguments(made, None, torch.bfloat16)),
        (64,) * 4,
        strict=True,
    ):
        assert found.shape == (0, width)


def test_graph_of_decoder_blocks_equals_eager() -> None:
    """As in a decoder, the sum of one layer is the residual of the next, each kernel beside the one in front."""
    k = 1024
    first, second = layer("hopper", "6:8", INT8, 2 * k, k), layer("hopper", "4:6", INT8, k, k)
    norm = normal(1, k, 3)[0]
    up, down = (arguments(one, None, torch.bfloat16) for one in (first, second))

    def model(tokens: Tensor) -> tuple[Tensor, Tensor]:
        residual = tokens * 0.5
        for _ in range(4):
            both, residual = OURS.add_rms_norm_linear(tokens, residual, norm, EPS, *up)
            tokens = OURS.silu_mul_linear(both * 2.0**-9, *down)
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
            for found, expected in zip(out, model(normal(m, k, seed)), strict=True):
                assert bool(expected.isfinite().all())
                assert bool(expected.any())
                assert_same_bits(found, expected)


def test_fused_operators_refuse_mismatched_arguments() -> None:
    """The errors have Python's words, which the backend raises as LibraryErrors."""
    made = layer("hopper", "6:8", INT8, 64, 64)
    given, of_layer = case(3, 64, torch.bfloat16), arguments(made, None, torch.bfloat16)
    x, residual, norm, both = given

    def refuses(words: str, operator: Callable[..., Any], *given: Any) -> None:
        with pytest.raises(RuntimeError, match=words):
            operator(*given, *of_layer)

    refuses(r"norm's weight .* \(63,\)", OURS.rms_norm_linear, x, norm[:63], EPS)
    refuses(r"norm's weight is torch\.float32", OURS.rms_norm_linear, x, norm.float(), EPS)
    refuses(r"residual is torch\.float16", OURS.add_rms_norm_linear, x, residual.half(), norm, EPS)
    refuses(r"residual .* \(2, 64\)", OURS.add_rms_norm_linear, x, residual[:2], norm, EPS)
    refuses("x .* 127", OURS.silu_mul_linear, both[:, :127])
    with pytest.raises(LibraryError, match=r"norm's weight is torch\.float32"):
        BACKEND.quantize(x, 8, 0, INT8, 96, RmsNorm(norm.float(), EPS))
