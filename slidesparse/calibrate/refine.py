"""Choose again, block by block: each sweep can only lessen the error that SparseGPT left.

SparseGPT decides on a block while those behind are frozen, and never comes back.  Here every block is reopened in turn,
all others as they are: its best weights without a pattern follow from the gradient, and which two go is decided anew by
the formulas of `slidesparse.calibrate.sparsegpt`, with the block's own part of H::

    G = (w - w0) H      u = w_g - G_g (H_gg)^-1      w_g <- u without its cheapest two      G += (change of w_g) H_g

w0 being the weights before pruning.  What a block held before is among the choices, so no step makes (w - w0) H (w -
w0)^T larger.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slidesparse.calibrate.sparsegpt import BATCH_COLUMNS, DAMPING, blocks, choose, damped, rules
from slidesparse.pattern import SlidePattern

SWEEPS = 4


def refine(
    w: Tensor,
    pruned: Tensor,
    hessian: Tensor,
    pattern: SlidePattern,
    phase: int = 0,
    sweeps: int = SWEEPS,
    damping: float = DAMPING,
) -> Tensor:
    """Lessen the error of ``pruned`` [N, K], a form of ``w`` [N, K] that obeys ``pattern``; H is ``hessian`` [K, K].

    Args:
        sweeps: how often to go through all blocks.
        damping: as in `slidesparse.calibrate.sparsegpt.factor`.

    Returns:
        A new [N, K] of the dtype of ``pruned`` that obeys the pattern, its pruned weights +0.0.
    """
    out = pruned.clone()
    if pattern.length is None:
        return out
    h = damped(hessian, damping)
    groups = blocks(w.shape[1], pattern, phase)
    inverses = _inverses(h, groups, pattern.length, out.dtype)
    found = rules(inverses, pattern.length)
    h = h.to(out.dtype)
    start_from = w.to(out.dtype)
    step = max(1, BATCH_COLUMNS // pattern.length)
    for _ in range(sweeps):
        gradient = (out - start_from) @ h
        for first in range(0, len(groups), step):
            batch = slice(first, first + step)
            start, stop = groups[batch][0].start, groups[batch][-1].stop
            before = out[:, start:stop].clone()
            for group, inverse, rule in zip(groups[batch], inverses[batch], found[batch], strict=True):
                here = out[:, group]
                best = torch.addmm(here, gradient[:, group], inverse, alpha=-1)
                if rule is not None:
                    share, gone = choose(best, rule)
                    best.addmm_(share, inverse, alpha=-1).masked_fill_(gone, 0.0)
                gradient[:, group.stop : stop].addmm_(best - here, h[group, group.stop : stop])
                here.copy_(best)
            gradient[:, stop:].addmm_(out[:, start:stop] - before, h[start:stop, stop:])
    return out


def _inverses(h: Tensor, groups: list[slice], length: int, dtype: torch.dtype) -> list[Tensor]:
    """(H_gg)^-1 of each block, whole ones at once."""
    whole = [h[group, group] for group in groups if group.stop - group.start == length]
    found = iter(torch.linalg.inv(torch.stack(whole)).to(dtype) if whole else ())
    return [
        next(found) if g.stop - g.start == length else torch.linalg.inv(h[g, g]).to(dtype) for g in groups
    ]
