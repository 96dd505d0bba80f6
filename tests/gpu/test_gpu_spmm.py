"""The hand-written N:M kernels on a GPU: exact where sums are exact, whatever the operands' place in memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from benchmarks.spmm.kernels import STRIP, VARIANTS, Compressed, compress, decompress, prune, reference, spmm

pytestmark = pytest.mark.gpu

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
STRIPS = pytest.mark.parametrize("strip", [1, STRIP])
PATTERNS = [(2, 4), (1, 4), (3, 5), (31, 32)]
SHAPES = [(1, 1, 1), (64, 32, 128), (33, 65, 300), (100, 260, 200)]  # M, N, K


def integers(
    m: int, n: int, k: int, kept: int, group: int, dtype: torch.dtype, strip: int = 1
) -> tuple[Tensor, Compressed]:
    """Return x [M, K] and a pruned weight of integers up to 2: sums of up to 512 products are exact in float16."""
    generator = torch.Generator().manual_seed(m * n + k)
    dense = torch.randint(-2, 3, (n, k), generator=generator).to(dtype)
    x = torch.randint(-2, 3, (m, k), generator=generator).to(dtype)
    return x, compress(prune(dense, kept, group, strip), kept, group, strip)


@STRIPS
@DTYPES
@pytest.mark.parametrize(("kept", "group"), PATTERNS)
def test_every_variant_is_exact_on_integers(kept: int, group: int, dtype: torch.dtype, strip: int) -> None:
    for m, n, k in SHAPES:
        x, weight = integers(m, n, k, kept, group, dtype, strip)
        expected = (x.double() @ decompress(weight).double().t()).to(dtype)
        for variant in VARIANTS:
            for splits in (1, 2, 5):
                output = spmm(x.cuda(), weight.to("cuda"), variant, splits)
                assert torch.equal(output.cpu(), expected), (m, n, k, variant, splits)


@DTYPES
def test_operands_of_any_memory_layout(dtype: torch.dtype) -> None:
    """Tokens are contiguous or strided, unaligned, and between NaN; values and offsets lie within larger tensors."""
    x, weight = integers(13, 21, 90, 2, 4, dtype)
    expected = reference(x, weight)
    wide = torch.full((92, 40), torch.nan, dtype=dtype, device="cuda")
    wide[1:91, 3:16] = x.t().cuda()
    beside = torch.full((92, 16), torch.nan, dtype=dtype, device="cuda")
    beside[1:91, :13] = x.t().cuda()
    values = torch.full((47, 48), torch.nan, dtype=dtype, device="cuda")
    offsets = torch.full((47, 48), 0xFF, dtype=torch.uint8, device="cuda")
    values[:46, :21], offsets[:46, :21] = weight.values.cuda(), weight.offsets.cuda()
    poisoned = replace(weight, values=values[:46, :21], offsets=offsets[:46, :21])
    for tokens in (x.cuda(), wide[1:91, 3:16].t(), beside[1:91, :13].t()):
        for variant in VARIANTS:
            for splits in (1, 2):
                assert torch.equal(spmm(tokens, poisoned, variant, splits).cpu(), expected)
