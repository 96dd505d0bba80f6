"""A small layer, pruned, quantized and slid on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from slidesparse.pattern import SlideLayout, SlidePattern
from slidesparse.prune import prune
from slidesparse.quantize import quantize_rows
from slidesparse.slide import slide


def layer(pattern: str, dtype: torch.dtype, n: int, k: int) -> tuple[SlideLayout, Tensor, Tensor, Tensor]:
    """Layout, slided weight [N, K'], scale [N, 1], and the dense weight [N, K] it came from."""
    parsed = SlidePattern.parse(pattern)
    generator = torch.Generator().manual_seed(n * k)
    weight, scale = quantize_rows(prune(torch.randn(n, k, generator=generator), parsed), dtype)
    return parsed.layout(k), slide(weight, parsed), scale, weight
