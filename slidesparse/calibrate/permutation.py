"""Permute the input channels of linear layers to reduce the loss of pruning, without changing the model's outputs.

Where only elementwise operations lie between two layers, the rows of the first and the columns of the second may be
permuted alike (`slidesparse.calibrate.roles` finds out where)::

    rows of                   between           columns of
    gate, up                  act(gate) * up    down
    intermediate.dense        act               output.dense
    v, within a head          attention         o, within the query heads that share the values

Removing a weight w [n, k] and updating the others of its row costs about w^2 / [H^-1]_kk (see
`slidesparse.calibrate.sparsegpt`), and the two cheapest weights of each row and block are removed.  Rounds of swaps
reduce the total: each round takes one column out of every block, and swaps pairs of them where that lowers the cost.

During calibration the channels stay in place, because no sum and no scale depends on their order.  The orders are saved
with codes and scales, and `ordered_reader` applies them when the checkpoint is written.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812  (its usual name)
from torch import Tensor

from slidesparse.calibrate.changes import ChangedReader
from slidesparse.calibrate.graphs import recorded
from slidesparse.calibrate.roles import COLUMNS, ROWS, Pair, permutations
from slidesparse.checkpoint.storage import Reader

ROUNDS = 64  # of swaps; three times as many reduce the cost by a tenth more
PASSES = 12  # of a round: each swaps the blocks that are each other's best partners
SAMPLED_OUTPUTS = 1024  # evenly spaced rows of a layer from which costs are estimated
MIN_GAIN = 1e-6  # relative to the cost of a block; smaller gains are rounding errors


def may_permute(pair: Pair, length: int) -> bool:
    """Return whether the inputs of a pair's reader may be permuted for blocks of ``length`` columns.

    Heads that share an order must have their blocks in the same places.
    """
    return pair.heads == pair.kv_heads or pair.width % length == 0


def find_order(pair: Pair, w: Tensor, upper: Tensor, length: int) -> Tensor:
    """Return the order [K] of the columns in which to prune the reader of a pair that `may_permute`.

    The result is deterministic on the same machine.

    Args:
        w: weight [N, K] of the reader.
        upper: [K, K], the `slidesparse.calibrate.sparsegpt.factor` of H.
        length: columns of a block of the pattern.
    """
    scores = (w.square() / upper.square().sum(0))[:: -(-len(w) // SAMPLED_OUTPUTS)]
    share, width = pair.heads // pair.kv_heads, pair.width
    heads = scores.unflatten(1, (pair.kv_heads, share, width)).transpose(1, 2).flatten(2).flatten(0, 1)
    order = arrange_columns(heads, length, width).view(-1, 1, width) % width
    starts = torch.arange(pair.heads, device=w.device) * width
    return (order + starts.view(-1, share, 1)).flatten()


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
    generator = torch.Generator().manual_seed(0)
    slots = torch.randint(length, (ROUNDS, count), generator=generator).to(device)
    order = recorded(_swapped, by_column, slots, length, region, columns)
    return order[order < columns]


def _swapped(by_column: Tensor, slots: Tensor, length: int, region: int, columns: int) -> Tensor:
    """Return the order of `arrange_columns`, after a round for each row of ``slots`` [rounds, blocks].

    Args:
        by_column: [blocks * length, N], scores of all columns.
        slots: the place in each block whose column may be swapped.
    """
    count, device = slots.shape[1], slots.device
    places = torch.arange(count * length, device=device).view(count, length)
    regions = torch.where(places < columns, places // region, -1).flatten()
    totals, blocks = by_column.sum(1), torch.arange(count, device=device)
    others = torch.arange(length - 1, device=device)
    for slot in slots[:, :, None]:
        removed = places.gather(1, slot).squeeze(1)
        remaining = places.gather(1, others + (others >= slot))
        least = by_column[remaining[:, 0]]
        second = torch.full_like(least, torch.inf)
        for other in (by_column[remaining[:, i]] for i in range(1, length - 1)):
            second = torch.minimum(second, torch.maximum(least, other))
            least = torch.minimum(least, other)
        # [column, block]: sum over rows of the least, and of the smaller of the second and the column's score
        smaller = second.sum(1) + totals[removed][:, None] - torch.cdist(by_column[removed], second, p=1)
        costs = least.sum(1) + smaller / 2
        own, own_regions = costs.diagonal(), regions[removed]
        saved = own[:, None] - costs
        gains = saved + saved.t()  # symmetric to the last bit, or one block of a pair would swap alone
        allowed = (own_regions[:, None] == own_regions) & (own_regions >= 0)
        gains = gains.masked_fill(~allowed, 0.0).fill_diagonal_(0.0)
        for _ in range(PASSES):
            gain, partner = gains.max(1)
            paired = (gain > MIN_GAIN * own[torch.minimum(blocks, partner)]) & (partner[partner] == blocks)
            removed = torch.where(paired, removed[partner], removed)
            gains = gains.masked_fill(paired | paired[:, None], 0.0)
        places = places.scatter(1, slot, removed[:, None])
    return places.flatten()


def ordered_reader(reader: Reader, finished: Reader) -> ChangedReader:
    """Return a reader of a model with the rows and columns of its layers permuted by the orders in ``finished``."""
    orders = {}
    for name in finished.checkpoint.tensors:
        if name.endswith((ROWS, COLUMNS)):
            layer, _, kind = name.rpartition(".")
            orders[layer, f".{kind}"] = finished.whole(name)
    return ChangedReader(reader, permutations(orders))
