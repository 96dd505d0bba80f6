"""Hypothesis strategies and exact comparison for weights of every dtype, shape and pattern."""

from __future__ import annotations

from typing import NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor

from slidesparse.pattern import ZEROS, SlidePattern

DTYPES = (torch.int8, torch.float8_e4m3fn, torch.bfloat16, torch.float16, torch.float32)
NAMED = ("2:4", "4:6", "6:8", "8:10", "10:12", "12:14", "14:16", "2_inf")
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def raw(w: Tensor) -> Tensor:
    """View the bits of ``w`` as integers, for bit-for-bit comparison."""
    return w.contiguous().view(_INTEGERS[w.element_size()])


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    """Check that dtype, shape and bits are equal; a failure names the first coordinate that differs."""
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    different = (raw(actual) != raw(expected)).nonzero()
    if len(different):
        index = tuple(different[0].tolist())
        raise AssertionError(
            f"{len(different)} elements differ, the first at {index}: found {actual[index]} "
            f"({int(raw(actual)[index]):#x}), expected {expected[index]} ({int(raw(expected)[index]):#x})"
        )


def is_zero(w: Tensor) -> Tensor:
    """Mask of the elements that are +0.0 or -0.0, from their bits."""
    if w.dtype == torch.int8:
        return w == 0
    return (raw(w) & torch.iinfo(raw(w).dtype).max) == 0


def patterns() -> st.SearchStrategy[SlidePattern]:
    """Every named pattern, and larger even block lengths."""
    larger = st.sampled_from([18, 20, 24, 34, 64, 126, 128, 130, 200])
    return st.one_of(st.sampled_from(NAMED).map(SlidePattern.parse), larger.map(SlidePattern))


class Case(NamedTuple):
    """A weight that obeys a pattern, and the phase it starts at."""

    pattern: SlidePattern
    phase: int
    weight: Tensor

    def __repr__(self) -> str:
        shape = tuple(self.weight.shape)
        return f"Case({self.pattern.ratio}, phase={self.phase}, {shape} {self.weight.dtype})"


FILLS = ("mixed", "full", "empty", "front", "back")


def obeying(
    pattern: SlidePattern, rows: int, columns: int, phase: int, dtype: torch.dtype, fill: str, seed: int
) -> Tensor:
    """A weight [rows, columns] of random bits (NaN, Inf and subnormals among them) that obeys the pattern.

    fill: "mixed" any number of non-zeros a block, "full" L-2 wherever they lie, "empty" all zero,
    "front" / "back": L-2 with both zeros at the far end, which forwards the most / the least.
    A third of the zeros are -0.0 in the float dtypes.
    """
    generator = torch.Generator().manual_seed(seed)
    integers = _INTEGERS[dtype.itemsize]
    info = torch.iinfo(integers)
    values = torch.randint(info.min, info.max, (rows, columns), generator=generator, dtype=torch.int64)
    values = values.to(integers)
    magnitude = values if dtype == torch.int8 else values & info.max
    values = torch.where(magnitude == 0, torch.ones_like(values), values)

    length = pattern.length or columns + ZEROS  # a row of 2_inf is one block, with room for two more
    blocks = -(-(phase + columns) // length)
    order = torch.rand(rows, blocks, length, generator=generator).argsort(-1)  # the least kept lie anywhere
    if fill in ("front", "back"):
        order = torch.arange(length).expand_as(order)
        order = order if fill == "front" else order.flip(-1)
    most = {"empty": 0}.get(fill, length - ZEROS)
    kept = torch.full((rows, blocks, 1), most)
    if fill == "mixed":
        kept = torch.randint(0, length - ZEROS + 1, (rows, blocks, 1), generator=generator)
    keep = (order < kept).reshape(rows, blocks * length)[:, phase : phase + columns]
    if dtype == torch.int8:
        zeros = torch.zeros_like(values)
    else:
        negative = torch.rand(rows, columns, generator=generator) < 1 / 3
        zeros = torch.where(negative, info.min, 0).to(integers)
    return torch.where(keep, values, zeros).view(dtype)


@st.composite
def cases(draw: st.DrawFn, dtypes: tuple[torch.dtype, ...] = DTYPES, lengths: tuple[int, ...] = ()) -> Case:
    """Weights that obey a pattern, of ``lengths`` or `patterns`: any N and K (0, 1, whole blocks, tails), any phase."""
    pattern = draw(st.sampled_from(lengths).map(SlidePattern) if lengths else patterns())
    rows = draw(st.one_of(st.sampled_from([1, 0]), st.integers(1, 9)))
    length = pattern.length
    block_ends = [] if length is None else [length, 2 * length, 3 * length]
    columns = draw(st.one_of(st.sampled_from([0, 1, *block_ends]), st.integers(0, 70), st.integers(0, 400)))
    phase = 0 if length is None else draw(st.one_of(st.just(0), st.integers(0, length - 1)))
    dtype, fill = draw(st.sampled_from(dtypes)), draw(st.sampled_from(FILLS))
    weight = obeying(pattern, rows, columns, phase, dtype, fill, draw(st.integers(0, 2**20)))
    return Case(pattern, phase, weight)
