"""Weights of dense and 2:4 blocks: choice of blocks, and pruned weights."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from slidesparse.methods.sparsegpt import SparseGPT
from slidesparse.methods.wanda import wanda

from slidesparse.blocks import BLOCK, STRIP, choose_blocks, dense_blocks, missing, obeys
from slidesparse.pattern import MixedPattern, SlidePattern
from slidesparse.prune import prune
from slidesparse.quantize import FP8, quantize_rows

HALF = MixedPattern(Fraction(1, 2))


def chosen(costs: torch.Tensor, share: Fraction) -> torch.Tensor:
    """Return the chosen blocks, bool [strips, blocks], for costs of groups of four."""
    return choose_blocks(costs, share)[::STRIP, :: BLOCK // 4]


@settings(deadline=None, max_examples=50)
@given(
    rows=st.integers(1, 300),
    groups=st.integers(1, 200),
    share=st.fractions(0, 1, max_denominator=100).filter(lambda x: x < 1),
    seed=st.integers(0, 9),
)
def test_each_strip_has_its_share_of_blocks(rows: int, groups: int, share: Fraction, seed: int) -> None:
    costs = torch.rand(rows, groups, generator=torch.Generator().manual_seed(seed))
    is_dense = chosen(costs, share)
    assert int(is_dense.sum()) == math.ceil(share * is_dense.numel())
    assert int(is_dense.sum(1).max() - is_dense.sum(1).min()) <= 1
    mask = choose_blocks(costs, share)
    assert torch.equal(mask, is_dense.repeat_interleave(STRIP, 0)[:rows].repeat_interleave(32, 1)[:, :groups])


@pytest.mark.parametrize("shards", [1, 2, 4, 8])
@pytest.mark.parametrize("share", [Fraction(1, 3), Fraction(1, 2), Fraction(2, 3)])
def test_tensor_parallel_shards_have_their_share_of_blocks(shards: int, share: Fraction) -> None:
    """Shards of rows and of columns have the share even if some columns are cheaper than others."""
    costs = torch.rand(16 * STRIP, 32 * 16, generator=torch.Generator().manual_seed(0))
    costs *= torch.linspace(1, 3, costs.shape[1])
    is_dense = chosen(costs, share)
    for dim in (0, 1):
        for shard in is_dense.chunk(shards, dim):
            assert abs(int(shard.sum()) - float(share) * shard.numel()) <= 2


def test_choose_blocks_takes_the_cheapest() -> None:
    costs = torch.ones(2 * STRIP, 8 * 32)
    for strip, block in ((0, 1), (0, 2), (0, 5), (0, 7), (1, 0), (1, 3), (1, 4), (1, 6)):
        costs[STRIP * strip : STRIP * (strip + 1), 32 * block : 32 * (block + 1)] = 0.5
    assert chosen(costs, Fraction(1, 2)).int().tolist() == [
        [0, 1, 1, 0, 0, 1, 0, 1],
        [1, 0, 0, 1, 1, 0, 1, 0],
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, FP8])
@pytest.mark.parametrize("shape", [(128, 512), (100, 300), (64, 200), (7, 5)])
def test_pruned_weights_obey_mixed_pattern(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    w = torch.randn(*shape, generator=torch.Generator().manual_seed(1))
    w = quantize_rows(w, dtype)[0] if dtype in (torch.int8, FP8) else w.to(dtype)
    for method in ("magnitude", "random"):
        pruned = prune(w, HALF, method)
        assert obeys(pruned, HALF)
        dense = dense_blocks(pruned)
        assert missing(dense, HALF) == 0
        is_dense = dense.repeat_interleave(STRIP, 0)[: shape[0]].repeat_interleave(BLOCK, 1)[:, : shape[1]]
        assert torch.equal(pruned.float()[is_dense], w.float()[is_dense])
        assert bool((pruned.float() == 0)[~is_dense].any())
    assert not obeys(w, HALF)
    assert obeys(prune(w, SlidePattern(4)), HALF)


def test_pruning_takes_the_blocks_of_least_importance() -> None:
    """In each strip of four blocks with noise of different sizes, the two with the smallest are pruned."""
    sizes = torch.tensor([[1.0, 4, 2, 3], [4, 3, 1, 2], [2, 1, 4, 3], [3, 2, 4, 1]])
    noise = torch.randn(4 * STRIP, 4 * BLOCK, generator=torch.Generator().manual_seed(2))
    w = noise * sizes.repeat_interleave(STRIP, 0).repeat_interleave(BLOCK, 1)
    small = sizes < 2.5
    inputs = torch.randn(2048, w.shape[1], generator=torch.Generator().manual_seed(3))
    h = inputs.mT @ inputs
    by_sparsegpt = SparseGPT().calibrated(h, len(inputs), 1)(w, HALF, None)
    for pruned in (prune(w, HALF), wanda(w, h, HALF), by_sparsegpt):
        assert torch.equal(~dense_blocks(pruned), small)


def test_sparsegpt_compensates_for_pruned_weights() -> None:
    generator = torch.Generator().manual_seed(4)
    mix = torch.randn(512, 512, generator=generator) / 512**0.5 + torch.eye(512)
    inputs = torch.randn(4096, 512, generator=generator) @ mix
    h, w = inputs.mT @ inputs, torch.randn(256, 512, generator=generator)

    def error(pruned: torch.Tensor) -> float:
        return float(((w - pruned) @ inputs.mT).square().mean())

    mixed = SparseGPT().calibrated(h, len(inputs), 2)(w, HALF, None)
    assert obeys(mixed, HALF)
    assert error(mixed) < 0.8 * error(wanda(w, h, HALF)) < 0.8 * error(prune(w, HALF, "random"))
    two_four = SparseGPT().calibrated(h, len(inputs), 2)(w, SlidePattern(4), None)
    # only half the blocks are pruned, and the other half compensates
    assert error(mixed) < 0.6 * error(two_four)
