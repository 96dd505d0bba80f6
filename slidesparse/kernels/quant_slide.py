"""Quantize tokens and lift them into the windows of a pattern, in one launch.

    scale[m] = max_k |x[m, k]| / Q        q[m, 4j + i] = round(x[m, column(j) + i] / scale[m])

Word j of a row, four codes, is window l = j % (N-1) of block j // (N-1), whose columns start at
L * block + 2 * l - phase.  For 6:8::

    x   a0 a1 a2 a3 a4 a5 a6 a7|b0 ...         [M, K], K tokens of 2 or 4 bytes
    q   a0 a1 a2 a3|a2 a3 a4 a5|a4 a5 a6 a7|b0 ...   [M, K'], one 32-bit store per window

Blocks of 4 at phase 0, as for 2:4 and dense weights, lift nothing: their windows do not overlap, so a row is read in
groups of four floats.

There is one program per row.  A row that fits into one block is read once and held in registers; for a longer one, the
first pass finds the largest magnitude and the second reads the row again, from the cache.
"""

# ruff: noqa: N803 (compile-time arguments in capitals, as is Triton's convention)
# mypy: disable-error-code="untyped-decorator,no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from slidesparse.kernels import Config, common, default_config, quantizer_kind
from slidesparse.kernels.common import (
    largest_of_four,
    launch_dependents,
    load_four,
    quantize_four,
    reduce_absmax,
    row_absmax,
    row_scale,
    unpack_halves,
)
from slidesparse.kernels.launch import Launcher
from slidesparse.pattern import HARDWARE_LENGTH, SlideLayout
from slidesparse.quantize import FP8, INT8, quantize_rows


@triton.jit
def _load(
    x,
    word,
    K: tl.constexpr,
    WORDS: tl.constexpr,
    LENGTH: tl.constexpr,
    PHASE: tl.constexpr,
    FLOATS: tl.constexpr,
    BF16: tl.constexpr,
):
    """Load the four columns of x that become word ``word`` of a row of codes, as float32; zero in the padding."""
    if FLOATS == 4:
        quad = tl.load(x + word, mask=word < K // 4, other=0)
        first, second = quad.to(tl.int32), (quad >> 32).to(tl.int32)
        a, b = unpack_halves(first, BF16)
        c, d = unpack_halves(second, BF16)
    else:
        block = word // (LENGTH // 2 - 1)
        column = block * LENGTH + 2 * (word - block * (LENGTH // 2 - 1)) - PHASE
        a, b, c, d = load_four(x, column, word < WORDS, K, FLOATS == 2, BF16)
    return a, b, c, d


@triton.jit
def quant_slide_kernel(
    x,
    q,
    scales,
    stride,  # row stride of x, in elements of its pointer type
    K: tl.constexpr,
    WORDS: tl.constexpr,  # words of a row of q, at least K' / 4
    LENGTH: tl.constexpr,
    PHASE: tl.constexpr,
    FLOATS: tl.constexpr,  # floats per element of x's pointer type: 1 of any type, or 2 or 4 of 16 bits
    BF16: tl.constexpr,
    E4M3: tl.constexpr,
    NATIVE: tl.constexpr,
    DEPENDENTS: tl.constexpr,  # see `common.supports_dependent_launch`
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    x += row * stride
    q += row * WORDS
    if WORDS <= BLOCK:
        word = tl.arange(0, BLOCK)
        a, b, c, d = _load(x, word, K, WORDS, LENGTH, PHASE, FLOATS, BF16)
        scale, factor = row_scale(reduce_absmax(largest_of_four(a, b, c, d, NATIVE)), E4M3)
        if DEPENDENTS:
            launch_dependents()
        codes = quantize_four(a, b, c, d, scale, factor, E4M3, NATIVE)
        tl.store(q + word, codes, mask=word < WORDS)
    else:
        if LENGTH == 4 and PHASE == 0:
            # Lane by lane: the maximum of a row waits for all of its warps.
            largest = tl.zeros([BLOCK], tl.float32)
            for start in tl.static_range(0, WORDS, BLOCK):
                word = start + tl.arange(0, BLOCK)
                a, b, c, d = _load(x, word, K, WORDS, LENGTH, PHASE, FLOATS, BF16)
                largest = tl.maximum(largest, largest_of_four(a, b, c, d, NATIVE))
            absmax = reduce_absmax(largest)
        else:
            absmax = row_absmax(x, K, FLOATS == 2, BF16, NATIVE, BLOCK)
        scale, factor = row_scale(absmax, E4M3)
        if DEPENDENTS:
            launch_dependents()
        for start in tl.static_range(0, WORDS, BLOCK):
            word = start + tl.arange(0, BLOCK)
            a, b, c, d = _load(x, word, K, WORDS, LENGTH, PHASE, FLOATS, BF16)
            codes = quantize_four(a, b, c, d, scale, factor, E4M3, NATIVE)
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
        length: L of the pattern's blocks; 4 at phase 0 lifts nothing and pads K to a multiple of 4.
        phase: zero columns before the row.
        dtype: torch.int8 or torch.float8_e4m3fn.
        columns: width of q, a multiple of 4; columns beyond K' are zero.  None: K'.
        rows: number of rows to allocate for q and scale, if more than M; those beyond M are not written.
        launch: block and warps, instead of the table's.

    Raises:
        TypeError, ValueError: what was found, what is allowed.
    """
    common.require("x", x, 2, common.FLOATS)
    if length < HARDWARE_LENGTH or length % 2 or not 0 <= phase < length:
        raise ValueError(
            f"block length {length} at phase {phase}: the length must be even and at least {HARDWARE_LENGTH}, "
            "the phase in 0..length-1"
        )
    if dtype not in (INT8, FP8):
        raise TypeError(f"cannot quantize to {dtype}; use torch.int8 or torch.float8_e4m3fn")
    m, k = x.shape
    slided = SlideLayout(k, phase, length).slided
    columns = slided if columns is None else columns
    if columns < slided or columns % HARDWARE_LENGTH:
        raise ValueError(
            f"columns is {columns}; it must be a multiple of {HARDWARE_LENGTH}, {slided} or more"
        )
    words = columns // HARDWARE_LENGTH
    q = torch.empty(max(m, rows), words, dtype=torch.int32, device=x.device)
    scales = torch.empty(max(m, rows), 1, dtype=torch.float32, device=x.device)
    if rows > m:
        q, scales = q[:m], scales[:m]
    if not m or not k:
        return q.zero_().view(dtype), quantize_rows(x[:, :0], dtype)[1]
    kind = quantizer_kind(length, phase)
    floats = 4 if kind == "quant_only" else 1 if phase % 2 else 2
    source = None if floats == 1 else common.view_as_words(x, 2 * floats)
    if source is None:
        source, floats = x, 1
    config = launch or default_config(kind, k, m)
    with common.on_device_of(x):
        _launch(
            (m, 1, 1),
            (source, q, scales),
            (source.stride(0),),
            {
                "K": k,
                "WORDS": words,
                "LENGTH": length,
                "PHASE": phase,
                "FLOATS": floats,
                "BF16": x.dtype == torch.bfloat16,
                "E4M3": dtype == FP8,
                "NATIVE": common.native_level(x),
                "DEPENDENTS": common.supports_dependent_launch(x),
                "BLOCK": common.unrolled_step(
                    config.block, max(words, k // (4 if kind == "quant_only" else 2))
                ),
            },
            config.warps,
        )
    return q.view(dtype), scales
