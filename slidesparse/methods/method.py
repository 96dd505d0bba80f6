"""The interface of pruning methods."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from torch import Tensor

from slidesparse.pattern import Pattern

# (w [N, K], its pattern, E [N, K] or None) -> a new [N, K] that obeys the pattern, in float32.
# E describes how the layer's inputs differ from the dense model's; see `slidesparse.calibrate.inputs.Drift`.
Pruner = Callable[[Tensor, Pattern, Tensor | None], Tensor]


class Method:
    """The base class of pruning methods.  One object serves all layers, so it must not keep state of a layer."""

    calibration: Literal["required", "optional", "refused"] = "required"
    # Whether the method updates the remaining weights.  Only then do --sweeps, --target and --finetune apply.
    updates_weights: bool = False

    def prune(self, w: Tensor, pattern: Pattern, seed: int) -> Tensor:
        """Prune rows of a layer without calibration data; methods with calibration "required" need not define it.

        Args:
            w: rows [n, K] of a weight in any real dtype, or INT8 or FP8 codes of a quantized source.
            seed: differs between groups of rows; the result must be deterministic for the same seed.

        Returns:
            A new [n, K] of the same dtype that obeys the pattern.
        """
        raise NotImplementedError

    def calibrated(self, hessian: Tensor, tokens: int, sweeps: int, ternary: bool = False) -> Pruner:
        """Return a function that prunes layers with the given inputs; by default it prunes as `prune`, without data.

        Args:
            hessian: H [K, K] float32, the sum of x x^T over the tokens of the layers' inputs.
            tokens: number of tokens in H.
            sweeps: number of refinement passes of an iterative method.
            ternary: whether all weights of a row are -s, 0 or s, and must remain so.
        """
        return lambda w, pattern, _: self.prune(w, pattern, 0)
