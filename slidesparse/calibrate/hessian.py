"""What a linear layer sees: H = sum over tokens of x x^T, and the errors of its output that follow from it."""

from __future__ import annotations

import torch
from torch import Tensor


class Hessian:
    """H [K, K], the sum of x x^T over calibration tokens: half the Hessian of a layer's squared output error."""

    def __init__(
        self, in_features: int, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
    ) -> None:
        self.matrix = torch.zeros(in_features, in_features, dtype=dtype, device=device)
        self.tokens = 0

    def add(self, x: Tensor) -> None:
        """Count the tokens ``x`` [..., K]."""
        rows = x.reshape(-1, x.shape[-1]).to(self.matrix.dtype)
        self.matrix.addmm_(rows.t(), rows)
        self.tokens += len(rows)


def output_error(w: Tensor, found: Tensor, hessian: Tensor) -> float:
    """|X (w - found)^T| / |X w^T| in Frobenius norms, both weights [N, K], over the tokens of ``hessian`` [K, K].

    0 when neither gives any output, infinity when only ``w`` gives none.
    """
    w = w.to(hessian.dtype)
    lost, whole = (_energy(x, hessian) for x in (w - found.to(hessian.dtype), w))
    if whole == 0:
        return 0.0 if lost == 0 else float("inf")
    return float((lost / whole) ** 0.5)


def _energy(w: Tensor, hessian: Tensor) -> float:
    """trace(w H w^T), summed in float64; at least 0, which rounding may undercut."""
    return max(0.0, float(((w @ hessian) * w).sum(-1, dtype=torch.float64).sum()))
