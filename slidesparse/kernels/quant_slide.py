"""Quantize tokens and lift them into the windows of a pattern, in one launch.

    scale[m] = max_k |x[m, k]| / Q        q[m, 4j + i] = round(x[m, column(j) + i] / scale[m])

Word j of a row, four codes, is window l = j % (N-1) of block j // (N-1), whose columns start at
L * block + 2 * l - phase.  For 6:8::

    x   a0 a1 a2 a3 a4 a5 a6 a7|b0 ...         [M, K], K tokens of 2 or 4 bytes
    q   a0 a1 a2 a3|a2 a3 a4 a5|a4 a5 a6 a7|b0 ...   [M, K'], one 32-bit store per window

Blocks of 4 at phase 0, as for 2:4 and dense weights, lift nothing: their windows do not overlap.

There is one program per row.  It reads the row twice, for the largest magnitude and, from the cache, for the codes.
"""

# ruff: noqa: N803 (compile-time arguments in capitals, as is Triton's convention)
# mypy: disable-error-code="untyped-decorator,no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from slidesparse.pattern import SlideLayout
from slidesparse.quantize import FP8, quantize_rows

WORDS_PER_STEP = 1024  # of a program, by WARPS warps
WARPS = 8


@triton.jit
def _load(
    x,
    start,
    K: tl.constexpr,
    WORDS: tl.constexpr,
    LENGTH: tl.constexpr,
    PHASE: tl.constexpr,
    STEP: tl.constexpr,
):
    """Load the columns of words ``start`` to ``start`` + STEP - 1, [STEP, 4] float32; zero outside of the row."""
    word = start + tl.arange(0, STEP)
    block = word // (LENGTH // 2 - 1)
    first = block * LENGTH + 2 * (word - block * (LENGTH // 2 - 1)) - PHASE
    column = first[:, None] + tl.arange(0, 4)[None, :]
    inside = (column >= 0) & (column < K) & (word < WORDS)[:, None]
    return tl.load(x + column, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def int8_code(scaled):
    """Nearest integer, ties to even, within -128..127, NaN 0.

    In [2^23, 2^24) float32 counts in ones, so adding 1.5 * 2^23 rounds as wanted and leaves the integer in the low
    bits.  The clamp keeps compilers from fusing the sum with the product that gave ``scaled``.
    """
    number = tl.where(scaled == scaled, scaled, 0.0)
    number = tl.minimum(tl.maximum(number, -128.0), 127.0)
    return (number + 12582912.0).to(tl.int32, bitcast=True)


@triton.jit
def fp8_code(value):
    """E4M3 to nearest, ties to even, at most 448, NaN 0x7F.

    The spacing of E4M3 at exponent e >= -6 (subnormals: -6) is 2^(e-3).  Adding 2^(e+20), where float32 has the same
    spacing, rounds to it; the low bits of the sum count 8 to 16 such steps, and adding 8 * (e+6) gives the code.
    """
    bits = value.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    clamped = tl.minimum(size, 0x43E00000)  # 448
    exponent = tl.maximum(clamped & 0x7F800000, 0x3C800000)  # 2^-6
    anchor = exponent + (20 << 23)
    rounded = clamped.to(tl.float32, bitcast=True) + anchor.to(tl.float32, bitcast=True)
    code = rounded.to(tl.int32, bitcast=True) - anchor + ((exponent - 0x3C800000) >> 20)
    return tl.where(size > 0x7F800000, 0x7F, code | ((bits >> 24) & 0x80))


@triton.jit
def quant_slide_kernel(
    x,
    q,
    scales,
    stride,  # of the rows of x, in elements
    K: tl.constexpr,
    WORDS: tl.constexpr,  # words of a row of q, at least K' / 4
    LENGTH: tl.constexpr,
    PHASE: tl.constexpr,
    E4M3: tl.constexpr,
    STEP: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    x += row * stride
    q += row * WORDS * 4
    largest = tl.zeros([STEP, 4], tl.float32)
    for start in range(0, WORDS, STEP):
        size = tl.abs(_load(x, start, K, WORDS, LENGTH, PHASE, STEP))
        largest = tl.maximum(largest, tl.where(size == size, size, 0.0))  # NaN does not count
    absmax = tl.max(tl.max(largest, 1), 0)
    if E4M3:
        scale = tl.maximum(tl.div_rn(absmax, 448.0), 4.359654017857143e-06)  # 1 / (448 * 512)
    else:
        scale = tl.div_rn(absmax, 127.0)
        factor = tl.where(absmax == 0.0, 0.0, tl.div_rn(127.0, absmax))
    for start in range(0, WORDS, STEP):
        values = _load(x, start, K, WORDS, LENGTH, PHASE, STEP)
        if E4M3:
            codes = fp8_code(tl.div_rn(values, tl.broadcast_to(scale, values.shape)))
        else:
            codes = int8_code(values * factor)
        word = start + tl.arange(0, STEP)
        at = 4 * word[:, None] + tl.arange(0, 4)[None, :]
        tl.store(q + at, codes.to(tl.int8), mask=(word < WORDS)[:, None])
    tl.store(scales + row, scale)


def quant_slide(
    x: Tensor, layout: SlideLayout, dtype: torch.dtype, columns: int, rows: int = 0
) -> tuple[Tensor, Tensor]:
    """x [M, K] bfloat16, float16 or float32 -> q [M, columns] of ``dtype``, scale [M, 1] float32.

    Args:
        x: rows may be any stride apart; within a row the stride is 1.
        layout: the windows over a row of x.
        dtype: torch.int8 or torch.float8_e4m3fn.
        columns: width of q, a multiple of 4; columns beyond K' are zero.
        rows: number of rows to allocate for q and scale, if more than M; those beyond M are not written.
    """
    m, k = x.shape
    x = x if x.stride(1) == 1 else x.contiguous()
    q = torch.empty(max(m, rows), columns, dtype=torch.int8, device=x.device)[:m]
    scales = torch.empty(max(m, rows), 1, dtype=torch.float32, device=x.device)[:m]
    if not m or not k:
        return q.zero_().view(dtype), quantize_rows(x[:, :0], dtype)[1]
    words = columns // 4
    with torch.cuda.device(x.device if x.is_cuda else -1):
        quant_slide_kernel[(m,)](
            *(x, q, scales, x.stride(0)),
            K=k,
            WORDS=words,
            LENGTH=layout.length,
            PHASE=layout.phase,
            E4M3=dtype == FP8,
            STEP=min(WORDS_PER_STEP, triton.next_power_of_2(words)),
            num_warps=WARPS,
            enable_fp_fusion=False,
        )
    return q.view(dtype), scales
