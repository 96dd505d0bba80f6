"""Prune a weight to its pattern by magnitude.  Pure torch, any device.

This removes the two least important weights of each block of L in a row.  Padding counts as zeros, so a tail block of
t < L weights loses max(0, t - (L - 2)) of them.  With a `MixedPattern`, only the blocks of 64 x 128 weights that
`slidesparse.blocks.choose_blocks` names are pruned.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slidesparse.blocks import by_weight, choose_blocks, grid
from slidesparse.pattern import HARDWARE_LENGTH, ZEROS, MixedPattern, Pattern, SlidePattern
from slidesparse.slide import bits, blocks_of


def prune(w: Tensor, pattern: Pattern, phase: int = 0) -> Tensor:
    """Zero the fewest and smallest weights that make ``w`` obey ``pattern``; of equal ones, the leftmost.

    Args:
        w: [N, K] of any real dtype; INT8 and FP8 are pruned by the magnitude of their codes.
        phase: zero columns before the row, as in `slidesparse.slide.slide`.

    Returns:
        A new [N, K] of the same dtype; every kept weight unchanged bit for bit.
    """
    if isinstance(pattern, MixedPattern):
        chosen = choose_blocks(*grid(*w.shape), pattern.share).to(w.device)
        pruned = prune(w, SlidePattern(HARDWARE_LENGTH))
        return torch.where(by_weight(chosen, *w.shape), bits(pruned), bits(w)).view(w.dtype)
    if pattern.length is None:
        return w.clone()
    layout = pattern.layout(w.shape[1], phase)
    right = layout.padded - layout.in_features - phase
    scores = _magnitude(w)
    if layout.blocks and (phase or right):
        scores = torch.nn.functional.pad(scores, (phase, right), value=-1)
    scores = scores.reshape(-1, layout.length).t().contiguous()  # [L, blocks]: position by position
    least = scores[0].minimum(scores[1])
    second = scores[0].maximum(scores[1])
    for position in scores[2:]:
        second = second.minimum(position.maximum(least))
        least = least.minimum(position)
    ties = ZEROS - (least < second).to(torch.int8)  # how many weights equal to the second may go
    pruned = blocks_of(bits(w), layout).flatten(0, 1).clone()
    for position, column in zip(scores, pruned.unbind(-1), strict=True):
        tie = (position == second).to(torch.int8).mul_(ties > 0)
        ties -= tie
        column *= (tie == 0) & (position >= second)
    return (
        pruned.view(w.shape[0], layout.padded)[:, phase : phase + layout.in_features]
        .contiguous()
        .view(w.dtype)
    )


def _magnitude(w: Tensor) -> Tensor:
    """Return |w| as integers in the same order: without the sign, floats compare like their bits."""
    if w.dtype == torch.int8:
        return w.to(torch.int16).abs_()
    as_integers = bits(w)
    return as_integers & torch.iinfo(as_integers.dtype).max
