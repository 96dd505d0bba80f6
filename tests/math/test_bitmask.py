"""Decompression of weights stored as values and a bitmask: bit for bit, from matrices and from flat values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from packed import packed
from strategies import DTYPES, assert_same_bits, raw
from torch import Tensor

from slidesparse import slide
from slidesparse.bitmask import decompress

DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
BITS_MOVED = torch.tensor([[1, 0], [2, 0], [0, 0]], dtype=torch.uint8)  # a bit moved to another row
# one bit moved past the last column, one cleared
BITS_PAST = torch.tensor([[1 + 8, 16], [1 + 8, 16], [1 + 8, 16]], dtype=torch.uint8)


def weight(rows: int, k: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Return random values without NaN, with zeros of both signs."""
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(rows, k, generator=generator).mul_(30).clamp_(-100, 100).round_().to(dtype)
    zeros = torch.rand(rows, k, generator=generator) < torch.rand(rows, 1, generator=generator)
    raw(w)[zeros] = 0
    return w


def restored(w: Tensor, width: int | None, device: str) -> Tensor:
    return decompress(*(part.to(device) for part in packed(w, width)), w.shape[1]).cpu()


@DEVICES
@given(
    dtype=st.sampled_from(DTYPES),
    rows=st.integers(1, 5),
    k=st.integers(1, 300),
    spare=st.integers(0, 9),
    seed=st.integers(0, 9),
)
def test_bits_are_restored(device: str, dtype: torch.dtype, rows: int, k: int, spare: int, seed: int) -> None:
    """Rows of a matrix store as many values as the fullest row has non-zeros, or more."""
    w = weight(rows, k, dtype, seed)
    width = min(int((raw(w) != 0).sum(-1).max()) + spare, k)
    for stored in (None, width):
        assert_same_bits(restored(w, stored, device), w)


@DEVICES
def test_decompress_in_many_chunks(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    monkeypatch.setattr(slide, "CHUNK_ELEMENTS", 100)
    w = weight(17, 44, torch.int8, 1)
    for stored in (None, 44):
        assert_same_bits(restored(w, stored, device), w)


@DEVICES
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
def test_decompress_refuses_inconsistent_parts(device: str, break_it: Any, message: str) -> None:
    w = torch.arange(1, 37, dtype=torch.int8).view(3, 12)
    w[:, 1:3] = w[:, 11:] = 0
    with pytest.raises(ValueError, match=message):
        decompress(*(part.to(device) for part in break_it(*packed(w, 9))), 12)
