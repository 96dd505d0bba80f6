"""Operands of N:M products for tests, and how far a result may be from the exact one."""

from __future__ import annotations

import torch
from torch import Tensor

from slidesparse.spmm import Compressed, compress, decompress, prune

PATTERNS = [(2, 4), (1, 4), (4, 8), (1, 2), (2, 8), (6, 8), (3, 5), (31, 32), (1, 1)]
SHAPES = [(1, 1, 1), (5, 37, 70), (64, 32, 128), (33, 65, 300)]  # M, N, K


def operands(
    m: int, n: int, k: int, kept: int, group: int, dtype: torch.dtype, strip: int = 1
) -> tuple[Tensor, Compressed]:
    """Normal numbers: x [M, K] and a pruned weight."""
    generator = torch.Generator().manual_seed(m * n + k)
    dense = torch.randn(n, k, generator=generator).to(dtype)
    x = torch.randn(m, k, generator=generator).to(dtype)
    return x, compress(prune(dense, kept, group, strip), kept, group, strip)


def integers(
    m: int, n: int, k: int, kept: int, group: int, dtype: torch.dtype, strip: int = 1
) -> tuple[Tensor, Compressed]:
    """Integers up to 2: every sum of up to 512 products is one that float16 has."""
    generator = torch.Generator().manual_seed(m * n + k)
    dense = torch.randint(-2, 3, (n, k), generator=generator).to(dtype)
    x = torch.randint(-2, 3, (m, k), generator=generator).to(dtype)
    return x, compress(prune(dense, kept, group, strip), kept, group, strip)


def bound(x: Tensor, weight: Compressed, fused: bool = True) -> tuple[Tensor, Tensor]:
    """(x @ weight.T, the largest error) in float64, of each output.

    Each of W fused multiply-adds rounds once, by at most u = 2^-24 of what is a sum of some products: together at most
    W u / (1 - W u) of the sum of their magnitudes, in any order (Higham, Accuracy and Stability, 3.1); products that
    are rounded by themselves count as one more.  Where float16 is stored, half of its last place comes to that.
    """
    dense = decompress(weight).double()
    exact, sizes = x.double() @ dense.t(), x.double().abs() @ dense.abs().t()
    roundings = (weight.values.shape[0] + (not fused)) * 2.0**-24
    allowed = sizes * roundings / (1 - roundings)
    if x.dtype == torch.float16:
        allowed = allowed + (exact.abs() + allowed) * 2.0**-11 + 2.0**-25
    return exact, allowed
