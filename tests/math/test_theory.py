"""The general theory against brute force over all small patterns and hardware."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from itertools import combinations, combinations_with_replacement, product

import pytest

from slidesparse.theory import (
    ONE_FOUR,
    TWO_FOUR,
    Hardware,
    TheoryError,
    Windows,
    density_bound,
    gathered_expansion,
    paired,
    reaches_bound,
)


def windows_seeing(w: Windows) -> list[list[int]]:
    """Return the windows that contain each position of the block, by the definition of a window."""
    spans = [range(j * w.stride, j * w.stride + w.hardware.length) for j in range(w.count)]
    return [[j for j, span in enumerate(spans) if position in span] for position in range(w.length)]


def assignable(windows_of: Sequence[Iterable[int]], nonzeros: Iterable[int], windows: int, m: int) -> bool:
    """Return whether each non-zero can be assigned to a window with at most ``m``, by augmenting paths."""
    assigned: list[list[int]] = [[] for _ in range(windows)]

    def place(nonzero: int, tried: set[int]) -> bool:
        for j in windows_of[nonzero]:
            if j in tried:
                continue
            tried.add(j)
            if len(assigned[j]) < m:
                assigned[j].append(nonzero)
                return True
            for i, owner in enumerate(assigned[j]):
                if place(owner, tried):
                    assigned[j][i] = nonzero
                    return True
        return False

    return all(place(nonzero, set()) for nonzero in nonzeros)


def greedy(w: Windows, nonzeros: Iterable[int]) -> bool:
    """Return whether Algorithm 2 assigns all non-zeros: each window in order takes its M leftmost remaining ones."""
    remaining = sorted(nonzeros)
    for j in range(w.count):
        inside = [p for p in remaining if j * w.stride <= p < j * w.stride + w.hardware.length]
        remaining = [p for p in remaining if p not in inside[: w.hardware.nonzeros]]
    return not remaining


def all_windows(longest: int, any_stride: bool) -> Iterable[Windows]:
    for n in range(2, 7):
        for m in range(1, n):
            for stride in range(1, n + 1) if any_stride else [n - m]:
                for length in range(n, longest + 1, stride):
                    for z in range(1, length + 1):
                        yield Windows(z, length, Hardware(m, n), stride)


def test_covers_equals_brute_force_for_small_patterns() -> None:
    """Matching and the greedy algorithm check every block up to L = 9 on all hardware up to N = 6."""
    checked = failing = 0
    for w in all_windows(9, any_stride=True):
        windows_of = windows_seeing(w)
        blocks = list(combinations(range(w.length), w.nonzeros))
        m = w.hardware.nonzeros
        by_matching = all(assignable(windows_of, block, w.count, m) for block in blocks)
        assert w.covers == by_matching == all(greedy(w, block) for block in blocks), w
        checked += 1
        failing += not by_matching
    assert checked > 500
    assert 100 < failing < checked


def test_covers_and_expansion_have_closed_forms() -> None:
    for w in all_windows(30, any_stride=False):
        m, n = w.hardware.nonzeros, w.hardware.length
        assert w.covers == (w.nonzeros <= w.capacity and (n <= 2 * m or w.nonzeros <= m)), w
        assert w.expansion == Fraction((w.length - m) * n, w.length * (n - m))  # equation (10)


def test_theorem_2_fails_for_2_7_on_1_4() -> None:
    windows = Windows(2, 7, ONE_FOUR)
    assert (windows.count, windows.capacity) == (2, 2)  # "capacity >= Z"
    assert windows.seen_only_by(0, 0) == 3
    assert windows.bottleneck() == (0, 0)
    assert not greedy(windows, (0, 1))
    assert Windows(1, 7, ONE_FOUR).covers  # Z <= M


def test_reaches_bound_equals_brute_force() -> None:
    """Every choice of Z/M windows of any N positions is checked against every block."""
    for n, m, longest in [(2, 1, 5), (3, 1, 5), (3, 2, 6), (4, 1, 6), (4, 2, 6), (4, 3, 6)]:
        for length in range(n, longest + 1):
            for z in range(1, length + 1):
                expected = z % m == 0 and any_windows_fit(z, length, m, n)
                assert reaches_bound(z, length, Hardware(m, n)) == expected, (z, length, m, n)


def any_windows_fit(z: int, length: int, m: int, n: int) -> bool:
    blocks = list(combinations(range(length), z))
    for windows in combinations_with_replacement(list(combinations(range(length), n)), z // m):
        windows_of = [[j for j, window in enumerate(windows) if p in window] for p in range(length)]
        if all(assignable(windows_of, block, z // m, m) for block in blocks):
            return True
    return False


def test_hardware_1_4_reaches_bound_with_at_most_three_zeros() -> None:
    assert [z for z in range(1, 9) if reaches_bound(z, 8, ONE_FOUR)] == [5, 6, 7, 8]
    assert Windows(5, 8, ONE_FOUR, stride=1).speedup == Fraction(8, 5)
    for z in range(1, 9):  # the value that C.1.7 computes for windows gathered row by row
        assert gathered_expansion(z, 8, ONE_FOUR) == Fraction(4 * z, 8)
        assert ONE_FOUR.speedup / gathered_expansion(z, 8, ONE_FOUR) == density_bound(z, 8)
    assert gathered_expansion(3, 8, TWO_FOUR) == 1  # two groups of four for three non-zeros


PAIRED = [(2, 4), (2, 6), (4, 6), (2, 8), (4, 8), (6, 8)]


@pytest.mark.parametrize(
    ("z", "length", "whole_pairs"),
    [*((*case, True) for case in PAIRED), *((*case, False) for case in [*PAIRED, (1, 4), (3, 4), (3, 8)])],
)
def test_paired_windows_hold_any_two_blocks(z: int, length: int, whole_pairs: bool) -> None:
    """Windows of 8 values, 4 apart, with two pairs each, take the values of any two blocks."""
    values = range(0, length, 2) if whole_pairs else range(length)
    size = 2 if whole_pairs else 1
    # The pairs of a block with a non-zero
    blocks = {frozenset(value // 2 for value in chosen) for chosen in combinations(values, z // size)}
    windows = Windows(*paired(z, length, whole_pairs))
    assert windows.nonzeros == 2 * max(map(len, blocks))
    results = []
    for first, second in product(blocks, repeat=2):
        remaining = [*sorted(first), *sorted(pair + length // 2 for pair in second)]
        for start in range(0, 2 * length - 4, 4):
            taken = [pair for pair in remaining if start <= 2 * pair < start + 8][:2]
            remaining = [pair for pair in remaining if pair not in taken]
        results.append(not remaining)
    assert windows.covers == all(results) == (max(map(len, blocks)) < length // 2)
    if 2 * z >= length:
        assert windows.covers == whole_pairs
    if windows.covers and z == length - 2:
        assert windows.speedup == Windows(z, length).speedup == density_bound(z, length)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Hardware(4, 4), "4:4"),
        (lambda: Hardware(0, 4), "0:4"),
        (lambda: Windows(0, 8), "0:8"),
        (lambda: Windows(9, 8), "9:8"),
        (lambda: Windows(2, 8, ONE_FOUR), "block of 8"),
        (lambda: Windows(2, 3), "block of 3"),
        (lambda: Windows(2, 8, TWO_FOUR, stride=5), "found 5"),
        (lambda: density_bound(3, 2), "3:2"),
        (lambda: reaches_bound(2, 3), "block of 3"),
        (lambda: gathered_expansion(0, 3), "0:3"),
        (lambda: paired(2, 5, False), "2:5"),
        (lambda: paired(3, 4, True), "3:4"),
    ],
)
def test_invalid_hardware_and_windows_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(TheoryError, match=message):
        make()
