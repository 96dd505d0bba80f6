"""Mixed weights of dense and 2:4 blocks: find the blocks that are 2:4, and choose those to prune.

The Hopper kernels multiply a weight [N, K] in blocks of 64 out-features, a strip, by 128 in-features.  Each is stored
dense or 2:4.  A `MixedPattern` asks for a share of the blocks of every strip, so that strips take equally long, and of
the columns, so that tensor-parallel shards of either kind have it, too::

    strip 0     | 2:4 | dense | 2:4   | dense |     2:4@50%
    strip 1     | dense | 2:4 | dense | 2:4   |
"""

from __future__ import annotations

from fractions import Fraction

import torch
from torch import Tensor

from slidesparse.pattern import HARDWARE_LENGTH, HARDWARE_NONZEROS
from slidesparse.slide import nonzero

STRIP = 64  # out-features of a block
BLOCK = 128  # in-features


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


def choose_blocks(strips: int, blocks: int, share: Fraction) -> Tensor:
    """Choose the blocks that become 2:4, evenly over a weight: bool [strips, blocks].

    They are ``share`` of all blocks, rounded up, and as many in each strip, at places that differ from strip to strip.
    """
    places = torch.arange(blocks) + torch.arange(strips)[:, None]
    numbers = torch.arange(strips)[:, None] * blocks + places % blocks
    # Those where ceil(number * share) grows
    return -numbers * share.numerator % share.denominator < share.numerator
