"""Stock vLLM's dense W8A8 product, for layers that keep their dense weight beside the sparse one.

vLLM registers it as ``torch.ops._C.cutlass_scaled_mm`` in its own processes; this module imports no vLLM.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slidesparse import profiling
from slidesparse.gemm import plans
from slidesparse.gemm.library import LibraryError

OPERATOR = "cutlass_scaled_mm"


class Stock:
    """The provider: see `slidesparse.gemm.GemmProvider`.  Scales and bias are in the product's epilogue."""

    name = "stock"
    alignment = 16
    outputs = (torch.bfloat16, torch.float16)

    def unusable(self, device: torch.device) -> str | None:
        """Needs a GPU, and vLLM's CUDA kernels in this process."""
        if device.type != "cuda":
            return "vLLM's kernel runs on NVIDIA GPUs only"
        if not hasattr(torch.ops._C, OPERATOR):
            return f"this vLLM has no {OPERATOR}, or is not loaded: serve with a CUDA build of vLLM"
        return None

    def pack(self, weight: Tensor) -> Tensor:
        """[N, K] contiguous, columns padded with zeros to a multiple of 16.  Raises LibraryError for another N."""
        if weight.shape[0] % self.alignment:
            raise LibraryError(
                f"vLLM's kernel takes out-features that are a multiple of {self.alignment}, found {weight.shape[0]}: "
                "serve without SLIDESPARSE_KEEP_DENSE"
            )
        return plans.pad(weight, self.alignment).contiguous()

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
        out = q.new_empty(q.shape[0], weight.shape[0], dtype=out_dtype)
        if q.shape[0]:
            with profiling.stage("product", q):
                torch.ops._C.cutlass_scaled_mm(out, q, weight.t(), scale_x, scale_w, bias)
        return out
