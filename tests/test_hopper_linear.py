"""A whole layer of the Hopper backend in one call, without its kernels: what is handed over, by the op that serves."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hopper_stand_in import StandIn
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from slidesparse import gemm, ops, profiling, reference
from slidesparse.gemm import hopper, hopper_plans
from slidesparse.gemm.library import LibraryError
from slidesparse.pattern import SlidePattern
from slidesparse.prune import prune
from slidesparse.quantize import FP8, INT8

pytest_plugins = ("hopper_fixtures",)


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


def test_layers_that_are_refused(standing_in: StandIn) -> None:
    packed, ones = gemm.provider("hopper").pack(torch.eye(64, dtype=INT8)), torch.ones(64, 1)
    x = torch.ones(2, 64, dtype=torch.bfloat16)
    with pytest.raises(LibraryError, match="write bf16 or fp16, asked for torch.float32"):
        ops.linear(x.float(), packed, ones, None, 4, 0, INT8, 64, "hopper")
    with pytest.raises(LibraryError, match=r"5120 bytes for products \[2, 144\] .* which takes 10240"):
        ops.linear(x, packed, ones, None, 4, 0, INT8, 144, "hopper")
    with pytest.raises(LibraryError, match="quantize bfloat16, .*; asked for torch.float64 to torch.int8"):
        hopper.PROVIDER.quantize(x.double(), 4, 0, INT8, 64)
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
        ((key, entry),) = profiler.entries.items()
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
