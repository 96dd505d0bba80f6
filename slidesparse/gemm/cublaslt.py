"""NVIDIA's cuBLASLt, called through torch: the dense GEMM that the paper compares with.

Torch chooses the algorithm, by the library's heuristic, and owns handles and workspaces, one for each thread and stream
and for each pool of CUDA graphs.  So any shape may first run while a graph is captured.  What torch 2.11 and later ask
of GPUs (aten/src/ATen: native/cuda/Blas.cpp, ScaledBlas.cpp, cuda/CUDABlas.cpp):

    _int_mm     INT8 -> INT32, exact; more than 16 rows; K and N multiples of 8; no workspace, so no split-K
    _scaled_mm  FP8 of compute capability 8.9 and later; a column-major right operand; K and N multiples of 16, any M;
                either one scale for each operand, or scales [M, 1] and [1, N] with a bias of the 16-bit output's type

With vectors of scales torch calls cuBLASLt for compute capability 9.x and CUDA 12.9 or later, and a kernel of its own
for others.  FP8 uses fast accumulation, as stock vLLM's kernels do.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slidesparse.gemm.cuda import LibraryBackend, allocate_rows, pad
from slidesparse.gemm.problem import (
    ALL_2_4,
    MIN_INT8_ROWS,
    MIN_ROWS,
    NAMES,
    LibraryError,
    Plan,
    Problem,
    Tensors,
    bucket,
    require_operand,
)
from slidesparse.pattern import SlidePattern
from slidesparse.quantize import FP8, INT8
from slidesparse.versions import numbers

VECTOR_MAJOR, VECTOR_CUDA = 9, (12, 9)  # compute capability and CUDA with an epilogue that scales by vectors
# Up to this many tokens a GEMM to BF16 and a scaling kernel are faster than a GEMM that scales, for which the library
# has only one algorithm: at 64 tokens Qwen2.5-7B's four FP8 GEMMs take 74 us on an H200, and 149 us with scales.
MAX_UNSCALED_TOKENS = 256
TORCHS_CHOICE = "torch"  # the only algorithm
OUTPUTS = {"int8": ("int32",), "fp8": ("bf16", "fp16", "fp32"), "fp16": ("fp16",), "bf16": ("bf16",)}


def multiply(tensors: Tensors) -> None:
    """Write activations [M, K] @ weight [N, K].T to out [M, N]; of FP8 with both scales and a bias if they are given.

    FP8 without scales is scaled by ones that each call fills in, a small launch: a tensor that is kept would have to
    outlive pools of CUDA graphs and the server's sleep.
    """
    activations, weight, out, scale_w, scale_x, bias = tensors
    if activations.dtype == INT8:
        torch._int_mm(activations, weight.t(), out=out)
    elif activations.dtype == FP8:
        if scale_w is None or scale_x is None:
            scale_w = scale_x = activations.new_ones(1, dtype=torch.float32)
        scales = scale_x.view(-1, 1), scale_w.view(1, -1)
        torch._scaled_mm(
            activations, weight.t(), *scales, bias, out_dtype=out.dtype, use_fast_accum=True, out=out
        )
    else:
        torch.mm(activations, weight.t(), out=out)


class CublasLt(LibraryBackend):
    """The dense path by torch, which plans each call anew."""

    name = "cublaslt"
    sparse = False
    takes_dense = True
    alignment = 16
    products = OUTPUTS

    def version(self) -> str:
        return torch.__version__

    def epilogue(self, dtype: str, out: str, device: torch.device | None = None) -> str:
        """Return "both" for FP8 to 16 bits where cuBLASLt scales by vectors, else "none"."""
        if dtype != "fp8" or out not in ("bf16", "fp16"):
            return "none"
        hopper = torch.cuda.get_device_capability(device)[0] == VECTOR_MAJOR
        return "both" if hopper and numbers(torch.version.cuda or "") >= VECTOR_CUDA else "none"

    def operand(self, weight: Tensor, blocks: str = ALL_2_4) -> Tensor:
        require_operand(weight.dtype)
        return weight.contiguous()

    def algorithms(self, problem: Problem, device: torch.device) -> list[str]:
        return [TORCHS_CHOICE]

    def plan(self, problem: Problem, device: torch.device, algorithm: str | None = None) -> Plan:
        self.require(problem)
        if problem.scale == "both" and self.epilogue(problem.dtype, problem.out, device) == "none":
            raise LibraryError(f"cuBLASLt scales FP8 to 16 bits only, on Hopper, asked for {problem}")
        if problem.dtype == "int8" and problem.m <= MIN_ROWS:
            raise LibraryError(f"torch multiplies more than {MIN_ROWS} rows of INT8, asked for {problem}")
        return multiply

    def pack(self, weight: Tensor, pattern: SlidePattern | None, phase: int = 0) -> Tensor:
        """Return [N, K] padded with zeros to multiples of 16; weights are not slid."""
        return self.operand(pad(weight, self.alignment, self.alignment))

    def accumulate(self, q: Tensor, packed: Tensor, n: int, dtype: torch.dtype) -> Tensor:
        q = pad(q, self.alignment)
        m, k = q.shape
        rows = max(MIN_INT8_ROWS, bucket(m)) if q.dtype == INT8 else m
        if rows > m:  # the GEMM multiplies whatever is behind the last token, and the result is cut off
            q = allocate_rows(q, rows).as_strided((rows, k), (k, 1))
        out = q.new_empty(rows, len(packed), dtype=dtype)
        multiply(Tensors(q, packed, out))
        return out[:m, :n]

    def scaled_matmul(self, tensors: Tensors) -> None:
        q, packed, out, scale_w, scale_x, bias = tensors
        scales = len(q) > MAX_UNSCALED_TOKENS and out.shape[1] % self.alignment == 0
        if not scales or self.epilogue(NAMES[q.dtype], NAMES[out.dtype], q.device) == "none":
            super().scaled_matmul(tensors)
        else:
            bias = None if bias is None else bias.to(out.dtype)
            multiply(Tensors(pad(q, self.alignment), packed, out, scale_w, scale_x, bias))
