"""Hopper layers in one call on a GPU: the quantizer bitwise, the layer against float64."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import cast

import pytest
import torch
from configurations import Configuration
from gpu_layers import (
    PackedLayer,
    coded_order,
    codes,
    forget_plans,
    gpu,
    hopper_quantize,
    layer,
    normal,
    run_hopper,
)
from strategies import assert_same_bits
from token_rows import HOPPER_GEOMETRIES, HOPPER_LARGE, assert_same_codes, rows
from torch import Tensor

from slidesparse import gemm, ops, reference
from slidesparse.gemm.hopper import native
from slidesparse.gemm.hopper.backend import Hopper, pack_without_plan
from slidesparse.gemm.problem import NAMES, SIX_EIGHT, TWO_FOUR, Layer, LibraryError
from slidesparse.pattern import SlideLayout, SlidePattern
from slidesparse.prune import prune
from slidesparse.quantize import FP8, INT8

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("on_hopper")]

PATTERNS = ["2:4", "4:6", "6:8", "8:10", "10:12", "12:14", "14:16"]
SOURCES = (torch.bfloat16, torch.float16)
OUTPUTS = (torch.bfloat16, torch.float16)
OURS = getattr(torch.ops, ops.NAMESPACE)
BACKEND = cast("Hopper", gemm.get("hopper"))
UNITS = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}  # half an ulp, relative


def check_codes(x: Tensor, layout: SlideLayout, dtype: torch.dtype, padding: int = 0) -> None:
    """Check codes, padding and scales of x against the reference, for contiguous rows and rows with gaps."""
    columns = layout.slided + -layout.slided % BACKEND.alignment + padding
    windows = Layer(0, layout.in_features, layout.length, layout.phase, int(dtype == FP8), columns)
    q, scale = reference.quant_slide(x, layout, dtype, "cuda")
    wide = torch.full((x.shape[0], x.shape[1] + 24), torch.nan, dtype=x.dtype, device=gpu())
    for start in (8, 3):  # rows at a multiple of 16 bytes, and unaligned rows
        wide.fill_(torch.nan)
        wide[:, start : start + x.shape[1]] = x.to(gpu())
        for tokens in (x.to(gpu()), wide[:, start : start + x.shape[1]]):
            actual, actual_scale = hopper_quantize(tokens, windows)
            assert_same_codes((actual[:, : layout.slided], actual_scale), (q, scale))
            assert not bool(actual[:, layout.slided :].view(INT8).any())


@pytest.mark.parametrize("dtype", [INT8, FP8])
@pytest.mark.parametrize("source", SOURCES)
def test_quantized_codes_equal_reference(source: torch.dtype, dtype: torch.dtype) -> None:
    """Rows have ties, zeros, -0.0, NaN, Inf and subnormals; blocks and phases are of every kind."""
    for pattern, k, phase in (*HOPPER_GEOMETRIES, *HOPPER_LARGE):
        for m in (1, 12, 150 if k < 1000 else 17):
            check_codes(rows(m, k, source), SlidePattern.parse(pattern).layout(k, phase), dtype, 16 * (m % 2))


@pytest.mark.parametrize("dtype", [INT8, FP8])
@pytest.mark.parametrize(("k", "phase"), [(1, 7), (37, 3), (2048, 0), (3584, 4), (18944, 0)])
def test_codes_for_coded_weights_are_in_their_order(k: int, phase: int, dtype: torch.dtype) -> None:
    made = BACKEND.layer(0, k, SIX_EIGHT, phase, dtype)
    for m in (1, 12, 150 if k < 1000 else 17):
        q, scale = reference.quant_slide(rows(m, k, torch.bfloat16), SlidePattern(4).layout(k), dtype, "cuda")
        actual = hopper_quantize(rows(m, k, torch.bfloat16).to(gpu()), made)
        assert_same_codes(actual, (coded_order(q[:, :k], made), scale))


@pytest.mark.parametrize("dtype", [INT8, FP8])
def test_quantized_codes_of_every_16_bit_number(dtype: torch.dtype) -> None:
    for source in OUTPUTS:
        every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(source)
        for top in (448.0 if dtype == FP8 else 127.0, 1.0, 0.37, 3e4, 1e-5):
            x = every[~(every.float().abs() > top)].reshape(1, -1)  # NaN is kept
            check_codes(x, SlidePattern(4).layout(x.shape[1]), dtype)


def run_config(
    packed_layer: PackedLayer, config: str, x: Tensor, bias: Tensor | None, out: torch.dtype
) -> Callable[[], Tensor]:
    """Return a function that runs a layer in one call by a configuration, into an output filled with NaN."""
    plan = native.Plan(packed_layer.layer, config)

    def run() -> Tensor:
        output = torch.full((len(x), packed_layer.layer.n), torch.nan, dtype=out, device=x.device)
        run_hopper(plan.handle, x, packed_layer.packed, packed_layer.scale, bias, output)
        return output

    return run


def expected_of(
    made: PackedLayer, x: Tensor, bias: Tensor | None, out: torch.dtype, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """Return the layer's expected output, and the bound of an FP8 layer's error or None for an exact one.

    Tensor cores truncate FP8 sums to about 14 bits of the largest summand in each step of 32 columns. For these K,
    2^-9 of the sum of magnitudes is above that and above the rounding of float32 sums. Missing or misplaced products
    show in INT8.
    """
    q, scale_x = reference.quant_slide(x.cpu(), SlidePattern(4).layout(x.shape[1]), dtype, "cuda")
    quantized, scale_x = q[:, : x.shape[1]].to(gpu()).float().double(), scale_x.to(gpu())
    weight = made.weight.float().double()
    sums = quantized @ weight.t()
    if dtype == INT8:
        return reference.dequant_bias(sums.to(torch.int32), scale_x, made.scale, bias, out, "cuda"), None
    scales = made.scale.double().t() * scale_x.double()
    y = sums * scales + (0 if bias is None else bias.double())
    slack = (quantized.abs() @ weight.abs().t()) * scales * 2.0**-9
    return y, slack + UNITS[out] * (y.abs() + slack) + 2.0**-24


def random_config(rng: random.Random, packed_layer: PackedLayer) -> str:
    """Return any configuration that has a kernel and fits, also ones that are no candidates for the shape."""
    sms = torch.cuda.get_device_properties(gpu()).multi_processor_count
    while True:
        design = rng.choice(("split", "stream"))
        config = Configuration(
            design,
            strips=rng.choice((1, 2, 3, 4, 5)),
            tokens=rng.choice((8, 16, 32, 64, 128, 256)),
            multicast=rng.choice((1, 2, 4)),
            splits=rng.choice(range(1, 9)) if design == "split" else 1,
            resident=rng.choice((1, 2, 3)),
        )
        try:
            fit = native.fit(str(config), packed_layer.dtype)
            native.Plan(packed_layer.layer, str(config))  # coded weights have fewer kernels
        except LibraryError:
            continue
        if fit.clusters * config.cluster > sms * (config.resident - 1):
            return str(config)


def random_layer(rng: random.Random, index: int, dtype: torch.dtype) -> PackedLayer:
    n, k, phase = rng.randint(1, 900), rng.randint(1, 2000), 0
    pattern: SlidePattern | None = None
    numbers = codes(n, k, index) if dtype == INT8 else normal(n, k, index, torch.float32) * 60
    if rng.random() < 0.4:  # random blocks are dense, the others 2:4
        share = rng.choice((0.0, 0.3, 0.7, 0.95))
        sparse = torch.rand(-(-n // 64), -(-k // 128), device=gpu()) < share
        sparse = sparse.repeat_interleave(64, 0).repeat_interleave(128, 1)[:n, :k]
        weight = torch.where(sparse, prune(numbers, TWO_FOUR), numbers).to(dtype)
    else:
        pattern = SlidePattern.parse(rng.choice(PATTERNS))
        phase = rng.randrange(pattern.length or 1)
        weight = prune(numbers, pattern, phase=phase).to(dtype)
    packed = pack_without_plan(weight, pattern, phase)
    scale = torch.rand(n, 1, device=gpu()) * 0.01 + 0.001
    return PackedLayer("hopper", BACKEND.layer(n, k, pattern, phase, dtype), weight, packed, scale)


def random_case(rng: random.Random, index: int) -> tuple[str, Tensor]:
    """Run a layer of random sizes, types and configuration; return its description and its number of wrong outputs."""
    dtype, source, out = rng.choice((INT8, FP8)), rng.choice(SOURCES), rng.choice(OUTPUTS)
    packed_layer = random_layer(rng, index, dtype)
    (n, k), m = packed_layer.weight.shape, rng.randint(1, rng.choice((16, 130, 600)))
    gap = rng.choice((0, 0, 5, 8))
    x = (normal(m, k + gap, index + 1) * rng.choice((0.01, 1.0, 30.0))).to(source)[:, :k]
    bias = rng.choice((None, normal(1, n, 2)[0].to(out), normal(1, n, 2, torch.float32)[0]))
    config = random_config(rng, packed_layer)
    actual = run_config(packed_layer, config, x, bias, out)()
    expected, bound = expected_of(packed_layer, x, bias, out, dtype)
    if bound is None:
        is_wrong = (actual != expected) | actual.isnan()
    else:
        is_wrong = ~((actual.double() - expected).abs() <= bound)
        if out == torch.float16:  # outputs out of its range are not compared
            is_wrong &= expected.abs() < 6e4
    sparse = f"L {packed_layer.layout.length} phase {packed_layer.layout.phase}, {packed_layer.packed.numel()} bytes"
    name = f"{index}: {source} {NAMES[dtype]} m {m} n {n} k {k} gap {gap} {sparse} {config} {out}"
    return name, is_wrong.sum()


@pytest.mark.parametrize(
    ("count", "seed"),
    [(200, 7), *(pytest.param(1000, seed, marks=pytest.mark.slow) for seed in range(20, 30))],
)
def test_linear_of_random_layers(count: int, seed: int) -> None:
    rng = random.Random(seed)
    names, mismatches = zip(*(random_case(rng, index) for index in range(count)), strict=True)
    counts = torch.stack(mismatches).tolist()
    failures = [f"{name}: {number} wrong" for name, number in zip(names, counts, strict=True) if number]
    assert not failures, f"{len(failures)} of {len(names)}: {failures[:5]}"


@pytest.mark.parametrize("dtype", [INT8, FP8])
@pytest.mark.parametrize("pattern", [*PATTERNS, "2_inf"])
def test_linear_equals_quantize_and_product(pattern: str, dtype: torch.dtype) -> None:
    """Results are bitwise equal, with Triton's kernel before the product of the same configuration."""
    packed_layer = layer("hopper", pattern, dtype, 1001, 1003)
    for m in (1, 3, 17, 64, 129, 300, 2048):
        for source in OUTPUTS:
            x = normal(m, 1003, m, source)
            for bias in (None, normal(1, 1001, 1)[0].to(source)):
                q, scale_x = packed_layer.quantized(x)
                assert_same_bits(packed_layer.linear(x, bias), packed_layer.product(q, scale_x, bias, source))


def test_linear_with_long_rows_of_many_tokens() -> None:
    """Clusters share a row, or divide the work differently for few tokens."""
    packed_layer = layer("hopper", "6:8", INT8, 128, 8200)
    x = normal(2049, 8200, 1)
    expected, _ = expected_of(packed_layer, x, None, torch.bfloat16, INT8)
    for actual in (packed_layer.linear(x), torch.cat([packed_layer.linear(part) for part in x.split(200)])):
        assert int((actual != expected).sum()) == 0


@pytest.mark.parametrize(
    ("m", "n", "k"),
    [
        *[(1, 333, 1000), (1, 4608, 3584), (7, 4608, 512), (16, 65, 8192), (40, 640, 64), (64, 333, 1000)],
        *[(100, 201, 777), (128, 640, 2048), (300, 513, 1536), (1030, 1000, 1000), (5000, 1500, 128)],
    ],
)
@pytest.mark.parametrize("pattern", ["4:6", "6:8"])
def test_linear_in_every_configuration(pattern: str, m: int, n: int, k: int) -> None:
    """Both kernels of consecutive calls are in flight; no configuration is refused."""
    packed_layer = layer("hopper", pattern, INT8, n, k)
    x, bias = normal(m, k, 5), normal(1, n, 6)[0]
    expected, _ = expected_of(packed_layer, x, bias, torch.bfloat16, INT8)
    configs = [text for text, _ in native.candidates(packed_layer.layer, m, 4096)]
    assert any(config.startswith("split:") for config in configs)
    for config in configs:
        print(config)  # a failed launch does not name its configuration
        run = run_config(packed_layer, config, x, bias, torch.bfloat16)
        mismatches = sum((run() != expected).sum() for _ in range(3))
        assert int(mismatches) == 0, config


def test_linear_waits_for_scales_and_biases() -> None:
    """The kernel before the layer writes scale_w and the bias, and CTAs of the product overtake it."""
    packed_layer, m = layer("hopper", "2:4", INT8, 512, 8192), 256
    x = normal(m, 8192, 0)
    sizes = [packed_layer.scale * factor for factor in (1.0, 2.0, 3.0)]
    biases = [normal(1, 512, seed)[0] for seed in range(3)]
    arguments = packed_layer.layer, "hopper"
    expected = []
    for size, bias in zip(sizes, biases, strict=True):
        torch.cuda.synchronize()
        expected.append(ops.linear(x, packed_layer.packed, size, bias, *arguments))
    scale_w, bias = torch.empty_like(sizes[0]), torch.empty_like(biases[0])
    mismatches = torch.zeros((), dtype=torch.int64, device=gpu())
    for i in range(200):
        torch.mul(sizes[i % 3], 1, out=scale_w)
        torch.mul(biases[i % 3], 1, out=bias)
        mismatches += (ops.linear(x, packed_layer.packed, scale_w, bias, *arguments) != expected[i % 3]).sum()
    assert int(mismatches) == 0


def test_linear_on_concurrent_threads_and_streams() -> None:
    packed_layer = layer("hopper", "6:8", INT8, 2048, 2048)
    inputs = [normal(m, 2048, m) for m in (1, 5, 17, 64, 100, 300)]
    expected = [packed_layer.linear(x) for x in inputs]
    torch.cuda.synchronize()

    def work(number: int) -> int:
        with torch.cuda.stream(torch.cuda.Stream()):
            mismatches = torch.zeros((), dtype=torch.int64, device=gpu())
            for i in range(120):
                j = (i + number) % len(inputs)
                mismatches += (packed_layer.linear(inputs[j]) != expected[j]).sum()
            torch.cuda.current_stream().synchronize()
        return int(mismatches)

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(work, range(4))) == [0] * 4


def test_linear_with_more_than_2_31_codes() -> None:
    """Offsets of codes and outputs need 64 bits."""
    m, k, n = 2**15 + 70, 2**16, 2**16 + 8
    packed_layer = layer("hopper", "2:4", INT8, n, 256)
    x = normal(m, 256, 0)
    y = packed_layer.linear(x)
    for part in (slice(0, 64), slice(m - 64, m)):
        assert_same_bits(y[part], packed_layer.linear(x[part].clone()))
    del y
    x = normal(m, k, 1)
    q, scale = hopper_quantize(x, Layer.of(0, k, TWO_FOUR, 0, INT8, 128))
    assert_same_codes((q[-16:], scale[-16:]), reference.quant_slide(x[-16:].cpu(), TWO_FOUR.layout(k), INT8))


def test_packed_layers_run_without_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """This holds for every operator from its first call and any number of tokens, as packing plans the layer."""
    packed_layer, norm = layer("hopper", "6:8", FP8, 300, 1000), normal(1, 1000, 9)[0]
    of_layer = packed_layer.arguments(normal(1, 300, 8)[0], torch.bfloat16)

    def refuse(*_: object) -> None:
        raise AssertionError("Python was asked")

    monkeypatch.setattr(native, "plan_layer", refuse)
    for m in (1, 19, 20, 700, 3000):
        x, residual, gate_up = normal(m, 1000, 1), normal(m, 1000, 2), normal(m, 2000, 3)
        for output in (
            OURS.linear(x, *of_layer),
            OURS.rms_norm_linear(x, norm, 1e-6, *of_layer),
            *OURS.add_rms_norm_linear(x, residual, norm, 1e-6, *of_layer),
            OURS.silu_mul_linear(gate_up, *of_layer),
        ):
            assert bool(output.any())
            assert len(output) == m
    unplanned = layer("hopper", "6:8", FP8, 300, 1000)
    forget_plans()
    with pytest.raises(RuntimeError, match="Python was asked"):
        unplanned.linear(normal(5, 1000, 1))
    monkeypatch.undo()
    assert_same_bits(unplanned.linear(normal(5, 1000, 1)), packed_layer.linear(normal(5, 1000, 1)))


def host_us(call: Callable[[], object]) -> float:
    """Median host time of a call, in microseconds, over 20 loops of 20 calls that do not fill the GPU's queue."""
    samples = []
    for _ in range(25):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(20):
            call()
        samples.append((time.perf_counter() - start) / 20 * 1e6)
    return statistics.median(samples[5:])


@pytest.mark.slow
def test_linear_host_time() -> None:
    """An operator, with two launches, takes the host at most as long as four additions of torch."""
    packed_layer = layer("hopper", "6:8", INT8, 64, 64)
    x, out = normal(16, 64, 0), torch.empty(16, 64, dtype=torch.bfloat16, device=gpu())
    addition = host_us(lambda: out.add_(1))
    operator = host_us(lambda: packed_layer.linear(x))
    print(f"host time of a layer {operator:.1f} us, of an addition {addition:.1f} us")
    assert operator <= 4 * addition
