"""The launchers of the quantizing kernels share this: checks, memory for codes and scales, one program a row.

Their kernels take, in this order: tensors of their own, ``q`` and ``scales``; strides; K and WORDS; constants of their
own; BF16, E4M3, NATIVE, DEPENDENTS and BLOCK.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slidesparse.kernels import Config, common, config
from slidesparse.kernels.launch import Launcher
from slidesparse.pattern import HARDWARE_LENGTH, SlideLayout
from slidesparse.quantize import FP8, INT8, quantize_rows


class Codes(NamedTuple):
    """Memory for what rows of K are quantized to."""

    k: int
    q: Tensor  # int32 [M, words]: words of four codes
    scales: Tensor  # float32 [M, 1]
    dtype: torch.dtype  # of the codes


def codes(x: Tensor, k: int, least: int, dtype: torch.dtype, columns: int | None, rows: int) -> Codes:
    """Make memory for the rows of x, ``k`` columns each, quantized to ``columns`` codes of ``dtype``; not written.

    ``columns`` is a multiple of 4 and at least ``least``; None: that rounded up.  ``rows``, when larger than M, is how
    many rows can be read behind the addresses of both.  Raises TypeError or ValueError.
    """
    if dtype not in (INT8, FP8):
        raise TypeError(f"cannot quantize to {dtype}; use torch.int8 or torch.float8_e4m3fn")
    if columns is None:
        columns = least + -least % HARDWARE_LENGTH
    if columns < least or columns % HARDWARE_LENGTH:
        raise ValueError(
            f"{columns} columns of codes are asked for; they must be a multiple of {HARDWARE_LENGTH}, {least} or more"
        )
    m, device = x.shape[0], x.device
    q = torch.empty(max(m, rows), columns // HARDWARE_LENGTH, dtype=torch.int32, device=device)
    scales = torch.empty(max(m, rows), 1, dtype=torch.float32, device=device)
    return Codes(k, q, scales, dtype) if m >= rows else Codes(k, q[:m], scales[:m], dtype)


def windows(
    x: Tensor, k: int, length: int, phase: int, dtype: torch.dtype, columns: int | None, rows: int
) -> Codes:
    """`codes` for rows that are lifted into the windows of blocks of ``length`` after ``phase`` zero columns."""
    if length < HARDWARE_LENGTH or length % 2 or not 0 <= phase < length:
        raise ValueError(
            f"block length {length} at phase {phase}: the length must be even and at least {HARDWARE_LENGTH}, "
            "the phase in 0..length-1"
        )
    return codes(x, k, SlideLayout(k, phase, length).slided, dtype, columns, rows)


def launch(
    launcher: Launcher,
    kind: str,
    x: Tensor,
    made: Codes,
    tensors: Sequence[Tensor | None],
    strides: Sequence[int],
    constants: dict[str, Any],
    step: int,
    how: Config | None,
) -> tuple[Tensor, Tensor]:
    """Fill ``made`` from x: codes [M, columns] and scales [M, 1]; without rows or columns as the reference does.

    ``tensors``, ``strides`` and ``constants`` are the kernel's own, in its order.  ``step`` is how many columns of x
    a lane reads at a time, ``how`` block and warps instead of the table's for ``kind``.
    """
    k, q, scales, dtype = made
    m, words = q.shape
    if not m or not k:
        return q.zero_().view(dtype), quantize_rows(x[:, :0], dtype)[1]
    how = how or config(kind, k, m)
    with common.on_device_of(x):
        launcher(
            (m, 1, 1),
            (*tensors, q, scales),
            strides,
            {
                "K": k,
                "WORDS": words,
                **constants,
                "BF16": x.dtype == torch.bfloat16,
                "E4M3": dtype == FP8,
                "NATIVE": common.native(x),
                "DEPENDENTS": common.dependents(x),
                "BLOCK": common.step(how.block, max(words, k // step)),
            },
            how.warps,
        )
    return q.view(dtype), scales
