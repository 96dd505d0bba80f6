"""The common part of the backends on NVIDIA's GEMM libraries, cuBLASLt and cuSPARSELt: a product, then scales."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from slidesparse.gemm.backend import TwoStep
from slidesparse.gemm.cuda import CudaBackend
from slidesparse.gemm.problem import NAMES, Tensors
from slidesparse.quantize import FP8, INT8

ACCUMULATOR_DTYPES = {INT8: torch.int32, FP8: torch.float32}  # type of the operands -> type of exact sums


def allocate_rows(x: Tensor, rows: int) -> Tensor:
    """Return x [M, K], contiguous and with memory for at least ``rows`` rows; a copy if it has less."""
    m, k = x.shape
    available_bytes = x.untyped_storage().nbytes() - x.storage_offset() * x.element_size()
    if x.is_contiguous() and available_bytes >= rows * k * x.element_size():
        return x
    padded = x.new_empty(rows, k)
    padded[:m].copy_(x)
    return padded


def pad(x: Tensor, columns: int, rows: int = 1) -> Tensor:
    """Pad x [M, K] of one-byte elements with zeros to multiples of ``columns`` and ``rows``; x itself if it fits."""
    missing = (0, -x.shape[1] % columns, 0, -x.shape[0] % rows)
    if not any(missing):
        return x
    return torch.nn.functional.pad(x.view(torch.int8), missing).view(x.dtype)


class LibraryBackend(CudaBackend, TwoStep):
    """A backend on a GEMM library, and a kernel that scales.

    For BF16 layers the GEMM writes BF16 if the library supports it, and otherwise INT32 or float32 sums.  Stock vLLM
    rounds once, at the end; rounding the sum to BF16 as well adds half an ulp of error, but halves the bytes between
    GEMM and scaling.
    """

    @abstractmethod
    def accumulate(self, q: Tensor, packed: Tensor, n: int, dtype: torch.dtype) -> Tensor:
        """Return q [M, K'] @ weight.T, [M, n] of ``dtype`` with strided rows; INT32 and float32 hold full sums.

        ``packed`` is the weight, from `pack`.  Raises LibraryError.
        """

    def scaled_matmul(self, tensors: Tensors) -> None:
        from slidesparse.kernels.dequant_bias import dequant_bias  # late: needs Triton

        q, packed, out, scale_w, scale_x, bias = tensors
        assert scale_w is not None
        assert scale_x is not None
        rounds = out.dtype == torch.bfloat16 and "bf16" in self.products[NAMES[q.dtype]]
        sums = out.dtype if rounds else ACCUMULATOR_DTYPES[q.dtype]
        dequant_bias(self.accumulate(q, packed, out.shape[1], sums), scale_x, scale_w, bias, out)
