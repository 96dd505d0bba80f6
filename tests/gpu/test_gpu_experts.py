"""Experts on a GPU: the grouped product equals one product an expert in vLLM's arithmetic, whatever the routing."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
import triton
import triton.language as tl
from gpu_layers import gpu, normal
from strategies import assert_same_bits
from torch import Tensor

from slidesparse import ops, reference
from slidesparse.gemm import cuda
from slidesparse.gemm.hopper import native
from slidesparse.gemm.hopper.backend import Hopper, plan_layer
from slidesparse.gemm.hopper.native import TYPES
from slidesparse.gemm.problem import Layer
from slidesparse.pattern import SlidePattern
from slidesparse.prune import prune
from slidesparse.quantize import FP8, INT8, quantize_rows

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("on_hopper")]

OURS = getattr(torch.ops, ops.NAMESPACE)
BF16 = torch.bfloat16
PATTERNS = (None, "2:4", "6:8", "8:10", "mixed")
TILES = [f"stream:{s}x{t}/1/1" for t in (8, 16, 32, 64) for s in (1, 2, 3)]
TILES += ["stream:1x128/1/1", "stream:2x128/1/1", "stream:2x256/1/1"]
# Experts, top-k, hidden and intermediate sizes: small and odd ones, of Qwen3-30B-A3B, and of Mixtral-8x7B
SMALL, ODD, QWEN, MIXTRAL = (5, 2, 256, 192), (7, 3, 200, 100), (128, 8, 2048, 768), (8, 2, 4096, 14336)
Sizes = tuple[int, int, int, int]
ROUTINGS = ("uniform", "skewed", "one", "elsewhere")


@dataclass
class Experts:
    """The weights of a layer of experts, as packed together, and their codes."""

    layer: Layer
    packed: Tensor  # [E, bytes]
    codes: list[Tensor]
    scale: Tensor  # [E, N]

    @classmethod
    def make(cls, experts: int, n: int, k: int, pattern: str | None, dtype: torch.dtype = INT8) -> Experts:
        """Make random weights of at most eight different experts."""
        uniform = None if pattern in (None, "mixed") else SlidePattern.parse(pattern)
        weights, scales = [], []
        for expert in range(min(experts, 8)):
            weight = normal(n, k, expert, torch.float32)
            if uniform is not None:
                weight = prune(weight, uniform)
            elif pattern == "mixed":  # experts with different numbers of dense blocks
                weight[: n // 2 + 64 * expert] = prune(weight[: n // 2 + 64 * expert], SlidePattern(4))
            codes, scale = quantize_rows(weight, dtype)
            weights.append(codes)
            scales.append(scale.view(-1))
        of = [expert % len(weights) for expert in range(experts)]
        return cls(
            Hopper().layer(n, k, uniform, 0, dtype),
            Hopper().pack_experts(torch.stack(weights), uniform)[of],
            [weights[i] for i in of],
            torch.stack(scales)[of],
        )


def chosen(
    tokens: int, experts: int, top_k: int, routing: str, seed: int = 0
) -> tuple[Tensor, Tensor | None]:
    """The experts [tokens, top_k] that a router chose, and the map of those that are here."""
    generator = torch.Generator("cuda").manual_seed(seed)
    scores = torch.rand(tokens, experts, generator=generator, device=gpu())
    if routing == "skewed":  # many experts get nothing
        scores[:, : max(top_k, experts // 4)] += 0.9
    if routing == "one":
        scores[:, experts // 2] += 2
    ids = scores.argsort(-1, descending=True)[:, :top_k].int().contiguous()
    if routing != "elsewhere":
        return ids, None
    here = torch.full((2 * experts,), -1, dtype=torch.int32, device=gpu())
    here[1::2] = torch.arange(experts, dtype=torch.int32, device=gpu())
    ids = torch.rand(tokens, 2 * experts, generator=generator, device=gpu()).argsort(-1)[:, :top_k]
    ids[::5, 0] = -1
    return ids.contiguous(), here


def routed(ids: Tensor, here: Tensor | None, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return what `route` must, by torch on the CPU."""
    local = ids.flatten().cpu().long()
    if here is not None:
        local = torch.where(local < 0, -1, here.cpu().long()[local.clamp(min=0)])
    slots = (local >= 0).nonzero().view(-1)
    order = slots[local[slots].argsort(stable=True)]
    rows = torch.full_like(local, -1)
    rows[order] = torch.arange(len(order))
    counts = torch.bincount(local[slots], minlength=experts)
    return order, rows, torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])


@triton.jit
def divide(absmax, scale, factor, size, block: tl.constexpr):  # type: ignore[no-untyped-def]
    """The divisions of vLLM's quantizer for experts, which are approximate."""
    at = tl.program_id(0) * block + tl.arange(0, block)
    value = tl.load(absmax + at, mask=at < size, other=1.0)
    tl.store(scale + at, value / 127, mask=at < size)
    tl.store(factor + at, 127 / value, mask=at < size)


def quantized(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Quantize the tokens of experts as vLLM does."""
    if dtype == FP8 or not len(x):
        return quantize_rows(x, dtype)
    absmax = x.float().abs().amax(-1, keepdim=True).clamp(min=1e-10)
    scale, factor = torch.empty_like(absmax), torch.empty_like(absmax)
    divide[(triton.cdiv(len(x), 128),)](absmax, scale, factor, len(x), block=128)
    scaled = (x.float() * factor).double()
    return (scaled.abs() + 0.5).floor().copysign(scaled).to(INT8), scale


def one_by_one(
    experts: Experts, x: Tensor, offsets: Tensor, silu: bool, weights: Tensor | None = None
) -> Tensor:
    """The products of rows that are sorted, one expert after another, by torch; ``weights`` are the routers' by row."""
    q, scale = quantized(reference.silu_mul_of_experts(x) if silu else x, experts.layer.dtype)
    parts = []
    for codes, scale_w, (start, stop) in zip(
        experts.codes, experts.scale, pairwise(offsets.tolist()), strict=True
    ):
        sums = (q[start:stop].double() @ codes.double().t()).float()
        parts.append(sums * scale[start:stop] * scale_w)
    products = torch.cat(parts)
    return (products if weights is None else products * weights[:, None]).to(x.dtype)


def grouped(
    experts: Experts, x: Tensor, order: Tensor, top_k: int, offsets: Tensor, slots: Tensor | None, silu: bool
) -> Tensor:
    y: Tensor = OURS.grouped_linear(
        *(x, order, top_k, experts.packed, experts.scale, offsets, slots, silu, [*experts.layer], x.dtype)
    )
    return y


def assert_same(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """Sums of INT8 products are exact; those of FP8 depend on their order."""
    if dtype == INT8:
        assert_same_bits(actual, expected)
    else:
        scale = float(expected.abs().sum()) / max(1, expected.numel()) + 1e-30
        torch.testing.assert_close(actual.float() / scale, expected.float() / scale, rtol=2**-7, atol=2**-7)


def check(sizes: Sizes, tokens: int, routing: str, pattern: str | None, dtype: torch.dtype) -> None:
    """Run a whole mixture, and compare each step with one product an expert."""
    count, top_k, hidden, intermediate = sizes
    first = Experts.make(count, 2 * intermediate, hidden, pattern, dtype)
    second = Experts.make(count, hidden, intermediate, pattern, dtype)
    x = normal(tokens, hidden, 1)
    ids, here = chosen(tokens, count, top_k, routing)
    order, rows, offsets = OURS.route(ids, here, count)
    expected = routed(ids, here, count)
    total = int(expected[2][-1])
    assert torch.equal(order[:total].cpu().long(), expected[0])
    assert torch.equal(rows.cpu().long(), expected[1])
    assert torch.equal(offsets.cpu().long(), expected[2])
    y = grouped(first, x, order, top_k, offsets, None, False)
    slots = order[:total].long()
    assert_same(y[:total], one_by_one(first, x[slots // top_k], offsets, False), dtype)
    weights = torch.rand(ids.numel(), device=gpu())
    z = grouped(second, y, order, 1, offsets, weights, True)
    assert_same(z[:total], one_by_one(second, y[:total], offsets, True, weights[slots]), dtype)
    terms = torch.where((rows >= 0)[:, None], z[rows.clamp(min=0).long()], 0.0).view(tokens, top_k, hidden)
    summed = torch.zeros(tokens, hidden, device=gpu())
    for k in range(top_k):
        summed += terms[:, k].float()
    assert_same_bits(OURS.combine(z, rows, top_k), summed.to(BF16))


@pytest.mark.parametrize("dtype", [INT8, FP8])
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("sizes", [SMALL, ODD])
def test_a_mixture_equals_its_experts(sizes: Sizes, pattern: str | None, dtype: torch.dtype) -> None:
    for tokens in (1, 3, 17, 130, 1000):
        for routing in ROUTINGS:
            check(sizes, tokens, routing, pattern, dtype)


@pytest.mark.parametrize("pattern", [None, "2:4", "6:8"])
@pytest.mark.parametrize(
    ("sizes", "tokens"), [(QWEN, 1), (QWEN, 64), (QWEN, 1024), (MIXTRAL, 4), (MIXTRAL, 300)]
)
def test_models(sizes: Sizes, tokens: int, pattern: str | None) -> None:
    check(sizes, tokens, "uniform", pattern, INT8)


def run_tile(experts: Experts, x: Tensor, order: Tensor, offsets: Tensor, y: Tensor, text: str) -> None:
    """Write the products of rows x[order] to y by a configuration."""
    plan, count = plan_layer(experts.layer, gpu().index), len(experts.codes)
    size = native.library().slidesparse_hopper_scratch_bytes(plan, len(order))
    scratch = torch.full((size,), 1, dtype=torch.uint8, device=gpu())
    native.call(
        "grouped",
        *(plan, len(order), x.data_ptr(), TYPES[x.dtype], x.stride(0), 0, order.data_ptr(), 1, None, count),
        *(offsets.data_ptr(), experts.packed.data_ptr(), experts.packed.shape[1], experts.scale.data_ptr()),
        *(y.data_ptr(), TYPES[BF16], text.encode(), scratch.data_ptr(), cuda.current_stream(gpu().index)),
    )


@pytest.mark.parametrize("dtype", [INT8, FP8])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_every_tile(pattern: str | None, dtype: torch.dtype) -> None:
    """Rows that are the first of another expert's tile are not overwritten, whatever the size of tiles."""
    experts = Experts.make(6, 328, 640, pattern, dtype)
    x = normal(700, 640, 2)
    counts = [0, 257, 1, 0, 135, 307]
    offsets = torch.tensor([0, *torch.tensor(counts).cumsum(0)], dtype=torch.int32, device=gpu())
    order = torch.arange(700, dtype=torch.int32, device=gpu())
    expected = one_by_one(experts, x, offsets, False)
    for text in TILES:
        y = torch.full((704, 328), torch.nan, dtype=BF16, device=gpu())
        for _ in range(3):
            run_tile(experts, x, order, offsets, y, text)
        assert_same(y[:700], expected, dtype)
        assert bool(y[700:].isnan().all()), text


def test_a_graph_serves_any_routing() -> None:
    count, top_k, hidden, _ = SMALL
    experts = Experts.make(count, 328, hidden, "2:4")
    x, (ids, _) = normal(40, hidden, 3), chosen(40, count, top_k, "uniform")

    def run() -> Tensor:
        order, rows, offsets = OURS.route(ids, None, count)
        y: Tensor = OURS.combine(grouped(experts, x, order, top_k, offsets, None, False), rows, top_k)
        return y

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = run()
    for seed, routing in enumerate(("one", "skewed", "uniform", "one") * 3):
        ids.copy_(chosen(40, count, top_k, routing, seed)[0])
        x.copy_(normal(40, hidden, seed))
        graph.replay()
        assert_same_bits(y, run())


def test_nothing_is_here() -> None:
    """A device without any of the chosen experts adds zeros; no tokens are none."""
    experts = Experts.make(3, 72, 64, "2:4")
    nowhere = torch.full((9, 2), -1, dtype=torch.int32, device=gpu())
    for tokens in (9, 0):
        order, rows, offsets = OURS.route(nowhere[:tokens], None, 3)
        assert not bool(offsets.any())
        y = grouped(experts, normal(tokens, 64, 4), order, 2, offsets, None, False)
        assert torch.equal(OURS.combine(y, rows, 2), torch.zeros(tokens, 72, dtype=BF16, device=gpu()))


def test_more_experts_than_counters_are_refused() -> None:
    with pytest.raises(RuntimeError, match="513 experts: 1 to 512"):
        OURS.route(torch.zeros(4, 2, dtype=torch.int32, device=gpu()), None, 513)
