"""NVIDIA's cuBLASLt: the dense GEMM that the paper compares with, through our binding csrc/cublaslt.cpp.

FP8 uses fast accumulation, as stock vLLM's kernels do; on Hopper and later its epilogue applies both vectors of scales
and the bias.  INT8 operands give INT32 (or INT8, which no layer uses), which a Triton kernel scales.
"""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch import Tensor

from slidesparse import profiling
from slidesparse.gemm import cuda
from slidesparse.gemm.backend import LayerSpec
from slidesparse.gemm.cuda import NativePlan
from slidesparse.gemm.library import LibraryBackend
from slidesparse.gemm.problem import NAMES, TN, Layout, LibraryError, Problem, require_operand
from slidesparse.quantize import FP8

VECTOR_CAPABILITY, VECTOR_VERSION = (9, 0), 120900  # the first with an epilogue that scales by vectors
# Up to this many tokens a GEMM to BF16 and a scaling kernel are faster than a GEMM that scales, for which the library
# has only one algorithm: at 64 tokens Qwen2.5-7B's four FP8 GEMMs take 74 us on an H200, and 149 us with scales.
MAX_UNSCALED_TOKENS = 256
MAX_PROPOSALS = 100  # algorithms to request from the heuristics, more than there are
ALGORITHM_BYTES = 64
OUTPUTS = {
    "int8": ("int32", "int8"),
    "fp8": ("bf16", "fp16", "fp32"),
    "fp16": ("fp16", "fp32"),
    "bf16": ("bf16", "fp32"),
}


class CublasLt(LibraryBackend):
    """See `slidesparse.gemm.backend.Tunable`."""

    name = "cublaslt"
    sparse = False
    takes_dense = True
    alignment = 16
    products = OUTPUTS

    def version(self) -> str:
        """See `Tunable.version`: such as "13.1.0"."""
        number = int(cuda.call(cuda.extension(self.name).version))
        return f"{number // 10000}.{number // 100 % 100}.{number % 100}"

    def epilogue(self, dtype: str, out: str, device: torch.device | None = None) -> str:
        """See `Tunable.epilogue`: "both" for FP8 to 16 bits on Hopper and later with cuBLAS 12.9, else "none"."""
        if dtype != "fp8" or out not in ("bf16", "fp16"):
            return "none"
        version = int(cuda.call(cuda.extension(self.name).version))
        able = torch.cuda.get_device_capability(device) >= VECTOR_CAPABILITY and version >= VECTOR_VERSION
        return "both" if able else "none"

    def operand(self, weight: Tensor, layout: Layout = TN) -> Tensor:
        """See `Tunable.operand`: [n, k] contiguous, or [k, n] for a layout whose N is contiguous."""
        require_operand(weight.dtype)
        return weight.contiguous() if layout.weight_k else weight.t().contiguous()

    def algorithms(self, problem: Problem, device: torch.device, layout: Layout = TN) -> list[str]:
        """See `Tunable.algorithms`: the proposals of the library's heuristics, best first, as hexadecimal text."""
        native = self._native_plan(problem, device, layout)
        with cuda.on_device(cuda.device_index(device)):
            proposals = cuda.call(native.heuristics, MAX_PROPOSALS, cuda.WORKSPACE_BYTES)
        return [_encode_algorithm(algorithm) for algorithm in proposals]

    def plan(
        self, problem: Problem, device: torch.device, algorithm: str | None = None, layout: Layout = TN
    ) -> NativePlan:
        """See `Tunable.plan`."""
        native = self._native_plan(problem, device, layout)
        with cuda.on_device(cuda.device_index(device)):
            if algorithm is None:
                proposals = cuda.call(native.heuristics, 1, cuda.WORKSPACE_BYTES)
                if not proposals:
                    raise LibraryError(f"cuBLASLt has no algorithm for {problem}, {layout}")
                chosen = proposals[0]
            else:
                chosen = _decode_algorithm(algorithm)
            cuda.call(native.choose, chosen)
        return NativePlan(native, algorithm, cuda.device_index(device))

    def _native_plan(self, problem: Problem, device: torch.device, layout: Layout = TN) -> Any:
        self.require(problem)
        if problem.scale == "both" and problem.dtype != "fp8":
            raise LibraryError(f"cuBLASLt scales FP8 only, by out-feature and token, asked for {problem}")
        module = cuda.extension(self.name)
        types = module.TYPES
        bias = types[problem.out] if problem.bias else -1
        with cuda.on_device(cuda.device_index(device)):
            return cuda.call(
                module.Plan,
                cuda.handle(self.name, cuda.device_index(device)),
                *(problem.n, problem.k, problem.m),
                *(types[problem.dtype], types[problem.out], module.COMPUTE[problem.dtype]),
                types["int32" if problem.out == "int32" else "fp32"],
                module.Epilogue(problem.scale == "both", bias, problem.dtype == "fp8"),
                module.Layout(layout.weight_k, layout.activations_k, layout.output_n),
                f"{problem}, {layout}",
            )

    def pack(self, spec: LayerSpec, weight: Tensor) -> Tensor:
        """See `Backend.pack`: [N, K] padded with zeros to multiples of 16."""
        return self.operand(cuda.pad(weight, self.alignment, self.alignment))

    def scaled_matmul(
        self,
        q: Tensor,
        scale_x: Tensor,
        packed: Tensor,
        scale_w: Tensor,
        bias: Tensor | None,
        out_dtype: torch.dtype,
    ) -> Tensor:
        """See `Backend.scaled_matmul`."""
        n = scale_w.shape[0]
        if n % self.alignment or q.shape[0] <= MAX_UNSCALED_TOKENS or not self._can_scale(q, out_dtype):
            return super().scaled_matmul(q, scale_x, packed, scale_w, bias, out_dtype)
        bias = bias.to(out_dtype) if bias is not None else None
        with profiling.stage("product", q):
            return self.accumulate(q, packed, n, out_dtype, scale_w, scale_x, bias)

    def is_packed_for(self, weight: Tensor, n: int, k: int, dtype: torch.dtype) -> bool:
        """See `LibraryBackend.is_packed_for`."""
        return weight.shape == (n, k) and weight.dtype == dtype

    def _can_scale(self, q: Tensor, out_dtype: torch.dtype) -> bool:
        return q.dtype == FP8 and self.epilogue("fp8", NAMES[out_dtype], q.device) == "both"


def _encode_algorithm(algorithm: bytes) -> str:
    """Format an algorithm in hexadecimal with a checksum, as the library crashes on a wrong one."""
    return f"{algorithm.hex().rstrip('0')}-{zlib.crc32(algorithm):08x}"


def _decode_algorithm(text: str) -> bytes:
    """Read what `_encode_algorithm` wrote.  Raises LibraryError for anything else."""
    digits, _, checksum = text.partition("-")
    try:
        algorithm = bytes.fromhex(digits.ljust(2 * ALGORITHM_BYTES, "0"))
        if len(algorithm) == ALGORITHM_BYTES and zlib.crc32(algorithm) == int(checksum, 16):
            return algorithm
    except ValueError:
        pass
    raise LibraryError(f"{text!r} is no cuBLASLt algorithm in hexadecimal with its checksum; tune again")
