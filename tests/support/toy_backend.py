"""A third-party backend: everything that its author has to write, as tests register it."""

from __future__ import annotations

import torch
from torch import Tensor

from slidesparse import gemm
from slidesparse.gemm.backend import LayerSpec, TwoStep
from slidesparse.slide import slide

ENTRY = {"toy": (gemm.SPARSE, "toy_backend:Toy")}  # its line in the registry


class Toy(TwoStep):
    """A backend that stores windows transposed and multiplies in float64."""

    name = "toy"
    takes_dense = False
    device_type = "cpu"
    alignment = 32
    outputs = (torch.float32,)

    def unusable(self, device: torch.device, capability: tuple[int, int] | None = None) -> str | None:
        """It runs on CPUs."""
        return None if device.type == "cpu" else "it runs on CPUs"

    def pack(self, spec: LayerSpec, weight: Tensor) -> Tensor:
        """[columns, N]."""
        windows = slide(weight, spec.pattern or "2:4", spec.phase).view(torch.int8)
        missing = spec.columns(self.alignment) - windows.shape[1]
        return torch.nn.functional.pad(windows, (0, missing)).view(weight.dtype).t().contiguous()

    def scaled_matmul(
        self,
        q: Tensor,
        scale_x: Tensor,
        packed: Tensor,
        scale_w: Tensor,
        bias: Tensor | None,
        out_dtype: torch.dtype,
    ) -> Tensor:
        """See `slidesparse.gemm.backend.Backend`."""
        sums = (q.float().double() @ packed.float().double()).float() * scale_w.t() * scale_x
        return (sums if bias is None else sums + bias).to(out_dtype)
