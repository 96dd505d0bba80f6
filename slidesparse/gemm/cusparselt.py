"""NVIDIA's cuSPARSELt: 2:4 sparse GEMM on sparse tensor cores, through torch's binding of it.

The product is taken transposed, out.T [N, M] = weight [N, K'] @ q.T [K', M], because cuSPARSELt wants the sparse
matrix on the left.  INT8 comes back as INT32, FP8 as float32, and `slidesparse.kernels.dequant_bias` scales it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slidesparse.gemm import missing_triton
from slidesparse.quantize import FP8, INT8

_ALIGNMENT = 32  # rows, columns and tokens of an 8-bit product, as cuSPARSELt asks for
_CAPABILITY = (8, 0)  # FP8 needs 8.9, which vLLM asks for itself


class CuSparseLt:
    """Sparse tensor cores, Ampere and later (FP8: Ada and later)."""

    name = "cusparselt"

    def unusable(self, device: torch.device) -> str | None:
        """Needs an NVIDIA GPU with sparse tensor cores and a torch built with cuSPARSELt."""
        if device.type != "cuda" or not torch.cuda.is_available():
            return "it needs an NVIDIA GPU; the reference backend runs on this machine"
        capability = torch.cuda.get_device_capability(device)
        if capability < _CAPABILITY:
            return (
                f"compute capability {capability} has no 2:4 sparse tensor cores, 8.0 (Ampere) or later has"
            )
        if not (hasattr(torch, "_cslt_compress") and torch.backends.cusparselt.is_available()):
            return "this torch was built without cuSPARSELt; install a CUDA build of torch 2.6 or later"
        return missing_triton()

    def pack(self, weight: Tensor) -> Tensor:
        """2:4 [N, K'] -> the values and metadata cuSPARSELt reads, N and K' padded to multiples of 32."""
        n, k = weight.shape
        padded = torch.nn.functional.pad(_bits(weight), (0, -k % _ALIGNMENT, 0, -n % _ALIGNMENT))
        if weight.dtype == FP8:
            padded.masked_fill_(padded == -128, 0)  # -0.0 counts as a value to keep and would take a place
        compressed: Tensor = torch._cslt_compress(padded.view(weight.dtype))
        return compressed

    def scaled_matmul(
        self,
        q: Tensor,
        scale_x: Tensor,
        weight: Tensor,
        scale_w: Tensor,
        bias: Tensor | None,
        out_dtype: torch.dtype,
    ) -> Tensor:
        """See `slidesparse.gemm.GemmProvider.scaled_matmul`."""
        (m, k), n = q.shape, scale_w.shape[0]
        if m == 0:
            return q.new_empty(0, n, dtype=out_dtype)
        padded = torch.nn.functional.pad(_bits(q), (0, -k % _ALIGNMENT, 0, -m % _ALIGNMENT)).view(q.dtype)
        acc_dtype = torch.int32 if q.dtype == INT8 else torch.float32
        acc = torch._cslt_sparse_mm(weight, padded.t(), out_dtype=acc_dtype, transpose_result=True)
        from slidesparse.kernels.dequant_bias import dequant_bias  # late: needs Triton

        return dequant_bias(acc[:m, :n], scale_x, scale_w, bias, out_dtype)


def _bits(x: Tensor) -> Tensor:
    return x.view(torch.int8)
