"""SparseGPT for (2N-2):2N patterns: remove weights, and let the others of the row make up for them.

For a row w and inputs with H = sum of x x^T, removing the weights P of a block while all columns F from the block
on stay free costs, and asks of the row, by the formulas of the optimal brain surgeon::

    cost(P) = w_P (A_PP)^-1 w_P^T      w_F -= w_P (A_PP)^-1 A_PF      A = (H_FF)^-1

Blocks go from left to right; those behind are frozen.  With H^-1 = U^T U, U upper triangular, A = U_FF^T U_FF, so
that one factorization serves all rows and blocks, and its corner U_gg all that the choice in block g needs::

    columns    frozen | g: L columns | rest of the batch | later batches
    U                 | U_gg         | U[g, batch]       | U[batch, later]
    row               | chosen here  | updated at once   | updated once a batch

SparseGPT (arXiv 2301.00774) weighs the weights of a block one by one, removes them column by column, and cannot
update those of the block already behind.  Here a block's two are weighed as a pair and removed together, which costs
less error and L times fewer steps; `slidesparse.calibrate.refine` goes on from there.  The padding of a partial block
counts among its zeros: a tail of t columns loses max(0, t - (L-2)).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from slidesparse.calibrate.hessian import require_finite
from slidesparse.pattern import ZEROS, PatternError, SlidePattern

DAMPING = 0.01  # of the mean of H's diagonal, added to it: as in SparseGPT and GPTQ, where tokens are many
SHRINKAGE = 0.2  # times K / tokens, if that is more: where they are few, see `damping_for`
BATCH_COLUMNS = 128  # whole blocks of about so many columns are updated before the columns behind them
CHOICE_ELEMENTS = 2**24  # of costs at a time


def damping_for(in_features: int, tokens: int) -> float:
    """How much to damp H [K, K] summed over ``tokens``: DAMPING, and more where few tokens tell of many inputs.

    Measured on layers of MiniLM with 288 to 10354 tokens at K = 384 and 1536: the damping that gives the smallest
    error on other tokens is about 0.2 K / tokens.
    """
    return max(DAMPING, SHRINKAGE * in_features / max(1, tokens))


def damped(hessian: Tensor, damping: float = DAMPING) -> Tensor:
    """H + damping * mean(diag H) * I, [K, K] float64.

    It gives inputs never seen a small weight of their own, so that their weights are the first to go and otherwise keep
    what they have; where no input was ever seen, all count alike.

    Raises CalibrationError when H is not finite.
    """
    require_finite(hessian)
    double = hessian.to(torch.float64, copy=True)
    mean = float(double.diagonal().mean()) if len(double) else 0.0
    double.diagonal().add_(damping * mean if mean > 0 else 1.0)
    return double


def factor(hessian: Tensor, damping: float = DAMPING, dtype: torch.dtype = torch.float32) -> Tensor:
    """U [K, K] upper triangular of ``dtype`` with U^T U = (H `damped`)^-1, computed in float64."""
    # H = V V^T with V upper triangular is the Cholesky factorization of H read from its last row and column
    flipped = damped(hessian, damping).flip(0, 1)
    upper = torch.linalg.cholesky(flipped)
    del flipped  # one of the largest tensors of all
    upper = upper.flip(0, 1)
    identity = torch.eye(len(upper), dtype=torch.float64, device=upper.device)
    inverse: Tensor = torch.linalg.solve_triangular(upper, identity, upper=True)
    return inverse.to(dtype)


def blocks(in_features: int, pattern: SlidePattern, phase: int = 0) -> list[slice]:
    """The columns of each block; the first lacks ``phase`` of them, the last may be short."""
    if pattern.length is None:
        return []
    layout = pattern.layout(in_features, phase)
    edges = [number * layout.length - phase for number in range(layout.blocks + 1)]
    return [slice(max(0, a), min(in_features, b)) for a, b in pairwise(edges)]


def sparsegpt(w: Tensor, upper: Tensor, pattern: SlidePattern, phase: int = 0) -> Tensor:
    """Prune ``w`` to ``pattern`` and update what remains.

    Args:
        w: [N, K] of any float dtype.
        upper: [K, K], the `factor` of its inputs' H.
        phase: zero columns before the row, as in `slidesparse.slide.slide`.

    Returns:
        A new [N, K] of the dtype of ``upper`` that obeys the pattern, its pruned weights +0.0.
    """
    if upper.shape != (w.shape[1], w.shape[1]):
        raise PatternError(f"H of {list(upper.shape)} does not belong to a weight of {list(w.shape)}")
    out = w.to(upper.dtype, copy=True)
    if pattern.length is None:
        return out
    groups = blocks(w.shape[1], pattern, phase)
    corners = [upper[group, group] for group in groups]
    found = rules([corner.t() @ corner for corner in corners], pattern.length)
    step = max(1, BATCH_COLUMNS // pattern.length)
    for first in range(0, len(groups), step):
        batch = slice(first, first + step)
        start, stop = groups[batch][0].start, groups[batch][-1].stop
        errors = out.new_zeros(len(w), stop - start)
        for group, corner, rule in zip(groups[batch], corners[batch], found[batch], strict=True):
            if rule is None:
                continue
            here, error = out[:, group], errors[:, group.start - start : group.stop - start]
            share, gone = choose(here, rule)
            torch.mm(share, corner.t(), out=error)
            out[:, group.start : stop].addmm_(error, upper[group, group.start : stop], alpha=-1)
            here.masked_fill_(gone, 0.0)
        out[:, stop:].addmm_(errors, upper[start:stop, stop:], alpha=-1)
    return out


class Rule(NamedTuple):
    """(A_PP)^-1 of a block for each of the C choices P of one or two of its columns."""

    diagonal: Tensor  # [1 or 2, C]
    beside: Tensor  # [1, C] off the diagonal; not used for one column


def rules(a: Sequence[Tensor], length: int) -> list[Rule | None]:
    """How to choose in each block, from its A [t, t]; None where nothing has to go.

    Whole blocks, of ``length`` columns, are prepared at once: on a GPU the launches of kernels, not the arithmetic, are
    what a loop over blocks takes time for.
    """
    whole = [block for block in a if len(block) == length]
    ready = iter(
        zip(*(part.unbind() for part in _rule(torch.stack(whole), ZEROS)), strict=True) if whole else ()
    )
    found: list[Rule | None] = []
    for block in a:
        surplus = len(block) - (length - ZEROS)
        if len(block) == length:
            found.append(Rule(*next(ready)))
        else:
            found.append(_rule(block, surplus) if surplus > 0 else None)
    return found


def _rule(a: Tensor, count: int) -> Rule:
    """The rule of A [..., L, L] for choices of ``count`` columns."""
    columns = _choices(a.shape[-1], count, a.device).columns
    own = a.diagonal(dim1=-2, dim2=-1)[..., columns]
    if count == 1:
        return Rule(own.reciprocal(), torch.zeros_like(own))
    both = a[..., columns[0], columns[1]].unsqueeze(-2)
    determinant = own.prod(-2, keepdim=True) - both * both
    return Rule(own.flip(-2) / determinant, -both / determinant)


def choose(w: Tensor, rule: Rule) -> tuple[Tensor, Tensor]:
    """The cheapest weights of each row of ``w`` [N, L] to remove, as many as ``rule`` is for; ties: the leftmost.

    Returns w_P (A_PP)^-1 spread over [N, L], zero elsewhere, and whether each weight is in P.
    """
    count, among = rule.diagonal.shape
    step = max(1, CHOICE_ELEMENTS // among)
    if len(w) > step:
        parts = [choose(part, rule) for part in w.split(step)]
        return torch.cat([share for share, _ in parts]), torch.cat([gone for _, gone in parts])
    choices = _choices(w.shape[1], count, w.device)
    left = w[:, choices.columns]  # [N, count, C]
    shares = left * rule.diagonal
    if count > 1:
        shares.addcmul_(left.flip(1), rule.beside)
    best = left.mul_(shares).sum(1).argmin(-1)
    values = shares.gather(2, best.view(-1, 1, 1).expand(-1, count, 1)).squeeze(2)
    return torch.zeros_like(w).scatter_(1, choices.pairs[best], values), choices.taken[best]


class _Choices(NamedTuple):
    """All choices of one or two of L columns, from the left."""

    columns: Tensor  # [count, C]
    pairs: Tensor  # [C, count], the same
    taken: Tensor  # [C, L] whether a column is among them


@cache
def _choices(length: int, count: int, device: torch.device) -> _Choices:
    with torch.inference_mode(False):
        pairs = torch.combinations(torch.arange(length, device=device), count)
        taken = torch.zeros(len(pairs), length, dtype=torch.bool, device=device).scatter_(1, pairs, True)
        return _Choices(pairs.t().contiguous(), pairs, taken)
