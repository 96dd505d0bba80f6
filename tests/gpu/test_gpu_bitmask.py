"""Bitmask decompression on a GPU, against the weight that was split into values and bits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from strategies import assert_same_bits

from slidesparse.bitmask import decompress

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.bfloat16])
def test_decompress_on_gpu(dtype: torch.dtype) -> None:
    """The weight has several chunks, and bits that end within a byte."""
    n, k = 600, 18942
    mask = torch.rand(n, k).argsort(1) < k * 3 // 4
    w = torch.where(mask, torch.randint(1, 100, (n, k)), 0).to(dtype)
    values = w.view(torch.int8 if dtype.itemsize == 1 else torch.int16)[mask].view(dtype).view(n, -1).cuda()
    bitmask = torch.from_numpy(np.packbits(mask.numpy(), axis=-1, bitorder="little")).cuda()
    assert_same_bits(decompress(values, bitmask, k).cpu(), w)
    assert_same_bits(decompress(values.flatten(), bitmask, k).cpu(), w)
    with pytest.raises(ValueError, match="bits set for"):
        decompress(values, bitmask ^ 1, k)
