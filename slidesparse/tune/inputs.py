"""Random operands, several copies of each: activations, weights (2:4 for sparse libraries), outputs, scales.

They are random rather than zeros or small integers, with which a GPU draws less power and so runs at a higher clock.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from slidesparse.blocks import by_weight, grid
from slidesparse.gemm.cuda import CudaBackend
from slidesparse.gemm.problem import ALL_2_4, CODED, DTYPES, MIXED, SIX_EIGHT, Plan, Problem, Tensors
from slidesparse.pattern import round_up
from slidesparse.prune import prune
from slidesparse.tune.measure import Launch

L2_MULTIPLE = 2.5  # size of all copies together, relative to the L2 cache
MAX_COPIES = 128  # so calls of less than 1 MB (square matrices below 512) stay in the L2 cache in part
# Per-token and per-channel scales put the largest of thousands of normal numbers, at 3.6 sigma, at 127.  Uniform codes
# would toggle more bits, which costs a GPU at its power limit some percent of its clock.
INT8_MAX, INT8_SIGMA = 127, 35.0
FP8_MAX = 448.0  # largest E4M3 number
FP8_SIGMA = 100.0  # puts the largest value of a row, at about 4 sigma, near FP8_MAX, as per-token scales do
GOLDEN_RATIO_CONJUGATE = 0.6180339887  # the fractional parts of its multiples are evenly distributed
# Positions of the two non-zeros among four.
TWO_OF_FOUR = ((1, 1, 0, 0), (1, 0, 1, 0), (1, 0, 0, 1), (0, 1, 1, 0), (0, 1, 0, 1), (0, 0, 1, 1))


@dataclass(frozen=True)
class Operands:
    """Copies of the operands of one problem; copy i of each is used together."""

    activations: list[Tensor]  # [m, k], of the problem's type
    weights: list[Tensor]  # packed
    outs: list[Tensor]  # [m, n]
    scale_w: Tensor | None  # [n] float32
    scale_x: Tensor | None  # [m] float32

    def launch(self, plan: Plan) -> Launch:
        """Run ``plan`` on copy i."""
        scales = self.scale_w, self.scale_x
        return lambda i: plan(Tensors(self.activations[i], self.weights[i], self.outs[i], *scales))


class Inputs:
    """Makes operands on one device, the same in every process."""

    def __init__(self, device: torch.device, l2_bytes: int) -> None:
        self.device, self._l2_bytes = device, l2_bytes
        self._generator = torch.Generator(device).manual_seed(0)

    def copies(self, problem: Problem) -> int:
        """Count the copies for a problem with dense weights; sparse ones, of two thirds of the bytes, get as many."""
        n, k, m = problem.n, problem.k, problem.m
        operand, out = DTYPES[problem.dtype].itemsize, DTYPES[problem.out].itemsize
        return self.copies_exceeding_l2((n * k + m * k) * operand + m * n * out)

    def copies_exceeding_l2(self, call_bytes: int) -> int:
        """Return how many copies of ``call_bytes`` are L2_MULTIPLE times as large as the L2 cache; at least 1."""
        return max(1, min(MAX_COPIES, -(-int(L2_MULTIPLE * self._l2_bytes) // max(1, call_bytes))))

    def weight(self, dtype: str, n: int, k: int, sparse: bool) -> Tensor:
        """Make a random weight [n, k], with exactly two of every four non-zero if ``sparse``."""
        return self._random(n * k, dtype, sparse).view(n, k)

    def packed(self, library: CudaBackend, problem: Problem, copies: int, share: float = 0.5) -> list[Tensor]:
        """Make ``copies`` of a random weight, packed by ``library``; a ``share`` of mixed blocks is 2:4."""
        weight = self.weight(
            problem.dtype, problem.n, problem.k, library.sparse and problem.blocks == ALL_2_4
        )
        if problem.blocks == MIXED:
            weight = with_sparse_blocks(weight, share)
        if problem.blocks == CODED:
            weight = prune(weight, SIX_EIGHT)
        return clones(library.operand(weight, problem.blocks), copies)

    def operands(self, problem: Problem, weights: list[Tensor]) -> Operands:
        """Make operands for as many copies as the problem needs, at most as many as there are weights."""
        copies, m, n = min(self.copies(problem), len(weights)), problem.m, problem.n
        out = torch.empty(m, n, dtype=DTYPES[problem.out], device=self.device)
        return Operands(
            activations=self.activations(problem.dtype, m, problem.k, copies),
            weights=weights[:copies],
            outs=clones(out, copies),
            scale_w=self.scale(n) if problem.scale == "both" else None,
            scale_x=self.scale(m) if problem.scale == "both" else None,
        )

    def activations(self, dtype: str, m: int, k: int, copies: int) -> list[Tensor]:
        """Make ``copies`` of random activations [m, k]."""
        return clones(self._random(m * k, dtype, False).view(m, k), copies)

    def floats(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Draw normally distributed numbers."""
        return torch.randn(shape, generator=self._generator, device=self.device).to(dtype)

    def scale(self, count: int) -> Tensor:
        """Draw scales [count] float32 between 0.005 and 0.015, typical of INT8 weights and activations."""
        return torch.rand(count, generator=self._generator, device=self.device) * 0.01 + 0.005

    def _random(self, count: int, dtype: str, sparse: bool) -> Tensor:
        numbers = torch.randn(count, generator=self._generator, device=self.device)
        if dtype == "int8":
            numbers = (numbers * INT8_SIGMA).round_().clamp_(-INT8_MAX, INT8_MAX)
            if sparse:  # no zeros other than those of the mask
                numbers = torch.where(numbers == 0, 1, numbers)
        if dtype == "fp8":
            numbers = (numbers * FP8_SIGMA).clamp_(-FP8_MAX, FP8_MAX)
        if sparse:  # selected, not multiplied: -0.0 would count as a non-zero
            numbers = torch.where(two_of_four(count, self._generator), numbers, numbers.new_zeros(()))
        return numbers.to(DTYPES[dtype])


def clones(first: Tensor, count: int) -> list[Tensor]:
    """Return ``count`` tensors: ``first`` and copies of it."""
    return [first, *(first.clone() for _ in range(count - 1))]


def with_sparse_blocks(weight: Tensor, share: float) -> Tensor:
    """Return a weight [N, K] of one-byte codes whose blocks are 2:4 to a ``share``, spread evenly over the strips."""
    n, k = weight.shape
    shape = grid(n, k)
    number = torch.arange(shape[0] * shape[1], device=weight.device).view(shape)
    order = (number * GOLDEN_RATIO_CONJUGATE).frac().view(-1).argsort().argsort().view(shape)
    sparse = by_weight(order < round(share * order.numel()), n, k)
    kept = two_of_four(n * round_up(k, 4), torch.Generator(weight.device).manual_seed(0)).view(n, -1)[:, :k]
    return weight.view(torch.int8).masked_fill(sparse & ~kept, 0).view(weight.dtype)


def two_of_four(count: int, generator: torch.Generator) -> Tensor:
    """Return a random mask, bool [count], with two of every four set."""
    table = torch.tensor(TWO_OF_FOUR, dtype=torch.bool, device=generator.device)
    chosen = torch.randint(len(TWO_OF_FOUR), (-(-count // 4),), generator=generator, device=generator.device)
    return table[chosen].view(-1)[:count]
