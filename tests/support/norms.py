"""Comparison of kernels that compute a norm or an activation before they quantize.

A norm has one inexact number per row, the factor 1 / sqrt(mean square): another summation order and an approximate root
change its last bits.  Everything after it is exact, so a kernel must equal, bit for bit, the reference for *some*
factor within the bound below of the exact one.  The activation has no inexact number.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from token_rows import INF, without_nan_signs
from torch import Tensor

from slidesparse import reference
from slidesparse.pattern import SlideLayout
from slidesparse.quantize import FP8

EPS = 1e-6
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
    actual: tuple[Tensor, Tensor], sums: Tensor, weight: Tensor, source: torch.dtype, layout: SlideLayout
) -> int:
    """Check that each row of codes and scales is the reference's for a factor within REACH.

    Returns the largest distance that was needed, in units of the last place.
    """
    codes, scales = without_nan_signs(actual[0].cpu()), actual[1].cpu()
    exact = factors(sums)
    unexplained = torch.ones(sums.shape[0], dtype=torch.bool)
    for ulps in sorted(range(-REACH, REACH + 1), key=abs):
        remaining = unexplained.nonzero().flatten()
        normed = (sums[remaining] * moved(exact[remaining], ulps) * weight.float()).to(source)
        q, scale = reference.quant_slide(normed, layout, actual[0].dtype)
        equal = without_nan_signs(q) == codes[remaining]
        if actual[0].dtype == FP8:  # a row of NaNs: its padding may be NaN too
            equal |= exact[remaining].isnan() & (codes[remaining] == 0x7F)
        matches = equal.all(1) & (scale == scales[remaining]).flatten()
        unexplained[remaining[matches]] = False
        if not unexplained.any():
            return abs(ulps)
    raise AssertionError(
        f"rows {unexplained.nonzero().flatten().tolist()} are no norm of x: exact {exact.flatten()}"
    )


@cache
def compiled_activation() -> Callable[[Tensor], Tensor]:
    """Return silu(gate) * up as Inductor compiles vLLM's SiluAndMul, once for all shapes of a dtype."""

    def act(x: Tensor) -> Tensor:
        d = x.shape[-1] // 2
        return torch.nn.functional.silu(x[..., :d]) * x[..., d:]

    return torch.compile(act, dynamic=True)
