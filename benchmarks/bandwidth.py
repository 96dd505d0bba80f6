"""Memory bandwidth of the kernels that quantize and scale, relative to a device-to-device copy of as many bytes.

Norms and activations are measured as pairs of kernels, Inductor's and ours ("norm, quant_slide"), and, where the
backend `hopper` runs, as its fused kernels ("hopper norm_quant_slide").  "quant_only, lift" quantizes first and lifts
the codes with Inductor's kernel.  Bytes are always those of the fused kernel, so that rates compare like times.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.records import BANDWIDTH, Records
from benchmarks.timing import copy_us, time_exactly
from slidesparse import reference
from slidesparse.gemm.backend import TWO_FOUR, Tunable
from slidesparse.gemm.hopper.backend import Hopper
from slidesparse.gemm.problem import DTYPES
from slidesparse.kernels import Producer, RmsNorm, SiluMul
from slidesparse.pattern import SlidePattern
from slidesparse.slide import lift
from slidesparse.tune.measure import Launch
from slidesparse.tune.session import Session

TOKENS = (4096, 8192, 16384)
WIDTHS = (2048, 3584, 18944)  # in-features; for dequant_bias the out-features
PAGE = 4096  # bytes
PATTERN = SlidePattern(8)
ACCUMULATORS = ("int32", "bf16")  # accumulators of the libraries
FLOAT = torch.bfloat16
EPS = 1e-6
QUANT_ONLY = "quant_only"
QUANTIZERS = ("quant_only, lift", "quant_slide", "norm, quant_slide", "silu, quant_slide")
HOPPER_PREFIX = "hopper "  # prefix of the backend's own kernels
HOPPER_KERNELS = tuple(
    HOPPER_PREFIX + name for name in ("quant_slide", "norm_quant_slide", "silu_quant_slide")
)

BACKEND = Hopper()


@dataclass(frozen=True)
class Cell:
    """One kernel at one size; ``dtype`` is the one it quantizes to, or that of the accumulators it scales."""

    # QUANT_ONLY, also of hopper, "dequant_bias", or one of QUANTIZERS or HOPPER_KERNELS and " 6:8"
    kernel: str
    dtype: str
    m: int
    k: int

    @property
    def before(self) -> str:
        """The operation in front of quantization: "norm", "silu" or ""."""
        name = self.kernel.removeprefix(HOPPER_PREFIX)
        return next((word for word in ("norm", "silu") if name.startswith(word)), "")

    @property
    def moved(self) -> int:
        """The fewest bytes that must be read and written: each input and output once."""
        size, float_size = DTYPES[self.dtype].itemsize, FLOAT.itemsize
        elements = self.m * self.k
        if self.kernel == "dequant_bias":
            vectors = 4 * self.m + (4 + float_size) * self.k  # scale_x, scale_w and the bias
            return elements * (size + float_size) + vectors
        columns = self.k if self.kernel.endswith(QUANT_ONLY) else PATTERN.layout(self.k).slided
        written = self.m * columns * size + 4 * self.m
        if self.before == "norm":  # x, the residual and their sum
            return 3 * elements * float_size + float_size * self.k + written
        return elements * float_size * (2 if self.before == "silu" else 1) + written


def libraries(device: torch.device) -> list[Tunable]:
    """Return the backends that quantize by their own kernels and run on ``device``."""
    return [] if BACKEND.unusable(device) else [BACKEND]


def cells(device: torch.device) -> list[Cell]:
    """Return all cells that are measured on ``device``."""
    hopper = bool(libraries(device))
    lifting = (*QUANTIZERS, *(HOPPER_KERNELS if hopper else ()))
    names = [QUANT_ONLY, *([HOPPER_PREFIX + QUANT_ONLY] if hopper else [])]
    names += [f"{name} {PATTERN.ratio}" for name in lifting]
    kernels = [(name, dtype) for name in names for dtype in ("int8", "fp8")]
    kernels += [("dequant_bias", dtype) for dtype in ACCUMULATORS]
    return [Cell(kernel, dtype, m, k) for kernel, dtype in kernels for m in TOKENS for k in WIDTHS]


class BandwidthBench:
    """Fills FOLDER/bandwidth.csv."""

    def __init__(self, session: Session, folder: Path) -> None:
        self._session, self._cells = session, cells(session.gpu.device)
        self.records = Records(folder, BANDWIDTH)
        self.count = len(self._cells)

    def run(self) -> bool:
        """Measure what is not in the table; return False if the time limit was reached first."""
        for cell in self._cells:
            key = {"kernel": cell.kernel, "dtype": cell.dtype, "M": cell.m, "K": cell.k}
            if not self.records.has(key):
                if self._session.deadline.passed:
                    return False
                self.records.add(key | self._measure(cell))
                torch.cuda.empty_cache()
            self._session.advance(f"{cell.kernel} {cell.dtype} {cell.m}x{cell.k}")
        return True

    def _measure(self, cell: Cell) -> dict[str, object]:
        copies = self._session.inputs.copies_exceeding_l2(cell.moved)
        us = time_exactly(self._session.clock, self._launch(cell, copies), copies).p50
        rate = cell.moved / us / 1e3
        copied = cell.moved // 2 // PAGE * PAGE  # other sizes are copied at two thirds of the rate
        copy_rate = 2 * copied / copy_us(self._session, copied) / 1e3
        return {"us": us, "GBps": rate, "copy_GBps": copy_rate, "fraction": rate / copy_rate}

    def _launch(self, cell: Cell, copies: int) -> Launch:
        """Return a function that launches on copy i of random inputs."""
        inputs = self._session.inputs
        if cell.kernel == "dequant_bias":
            from slidesparse.kernels.dequant_bias import dequant_bias  # late: needs Triton

            accumulators = inputs.activations(cell.dtype, cell.m, cell.k, copies)
            scales = inputs.scale(cell.m).view(-1, 1), inputs.scale(cell.k).view(-1, 1)
            bias = inputs.floats((cell.k,), FLOAT)
            return lambda i: dequant_bias(accumulators[i], *scales, bias, FLOAT)
        rows, columns = cell.m, cell.k
        if cell.before == "norm":  # x and the residual
            rows *= 2
        elif cell.before == "silu":  # gate and up
            columns *= 2
        x = inputs.activations("bf16", rows, columns, copies)
        weight = inputs.floats((cell.k,), FLOAT)
        return (_hopper_launch if cell.kernel.startswith(HOPPER_PREFIX) else _triton_launch)(cell, x, weight)


def _hopper_launch(cell: Cell, x: list[Tensor], weight: Tensor) -> Launch:
    pattern = TWO_FOUR if cell.kernel.endswith(QUANT_ONLY) else PATTERN
    kind, layout = DTYPES[cell.dtype], pattern.layout(cell.k)
    columns = layout.slided + -layout.slided % BACKEND.alignment
    total = torch.empty(cell.m, cell.k, dtype=FLOAT, device=weight.device)

    def run(i: int) -> object:
        before: Producer = SiluMul() if cell.before == "silu" else None
        if cell.before == "norm":
            before = RmsNorm(weight, EPS, x[i][cell.m :], total)
        return BACKEND.quantize(x[i][: cell.m], layout.length, 0, kind, columns, before)

    return run


def _triton_launch(cell: Cell, x: list[Tensor], weight: Tensor) -> Launch:
    from slidesparse.kernels.quant_slide import quant_slide  # late: it needs Triton

    kind, length = DTYPES[cell.dtype], PATTERN.layout(cell.k).length
    if cell.kernel == QUANT_ONLY:
        return lambda i: quant_slide(x[i], 4, 0, kind)
    if cell.kernel.startswith(QUANT_ONLY):
        lifted = _compiled(lambda q: lift(q, PATTERN))
        return lambda i: lifted(quant_slide(x[i], 4, 0, kind)[0])
    if cell.before == "norm":
        norm = _compiled(reference.rms_norm)
        return lambda i: quant_slide(norm(x[i][: cell.m], weight, EPS, x[i][cell.m :])[0], length, 0, kind)
    if cell.before == "silu":
        activate = _compiled(reference.silu_mul)
        return lambda i: quant_slide(activate(x[i]), length, 0, kind)
    return lambda i: quant_slide(x[i], length, 0, kind)


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function for one shape; otherwise torch would stop recompiling after a number of shapes."""
    torch._dynamo.reset()
    return torch.compile(function, dynamic=False)
