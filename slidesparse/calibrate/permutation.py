"""Permute the input channels of linear layers to reduce the loss of pruning, without changing the model's outputs.

Where only elementwise operations lie between two layers, the rows of the first and the columns of the second may be
permuted alike::

    rows of                   between           columns of
    gate, up                  act(gate) * up    down
    intermediate.dense        act               output.dense
    v, within a head          attention         o, within the query heads that share the values

Removing a weight w [n, k] and updating the others of its row costs about w^2 / [H^-1]_kk (see
`slidesparse.methods.sparsegpt`), and the two cheapest weights of each row and block are removed.  Rounds of swaps
reduce the total: each round takes one column out of every block, and swaps pairs of them where that lowers the cost.

During calibration the channels stay in place, because no sum and no scale depends on their order.  The orders are saved
with codes and scales, and `OrderedReader` applies them when the checkpoint is written.
"""

from __future__ import annotations

import threading

import torch
import torch.nn.functional as F  # noqa: N812  (its usual name)
from torch import Tensor

from slidesparse.calibrate.models import Block, DecoderBlock
from slidesparse.checkpoint.architectures import WEIGHT
from slidesparse.checkpoint.storage import Reader

ROUNDS = 64  # of swaps; three times as many reduce the cost by a tenth more
SAMPLED_OUTPUTS = 1024  # evenly spaced rows of a layer from which costs are estimated
MIN_GAIN = 1e-6  # relative to the cost of a block; smaller gains are rounding errors
ROWS, COLUMNS = ".rows", ".columns"  # suffixes of a layer's name: the order of its outputs, and of its inputs


def may_permute(block: Block, stage: int, length: int) -> bool:
    """Return whether the inputs of a stage may be permuted for blocks of ``length`` columns."""
    sizes = block.sizes
    if stage not in (1, 3) or (isinstance(block, DecoderBlock) and sizes.decoder.sub_norms[stage // 2]):
        return False
    # Heads that share an order must have their blocks in the same places
    return stage == 3 or sizes.heads == sizes.kv_heads or sizes.head_dim % length == 0


def find_order(block: Block, stage: int, w: Tensor, upper: Tensor, length: int) -> Tensor:
    """Return the order [K] of the columns in which to prune a layer of a stage that `may_permute`.

    The result is deterministic on the same machine.

    Args:
        w: weight [N, K] of the only layer of the stage.
        upper: [K, K], the `slidesparse.methods.sparsegpt.factor` of H.
        length: columns of a block of the pattern.
    """
    scores = (w.square() / upper.square().sum(0))[:: -(-len(w) // SAMPLED_OUTPUTS)]
    if stage == 3:
        return arrange_columns(scores, length, w.shape[1])
    sizes = block.sizes
    share, width = sizes.heads // sizes.kv_heads, sizes.head_dim
    heads = scores.unflatten(1, (sizes.kv_heads, share, width)).transpose(1, 2).flatten(2).flatten(0, 1)
    order = arrange_columns(heads, length, width).view(-1, 1, width) % width
    starts = torch.arange(sizes.heads, device=w.device) * width
    return (order + starts.view(-1, share, 1)).flatten()


def writer_layers(block: Block, stage: int) -> tuple[str, ...]:
    """Return the layers whose outputs are the inputs of the only layer of a stage."""
    return block.stages[2] if stage == 3 else block.stages[0][-1:]


def layer_orders(block: Block, stage: int, order: Tensor) -> dict[str, Tensor]:
    """Return the permutations of the block's layers that put a stage's inputs in ``order`` [K], by name and suffix."""
    (reader,) = block.stages[stage]
    orders = {reader + COLUMNS: order}
    if stage == 3:
        for name in writer_layers(block, stage):
            parts = len(block.weights[name + WEIGHT]) // len(order)  # 2 where gate and up are fused
            orders[name + ROWS] = torch.cat([order + i * len(order) for i in range(parts)])
        return orders
    (name,), sizes = writer_layers(block, stage), block.sizes
    share, width = sizes.heads // sizes.kv_heads, sizes.head_dim
    # v follows q and k where the three are fused
    first = len(block.weights[name + WEIGHT]) - sizes.kv_heads * width
    starts = torch.arange(sizes.kv_heads, device=order.device)[:, None] * width + first
    values = order.view(-1, share, width)[:, 0] % width + starts
    orders[name + ROWS] = torch.cat((torch.arange(first, device=order.device), values.flatten()))
    return orders


def arrange_columns(scores: Tensor, length: int, region: int) -> Tensor:
    """Return an order [K] of the columns that reduces the sum of the two smallest scores of each row and block.

    Args:
        scores: [N, K].
        length: columns of a block.
        region: width of the aligned groups of columns, such as heads, that columns do not leave.
    """
    columns, device = scores.shape[1], scores.device
    count = -(-columns // length)
    # Padding of the last block has cost zero, so that it counts as pruned
    by_column = F.pad(scores, (0, count * length - columns)).t().contiguous()
    places = torch.arange(count * length, device=device).view(count, length)
    regions = torch.where(places < columns, places // region, -1).flatten()
    totals, blocks = by_column.sum(1), torch.arange(count, device=device)
    generator = torch.Generator().manual_seed(0)
    for _ in range(ROUNDS):
        slots = torch.randint(length, (count,), generator=generator).to(device)
        removed = places[blocks, slots]
        remaining = places[(torch.arange(length, device=device) != slots[:, None])].view(count, length - 1)
        least = by_column[remaining[:, 0]]
        second = torch.full_like(least, torch.inf)
        for other in (by_column[remaining[:, i]] for i in range(1, length - 1)):
            second = torch.minimum(second, torch.maximum(least, other))
            least = torch.minimum(least, other)
        # [column, block]: sum over rows of the least, and of the smaller of the second and the column's score
        smaller = second.sum(1) + totals[removed][:, None] - torch.cdist(by_column[removed], second, p=1)
        costs = least.sum(1) + smaller / 2
        own, own_regions = costs.diagonal(), regions[removed]
        gains = own[:, None] + own - costs - costs.t()
        allowed = (own_regions[:, None] == own_regions) & (own_regions >= 0)
        gains = gains.masked_fill(~allowed, 0.0).fill_diagonal_(0.0)
        while True:
            gain, partner = gains.max(1)
            paired = (gain > MIN_GAIN * own) & (partner[partner] == blocks) & (blocks < partner)
            left = blocks[paired]
            if not len(left):
                break
            right = partner[left]
            places[left, slots[left]], places[right, slots[right]] = removed[right], removed[left]
            swapped = torch.cat((left, right))
            gains[swapped] = gains[:, swapped] = 0.0
    order = places.flatten()
    return order[order < columns]


class OrderedReader(Reader):
    """Reads the tensors of a model, with the rows and columns of its layers permuted by the orders in ``finished``."""

    def __init__(self, reader: Reader, finished: Reader) -> None:
        super().__init__(reader.checkpoint)
        self._reader = reader
        names = (name for name in finished.checkpoint.tensors if name.endswith((ROWS, COLUMNS)))
        self._orders = {name: finished.whole(name) for name in names}
        self._lock = threading.Lock()
        self._cache: dict[str, Tensor] = {}  # the last one or two weights read whose rows are permuted

    def rows(self, name: str, rows: slice) -> Tensor:
        """Read rows of a tensor as [rows, columns]."""
        layer = name.rpartition(".")[0]
        order, columns = self._orders.get(layer + ROWS), self._orders.get(layer + COLUMNS)
        if order is not None:
            return self._whole(name)[order[rows]]
        values = self._reader.rows(name, rows)
        return values if columns is None or not name.endswith(WEIGHT) else values[:, columns]

    def _whole(self, name: str) -> Tensor:
        """Read a tensor of which several threads need a few rows at a time, in the order of the layers."""
        if not name.endswith(WEIGHT):
            return self._read_whole(name)
        with self._lock:
            if name not in self._cache:
                for older in [*self._cache][:-1]:
                    del self._cache[older]  # free it before reading the next
                self._cache[name] = self._read_whole(name)
            return self._cache[name]

    def _read_whole(self, name: str) -> Tensor:
        return self._reader.rows(name, slice(0, self.checkpoint.require(name).rows))
