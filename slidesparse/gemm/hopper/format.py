"""The packed weight of the Hopper kernels.

Out-features go in strips of 64, columns of the slided weight in blocks of 128, both filled up with zeros.  The blocks
of a strip follow each other.  A weight whose blocks are all 2:4, as a slided one's are, is made of nothing else; a
mixed one, some of whose blocks are dense, begins with a table of where each block is::

    2:4     uint8 [strips, blocks, 5120]
    mixed   table, int32 [strips, blocks], filled up to a multiple of 1024 bytes | block | block | ...
    entry   2 * (offset of the block in the packed weight / 1024) + (1 if it is dense)
    2:4     values 2048 (columns 0..63) | values 2048 (columns 64..127) | metadata 512 | metadata 512

Values are stored in core matrices of 8 rows by 16 bytes, row by row, as wgmma reads them from shared memory and as
`ldmatrix` loads them into the registers of a warp: with columns counted after compression, two of four::

    2048 bytes  rows 0..7, columns 0..15 | rows 0..7, columns 16..31 | rows 8..15, columns 0..15 | ...

A dense block has the values of columns 0..31, 32..63, 64..95 and 96..127 in the same order, and nothing else.

The metadata are one 32-bit word for each of the 128 threads of the strip's warpgroup.  Thread (warp w of 4, lane
4 g + 2 h + r) has the word of row 16 w + g + 8 r: for each of the eight groups of four columns from 32 h on the indices
of the two that are stored, two bits each, the first group and index lowest.

6:8 weights are not slid but coded, uint8 [strips, blocks, 6784]: of each group of eight columns six values and five
bits, the number of the pair of columns that is left out, counted in lexicographic order.  Each thread of the warpgroup
expands its groups of rows 16 w + g (r = 0) and 16 w + g + 8 (r = 1) into the registers of four dense wgmmas.  Thread
(warp w, lane 4 g + t) has for wgmma i columns 32 i + 8 t to 32 i + 8 t + 7::

    coded   values of wgmmas 0 and 1: 128 x 16, 128 x 8 | of wgmmas 2 and 3: 128 x 16, 128 x 8 | codes 128 x 4, 128 x 1
    values  of a thread and a wgmma: first four, r = 0 | first four, r = 1 | last two, r = 0 | last two, r = 1
    codes   of a thread: 40 bits, from the lowest on (i, r) = (0, 0), (0, 1), (1, 0), ...

wgmma multiplies a thread's columns as its columns 4 t to 4 t + 3 and 16 + 4 t to 16 + 4 t + 3, so the quantizer writes
each 32 codes in this order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slidesparse.blocks import BLOCK, STRIP

BLOCK_BYTES = STRIP * BLOCK // 2 + STRIP * BLOCK // 8  # of a 2:4 block: values and metadata
DENSE_BYTES = STRIP * BLOCK  # of a dense one
OFFSET_UNIT = 1024  # bytes: unit of the offsets in a mixed weight


def allocate_mixed(dense: Tensor) -> Tensor:
    """Allocate a mixed weight, uint8, and write its table, not its blocks.

    ``dense`` is from `slidesparse.blocks.dense_blocks`.
    """
    units = torch.where(dense.flatten(), DENSE_BYTES // OFFSET_UNIT, BLOCK_BYTES // OFFSET_UNIT)
    header = -(-4 * dense.numel() // OFFSET_UNIT)
    ends = units.cumsum(0) + header
    table = (2 * (ends - units) + dense.flatten()).to(torch.int32).view(torch.uint8)
    packed = torch.empty(OFFSET_UNIT * int(ends[-1]), dtype=torch.uint8, device=dense.device)
    packed[: table.numel()] = table
    packed[table.numel() : OFFSET_UNIT * header] = 0
    return packed
