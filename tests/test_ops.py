"""The operators: schema, fakes, torch.compile, and what they compute against a layer written out in float64."""

from __future__ import annotations

import importlib

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter

import slidesparse.fused_ops  # noqa: F401  registers operators
from slidesparse import gemm, ops, reference
from slidesparse.pattern import SlideLayout, SlidePattern
from slidesparse.prune import prune
from slidesparse.quantize import FP8, INT8, dequantize_rows, quantize_rows
from slidesparse.slide import slide

PATTERNS = ["2:4", "4:6", "6:8", "8:10", "14:16", "2_inf"]
DTYPES = [pytest.param(INT8, id="int8"), pytest.param(FP8, id="fp8")]


def layer(pattern: str, dtype: torch.dtype, n: int, k: int) -> tuple[SlideLayout, Tensor, Tensor, Tensor]:
    """Layout, slided weight [N, K'], scale [N, 1], and the dense weight [N, K] it came from."""
    parsed = SlidePattern.parse(pattern)
    generator = torch.Generator().manual_seed(n * k)
    weight, scale = quantize_rows(prune(torch.randn(n, k, generator=generator), parsed), dtype)
    return parsed.layout(k), slide(weight, parsed), scale, weight


@pytest.mark.parametrize("m", [0, 1, 3, 17])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_layer_equals_its_dense_product(pattern: str, dtype: torch.dtype, m: int) -> None:
    """Quantization apart, the sparse layer is the dense one: compared after the same quantization, in float64."""
    n, k = 13, 75
    layout, slided, scale, weight = layer(pattern, dtype, n, k)
    x = torch.randn(m, k, generator=torch.Generator().manual_seed(m)).to(torch.bfloat16)
    bias = torch.linspace(-1, 1, n).to(torch.bfloat16)
    q, scale_x = quantize_rows(x, dtype, "cpu")
    exact = dequantize_rows(q, scale_x).double() @ dequantize_rows(weight, scale).double().t() + bias.double()
    found = ops.linear(x, slided, scale, bias, layout.length, layout.phase, dtype, layout.slided, "reference")
    assert found.dtype == x.dtype
    assert found.shape == (m, n)
    # one rounding to bfloat16, and float32 sums and scales of terms that add up to no more than `largest`
    largest = (
        dequantize_rows(q, scale_x).double().abs() @ dequantize_rows(weight, scale).double().abs().t() + 1
    )
    bound = exact.abs() * 2.0**-8 + largest * 2.0**-24 * (k + 3)
    assert bool(((found.double() - exact).abs() <= bound).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("phase", [0, 3])
def test_opcheck_quant_slide(dtype: torch.dtype, phase: int) -> None:
    for m in (0, 1, 5):
        torch.library.opcheck(
            torch.ops.slidesparse.quant_slide.default, (torch.randn(m, 30), 8, phase, dtype, 64)
        )


@pytest.mark.parametrize("dtype", DTYPES)
def test_opcheck_fused_operators(dtype: torch.dtype) -> None:
    rest = (8, 0, dtype, 64)
    for m in (0, 1, 5):
        x, weight = torch.randn(m, 30), torch.randn(30)
        for operator, arguments in (
            (torch.ops.slidesparse.rms_norm_quant_slide, (x, weight, 1e-6, *rest)),
            (torch.ops.slidesparse.add_rms_norm_quant_slide, (x, x + 1, weight, 1e-6, *rest)),
            (torch.ops.slidesparse.silu_mul_quant_slide, (torch.randn(m, 60), *rest)),
        ):
            torch.library.opcheck(operator.default, arguments)


@pytest.mark.parametrize("x_dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("dtype", DTYPES)
def test_fused_operators_quantize_what_torch_computes(dtype: torch.dtype, x_dtype: torch.dtype) -> None:
    """One rounding of a float64 result, but for some in a thousand that lie next to a tie, as float32 sees them."""
    generator = torch.Generator().manual_seed(0)
    x, residual = (torch.randn(64, 30, generator=generator).to(x_dtype) for _ in range(2))
    weight = torch.randn(30, generator=generator).to(x_dtype)
    both = torch.cat([x, residual], 1)
    total = (x.float() + residual.float()).double()

    def norm(sums: Tensor) -> Tensor:
        return sums * (sums.pow(2).mean(-1, keepdim=True) + 0.1).rsqrt() * weight.double()

    rest = (8, 0, dtype, 64)
    fused = torch.ops.slidesparse
    plain = fused.rms_norm_quant_slide(x, weight, 0.1, *rest)
    *added, sums = fused.add_rms_norm_quant_slide(x, residual, weight, 0.1, *rest)
    gated = fused.silu_mul_quant_slide(both, *rest)
    assert torch.equal(sums, total.to(x_dtype))
    silu = torch.nn.functional.silu(x.double()) * residual.double()
    for found, exact in ((plain, norm(x.double())), (added, norm(total)), (gated, silu)):
        q, scale = fused.quant_slide(exact.to(x_dtype), *rest)
        torch.testing.assert_close(found[1], scale, rtol=2.0**-7, atol=0)
        assert (found[0].float() != q.float()).float().mean() < 2e-3


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_opcheck_scaled_matmul(dtype: torch.dtype, with_bias: bool) -> None:
    layout, slided, scale, _ = layer("6:8", dtype, 12, 30)
    q, scale_x = torch.ops.slidesparse.quant_slide(torch.randn(5, 30), layout.length, 0, dtype, layout.slided)
    bias = torch.randn(12) if with_bias else None
    arguments = (q, scale_x, slided, scale, bias, torch.bfloat16, "reference")
    checks = ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    if dtype == FP8:
        checks.remove(
            "test_schema"
        )  # torch compares the inputs before and after with allclose, which FP8 lacks
    torch.library.opcheck(torch.ops.slidesparse.scaled_matmul.default, arguments, test_utils=checks)


def test_four_linears_compile_to_one_graph_for_every_number_of_tokens() -> None:
    layout, slided, scale, _ = layer("6:8", INT8, 32, 32)
    counter = CompileCounter()

    def block(x: Tensor) -> Tensor:
        for _ in range(4):
            x = ops.linear(
                x, slided, scale, None, layout.length, layout.phase, INT8, layout.slided, "reference"
            )
        return x

    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend=counter)
    for m in (2, 3, 16, 100):
        x = torch.randn(m, 32)
        assert torch.equal(compiled(x), block(x))
    assert counter.frame_count == 1


def test_registering_twice_changes_nothing() -> None:
    before = torch.ops.slidesparse.quant_slide.default
    importlib.reload(ops)
    assert torch.ops.slidesparse.quant_slide.default is before


def test_backends_say_why_they_cannot_run() -> None:
    with pytest.raises(
        gemm.BackendError,
        match="'fast' is not known; the backends are cusparselt, cublaslt, hopper, stock, reference",
    ):
        gemm.provider("fast")
    for name in ("cusparselt", "cublaslt", "hopper"):
        with pytest.raises(gemm.BackendError, match=f"{name} cannot run on cpu: it needs an NVIDIA GPU"):
            gemm.require(name, torch.device("cpu"))
    assert gemm.require("reference", torch.device("cpu")).name == "reference"


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 3, 16, 17, 64, 100, 2048])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("backend", ["cusparselt", "reference"])
def test_gpu_backends_equal_the_reference(backend: str, pattern: str, dtype: torch.dtype, m: int) -> None:
    """INT8 bit for bit.  FP8 within twice the error of the dense tensor-core kernel, in fast accumulation as stock
    vLLM uses it: tensor cores keep about 14 bits of an FP8 sum, sparse or dense.
    """
    n, k = 112, 1008
    layout, slided, scale, weight = layer(pattern, dtype, n, k)
    x = torch.randn(m, k, generator=torch.Generator().manual_seed(m)).to(torch.bfloat16)
    bias = torch.randn(n, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    q, scale_x = reference.quant_slide(x, layout, dtype, "cuda")
    on_gpu, scale_gpu = torch.ops.slidesparse.quant_slide(x.cuda(), layout.length, 0, dtype, layout.slided)
    assert torch.equal(on_gpu.cpu().view(torch.int8), q.view(torch.int8))
    assert torch.equal(scale_gpu.cpu(), scale_x)
    provider = gemm.require(backend, torch.device("cuda"))
    arguments = (provider.pack(slided.cuda()), scale.cuda(), bias.cuda(), torch.float32)
    found = provider.scaled_matmul(on_gpu, scale_gpu, *arguments).cpu()
    if dtype == INT8:
        assert torch.equal(
            found, reference.dequant_bias(reference.matmul(q, slided), scale_x, scale, bias, torch.float32)
        )
        return
    exact = q.double() @ slided.double().t()
    dense = quantize_rows(x, dtype)[0].cuda()
    one = torch.ones((), device="cuda")
    padded = torch.nn.functional.pad(dense.view(torch.int8), (0, 0, 0, -m % 16)).view(dtype)
    product = torch._scaled_mm(
        padded, weight.cuda().t(), scale_a=one, scale_b=one, out_dtype=torch.float32, use_fast_accum=True
    )
    of_dense = (product[:m].cpu().double() - exact).abs()
    unscaled = (found.double() - bias.double()) / (scale.double().t() * scale_x.double())
    rounding = (exact.abs() + (bias.double() / (scale.double().t() * scale_x.double())).abs()) * 2.0**-22
    of_ours = ((unscaled - exact).abs() - rounding).clamp(min=0)
    assert of_ours.max() <= 2 * of_dense.max()
    assert of_ours.mean() <= 2 * of_dense.mean()


@pytest.mark.gpu
@pytest.mark.vllm
@pytest.mark.parametrize("x_dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [64, 1000, 3584, 4099])
def test_gpu_quantization_equals_stock_vllm(k: int, dtype: torch.dtype, x_dtype: torch.dtype) -> None:
    """Bit for bit, from rows near the smallest floats to large ones, zero rows and ties included."""
    from vllm import _custom_ops as stock

    generator = torch.Generator().manual_seed(k)
    spread = torch.logspace(-30, 4, 500)[:, None] * torch.randn(500, k, generator=generator)
    ties = torch.randint(-254, 255, (500, k), generator=generator) * 0.5
    ties[:, 0] = 127
    x = (
        torch.cat([spread, ties, torch.zeros(1, k), torch.randn(3000, k, generator=generator)])
        .to(x_dtype)
        .cuda()
    )
    if dtype == INT8:
        expected, scale, _ = stock.scaled_int8_quant(x)
    else:
        expected, scale = stock.scaled_fp8_quant(x, use_per_token_if_dynamic=True)
    q, scale_x = torch.ops.slidesparse.quant_slide(x, 4, 0, dtype, x.shape[1] + -x.shape[1] % 4)
    assert torch.equal(scale_x, scale)
    assert torch.equal(q[:, :k].view(torch.int8), expected.view(torch.int8))
    both_on_cpu = reference.quantize_rows(x.cpu(), dtype, "cuda")
    assert torch.equal(both_on_cpu[0].view(torch.int8), expected.cpu().view(torch.int8))
    assert torch.equal(both_on_cpu[1], scale.cpu())
