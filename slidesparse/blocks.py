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


def grid(n: int, k: int) -> tuple[int, int]:
    """Return how many strips a weight [n, k] fills, and how many blocks each, the last ones perhaps in part."""
    return -(-n // STRIP), -(-k // BLOCK)


def by_weight(of_blocks: Tensor, n: int, k: int) -> Tensor:
    """Return what ``of_blocks`` [strips, blocks] says of the block of each weight, [n, k]."""
    return of_blocks.repeat_interleave(STRIP, 0)[:n].repeat_interleave(BLOCK, 1)[:, :k]


def dense_blocks(weight: Tensor) -> Tensor:
    """Return which blocks of [N, K] have a group of four with more than two non-zeros, bool [strips, blocks]."""
    dense = []
    for rows in weight.split(STRIP * 64):  # in chunks, which bounds the memory
        (n, k), (strips, blocks) = rows.shape, grid(*rows.shape)
        kept = torch.nn.functional.pad(nonzero(rows), (0, blocks * BLOCK - k, 0, strips * STRIP - n))
        groups = kept.reshape(strips, STRIP, blocks, BLOCK // HARDWARE_LENGTH, HARDWARE_LENGTH)
        counts = groups.sum(-1, dtype=torch.uint8)
        dense.append((counts > HARDWARE_NONZEROS).any(3).any(1))
    return torch.cat(dense)


def choose_blocks(strips: int, blocks: int, share: Fraction) -> Tensor:
    """Choose the blocks that become 2:4, evenly over a weight: bool [strips, blocks].

    They are ``share`` of all blocks, rounded up, and as many in each strip, at places that differ from strip to strip.
    """
    places = torch.arange(blocks) + torch.arange(strips)[:, None]
    numbers = torch.arange(strips)[:, None] * blocks + places % blocks
    # Those where ceil(number * share) grows
    return -numbers * share.numerator % share.denominator < share.numerator
