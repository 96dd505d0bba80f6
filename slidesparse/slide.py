"""Slide weights into 2:4 windows and back, and lift activations to match.  In torch, on any device.

Which window takes a weight has a closed form.  Split the block into pairs; window j sees the pairs j and
j+1, so a pair has an earlier and a later window::

    pair      0   1   2   3        window 0: pairs 0 1
              ab  cd  ef  gh       window 1: pairs 1 2
                                   window 2: pairs 2 3

Greedily, left to right, a window takes what its first pair has left, then as much of its second pair as
two places allow (Algorithm 2 of arXiv 2603.05232).  What pair j leaves to its later window is then
r_j = max(0, r_{j-1} + c_j - 2) with c_j its non-zeros and r_0 = c_0.  As c_j - 2 <= 0, that is
r_j = max(0, 2 - z_j) where z_j counts the zeros of pairs 0..j: a cumulative sum instead of a loop.
The block fits when it has two zeros, for then the last pair, which has no later window, leaves nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from slidesparse.pattern import (
    HARDWARE_LENGTH,
    STRIDE,
    ZEROS,
    Pattern,
    PatternError,
    SlideLayout,
    SlidePattern,
)

CHUNK_ELEMENTS = 2**20  # elements converted at a time; 2**19 and 2**21 were measured to be slower
ROWS = 16  # rows that tell at once that most weights obey no pattern
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Violation(NamedTuple):
    """Blocks of a weight that hold more non-zeros than the pattern allows."""

    total: int  # offending blocks in all
    row: int  # row of the first one
    block: int  # its block within the row
    nonzeros: int  # its number of non-zeros


def bits(w: Tensor) -> Tensor:
    """Return a view of ``w`` as integers of its width, so that FP8 and -0.0 move unchanged."""
    return w if not w.dtype.is_floating_point else w.view(_BITS[w.element_size()])


def nonzero(w: Tensor) -> Tensor:
    """Return which elements are not zero, boolean [...]; -0.0 is zero.  Works for float8, which has no ``!=``."""
    if w.dtype.is_floating_point and w.element_size() == 1:
        return (w.view(torch.int8) & 0x7F) != 0
    return w != 0


def blocks_of(w: Tensor, layout: SlideLayout) -> Tensor:
    """Split rows [N, K] into blocks [N, blocks, L], with zeros added on the left (phase) and right.

    Returns a view when nothing is added.
    """
    right = layout.padded - layout.phase - layout.in_features
    if layout.blocks and (layout.phase or right):
        w = torch.nn.functional.pad(bits(w), (layout.phase, right)).view(w.dtype)
    return w.reshape(w.shape[0], layout.blocks, layout.length)


def row_chunks(rows: int, columns: int) -> Iterator[slice]:
    """Yield slices over ``rows`` of about CHUNK_ELEMENTS elements each, which bounds temporary memory."""
    step = max(1, CHUNK_ELEMENTS // max(1, columns))
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


def violations(w: Tensor, pattern: SlidePattern, phase: int = 0) -> Violation | None:
    """Return the first block of ``w`` [N, K] with more than L-2 non-zeros and how many such there are, or None."""
    if pattern.length is None:
        return None
    layout = pattern.layout(w.shape[1], phase)
    count_type = torch.int16 if layout.length < 2**15 else torch.int32
    first: Violation | None = None
    for rows in row_chunks(*w.shape):
        counts = blocks_of(nonzero(w[rows]), layout).sum(-1, dtype=count_type)
        bad = counts > layout.length - ZEROS
        total = int(bad.sum())
        if first:
            first = first._replace(total=first.total + total)
        elif total:
            row, block = divmod(int(bad.flatten().to(torch.int8).argmax()), layout.blocks)
            first = Violation(total, rows.start + row, block, int(counts[row, block]))
    return first


def obeys(w: Tensor, pattern: Pattern | None, phase: int = 0) -> bool:
    """Return whether ``w`` [N, K] has at most L-2 non-zeros in each block; any obeys None and mixed patterns."""
    return not isinstance(pattern, SlidePattern) or not (
        violations(w[:ROWS], pattern, phase) or violations(w, pattern, phase)
    )


def violation_message(layer: str, violation: Violation, pattern: SlidePattern, phase: int = 0) -> str:
    """Return the message for weights that break their pattern: layer, row, block, count, and the remedy."""
    assert pattern.length is not None  # any row obeys 2_inf
    return (
        f"{layer}: row {violation.row}, block {violation.block} "
        f"(columns from {violation.block * pattern.length - phase}) has {violation.nonzeros} non-zeros, "
        f"{pattern} allows {pattern.length - ZEROS}; {violation.total} blocks of the layer break the pattern. "
        f"Prune the weights first: slidesparse convert SRC OUT --sparsity {pattern.ratio}"
    )


def require_pattern(w: Tensor, pattern: SlidePattern, layer: str, phase: int = 0) -> None:
    """Raise PatternError with layer, row, block and count unless ``w`` [N, K] obeys ``pattern``."""
    violation = violations(w, pattern, phase)
    if violation:
        raise PatternError(violation_message(layer, violation, pattern, phase))


def slide(w: Tensor, pattern: SlidePattern, phase: int = 0, layer: str = "weight") -> Tensor:
    """Rewrite a weight that obeys ``pattern`` as overlapping 2:4 windows, without loss.

    Args:
        w: [N, K] of any real dtype (INT8, FP8, floats), any device.
        phase: zero columns to put before the row (tensor-parallel shards).
        layer: what an error calls the weight.

    Returns:
        [N, K'] of the same dtype, K' = pattern.layout(K, phase).slided.  Each group of four has at most two
        non-zeros; each weight stands in one window bit for bit, -0.0 included.

    Raises:
        PatternError: a block has more non-zeros than the pattern allows (with layer, row, block, count).
    """
    require_pattern(w, pattern, layer, phase)
    layout = pattern.layout(w.shape[1], phase)
    out = bits(w).new_empty(w.shape[0], layout.slided)
    for rows in row_chunks(*w.shape):
        windows = out[rows].view(-1, layout.windows, HARDWARE_LENGTH)
        _slide_blocks(blocks_of(w[rows], layout).flatten(0, 1), windows)
    return out.view(w.dtype)


def _slide_blocks(blocks: Tensor, out: Tensor) -> None:
    """Write blocks [B, L] as windows ``out`` [B, N-1, 4], integers of the same width."""
    pairs = bits(blocks).unflatten(1, (-1, 2))
    present = nonzero(blocks).unflatten(1, (-1, 2)).view(torch.int8)
    nonzeros = present[..., 0] + present[..., 1]
    zeros = (2 - nonzeros).cumsum(1, dtype=torch.int32)
    early = nonzeros - (ZEROS - zeros).clamp_(min=0)  # c_j - r_j, in order within the pair
    first = torch.minimum(present[..., 0], early)
    is_early = torch.stack((first, early - first), -1).to(pairs.dtype)
    is_early[:, -1] = 1  # the last pair has no later window; a -0.0 there must not be lost
    out[..., :STRIDE] = (pairs * (1 - is_early))[:, :-1]
    out[..., STRIDE:] = (pairs * is_early)[:, 1:]


def unslide(slided: Tensor, pattern: SlidePattern, in_features: int, phase: int = 0) -> Tensor:
    """Undo `slide`: [N, K'] -> [N, K], bit for bit.  Raises ValueError when K' does not fit K and the pattern."""
    layout = pattern.layout(in_features, phase)
    if slided.shape[1] != layout.slided:
        raise ValueError(
            f"a slided weight of {in_features} in-features at {pattern} has {layout.slided} columns, "
            f"found {slided.shape[1]}"
        )
    windows = bits(slided).reshape(slided.shape[0], layout.blocks, layout.windows, HARDWARE_LENGTH)
    pairs = windows.new_zeros(slided.shape[0], layout.blocks, layout.length // 2, 2)
    pairs[..., :-1, :] = windows[..., :STRIDE]
    pairs[..., 1:, :] |= windows[..., STRIDE:]  # of a weight's two places at most one has bits set
    row = pairs.reshape(slided.shape[0], layout.padded)
    return row[:, layout.phase : layout.phase + in_features].contiguous().view(slided.dtype)


def lift(x: Tensor, layout: SlideLayout) -> Tensor:
    """Repeat activations to match the windows: [..., K] -> [..., K'], so that slide(w) @ lift(x) == w @ x.

    No arithmetic.  Columns that only padding fills are zero.
    """
    if layout.blocks == 0:
        return x
    blocks = blocks_of(x.reshape(-1, x.shape[-1]), layout)
    windows = bits(blocks).unfold(-1, HARDWARE_LENGTH, STRIDE)  # [M, blocks, N-1, 4], a view
    return windows.reshape(*x.shape[:-1], layout.slided).view(x.dtype)
