"""Device functions and launcher checks shared by the kernels: reading rows, rounding to INT8 and E4M3.

Device functions have variants that give the same bits, selected by ``NATIVE`` (see `native_level`): plain arithmetic
for Triton's interpreter, and GPU instructions, with or without conversion to E4M3.
"""

# ruff: noqa: N803, SIM108, SIM300 (compile-time arguments in capitals, as is Triton's convention)
# mypy: disable-error-code="untyped-decorator,no-untyped-def"

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
MAX_STEPS = 16  # of an unrolled loop


@triton.jit
def widen(value):
    """Convert to float32, exactly.  Shifts the bits of bfloat16, for which the interpreter has no arithmetic."""
    if value.dtype == tl.bfloat16:
        wide = (value.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        wide = value.to(tl.float32)
    return wide


@triton.jit
def narrow(value, DTYPE: tl.constexpr, NATIVE: tl.constexpr):
    """float32 -> DTYPE, to nearest, ties to even; the interpreter's own bfloat16 rounds ties up."""
    if NATIVE or DTYPE != tl.bfloat16:
        result = value.to(DTYPE)
    else:
        bits = value.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = tl.where(value == value, rounded, 0x7FC0)
        result = rounded.to(tl.int16).to(tl.bfloat16, bitcast=True)
    return result


@triton.jit
def unpack_halves(word, BF16: tl.constexpr):
    """The two 16-bit floats of an int32, the lower address first, as float32."""
    if BF16:
        low = (word << 16).to(tl.float32, bitcast=True)
        high = (word & -65536).to(tl.float32, bitcast=True)
    else:
        low = word.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        high = (word >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return low, high


@triton.jit
def magnitude(value, NATIVE: tl.constexpr):
    """|value|, prepared for a maximum that ignores NaN: the GPU's does so by itself, the interpreter's may not."""
    size = tl.abs(value)
    if not NATIVE:
        size = tl.where(size == size, size, 0.0)
    return size


@triton.jit
def reduce_absmax(values):
    """The largest of a block of magnitudes; 0 where all of them are NaN."""
    largest = tl.max(values, 0)
    return tl.where(largest == largest, largest, 0.0)


@triton.jit
def load_four(x, column, valid, K: tl.constexpr, PAIRS: tl.constexpr, BF16: tl.constexpr):
    """Four columns from ``column`` on as float32, zero outside [0, K).

    PAIRS: ``x`` points to int32 words of two 16-bit floats, and column and K are even.
    """
    if PAIRS:
        pair = column // 2
        first = tl.load(x + pair, mask=valid & (pair >= 0) & (pair < K // 2), other=0)
        second = tl.load(x + pair + 1, mask=valid & (pair + 1 >= 0) & (pair + 1 < K // 2), other=0)
        a, b = unpack_halves(first, BF16)
        c, d = unpack_halves(second, BF16)
    else:
        a = widen(tl.load(x + column, mask=valid & (column >= 0) & (column < K), other=0.0))
        b = widen(tl.load(x + column + 1, mask=valid & (column + 1 >= 0) & (column + 1 < K), other=0.0))
        c = widen(tl.load(x + column + 2, mask=valid & (column + 2 >= 0) & (column + 2 < K), other=0.0))
        d = widen(tl.load(x + column + 3, mask=valid & (column + 3 >= 0) & (column + 3 < K), other=0.0))
    return a, b, c, d


@triton.jit
def largest_of_four(a, b, c, d, NATIVE: tl.constexpr):
    """The largest of four blocks' magnitudes, lane by lane: NaN, which `reduce_absmax` leaves out, if all are."""
    first = tl.maximum(magnitude(a, NATIVE), magnitude(b, NATIVE))
    second = tl.maximum(magnitude(c, NATIVE), magnitude(d, NATIVE))
    return tl.maximum(first, second)


@triton.jit
def row_absmax(
    x, K: tl.constexpr, PAIRS: tl.constexpr, BF16: tl.constexpr, NATIVE: tl.constexpr, BLOCK: tl.constexpr
):
    """The largest magnitude of a row of K, ignoring NaN.  ``x`` and PAIRS as in `load_four`."""
    if PAIRS:
        largest = tl.zeros([BLOCK], tl.float32)
        for start in tl.static_range(0, K // 2, BLOCK):
            column = start + tl.arange(0, BLOCK)
            low, high = unpack_halves(tl.load(x + column, mask=column < K // 2, other=0), BF16)
            largest = tl.maximum(largest, tl.maximum(magnitude(low, NATIVE), magnitude(high, NATIVE)))
    else:
        largest = tl.zeros([2 * BLOCK], tl.float32)
        for start in tl.static_range(0, K, 2 * BLOCK):
            column = start + tl.arange(0, 2 * BLOCK)
            value = widen(tl.load(x + column, mask=column < K, other=0.0))
            largest = tl.maximum(largest, magnitude(value, NATIVE))
    return reduce_absmax(largest)


@triton.jit
def row_scale(absmax, E4M3: tl.constexpr):
    """(scale, factor) of a row: the stored scale, and the factor for `quantize_four`.  Divisions are IEEE."""
    if E4M3:
        scale = tl.maximum(tl.div_rn(absmax, 448.0), 4.359654017857143e-06)  # 1 / (448 * 512)
        factor = tl.div_rn(1.0, scale)
    else:
        scale = tl.div_rn(absmax, 127.0)
        factor = tl.where(absmax == 0.0, 0.0, tl.div_rn(127.0, absmax))
    return scale, factor


@triton.jit
def fused_multiply_add(a, b, c, NATIVE: tl.constexpr):
    """a * b + c, rounded once.

    The interpreter's own may round twice.  In float64 the product of two float32 is exact; its sum is rounded to 53
    bits and then to 24, as the reference does it.
    """
    if NATIVE:
        result = tl.fma(a, b, c)
    else:
        result = (a.to(tl.float64) * b.to(tl.float64) + c.to(tl.float64)).to(tl.float32)
    return result


@triton.jit
def quotient(value, scale, inverse, NATIVE: tl.constexpr):
    """value / scale, whose E4M3 code is that of the IEEE quotient; ``inverse`` is 1 / scale rounded to nearest.

    One correction of value * inverse by its exact remainder.  Codes could differ only where value is within some
    ulps of scale times a tie of E4M3, which has 5 significant bits: for all 2^23 significands of scale, all 16
    of a tie and the 7 nearest values, the result is the IEEE quotient.  Far below 2^-100, where the remainder is not
    exact, both give a zero.

    The remainder of an infinite scale would be NaN; without it the result is value * 0, as value / Inf is.  The sum
    with the remainder loses the sign of -0.0, hence the last line.
    """
    near = value * inverse
    minus = tl.where(scale == float("inf"), 0.0, 0.0 - scale)
    remainder = fused_multiply_add(near, minus, value, NATIVE)
    result = fused_multiply_add(remainder, inverse, near, NATIVE)
    sign = (value.to(tl.int32, bitcast=True) >> 31) << 31
    return (result.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit
def int8_code(scaled):
    """Nearest integer, ties to even, within -128..127, NaN 0; in the low byte of an int32.

    In [2^23, 2^24) float32 counts in ones, so adding 1.5 * 2^23 rounds as wanted and leaves the integer in the low
    bits.  The clamp keeps compilers from fusing the sum with the product that gave ``scaled``.
    """
    number = tl.where(scaled == scaled, scaled, 0.0)
    number = tl.minimum(tl.maximum(number, -128.0), 127.0)
    return (number + 12582912.0).to(tl.int32, bitcast=True) & 0xFF


@triton.jit
def fp8_code(value):
    """E4M3 to nearest, ties to even, at most 448, NaN 0x7F; in the low byte of an int32.

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
def int8_word(a, b, c, d):
    """Four float32 -> their INT8 codes in one int32, as `int8_code` makes them, with the GPU's conversion instructions.

    Rounds to the nearest integer, ties to even, NaN to 0; then saturates to 8 bits and packs, two at a time.
    """
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 i0, i1, i2, i3, high;
        cvt.rni.s32.f32 i0, $1;
        cvt.rni.s32.f32 i1, $2;
        cvt.rni.s32.f32 i2, $3;
        cvt.rni.s32.f32 i3, $4;
        cvt.pack.sat.s8.s32.b32 high, i3, i2, 0;
        cvt.pack.sat.s8.s32.b32 $0, i1, i0, high;
        }
        """,
        "=r,f,f,f,f",
        [a, b, c, d],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def fp8_pair(low, high):
    """Two float32 -> their E4M3 codes in the low half of an int32: those of `fp8_code`, by the GPU's conversion."""
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b16 pair;
        cvt.rn.satfinite.e4m3x2.f32 pair, $2, $1;
        cvt.u32.u16 $0, pair;
        }
        """,
        "=r,f,f",
        [low, high],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def quantize_four(a, b, c, d, scale, factor, E4M3: tl.constexpr, NATIVE: tl.constexpr):
    """Four float32 -> their four codes in one int32, the first in the lowest byte."""
    if E4M3:
        a, b = quotient(a, scale, factor, NATIVE), quotient(b, scale, factor, NATIVE)
        c, d = quotient(c, scale, factor, NATIVE), quotient(d, scale, factor, NATIVE)
        if NATIVE == 2:
            # Arithmetic: ptxas 12.8 merges a move of two halves with the conversions, and gets some results wrong.
            word = fp8_pair(a, b) + fp8_pair(c, d) * 65536
        else:
            a, b, c, d = fp8_code(a), fp8_code(b), fp8_code(c), fp8_code(d)
            word = a | (b << 8) | (c << 16) | (d << 24)
    elif NATIVE:
        word = int8_word(a * factor, b * factor, c * factor, d * factor)
    else:
        a, b = int8_code(a * factor), int8_code(b * factor)
        c, d = int8_code(c * factor), int8_code(d * factor)
        word = a | (b << 8) | (c << 16) | (d << 24)
    return word


@triton.jit
def launch_dependents():
    """Let the next kernel of the stream start early, if it was launched with programmatic dependent launch.

    A kernel that was launched normally, such as cuSPARSELt's, starts when this one ends.
    """
    tl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )


def supports_dependent_launch(x: Tensor) -> bool:
    """Return whether the GPU has `launch_dependents`: Hopper and later."""
    return not is_interpreted() and _capability(x.device) >= (9, 0)


def is_interpreted() -> bool:
    """Return whether kernels run in Triton's interpreter, which was determined when they were defined."""
    return not isinstance(widen, triton.runtime.JITFunction)


def native_level(x: Tensor) -> int:
    """0 in Triton's interpreter, 1 on GPUs, 2 on those that convert to E4M3 themselves (compute capability 8.9)."""
    if is_interpreted():
        return 0
    return 2 if _capability(x.device) >= (8, 9) else 1


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def require(name: str, tensor: Tensor, dimensions: int, dtypes: tuple[torch.dtype, ...]) -> None:
    """Raise unless a kernel supports ``tensor``: its dtype, dimensions, unit last stride and device."""
    if tensor.dtype not in dtypes:
        allowed = ", ".join(map(str, dtypes))
        raise TypeError(f"{name} has dtype {tensor.dtype}; the kernel takes {allowed}: convert it first")
    if tensor.dim() != dimensions:
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)}; the kernel takes {dimensions} dimensions: reshape it"
        )
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(
            f"{name} has strides {tensor.stride()}; the kernel takes a last stride of 1: call contiguous()"
        )
    if not (tensor.is_cuda or is_interpreted()):
        raise ValueError(
            f"{name} is on {tensor.device}; the kernel takes CUDA tensors: use slidesparse.reference elsewhere, "
            "or set TRITON_INTERPRET=1 before Triton is imported"
        )


def view_as_words(x: Tensor, bytes_of_word: int) -> Tensor | None:
    """View x [M, K] of 16-bit floats as integers of 4 or 8 bytes; None if K or the alignment does not allow it."""
    floats = bytes_of_word // 2
    if x.element_size() != 2 or x.data_ptr() % bytes_of_word:
        return None
    if x.shape[1] % floats or x.stride(0) % floats or x.stride(1) != 1 or x.storage_offset() % floats:
        return None
    return x.view(torch.int32 if bytes_of_word == 4 else torch.int64)


def unrolled_step(block: int, count: int) -> int:
    """Return the least power of 2, from ``block`` on, for which a loop over ``count`` has at most MAX_STEPS steps.

    Such loops are unrolled.  The result is no larger than ``count`` needs, and at least 16.
    """
    while block * MAX_STEPS < count:
        block *= 2
    return max(16, min(block, 1 << max(0, count - 1).bit_length()))


def on_device_of(x: Tensor) -> AbstractContextManager[object]:
    """Make the device of ``x`` the current one, on which Triton launches."""
    if not x.is_cuda or x.get_device() == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(x.device)
