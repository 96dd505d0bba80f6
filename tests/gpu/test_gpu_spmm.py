"""The hand-written N:M kernels on a GPU: exact where sums are exact."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from benchmarks.spmm.kernels import STRIP, VARIANTS, Compressed, compress, decompress, prune, spmm

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
