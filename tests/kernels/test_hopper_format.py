"""The packed weight of the Hopper kernels: the place of single elements in the hardware's layout."""

from itertools import combinations

import hopper_packers as fmt
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

PAIRS = list(combinations(range(8), 2))  # of the columns of a coded group, in the order of their numbers
KEPT = [kept for count in (1, 2) for kept in combinations(range(4), count)]  # columns of a group


def place(block: torch.Tensor, value: int) -> tuple[int, int, int]:
    """Return the wgmma, the row and the column of a value in a block's core matrices of 8 rows by 16 bytes."""
    at = int((block == value).nonzero().item())
    matrix = at % 2048 // 128
    return at // 2048, 8 * (matrix // 2) + at % 128 // 16, 16 * (matrix % 2) + at % 16


@settings(max_examples=100, deadline=None)
@given(row=st.integers(0, 127), group=st.integers(0, 63), kept=st.sampled_from(KEPT))
def test_packed_elements_are_where_ptx_isa_says(row: int, group: int, kept: tuple[int, ...]) -> None:
    """The PTX ISA defines the core matrix, row and byte of a value, and the thread and bits of its metadata."""
    weight = torch.zeros(128, 256, dtype=torch.int8)
    for value, column in enumerate(kept, 100):
        weight[row, 4 * group + column] = value
    block = fmt.pack(weight).view(2, 2, fmt.BLOCK_BYTES)[row // 64, group // 32]
    metadata = block[fmt.VALUE_BYTES :].view(torch.int32)
    lower, upper = row % 8, row % 16 // 8
    thread = row % 64 // 16 * 32 + 4 * lower + 2 * (group % 16 // 8) + upper
    nibble = int(metadata[128 * (group % 32 // 16) + thread]) >> (4 * (group % 8)) & 15
    indices = nibble & 3, nibble >> 2
    assert indices[0] < indices[1]
    for value, column in enumerate(kept, 100):
        wgmma, found, compressed = place(block[: fmt.VALUE_BYTES], value)
        assert (wgmma, found, compressed // 2) == (group % 32 // 16, row % 64, group % 16)
        assert indices[compressed % 2] == column


@settings(max_examples=60, deadline=None)
@given(row=st.integers(0, 127), column=st.integers(0, 255))
def test_elements_of_dense_blocks_are_where_ptx_isa_says(row: int, column: int) -> None:
    weight = torch.zeros(128, 256, dtype=torch.int8)
    weight[row, column] = 100
    packed = fmt.pack_mixed(weight, torch.ones(2, 2, dtype=torch.bool))
    assert packed[:16].view(torch.int32).tolist() == [2 * (1 + 8 * block) + 1 for block in range(4)]
    block = packed[fmt.OFFSET_UNIT :].view(2, 2, fmt.DENSE_BYTES)[row // 64, column // 128]
    assert place(block, 100) == (column % 128 // 32, row % 64, column % 32)


@settings(max_examples=100, deadline=None)
@given(row=st.integers(0, 127), group=st.integers(0, 31), dropped=st.sampled_from(PAIRS))
def test_coded_elements_are_where_consumers_read(row: int, group: int, dropped: tuple[int, int]) -> None:
    """The PTX ISA defines the thread that has a row and columns of a wgmma; six values and the number of a pair."""
    weight = torch.zeros(128, 256, dtype=torch.int8)
    kept = [column for column in range(8) if column not in dropped]
    weight[row, 8 * group + torch.tensor(kept)] = torch.arange(100, 106, dtype=torch.int8)
    block = fmt.pack_coded(weight).view(2, 2, fmt.CODED_BYTES)[row // 64, group // 16]
    wgmma, lower = group % 16 // 4, row % 16 // 8
    thread = row % 64 // 16 * 32 + 4 * (row % 8) + group % 4
    halves = block[: fmt.CODED_VALUE_BYTES].view(2, -1)
    first, rest = halves[wgmma // 2].split([128 * 16, 128 * 8])
    values = torch.cat([first.view(128, 16)[thread], rest.view(128, 8)[thread]]).view(2, 12)[wgmma % 2]
    found = torch.cat([values[4 * lower :][:4], values[8 + 2 * lower :][:2]])
    assert found.tolist() == list(range(100, 106))
    low, high = block[fmt.CODED_VALUE_BYTES :].split([128 * 4, 128])
    codes = int(low.view(torch.int32)[thread]) & 0xFFFFFFFF | int(high[thread]) << 32
    assert codes >> 5 * (2 * wgmma + lower) & 31 == PAIRS.index(dropped)
    assert int(block[: fmt.CODED_VALUE_BYTES].count_nonzero()) == 6
