"""Weights stored without their zeros, as compressed-tensors up to 0.14 did."""

from __future__ import annotations

import numpy as np
import torch
from strategies import raw
from torch import Tensor


def packed(w: Tensor, width: int | None = None) -> tuple[Tensor, Tensor]:
    """Split a weight into values, ``width`` of each row or its non-zeros in one vector, and their bitmask."""
    kept = raw(w) != 0
    if width is not None:
        first = kept.int().argsort(dim=-1, descending=True, stable=True)[:, :width]
        kept = torch.zeros_like(kept).scatter_(1, first, True)
    values = raw(w)[kept].view(w.dtype)
    bitmask = torch.from_numpy(np.packbits(kept.numpy(), axis=-1, bitorder="little"))
    return (values if width is None else values.view(len(w), width)), bitmask
