"""Pruning against a brute force that sorts each block and zeroes the smallest surplus weights; blocks of a share."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import DTYPES, Case, assert_same_bits, cases, is_zero, patterns, raw
from torch import Tensor

from slidesparse.blocks import BLOCK, STRIP, choose_blocks, dense_blocks
from slidesparse.pattern import MixedPattern, SlidePattern
from slidesparse.prune import prune
from slidesparse.quantize import FP8, quantize_rows
from slidesparse.slide import violations


def any_weight(rows: int, columns: int, dtype: torch.dtype, seed: int, levels: int) -> Tensor:
    """Return random finite weights; with few ``levels``, ties, zeros and -0.0 are common."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(-levels, levels + 1, (rows, columns), generator=generator)
    if dtype == torch.int8:
        return values.clamp(-128, 127).to(torch.int8)
    signs = torch.where(torch.rand(rows, columns, generator=generator) < 0.5, -1.0, 1.0)
    return (values.float() * signs / 16).to(dtype)


dtypes, seeds, levels = st.sampled_from(DTYPES), st.integers(0, 2**20), st.sampled_from([1, 3, 20, 128])
weights = st.builds(any_weight, st.integers(0, 5), st.integers(0, 60), dtypes, seeds, levels)
phases = st.integers(0, 199)


def brute_force(w: Tensor, pattern: SlidePattern, phase: int) -> Tensor:
    """Zero, block by block, the surplus columns that come first in a stable order of magnitude."""
    pruned = w.clone()
    magnitude = w.double().abs() if w.dtype != torch.int8 else w.long().abs()
    length = pattern.length or w.shape[1] + 2
    for row in range(w.shape[0]):
        for edge in range(-phase, w.shape[1], length):
            start = max(0, edge)
            block = magnitude[row, start : edge + length].tolist()
            for column in sorted(range(len(block)), key=block.__getitem__)[: max(0, len(block) - length + 2)]:
                raw(pruned)[row, start + column] = 0
    return pruned


@given(weights, patterns(), phases)
def test_pruning_equals_a_stable_sort_by_magnitude(w: Tensor, pattern: SlidePattern, phase: int) -> None:
    phase = 0 if pattern.length is None else phase % pattern.length
    original = w.clone()
    pruned = prune(w, pattern, phase)
    assert_same_bits(w, original)  # the input is unchanged
    assert_same_bits(pruned, brute_force(w, pattern, phase))
    assert violations(pruned, pattern, phase) is None


@given(cases())
def test_prune_keeps_weights_that_obey(case: Case) -> None:
    """This holds for any bits (NaN and Inf count as the largest); -0.0 may become 0.0, but no non-zero changes."""
    pattern, phase, w = case
    pruned = prune(w, pattern, phase=phase)
    assert torch.equal(is_zero(pruned), is_zero(w))
    assert_same_bits(torch.where(is_zero(w), 0, raw(pruned)), torch.where(is_zero(w), 0, raw(w)))


def test_prune_compares_subnormals_by_value() -> None:
    tiny = torch.finfo(torch.float32).smallest_normal / 2
    w = torch.tensor([[2 * tiny, tiny, -3 * tiny, 1.0]])
    assert prune(w, SlidePattern.parse("2:4")).tolist() == [[0.0, 0.0, -3 * tiny, 1.0]]


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
    dense = dense_blocks(pruned)
    assert int((~dense).sum()) >= dense.numel() / 2
    is_dense = dense.repeat_interleave(STRIP, 0)[: shape[0]].repeat_interleave(BLOCK, 1)[:, : shape[1]]
    assert torch.equal(pruned.float()[is_dense], w.float()[is_dense])
    assert bool((pruned.float() == 0)[~is_dense].any())
    assert not bool(dense_blocks(prune(w, SlidePattern(4))).any())
