"""Slide, unslide and lift against the paper's definitions, bit for bit and for every pattern."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import DTYPES, NAMED, Case, assert_same_bits, cases, is_zero, obeying, patterns, raw
from torch import Tensor

from slidesparse.pattern import PatternError, SlidePattern
from slidesparse.slide import CHUNK_ELEMENTS, lift, obeys, slide, unslide, violations

SIX_EIGHT = SlidePattern.parse("6:8")


def algorithm_2(row: list[int], zero: list[bool], length: int) -> list[int]:
    """Run Algorithm 2 of the paper on a padded row of bits, with flags of its zeros and block length 2N."""
    n = length // 2
    packed = [0] * (len(row) // length * (n - 1) * 4)
    used = [False] * len(row)
    for g in range(len(row) // length):
        for el in range(n - 1):
            b = 2 * n * g + 2 * el
            count = 0
            for delta in range(4):
                if not zero[b + delta] and not used[b + delta] and count < 2:
                    packed[(n - 1) * 4 * g + 4 * el + delta] = row[b + delta]
                    used[b + delta] = True
                    count += 1
    return packed


def literal_slide(w: Tensor, pattern: SlidePattern, phase: int) -> list[list[int]]:
    """Run Algorithm 2 on every row of ``w``, padded for the pattern; return bits as integers."""
    columns = w.shape[1]
    # 2_inf: one block, the row padded to an even length and by one pair (a block has at least one window)
    length = pattern.length or max(columns + columns % 2, 2) + 2
    left = phase if columns else 0
    right = -(left + columns) % length
    packed = []
    for bits, zero in zip(raw(w).tolist(), is_zero(w).tolist(), strict=True):
        padded = [0] * left + bits + [0] * right
        packed.append(algorithm_2(padded, [True] * left + zero + [True] * right, length))
    return packed


@given(cases())
def test_slide_equals_algorithm_2_of_the_paper_and_unslide_undoes_it(case: Case) -> None:
    pattern, phase, w = case
    original = w.clone()
    slided = slide(w, pattern, phase)
    assert_same_bits(w, original)
    assert_same_bits(unslide(slided, pattern, w.shape[1], phase), original)
    # Algorithm 2 leaves 0 in place of -0.0
    actual = torch.where(is_zero(slided), 0, raw(slided)).tolist()
    assert actual == literal_slide(w, pattern, phase)


@given(patterns(), st.integers(0, 70), st.integers(0, 4), st.integers(0, 199), st.sampled_from(DTYPES))
def test_lift_equals_the_index_formula(
    pattern: SlidePattern, columns: int, tokens: int, phase: int, dtype: torch.dtype
) -> None:
    """Eq. (4), line 12 of Algorithm 1: place 4j + d holds x[2N*g + 2*l + d], g = j div N-1, l = j mod N-1."""
    phase = 0 if pattern.length is None else phase % pattern.length
    generator = torch.Generator().manual_seed(columns)
    x = torch.randint(-(2**7), 2**7, (tokens, columns), generator=generator).to(torch.int8)
    x = x.to(raw(torch.empty(0, dtype=dtype)).dtype).view(dtype)
    length = pattern.length or max(columns + columns % 2, 2) + 2
    n = length // 2
    groups = -(-(phase + columns) // length) if columns else 0
    windows = range(groups * (n - 1))
    source = [2 * n * (j // (n - 1)) + 2 * (j % (n - 1)) + d - phase for j in windows for d in range(4)]
    expected = [[row[k] if 0 <= k < columns else 0 for k in source] for row in raw(x).tolist()]
    lifted = lift(x, pattern.layout(x.shape[1], phase))
    assert lifted.dtype == dtype
    assert raw(lifted).tolist() == expected


def test_slide_of_weights_above_one_chunk() -> None:
    """Rows are processed in chunks, which affects neither the result nor the row of an error."""
    columns = 2048
    rows = CHUNK_ELEMENTS // columns + 3
    w = obeying(SIX_EIGHT, 8, columns, 0, torch.int8, "full", 3).repeat(-(-rows // 8), 1)[:rows]
    slided = slide(w, SIX_EIGHT)
    assert_same_bits(slided[-3:], slide(w[-3:], SIX_EIGHT))
    assert_same_bits(unslide(slided, SIX_EIGHT, columns), w)
    w[rows - 1, 8:16] = 1
    w[rows - 2, 0:8] = 1
    assert violations(w, SIX_EIGHT) == (2, rows - 2, 0, 8)
    w[5, 16:24] = 1
    assert violations(w, SIX_EIGHT) == (3, 5, 2, 8)
    assert not obeys(w, SIX_EIGHT)


@pytest.mark.parametrize("length", [126, 128, 130, 256, 258, 300, 600])
@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16])
def test_slide_of_blocks_longer_than_a_byte_counts(length: int, dtype: torch.dtype) -> None:
    pattern = SlidePattern(length)
    w = torch.zeros(4, 2 * length).to(dtype) * (1 if dtype == torch.int8 else -1)  # -0.0 in the float dtype
    for row, last in enumerate((1, 3, 40, 100)):
        w[row, length - last : length] = w[row, -last:] = 1
    slided = slide(w, pattern)
    actual = torch.where(is_zero(slided), 0, raw(slided)).tolist()
    assert actual == literal_slide(w, pattern, 0)
    assert_same_bits(unslide(slided, pattern, 2 * length), w)


def test_slide_and_lift_of_strided_input() -> None:
    w = obeying(SIX_EIGHT, 24, 24, 0, torch.float32, "full", 4)
    across = w.t().contiguous().t()
    assert not across.is_contiguous()
    assert_same_bits(slide(across, SIX_EIGHT), slide(w, SIX_EIGHT))
    layout = SIX_EIGHT.layout(w.shape[1])
    assert_same_bits(lift(across, layout), lift(w, layout))


@given(cases(), st.data())
def test_violations_locates_the_first_violation(case: Case, data: st.DataObject) -> None:
    """Chosen blocks are filled above the limit: violations() gives their number, the first one and its count."""
    pattern, phase, w = case
    if pattern.length is None or 0 in w.shape:
        assert violations(w, pattern, phase) is None
        return
    length, columns = pattern.length, w.shape[1]
    blocks = range(-(-(phase + columns) // length))
    inside = [g for g in blocks if _width(g, length, phase, columns) > length - 2]
    places = [(row, block) for row in range(w.shape[0]) for block in inside]
    if not places:  # too short to hold L-1 non-zeros
        assert violations(w, pattern, phase) is None
        return
    chosen = data.draw(st.lists(st.sampled_from(places), min_size=1, max_size=4, unique=True))
    broken = w.clone()
    for row, block in chosen:
        start = max(0, block * length - phase)
        broken[row, start : block * length - phase + length] = torch.ones((), dtype=w.dtype)
    row, block = min(chosen)
    nonzeros = _width(block, length, phase, columns)
    assert violations(broken, pattern, phase) == (len(set(chosen)), row, block, nonzeros)
    assert violations(w, pattern, phase) is None
    assert obeys(w, pattern, phase)
    assert not obeys(broken, pattern, phase)
    with pytest.raises(PatternError) as error:
        slide(broken, pattern, phase, layer="3.down_proj")
    facts = ("3.down_proj", f"row {row}, block {block}", f"{nonzeros} non-zeros", f"{len(set(chosen))} ")
    assert [fact for fact in facts if fact not in str(error.value)] == []


def _width(block: int, length: int, phase: int, columns: int) -> int:
    """Return the number of the row's columns in a block: L except at the ends."""
    return min(phase + columns, (block + 1) * length) - max(phase, block * length)


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("off", [-1, 1, 4])
def test_unslide_refuses_wrong_width(name: str, off: int) -> None:
    pattern = SlidePattern.parse(name)
    width = pattern.layout(32).slided
    with pytest.raises(ValueError, match=f"{width} columns, found {width + off}"):
        unslide(torch.zeros(2, width + off), pattern, 32)
