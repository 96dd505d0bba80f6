"""Memory bandwidth of the kernels that quantize and scale, against a device-to-device copy of as many bytes.

Norms and activations are measured fused with quantization and as pairs, Inductor's kernel and ours; the bytes are those
of the fused kernel in both, so that rates compare like times.  "hopper" in a name: the backend's own kernels, where it
runs; Triton's else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slidesparse import reference
from slidesparse.bench.measure import Launch, exact
from slidesparse.bench.records import Records
from slidesparse.bench.session import Session, free
from slidesparse.gemm import hopper
from slidesparse.gemm.library import DTYPES, Library
from slidesparse.kernels import Producer, RmsNorm, SiluMul
from slidesparse.pattern import SlidePattern

KEY = ("kernel", "dtype", "M", "K")
COLUMNS = (*KEY, "us", "GBps", "copy_GBps", "fraction")
TOKENS = (4096, 16384)
WIDTHS = (2048, 3584, 18944)  # in-features; for dequant_bias the out-features
PAGE = 4096  # bytes
PATTERN = SlidePattern(8)
ACCUMULATORS = ("int32", "bf16")  # what the libraries leave to be scaled
FLOAT = torch.bfloat16
EPS = 1e-6
FUSED = ("norm_quant_slide", "norm, quant_slide", "silu_quant_slide", "silu, quant_slide")
HOPPER = "hopper "  # before the name of a kernel
OF_HOPPER = tuple(HOPPER + name for name in ("quant_slide", "norm_quant_slide", "silu_quant_slide"))


@dataclass(frozen=True)
class Cell:
    """One kernel at one size; ``dtype`` is the one it quantizes to, or that of the accumulators it scales."""

    kernel: str  # "quant_only", "quant_slide 6:8", "dequant_bias", or of FUSED or OF_HOPPER and " 6:8"
    dtype: str
    m: int
    k: int

    @property
    def name(self) -> str:
        """Of what the kernel does, whosever it is."""
        return self.kernel.removeprefix(HOPPER)

    @property
    def moved(self) -> int:
        """Bytes that are read and written at least: each input and output once."""
        size, float_size = DTYPES[self.dtype].itemsize, FLOAT.itemsize
        elements = self.m * self.k
        if self.kernel == "dequant_bias":
            vectors = 4 * self.m + (4 + float_size) * self.k  # scale_x, scale_w and the bias
            return elements * (size + float_size) + vectors
        columns = self.k if self.kernel == "quant_only" else PATTERN.layout(self.k).slided
        written = self.m * columns * size + 4 * self.m
        if self.name.startswith("norm"):  # x, the residual and their sum
            return 3 * elements * float_size + float_size * self.k + written
        return elements * float_size * (2 if self.name.startswith("silu") else 1) + written


def libraries(device: torch.device) -> list[Library]:
    """Those that have kernels of their own, and run on ``device``."""
    return [] if hopper.LIBRARY.unusable(device) else [hopper.LIBRARY]


def cells(device: torch.device) -> list[Cell]:
    """Everything that is measured on ``device``."""
    lifting = ["quant_slide", *FUSED]
    if libraries(device):
        lifting += OF_HOPPER
    quantizers = [
        (kernel, dtype)
        for kernel in ("quant_only", *(f"{name} {PATTERN.ratio}" for name in lifting))
        for dtype in ("int8", "fp8")
    ]
    kernels = [*quantizers, *(("dequant_bias", dtype) for dtype in ACCUMULATORS)]
    return [Cell(kernel, dtype, m, k) for kernel, dtype in kernels for m in TOKENS for k in WIDTHS]


class BandwidthBench:
    """Fills FOLDER/bandwidth.csv."""

    def __init__(self, session: Session, folder: Path) -> None:
        self._session = session
        self.records = Records(folder / "bandwidth.csv", COLUMNS, KEY)

    def run(self) -> bool:
        """Measure what is not in the table.  False when the time was up before the end."""
        for cell in cells(self._session.gpu.device):
            key = {"kernel": cell.kernel, "dtype": cell.dtype, "M": cell.m, "K": cell.k}
            if not self.records.has(**key):
                if self._session.deadline.passed:
                    return False
                self.records.add(key | self._measure(cell))
                free(self._session.gpu)
            self._session.advance(f"{cell.kernel} {cell.dtype} {cell.m}x{cell.k}")
        return True

    def _measure(self, cell: Cell) -> dict[str, object]:
        copies = self._session.inputs.cold(cell.moved)
        us = exact(self._session.clock, self._launch(cell, copies), copies).p50
        rate = cell.moved / us / 1e3
        copied = cell.moved // 2 // PAGE * PAGE  # odd sizes are copied at two thirds of the rate
        copy_rate = 2 * copied / self._session.copy_us(copied) / 1e3
        return {"us": us, "GBps": rate, "copy_GBps": copy_rate, "fraction": rate / copy_rate}

    def _launch(self, cell: Cell, copies: int) -> Launch:
        inputs = self._session.inputs
        if cell.kernel == "dequant_bias":
            return _scale(
                inputs.activations(cell.dtype, cell.m, cell.k, copies),
                (inputs.scale(cell.m).view(-1, 1), inputs.scale(cell.k).view(-1, 1)),
                inputs.floats((cell.k,), FLOAT),
            )
        if cell.name.startswith("norm"):
            pairs = [
                (pair[: cell.m], pair[cell.m :])
                for pair in inputs.activations("bf16", 2 * cell.m, cell.k, copies)
            ]
            return _norm(cell, pairs, inputs.floats((cell.k,), FLOAT))
        if cell.name.startswith("silu"):
            return _activate(cell, inputs.activations("bf16", cell.m, 2 * cell.k, copies))
        rows = inputs.activations("bf16", cell.m, cell.k, copies)
        return _quantize(cell, rows)


def _by_hopper(cell: Cell, rows: list[Tensor], producers: list[Producer]) -> Launch:
    kind, layout = DTYPES[cell.dtype], PATTERN.layout(cell.k)
    columns = layout.slided + -layout.slided % hopper.LIBRARY.alignment
    return lambda i: hopper.PROVIDER.quantize(rows[i], layout.length, 0, kind, columns, producers[i])


def _quantize(cell: Cell, rows: list[Tensor]) -> Launch:
    if cell.kernel.startswith(HOPPER):
        return _by_hopper(cell, rows, [None] * len(rows))
    # late: the kernels need Triton
    from slidesparse.kernels.quant_only import quant_only
    from slidesparse.kernels.quant_slide import quant_slide

    kind = DTYPES[cell.dtype]
    length = PATTERN.layout(cell.k).length
    run: Callable[[Tensor], object] = (
        (lambda x: quant_only(x, kind))
        if cell.kernel == "quant_only"
        else (lambda x: quant_slide(x, length, 0, kind))
    )
    return lambda i: run(rows[i])


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """For one shape; else torch would stop compiling after some of them."""
    torch._dynamo.reset()
    return torch.compile(function, dynamic=False)


def _norm(cell: Cell, pairs: list[tuple[Tensor, Tensor]], weight: Tensor) -> Launch:
    if cell.kernel.startswith(HOPPER):
        total = torch.empty_like(pairs[0][0])
        norms: list[Producer] = [RmsNorm(weight, EPS, residual, total) for _, residual in pairs]
        return _by_hopper(cell, [x for x, _ in pairs], norms)
    from slidesparse.kernels.norm_quant_slide import norm_quant_slide  # late: needs Triton
    from slidesparse.kernels.quant_slide import quant_slide

    kind, length = DTYPES[cell.dtype], PATTERN.layout(cell.k).length
    if "," not in cell.kernel:
        return lambda i: norm_quant_slide(*pairs[i], weight, EPS, length, 0, kind)
    norm = _compiled(reference.rms_norm)
    return lambda i: quant_slide(norm(pairs[i][0], weight, EPS, pairs[i][1])[0], length, 0, kind)


def _activate(cell: Cell, rows: list[Tensor]) -> Launch:
    if cell.kernel.startswith(HOPPER):
        return _by_hopper(cell, rows, [SiluMul()] * len(rows))
    from slidesparse.kernels.quant_slide import quant_slide  # late: needs Triton
    from slidesparse.kernels.silu_quant_slide import silu_quant_slide

    kind, length = DTYPES[cell.dtype], PATTERN.layout(cell.k).length
    if "," not in cell.kernel:
        return lambda i: silu_quant_slide(rows[i], length, 0, kind)
    activate = _compiled(reference.silu_mul)
    return lambda i: quant_slide(activate(rows[i]), length, 0, kind)


def _scale(accumulators: list[Tensor], scales: tuple[Tensor, Tensor], bias: Tensor) -> Launch:
    from slidesparse.kernels.dequant_bias import dequant_bias  # late: needs Triton

    return lambda i: dequant_bias(accumulators[i], *scales, bias, FLOAT)
