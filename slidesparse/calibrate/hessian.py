"""What a linear layer sees: H = sum over tokens of x x^T, and the errors of its output that follow from it."""

from __future__ import annotations

import torch
from torch import Tensor

from slidesparse.calibrate.errors import CalibrationError

BAND = 2048  # columns of H that are summed at a time, right of the diagonal only


class Hessian:
    """H [K, K], the sum of x x^T over calibration tokens: half the Hessian of a layer's squared output error."""

    def __init__(
        self, in_features: int, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
    ) -> None:
        self._sum = torch.zeros(in_features, in_features, dtype=dtype, device=device)
        self._bands = [slice(start, min(start + BAND, in_features)) for start in range(0, in_features, BAND)]
        self._mirrored = True
        self.tokens = 0

    def add(self, x: Tensor) -> None:
        """Count the tokens ``x`` [..., K]."""
        rows = x.reshape(-1, x.shape[-1]).to(self._sum.dtype)
        for band in self._bands:
            self._sum[band, band.start :].addmm_(rows[:, band].t(), rows[:, band.start :])
        self._mirrored = False
        self.tokens += len(rows)

    @property
    def matrix(self) -> Tensor:
        """H, its lower left the mirror of its upper right."""
        for band in () if self._mirrored else self._bands:
            self._sum[band.stop :, band] = self._sum[band, band.stop :].t()
        self._mirrored = True
        return self._sum


def require_finite(hessian: Tensor) -> None:
    """Raise CalibrationError for an H [K, K] with NaN or infinity: of an input, or because H overflows."""
    if not bool(torch.isfinite(hessian.diagonal()).all()):
        raise CalibrationError(
            "the inputs of a layer are not finite (NaN or Inf), so nothing can be learned from them; the weights or "
            "the calibration ids are damaged, or the model overflows float32"
        )


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
    found = float(((w @ hessian) * w).sum(-1, dtype=torch.float64).sum())
    return max(found, 0.0)  # in this order NaN stays NaN
