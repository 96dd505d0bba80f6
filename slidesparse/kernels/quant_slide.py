"""Quantize tokens and lift them into the windows of a pattern, in one launch.

    scale[m] = max_k |x[m, k]| / Q        q[m, 4j + i] = round(x[m, column(j) + i] / scale[m])

Word j of a row, four codes, is window l = j % (N-1) of block j // (N-1), whose columns start at
L * block + 2 * l - phase.  For 6:8::

    x   a0 a1 a2 a3 a4 a5 a6 a7|b0 ...         [M, K], K tokens of 2 or 4 bytes
    q   a0 a1 a2 a3|a2 a3 a4 a5|a4 a5 a6 a7|b0 ...   [M, K'], one 32-bit store per window

One program per row.  A row that fits into one block is read once and held in registers; of a longer one the first
pass finds the largest magnitude and the second reads it again, from the cache.
"""

# ruff: noqa: N803 (compile-time arguments in capitals, as is Triton's convention)
# mypy: disable-error-code="untyped-decorator,no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from slidesparse.kernels import Config, common
from slidesparse.kernels.common import (
    absmax_of,
    codes_of,
    largest_of_four,
    launch_dependents,
    load_four,
    row_absmax,
    row_scale,
)
from slidesparse.kernels.launch import Launcher
from slidesparse.kernels.rows import launch as launch_rows
from slidesparse.kernels.rows import windows


@triton.jit
def window_column(word, LENGTH: tl.constexpr, PHASE: tl.constexpr):
    """The first column of a window; negative, or K and above, in the padding."""
    block = word // (LENGTH // 2 - 1)
    return block * LENGTH + 2 * (word - block * (LENGTH // 2 - 1)) - PHASE


@triton.jit
def quant_slide_kernel(
    x,
    q,
    scales,
    stride,  # of x's rows, in what x points to
    K: tl.constexpr,
    WORDS: tl.constexpr,  # of a row of q, at least K' / 4
    LENGTH: tl.constexpr,
    PHASE: tl.constexpr,
    PAIRS: tl.constexpr,  # x points to int32 words of two 16-bit floats
    BF16: tl.constexpr,
    E4M3: tl.constexpr,
    NATIVE: tl.constexpr,
    DEPENDENTS: tl.constexpr,  # see `common.dependents`
    BLOCK: tl.constexpr,
):
    if DEPENDENTS == 1:
        launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    x += row * stride
    q += row * WORDS
    if WORDS <= BLOCK:
        word = tl.arange(0, BLOCK)
        a, b, c, d = load_four(x, window_column(word, LENGTH, PHASE), word < WORDS, K, PAIRS, BF16)
        scale, factor = row_scale(absmax_of(largest_of_four(a, b, c, d, NATIVE)), E4M3)
        if DEPENDENTS == 2:
            launch_dependents()
        codes = codes_of(a, b, c, d, scale, factor, E4M3, NATIVE)
        tl.store(q + word, codes, mask=word < WORDS)
    else:
        scale, factor = row_scale(row_absmax(x, K, PAIRS, BF16, NATIVE, BLOCK), E4M3)
        if DEPENDENTS == 2:
            launch_dependents()
        for start in tl.static_range(0, WORDS, BLOCK):
            word = start + tl.arange(0, BLOCK)
            a, b, c, d = load_four(x, window_column(word, LENGTH, PHASE), word < WORDS, K, PAIRS, BF16)
            codes = codes_of(a, b, c, d, scale, factor, E4M3, NATIVE)
            tl.store(q + word, codes, mask=word < WORDS)
    tl.store(scales + row, scale)


_launch = Launcher(quant_slide_kernel)


def quant_slide(
    x: Tensor,
    length: int,
    phase: int,
    dtype: torch.dtype,
    columns: int | None = None,
    rows: int = 0,
    launch: Config | None = None,
) -> tuple[Tensor, Tensor]:
    """x [M, K] bfloat16, float16 or float32 -> q [M, columns] of ``dtype``, scale [M, 1] float32.

    Args:
        x: rows may be any stride apart; within a row the stride is 1.
        length: L of the pattern's blocks; 4 lifts nothing and pads K to a multiple of 4.
        phase: zero columns before the row.
        dtype: torch.int8 or torch.float8_e4m3fn.
        columns: of a row of codes, a multiple of 4; zeros fill those beyond K'.  None: K'.
        rows: how many rows the memory behind q and scale can be read for, if more than M; not written beyond M.
        launch: block and warps, instead of the table's.

    Raises:
        TypeError, ValueError: what was found, what is allowed.
    """
    common.require("x", x, 2, common.FLOATS)
    made = windows(x, x.shape[1], length, phase, dtype, columns, rows)
    pairs = None if phase % 2 else common.words_of(x, 4)
    source = x if pairs is None else pairs
    own = {"LENGTH": length, "PHASE": phase, "PAIRS": pairs is not None}
    return launch_rows(_launch, "quant_slide", x, made, (source,), (source.stride(0),), own, 2, launch)
