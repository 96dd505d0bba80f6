"""The hand-written N:M kernels: compression, refusals, and products that are exact where sums are."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.spmm import kernels as spmm_module
from benchmarks.spmm.kernels import STRIP, VARIANTS, compress, decompress, prune, spmm
from slidesparse.build import find
from slidesparse.build.find import ToolchainError


@given(st.data())
@settings(max_examples=60)
def test_compress_decompress_round_trip(data: st.DataObject) -> None:
    group = data.draw(st.integers(1, 32))
    kept = data.draw(st.integers(1, group))
    strip = data.draw(st.sampled_from([1, STRIP]))
    n, k = data.draw(st.integers(1, 70)), data.draw(st.integers(1, 100))
    dtype = data.draw(st.sampled_from([torch.float32, torch.float16]))
    generator = torch.Generator().manual_seed(n * k)
    dense = torch.randn(n, k, generator=generator) * (torch.rand(n, k, generator=generator) < 0.7)
    weight = prune(dense.to(dtype), kept, group, strip)
    compressed = compress(weight, kept, group, strip)
    assert torch.equal(decompress(compressed), weight)
    assert compressed.values.shape == compressed.offsets.shape == (-(-k // group) * kept, n)
    assert int(compressed.offsets.max()) < group
    for first in range(0, n, strip):  # a strip's out-features have the same offsets
        own = compressed.offsets[:, first : first + strip]
        assert torch.equal(own, own[:, :1].expand_as(own))
    by_group = compressed.offsets.view(-1, kept, n).int()
    assert bool((by_group[:, 1:] > by_group[:, :-1]).all())  # ascending, without duplicates


@pytest.fixture(scope="module")
def compiled() -> Any:
    """Return the library compiled by nvcc, whose host code runs without a GPU."""
    try:
        find.find_nvcc()
    except ToolchainError as error:
        pytest.skip(str(error))
    return spmm_module.native()


def test_library_refuses_invalid_calls(compiled: Any) -> None:
    """Each case invalidates one field of a valid call, which itself fails later for lack of a GPU."""
    memory = torch.zeros(4096)
    address = memory.data_ptr()
    names = [name for name, *_ in spmm_module._Call._fields_]
    values = (address,) * 5 + (None, 8, 16, 8, 8, 16, 8, 2, 4, 0, 2, 0, 2)
    valid = dict(zip(names, values, strict=True))
    invalid = dict.fromkeys(("x", "values", "offsets", "out", "partials"), address + 4)
    invalid |= {"ldx": 6, "ldw": 20, "ldo": 10, "kept": 5, "group": 33, "variant": 3, "splits": 0}
    invalid |= {"m": -1, "n": 1 << 30, "k": -1}
    for name, value in invalid.items():
        call = spmm_module._Call(**{**valid, name: value})
        message = compiled.slidesparse_spmm(ctypes.addressof(call))
        assert message, name
        assert b"cuda" not in message, (name, message)


@pytest.mark.gpu
@pytest.mark.parametrize("strip", [1, STRIP])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("kept", "group"), [(2, 4), (1, 4), (3, 5), (31, 32)])
def test_every_variant_is_exact_on_integers(kept: int, group: int, dtype: torch.dtype, strip: int) -> None:
    """Sums of up to 512 products of integers up to 2 are exact in float16."""
    for m, n, k in [(1, 1, 1), (64, 32, 128), (33, 65, 300), (100, 260, 200)]:
        generator = torch.Generator().manual_seed(m * n + k)
        x, dense = (torch.randint(-2, 3, (rows, k), generator=generator).to(dtype) for rows in (m, n))
        weight = prune(dense, kept, group, strip)
        compressed = compress(weight, kept, group, strip)
        expected = (x.double() @ weight.double().t()).to(dtype)
        for variant in VARIANTS:
            for splits in (1, 2, 5):
                output = spmm(x.cuda(), compressed.to("cuda"), variant, splits)
                assert torch.equal(output.cpu(), expected), (m, n, k, variant, splits)
