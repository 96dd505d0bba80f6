"""The exact backend in plain torch, for any device; see `slidesparse.reference`."""

from __future__ import annotations

import torch
from torch import Tensor

from slidesparse import profiling, reference
from slidesparse.quantize import arithmetic_of


class Reference:
    """INT8 accumulates exactly, FP8 in float32.  Right to the last bit, not fast."""

    name = "reference"
    alignment = 4
    outputs = (torch.bfloat16, torch.float16, torch.float32)

    def unusable(self, device: torch.device) -> str | None:
        """Runs wherever torch does."""
        return None

    def pack(self, weight: Tensor) -> Tensor:
        """[N, K'] as it is."""
        return weight

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
        with profiling.stage("product", q):
            acc = reference.matmul(q, weight)
        with profiling.stage("scale", q):
            return reference.dequant_bias(acc, scale_x, scale_w, bias, out_dtype, arithmetic_of(q))
