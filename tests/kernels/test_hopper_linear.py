"""Linear operators of the Hopper backend on stand-in kernels: arguments, results, refusals, profiling."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hopper_stand_in import StandIn
from torch import Tensor

from slidesparse import ops, profiling, reference
from slidesparse.gemm.backend import TWO_FOUR, LayerSpec
from slidesparse.gemm.hopper.backend import Hopper
from slidesparse.gemm.problem import LibraryError
from slidesparse.kernels import RmsNorm
from slidesparse.pattern import SlidePattern
from slidesparse.prune import prune
from slidesparse.quantize import FP8, INT8

pytest_plugins = ("hopper_fixtures",)

OURS = getattr(torch.ops, ops.NAMESPACE)
BACKEND = Hopper()


def integers(m: int, k: int, seed: int) -> Tensor:
    """Return integers [m, k] up to 7, with a 7 in each row: their FP8 codes are 64 times as large, and exact."""
    x = torch.randint(-7, 8, (m, k), generator=torch.Generator().manual_seed(seed)).float()
    x[:, 0] = 7
    return x


@pytest.mark.parametrize("dtype", [INT8, FP8])
@pytest.mark.parametrize("phase", [0, 3])
def test_linear_equals_reference(standing_in: StandIn, dtype: torch.dtype, phase: int) -> None:
    """One call equals two steps for every type of input, output and bias, also with gaps between rows."""
    n, k, pattern = 70, 150, SlidePattern(8)
    generator = torch.Generator().manual_seed(1)
    weight = prune(torch.randint(-8, 9, (n, k), generator=generator).float(), pattern, phase=phase).to(dtype)
    spec = LayerSpec(n, k, pattern, phase, dtype, torch.bfloat16)
    packed, scale_w = BACKEND.pack(spec, weight), torch.rand(n, 1, generator=generator)
    columns = spec.columns(BACKEND.alignment)
    assert columns % 128 == 0  # bytes that TMA reads at a time
    windows = (spec.layout.length, phase, dtype, columns)
    for m in (1, 3, 40):
        wide = integers(m, k + 10, m)
        for source in (torch.bfloat16, torch.float16, torch.float32):
            for x in (wide[:, :k].to(source), wide.to(source)[:, 4 : k + 4], wide[:, :k].to(source).t().t()):
                quantized, scale_x = reference.quant_slide(x, SlidePattern(4).layout(k), dtype, "cuda")
                sums = reference.matmul(quantized[:, :k], weight)
                for out in (torch.bfloat16, torch.float16):
                    for bias in (None, torch.randn(n).to(out), torch.randn(n)):
                        actual = OURS.linear(x, packed, scale_w, bias, *windows, out, "hopper")
                        expected = reference.dequant_bias(sums, scale_x, scale_w, bias, out, "cuda")
                        assert torch.equal(actual, expected)
                        q, scale = BACKEND.quantize(x, *windows)
                        product = BACKEND.scaled_matmul(q, scale, packed, scale_w, bias, out)
                        assert torch.equal(product, expected)
    assert standing_in.layers == 3 * 3 * 3 * 2 * 3
    # one plan each of layer, product and quantization, for all numbers of tokens and types
    assert len(standing_in.served) == 3


def test_noncontiguous_columns_are_copied(standing_in: StandIn) -> None:
    packed, ones = identity()
    x = integers(64, 64, 0).bfloat16()
    arguments = (packed, ones, None, 4, 0, INT8, 128, "hopper")
    assert torch.equal(ops.linear(x.t(), *arguments), ops.linear(x.t().contiguous(), *arguments))


def identity() -> tuple[Tensor, Tensor]:
    """Return a packed identity matrix [64, 64] and its scales."""
    spec = LayerSpec(64, 64, TWO_FOUR, 0, INT8, torch.bfloat16)
    return BACKEND.pack(spec, torch.eye(64, dtype=INT8)), torch.ones(64, 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_fused_norms_and_activations_equal_reference(standing_in: StandIn, dtype: torch.dtype) -> None:
    """The producer of the call is checked, and the tensor of its sum, also with gaps between rows."""
    of_layer = (*identity(), None, 4, 0, INT8, 128, dtype, "hopper")
    generator = torch.Generator().manual_seed(0)
    for m in (1, 5, 40):
        wide = torch.randn(m, 144, generator=generator).to(dtype)
        norm = torch.randn(64, generator=generator).to(dtype)
        for x, residual in ((wide[:, :64], wide[:, 70:134]), (wide[:, :64].contiguous(),) * 2):
            normed, total = reference.rms_norm(x, norm, 1e-5, residual)
            cases = (
                (OURS.rms_norm_linear(x, norm, 1e-5, *of_layer), reference.rms_norm(x, norm, 1e-5)[0]),
                (OURS.silu_mul_linear(wide[:, :128], *of_layer), reference.silu_mul(wide[:, :128])),
                (OURS.add_rms_norm_linear(x, residual, norm, 1e-5, *of_layer)[0], normed),
            )
            for actual, expected_input in cases:
                assert torch.equal(actual, OURS.linear(expected_input, *of_layer))
            assert torch.equal(OURS.add_rms_norm_linear(x, residual, norm, 1e-5, *of_layer)[1], total)
            last = standing_in.quantizations[-1]
            assert (last["stride"], last["residual_stride"]) == (x.stride(0), residual.stride(0))
            assert (last["eps"], last["stream"]) == (1e-5, 77)


def test_fused_operators_refuse_mismatched_arguments(standing_in: StandIn) -> None:
    of_layer = (*identity(), None, 4, 0, INT8, 128, torch.bfloat16, "hopper")
    x = torch.ones(2, 64, dtype=torch.bfloat16)
    for message, operator, arguments in (
        (r"norm's weight .* \(63,\)", OURS.rms_norm_linear, (x, x[0, :63], 1e-5)),
        (r"norm's weight is torch\.float32", OURS.rms_norm_linear, (x, x[0].float(), 1e-5)),
        (
            r"norm's weight .* strides \(2,\)",
            OURS.rms_norm_linear,
            (x, torch.ones(128).bfloat16()[::2], 1e-5),
        ),
        (r"residual is torch\.float16", OURS.add_rms_norm_linear, (x, x.half(), x[0], 1e-5)),
        (r"residual .* \(1, 64\)", OURS.add_rms_norm_linear, (x, x[:1], x[0], 1e-5)),
        (r"residual .* strides \(1, 2\)", OURS.add_rms_norm_linear, (x, x.t().contiguous().t(), x[0], 1e-5)),
        ("x .* 127", OURS.silu_mul_linear, (torch.ones(2, 127).bfloat16(),)),
    ):
        with pytest.raises(LibraryError, match=message):
            operator(*arguments, *of_layer)
    total = torch.empty(64, 2, dtype=x.dtype).t()
    with pytest.raises(LibraryError, match=r"sum .* strides \(1, 2\)"):
        BACKEND.quantize(x, 4, 0, INT8, 64, RmsNorm(x[0], 1e-5, x, total))


def test_linear_refuses_invalid_arguments(standing_in: StandIn) -> None:
    packed, ones = identity()
    x, spec = torch.ones(2, 64, dtype=torch.bfloat16), LayerSpec(64, 64, TWO_FOUR, 0, INT8, torch.bfloat16)
    with pytest.raises(LibraryError, match=r"torch\.float32"):
        ops.linear(x.float(), packed, ones, None, 4, 0, INT8, 128, "hopper")
    with pytest.raises(LibraryError, match="5120 bytes .* 10240"):
        ops.linear(torch.ones(2, 144).bfloat16(), packed, ones, None, 4, 0, INT8, 256, "hopper")
    with pytest.raises(LibraryError, match=r"torch\.float64"):
        BACKEND.quantize(x.double(), 4, 0, INT8, 64)
    with pytest.raises(LibraryError, match=r"torch\.int16"):
        BACKEND.quantize(x, 4, 0, torch.int16, 64)
    q, scale_x = BACKEND.quantize(x, 4, 0, INT8, 64)
    wide = torch.ones(128)
    for bias, scale, message in (
        (wide[::2], ones, r"bias .* strides \(2,\)"),
        (wide[:5], ones, r"bias .* \(5,\)"),
        (wide[:64].double(), ones, r"bias is torch\.float64"),
        (None, wide[::2, None], r"scale_w .* strides \(2, 1\)"),
    ):
        with pytest.raises(LibraryError, match=message):
            BACKEND.linear(spec, x, packed, scale, bias)
        with pytest.raises(LibraryError, match=message):
            BACKEND.scaled_matmul(q, scale_x, packed, scale, bias, torch.bfloat16)
    standing_in.error = b"the kernels' words"
    with pytest.raises(LibraryError, match="the kernels' words"):
        ops.linear(x, packed, ones, None, 4, 0, INT8, 128, "hopper")
    with pytest.raises(LibraryError, match="the kernels' words"):
        BACKEND.quantize(x, 4, 0, INT8, 64)


def test_linear_of_no_tokens_launches_nothing(standing_in: StandIn) -> None:
    packed, ones = identity()
    x = torch.zeros(0, 64, dtype=torch.bfloat16)
    output = ops.linear(x, packed, ones, None, 4, 0, INT8, 128, "hopper")
    assert (output.shape, output.dtype, standing_in.layers) == ((0, 64), torch.bfloat16, 0)


def test_threads_share_one_plan(standing_in: StandIn) -> None:
    """The plan is created once, and calls keep no state."""
    packed, ones = identity()

    def many(seed: int) -> bool:
        x = integers(3, 64, seed).to(torch.bfloat16)
        x[1] *= seed
        return all(
            torch.equal(ops.linear(x, packed, ones, None, 4, 0, INT8, 128, "hopper"), expected(x))
            for _ in range(30)
        )

    def expected(x: Tensor) -> Tensor:
        q, scale = reference.quant_slide(x, SlidePattern(4).layout(64), INT8, "cuda")
        return reference.dequant_bias(q.to(torch.int32), scale, ones, None, torch.bfloat16, "cuda")

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(many, range(1, 9)))
    assert len(standing_in.plans) == 1


def test_profiling_times_the_stages_separately(standing_in: StandIn) -> None:
    packed, ones = identity()
    x = integers(5, 64, 0).to(torch.bfloat16)
    arguments = (x, packed, ones, None, 4, 0, INT8, 128, "hopper")
    expected = ops.linear(*arguments)
    profiler = profiling.enable()
    try:
        assert torch.equal(ops.linear(*arguments), expected)
        profiler.collect()
        ((key, entry),) = profiler.times.entries.items()
    finally:
        profiling.disable()
    assert key == ("64x128", 8)
    assert [us > 0 for us in entry.us.values()] == [True, True, False]
    assert entry.algorithm == standing_in.candidates[0]
    assert standing_in.layers == 1


def test_opcheck_of_layer_operators(standing_in: StandIn) -> None:
    packed, ones = identity()
    for m in (0, 1, 5):
        x = integers(m, 64, m).to(torch.bfloat16) if m else torch.zeros(0, 64, dtype=torch.bfloat16)
        norm = torch.ones(64, dtype=torch.bfloat16)
        for bias in (None, torch.randn(64)):
            of_layer = (packed, ones, bias, 4, 0, INT8, 128, torch.float16, "hopper")
            for operator, arguments in (
                (OURS.linear, (x,)),
                (OURS.rms_norm_linear, (x, norm, 1e-5)),
                (OURS.add_rms_norm_linear, (x, x + 1, norm, 1e-5)),
                (OURS.silu_mul_linear, (torch.cat([x, x], 1),)),
            ):
                torch.library.opcheck(operator.default, (*arguments, *of_layer))
