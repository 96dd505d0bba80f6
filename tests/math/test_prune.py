"""Pruning against a brute force that sorts each block and zeroes only the smallest surplus weights."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import DTYPES, Case, assert_same_bits, cases, is_zero, patterns, raw
from torch import Tensor

from slidesparse.pattern import SlidePattern
from slidesparse.prune import prune, prune_by_importance
from slidesparse.slide import violations

SIX_EIGHT = SlidePattern.parse("6:8")


def any_weight(rows: int, columns: int, dtype: torch.dtype, seed: int, levels: int) -> Tensor:
    """Return random finite weights; with few ``levels``, ties, zeros and -0.0 are common."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(-levels, levels + 1, (rows, columns), generator=generator)
    if dtype == torch.int8:
        return values.clamp(-128, 127).to(torch.int8)
    signs = torch.where(torch.rand(rows, columns, generator=generator) < 0.5, -1.0, 1.0)
    return (values.float() * signs / 16).to(dtype)


weights = st.builds(
    any_weight,
    st.integers(0, 5),
    st.integers(0, 60),
    st.sampled_from(DTYPES),
    st.integers(0, 2**20),
    st.sampled_from([1, 3, 20, 128]),
)


phases = st.integers(0, 199)


def blocks_and_surplus(columns: int, pattern: SlidePattern, phase: int) -> list[tuple[slice, int]]:
    """Return the columns of each block, and how many must be pruned if none is zero."""
    if pattern.length is None:
        return []
    edges = range(-phase, columns, pattern.length)
    blocks = [slice(max(0, start), min(columns, start + pattern.length)) for start in edges]
    return [(block, max(0, block.stop - block.start - (pattern.length - 2))) for block in blocks]


def phase_of(pattern: SlidePattern, phase: int) -> int:
    return 0 if pattern.length is None else phase % pattern.length


def brute_force(w: Tensor, pattern: SlidePattern, phase: int) -> Tensor:
    """Zero, block by block, the first ``surplus`` of the columns in a stable order of magnitude."""
    pruned = w.clone()
    magnitude = w.double().abs() if w.dtype != torch.int8 else w.long().abs()
    for row in range(w.shape[0]):
        for columns, surplus in blocks_and_surplus(w.shape[1], pattern, phase):
            block = magnitude[row, columns].tolist()
            for column in sorted(range(len(block)), key=block.__getitem__)[:surplus]:
                raw(pruned)[row, columns.start + column] = 0
    return pruned


@given(weights, patterns(), phases)
def test_magnitude_pruning_equals_stable_sort(w: Tensor, pattern: SlidePattern, phase: int) -> None:
    phase = phase_of(pattern, phase)
    assert_same_bits(prune(w, pattern, phase=phase), brute_force(w, pattern, phase))


@given(weights, patterns(), phases)
def test_prune_obeys_the_pattern_with_fewest_zeros(w: Tensor, pattern: SlidePattern, phase: int) -> None:
    phase = phase_of(pattern, phase)
    original = w.clone()
    pruned = prune(w, pattern, phase)
    assert_same_bits(w, original)  # the input is unchanged
    assert violations(pruned, pattern, phase) is None
    is_kept = ~is_zero(pruned)
    # kept weights are bitwise unchanged
    assert_same_bits(torch.where(is_kept, raw(pruned), 0), torch.where(is_kept, raw(w), 0))
    for columns, surplus in blocks_and_surplus(w.shape[1], pattern, phase):
        block, was = is_kept[:, columns], ~is_zero(w[:, columns])
        dropped = (was & ~block).sum(-1)
        # existing zeros count as pruned
        assert torch.equal(dropped, (was.sum(-1) - (block.shape[1] - surplus)).clamp(min=0))


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


def test_prune_by_importance() -> None:
    w = torch.arange(1.0, 9).reshape(1, 8)
    importance = torch.tensor([[9.0, 8, 7, 0, 5, 0.5, 3, 2]])
    assert prune_by_importance(w, importance, SIX_EIGHT).tolist() == [[1, 2, 3, 0, 5, 0, 7, 8]]
