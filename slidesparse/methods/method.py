"""The interface of pruning methods."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from torch import Tensor

from slidesparse.pattern import Pattern

# (w [N, K], its pattern, E [N, K] or None) -> a new [N, K] that obeys the pattern, in float32.
# E tells how far the layer's output has moved from the dense model's; see `slidesparse.calibrate.inputs.Drift`.
Pruner = Callable[[Tensor, Pattern, Tensor | None], Tensor]


class Method:
    """The base class of pruning methods.  One object serves all layers, so it keeps no state of a layer."""

    calibration: Literal["required", "optional", "refused"] = "required"
    # Whether it changes the weights that it keeps.  Such a method may aim at the output of the dense model, and its
    # weights are fine-tuned afterwards: --sweeps, --target and --finetune are for it alone.
    updates_weights: bool = False

    def prune(self, w: Tensor, pattern: Pattern, seed: int) -> Tensor:
        """Prune rows of a layer without calibration data, which "required" methods need not define.

        Args:
            w: some rows [n, K] of a weight, in any real dtype; INT8 and FP8 codes of a quantized source too.
            seed: one number for each group of rows; the same seed must give the same result.

        Returns:
            A new [n, K] of the same dtype that obeys the pattern.
        """
        raise NotImplementedError

    def calibrated(self, hessian: Tensor, tokens: int, sweeps: int, ternary: bool = False) -> Pruner:
        """Return a function that prunes the layers that read the same inputs; "refused" methods need not define it.

        Without a definition of its own a method prunes as it does without data.

        Args:
            hessian: H [K, K] float32, the sum of x x^T over the tokens that the layers read.
            tokens: how many tokens H sums.
            sweeps: how often an iterative method goes over a layer again.
            ternary: whether all weights of a row are -s, 0 or s, and must be such afterwards.
        """
        return lambda w, pattern, _: self.prune(w, pattern, 0)
