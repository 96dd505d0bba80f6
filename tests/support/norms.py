"""How the kernels that norm or gate before they quantize are compared.

A norm has one free number a row, the factor 1 / sqrt(mean square): sums in another order and an approximate root move
its last bits.  All that follows is fixed, so a kernel must give, bit for bit, what the reference gives for *some*
factor within the bound below of the exact one.  The activation has nothing free.
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


@cache
def compiled_activation() -> Callable[[Tensor], Tensor]:
    """silu(gate) * up by the code that Inductor makes of vLLM's SiluAndMul, once for all shapes of a dtype."""

    def act(x: Tensor) -> Tensor:
        d = x.shape[-1] // 2
        return torch.nn.functional.silu(x[..., :d]) * x[..., d:]

    return torch.compile(act, dynamic=True)
