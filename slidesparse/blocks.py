"""Mixed weights of dense and 2:4 blocks: find the blocks that are 2:4, and choose those to prune.

The Hopper kernels multiply a weight [N, K] in blocks of 64 out-features, a strip, by 128 in-features.  Each is stored
dense or 2:4.  A `MixedPattern` asks for a share of the blocks of every strip, so that strips take equally long; the
columns of each eighth of K have about the same share too, so that tensor-parallel shards of either kind do::

    strip 0     | 2:4 | dense | 2:4   | dense |     2:4@50%
    strip 1     | dense | 2:4 | dense | 2:4   |
"""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slidesparse import slide
from slidesparse.pattern import HARDWARE_LENGTH, HARDWARE_NONZEROS, MixedPattern, Pattern
from slidesparse.slide import nonzero

STRIP = 64  # out-features of a block
BLOCK = 128  # in-features
PARTS = 8  # parts of the columns with about the same share of 2:4 blocks each


def strips_of(n: int) -> int:
    """Return how many strips ``n`` out-features fill, the last one perhaps in part."""
    return -(-n // STRIP)


def blocks_of(columns: int) -> int:
    """Return how many blocks ``columns`` fill, the last one perhaps in part."""
    return -(-columns // BLOCK)


def dense_blocks(weight: Tensor) -> Tensor:
    """Return which blocks of [N, K] have a group of four with more than two non-zeros, bool [strips, blocks]."""
    k = weight.shape[1]
    dense = []
    for rows in weight.split(STRIP * 64):  # in chunks, which bounds the memory
        kept = torch.nn.functional.pad(
            nonzero(rows), (0, blocks_of(k) * BLOCK - k, 0, strips_of(rows.shape[0]) * STRIP - rows.shape[0])
        )
        groups = kept.reshape(-1, STRIP, blocks_of(k), BLOCK // HARDWARE_LENGTH, HARDWARE_LENGTH)
        counts = groups.sum(-1, dtype=torch.uint8)
        dense.append((counts > HARDWARE_NONZEROS).any(3).any(1))
    return torch.cat(dense) if dense else weight.new_zeros(0, blocks_of(k), dtype=torch.bool)


def missing(dense: Tensor, pattern: MixedPattern) -> int:
    """Return how many more blocks must be 2:4 for the share of ``pattern``; ``dense`` is from `dense_blocks`."""
    return max(0, math.ceil(pattern.share * dense.numel()) - int((~dense).sum()))


def obeys(w: Tensor, pattern: Pattern) -> bool:
    """Return whether ``w`` [N, K] obeys a pattern of either kind."""
    if isinstance(pattern, MixedPattern):
        return missing(dense_blocks(w), pattern) == 0
    return slide.obeys(w, pattern)


def choose_blocks(costs: Tensor, share: Fraction) -> Tensor:
    """Choose the blocks that become 2:4: those of least cost, as many in each strip.

    Args:
        costs: [N, G] any float dtype, not negative: what it costs to make each group of four columns 2:4.
        share: of the blocks of a weight; rounded up to whole blocks over the strips from the first on.

    Returns:
        bool [N, G]: whether a group lies in a block that becomes 2:4.
    """
    rows, groups = costs.shape
    strips, blocks, of_block = strips_of(rows), blocks_of(groups * HARDWARE_LENGTH), BLOCK // HARDWARE_LENGTH
    padded = torch.nn.functional.pad(costs, (0, blocks * of_block - groups, 0, strips * STRIP - rows))
    sums = padded.view(strips, STRIP, blocks, of_block).sum((1, 3), dtype=torch.float64).cpu()
    ends = [math.ceil(number * share * blocks) for number in range(strips + 1)]
    ranks = sums.argsort(dim=1, stable=True).argsort(1)
    chosen = ranks < (torch.tensor(ends[1:]) - torch.tensor(ends[:-1]))[:, None]
    _balance(sums.numpy(), chosen.numpy())
    mask = chosen.repeat_interleave(STRIP, 0)[:rows].repeat_interleave(of_block, 1)[:, :groups]
    return mask.to(costs.device)


def _balance(costs: NDArray[np.float64], chosen: NDArray[np.bool_]) -> None:
    """Swap blocks within strips, the cheapest swap first, until each part of the columns has its share.

    Args:
        costs: [strips, blocks].
        chosen: the same shape; changed in place.
    """
    edges = np.linspace(0, chosen.shape[1], PARTS + 1).round().astype(int)
    parts = [slice(start, stop) for start, stop in pairwise(edges.tolist())]
    targets = chosen.mean() * np.diff(edges) * len(chosen)
    while True:
        excess = np.array([chosen[:, part].sum() for part in parts]) - targets
        if excess.max() < 1 and excess.min() > -1:
            return
        most, least = parts[excess.argmax()], parts[excess.argmin()]
        out = np.where(chosen[:, most], costs[:, most], -np.inf)
        into = np.where(chosen[:, least], np.inf, costs[:, least])
        dearer = into.min(1) - out.max(1)
        strip = dearer.argmin()
        if not np.isfinite(dearer[strip]):
            return
        chosen[strip, most.start + out[strip].argmax()] = False
        chosen[strip, least.start + into[strip].argmin()] = True
