"""Wanda: prune by weight magnitude times input norm, without updating weights (arXiv 2306.11695, equation 1)."""

from __future__ import annotations

from torch import Tensor

from slidesparse.methods.method import Method, Pruner
from slidesparse.pattern import Pattern
from slidesparse.prune import prune_by_importance


class Wanda(Method):
    """Remove the two weights of each block with the smallest product of magnitude and input norm."""

    def calibrated(self, hessian: Tensor, tokens: int, sweeps: int, ternary: bool = False) -> Pruner:
        return lambda w, pattern, _: wanda(w, hessian, pattern)


def wanda(w: Tensor, hessian: Tensor, pattern: Pattern) -> Tensor:
    """Zero the two weights of each block with the smallest |w[n, k]| * sqrt(sum over tokens of x[k]^2).

    Args:
        w: [N, K] float32 or float64.
        hessian: [K, K], the sum of x x^T.

    Returns:
        A new [N, K] whose remaining weights are unchanged bit for bit.  A block whose inputs were all zero loses its
        leftmost weights.
    """
    norms = hessian.diagonal().clamp(min=0).sqrt().to(w.dtype)
    return prune_by_importance(w, w.abs() * norms, pattern)
