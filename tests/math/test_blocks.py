"""Weights of dense and 2:4 blocks: choice of blocks, and pruned weights."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slidesparse.blocks import BLOCK, STRIP, choose_blocks, dense_blocks, missing, obeys
from slidesparse.pattern import MixedPattern, SlidePattern
from slidesparse.prune import prune
from slidesparse.quantize import FP8, quantize_rows

HALF = MixedPattern(Fraction(1, 2))


@settings(deadline=None, max_examples=50)
@given(
    strips=st.integers(1, 9),
    blocks=st.integers(1, 50),
    share=st.fractions(0, 1, max_denominator=100).filter(lambda x: x < 1),
)
def test_each_strip_has_its_share_of_blocks(strips: int, blocks: int, share: Fraction) -> None:
    is_sparse = choose_blocks(strips, blocks, share)
    assert is_sparse.shape == (strips, blocks)
    assert int(is_sparse.sum()) == math.ceil(share * strips * blocks)
    assert int(is_sparse.sum(1).max() - is_sparse.sum(1).min()) <= 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, FP8])
@pytest.mark.parametrize("shape", [(128, 512), (100, 300), (64, 200), (7, 5)])
def test_pruned_weights_obey_mixed_pattern(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    w = torch.randn(*shape, generator=torch.Generator().manual_seed(1))
    w = quantize_rows(w, dtype)[0] if dtype in (torch.int8, FP8) else w.to(dtype)
    pruned = prune(w, HALF)
    assert obeys(pruned, HALF)
    dense = dense_blocks(pruned)
    assert missing(dense, HALF) == 0
    is_dense = dense.repeat_interleave(STRIP, 0)[: shape[0]].repeat_interleave(BLOCK, 1)[:, : shape[1]]
    assert torch.equal(pruned.float()[is_dense], w.float()[is_dense])
    assert bool((pruned.float() == 0)[~is_dense].any())
    assert not obeys(w, HALF)
    assert obeys(prune(w, SlidePattern(4)), HALF)
