"""The operators: schema, fakes, torch.compile, and results against a layer in float64."""

from __future__ import annotations

import importlib
import itertools

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from slidesparse import gemm, ops, reference
from slidesparse.gemm.backend import quantize
from slidesparse.gemm.problem import TWO_FOUR, Layer, LibraryError
from slidesparse.pattern import SlidePattern
from slidesparse.prune import prune
from slidesparse.quantize import FP8, INT8, dequantize_rows, quantize_rows
from slidesparse.slide import slide

PATTERNS = ["2:4", "4:6", "6:8", "8:10", "14:16", "2_inf"]
DTYPES = [pytest.param(INT8, id="int8"), pytest.param(FP8, id="fp8")]


def make_layer(pattern: str, dtype: torch.dtype, n: int, k: int) -> tuple[Layer, Tensor, Tensor, Tensor]:
    """Return a layer of the reference backend, its slided weight, its scale [n, 1] and the weight [n, k]."""
    parsed = SlidePattern.parse(pattern)
    generator = torch.Generator().manual_seed(n * k)
    weight, scale = quantize_rows(prune(torch.randn(n, k, generator=generator), parsed), dtype)
    return Layer.of(n, k, parsed, 0, dtype, 4), slide(weight, parsed), scale, weight


@pytest.mark.parametrize("m", [0, 1, 3, 17])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("pattern", "k"), [*((pattern, 75) for pattern in PATTERNS), ("2_inf", 4200)])
def test_linear_equals_dense_product(pattern: str, k: int, dtype: torch.dtype, m: int) -> None:
    """The sparse layer equals the dense one in float64 after the same quantization."""
    n = 13
    layer, slided, scale, weight = make_layer(pattern, dtype, n, k)
    x = torch.randn(m, k, generator=torch.Generator().manual_seed(m)).to(torch.bfloat16)
    bias = torch.linspace(-1, 1, n).to(torch.bfloat16)
    q, scale_x = quantize_rows(x, dtype, "cpu")
    a, b = dequantize_rows(q, scale_x).double(), dequantize_rows(weight, scale).double().t()
    exact = a @ b + bias.double()
    output = ops.linear(x, slided, scale, bias, layer, "reference")
    assert output.dtype == x.dtype
    assert output.shape == (m, n)
    # one rounding to bfloat16, and rounding of float32 sums of terms that add up to at most `largest`
    largest = a.abs() @ b.abs() + 1
    bound = exact.abs() * 2.0**-8 + largest * 2.0**-24 * (k + 3)
    assert bool(((output.double() - exact).abs() <= bound).all())


@pytest.mark.parametrize("dtype", DTYPES)
def test_opcheck_layers(dtype: torch.dtype) -> None:
    """With a bias in INT8 and without one in FP8: neither depends on the other."""
    layer, slided, scale, _ = make_layer("6:8", dtype, 12, 30)
    of_layer = (slided, scale, torch.randn(12) if dtype == INT8 else None, [*layer], torch.bfloat16)
    checks = ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    for m in (0, 1, 5):
        x, norm = torch.randn(m, 30), torch.randn(30)
        for operator, arguments in (
            (torch.ops.slidesparse.linear, (x, *of_layer)),
            (torch.ops.slidesparse.rms_norm_linear, (x, norm, 1e-6, *of_layer)),
            (torch.ops.slidesparse.add_rms_norm_linear, (x, x + 1, norm, 1e-6, *of_layer)),
            (torch.ops.slidesparse.silu_mul_linear, (torch.randn(m, 60), *of_layer)),
            (torch.ops.slidesparse.linear_by, (x, *of_layer, "reference")),
        ):
            # FP8 lacks allclose, with which the first check compares inputs
            torch.library.opcheck(operator.default, arguments, test_utils=checks[dtype == FP8 :])


def make_experts(dtype: torch.dtype, pattern: SlidePattern | None) -> tuple[ops.Experts, list[Tensor]]:
    """Return five experts, K = 30 and I = 12, packed, and their codes [5, N, K]."""
    generator, backend = torch.Generator().manual_seed(0), gemm.get("reference")
    packed, scales, layers, codes = [], [], [], []
    for n, k in ((24, 30), (30, 12)):
        weight = torch.randn(5 * n, k, generator=generator)
        q, scale = quantize_rows(prune(weight, pattern) if pattern else weight, dtype)
        codes.append(q.view(5, n, k))
        packed.append(backend.pack_experts(codes[-1], pattern))
        scales.append(scale.view(5, n))
        layers.append(Layer.of(n, k, pattern, 0, dtype, backend.alignment))
    return ops.Experts(tuple(packed), tuple(scales), tuple(layers)), codes


@pytest.mark.parametrize("pattern", [None, SlidePattern(8)], ids=["unpruned", "6:8"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_experts_equal_a_loop_over_tokens(dtype: torch.dtype, pattern: SlidePattern | None) -> None:
    """With all experts here or two elsewhere, and one that no token chooses; sums of three are rounded once."""
    generator = torch.Generator().manual_seed(1)
    experts, codes = make_experts(dtype, pattern)
    x = torch.randn(9, 30, generator=generator).bfloat16()
    chosen = torch.stack([torch.randperm(4, generator=generator)[:3] for _ in range(9)]).int()
    weights = torch.rand(9, 3, generator=generator)

    def product(row: Tensor, layer: int, expert: int) -> Tensor:
        q, step = quantize_rows(row[None], dtype, "triton")
        return (q.float() @ codes[layer][expert].float().t())[0] * step[0] * experts.scales[layer][expert]

    for here in ([0, 1, 2, 3, 4], [1, 3, 4]):
        expected = torch.zeros(9, 30)
        for token, slot in itertools.product(range(9), range(3)):
            if (expert := int(chosen[token, slot])) in here:
                gate, up = product(x[token], 0, expert).bfloat16().chunk(2)
                activated = torch.nn.functional.silu(gate) * up
                expected[token] += (product(activated, 1, expert) * weights[token, slot]).bfloat16().float()
        expert_map = None
        if len(here) < 5:
            expert_map = torch.full((5,), -1, dtype=torch.int32)
            expert_map[here] = torch.arange(len(here), dtype=torch.int32)
        ours = ops.Experts(
            tuple(w[here] for w in experts.weights), tuple(s[here] for s in experts.scales), experts.layers
        )
        result = ops.experts(x, ours, chosen, weights, expert_map)
        # sums of FP8 are rounded in another order
        allowed = 0.0 if dtype == INT8 else 0.01 * float(expected.abs().max())
        assert float((result.float() - expected.bfloat16().float()).abs().max()) <= allowed
    assert ops.experts(x[:0], ours, chosen[:0], weights[:0], None).shape == (0, 30)


def test_opcheck_experts() -> None:
    experts, _ = make_experts(INT8, None)
    x, chosen = torch.randn(3, 30), torch.tensor([[0, 4], [1, 0], [2, 2]])
    operators = torch.ops.slidesparse
    order, rows, offsets = operators.route(chosen, None, 5)
    first = (*(experts.weights[0], experts.scales[0], offsets, None, False), [*experts.layers[0]], x.dtype)
    for operator, arguments in (
        (operators.route, (chosen, None, 5)),
        (operators.grouped_linear, (x, order, 2, *first)),
        (operators.combine, (torch.randn(6, 30), rows, 2)),
    ):
        torch.library.opcheck(operator.default, arguments)


@pytest.mark.parametrize("x_dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("dtype", DTYPES)
def test_fused_operators_equal_separate_ones(dtype: torch.dtype, x_dtype: torch.dtype) -> None:
    """Norm and activation are rounded once to x's dtype, like a float64 result except for ties moved by float32."""
    generator = torch.Generator().manual_seed(0)
    x, residual = (torch.randn(64, 30, generator=generator).to(x_dtype) for _ in range(2))
    norm = torch.randn(30, generator=generator).to(x_dtype)
    layer, slided, scale, weight = make_layer("6:8", dtype, 12, 30)
    of_layer = (slided, scale, None, [*layer], torch.float32)
    total = (x.float() + residual.float()).double()

    def normed(sums: Tensor) -> Tensor:
        return sums * (sums.pow(2).mean(-1, keepdim=True) + 0.1).rsqrt() * norm.double()

    fused = torch.ops.slidesparse
    normalized = fused.rms_norm_linear(x, norm, 0.1, *of_layer)
    added, sums = fused.add_rms_norm_linear(x, residual, norm, 0.1, *of_layer)
    gated = fused.silu_mul_linear(torch.cat([x, residual], 1), *of_layer)
    assert torch.equal(sums, total.to(x_dtype))
    silu = torch.nn.functional.silu(x.double()) * residual.double()
    for actual, exact in ((normalized, normed(x.double())), (added, normed(total)), (gated, silu)):
        expected = fused.linear(exact.to(x_dtype), *of_layer)
        # A tie rounded the other way moves a code by one step: at most 2^-3 of an E4M3 code, or 1/127 of the row's
        # largest. This affects a few in a thousand codes, so few rows differ.
        sizes = dequantize_rows(weight, scale).double().abs()
        bound = exact.abs() @ sizes.t() * 2.0**-3
        bound += exact.abs().amax(1, keepdim=True) * sizes.sum(1) / 127
        assert bool(((actual - expected).abs() <= bound).all())
        assert ((actual - expected).abs().amax(1) > 1e-5 * expected.abs().amax()).float().mean() < 0.1


def test_linears_compile_once_for_all_token_counts() -> None:
    layer, slided, scale, _ = make_layer("6:8", INT8, 32, 32)
    counter = CompileCounter()

    def block(x: Tensor) -> Tensor:
        for backend in ("reference", "reference", "toy"):
            x = ops.linear(x, slided, scale, None, layer, backend)
        return x

    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend=counter)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gemm, "get", lambda name, get=gemm.get: get("reference"))  # by linear_by
        for m in (2, 3, 16, 100):
            x = torch.randn(m, 32)
            assert torch.equal(compiled(x), block(x))
    assert counter.frame_count == 1


def test_registering_operators_twice_changes_nothing() -> None:
    operator = torch.ops.slidesparse.linear.default
    importlib.reload(ops)
    assert torch.ops.slidesparse.linear.default is operator


def test_linear_refuses_other_in_features() -> None:
    layer, slided, scale, _ = make_layer("6:8", INT8, 12, 30)
    with pytest.raises(LibraryError, match=r"x is \(2, 29\); it must be \[M, 30\]"):
        ops.linear(torch.randn(2, 29), slided, scale, None, layer, "reference")


def test_unusable_backends_give_the_reason() -> None:
    with pytest.raises(gemm.BackendError, match="'fast' is not known; the backends are hopper"):
        gemm.get("fast")
    for name in gemm.REGISTRY:
        if gemm.get(name).device_type == "cuda":
            with pytest.raises(gemm.BackendError, match=f"{name} cannot run on cpu: it needs an NVIDIA GPU"):
                gemm.require(name, torch.device("cpu"))
    with pytest.raises(gemm.BackendError, match="hopper cannot run.*cusparselt cannot run"):
        gemm.choose(gemm.SPARSE, torch.device("cuda"), (7, 5))


@pytest.mark.gpu
@pytest.mark.vllm
@pytest.mark.parametrize("x_dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [64, 1000, 3584, 4099])
def test_gpu_quantization_equals_stock_vllm(k: int, dtype: torch.dtype, x_dtype: torch.dtype) -> None:
    """Codes and scales are bitwise equal, from rows near the smallest floats to large ones, with zero rows and ties."""
    from vllm import _custom_ops as stock

    generator = torch.Generator().manual_seed(k)
    spread = torch.logspace(-30, 4, 500)[:, None] * torch.randn(500, k, generator=generator)
    ties = torch.randint(-254, 255, (500, k), generator=generator) * 0.5
    ties[:, 0] = 127
    x = torch.cat([spread, ties, torch.zeros(1, k), torch.randn(3000, k, generator=generator)])
    x = x.to(x_dtype).cuda()
    if dtype == INT8:
        expected, scale, _ = stock.scaled_int8_quant(x)
    else:
        expected, scale = stock.scaled_fp8_quant(x, use_per_token_if_dynamic=True)
    q, scale_x = quantize(x, Layer.of(0, k, TWO_FOUR, 0, dtype, 4))
    assert torch.equal(scale_x, scale)
    assert torch.equal(q[:, :k].view(torch.int8), expected.view(torch.int8))
    both_on_cpu = reference.quantize_rows(x.cpu(), dtype, "cuda")
    assert torch.equal(both_on_cpu[0].view(torch.int8), expected.cpu().view(torch.int8))
    assert torch.equal(both_on_cpu[1], scale.cpu())
