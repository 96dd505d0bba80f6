"""A third-party backend: everything that its author has to write, as tests register it."""

from __future__ import annotations

import torch
from torch import Tensor

from slidesparse import gemm
from slidesparse.gemm.backend import TwoStep
from slidesparse.gemm.problem import TWO_FOUR, Tensors
from slidesparse.pattern import SlidePattern
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

    def pack(self, weight: Tensor, pattern: SlidePattern | None, phase: int = 0) -> Tensor:
        """[columns, N]."""
        windows = slide(weight, pattern or TWO_FOUR, phase).view(torch.int8)
        missing = -windows.shape[1] % self.alignment
        return torch.nn.functional.pad(windows, (0, missing)).view(weight.dtype).t().contiguous()

    def scaled_matmul(self, tensors: Tensors) -> None:
        """See `slidesparse.gemm.backend.TwoStep`."""
        q, packed, out, scale_w, scale_x, bias = tensors
        sums = (q.float().double() @ packed.float().double()).float() * scale_w.t() * scale_x
        out.copy_(sums if bias is None else sums + bias)
