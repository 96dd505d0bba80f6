"""NVIDIA's cuBLASLt: the dense GEMM that the papers compare with, through torch's bindings of it."""

from __future__ import annotations

import torch
from torch import Tensor

from slidesparse.gemm import missing_triton
from slidesparse.quantize import INT8

_ALIGNMENT = 16


class CublasLt:
    """Dense tensor cores; INT8 gives INT32, FP8 float32, scaled afterwards."""

    name = "cublaslt"

    def unusable(self, device: torch.device) -> str | None:
        """Needs an NVIDIA GPU; FP8 needs compute capability 8.9."""
        if device.type != "cuda" or not torch.cuda.is_available():
            return "it needs an NVIDIA GPU; the reference backend runs on this machine"
        return missing_triton()

    def pack(self, weight: Tensor) -> Tensor:
        """[N, K] padded to multiples of 16."""
        n, k = weight.shape
        bits = torch.nn.functional.pad(weight.view(torch.int8), (0, -k % _ALIGNMENT, 0, -n % _ALIGNMENT))
        return bits.view(weight.dtype)

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
        rows = max(32, m + -m % _ALIGNMENT)
        padded = torch.nn.functional.pad(q.view(torch.int8), (0, -k % _ALIGNMENT, 0, rows - m)).view(q.dtype)
        if q.dtype == INT8:
            acc = torch._int_mm(padded, weight.t())
        else:
            one = torch.ones((), dtype=torch.float32, device=q.device)
            acc = torch._scaled_mm(padded, weight.t(), scale_a=one, scale_b=one, out_dtype=torch.float32)
        from slidesparse.kernels.dequant_bias import dequant_bias  # late: needs Triton

        return dequant_bias(acc[:m, :n], scale_x, scale_w, bias, out_dtype)
