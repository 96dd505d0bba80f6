"""Operands of N:M products for tests, and the error bound of their results."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.spmm.kernels import Compressed, compress, decompress, prune

PATTERNS = [(2, 4), (1, 4), (3, 5), (31, 32)]
SHAPES = [(1, 1, 1), (64, 32, 128), (33, 65, 300)]  # M, N, K


def operands(
    m: int, n: int, k: int, kept: int, group: int, dtype: torch.dtype, strip: int = 1
) -> tuple[Tensor, Compressed]:
    """Return x [M, K] and a pruned weight, of normal numbers."""
    generator = torch.Generator().manual_seed(m * n + k)
    dense = torch.randn(n, k, generator=generator).to(dtype)
    x = torch.randn(m, k, generator=generator).to(dtype)
    return x, compress(prune(dense, kept, group, strip), kept, group, strip)


def integers(
    m: int, n: int, k: int, kept: int, group: int, dtype: torch.dtype, strip: int = 1
) -> tuple[Tensor, Compressed]:
    """Return x [M, K] and a pruned weight of integers up to 2: sums of up to 512 products are exact in float16."""
    generator = torch.Generator().manual_seed(m * n + k)
    dense = torch.randint(-2, 3, (n, k), generator=generator).to(dtype)
    x = torch.randint(-2, 3, (m, k), generator=generator).to(dtype)
    return x, compress(prune(dense, kept, group, strip), kept, group, strip)


def bound(x: Tensor, weight: Compressed, fused: bool = True) -> tuple[Tensor, Tensor]:
    """Return x @ weight.T and the error bound of each output, in float64.

    Each of W fused multiply-adds rounds once, by at most u = 2^-24 of a partial sum: together at most W u / (1 - W u)
    of the sum of the products' magnitudes, in any order (Higham, Accuracy and Stability, 3.1).  Products that are
    rounded separately add one rounding.  An output in float16 adds half a unit of its last place.
    """
    dense = decompress(weight).double()
    exact, sizes = x.double() @ dense.t(), x.double().abs() @ dense.abs().t()
    roundings = (weight.values.shape[0] + (not fused)) * 2.0**-24
    allowed = sizes * roundings / (1 - roundings)
    if x.dtype == torch.float16:
        allowed = allowed + (exact.abs() + allowed) * 2.0**-11 + 2.0**-25
    return exact, allowed
