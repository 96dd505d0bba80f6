"""A sparse weight stored as its non-zero values and a bitmask of their positions.

::

    weight      w0  0 w2 w3  0 w5 w6 w7      [N, K]
    values      w0 w2 w3 w5 w6 w7            [N, stored values of a row]
    bitmask     0b11101101                   [N, ceil(K / 8)], uint8; the first column is the lowest bit

compressed-tensors up to 0.14 stored 2:4 weights this way (``sparse-24-bitmask``): two values of each block of four,
including zeros, so that all rows have the same number.  Its ``sparse-bitmask`` stores non-zeros only, so values are
flat: those of all rows, concatenated.  Checkpoints in the former packed layout store L-2 values of each block of L.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from slidesparse.slide import bits, row_chunks

BYTE = 8  # columns of a byte of the bitmask


def decompress(values: Tensor, bitmask: Tensor, in_features: int) -> Tensor:
    """Restore a weight [N, K], on the device of its parts.

    Args:
        values: [N, V], V for each row, or flat: those of all rows, concatenated.
        bitmask: [N, ceil(K / 8)] uint8.

    Raises ValueError if the shapes, or the numbers of set bits and values, are inconsistent.
    """
    rows, flat = len(bitmask), values.dim() == 1
    expected = torch.uint8, (rows, -(-in_features // BYTE))
    if (bitmask.dtype, bitmask.shape) != expected or not (flat or values.shape[:-1] == (rows,)):
        raise ValueError(
            f"values {list(values.shape)} and a bitmask of {bitmask.dtype} {list(bitmask.shape)}; "
            f"{in_features} columns need one of uint8 {list(expected[1])}"
        )
    counts = _counts(bitmask)
    fits = counts.sum() == len(values) if flat else (counts == values.shape[1]).all()
    # bits of the last byte beyond the columns
    past = bitmask[:, -1:] >> in_features % BYTE if in_features % BYTE else bitmask[:, :0]
    if not bool(fits & ~past.any()):
        raise ValueError(
            f"{int(counts.sum())} bits set for {values.numel()} values"
            + ("" if flat else f", {values.shape[1]} in each row of {in_features} columns")
        )
    ends = [0, *counts.cumsum(0).tolist()]
    source = bits(values).reshape(-1)
    out = source.new_zeros(rows, in_features)
    narrow = 1 if out.is_cpu else 4  # larger chunks on a GPU: fewer launches, about 50 MB of temporary memory
    for part in row_chunks(rows, in_features // narrow):
        mask = _unpacked(bitmask[part], in_features)
        out[part].masked_scatter_(mask, source[ends[part.start] : ends[part.stop]])
    return out.view(values.dtype)


def _counts(bitmask: Tensor) -> Tensor:
    """Count the bits of each row, int64 [N], in sums of pairs, fours and bytes."""
    pairs = bitmask - ((bitmask >> 1) & 0x55)
    fours = (pairs & 0x33) + ((pairs >> 2) & 0x33)
    return ((fours + (fours >> 4)) & 0x0F).sum(-1)


def _unpacked(bitmask: Tensor, in_features: int) -> Tensor:
    """Unpack a bitmask [N, ceil(K / 8)] uint8 to boolean [N, K]."""
    if bitmask.is_cpu:  # several times as fast as torch
        unpacked = np.unpackbits(bitmask.numpy(), axis=-1, count=in_features, bitorder="little")
        return torch.from_numpy(unpacked).view(torch.bool)
    shifts = torch.arange(BYTE, dtype=torch.uint8, device=bitmask.device)
    return ((bitmask[..., None] >> shifts) & 1).bool().flatten(1)[:, :in_features]
