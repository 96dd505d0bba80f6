"""The packers of the Hopper kernels in torch, the oracle for the GPU's; see `slidesparse.gemm.hopper.format`."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from slidesparse.blocks import BLOCK, STRIP, grid
from slidesparse.gemm.hopper.format import BLOCK_BYTES, DENSE_BYTES, OFFSET_UNIT, allocate_mixed
from slidesparse.gemm.problem import SIX_EIGHT
from slidesparse.slide import nonzero, require_pattern

VALUE_BYTES = STRIP * BLOCK // 2
CODED_VALUE_BYTES = DENSE_BYTES // 8 * 6
CODED_BYTES = CODED_VALUE_BYTES + DENSE_BYTES // 8 * 5 // 8

# Which two of four columns are kept, by the bits of the non-zeros; the hardware wants two different ones, in order.
_KEPT_COLUMNS = {
    0b0000: (0, 1),
    0b0001: (0, 1),
    0b0010: (0, 1),
    0b0100: (0, 2),
    0b1000: (0, 3),
    0b0011: (0, 1),
    0b0101: (0, 2),
    0b1001: (0, 3),
    0b0110: (1, 2),
    0b1010: (1, 3),
    0b1100: (2, 3),
}


def pack(weight: Tensor) -> Tensor:
    """Pack 2:4 weights [N, K'] of one-byte elements: uint8 [strips * blocks * 5120]; -0.0 may become +0.0."""
    n, slided = weight.shape
    strips, blocks = grid(n, slided)
    codes = functional.pad(weight.view(torch.uint8), (0, blocks * BLOCK - slided, 0, strips * STRIP - n))
    groups = codes.view(strips * STRIP, blocks * BLOCK // 4, 4)
    magnitudes = groups & 0x7F if weight.dtype.is_floating_point else groups
    powers = torch.tensor([1, 2, 4, 8], dtype=torch.uint8, device=weight.device)
    columns = _kept_columns(weight.device)[((magnitudes != 0) * powers).sum(-1)]  # [rows, groups, 2]
    assert not bool((columns < 0).any()), "a group of four has more than two non-zeros"
    values = groups.gather(-1, columns)
    nibbles = (columns[..., 0] | columns[..., 1] << 2).to(torch.uint8)
    packed = torch.empty(strips, blocks, BLOCK_BYTES, dtype=torch.uint8, device=weight.device)
    # rows: strip, eight rows, row; columns: block, wgmma, half, byte -> matrix by matrix
    matrices = values.reshape(strips, 8, 8, blocks, 2, 2, 16).permute(0, 3, 4, 1, 5, 2, 6)
    packed[..., :VALUE_BYTES] = matrices.reshape(strips, blocks, VALUE_BYTES)
    # rows: strip, w, r, g; columns: block, wgmma, half, pair of groups, which -> wgmma, thread, pair
    pairs = nibbles.view(strips, 4, 2, 8, blocks, 2, 2, 4, 2)
    words = (pairs[..., 0] | pairs[..., 1] << 4).permute(0, 4, 5, 1, 3, 6, 2, 7)
    packed[..., VALUE_BYTES:] = words.reshape(strips, blocks, BLOCK_BYTES - VALUE_BYTES)
    return packed.view(-1)


def pack_mixed(weight: Tensor, dense: Tensor) -> Tensor:
    """Pack a weight [N, K] of one-byte elements on any device into uint8, its blocks dense or 2:4 as ``dense`` says."""
    packed, (n, k) = allocate_mixed(dense), weight.shape
    strips, blocks = dense.shape
    codes = functional.pad(weight.view(torch.uint8), (0, blocks * BLOCK - k, 0, strips * STRIP - n))
    entries = packed[: 4 * dense.numel()].view(torch.int32).view(strips, blocks).tolist()
    for strip, row in enumerate(entries):
        for block, entry in enumerate(row):
            values = codes[STRIP * strip : STRIP * (strip + 1), BLOCK * block : BLOCK * (block + 1)]
            if entry % 2:
                values = values.reshape(8, 8, 4, 2, 16).permute(2, 0, 3, 1, 4).reshape(-1)
            else:
                values = pack(values.contiguous().view(weight.dtype))
            at = OFFSET_UNIT * (entry // 2)
            packed[at : at + values.numel()] = values
    return packed


def pack_coded(weight: Tensor, phase: int = 0) -> Tensor:
    """Code 6:8 weights [N, K] after ``phase`` zero columns: uint8 [strips * blocks * 6784]; -0.0 may be +0.0."""
    n, k = weight.shape
    require_pattern(weight, SIX_EIGHT, "weight", phase)
    strips, blocks = grid(n, SIX_EIGHT.layout(k, phase).padded)
    if not blocks * strips:
        return weight.new_empty(0, dtype=torch.uint8)
    right = blocks * BLOCK - phase - k
    codes = functional.pad(weight.view(torch.uint8), (phase, right, 0, strips * STRIP - n))
    groups = codes.view(strips * STRIP, blocks * BLOCK // 8, 8)
    zeros = ~nonzero(groups.view(weight.dtype))
    dropped = zeros & (zeros.cumsum(-1) <= 2)
    order = dropped.to(torch.uint8).argsort(dim=-1, stable=True)  # those that are kept, then the other two
    first, second = order[..., -2], order[..., -1]
    numbers = first * (15 - first) // 2 + second - first - 1
    # rows: strip, w, r, g; columns: block, half, wgmma, t -> strip, block, half, thread (w, g, t), wgmma, r
    eights, threads = (strips, 4, 2, 8, blocks, 2, 2, 4), (0, 4, 5, 1, 3, 7, 6, 2)
    values = groups.gather(-1, order[..., :6]).view(*eights, 6).permute(*threads, 8)
    values = torch.cat([values[..., :4].flatten(-2), values[..., 4:].flatten(-2)], -1)
    values = values.reshape(strips, blocks, 2, 128, 24)
    parts = [values[..., :16].flatten(-2), values[..., 16:].flatten(-2)]
    values = torch.cat(parts, -1).flatten(-2)
    numbers = numbers.view(eights).permute(0, 4, 1, 3, 7, 5, 6, 2).reshape(strips, blocks, 128, 8)
    words = (numbers << 5 * torch.arange(8, device=weight.device)).sum(-1)
    bytes_ = (words.unsqueeze(-1) >> 8 * torch.arange(5, device=weight.device) & 0xFF).to(torch.uint8)
    return torch.cat([values, bytes_[..., :4].flatten(-2), bytes_[..., 4]], -1).view(-1)


def _kept_columns(device: torch.device) -> Tensor:
    pairs = [_KEPT_COLUMNS.get(bits, (-1, -1)) for bits in range(16)]
    return torch.tensor(pairs, dtype=torch.int64, device=device)
