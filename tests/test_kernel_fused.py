"""The kernels that norm or gate before they quantize: in Triton's interpreter everywhere, and on the GPU.

A norm has one free number a row, the factor 1 / sqrt(mean square): sums in another order and an approximate root move
its last bits.  All that follows is fixed, so the kernel must give, bit for bit, what the reference gives for *some*
factor within the bound below of the exact one.  The activation has nothing free.

The interpreter's cases run in a process of their own, this file as a program, as those of test_kernels.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial

import interpreter
import numpy as np
import pytest
import torch
from strategies import assert_same_bits
from test_kernels import (
    GEOMETRIES,
    INF,
    LARGE,
    NAN,
    SMALL,
    SOURCES,
    assert_same_codes,
    rows,
    without_nan_signs,
)
from torch import Tensor

from slidesparse import reference
from slidesparse.kernels import Config
from slidesparse.pattern import SlideLayout, SlidePattern
from slidesparse.quantize import FP8, INT8

EPS = 1e-6
FEW = [("2:4", 33, 0), ("4:6", 72, 0), ("6:8", 76, 2), ("6:8", 37, 3), ("2_inf", 17, 0), ("6:8", 1, 7)]
# A sum of squares errs by no more than its longest chain of additions, each by 2^-24: at most 16 steps of 4, then a
# tree over at most 2^15 lanes, so 80.  The root halves that and adds its own error and those of the mean and of eps: 4.
REACH = 44  # units of the last place, of 2^-24 to 2^-23


def factors(sums: Tensor) -> Tensor:
    """[M, 1] float32: the exact 1 / sqrt(mean square + eps); 0 where float32 cannot hold the square."""
    mean = sums.double().pow(2).mean(-1, keepdim=True)
    mean = torch.where(mean > torch.finfo(torch.float32).max, INF, mean)
    return (mean + EPS).rsqrt().float()


def moved(factor: Tensor, ulps: int) -> Tensor:
    return (factor.view(torch.int32) + ulps).view(torch.float32)


def assert_norm_of_some_factor(
    found: tuple[Tensor, Tensor], sums: Tensor, weight: Tensor, source: torch.dtype, layout: SlideLayout
) -> int:
    """Each row of codes and scales is the reference's for a factor within REACH; the farthest that was needed."""
    codes, scales = without_nan_signs(found[0].cpu()), found[1].cpu()
    exact = factors(sums)
    unexplained = torch.ones(sums.shape[0], dtype=torch.bool)
    for ulps in sorted(range(-REACH, REACH + 1), key=abs):
        at = unexplained.nonzero().flatten()
        normed = (sums[at] * moved(exact[at], ulps) * weight.float()).to(source)
        q, scale = reference.quant_slide(normed, layout, found[0].dtype)
        equal = without_nan_signs(q) == codes[at]
        if found[0].dtype == FP8:  # a row of NaNs: its padding may be NaN too
            equal |= exact[at].isnan() & (codes[at] == 0x7F)
        same = equal.all(1) & (scale == scales[at]).flatten()
        unexplained[at[same]] = False
        if not unexplained.any():
            return abs(ulps)
    raise AssertionError(
        f"rows {unexplained.nonzero().flatten().tolist()} are no norm of x: exact {exact.flatten()}"
    )


def check_norm(
    pattern: str, k: int, phase: int, source: torch.dtype, dtype: torch.dtype, m: int, add: bool, device: str
) -> None:
    """Rows in one block and in several, contiguous and with gaps; weights of the dtype of x and of float32."""
    from slidesparse.kernels.norm_quant_slide import norm_quant_slide

    generator = torch.Generator().manual_seed(k)
    x = rows(m, k, source)
    residual = torch.randn(m, k, generator=generator).to(source) if add else None
    sums = x.float() if residual is None else x.float() + residual.float()
    weight = torch.randn(k, generator=generator)
    layout = SlidePattern.parse(pattern).layout(k, phase)
    wide = torch.full((m, k + 6), NAN, dtype=source, device=device)
    wide[:, 2 : k + 2] = x.to(device)
    launches = (None, SMALL) if k < 1000 else (None, Config(512, 1, 4))
    start = 7 if device == "cpu" else 0  # the interpreter is slow: in several blocks only the special rows
    for launch, first, tokens, gain in zip(
        launches, (0, start), (x.to(device), wide[:, 2 : k + 2]), (weight.to(source), weight), strict=True
    ):
        given = [tokens[first:]] if residual is None else [tokens[first:], residual[first:].to(device)]
        before = [one.clone() for one in given]
        other = given[1] if add else None
        q, scale, total = norm_quant_slide(
            given[0], other, gain.to(device), EPS, layout.length, phase, dtype, launch=launch
        )
        assert_norm_of_some_factor((q, scale), sums[first:], gain, source, layout)
        assert (total is None) == (residual is None)
        if total is not None:
            expected = sums[first:].to(source)
            assert torch.equal(total.cpu().isnan(), expected.isnan())
            assert_same_bits(total.cpu().nan_to_num(nan=0.0), expected.nan_to_num(nan=0.0))
        for one, same in zip(given, before, strict=True):
            assert_same_bits(one, same)


def gated_by_numpy(x: Tensor) -> Tensor:
    """silu(gate) * up as the interpreter computes it."""
    gate, up = (half.float().numpy() for half in x.chunk(2, -1))
    with np.errstate(all="ignore"):
        act = gate / (np.exp(-gate) + np.float32(1.0)) * up
    return torch.from_numpy(act).to(x.dtype)


@cache
def compiled_activation() -> Callable[[Tensor], Tensor]:
    """silu(gate) * up by the code that Inductor makes of vLLM's SiluAndMul, once for all shapes of a dtype."""

    def act(x: Tensor) -> Tensor:
        d = x.shape[-1] // 2
        return torch.nn.functional.silu(x[..., :d]) * x[..., d:]

    return torch.compile(act, dynamic=True)


def check_activation(
    pattern: str, k: int, phase: int, source: torch.dtype, dtype: torch.dtype, m: int, device: str
) -> None:
    """Bit for bit, rows in one block and in several, contiguous and with gaps."""
    from slidesparse.kernels.silu_quant_slide import silu_quant_slide

    x = torch.cat([rows(m, k, source), rows(m, k, source).flip(1)], 1).to(device)
    layout = SlidePattern.parse(pattern).layout(k, phase)
    act = gated_by_numpy(x) if device == "cpu" else compiled_activation()(x)
    expected = reference.quant_slide(act.cpu(), layout, dtype)
    wide = torch.full((m, 2 * k + 6), INF, dtype=source, device=device)
    wide[:, 2 : 2 * k + 2] = x
    before = x.clone()
    launches = (None, SMALL) if k < 1000 else (None, Config(512, 1, 4))
    start = 7 if device == "cpu" else 0
    for launch, first, tokens in zip(launches, (0, start), (x, wide[:, 2 : 2 * k + 2]), strict=True):
        found = silu_quant_slide(tokens[first:], layout.length, phase, dtype, launch=launch)
        assert_same_codes(found, (expected[0][first:], expected[1][first:]))
    assert_same_bits(x, before)


def check_padding(device: str) -> None:
    """Columns beyond K' are zero; memory for more rows is there behind the results."""
    from slidesparse.kernels.norm_quant_slide import norm_quant_slide
    from slidesparse.kernels.silu_quant_slide import silu_quant_slide

    x = torch.randn(5, 40, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16).to(device)
    layout = SlidePattern(8).layout(40)
    ones = torch.ones(40, dtype=torch.bfloat16, device=device)
    for launch in (None, SMALL):
        q, scale, _ = norm_quant_slide(x, x, ones, EPS, 8, 0, INT8, 96, 32, launch)
        gated = silu_quant_slide(torch.cat([x, x], 1), 8, 0, INT8, 96, 32, launch)
        for codes, scales in ((q, scale), gated):
            assert codes.shape == (5, 96)
            assert not codes[:, layout.slided :].any()
            assert codes[:, : layout.slided].any()
            assert codes.untyped_storage().nbytes() == 32 * 96
            assert scales.untyped_storage().nbytes() == 32 * 4


def check_nothing(device: str) -> None:
    """No rows, or no columns: shapes and scales of the reference."""
    from slidesparse.kernels.norm_quant_slide import norm_quant_slide
    from slidesparse.kernels.silu_quant_slide import silu_quant_slide

    for m, k in ((0, 64), (3, 0), (0, 0)):
        x = torch.ones(m, k, device=device)
        for dtype in (INT8, FP8):
            expected = reference.quant_slide(x.cpu(), SlidePattern(8).layout(k), dtype)
            q, scale, total = norm_quant_slide(x, x, torch.ones(k, device=device), EPS, 8, 0, dtype)
            assert_same_codes((q, scale), expected)
            assert total is not None
            assert total.shape == x.shape
            assert_same_codes(silu_quant_slide(torch.cat([x, x], 1), 8, 0, dtype), expected)
            half = torch.ones(m, 2 * k + 8, dtype=torch.bfloat16, device=device)
            found = norm_quant_slide(half[:, :k], half[:, :k], half.new_ones(k), EPS, 8, 0, dtype)
            assert_same_codes(found[:2], expected)
            assert_same_codes(silu_quant_slide(half[:, : 2 * k], 8, 0, dtype), expected)


def check_refusals(device: str) -> None:
    """What the kernels cannot take is refused with what was found."""
    from slidesparse.kernels.norm_quant_slide import norm_quant_slide
    from slidesparse.kernels.silu_quant_slide import silu_quant_slide

    x, ones = torch.ones(4, 8, device=device), torch.ones(8, device=device)
    refused: list[tuple[type[Exception], str, Callable[[], object]]] = [
        (
            ValueError,
            "weight has 7 elements; x has 8",
            lambda: norm_quant_slide(x, None, ones[:7], EPS, 8, 0, INT8),
        ),
        (
            TypeError,
            "residual has dtype torch.bf",
            lambda: norm_quant_slide(x, x.bfloat16(), ones, EPS, 8, 0, INT8),
        ),
        (
            ValueError,
            "residual has shape \\(3, 8\\)",
            lambda: norm_quant_slide(x, x[:3], ones, EPS, 8, 0, INT8),
        ),
        (ValueError, "block length 7", lambda: norm_quant_slide(x, None, ones, EPS, 7, 0, INT8)),
        (TypeError, "cannot quantize to torch.uint8", lambda: silu_quant_slide(x, 8, 0, torch.uint8)),
        (ValueError, "x has 7 columns", lambda: silu_quant_slide(x[:, :7], 8, 0, INT8)),
    ]
    for error, words, call in refused:
        with pytest.raises(error, match=words):
            call()


def cases(large: bool) -> Iterator[tuple[str, Callable[[str], None]]]:
    """(name, check), the check to be called with a device; ``large``: also sizes for a GPU."""
    sizes = [(12, *geometry) for geometry in (GEOMETRIES if large else FEW)]
    if large:
        sizes += [(m, *geometry) for geometry in LARGE for m in (12, 300)]
    for m, pattern, k, phase in sizes:
        all_kinds = (pattern, k) in (("6:8", 76), ("6:8", 18944))
        for source in SOURCES if all_kinds else SOURCES[:1]:
            for dtype in (INT8, FP8) if all_kinds else (INT8,):
                name = f"{pattern} K={k} phase={phase} M={m} {source} {dtype}".replace("torch.", "")
                arguments = (pattern, k, phase, source, dtype, m)
                yield f"add and norm {name}", partial(check_norm, *arguments, True)
                yield f"activation {name}", partial(check_activation, *arguments)
                if large or not all_kinds:
                    yield f"norm {name}", partial(check_norm, *arguments, False)
    yield "padding", check_padding
    yield "nothing", check_nothing
    yield "refusals", check_refusals


INTERPRETED = dict(cases(large=False))
ON_GPU = dict(cases(large=True))


@pytest.fixture(scope="module")
def interpreted() -> dict[str, str | None]:
    """What each case of the interpreter said, None where it passed."""
    return interpreter.run(__file__)


@pytest.mark.parametrize("name", INTERPRETED)
def test_interpreted(interpreted: dict[str, str | None], name: str) -> None:
    assert interpreted[name] is None, interpreted[name]


def test_another_norm_is_noticed() -> None:
    """The comparison lets no other eps, rounding or order of products pass."""
    generator = torch.Generator().manual_seed(0)
    sums, weight = torch.randn(8, 80, generator=generator), torch.randn(80, generator=generator)
    layout = SlidePattern(8).layout(80)
    source, factor = torch.bfloat16, factors(sums)
    right = (sums * factor * weight).to(source)
    assert (
        assert_norm_of_some_factor(reference.quant_slide(right, layout, INT8), sums, weight, source, layout)
        == 0
    )
    for wrong in (
        (sums * moved(factor, REACH * 64) * weight).to(source),
        (sums * factor).to(source) * weight.to(source),
        sums * factor * weight,
    ):
        with pytest.raises(AssertionError, match="are no norm of x"):
            assert_norm_of_some_factor(
                reference.quant_slide(wrong, layout, INT8), sums, weight, source, layout
            )


@pytest.mark.gpu
@pytest.mark.parametrize("name", ON_GPU)
def test_on_the_gpu(name: str) -> None:
    ON_GPU[name]("cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [INT8, FP8])
@pytest.mark.parametrize("k", [2048, 3584, 5120])
def test_inductor_norms_as_the_kernel_does(k: int, dtype: torch.dtype) -> None:
    """What Inductor makes of vLLM's norm is one of the same family: both differ in the factor's last bits only."""
    from slidesparse.kernels.norm_quant_slide import norm_quant_slide
    from slidesparse.kernels.quant_slide import quant_slide

    def norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        total = x.float() + residual.float()
        normed = total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + EPS)
        return normed.to(weight.dtype) * weight, total.to(x.dtype)

    torch._dynamo.reset()  # else it stops compiling for new shapes after some
    generator = torch.Generator().manual_seed(k)
    x, residual = (torch.randn(500, k, generator=generator).to(torch.bfloat16) for _ in range(2))
    weight = torch.randn(k, generator=generator).to(torch.bfloat16)
    layout = SlidePattern(8).layout(k)
    normed, total = torch.compile(norm, dynamic=False)(x.cuda(), residual.cuda(), weight.cuda())
    unfused = quant_slide(normed, 8, 0, dtype)
    q, scale, sums = norm_quant_slide(x.cuda(), residual.cuda(), weight.cuda(), EPS, 8, 0, dtype)
    assert sums is not None
    assert_same_bits(sums, total)
    exact = x.float() + residual.float()
    assert_norm_of_some_factor(unfused, exact, weight, torch.bfloat16, layout)
    assert_norm_of_some_factor((q, scale), exact, weight, torch.bfloat16, layout)
    steps = q.view(torch.int8).int() - unfused[0].view(torch.int8).int()
    differ = (steps != 0).float().mean().item()
    print(
        f"K={k} {dtype}: {differ:.2e} of the codes differ from Inductor's norm, by {steps.abs().max()} at most"
    )
    assert steps.abs().max() <= 1


if __name__ == "__main__":
    interpreter.report(INTERPRETED)
