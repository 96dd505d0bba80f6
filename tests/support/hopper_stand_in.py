"""A stand-in for the compiled kernels of csrc/hopper/ on machines without a Hopper GPU.

It has the same functions for CPU memory, computes with the reference, and records its arguments.  Configurations are
only names.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from slidesparse import reference
from slidesparse.blocks import blocks_of, strips_of
from slidesparse.gemm.hopper import format as hopper_format
from slidesparse.gemm.hopper import native
from slidesparse.gemm.hopper.native import Layer
from slidesparse.gemm.problem import ALL_2_4, ALL_DENSE, BLOCKS, MIXED
from slidesparse.pattern import SlideLayout
from slidesparse.quantize import FP8, INT8

TYPES = {number: dtype for dtype, number in native.TYPES.items()}


def memory(address: int, count: int, dtype: torch.dtype) -> Tensor:
    """Copy ``count`` elements from an address."""
    size = count * dtype.itemsize
    if not size:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(bytearray(ctypes.string_at(address, size)), dtype=torch.uint8).view(dtype)


def strided(address: int, m: int, k: int, stride: int, dtype: torch.dtype) -> Tensor:
    """Copy ``m`` rows of ``k`` elements, ``stride`` elements apart, from an address."""
    return memory(address, (m - 1) * stride + k if m else 0, dtype).as_strided((m, k), (stride, 1))


def write(address: int, values: Tensor) -> None:
    """Write contiguous ``values`` to an address."""
    values = values.contiguous()
    ctypes.memmove(address, values.data_ptr(), values.numel() * values.element_size())


@dataclass
class Plan:
    """The arguments from which a plan was made."""

    layer: Layer
    table: list[tuple[int, list[str]]]

    def configuration(self, m: int, weight_bytes: int) -> str:
        """The configuration for m tokens and a packed weight of so many bytes."""
        row = next((row for tokens, row in self.table if m <= tokens), self.table[-1][1])
        blocks = strips_of(self.layer.n) * blocks_of(self.layer.columns)
        if weight_bytes == blocks * hopper_format.BLOCK_BYTES:
            return row[BLOCKS.index(ALL_2_4)]
        header = -(-4 * blocks // hopper_format.OFFSET_UNIT) * hopper_format.OFFSET_UNIT
        dense = weight_bytes == header + blocks * hopper_format.DENSE_BYTES
        return row[BLOCKS.index(ALL_DENSE if dense else MIXED)]


@dataclass
class StandIn:
    """The library; its functions have the names of the compiled ones."""

    plans: dict[int, Plan] = field(default_factory=dict)  # by handle
    served: dict[tuple[int, Layer], int] = field(default_factory=dict)
    calls: list[tuple[Any, ...]] = field(default_factory=list)  # configuration, m, stream of each product
    quantizations: list[dict[str, Any]] = field(default_factory=list)
    layers: int = 0  # calls of slidesparse_hopper_linear
    refused: tuple[str, ...] = ("split:9x9/1x1/1",)
    candidates: tuple[str, ...] = ("split:2x64/1x4/2", "stream:3x128/2/1")
    error: bytes | None = None  # the result of every launch
    missing: bytes | None = None  # the reason why the driver cannot run the kernels

    def slidesparse_hopper_unusable(self) -> bytes | None:
        return self.missing

    def slidesparse_hopper_fit(self, text: bytes, fp8: bool, stages: Any, clusters: Any) -> bytes | None:
        return self._refusal([text.decode()])

    def _refusal(self, texts: Iterable[str]) -> bytes | None:
        for text in texts:
            if text in self.refused:
                return f"no kernel was compiled for configuration {text}, or it finds no room".encode()
        return None

    def slidesparse_hopper_candidates(
        self, n: int, columns: int, m: int, fp8: int, blocks: int, most: int, texts: Any, us: Any, count: Any
    ) -> None:
        names = self.candidates[:most]
        for i, text in enumerate(names):
            texts[native.TEXT_BYTES * i : native.TEXT_BYTES * i + len(text)] = text.encode()
            us[i] = 1.0 + i / 20
        count._obj.value = len(names)

    def slidesparse_hopper_plan(
        self,
        n: int,
        k: int,
        length: int,
        phase: int,
        fp8: int,
        columns: int,
        count: int,
        tokens: Any,
        texts: Any,
        plan_out: Any,
    ) -> bytes | None:
        kinds = len(BLOCKS)
        rows = [[texts[kinds * i + kind].decode() for kind in range(kinds)] for i in range(count)]
        table = [(tokens[i], row) for i, row in enumerate(rows)]
        if refusal := self._refusal(text for row in rows for text in row):
            return refusal
        handle = 1 + max(self.plans, default=0)
        self.plans[handle] = Plan(Layer(n, k, length, phase, bool(fp8), columns), table)
        plan_out._obj.value = handle
        return None

    def slidesparse_hopper_delete(self, plan: int) -> None:
        del self.plans[plan]

    def slidesparse_hopper_serve(self, plan: int) -> None:
        self.served[0, self.plans[plan].layer] = plan

    def slidesparse_hopper_find(self, device: int, *layer: int) -> int | None:
        return self.served.get((max(device, 0), Layer(*layer)))

    def slidesparse_hopper_configuration(self, plan: int, m: int, weight_bytes: int) -> bytes:
        return self.plans[plan].configuration(m, weight_bytes).encode()

    def slidesparse_hopper_scratch_bytes(self, plan: int, m: int) -> int:
        return 128 * m + m * self.plans[plan].layer.columns

    def slidesparse_hopper_quantize(
        self,
        plan: int,
        m: int,
        x: int,
        kind: int,
        stride: int,
        prologue: int,
        eps: float,
        gain: int | None,
        residual: int | None,
        residual_stride: int,
        total: int | None,
        q: int,
        scale_x: int,
        stream: int,
    ) -> bytes | None:
        layer = self.plans[plan].layer
        self.quantizations.append(
            {"stride": stride, "eps": eps, "residual_stride": residual_stride, "stream": stream}
        )
        norm, adds = prologue in (native.RMS_NORM, native.ADD_RMS_NORM), prologue == native.ADD_RMS_NORM
        assert [bool(operand) for operand in (gain, residual, total)] == [norm, adds, adds]
        source, k = TYPES[kind], layer.k
        tokens = strided(x, m, 2 * k if prologue == native.SILU_MUL else k, stride, source)
        if prologue == native.SILU_MUL:
            tokens = reference.silu_mul(tokens)
        elif norm:
            other = strided(residual, m, k, residual_stride, source) if residual else None
            tokens, added = reference.rms_norm(tokens, memory(gain or 0, k, source), eps, other)
            if total:
                write(total, added)
        layout = SlideLayout(k, layer.phase, layer.length)
        assert q % 16 == layer.columns % 16 == 0
        assert layer.columns >= layout.slided
        codes, scale = reference.quant_slide(tokens, layout, FP8 if layer.fp8 else INT8, "cuda")
        wide = torch.zeros(m, layer.columns, dtype=torch.int8)
        wide[:, : layout.slided] = codes.view(torch.int8)
        write(q, wide)
        write(scale_x, scale)
        return self.error

    def slidesparse_hopper_product(
        self,
        plan: int,
        m: int,
        q: int,
        q_columns: int,
        scale_x: int,
        weight: int,
        weight_bytes: int,
        scale_w: int,
        bias: int | None,
        bias_type: int,
        out: int,
        out_type: int,
        stream: int,
    ) -> bytes | None:
        layer = self.plans[plan].layer
        self.calls.append((self.plans[plan].configuration(m, weight_bytes), m, stream))
        sparse = hopper_format.packed_bytes(layer.n, q_columns)
        if weight_bytes < sparse:
            return f"a packed weight of {weight_bytes} bytes where {sparse} or more are wanted".encode()
        assert q % 16 == 0
        assert bool(bias) == bool(bias_type)
        codes = memory(q, m * q_columns, FP8 if layer.fp8 else INT8).view(m, q_columns)
        packed = memory(weight, weight_bytes, torch.uint8)
        slided = hopper_format.unpack(packed, layer.n, q_columns, codes.dtype)
        y = reference.dequant_bias(
            reference.matmul(codes, slided),
            memory(scale_x, m, torch.float32),
            memory(scale_w, layer.n, torch.float32),
            memory(bias, layer.n, TYPES[bias_type]) if bias else None,
            TYPES[out_type],
            "cuda",
        )
        write(out, y)
        return self.error

    def slidesparse_hopper_linear(self, plan: int, m: int, *rest: Any) -> bytes | None:
        *x, weight, weight_bytes, scale_w, bias, bias_type, out, out_type, scratch, stream = rest
        self.layers += 1
        q = scratch + 128 * m
        error = self.slidesparse_hopper_quantize(plan, m, *x, q, scratch, stream)
        columns = self.plans[plan].layer.columns
        return error or self.slidesparse_hopper_product(
            plan,
            m,
            q,
            columns,
            scratch,
            weight,
            weight_bytes,
            scale_w,
            bias,
            bias_type,
            out,
            out_type,
            stream,
        )
