"""Slide the weights of a layer into the windows of its pattern, in one launch: `slidesparse.slide.slide` on the GPU.

    zeros[j]  = zeros of pairs 0..j of a block               r[j] = max(0, 2 - zeros[j])
    early[j]  = the first c[j] - r[j] non-zeros of pair j    c[j] = non-zeros of pair j
    window[j] = pair j without early[j], early[j + 1]        everything of the last pair is early

Each lane processes one block, pair by pair, and carries what the previous pair left to its later window.  For 6:8::

    w    a0 a1|a2 a3|a4 a5|a6 a7     [N, K], a pair is one 16-bit load
            |  /  |  /  |  /
    out   window 0, window 1, window 2       [N, K' + padding], a window is one 32-bit store

so neighbouring lanes are L bytes apart in w and 2 L - 4 in out; accesses are coalesced by the caches.  Blocks beyond
the row are zero, which also fills the columns of out beyond K'.

-0.0 (0x80 in FP8) counts as zero and becomes +0.0, because cuSPARSELt treats every code but 0 as a value.
"""

# ruff: noqa: N803 (compile-time arguments in capitals, as is Triton's convention)
# mypy: disable-error-code="untyped-decorator,no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from slidesparse.kernels import Config, common
from slidesparse.pattern import HARDWARE_LENGTH, SlideLayout
from slidesparse.quantize import FP8, INT8

# A tile is ``block`` blocks of each of ``rows`` rows.
LAUNCH = Config(64, 4, 4)
LAUNCH_LONG = Config(32, 1, 1)  # blocks of 2_inf are as long as rows, and few: spread them
MAX_UNROLLED_LENGTH = 64  # block length; the walk through longer ones is a loop, which compiles quickly


@triton.jit
def _load_pair(w, column, j, k, PAIRS: tl.constexpr):
    """Pair ``j`` from ``column`` on, the first weight in the low byte of an int32; zero outside [0, k).

    PAIRS: ``w`` points to pairs, and column and k count them; otherwise all three are weights.
    """
    if PAIRS:
        at = column + j
        pair = tl.load(w + j, mask=(at >= 0) & (at < k), other=0).to(tl.int32) & 0xFFFF
    else:
        at = column + 2 * j
        first = tl.load(w + 2 * j, mask=(at >= 0) & (at < k), other=0).to(tl.int32) & 0xFF
        second = tl.load(w + 2 * j + 1, mask=(at + 1 >= 0) & (at + 1 < k), other=0).to(tl.int32) & 0xFF
        pair = first | (second << 8)
    return pair


@triton.jit
def _nonzero(pair, VALUE: tl.constexpr):
    """(pair, first, second): the pair with -0.0 cleared to 0, and 1 for each of its weights that is not zero."""
    first = ((pair & VALUE) != 0).to(tl.int32)
    second = ((pair & (VALUE << 8)) != 0).to(tl.int32)
    return pair & (first * 0xFF | second * 0xFF00), first, second


@triton.jit
def _window(
    w,
    out,
    column,
    word,
    j,
    late,  # of pair j - 1
    zeros,  # of pairs 0..j-1
    k,
    words,
    LAST: tl.constexpr,
    VALUE: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """Read pair ``j``, store window j - 1; (late, zeros) for the next."""
    pair, first, second = _nonzero(_load_pair(w, column, j, k, PAIRS), VALUE)
    zeros += 2 - first - second
    if LAST:
        early = pair
    else:
        take = first + second - tl.maximum(2 - zeros, 0)
        take_first = tl.minimum(first, take)
        early = pair & (take_first * 0xFF | (take - take_first) * 0xFF00)
    tl.store(out + (j - 1), late | (early << 16), mask=word + (j - 1) < words)
    return pair ^ early, zeros


@triton.jit
def _slide_weight_kernel(
    w,
    out,
    broken,
    stride,  # stride of the rows of w, in what w points to
    out_stride,  # stride of the rows of out, in int32 words
    n,
    k,  # in what w points to
    words,  # words of a row of out
    across,  # programs along a row
    phase,  # in what w points to
    LENGTH: tl.constexpr,
    VALUE: tl.constexpr,  # mask of the bits that are set only in non-zero codes
    PAIRS: tl.constexpr,
    UNROLL: tl.constexpr,
    BLOCKS: tl.constexpr,
    ROWS: tl.constexpr,
):
    program = tl.program_id(0)
    lane = tl.arange(0, ROWS * BLOCKS)
    row = (program // across).to(tl.int64) * ROWS + lane // BLOCKS
    block = (program % across) * BLOCKS + lane % BLOCKS
    k = tl.where(row < n, k, 0)  # rows beyond the last have no columns
    words = tl.where(row < n, words, 0)
    column = block * (LENGTH // 2 if PAIRS else LENGTH) - phase
    word = block * (LENGTH // 2 - 1)
    w += row * stride + column
    out += row * out_stride + word
    late, first, second = _nonzero(_load_pair(w, column, 0, k, PAIRS), VALUE)
    zeros = 2 - first - second
    if UNROLL:
        for j in tl.static_range(1, LENGTH // 2 - 1):
            late, zeros = _window(w, out, column, word, j, late, zeros, k, words, False, VALUE, PAIRS)
    else:
        for j in range(1, LENGTH // 2 - 1):
            late, zeros = _window(w, out, column, word, j, late, zeros, k, words, False, VALUE, PAIRS)
    last: tl.constexpr = LENGTH // 2 - 1
    late, zeros = _window(w, out, column, word, last, late, zeros, k, words, True, VALUE, PAIRS)
    count = tl.sum((zeros < 2).to(tl.int32), 0)
    tl.atomic_add(broken, count, mask=count > 0, sem="relaxed")


def slide_weight(w: Tensor, length: int, phase: int, out: Tensor, launch: Config | None = None) -> Tensor:
    """Write the windows of w [N, K] int8 or float8_e4m3fn to ``out``; return the number of invalid blocks, int32 [1].

    The count stays on the device, so that the caller can read it once for many launches.  The windows of a block that
    breaks the pattern are not 2:4; `slidesparse.slide.violations` finds its position.

    Args:
        w: rows may be any stride apart; within a row the stride is 1.
        length: L of the pattern's blocks.
        phase: zero columns before the row.
        out: [N, K' or more] of w's dtype; its columns beyond K' become zero.  A row is whole words of four bytes.
        launch: blocks and rows of a program, and its warps, instead of this file's.

    Raises:
        TypeError, ValueError: what was found, what is allowed.
    """
    common.require("w", w, 2, (INT8, FP8))
    n, k = w.shape
    if length < HARDWARE_LENGTH or length % 2 or not 0 <= phase < length:
        raise ValueError(
            f"block length {length} at phase {phase}: the length must be even and at least {HARDWARE_LENGTH}, "
            "the phase in 0..length-1"
        )
    layout = SlideLayout(k, phase, length)  # of any length: 2_inf takes a row as one block
    target = _view_as_windows(out, w, layout.slided)
    broken = torch.zeros(1, dtype=torch.int32, device=w.device)
    if not target.numel():
        return broken
    pairs = None if phase % 2 else _view_as_pairs(w)
    source = w.view(INT8) if pairs is None else pairs
    launch = launch or (LAUNCH if length <= MAX_UNROLLED_LENGTH else LAUNCH_LONG)
    blocks = triton.cdiv(target.shape[1], layout.windows)  # including those that only write zeros
    wide = min(launch.block, int(triton.next_power_of_2(blocks)))
    tall = launch.block * launch.rows // wide
    across = triton.cdiv(blocks, wide)
    with common.on_device_of(w):
        _slide_weight_kernel[(triton.cdiv(n, tall) * across,)](
            source,
            target,
            broken,
            source.stride(0),
            target.stride(0),
            n,
            source.shape[1],
            target.shape[1],
            across,
            phase if pairs is None else phase // 2,
            LENGTH=length,
            VALUE=0x7F if w.dtype == FP8 else 0xFF,
            PAIRS=pairs is not None,
            UNROLL=length <= MAX_UNROLLED_LENGTH,
            BLOCKS=wide,
            ROWS=tall,
            num_warps=launch.warps,
            enable_fp_fusion=False,
        )
    return broken


def _view_as_pairs(w: Tensor) -> Tensor | None:
    """View w [N, K] of one-byte elements as [N, K/2] int16; None if K or the alignment does not allow it."""
    if not w.shape[1] or w.shape[1] % 2 or w.stride(0) % 2 or w.storage_offset() % 2 or w.data_ptr() % 2:
        return None
    return w.view(torch.int16)


def _view_as_windows(out: Tensor, w: Tensor, slided: int) -> Tensor:
    """View ``out`` as [N, words] int32; raise if it cannot hold the windows of ``w``."""
    common.require("out", out, 2, (w.dtype,))
    n, size = w.shape[0], HARDWARE_LENGTH
    if out.shape[0] != n or out.shape[1] < slided or out.shape[1] % size or out.device != w.device:
        raise ValueError(
            f"out has shape {tuple(out.shape)} on {out.device}; the windows of w take {n} rows of at least {slided} "
            f"columns, a multiple of {size}, on {w.device}: allocate it so"
        )
    if out.numel() and (out.stride(0) % size or out.storage_offset() % size or out.data_ptr() % size):
        raise ValueError(
            f"out has strides {out.stride()} from offset {out.storage_offset()}; its rows must begin at multiples of "
            f"{size} bytes: allocate it contiguous"
        )
    return out.view(torch.int32)
