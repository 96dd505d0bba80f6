"""What pruned layers should give: what the dense model gives, not what its weights make of inputs that have changed.

Behind pruned layers a layer reads a instead of the d that it reads in the dense model, with weights w [N, K].  The
weights that, reading a, come nearest to w d in the sum of squares over tokens are, with H = sum of a a^T::

    target = w + E H^-1          E [N, K] = sum of w (d - a) a^T

and what pruning them loses is again measured by H.  So they are pruned instead of w, and each layer makes up for some
of what those before it did wrong.  In the first pruned layer d = a, and the target is w.  The idea is that of GPTAQ
(arXiv 2504.02692), which quantizes.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from slidesparse.calibrate.cache import Inputs
from slidesparse.calibrate.forward import fast_products
from slidesparse.calibrate.hessian import Hessian, require_finite


class Drift:
    """How far layers that read the same inputs have moved from what they give in the dense model.

    Kept is the sum of (d - a) a^T [K, K], or, where that is less work, that of w (d - a) a^T for all rows at once.
    """

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        """``weights``: [N, K] each, by name."""
        self._weights = dict(weights)
        rows, (in_features,) = sum(len(w) for w in weights.values()), {w.shape[1] for w in weights.values()}
        first = next(iter(weights.values()))
        self._stacked = torch.cat([*weights.values()]) if 2 * rows < in_features else None
        self._sum = first.new_zeros(in_features if self._stacked is None else rows, in_features)

    def add(self, ours: Tensor, dense: Tensor) -> None:
        """Count tokens: ``ours`` [..., K] what the pruned model's layers read, ``dense`` [..., K] the dense one's."""
        a, d = (x.reshape(-1, x.shape[-1]).to(self._sum.dtype) for x in (ours, dense))
        moved = d - a if self._stacked is None else (d - a) @ self._stacked.t()
        self._sum.addmm_(moved.t(), a)

    def errors(self) -> dict[str, Tensor]:
        """E = sum of w (d - a) a^T [N, K] of each layer."""
        if self._stacked is None:
            return {name: w @ self._sum for name, w in self._weights.items()}
        parts = self._sum.split([len(w) for w in self._weights.values()])
        return dict(zip(self._weights, parts, strict=True))


def gather(
    inputs: Inputs, stage: int, dense: Inputs | None = None, weights: Mapping[str, Tensor] | None = None
) -> tuple[Hessian, Drift | None]:
    """H of what a stage reads, and with ``dense``, the same batches in the dense model, the drift of ``weights``."""
    hessian: Hessian | None = None
    drift = Drift(weights) if dense is not None and weights else None
    with fast_products(inputs.states.device):
        for batch in range(len(inputs)):
            a = inputs.input(stage, batch)
            hessian = hessian or Hessian(a.shape[-1], a.device)
            hessian.add(a)
            if dense is not None and drift is not None:
                drift.add(a, dense.input(stage, batch))
    assert hessian is not None
    require_finite(hessian.matrix)
    return hessian, drift


def target_of(w: Tensor, error: Tensor, upper: Tensor) -> Tensor:
    """The weights to prune instead of ``w``, of the dtype of ``upper``.

    Args:
        w: [N, K] of any float dtype.
        error: [N, K], E of `Drift.errors`.
        upper: [K, K], the `slidesparse.calibrate.sparsegpt.factor` of H, whose U^T U is the damped H^-1.
    """
    return w.to(upper.dtype) + (error.to(upper.dtype) @ upper.t()) @ upper
