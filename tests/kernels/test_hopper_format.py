"""The packed weight of the Hopper kernels: round trips, and the place of single elements in the hardware's layout."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slidesparse.gemm.hopper import format as fmt
from slidesparse.pattern import SlidePattern
from slidesparse.prune import prune
from slidesparse.slide import slide


def two_four(n: int, k: int, seed: int, most: int = 2) -> torch.Tensor:
    """Return random int8 [n, k] with at most ``most`` non-zeros in each group of four columns."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(1, 128, (n, -(-k // 4), 4), generator=generator, dtype=torch.int8)
    order = torch.rand(values.shape, generator=generator).argsort(-1)
    counts = torch.randint(0, most + 1, values.shape[:2], generator=generator)
    return torch.where(order < counts[..., None], values, 0).reshape(n, -1)[:, :k].contiguous()


@settings(max_examples=60, deadline=None)
@given(n=st.integers(1, 200), k=st.integers(1, 400), seed=st.integers(0, 2**31))
def test_pack_unpack_round_trip(n: int, k: int, seed: int) -> None:
    weight = two_four(n, k, seed)
    packed = fmt.pack(weight)
    assert packed.numel() == fmt.packed_bytes(n, k)
    assert torch.equal(fmt.unpack(packed, n, k, torch.int8), weight)


@pytest.mark.parametrize("pattern", ["2:4", "4:6", "6:8", "8:10", "14:16", "2_inf"])
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_slided_weights_round_trip(pattern: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    parsed = SlidePattern.parse(pattern)
    weight = torch.randn(70, 150, generator=generator) * 50
    if parsed.length is not None:
        weight = prune(weight, parsed)
    slided = slide(weight.to(dtype), parsed)
    unpacked = fmt.unpack(fmt.pack(slided), *slided.shape, dtype)
    assert torch.equal(unpacked.float(), slided.float())


def test_pack_refuses_three_nonzeros_in_four() -> None:
    weight = torch.zeros(3, 8, dtype=torch.int8)
    weight[2, 4:7] = 1
    with pytest.raises(ValueError, match="row 2, columns 4 to 7"):
        fmt.pack(weight)


@settings(max_examples=60, deadline=None)
@given(row=st.integers(0, 127), column=st.integers(0, 255))
def test_packed_element_is_where_ptx_isa_says(row: int, column: int) -> None:
    """The PTX ISA defines the core matrix, row and byte of a value, and the thread and bits of its metadata."""
    weight = torch.zeros(128, 256, dtype=torch.int8)
    weight[row, column] = 77
    block = fmt.pack(weight).view(2, 2, fmt.BLOCK_BYTES)[row // 64, column // 128]
    at = int((block[: fmt.VALUE_BYTES] == 77).nonzero().item())
    product, matrix, inside, byte = at // 2048, at % 2048 // 128, at % 128 // 16, at % 16
    assert row % 64 == 8 * (matrix // 2) + inside
    compressed = 16 * (matrix % 2) + byte
    assert column % 128 == 64 * product + 4 * (compressed // 2) + column % 4
    warp, lower = matrix // 4, matrix // 2 % 2
    thread = warp * 32 + 4 * inside + 2 * (column % 64 // 32) + lower
    metadata = block[fmt.VALUE_BYTES :].view(torch.int32)
    nibble = int(metadata[128 * product + thread]) >> (4 * (column % 32 // 4)) & 15
    first, second = nibble & 3, nibble >> 2
    assert first < second
    assert (first, second)[compressed % 2] == column % 4
