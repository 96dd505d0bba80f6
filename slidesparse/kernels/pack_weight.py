"""Pack 2:4 windows of a weight for the Hopper kernels, in one launch: `slidesparse.gemm.hopper_format.pack` on the GPU.

A program packs a block of 64 out-features by 128 columns.  A lane has one word of its values: of one row two
neighbouring windows, 8 bytes, of which it keeps two values each and their places::

    window   a0  0 a2  0 |  0  0  0 b3      8 bytes
    values   a0 a2  0 b3                    4 bytes, word ``lane`` of the block
    places    0  2  0  3                    1 byte, two bits each

Which two of four are kept, and in which order: where there are fewer than two non-zeros, zeros fill in from the left.
"""

# ruff: noqa: N803 (compile-time arguments in capitals, as is Triton's convention)
# mypy: disable-error-code="untyped-decorator,no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from slidesparse.kernels import common
from slidesparse.pattern import HARDWARE_LENGTH
from slidesparse.quantize import FP8, INT8

STRIP, BLOCK = 64, 128  # out-features and columns of a block
BLOCK_BYTES = 5120  # packed
WARPS = 4


@triton.jit
def _keep(window, VALUE: tl.constexpr):
    """(values, places) of a window, four bytes in an int32: two bytes, and two bits for each of them."""
    first, second = (window & VALUE) != 0, (window & (VALUE << 8)) != 0
    third, fourth = (window & (VALUE << 16)) != 0, ((window >> 24) & VALUE) != 0
    high = tl.where(fourth, 3, tl.where(third, 2, 1))
    low = tl.where(first, 0, tl.where(second & (high > 1), 1, tl.where(third & (high > 2), 2, 0)))
    values = ((window >> (8 * low)) & 0xFF) | (((window >> (8 * high)) & 0xFF) << 8)
    return values, low | (high << 2)


@triton.jit
def _kernel(
    windows,  # int64, two windows
    values,  # int32, of the packed weight
    places,  # int8, the same memory
    stride,  # of windows' rows
    blocks,  # of a strip
    VALUE: tl.constexpr,  # the bits of a code that tell it from zero
):
    program = tl.program_id(0).to(tl.int64)
    strip, block = program // blocks, program % blocks
    lane = tl.arange(0, 1024)
    # word ``column`` of row ``group`` of one of the four matrices that ``warp`` multiplies
    column, group, half, lower = lane % 4, lane // 4 % 8, lane // 32 % 2, lane // 64 % 2
    warp, product = lane // 128 % 4, lane // 512
    row = strip * 64 + warp * 16 + lower * 8 + group
    two = tl.load(windows + row * stride + block * 16 + product * 8 + half * 4 + column)
    a, a_places = _keep(two.to(tl.int32), VALUE)
    b, b_places = _keep((two >> 32).to(tl.int32), VALUE)
    tl.store(values + program * 1280 + lane, a | (b << 16))
    word = product * 128 + warp * 32 + group * 4 + half * 2 + lower
    tl.store(places + program * 5120 + 4096 + word * 4 + column, (a_places | (b_places << 4)).to(tl.int8))


def pack_weight(windows: Tensor, packed: Tensor) -> None:
    """Write the packed form of ``windows`` to ``packed``.

    Args:
        windows: [N, K'] int8 or float8_e4m3fn, contiguous; N a multiple of 64, K' of 128.  Every four columns from a
            multiple of 4 on hold at most two non-zeros, which is not checked.
        packed: uint8 [N / 64 * K' / 128 * 5120], contiguous.

    Raises:
        TypeError, ValueError: what was found, what is allowed.
    """
    common.require("windows", windows, 2, (INT8, FP8))
    common.require("packed", packed, 1, (torch.uint8,))
    (n, k), device = windows.shape, windows.device
    size = n // STRIP * (k // BLOCK) * BLOCK_BYTES
    if n % STRIP or k % BLOCK or not windows.is_contiguous() or windows.data_ptr() % 8:
        raise ValueError(
            f"windows has shape {tuple(windows.shape)} and strides {windows.stride()}; the kernel takes contiguous "
            f"rows, a multiple of {STRIP}, of columns, a multiple of {BLOCK}, at an address that is one of 8: pad it"
        )
    if packed.numel() != size or packed.device != device or packed.data_ptr() % HARDWARE_LENGTH:
        raise ValueError(
            f"packed has {packed.numel()} bytes on {packed.device}; windows of shape {tuple(windows.shape)} on "
            f"{device} take {size}, at an address that is a multiple of {HARDWARE_LENGTH}: allocate it so"
        )
    if not size:
        return
    source = windows.view(torch.int64)
    with common.on_device_of(windows):
        _kernel[(size // BLOCK_BYTES,)](
            source,
            packed.view(torch.int32),
            packed.view(torch.int8),
            source.stride(0),
            k // BLOCK,
            VALUE=0x7F if windows.dtype == FP8 else 0xFF,
            num_warps=WARPS,
        )
