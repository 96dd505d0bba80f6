"""RMSNorm, with or without a residual added first, then quantize and lift as `quant_slide` does, in one launch.

    sum[m, k]  = x[m, k] + residual[m, k]                       float32; written in x's dtype
    norm[m, k] = sum[m, k] / sqrt(mean_k sum[m, k]^2 + eps) * weight[k]
    q, scale   = quant_slide(norm rounded to x's dtype)

One rounding, at the end of norm, and a mean of the sums before they are rounded: what Inductor makes of vLLM's RMSNorm,
as it drops the conversions in between.  Only the order in which the mean is summed, and the last bits of 1 / sqrt, are
free.  They move norm by some units of float32, which changes a 16-bit norm only where it lies that close to a tie, some
elements in ten thousand: their codes may move by one, and with them those of a row whose largest it is.

A row with NaN is NaN throughout, in FP8 its padding too, which meets only zero weights.

One program per row.  A row that fits into one block is read once: windows overlap, so each squares and writes only its
first two columns, the last window of a block all four.
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
    narrow,
    rounded,
    row_scale,
)
from slidesparse.kernels.launch import Launcher
from slidesparse.kernels.quant_slide import window_column
from slidesparse.kernels.rows import launch as launch_rows
from slidesparse.kernels.rows import windows


@triton.jit
def _sums(
    x, residual, column, valid, K: tl.constexpr, ADD: tl.constexpr, PAIRS: tl.constexpr, BF16: tl.constexpr
):
    """Four columns of x, or of x + residual, as float32; zero outside the row."""
    a, b, c, d = load_four(x, column, valid, K, PAIRS, BF16)
    if ADD:
        e, f, g, h = load_four(residual, column, valid, K, PAIRS, BF16)
        a, b, c, d = a + e, b + f, c + g, d + h
    return a, b, c, d


@triton.jit
def _store_two(
    total,
    low,
    high,
    column,
    valid,
    K: tl.constexpr,
    PAIRS: tl.constexpr,
    BF16: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Round two neighbours to the dtype of x and write those that lie in the row."""
    if PAIRS:
        kind: tl.constexpr = tl.bfloat16 if BF16 else tl.float16
        word = narrow(low, kind, NATIVE).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        word |= narrow(high, kind, NATIVE).to(tl.int16, bitcast=True).to(tl.int32) << 16
        tl.store(total + column // 2, word, mask=valid & (column >= 0) & (column < K))
    else:
        own: tl.constexpr = total.dtype.element_ty
        tl.store(total + column, narrow(low, own, NATIVE), mask=valid & (column >= 0) & (column < K))
        tl.store(
            total + column + 1, narrow(high, own, NATIVE), mask=valid & (column + 1 >= 0) & (column + 1 < K)
        )


@triton.jit
def _factor(squares, K: tl.constexpr, EPS: tl.constexpr, NATIVE: tl.constexpr):
    """1 / sqrt(mean + eps) of a block of sums of squares."""
    mean = tl.sum(squares, 0) / K + EPS
    if NATIVE:
        factor = libdevice.rsqrt(mean)
    else:
        factor = tl.rsqrt(mean)
    return factor


@triton.jit
def _normed(
    a,
    b,
    c,
    d,
    weight,
    column,
    valid,
    factor,
    K: tl.constexpr,
    WEIGHT_PAIRS: tl.constexpr,
    BF16: tl.constexpr,
    WIDE: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Four sums, normed and rounded to the dtype of x, as float32."""
    e, f, g, h = load_four(weight, column, valid, K, WEIGHT_PAIRS, BF16)
    a, b = rounded(a * factor * e, BF16, WIDE, NATIVE), rounded(b * factor * f, BF16, WIDE, NATIVE)
    c, d = rounded(c * factor * g, BF16, WIDE, NATIVE), rounded(d * factor * h, BF16, WIDE, NATIVE)
    return a, b, c, d


@triton.jit
def norm_quant_slide_kernel(
    x,
    residual,  # None without ADD
    weight,
    total,  # None without ADD
    q,
    scales,
    stride,  # of x's rows, in what x points to
    residual_stride,
    K: tl.constexpr,
    WORDS: tl.constexpr,  # of a row of q, at least K' / 4
    LENGTH: tl.constexpr,
    PHASE: tl.constexpr,
    EPS: tl.constexpr,
    ADD: tl.constexpr,
    PAIRS: tl.constexpr,  # x, residual and total point to int32 words of two 16-bit floats
    WEIGHT_PAIRS: tl.constexpr,  # and so does weight
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
    if ADD:
        residual += row * residual_stride
        total += row * (K // 2 if PAIRS else K)
    q += row * WORDS
    if WORDS <= BLOCK:
        word = tl.arange(0, BLOCK)
        column = window_column(word, LENGTH, PHASE)
        valid = word < WORDS
        last = valid & (word % (LENGTH // 2 - 1) == LENGTH // 2 - 2)
        a, b, c, d = _sums(x, residual, column, valid, K, ADD, PAIRS, BF16)
        if ADD:
            _store_two(total, a, b, column, valid, K, PAIRS, BF16, NATIVE)
            _store_two(total, c, d, column + 2, last, K, PAIRS, BF16, NATIVE)
        factor = _factor(a * a + b * b + tl.where(last, c * c + d * d, 0.0), K, EPS, NATIVE)
        a, b, c, d = _normed(a, b, c, d, weight, column, valid, factor, K, WEIGHT_PAIRS, BF16, WIDE, NATIVE)
        scale, inverse = row_scale(absmax_of_four(a, b, c, d, NATIVE), E4M3)
        if DEPENDENTS == 2:
            launch_dependents()
        tl.store(q + word, codes_of(a, b, c, d, scale, inverse, E4M3, NATIVE), mask=valid)
    else:
        squares = tl.zeros([BLOCK], tl.float32)
        for start in tl.static_range(0, K, 4 * BLOCK):
            column = start + 4 * tl.arange(0, BLOCK)
            valid = column < K
            a, b, c, d = _sums(x, residual, column, valid, K, ADD, PAIRS, BF16)
            if ADD:
                _store_two(total, a, b, column, valid, K, PAIRS, BF16, NATIVE)
                _store_two(total, c, d, column + 2, valid, K, PAIRS, BF16, NATIVE)
            squares += a * a + b * b + (c * c + d * d)
        factor = _factor(squares, K, EPS, NATIVE)
        absmax = 0.0
        for start in tl.static_range(0, K, 4 * BLOCK):
            column = start + 4 * tl.arange(0, BLOCK)
            valid = column < K
            a, b, c, d = _sums(x, residual, column, valid, K, ADD, PAIRS, BF16)
            a, b, c, d = _normed(
                a, b, c, d, weight, column, valid, factor, K, WEIGHT_PAIRS, BF16, WIDE, NATIVE
            )
            absmax = tl.maximum(absmax, absmax_of_four(a, b, c, d, NATIVE))
        scale, inverse = row_scale(absmax, E4M3)
        if DEPENDENTS == 2:
            launch_dependents()
        for start in tl.static_range(0, WORDS, BLOCK):
            word = start + tl.arange(0, BLOCK)
            column = window_column(word, LENGTH, PHASE)
            valid = word < WORDS
            a, b, c, d = _sums(x, residual, column, valid, K, ADD, PAIRS, BF16)
            a, b, c, d = _normed(
                a, b, c, d, weight, column, valid, factor, K, WEIGHT_PAIRS, BF16, WIDE, NATIVE
            )
            tl.store(q + word, codes_of(a, b, c, d, scale, inverse, E4M3, NATIVE), mask=valid)
    tl.store(scales + row, scale)


_launch = Launcher(norm_quant_slide_kernel)


def norm_quant_slide(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    length: int,
    phase: int,
    dtype: torch.dtype,
    columns: int | None = None,
    rows: int = 0,
    launch: Config | None = None,
    total: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """x [M, K] bfloat16, float16 or float32 -> q [M, columns] of ``dtype``, scale [M, 1] float32, sum [M, K].

    Args:
        x: rows may be any stride apart; within a row the stride is 1.
        residual: [M, K] of x's dtype, or None; then there is no sum either.
        weight: [K] bfloat16, float16 or float32.
        eps: added to the mean square.
        length, phase, dtype, columns, rows, launch: as of `quant_slide.quant_slide`.
        total: memory for the sum, contiguous [M, K] of x's dtype; None: new.

    Raises:
        TypeError, ValueError: what was found, what is allowed.
    """
    common.require("x", x, 2, common.FLOATS)
    common.require("weight", weight, 1, common.FLOATS)
    m, k = x.shape
    if weight.shape[0] != k:
        raise ValueError(f"weight has {weight.shape[0]} elements; x has {k} columns")
    if residual is not None:
        common.require("residual", residual, 2, (x.dtype,))
        if residual.shape != x.shape:
            raise ValueError(f"residual has shape {tuple(residual.shape)}; x has {tuple(x.shape)}")
    made = windows(x, k, length, phase, dtype, columns, rows)
    if residual is None:
        total = None
    elif total is None:
        total = torch.empty(m, k, dtype=x.dtype, device=x.device)
    plain = (x, residual, total)
    views = [None if one is None else common.words_of(one, 4) for one in plain]
    pairs = not phase % 2 and all(
        (view is None) == (one is None) for view, one in zip(views, plain, strict=True)
    )
    source, other, out = views if pairs else plain
    assert source is not None
    gains = common.words_of(weight[None], 4) if pairs and weight.dtype == x.dtype else None
    own = {
        "LENGTH": length,
        "PHASE": phase,
        "EPS": eps,
        "ADD": residual is not None,
        "PAIRS": pairs,
        "WEIGHT_PAIRS": gains is not None,
        "WIDE": x.dtype == torch.float32,
    }
    strides = source.stride(0), 0 if other is None else other.stride(0)
    tensors = source, other, weight if gains is None else gains, out
    return *launch_rows(_launch, "norm_quant_slide", x, made, tensors, strides, own, 4, launch), total
