"""The GEMM libraries called through our extensions: bitwise equal where sums are exact, else within a bound."""

from __future__ import annotations

import pytest
import torch
from gpu_layers import BACKENDS, LIBRARIES, PackedLayer, codes, dense_sums, exact, gpu, layer, normal
from strategies import assert_same_bits
from torch import Tensor

from slidesparse import gemm, reference
from slidesparse.gemm.cublaslt import MAX_UNSCALED_TOKENS
from slidesparse.gemm.problem import DTYPES, TWO_FOUR, Problem, Tensors
from slidesparse.pattern import SlidePattern
from slidesparse.prune import prune
from slidesparse.quantize import FP8, INT8, quantize_rows

pytestmark = pytest.mark.gpu

PATTERNS = ["2:4", "4:6", "6:8", "8:10", "10:12", "12:14", "14:16", "2_inf"]
TOKENS = [1, 3, 16, 17, 64, 100, 2048, 16384]
# N and K are odd.  A sum of K products of at most 2^14 is below 2^24, so it is exact in float32.
N, K = 1001, 1003
UNIT = 2.0**-8  # half an ulp of BF16, 8 significant bits, relative
EXACT_FLOAT32 = 2**24
assert K * 128 * 128 < EXACT_FLOAT32


@pytest.fixture(scope="module", params=PATTERNS)
def int8_layer(request: pytest.FixtureRequest) -> PackedLayer:
    return layer("cusparselt", request.param, INT8, N, K)


def accumulate(packed_layer: PackedLayer, q: Tensor, out: torch.dtype) -> Tensor:
    """Return sums [M, N] of the sparse layer for codes [M, K]."""
    sums: Tensor = gemm.get("cusparselt").accumulate(packed_layer.lifted(q), packed_layer.packed, N, out)  # type: ignore[attr-defined]
    return sums


@pytest.mark.parametrize("m", TOKENS)
def test_int8_sums_are_exact(int8_layer: PackedLayer, m: int) -> None:
    q = codes(m, K, seed=m)
    expected = exact(q, int8_layer.weight).to(torch.int32)
    assert_same_bits(accumulate(int8_layer, q, torch.int32), expected)
    assert_same_bits(dense_sums(q, int8_layer.weight), expected)


@pytest.mark.parametrize("backend", LIBRARIES)
def test_int8_sums_above_2_24_are_rounded_at_most_once(backend: str) -> None:
    """Sums are between 2^24 and 2^25, where float32 cannot represent the odd half.

    cuBLASLt's INT32 is exact. cuSPARSELt multiplies by a float32 alpha, so its INT32 is the sum rounded to float32.
    Scaling rounds to float32 first in any case, so outputs of layers are equal.
    """
    m, n, k = 17, 64, 4096
    packed_layer = layer(backend, "2:4", INT8, n, k)
    weight = torch.where(packed_layer.weight == 0, 0, packed_layer.weight.clamp(100, 127))
    weight = torch.where(packed_layer.weight == 0, 0, weight | codes(n, k, 3) & 3).to(INT8)
    q = codes(m, k, seed=m).clamp(100, 127) | codes(m, k, 4) & 3
    expected = exact(q, weight)
    assert int(expected.min()) > EXACT_FLOAT32
    assert not torch.equal(expected.float().double(), expected)
    if backend == "cublaslt":
        assert_same_bits(dense_sums(q, weight), expected.to(torch.int32))
        return
    provider = gemm.get(backend)
    packed = provider.pack(weight, TWO_FOUR)
    actual = provider.accumulate(q, packed, n, torch.int32)  # type: ignore[attr-defined]
    assert torch.equal(actual.double(), expected.float().double())
    # the sum is rounded to float32 and then to BF16: half an ulp of each
    rounded = provider.accumulate(q, packed, n, torch.bfloat16).double()  # type: ignore[attr-defined]
    assert bool(((rounded - expected).abs() <= (UNIT + 2.0**-24) * expected).all())


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("dtype", [INT8, FP8], ids=str)
def test_packing_takes_little_memory(dtype: torch.dtype) -> None:
    """Beside weight and result less than half a weight."""
    numbers = codes(37888, 3584, 1) if dtype == INT8 else normal(37888, 3584, 1)
    weight, backend = prune(numbers, SlidePattern(8)).to(dtype), gemm.get("hopper")
    backend.pack(weight, SlidePattern(8))  # libraries allocate persistent memory at first use
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    allocated = torch.cuda.memory_allocated()
    packed = backend.pack(weight, SlidePattern(8))
    assert torch.cuda.max_memory_allocated() - allocated - packed.numel() < weight.numel() / 2


LAYERS = [(backend, dtype, n) for backend in BACKENDS for dtype in ("int8", "fp8") for n in (1001, 1008)]


@pytest.fixture(scope="module", params=LAYERS, ids=lambda param: "-".join(map(str, param)))
def any_layer(request: pytest.FixtureRequest) -> PackedLayer:
    """At N = 1008, cuBLASLt's epilogue scales FP8 and adds the bias on Hopper; at 1001, our kernel does."""
    backend, dtype, n = request.param
    return layer(backend, "6:8", DTYPES[dtype], n, K)


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("m", [1, 17, 2048])
def test_bfloat16_layer_is_within_its_error_bound(any_layer: PackedLayer, m: int, with_bias: bool) -> None:
    """y = v + bias with v = acc * s_w * s_x is compared with float64. The sum errs by ``of_sum``, and three
    roundings follow:

    acc * s_w and (acc * s_w) * s_x + bias are rounded to float32, by 2^-24 of values that exceed |v| and |y| by at
    most UNIT, and the result is rounded to BF16, by UNIT. cuSPARSELt rounds the sum itself to BF16, by UNIT of it,
    and so does cuBLASLt in FP8 where it does not scale. Otherwise INT8 sums are exact, and FP8 sums err by up to
    twice the error of the dense kernel.
    """
    x = normal(m, K, seed=m)
    bias = normal(1, len(any_layer.weight), seed=1)[0] if with_bias else None
    q, scale_x = any_layer.quantized(x)
    codes_of_x = quantize_rows(x.cpu(), any_layer.dtype)[0].cuda()
    sums = exact(codes_of_x, any_layer.weight)
    of_sum = torch.zeros_like(sums)
    if any_layer.dtype == FP8:
        of_sum += 2 * (dense_sums(codes_of_x, any_layer.weight).double() - sums).abs().max()
    is_unscaled = (
        any_layer.backend == "cublaslt"
        and any_layer.dtype == FP8
        and (
            m <= MAX_UNSCALED_TOKENS
            or len(any_layer.weight) % 16 > 0
            or LIBRARIES["cublaslt"].epilogue("fp8", "bf16") == "none"
        )
    )
    if is_unscaled or any_layer.backend == "cusparselt":
        of_sum += UNIT * (sums.abs() + of_sum)
    scales = any_layer.scale.double().t() * scale_x.double()
    y = sums * scales + (0 if bias is None else bias.double())
    apart = of_sum * scales + 2.0**-22 * ((sums * scales).abs() + y.abs())
    output = any_layer.product(q, scale_x, bias, torch.bfloat16)
    assert (output.dtype, output.shape, output.is_contiguous()) == (torch.bfloat16, y.shape, True)
    error = (output.double() - y).abs()
    bound = apart + UNIT * (y.abs() + apart)
    assert bool((error <= bound).all()), f"{float((error / bound).max()):.3f} of the bound"


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_layer_with_more_than_2_31_outputs(backend: str) -> None:
    """The last rows are beyond 2^31 elements in both the sums and the output."""
    m, n, k = 2**15 + 16, 2**16, 64
    rows = 2**15 + 2**11  # the next bucket
    assert m * n > 2**31
    torch.cuda.empty_cache()
    needed = n * (rows * (2 if backend == "cusparselt" else 4) + m * 2) + 2**30
    free = torch.cuda.mem_get_info()[0]
    if free < needed:
        pytest.skip(f"needs {needed >> 20} MiB of GPU memory, {free >> 20} MiB are free")
    packed_layer = layer(backend, "2:4", INT8, n, k)
    x = normal(m, k, seed=0)
    output = packed_layer.linear(x)
    for part in (slice(0, 48), slice(m - 48, m)):
        q, scale_x = (tensor.cuda() for tensor in quantize_rows(x[part].cpu(), INT8))
        sums = exact(q, packed_layer.weight).float()
        sums = sums.to(torch.bfloat16) if backend == "cusparselt" else sums.to(torch.int32)
        expected = reference.dequant_bias(sums, scale_x, packed_layer.scale, None, torch.bfloat16)
        assert_same_bits(output[part], expected)
    del output
    torch.cuda.empty_cache()


@pytest.fixture(scope="module", params=PATTERNS)
def fp8_layer(request: pytest.FixtureRequest) -> PackedLayer:
    return layer("cusparselt", request.param, FP8, N, K)


@pytest.mark.parametrize(
    ("name", "out"), [("cusparselt", "int32"), ("cusparselt", "bf16"), ("cublaslt", "int32")]
)
def test_every_algorithm_gives_equal_sums(name: str, out: str) -> None:
    """At 2:4, half of the K products are zero, so all sums are exact in float32."""
    library, m, n, k = LIBRARIES[name], 48, 992, 1536
    assert k // 2 * 128 * 128 < EXACT_FLOAT32
    packed_layer = layer(name, "2:4", INT8, n, k)
    q = codes(m, k, seed=5)
    expected = exact(q, packed_layer.weight).float().to(DTYPES[out])
    problem = Problem("int8", out, n, k, m)
    names = library.algorithms(problem, gpu())
    refused: dict[str, str] = {}
    actual = torch.empty(m, n, dtype=DTYPES[out], device=gpu())
    for algorithm in (None, *names):
        actual.fill_(-1)
        try:
            library.plan(problem, gpu(), algorithm)(Tensors(q, packed_layer.packed, actual))
        except RuntimeError as error:  # some are refused when planned, others when run
            refused[str(algorithm)] = str(error)
            continue
        torch.cuda.synchronize()
        assert torch.equal(actual, expected), algorithm
    print(f"{name} {out}: {len(names)} algorithms, {len(refused)} refused")
    assert len(refused) < len(names), refused
    assert "None" not in refused, "the library refuses its own choice"


@pytest.mark.parametrize("m", [1, 17, 100, 2048])
def test_fp8_error_is_at_most_twice_that_of_the_dense_kernel(fp8_layer: PackedLayer, m: int) -> None:
    """Tensor cores keep about 14 bits of an FP8 sum, sparse or dense; both are compared with float64.

    Rounding adds up to UNIT / (1 - UNIT) * |r| to the error of a BF16 result r.
    """
    q = normal(m, K, seed=m, dtype=torch.float32).mul_(100).clamp_(-448, 448).to(FP8)
    expected = exact(q, fp8_layer.weight)
    of_dense = (dense_sums(q, fp8_layer.weight).double() - expected).abs()
    of_ours = (accumulate(fp8_layer, q, torch.float32).double() - expected).abs()
    assert of_ours.max() <= 2 * of_dense.max()
    assert of_ours.mean() <= 2 * of_dense.mean()
    rounded = accumulate(fp8_layer, q, torch.bfloat16).double()
    beyond = (rounded - expected).abs() - rounded.abs() * (UNIT / (1 - UNIT))
    assert beyond.max() <= 2 * of_dense.max()
