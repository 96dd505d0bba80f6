"""Rows of tokens with the special values of quantization, geometries for lifting, and comparison of codes."""

from __future__ import annotations

import torch
from strategies import assert_same_bits, raw
from torch import Tensor

from slidesparse.quantize import FP8

SOURCES = (torch.bfloat16, torch.float16, torch.float32)
NAN, INF = float("nan"), float("inf")

# pattern, K, phase: whole blocks, tails, odd and even phases, a block length that is no power of two, one block per row
GEOMETRIES = [("2:4", 32, 0), ("2:4", 33, 0), ("2:4", 30, 3), ("4:6", 72, 0)]
GEOMETRIES += [("6:8", 80, 0), ("6:8", 76, 2), ("6:8", 37, 3), ("6:8", 1, 7)]
GEOMETRIES += [("8:10", 34, 5), ("14:16", 66, 0), ("2_inf", 50, 0), ("2_inf", 17, 0)]
LARGE = [("6:8", 2048, 0), ("6:8", 3584, 4), ("6:8", 18944, 0)]
LARGE += [("2_inf", 3584, 0), ("4:6", 2047, 1), ("2:4", 18942, 0)]
# Those whose activations the Hopper kernels lift: windows of 2:4 and 4:6.
HOPPER_GEOMETRIES, HOPPER_LARGE = (
    [(pattern if pattern == "2:4" else "4:6", k, phase % 6) for pattern, k, phase in geometries]
    for geometries in (GEOMETRIES, LARGE)
)


def rows(m: int, k: int, source: torch.dtype) -> Tensor:
    """Values [m, k] of every magnitude, with ties, zeros, -0.0, NaN and Inf in the first rows."""
    generator = torch.Generator().manual_seed(m * 7919 + k)
    x = torch.randn(max(m, 12), k, generator=generator)
    x[1] = torch.randint(-254, 255, (k,), generator=generator) / 2  # ties
    for row, size in ((2, 1e-3), (3, 1e-7), (4, 2e-38), (5, 1e-43), (6, 3e4)):  # 4, 5: near and below normal
        x[row] *= size
    if source != torch.float16:
        x[7] *= 1e37
    x[8] = 0.0
    x[9] = NAN
    x[10, :: max(1, k // 3)] = INF
    x[11, k // 2] = NAN
    x[:, k // 3] = torch.where(x[:, k // 3].isfinite(), torch.tensor(-0.0), x[:, k // 3])
    return x[:m].to(source)


def without_nan_signs(q: Tensor) -> Tensor:
    """The bits of codes; the sign of an E4M3 NaN means nothing and differs between processors."""
    codes = raw(q)
    return torch.where((codes & 0x7F) == 0x7F, 0x7F, codes) if q.dtype == FP8 else codes


def assert_same_codes(actual: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    (q, scale), (expected_q, expected_scale) = actual, expected
    assert q.dtype == expected_q.dtype
    assert_same_bits(scale.cpu(), expected_scale)
    assert_same_bits(without_nan_signs(q.cpu()), without_nan_signs(expected_q))
