"""Bitmask compression: bitwise round trips of every dtype, pattern and length, from matrices or flat values."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import DTYPES, assert_same_bits, patterns, raw
from torch import Tensor

from slidesparse import slide
from slidesparse.bitmask import compress, decompress, places
from slidesparse.pattern import PatternError, SlidePattern
from slidesparse.prune import prune

SIX = SlidePattern.parse("6:8")
BITS_MOVED = torch.tensor([[1, 0], [2, 0], [0, 0]], dtype=torch.uint8)  # a bit moved to another row
# one bit moved past the last column, one cleared
BITS_PAST = torch.tensor([[1 + 8, 16], [1 + 8, 16], [1 + 8, 16]], dtype=torch.uint8)


def weight(rows: int, k: int, dtype: torch.dtype, pattern: SlidePattern, seed: int) -> Tensor:
    """Return a pruned weight of random bits without NaN, with zeros of both signs and blocks of zeros."""
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(rows, k, generator=generator).mul_(30).clamp_(-100, 100).round_().to(dtype)
    zeros = torch.rand(rows, k, generator=generator) < torch.rand(rows, 1, generator=generator)
    raw(w)[zeros] = 0
    return prune(w, pattern)


def decompress_by_numpy(values: Tensor, bitmask: Tensor, k: int) -> Tensor:
    """Decompress like compressed-tensors: bits, the lowest first, take the values in order."""
    mask = torch.from_numpy(np.unpackbits(bitmask.numpy(), axis=-1, count=k, bitorder="little")).bool()
    out = torch.zeros(mask.shape, dtype=raw(values).dtype)
    out[mask] = raw(values).flatten()
    return out.view(values.dtype)


@given(
    pattern=patterns(),
    dtype=st.sampled_from(DTYPES),
    rows=st.integers(1, 5),
    k=st.integers(1, 300),
    seed=st.integers(0, 9),
)
def test_compress_decompress_round_trip(
    pattern: SlidePattern, dtype: torch.dtype, rows: int, k: int, seed: int
) -> None:
    w = weight(rows, k, dtype, pattern, seed)
    values, bitmask = compress(w, pattern)
    assert values.shape == (rows, places(pattern, k))
    assert bitmask.shape == (rows, -(-k // 8))
    for decompressed in (decompress(values, bitmask, k), decompress(values.flatten(), bitmask, k)):
        assert_same_bits(decompressed, w)
    assert_same_bits(decompress_by_numpy(values, bitmask, k), w)


@pytest.mark.parametrize(
    ("pattern", "k", "expected"),
    [
        ("6:8", 8, 6),
        ("6:8", 15, 12),
        ("6:8", 14, 12),
        ("6:8", 9, 7),
        ("4:6", 6, 4),
        ("2:4", 7, 4),
        ("2_inf", 9, 9),
    ],
)
def test_number_of_places_of_whole_and_short_blocks(pattern: str, k: int, expected: int) -> None:
    assert places(SlidePattern.parse(pattern), k) == expected


def test_round_trip_in_many_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slide, "CHUNK_ELEMENTS", 100)
    w = weight(17, 44, torch.int8, SIX, 1)
    values, bitmask = compress(w, SIX)
    assert_same_bits(decompress(values, bitmask, 44), w)
    flat = w[w != 0]  # rows of different lengths
    bits = torch.from_numpy(np.packbits((w != 0).numpy(), axis=-1, bitorder="little"))
    assert_same_bits(decompress(flat, bits, 44), w)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16])
def test_negative_zeros_are_kept_in_unused_places(dtype: torch.dtype) -> None:
    """A block of eight has places for six values; 0.0 needs none, so that up to six -0.0 are kept."""
    rows = [[-0.0] * 6 + [0.0] * 2, [0.0, 0.0] + [-0.0] * 6, [1, -0.0, 2, 0.0, 3, -0.0, 4, 0.0], [-0.0] * 8]
    w = torch.tensor(rows).to(dtype)
    decompressed = decompress(*compress(w, SIX), 8)
    assert_same_bits(decompressed[:3], w[:3])
    assert (raw(decompressed[3]) != 0).tolist() == [True] * 6 + [False] * 2


def test_compress_refuses_blocks_with_too_many_values() -> None:
    w = torch.zeros(3, 24, dtype=torch.int8)
    w[2, 8:16] = 1
    with pytest.raises(PatternError, match=r"down_proj: row 2, block 1 \(columns from 8\) has 8 non-zeros"):
        compress(w, SIX, "down_proj")


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda v, b: (v, b ^ 1), "bits set for 27 values, 9 in each row"),
        (lambda v, b: (v, b ^ BITS_MOVED), "27 bits set for 27 values, 9 in each row"),
        (lambda v, b: (v.flatten()[1:], b), "27 bits set for 26 values"),
        (lambda v, b: (v, b | torch.tensor([0, 128], dtype=torch.uint8)), "30 bits set for 27 values"),
        # bits after the last column are invalid
        (lambda v, b: (v[:, :8].flatten(), b ^ BITS_PAST), "24 bits set for 24 values"),
        (lambda v, b: (v[:2], b), r"values \[2, 9\] and a bitmask of torch.uint8 \[3, 2\]"),
        (lambda v, b: (v, b[:, :1]), r"12 columns need one of uint8 \[3, 2\]"),
        (lambda v, b: (v, b.char()), "torch.int8"),
        (lambda v, b: (v[None], b), r"values \[1, 3, 9\]"),
    ],
)
def test_decompress_refuses_inconsistent_parts(break_it: object, message: str) -> None:
    w = torch.arange(1, 37, dtype=torch.int8).view(3, 12)
    w[:, 1:3] = w[:, 11:] = 0
    values, bitmask = compress(prune(w, SIX), SIX)
    values, bitmask = (
        values[:, :9],
        torch.from_numpy(np.packbits((w != 0).numpy(), axis=-1, bitorder="little")),
    )
    with pytest.raises(ValueError, match=message):
        decompress(*break_it(values, bitmask), 12)  # type: ignore[operator]
