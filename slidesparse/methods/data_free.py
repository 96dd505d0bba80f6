"""Magnitude and random pruning, which need no calibration data."""

from __future__ import annotations

from torch import Tensor

from slidesparse.methods.method import Method
from slidesparse.pattern import Pattern
from slidesparse.prune import prune


class Magnitude(Method):
    """Remove the two smallest weights of each block."""

    calibration = "optional"  # data do not affect the choice, but the error is measured

    def prune(self, w: Tensor, pattern: Pattern, seed: int) -> Tensor:
        return prune(w, pattern)


class Random(Method):
    """Remove two random weights of each block, for comparison."""

    calibration = "refused"

    def prune(self, w: Tensor, pattern: Pattern, seed: int) -> Tensor:
        return prune(w, pattern, "random", seed)
