"""Wanda: weights times the size of their inputs, without any update (arXiv 2306.11695, equation 1)."""

from __future__ import annotations

from torch import Tensor

from slidesparse.pattern import SlidePattern
from slidesparse.prune import prune_by_importance


def wanda(w: Tensor, hessian: Tensor, pattern: SlidePattern, phase: int = 0) -> Tensor:
    """Zero the two of each block with the smallest |w[n, k]| * sqrt(sum over tokens of x[k]^2).

    Args:
        w: [N, K] float32 or float64.
        hessian: [K, K], the sum of x x^T.
        phase: zero columns before the row, as in `slidesparse.slide.slide`.

    Returns:
        A new [N, K]; every kept weight unchanged bit for bit.  A block of which no input was ever seen loses its
        leftmost weights.
    """
    norms = hessian.diagonal().clamp(min=0).sqrt().to(w.dtype)
    return prune_by_importance(w, w.abs() * norms, pattern, phase)
