"""A whole layer of the Hopper backend in one call, without its kernels: what is handed over, by the op that serves."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hopper_stand_in import StandIn
from torch import Tensor
from torch._dynamo.testing import CompileCounter

import slidesparse.fused_ops  # noqa: F401  registers operators
from slidesparse import gemm, kernels, ops, profiling, reference
from slidesparse.gemm import hopper, hopper_plans
from slidesparse.gemm.library import LibraryError
from slidesparse.kernels import RmsNorm, SiluMul
from slidesparse.pattern import SlidePattern
from slidesparse.prune import prune
from slidesparse.quantize import FP8, INT8

pytest_plugins = ("hopper_fixtures",)

OURS = getattr(torch.ops, ops.NAMESPACE)


def integers(m: int, k: int, seed: int) -> Tensor:
    """[m, k] of whole numbers up to 7, with one 7 in each row: FP8 codes are 64 times as large, and exact."""
    x = torch.randint(-7, 8, (m, k), generator=torch.Generator().manual_seed(seed)).float()
    x[:, 0] = 7
    return x


@pytest.mark.parametrize("dtype", [INT8, FP8])
@pytest.mark.parametrize("phase", [0, 3])
def test_a_layer_in_one_call_is_that_in_two(standing_in: StandIn, dtype: torch.dtype, phase: int) -> None:
    n, k, pattern = 70, 150, SlidePattern(8)
    generator = torch.Generator().manual_seed(1)
    weight = prune(torch.randint(-8, 9, (n, k), generator=generator).float(), pattern, phase=phase).to(dtype)
    packed = gemm.slide_and_pack("hopper", weight, pattern, phase, "layer")
    scale_w, layout = torch.rand(n, 1, generator=generator), pattern.layout(k, phase)
    arguments = (layout.length, layout.phase, dtype, gemm.columns("hopper", layout.slided))
    for m in (1, 3, 40, 130):
        wide = integers(m, k + 10, m)
        for source in (torch.bfloat16, torch.float16):
            for x in (wide[:, :k].to(source), wide.to(source)[:, :k], wide.to(source)[:, 4 : k + 4]):
                for bias in (None, torch.randn(n).to(source), torch.randn(n)):
                    found = ops.linear(x, packed, scale_w, bias, *arguments, "hopper")
                    q, scale_x = ops.quant_slide(x, *arguments)
                    expected = ops.scaled_matmul(q, scale_x, packed, scale_w, bias, source, "hopper")
                    assert torch.equal(found, expected)
    assert standing_in.linears == 4 * 2 * 3 * 3
    last = standing_in.quantizations[-1]
    assert (last.m, last.k, last.stride, last.stream) == (130, k, k + 10, 77)
    assert (last.dependent, last.trigger) == (hopper_plans.DEPENDENT, 2)


def test_a_layer_of_float32_tokens_may_write_other_types(standing_in: StandIn) -> None:
    packed = gemm.provider("hopper").pack(torch.eye(64, dtype=INT8))
    linear, ones = gemm.linear_provider("hopper").linear, torch.ones(64, 1)
    x = integers(5, 64, 0)
    found = linear(x, packed, ones, None, 4, 0, INT8, 64, torch.float16)
    q, scale = hopper.PROVIDER.quantize(x, 4, 0, INT8, 64)
    assert torch.equal(found, (q.float() * scale).half())
    assert torch.equal(
        linear(x.t()[:5], packed[:5120], ones, None, 4, 0, INT8, 16, torch.float16),
        linear(x.t()[:5].contiguous(), packed[:5120], ones, None, 4, 0, INT8, 16, torch.float16),
    )


def identity() -> tuple[Tensor, Tensor]:
    """A packed weight that multiplies by 1, and its scales."""
    return gemm.provider("hopper").pack(torch.eye(64, dtype=INT8)), torch.ones(64, 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_norms_and_activations_in_the_same_call(standing_in: StandIn, dtype: torch.dtype) -> None:
    """Rows with gaps as well; what the call is told to compute first, and where the sum goes."""
    of_layer = (*identity(), None, 4, 0, INT8, 64, dtype, "hopper")
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
            for found, before in cases:
                assert torch.equal(found, OURS.linear(before, *of_layer))
            assert torch.equal(OURS.add_rms_norm_linear(x, residual, norm, 1e-5, *of_layer)[1], total)
            last = standing_in.quantizations[-1]
            assert (last.before, last.stride, last.residual_stride) == (2, x.stride(0), residual.stride(0))
            assert last.eps == pytest.approx(1e-5, rel=1e-6)


def test_producers_that_do_not_fit_are_refused(standing_in: StandIn) -> None:
    of_layer = (*identity(), None, 4, 0, INT8, 64, torch.bfloat16, "hopper")
    x = torch.ones(2, 64, dtype=torch.bfloat16)
    with pytest.raises(LibraryError, match=r"norm's weight has shape \(63,\); x has 64 columns"):
        OURS.rms_norm_linear(x, x[0, :63], 1e-5, *of_layer)
    with pytest.raises(LibraryError, match=r"residual is torch.float16 \(2, 64\); it must be as x"):
        OURS.add_rms_norm_linear(x, x.half(), x[0], 1e-5, *of_layer)
    with pytest.raises(LibraryError, match=r"residual has strides \(1, 2\); the last must be 1"):
        OURS.add_rms_norm_linear(x, x.t().contiguous().t(), x[0], 1e-5, *of_layer)
    with pytest.raises(LibraryError, match="x has 63 columns; of gates and values there must be as many"):
        OURS.silu_mul_linear(x[:, :63], *of_layer)
    total = torch.empty(64, 2, dtype=x.dtype).t()
    with pytest.raises(LibraryError, match=r"sum has strides \(1, 2\); it must be contiguous"):
        hopper.PROVIDER.quantize(x, 4, 0, INT8, 64, RmsNorm(x[0], 1e-5, x, total))


def test_who_quantizes(standing_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's kernels: long rows of many tokens as they are, and norms whose weight is of another type."""
    asked: list[object] = []

    def quantize(
        x: Tensor, length: int, phase: int, dtype: torch.dtype, columns: int, *rest: object
    ) -> object:
        asked.append(rest[-1])
        return torch.zeros(x.shape[0], columns, dtype=dtype), torch.ones(x.shape[0], 1)

    monkeypatch.setattr(kernels, "quantize", quantize)
    monkeypatch.setattr(hopper, "TRITON_TOKENS", 4)
    monkeypatch.setattr(hopper, "TRITON_COLUMNS", 32)
    x, norm = torch.ones(5, 64, dtype=torch.bfloat16), torch.ones(64, dtype=torch.bfloat16)
    wide = RmsNorm(norm.float(), 1e-5)
    for tokens, producer, by_triton in (
        (x, None, True),
        (x[:4], None, False),
        (x[:, :32], None, False),
        (x, RmsNorm(norm, 1e-5), False),
        (x, SiluMul(), False),
        (x[:1], wide, True),
        (x[:1], RmsNorm(torch.ones(64, 2, dtype=x.dtype)[:, 0], 1e-5), True),
    ):
        before = len(standing_in.quantizations)
        hopper.PROVIDER.quantize(tokens, 4, 0, INT8, 64, producer)
        assert (len(standing_in.quantizations) == before) is by_triton
    assert asked[:2] == [None, wide]
    assert len(asked) == 3


def test_layers_that_are_refused(standing_in: StandIn) -> None:
    packed, ones = gemm.provider("hopper").pack(torch.eye(64, dtype=INT8)), torch.ones(64, 1)
    x = torch.ones(2, 64, dtype=torch.bfloat16)
    with pytest.raises(LibraryError, match="write bf16 or fp16, asked for torch.float32"):
        ops.linear(x.float(), packed, ones, None, 4, 0, INT8, 64, "hopper")
    with pytest.raises(LibraryError, match=r"5120 bytes for products \[2, 144\] .* which takes 10240"):
        ops.linear(x, packed, ones, None, 4, 0, INT8, 144, "hopper")
    with pytest.raises(LibraryError, match="quantize bfloat16, .*; asked for torch.float64 to torch.int8"):
        hopper.PROVIDER.quantize(x.double(), 4, 0, INT8, 64)
    q, scale_x = hopper.PROVIDER.quantize(x, 4, 0, INT8, 64)
    wide = torch.ones(128)
    for bias, scale, words in (
        (
            wide[::2],
            ones,
            r"bias is torch.float32 \(64,\) with strides \(2,\) on cpu; it must hold 64 elements of",
        ),
        (wide[:5], ones, r"bias is torch.float32 \(5,\)"),
        (wide[:64].double(), ones, "bias is torch.float64"),
        (None, wide[::2, None], r"scale_w is torch.float32 \(64, 1\) with strides \(2, 1\)"),
    ):
        with pytest.raises(LibraryError, match=words):
            hopper.PROVIDER.linear(x, packed, scale, bias, 4, 0, INT8, 64, torch.bfloat16)
        with pytest.raises(LibraryError, match=words):
            hopper.PROVIDER.scaled_matmul(q, scale_x, packed, scale, bias, torch.bfloat16)
    standing_in.error = b"words"
    with pytest.raises(LibraryError, match="words, by configuration s"):
        ops.linear(x, packed, ones, None, 4, 0, INT8, 64, "hopper")
    with pytest.raises(LibraryError, match=r"words, by x \(2, 64\) torch.bfloat16"):
        hopper.PROVIDER.quantize(x, 4, 0, INT8, 64)
    with pytest.raises(gemm.BackendError, match="backend reference has no whole layers, hopper has"):
        torch.ops.slidesparse.linear(x, packed, ones, None, 4, 0, INT8, 64, torch.bfloat16, "reference")


def test_no_tokens_call_nothing(standing_in: StandIn) -> None:
    packed = gemm.provider("hopper").pack(torch.eye(64, dtype=INT8))
    x = torch.zeros(0, 64, dtype=torch.bfloat16)
    found = ops.linear(x, packed, torch.ones(64, 1), None, 4, 0, INT8, 64, "hopper")
    assert (found.shape, found.dtype, standing_in.linears) == ((0, 64), torch.bfloat16, 0)


def test_backends_with_whole_layers_are_known_by_name() -> None:
    found = {name for name in gemm.PROVIDERS if isinstance(gemm.provider(name), gemm.LinearProvider)}
    assert found == set(gemm.FUSED)


def test_threads_have_structures_of_their_own(standing_in: StandIn) -> None:
    """What a thread writes into its call no other sees."""
    packed, ones = gemm.provider("hopper").pack(torch.eye(64, dtype=INT8)), torch.ones(64, 1)

    def many(seed: int) -> bool:
        x = integers(3, 64, seed).to(torch.bfloat16)
        x[1] *= seed
        return all(
            torch.equal(ops.linear(x, packed, ones, None, 4, 0, INT8, 64, "hopper"), expected(x))
            for _ in range(30)
        )

    def expected(x: Tensor) -> Tensor:
        q, scale = reference.quant_slide(x, SlidePattern(4).layout(64), INT8, "cuda")
        return reference.dequant_bias(q.to(torch.int32), scale, ones, None, torch.bfloat16, "cuda")

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(many, range(1, 9)))


def test_profiling_times_the_parts_apart(standing_in: StandIn) -> None:
    packed = gemm.provider("hopper").pack(torch.eye(64, dtype=INT8))
    x = integers(5, 64, 0).to(torch.bfloat16)
    arguments = (x, packed, torch.ones(64, 1), None, 4, 0, INT8, 64, "hopper")
    whole = ops.linear(*arguments)
    profiler = profiling.enable()
    try:
        assert torch.equal(ops.linear(*arguments), whole)
        profiler.collect()
        ((key, entry),) = profiler.times.entries.items()
    finally:
        profiling.disable()
    assert key == ("64x64", 8)
    assert [us > 0 for us in entry.us.values()] == [True, True, False]
    assert entry.algorithm.startswith("s")
    assert standing_in.linears == 1


def test_opcheck_linear(standing_in: StandIn) -> None:
    packed, ones = gemm.provider("hopper").pack(torch.eye(64, dtype=INT8)), torch.ones(64, 1)
    for m in (0, 1, 5):
        for bias in (None, torch.randn(64)):
            x = integers(m, 64, m).to(torch.bfloat16) if m else torch.zeros(0, 64, dtype=torch.bfloat16)
            arguments = (x, packed, ones, bias, 4, 0, INT8, 64, torch.float16, "hopper")
            torch.library.opcheck(torch.ops.slidesparse.linear.default, arguments)


def test_opcheck_fused_layers(standing_in: StandIn) -> None:
    of_layer = (*identity(), None, 4, 0, INT8, 64, torch.float16, "hopper")
    for m in (0, 1, 5):
        x = integers(m, 64, m).to(torch.bfloat16) if m else torch.zeros(0, 64, dtype=torch.bfloat16)
        norm = torch.ones(64, dtype=torch.bfloat16)
        for operator, arguments in (
            (OURS.rms_norm_linear, (x, norm, 1e-5)),
            (OURS.add_rms_norm_linear, (x, x + 1, norm, 1e-5)),
            (OURS.silu_mul_linear, (torch.cat([x, x], 1),)),
        ):
            torch.library.opcheck(operator.default, (*arguments, *of_layer))


def test_layers_compile_to_one_graph_for_every_number_of_tokens(standing_in: StandIn) -> None:
    packed, ones = gemm.provider("hopper").pack(torch.eye(64, dtype=INT8)), torch.ones(64, 1)
    counter = CompileCounter()

    def block(x: Tensor) -> Tensor:
        for _ in range(3):
            x = ops.linear(x, packed, ones, None, 4, 0, INT8, 64, "hopper") + 1
        return x

    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend=counter)
    for m in (2, 3, 16, 100):
        x = integers(m, 64, m).to(torch.bfloat16)
        assert torch.equal(compiled(x), block(x))
    assert counter.frame_count == 1
    assert counter.op_count <= 3 * 5
