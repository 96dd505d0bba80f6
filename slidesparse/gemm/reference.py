"""The exact backend in plain torch, for any device; see `slidesparse.reference`."""

from __future__ import annotations

import torch
from torch import Tensor

from slidesparse import reference
from slidesparse.gemm.backend import TwoStep
from slidesparse.gemm.problem import Tensors
from slidesparse.pattern import SlidePattern
from slidesparse.quantize import arithmetic_of
from slidesparse.slide import slide


class Reference(TwoStep):
    """The exact but slow backend: sums of INT8 are exact, those of FP8 float32."""

    name = "reference"
    device_type = "cpu"
    takes_dense = True
    fuses = True
    threads = True
    alignment = 4

    def unusable(self, device: torch.device, capability: tuple[int, int] | None = None) -> str | None:
        """See `Backend.unusable`: it runs wherever torch does."""
        return None

    def pack(self, weight: Tensor, pattern: SlidePattern | None, phase: int = 0) -> Tensor:
        """See `Backend.pack`: [N, K'], slid into 2:4 windows, or a dense weight with zero columns up to whole fours."""
        if pattern is not None:
            return slide(weight, pattern, phase)
        missing = -weight.shape[1] % self.alignment
        return torch.nn.functional.pad(weight.view(torch.int8), (0, missing)).view(weight.dtype)

    def refuses_experts(
        self, experts: int, pattern: SlidePattern | None, dtype: torch.dtype, asked: bool
    ) -> str | None:
        return None

    def scaled_matmul(self, tensors: Tensors) -> None:
        q, packed, out, scale_w, scale_x, bias = tensors
        assert scale_w is not None
        assert scale_x is not None
        acc = reference.matmul(q, packed)
        out.copy_(reference.dequant_bias(acc, scale_x, scale_w, bias, out.dtype, arithmetic_of(q)))
