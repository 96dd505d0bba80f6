"""The compiled kernels of csrc/hopper/ for machines without a Hopper GPU: what they compute, and what they say fits.

`shared_stages` is compared with the compiled library wherever there is an nvcc (tests/test_nvcc.py), and on the GPU.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from slidesparse import reference
from slidesparse.gemm import hopper_format, hopper_native
from slidesparse.gemm.hopper_configs import MOST_IN_CLUSTER, STREAM, Config, Fit
from slidesparse.gemm.hopper_native import Call, Linear, Quantize
from slidesparse.pattern import SlideLayout
from slidesparse.quantize import FP8, INT8

SMS = 132
# Clusters by their blocks, one a multiprocessor: of 1, 2, 4 and 8 measured on an H200, the others guessed.
CLUSTERS = {1: 132, 2: 66, 3: 43, 4: 30, 5: 23, 6: 18, 8: 15}
TURNS_BYTES = 16  # that the streaming kernel's consumers keep in shared memory


def shared_stages(config: Config) -> int:
    """Stages of 128 columns that a block's shared memory holds; 0: fewer than two, or no such kernel."""
    tokens, strips = config.tokens, config.strips
    if tokens not in (8, 16, 32, 64, 128, 256) or tokens % (8 * config.sharers):
        return 0
    fewest, most = (2, 2) if tokens == 256 else (1, 5 if tokens <= 64 else 3)
    if not fewest <= strips <= most or config.cluster > MOST_IN_CLUSTER:
        return 0
    found = next(
        count for count in range(256, -1, -1) if _bytes(config, count) <= config.shared_bytes or not count
    )
    return found if found >= 2 else 0


def _bytes(config: Config, stages: int) -> int:
    tokens, strips = config.tokens, config.strips
    stage = tokens * 128 + strips * 5120
    if config.design == STREAM:
        staged = min(tokens, 64)  # tokens, in as many buffers as it takes
        return stages * (stage + 16) + strips * staged * 128 + TURNS_BYTES
    owned = -(-4 * strips // config.splits)  # warps of which a block adds the sums
    received = owned * (config.splits - 1) * tokens * 64
    after = 4 * strips * tokens * 48 if config.splits == 1 else 0
    if tokens == 256:  # sums come into the ring
        after, received = max(after, received), 0
    return max(stages * stage, after) + received + 16 * stages + 8 * (owned + 1)


def fit(config: Config, dtype: torch.dtype = INT8, index: int = 0) -> Fit:
    """As an H200 holds blocks, by their shared memory and by ptxas's registers."""
    stages = shared_stages(config)
    if not stages:
        return Fit(0, 0)
    few = {1: 96, 2: 72, 3: 72, 4: 96, 5: 80}.get(config.strips, 96)
    registers = {128: 124, 256: 168}.get(config.tokens, few)
    warps = 12 if config.tokens == 256 else 4 * config.strips + 1
    by_registers = next(
        count for count in (4, 3, 2, 1) if -(-count * warps // 4) * 32 * registers <= 16384 or count == 1
    )
    return Fit(stages, CLUSTERS[config.cluster] * min(config.resident, by_registers))


def memory(address: int, count: int, dtype: torch.dtype) -> Tensor:
    """``count`` elements at an address, copied."""
    size = count * dtype.itemsize
    if not size:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(bytearray(ctypes.string_at(address, size)), dtype=torch.uint8).view(dtype)


def strided(address: int, m: int, k: int, stride: int, dtype: torch.dtype) -> Tensor:
    """Rows of ``k`` elements, ``stride`` apart."""
    return memory(address, (m - 1) * stride + k if m else 0, dtype).as_strided((m, k), (stride, 1))


TYPES = {number: dtype for dtype, number in hopper_native.FLOATS.items()}


class StandIn:
    """Reads and writes what a launch is handed, as the kernels do, by the reference's arithmetic."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.quantizations: list[Quantize] = []
        self.linears = 0
        self.grids: list[int] = []
        self.workspaces: list[int] = []
        self.error: bytes | None = None

    def slidesparse_hopper_workspace(self, strips: int, tokens: int, grid: int) -> int:
        return 4096 + strips * 64 * tokens * 4 * grid

    def slidesparse_hopper_stream(self, address: int, workspace: int, grid: int) -> bytes | None:
        assert workspace
        self.workspaces.append(workspace)
        self.grids.append(grid)
        return self.slidesparse_hopper_gemm(address)

    def slidesparse_hopper_gemm(self, address: int) -> bytes | None:
        call = Call.from_buffer_copy(Call.from_address(address))
        self.calls.append(call)
        m, n, k = call.m, call.n, call.k
        q = memory(call.q, m * k, FP8 if call.fp8 else INT8).view(m, k)
        size = call.strips * call.blocks * hopper_format.BLOCK_BYTES
        weight = hopper_format.unpack(memory(call.weight, size, torch.uint8), n, k, q.dtype)
        scale_w, scale_x = memory(call.scale_w, n, torch.float32), memory(call.scale_x, m, torch.float32)
        bias = memory(call.bias, n, TYPES[call.bias_type]) if call.bias else None
        assert bool(call.bias) == bool(call.bias_type)
        y = reference.dequant_bias(
            reference.matmul(q, weight), scale_x, scale_w, bias, TYPES[call.out_type], "cuda"
        )
        ctypes.memmove(call.out, y.contiguous().data_ptr(), y.numel() * y.element_size())
        return self.error

    def slidesparse_hopper_quantize(self, address: int) -> bytes | None:
        call = Quantize.from_buffer_copy(Quantize.from_address(address))
        self.quantizations.append(call)
        kind, m, k = call.before, call.m, call.k
        assert [bool(one) for one in (call.gain, call.residual, call.total)] == [
            kind in (1, 2),
            *[kind == 2] * 2,
        ]
        source = TYPES[call.type]
        x = strided(call.x, m, 2 * k if kind == 3 else k, call.stride, source)
        if kind == 3:
            x = reference.silu_mul(x)
        elif kind:
            residual = strided(call.residual, m, k, call.residual_stride, source) if kind == 2 else None
            x, total = reference.rms_norm(x, memory(call.gain, k, source), call.eps, residual)
            if kind == 2:
                ctypes.memmove(call.total, total.data_ptr(), total.numel() * total.element_size())
        layout = SlideLayout(call.k, call.phase, call.length)
        assert call.q % 16 == call.columns % 16 == 0
        assert call.columns >= layout.slided
        q, scale = reference.quant_slide(x, layout, FP8 if call.fp8 else INT8, "cuda")
        wide = torch.zeros(call.m, call.columns, dtype=torch.int8)
        wide[:, : layout.slided] = q.view(torch.int8)
        ctypes.memmove(call.q, wide.data_ptr(), wide.numel())
        ctypes.memmove(call.scale, scale.contiguous().data_ptr(), scale.numel() * 4)
        return self.error

    def slidesparse_hopper_linear(self, address: int) -> bytes | None:
        call = Linear.from_buffer_copy(Linear.from_address(address))
        self.linears += 1
        error = self.slidesparse_hopper_quantize(ctypes.addressof(call.quantize))
        product, quantize = call.product, call.quantize
        product.q, product.scale_x, product.stream = quantize.q, quantize.scale, quantize.stream
        product.m, product.k, product.fp8 = quantize.m, quantize.columns, quantize.fp8
        if error:
            return error
        if call.grid:
            return self.slidesparse_hopper_stream(ctypes.addressof(product), call.workspace, call.grid)
        return self.slidesparse_hopper_gemm(ctypes.addressof(product))
