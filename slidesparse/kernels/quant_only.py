"""Quantize tokens, K padded with zeros to whole words of 4: the dense path, which lifts nothing.

    scale[m] = max_k |x[m, k]| / Q        q[m, k] = round(x[m, k] / scale[m])

Equal to `quant_slide` with blocks of 4, whose windows do not overlap, and faster: a row is read in wide words.
One program per row; a row that fits into one block is held in registers, a longer one is read twice.
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
    halves,
    largest_of_four,
    launch_dependents,
    load_four,
    load_quad,
    row_scale,
)
from slidesparse.kernels.launch import Launcher
from slidesparse.kernels.rows import codes
from slidesparse.kernels.rows import launch as launch_rows


@triton.jit
def _load(x, word, K: tl.constexpr, WORDS: tl.constexpr, QUADS: tl.constexpr, BF16: tl.constexpr):
    if QUADS:
        first, second = load_quad(x, word, word < K // 4)
        a, b = halves(first, BF16)
        c, d = halves(second, BF16)
    else:
        a, b, c, d = load_four(x, 4 * word, word < WORDS, K, False, BF16)
    return a, b, c, d


@triton.jit
def quant_only_kernel(
    x,
    q,
    scales,
    stride,  # of x's rows, in what x points to
    K: tl.constexpr,
    WORDS: tl.constexpr,  # of a row of q, at least K / 4
    QUADS: tl.constexpr,  # x points to int64 words of four 16-bit floats
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
        a, b, c, d = _load(x, word, K, WORDS, QUADS, BF16)
        scale, factor = row_scale(absmax_of(largest_of_four(a, b, c, d, NATIVE)), E4M3)
        if DEPENDENTS == 2:
            launch_dependents()
        codes = codes_of(a, b, c, d, scale, factor, E4M3, NATIVE)
        tl.store(q + word, codes, mask=word < WORDS)
    else:
        largest = tl.zeros([BLOCK], tl.float32)  # lane by lane: a row's maximum waits for all of its warps
        for start in tl.static_range(0, WORDS, BLOCK):
            a, b, c, d = _load(x, start + tl.arange(0, BLOCK), K, WORDS, QUADS, BF16)
            largest = tl.maximum(largest, largest_of_four(a, b, c, d, NATIVE))
        scale, factor = row_scale(absmax_of(largest), E4M3)
        if DEPENDENTS == 2:
            launch_dependents()
        for start in tl.static_range(0, WORDS, BLOCK):
            word = start + tl.arange(0, BLOCK)
            a, b, c, d = _load(x, word, K, WORDS, QUADS, BF16)
            codes = codes_of(a, b, c, d, scale, factor, E4M3, NATIVE)
            tl.store(q + word, codes, mask=word < WORDS)
    tl.store(scales + row, scale)


_launch = Launcher(quant_only_kernel)


def quant_only(
    x: Tensor, dtype: torch.dtype, columns: int | None = None, rows: int = 0, launch: Config | None = None
) -> tuple[Tensor, Tensor]:
    """x [M, K] bfloat16, float16 or float32 -> q [M, columns] of ``dtype``, scale [M, 1] float32.

    Args:
        x: rows may be any stride apart; within a row the stride is 1.
        dtype: torch.int8 or torch.float8_e4m3fn.
        columns: of a row of codes, a multiple of 4; zeros fill those beyond K.  None: 4 * ceil(K / 4).
        rows: how many rows the memory behind q and scale can be read for, if more than M; not written beyond M.
        launch: block and warps, instead of the table's.

    Raises:
        TypeError, ValueError: what was found, what is allowed.
    """
    common.require("x", x, 2, common.FLOATS)
    k = x.shape[1]
    made = codes(x, k, k, dtype, columns, rows)
    quads = common.words_of(x, 8)
    source = x if quads is None else quads
    own = {"QUADS": quads is not None}
    return launch_rows(_launch, "quant_only", x, made, (source,), (source.stride(0),), own, 4, launch)
