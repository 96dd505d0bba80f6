"""The Hopper kernels on a GPU, after any kernel and in every configuration: INT8 bitwise, FP8 within a bound."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import cast

import pytest
import torch
import triton
import triton.language as tl
from configurations import Configuration
from gpu_layers import PackedLayer, codes, dense_sums, exact, forget_plans, gpu, layer, normal
from strategies import assert_same_bits
from torch import Tensor

from slidesparse import gemm, reference
from slidesparse.gemm.hopper import native
from slidesparse.gemm.hopper.backend import Hopper
from slidesparse.gemm.problem import TWO_FOUR, Layer, LibraryError, Problem, Tensors
from slidesparse.pattern import SlidePattern
from slidesparse.prune import prune
from slidesparse.quantize import FP8, INT8

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("on_hopper")]

PATTERNS = ["2:4", "4:6", "6:8", "8:10", "10:12", "12:14", "14:16", "2_inf"]
TOKENS = [1, 3, 8, 9, 16, 17, 64, 100, 129, 300, 2048, 16384]
N, K = 1001, 1003  # both odd
OUTPUTS = (torch.bfloat16, torch.float16)
UNITS = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}  # half an ulp, relative
MAX_CONFIGURATIONS = 4096  # more than the number of configurations
BACKEND = cast("Hopper", gemm.get("hopper"))


def scales(count: int, seed: int) -> Tensor:
    """Return scales [count, 1] of the typical size for INT8 weights and activations."""
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.rand(count, 1, generator=generator, device=gpu()) * 0.01 + 0.001


def scaled(sums: Tensor, made: Layer, scale_x: Tensor, bias: Tensor | None, out: torch.dtype) -> Tensor:
    """Return the epilogue's result for exact sums."""
    return reference.dequant_bias(sums.to(torch.int32), scale_x, made.scale, bias, out, "cuda")


@pytest.fixture(scope="module", params=PATTERNS)
def int8_layer(request: pytest.FixtureRequest) -> PackedLayer:
    return layer("hopper", request.param, INT8, N, K)


@pytest.mark.parametrize("m", TOKENS)
def test_int8_products_are_exact(int8_layer: Layer, m: int) -> None:
    """Sums and their scaling are exact for both outputs, without a bias and with one of each type."""
    q, scale_x = codes(m, K, seed=m), scales(m, m)
    lifted, sums = int8_layer.lifted(q), exact(q, int8_layer.weight)
    for out in OUTPUTS:
        for bias in (None, normal(1, N, 1)[0].to(out), normal(1, N, 2, torch.float32)[0]):
            output = int8_layer.product(lifted, scale_x, bias, out)
            assert_same_bits(output, scaled(sums, int8_layer, scale_x, bias, out))
    assert_same_bits(int8_layer.product(lifted, scale_x, bias, out), output)  # deterministic


def test_int8_sums_above_2_24_are_rounded_once() -> None:
    """Sums between 2^24 and 2^25 are rounded once, to float32, as by the other backends."""
    m, n, k = 17, 64, 4096
    made = layer("hopper", "2:4", INT8, n, k)
    weight = torch.where(made.weight == 0, 0, made.weight.clamp(100, 127) | codes(n, k, 3) & 3).to(INT8)
    q, ones = codes(m, k, seed=m).clamp(100, 127) | codes(m, k, 4) & 3, torch.ones(64, 1, device=gpu())
    sums = exact(q, weight)
    assert int(sums.min()) > 2**24
    small = ones * 2.0**-12  # keeps the result in the range of FP16
    other = replace(made, packed=BACKEND.pack(weight, TWO_FOUR), scale=small)
    output = other.product(q, ones[:m], None, torch.float16)
    expected = reference.dequant_bias(sums.to(torch.int32), ones[:m], small, None, torch.float16, "cuda")
    assert_same_bits(output, expected)


@pytest.mark.parametrize("m", [1, 17, 100, 2048])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_fp8_error_is_at_most_twice_that_of_the_dense_kernel(pattern: str, m: int) -> None:
    """With scales of 1, one rounding adds to the sum's own error: up to UNIT / (1 - UNIT) * |r| for a result r. For
    FP16, scale_w is a power of two that makes sums small without rounding.
    """
    packed_layer = layer("hopper", pattern, FP8, N, K)
    q = normal(m, K, seed=m, dtype=torch.float32).mul_(100).clamp_(-448, 448).to(FP8)
    sums = exact(q, packed_layer.weight)
    of_dense = (dense_sums(q, packed_layer.weight).double() - sums).abs().max()
    shrink = torch.full((N, 1), 2.0**-10, device=gpu())
    ones = torch.ones(m, 1, device=gpu())
    for out in OUTPUTS:
        output = replace(packed_layer, scale=shrink).product(packed_layer.lifted(q), ones, None, out)
        output = output.double() * 2.0**10
        tiny = 2.0**-25 * 2.0**10 if out == torch.float16 else 0.0  # half of FP16's subnormal step
        beyond = (output - sums).abs() - output.abs() * (UNITS[out] / (1 - UNITS[out])) - tiny
        assert beyond.max() <= 2 * of_dense


def configurations(n: int, columns: int, m: int) -> list[str]:
    """Return all configurations that have a kernel and fit; INT8 and FP8 hardly differ."""
    layer_of_columns = Layer.of(n, columns, TWO_FOUR, 0, INT8, 16)
    return [text for text, _ in native.candidates(layer_of_columns, m, MAX_CONFIGURATIONS)]


def test_configurations_fit_as_many_ctas_as_named() -> None:
    """Configurations have as many resident CTAs as their text names, and fill SMs if they have no clusters.

    With 256 tokens, stream-K uses one of five pipeline stages to stage outputs, while split-K has all five, as it
    stages its sums in the ring of stages.
    """
    sms = torch.cuda.get_device_properties(gpu()).multi_processor_count
    texts = {text for m in (1, 16, 32, 64, 128, 1024) for text in configurations(37888, 5376, m)}
    by_cluster: dict[int, set[int]] = {}
    assert texts
    for text in texts:
        configuration, fit = Configuration.parse(text), native.fit(text, INT8)
        assert str(configuration) == text
        assert native.fit(text, FP8).stages == fit.stages >= 3, text
        resident_ctas = fit.clusters * configuration.cluster
        assert sms * (configuration.resident - 1) < resident_ctas <= 4 * sms, text
        if configuration.cluster == 1:
            assert fit.clusters % sms == 0, text
        elif configuration.resident == 1:
            by_cluster.setdefault(configuration.cluster, set()).add(fit.clusters)
    print(f"clusters at a time by their size: {dict(sorted(by_cluster.items()))}")
    assert native.fit("stream:2x256/2/1", INT8).stages == 4
    for splits in (1, 2, 4, 8):
        assert native.fit(f"split:2x256/1x{splits}/1", INT8).stages == 5, splits


@pytest.mark.parametrize(
    ("m", "pattern"), [(1, "6:8"), (64, "6:8"), (64, "2:4"), (3000, "6:8"), (3000, "2:4")]
)
def test_product_waits_for_codes_of_the_kernel_before(m: int, pattern: str) -> None:
    """Tokens change from call to call, in memory that earlier calls have used."""
    packed_layer = layer("hopper", pattern, INT8, 1024, 3584)
    inputs = [normal(m, 3584, seed) * (seed + 1) for seed in range(4)]
    expected = []
    for x in inputs:
        q, scale_x = packed_layer.quantized(x)
        torch.cuda.synchronize()
        expected.append(packed_layer.product(q, scale_x, None, torch.bfloat16))
        torch.cuda.synchronize()
    mismatches = torch.zeros((), dtype=torch.int64, device=gpu())
    for i in range(100):
        mismatches += (packed_layer.linear(inputs[i % 4]) != expected[i % 4]).sum()
        q, scale_x = packed_layer.quantized(inputs[i % 4])  # the same by Triton's kernel
        mismatches += (packed_layer.product(q, scale_x, None, torch.bfloat16) != expected[i % 4]).sum()
    assert int(mismatches) == 0


@pytest.fixture(scope="module")
def reused_operands() -> tuple[Layer, Tensor, Tensor, list[Tensor], list[Tensor], list[Tensor]]:
    """Return a layer, memory for codes and scales, and several codes, scales and their outputs."""
    packed_layer, m = layer("hopper", "2:4", INT8, 256, 16384), 256
    sources = [codes(m, 16384, seed) for seed in range(3)]
    sizes = [scales(m, seed) for seed in range(3)]
    torch.cuda.synchronize()
    expected = [packed_layer.product(q, s, None, torch.bfloat16) for q, s in zip(sources, sizes, strict=True)]
    torch.cuda.synchronize()
    return packed_layer, torch.empty_like(sources[0]), torch.empty_like(sizes[0]), sources, sizes, expected


def test_product_waits_for_kernels_of_torch(reused_operands: tuple) -> None:  # type: ignore[type-arg]
    """One elementwise kernel writes the codes, long enough to be overtaken, and another writes the scales."""
    packed_layer, q, scale_x, sources, sizes, expected = reused_operands
    mismatches = torch.zeros((), dtype=torch.int64, device=gpu())
    for i in range(200):
        j = i % 3
        if i % 2:
            torch.mul(sizes[j], 1, out=scale_x)
            torch.bitwise_or(sources[j], 0, out=q)
        else:
            torch.bitwise_or(sources[j], 0, out=q)
            torch.mul(sizes[j], 1, out=scale_x)
        mismatches += (packed_layer.product(q, scale_x, None, torch.bfloat16) != expected[j]).sum()
    assert int(mismatches) == 0


def test_product_in_a_graph_waits_for_copies_and_joins(reused_operands: tuple) -> None:  # type: ignore[type-arg]
    """The product follows a copy, a memory set, or another stream, or is the first node of the graph."""
    packed_layer, q, scale_x, sources, sizes, expected = reused_operands
    stream, side_stream, graph = torch.cuda.Stream(), torch.cuda.Stream(), torch.cuda.CUDAGraph()
    first_codes, zeros = sources[0].clone(), torch.zeros_like(q)
    torch.cuda.synchronize()

    def product(codes_: Tensor, scale: Tensor) -> Tensor:
        return packed_layer.product(codes_, scale, None, torch.bfloat16)

    with torch.cuda.stream(stream):
        product(first_codes, sizes[0])
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        first_output = product(first_codes, sizes[0])
        scale_x.copy_(sizes[1])
        q.copy_(sources[1])
        copied = product(q, scale_x)
        zeros.zero_()
        nothing = product(zeros, scale_x)
        side_stream.wait_stream(stream)
        with torch.cuda.stream(side_stream):
            torch.bitwise_or(sources[2], 0, out=q)
            torch.mul(sizes[2], 1, out=scale_x)
        stream.wait_stream(side_stream)
        joined = product(q, scale_x)
    for _ in range(50):
        graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(first_output, expected[0])
    assert torch.equal(copied, expected[1])
    assert not bool(nothing.any())
    assert torch.equal(joined, expected[2])


class Streamed:
    """A stream-K product of a layer [n, k] and ``m`` tokens; several run side by side if it has few tiles."""

    def __init__(self, n: int, k: int, m: int, prefix: str = "stream:") -> None:
        self.layer, self.scale_x = layer("hopper", "2:4", INT8, n, k), scales(m, 1)
        name = next(text for text in configurations(n, k, m) if text.startswith(prefix))
        self.plan = BACKEND.plan(Problem("int8", "bf16", n, k, m, "both"), gpu(), name)
        self.inputs = [codes(m, k, seed) for seed in (1, 2)]
        sums = [exact(q, self.layer.weight) for q in self.inputs]
        self.expected = [scaled(one, self.layer, self.scale_x, None, torch.bfloat16) for one in sums]
        handle = self.plan.handle
        self.scratch_bytes = native.library().slidesparse_hopper_scratch_bytes(handle, m)
        self.mismatches = torch.zeros(2, dtype=torch.int64, device=gpu())

    def run(self, i: int) -> None:
        """Multiply input i and count the elements that differ from the expected ones."""
        out = torch.full_like(self.expected[i], torch.nan)
        used = torch.full((self.scratch_bytes,), 1, dtype=torch.uint8, device=gpu())
        del used  # the product's scratch memory, with flags that are not zero
        self.plan(Tensors(self.inputs[i], self.layer.packed, out, self.layer.scale, self.scale_x))
        self.mismatches[i] += (out != self.expected[i]).sum()

    def capture(self, i: int, times: int, stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
        """Capture products of input i on a stream, which is in use by nothing else."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            graph.capture_begin()
            for _ in range(times):
                self.run(i)
            graph.capture_end()
        return graph


@pytest.fixture(scope="module")
def few_tiles() -> Streamed:
    made = Streamed(192, 2048, 64)
    made.run(0)
    torch.cuda.synchronize()
    return made


def test_graphs_of_one_stream_run_at_the_same_time(few_tiles: Streamed) -> None:
    """Each exchanges partial sums through memory of its own, and so do products outside of graphs meanwhile."""
    few_tiles.mismatches.zero_()
    captured_on, streams = torch.cuda.Stream(), [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    graphs = [few_tiles.capture(i, 8, captured_on) for i in range(2)]
    torch.cuda.synchronize()
    for _ in range(200):
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        with torch.cuda.stream(captured_on):
            q = few_tiles.inputs[0]
            out = torch.empty_like(few_tiles.expected[0])
            few_tiles.plan(Tensors(q, few_tiles.layer.packed, out, few_tiles.layer.scale, few_tiles.scale_x))
    torch.cuda.synchronize()
    assert few_tiles.mismatches.tolist() == [0, 0]
    assert torch.equal(out, few_tiles.expected[0])


@triton.jit
def occupy(stop):  # type: ignore[no-untyped-def]
    """Keep SMs busy until ``stop`` [1] int32 is not zero."""
    while tl.load(stop, volatile=True) == 0:
        pass


def test_stream_k_ends_while_another_kernel_holds_half_of_the_sms() -> None:
    """CTAs that find no room start later, and none that is resident waits for them.

    A CTA of this configuration takes nearly all registers of an SM, so that it cannot join 1024 other threads.
    """
    product = Streamed(1024, 4096, 512, "stream:2x256")
    product.run(0)
    busy, stop = torch.cuda.Stream(), torch.zeros(1, dtype=torch.int32, device=gpu())
    sms = torch.cuda.get_device_properties(gpu()).multi_processor_count
    occupy[(1,)](stop.fill_(1), num_warps=32)  # compiles it
    stop.zero_()
    torch.cuda.synchronize()
    with torch.cuda.stream(busy):
        occupy[(sms // 2,)](stop, num_warps=32)
    ended, deadline = torch.cuda.Event(), time.monotonic() + 60
    for i in range(20):
        product.run(i % 2)
    ended.record()
    while not ended.query() and time.monotonic() < deadline:
        time.sleep(0.01)
    in_time, held = ended.query(), not busy.query()
    with torch.cuda.stream(torch.cuda.Stream()):
        stop.fill_(1)
    torch.cuda.synchronize()
    assert (in_time, held) == (True, True)
    assert product.mismatches.tolist() == [0, 0]


def test_plan_serves_any_token_count_during_capture() -> None:
    """A missing plan raises an error during capture, which leaves the capture and the layer usable."""
    planned, unplanned = layer("hopper", "6:8", INT8, 256, 256), layer("hopper", "4:6", INT8, 320, 256)
    planned.linear(normal(16, 256, 0))
    inputs = [normal(m, 256, m) for m in (1, 17, 777, 3000)]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
        outputs = [planned.linear(x) for x in inputs]
    graph.replay()
    torch.cuda.synchronize()
    for x, y in zip(inputs, outputs, strict=True):
        assert_same_bits(y, planned.linear(x))
    forget_plans()
    x, ones = normal(5, 256, 1), torch.zeros(8, device=gpu())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
        ones.add_(1)
        with pytest.raises(RuntimeError, match="while a CUDA graph is being captured; run the layer once"):
            unplanned.linear(x)
    graph.replay()
    assert ones.tolist() == [1.0] * 8
    assert bool(unplanned.linear(x).any())


def test_second_gpu_gives_equal_outputs() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU only")
    weight, x = codes(200, 300, 1), normal(33, 300, 2)
    pattern = SlidePattern(8)
    weight = prune(weight, pattern)
    outputs = []
    for device in ("cuda:0", "cuda:1"):  # the first stays the current one
        made = BACKEND.layer(200, 300, pattern, 0, INT8)
        packed = BACKEND.pack(weight.to(device), pattern)
        scale = torch.ones(200, 1, device=device)
        outputs.append(PackedLayer("hopper", made, weight, packed, scale).linear(x.to(device)).cpu())
    assert_same_bits(outputs[1], outputs[0])


@pytest.fixture
def small() -> PackedLayer:
    return layer("hopper", "2:4", INT8, 64, 64)


def test_launch_refusals_raise_library_error(small: PackedLayer) -> None:
    """Refused are codes that TMA cannot read, and shapes with too few tiles."""
    problem, name = Problem("int8", "bf16", 64, 64, 8, "both"), "split:1x8/1x1/1"
    plan = BACKEND.plan(problem, gpu(), name)
    q, scale_x = small.quantized(normal(8, 64, 0))
    out = torch.empty(8, 64, dtype=torch.bfloat16, device=gpu())
    shifted = torch.zeros(q.numel() + 1, dtype=INT8, device=gpu())[1:].view(q.shape)
    with pytest.raises(LibraryError, match=r"cuTensorMapEncodeTiled refused a matrix \[8, 128\]"):
        plan(Tensors(shifted, small.packed, out, small.scale, scale_x))
    plan(Tensors(q, small.packed, out, small.scale, scale_x))
    assert torch.equal(out, small.product(q, scale_x, None, torch.bfloat16))


def test_more_tiles_than_the_grid_limit(small: PackedLayer) -> None:
    """The test runs a configuration that tuning would not choose."""
    m = 8 * 65536
    plan = BACKEND.plan(Problem("int8", "bf16", 64, 64, m, "both"), gpu(), "split:1x8/1x1/1")
    q, scale_x = codes(m, 64, 1), torch.ones(m, 1, device=gpu())
    out = torch.empty(m, 64, dtype=torch.bfloat16, device=gpu())
    plan(Tensors(q, small.packed, out, small.scale, scale_x))
    assert torch.equal(out, small.product(q, scale_x, None, torch.bfloat16))
