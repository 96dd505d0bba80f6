"""The exact backend in plain torch, for any device; see `slidesparse.reference`."""

from __future__ import annotations

import torch
from torch import Tensor

from slidesparse import profiling, reference
from slidesparse.gemm.backend import LayerSpec, TwoStep
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
    outputs = (torch.bfloat16, torch.float16, torch.float32)

    def unusable(self, device: torch.device, capability: tuple[int, int] | None = None) -> str | None:
        """See `Backend.unusable`: it runs wherever torch does."""
        return None

    def pack(self, spec: LayerSpec, weight: Tensor) -> Tensor:
        """See `Backend.pack`: [N, K'], slid into 2:4 windows, or a dense weight with zero columns up to whole fours."""
        if spec.pattern is not None:
            return slide(weight, spec.pattern, spec.phase)
        missing = spec.columns(self.alignment) - spec.in_features
        return torch.nn.functional.pad(weight.view(torch.int8), (0, missing)).view(weight.dtype)

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
        with profiling.stage("product", q):
            acc = reference.matmul(q, packed)
        with profiling.stage("scale", q):
            return reference.dequant_bias(acc, scale_x, scale_w, bias, out_dtype, arithmetic_of(q))
