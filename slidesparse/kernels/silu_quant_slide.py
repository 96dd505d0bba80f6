"""SiLU of one half of a row times the other half, then quantize and lift as `quant_slide` does, in one launch.

    act[m, k] = x[m, k] / (1 + exp(-x[m, k])) * x[m, K + k]     float32
    q, scale  = quant_slide(act rounded to x's dtype)

One rounding, at the end of act: what Inductor makes of vLLM's SiluAndMul, bit for bit, as it drops the conversion of
the SiLU to a 16-bit float that is written there.  Exponential and division are those that Inductor calls.

One program per row.  A row that fits into one block is read once; a longer one is read, and computed, twice.
"""

# ruff: noqa: N803, SIM108 (compile-time arguments in capitals, as is Triton's convention)
# mypy: disable-error-code="untyped-decorator,no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from slidesparse.kernels import Config, common
from slidesparse.kernels.common import (
    absmax_of_four,
    codes_of,
    launch_dependents,
    load_four,
    rounded,
    row_scale,
)
from slidesparse.kernels.launch import Launcher
from slidesparse.kernels.quant_slide import window_column
from slidesparse.kernels.rows import launch as launch_rows
from slidesparse.kernels.rows import windows


@triton.jit
def _gated(gate, up, BF16: tl.constexpr, WIDE: tl.constexpr, NATIVE: tl.constexpr):
    """silu(gate) * up, rounded to the dtype of x, as float32.

    libdevice has no interpreter: there the exponential is numpy's.
    """
    if NATIVE:
        power = libdevice.exp(-gate)
    else:
        power = tl.exp(-gate)
    return rounded(gate / (power + 1.0) * up, BF16, WIDE, NATIVE)


@triton.jit
def _act(
    x,
    column,
    valid,
    K: tl.constexpr,
    PAIRS: tl.constexpr,
    BF16: tl.constexpr,
    WIDE: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Four columns of act, zero outside the row."""
    a, b, c, d = load_four(x, column, valid, K, PAIRS, BF16)
    e, f, g, h = load_four(x + (K // 2 if PAIRS else K), column, valid, K, PAIRS, BF16)
    a, b = _gated(a, e, BF16, WIDE, NATIVE), _gated(b, f, BF16, WIDE, NATIVE)
    c, d = _gated(c, g, BF16, WIDE, NATIVE), _gated(d, h, BF16, WIDE, NATIVE)
    return a, b, c, d


@triton.jit
def silu_quant_slide_kernel(
    x,
    q,
    scales,
    stride,  # of x's rows, in what x points to
    K: tl.constexpr,
    WORDS: tl.constexpr,  # of a row of q, at least K' / 4
    LENGTH: tl.constexpr,
    PHASE: tl.constexpr,
    PAIRS: tl.constexpr,  # x points to int32 words of two 16-bit floats
    WIDE: tl.constexpr,  # x is float32
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
        column = window_column(word, LENGTH, PHASE)
        a, b, c, d = _act(x, column, word < WORDS, K, PAIRS, BF16, WIDE, NATIVE)
        scale, inverse = row_scale(absmax_of_four(a, b, c, d, NATIVE), E4M3)
        if DEPENDENTS == 2:
            launch_dependents()
        tl.store(q + word, codes_of(a, b, c, d, scale, inverse, E4M3, NATIVE), mask=word < WORDS)
    else:
        absmax = 0.0
        for start in tl.static_range(0, K, 4 * BLOCK):
            column = start + 4 * tl.arange(0, BLOCK)
            a, b, c, d = _act(x, column, column < K, K, PAIRS, BF16, WIDE, NATIVE)
            absmax = tl.maximum(absmax, absmax_of_four(a, b, c, d, NATIVE))
        scale, inverse = row_scale(absmax, E4M3)
        if DEPENDENTS == 2:
            launch_dependents()
        for start in tl.static_range(0, WORDS, BLOCK):
            word = start + tl.arange(0, BLOCK)
            column = window_column(word, LENGTH, PHASE)
            a, b, c, d = _act(x, column, word < WORDS, K, PAIRS, BF16, WIDE, NATIVE)
            tl.store(q + word, codes_of(a, b, c, d, scale, inverse, E4M3, NATIVE), mask=word < WORDS)
    tl.store(scales + row, scale)


_launch = Launcher(silu_quant_slide_kernel)


def silu_quant_slide(
    x: Tensor,
    length: int,
    phase: int,
    dtype: torch.dtype,
    columns: int | None = None,
    rows: int = 0,
    launch: Config | None = None,
) -> tuple[Tensor, Tensor]:
    """x [M, 2 K] bfloat16, float16 or float32, gate before up -> q [M, columns] of ``dtype``, scale [M, 1] float32.

    Args:
        x: rows may be any stride apart; within a row the stride is 1.
        length, phase, dtype, columns, rows, launch: as of `quant_slide.quant_slide`, for rows of K.

    Raises:
        TypeError, ValueError: what was found, what is allowed.
    """
    common.require("x", x, 2, common.FLOATS)
    width = x.shape[1]
    if width % 2:
        raise ValueError(
            f"x has {width} columns; there must be as many gates as values, an even number in all"
        )
    k = width // 2
    made = windows(x, k, length, phase, dtype, columns, rows)
    pairs = None if phase % 2 or k % 2 else common.words_of(x, 4)
    source = x if pairs is None else pairs
    own = {
        "LENGTH": length,
        "PHASE": phase,
        "PAIRS": pairs is not None,
        "WIDE": x.dtype == torch.float32,
    }
    return launch_rows(_launch, "silu_quant_slide", x, made, (source,), (source.stride(0),), own, 4, launch)
