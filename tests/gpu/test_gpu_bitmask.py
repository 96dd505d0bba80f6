"""Bitmask decompression on a GPU, against that on a CPU."""

from __future__ import annotations

import pytest
import torch
from strategies import assert_same_bits

from slidesparse.bitmask import compress, decompress
from slidesparse.pattern import SlidePattern
from slidesparse.prune import prune

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("ratio", ["2:4", "4:6", "6:8"])
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.bfloat16])
def test_decompress_on_gpu_equals_cpu(ratio: str, dtype: torch.dtype) -> None:
    """Weights have several chunks; 4:6 leaves a short block and bits that end within a byte."""
    pattern, k = SlidePattern.parse(ratio), 18940
    w = prune(torch.randn(600, k).mul_(30).clamp_(-100, 100).round_().to(dtype), pattern)
    values, bitmask = (part.cuda() for part in compress(w, pattern))
    assert_same_bits(decompress(values, bitmask, k).cpu(), w)
    assert_same_bits(decompress(values.flatten(), bitmask, k).cpu(), w)
    with pytest.raises(ValueError, match="bits set for"):
        decompress(values, bitmask ^ 1, k)
