"""A sparse weight stored as its non-zero values and a bitmask of their positions.

::

    weight      w0  0 w2 w3  0 w5 w6 w7      [N, K]
    values      w0 w2 w3 w5 w6 w7            [N, stored values of a row]
    bitmask     0b11101101                   [N, ceil(K / 8)], uint8; the first column is the lowest bit

A whole block of L columns stores exactly L-2 values, including zeros if it has more than two.  So all rows have the
same number of values, and both tensors are matrices.  compressed-tensors up to 0.14 stored 2:4 weights this way
(``sparse-24-bitmask``); here any pattern is supported.  Its ``sparse-bitmask`` stores non-zeros only, so values are
flat: those of all rows, concatenated.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from slidesparse.pattern import ZEROS, SlidePattern
from slidesparse.slide import bits, blocks_of, nonzero, require_pattern, row_chunks, transposed

BYTE = 8  # columns of a byte of the bitmask


def places(pattern: SlidePattern, in_features: int) -> int:
    """Return how many values of a row of K weights are stored."""
    if pattern.length is None:
        return in_features
    blocks, tail = divmod(in_features, pattern.length)
    return blocks * (pattern.length - ZEROS) + min(tail, pattern.length - ZEROS)


def compress(w: Tensor, pattern: SlidePattern, layer: str = "weight") -> tuple[Tensor, Tensor]:
    """Split ``w`` [N, K], on the CPU, of any real dtype, into values [N, V] and bitmask [N, ceil(K / 8)].

    Each non-zero is kept bit for bit, and so is -0.0 unless it is one of the two zeros dropped from its block.
    Raises PatternError with ``layer``, row, block and count for a block with too many non-zeros.
    """
    n, k = w.shape
    width = places(pattern, k)
    values = np.empty((n, width), bits(w).numpy().dtype)
    bitmask = np.empty((n, -(-k // BYTE)), np.uint8)
    for rows in row_chunks(n, k):
        kept = _kept(w[rows], pattern).numpy()
        chosen = bits(w[rows]).numpy()[kept]
        if chosen.size != len(kept) * width:
            require_pattern(w, pattern, layer)  # raises the error with its details
        values[rows] = chosen.reshape(-1, width)
        bitmask[rows] = np.packbits(kept, axis=-1, bitorder="little")
    return torch.from_numpy(values).view(w.dtype), torch.from_numpy(bitmask)


def _kept(w: Tensor, pattern: SlidePattern) -> Tensor:
    """Select the values to store, boolean [N, K]: all of a block but its last two zeros.

    The padding of the last block is dropped first, then 0.0, then -0.0.
    """
    if pattern.length is None:
        return torch.ones(w.shape, dtype=torch.bool)
    blocks = blocks_of(w, pattern.layout(w.shape[1])).flatten(0, 1)
    columns = transposed(bits(blocks))  # [L, blocks]: column by column, each contiguous
    kept = torch.ones(columns.shape, dtype=torch.int8)
    remaining = torch.full(columns.shape[1:], ZEROS, dtype=torch.int8)  # zeros to drop
    kinds = [columns == 0]
    if w.dtype.is_floating_point:
        kinds.append(~nonzero(columns.view(w.dtype)) & (columns != 0))
    for zeros in kinds:
        for keep, zero in zip(
            reversed(kept.unbind()), reversed(zeros.view(torch.int8).unbind()), strict=True
        ):
            dropped = torch.minimum(zero, remaining)
            remaining -= dropped
            keep -= dropped
    return transposed(kept).view(torch.bool).view(len(w), -1)[:, : w.shape[1]]


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
