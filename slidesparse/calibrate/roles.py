"""Find out what the layers of a block do, by running it.

Weights may be rotated, permuted and scaled where that leaves the model's outputs as they are.  Where that is, is not
listed by architecture: each role below is guessed from the shapes of layers and then tried on the block, with random
changes of its weights, and holds if the results stay the same::

    pair      the rows of `writers` and the columns of `reader` may be permuted alike: nothing but elementwise
              operations, or attention within a head, lies between them
    scaled    the rows of one writer may be divided, and the columns of the reader multiplied, by the same factors
    residual  the block reads the residual stream through norms without a bias, and adds to it what `writers` return,
              so that it commutes with a rotation of the stream

A wrong guess changes results by about as much as they are; a right one by rounding errors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from slidesparse.calibrate.changes import Change, Changes, add_change, changed
from slidesparse.calibrate.model import Block, Model, reading
from slidesparse.checkpoint.names import BIAS, SCALE, WEIGHT
from slidesparse.checkpoint.storage import Reader

SAME = 1e-2  # relative difference of results that still are the same: products on a GPU may round to TF32
TOKENS = 16
ROWS, COLUMNS = ".rows", ".columns"  # suffixes of a layer's name: the order of its outputs, and of its inputs


@dataclass(frozen=True)
class Pair:
    """Layers whose channels between them may be permuted.

    A column of the reader belongs to one of ``heads`` of ``width`` channels; the heads that share a group of rows of
    the writer, heads / kv_heads of them, are permuted alike.  In an MLP, all columns are one head.
    """

    reader: str
    writers: tuple[str, ...]
    heads: int
    kv_heads: int
    width: int
    first: int = 0  # the first row that the reader's columns come from; where q, k and v are fused, that of v
    copies: int = 1  # how often the rows are repeated: twice where gate and up are fused
    scaled: tuple[str, int] | None = None  # the writer whose rows may be scaled, and the first of these rows

    @property
    def is_attention(self) -> bool:
        """Whether attention lies between the layers."""
        return self.heads > 1

    def rows(self, order: Tensor, count: int) -> Tensor:
        """Return the permutation of a writer's ``count`` rows for an ``order`` [K] of the reader's columns."""
        share = self.heads // self.kv_heads
        inner = order.view(-1, share, self.width)[:, 0] % self.width
        starts = torch.arange(self.kv_heads, device=order.device)[:, None] * self.width + self.first
        rows = (inner + starts).flatten()
        rows = torch.cat([rows + i * len(rows) for i in range(self.copies)])
        before = torch.arange(self.first, device=order.device)
        after = torch.arange(self.first + len(rows), count, device=order.device)
        return torch.cat((before, rows, after))


@dataclass(frozen=True)
class Residual:
    """How a block, or the ends of a model, read the residual stream and add to it."""

    norms: Mapping[str, tuple[str, ...]]  # norm -> the linear layers that read it
    unit: float  # the weight of a norm without effect: 1, or 0 where one is added to it
    writers: tuple[str, ...] = ()
    embedding: str = ""  # of the ends: rows of its weight enter the stream

    def norm_before(self, layer: str) -> str | None:
        """Return the norm that a layer reads, or None."""
        return next((norm for norm, readers in self.norms.items() if layer in readers), None)


@dataclass(frozen=True)
class Roles:
    """The roles of a block's layers."""

    pairs: tuple[Pair, ...]
    residual: Residual | None  # None if the block does not commute with rotations

    def pair(self, reader: str) -> Pair | None:
        """Return the pair with this reader, or None."""
        return next((pair for pair in self.pairs if pair.reader == reader), None)


def find_roles(block: Block) -> Roles:
    """Return the roles of a block's layers; found once for all blocks of the same structure."""
    known: dict[str, Roles] = block.model.roles
    structure = block.model.structure(block.number)
    if structure not in known:
        with torch.inference_mode(False), torch.no_grad():
            generator = torch.Generator().manual_seed(0)
            x = torch.randn(1, TOKENS, block.model.hidden, generator=generator).to(block.model.device)
            pairs = filter(None, (_find_pair(block, group, x) for group in block.groups if len(group) == 1))
            known[structure] = Roles(tuple(pairs), _find_residual(block, x))
    return known[structure]


def roles_of(model: Model, reader: Reader) -> list[Roles]:
    """Return the roles in each block of a model; a block of each structure is read and run."""
    structures = [model.structure(number) for number in range(model.blocks)]
    for number, structure in enumerate(structures):
        if structure not in model.roles:
            find_roles(model.load(reader, number))
    return [model.roles[structure] for structure in structures]


# Pairs


def _find_pair(block: Block, group: tuple[str, ...], x: Tensor) -> Pair | None:
    """Return the pair whose reader is the only layer of ``group``, or None."""
    (reader,) = group
    for pair in _guess_pairs(block, reader):
        orders = layer_orders(block, pair, random_order(pair, block.model.device))
        if _equivalent(_changed(block, permutations(orders)), block, reader, x):
            return replace(pair, scaled=_find_scaled(block, pair, x))
    return None


def _guess_pairs(block: Block, reader: str) -> Iterator[Pair]:
    """Yield possible pairs, those with the groups right before the reader first."""
    columns = block.weights[reader + WEIGHT].shape[1]
    config, parent = block.model.skeleton.text_config, reader.rpartition(".")[0]
    heads = getattr(config, "num_attention_heads", 0) or 0
    shared = getattr(config, "num_key_value_heads", None) or heads
    before = block.groups[: next(i for i, group in enumerate(block.groups) if reader in group)]
    for group in reversed(before):
        rows = {name: len(block.weights[name + WEIGHT]) for name in group}
        beside = tuple(name for name in group if name.rpartition(".")[0] == parent)
        for writers in filter(None, dict.fromkeys((group, beside, *((name,) for name in group)))):
            for copies in (1, 2):
                if all(rows[name] == copies * columns for name in writers):
                    yield Pair(reader, writers, 1, 1, columns, copies=copies)
        if not isinstance(heads, int) or heads < 2 or columns % heads:
            continue
        width = columns // heads
        for name, count in rows.items():
            for kv_heads in dict.fromkeys((shared, heads)):
                if isinstance(kv_heads, int) and count >= kv_heads * width and heads % kv_heads == 0:
                    yield Pair(reader, (name,), heads, kv_heads, width, first=count - kv_heads * width)


def random_order(pair: Pair, device: torch.device) -> Tensor:
    """Return an order of the reader's columns that the pair allows."""
    generator = torch.Generator().manual_seed(0)
    share = pair.heads // pair.kv_heads
    inner = torch.stack([torch.randperm(pair.width, generator=generator) for _ in range(pair.kv_heads)])
    starts = torch.arange(pair.heads).view(pair.kv_heads, share, 1) * pair.width
    return (inner[:, None] + starts).flatten().to(device)


def layer_orders(block: Block, pair: Pair, order: Tensor) -> dict[tuple[str, str], Tensor]:
    """Return the permutations that put the columns of a pair's reader in ``order`` [K], by layer and suffix."""
    orders = {(pair.reader, COLUMNS): order}
    for name in pair.writers:
        orders[name, ROWS] = pair.rows(order, len(block.weights[name + WEIGHT]))
    return orders


def permutations(orders: Mapping[tuple[str, str], Tensor]) -> Changes:
    """Return the changes that permute layers by ``orders``, those of `layer_orders`."""
    changes: Changes = {}
    for (layer, kind), order in orders.items():
        if kind == COLUMNS:
            add_change(changes, layer + WEIGHT, lambda w, _, order=order: w[:, order])  # type: ignore[misc]
        else:
            for full in (layer + suffix for suffix in (WEIGHT, BIAS, SCALE)):
                add_change(changes, full, lambda w, _, order=order: w[order], mixes_rows=True)  # type: ignore[misc]
    return changes


def _find_scaled(block: Block, pair: Pair, x: Tensor) -> tuple[str, int] | None:
    """Return the writer whose rows may be scaled with the reader's columns, and the first of these rows, or None."""
    if pair.is_attention:
        return None
    factors = torch.rand(pair.width, generator=torch.Generator().manual_seed(1)).to(x.device) + 0.5
    for writer in reversed(pair.writers):
        for first in reversed(range(0, pair.copies * pair.width, pair.width)):
            found = writer, first
            changes = scalings(replace(pair, scaled=found), factors, len(block.weights[writer + WEIGHT]))
            if _equivalent(_changed(block, changes), block, pair.reader, x):
                return found
    return None


def scalings(pair: Pair, factors: Tensor, count: int) -> Changes:
    """Return the changes that multiply the columns of a pair's reader by ``factors`` [K], and divide rows of a writer.

    The writer is that of ``pair.scaled``, and has ``count`` rows.
    """
    assert pair.scaled
    writer, first = pair.scaled
    by_row = factors.new_ones(count)
    by_row[first : first + len(factors)] = factors

    def divide(w: Tensor, rows: slice) -> Tensor:
        return w / by_row[rows].reshape(-1, *(1,) * (w.dim() - 1))

    multiply = Change(lambda w, _: w * factors)
    return {pair.reader + WEIGHT: multiply, writer + WEIGHT: Change(divide), writer + BIAS: Change(divide)}


def _changed(block: Block, changes: Changes) -> Block:
    """Return the block with its weights changed."""
    copy = block.copy()
    copy.weights = changed(block.weights, changes)
    return copy


def _equivalent(other: Block, block: Block, layer: str, x: Tensor) -> bool:
    """Return whether two blocks agree in the output of a linear layer, before its bias, and in what they add to x."""
    outputs = [nn.functional.linear(b.input(layer, x), b.weights[layer + WEIGHT]) for b in (other, block)]
    return same(*outputs) and same(other.output(x) - x, block.output(x) - x)


def same(a: Tensor, b: Tensor) -> bool:
    """Return whether two results are equal but for rounding errors."""
    return bool((a - b).norm() <= SAME * b.norm())


# The residual stream


def _find_residual(block: Block, x: Tensor) -> Residual | None:
    """Return how the block uses the residual stream, or None if it does not commute with a rotation."""
    residual = find_norms(block.model, block.module, block.linears, lambda: block.output(x))
    if residual is None:
        return None
    rows = {name: len(block.weights[name + WEIGHT]) for name in block.linears}
    writers = tuple(
        name for name in rows if rows[name] == block.model.hidden and not residual.norm_before(name)
    )
    if not writers:
        return None
    residual = replace(residual, writers=writers)
    q = hadamard(block.model.hidden, x.device)
    turned, rotated = _changed(block, rotations(residual, block.weights, q)), x @ q.float()
    commutes = same(turned.output(rotated) - rotated, (block.output(x) - x) @ q.float())
    return residual if commutes else None


def find_norms(
    model: Model, module: nn.Module, layers: Iterable[str], run: Callable[[], object]
) -> Residual | None:
    """Return which norms of a module the ``layers`` read when it is run; None if there is none like RMSNorm."""
    norms = {
        name: norm
        for name, norm in module.named_modules()
        if {n: tuple(p.shape) for n, p in norm.named_parameters()} == {"weight": (model.hidden,)}
    }
    outputs: dict[tuple[int, int], str] = {}  # by address and width
    found: dict[str, tuple[str, ...]] = {}
    kept: list[Tensor] = []  # so that no two have the same address

    def wrote(name: str, out: Any) -> None:
        if isinstance(out, Tensor):
            kept.append(out)
            outputs[out.data_ptr(), out.shape[-1]] = name

    def read(name: str, x: Tensor) -> None:
        if (norm := outputs.get((x.data_ptr(), x.shape[-1]))) is not None:
            found[norm] = (*found.get(norm, ()), name)

    with ExitStack() as stack:
        for name, norm in norms.items():
            hook = norm.register_forward_hook(lambda _, args, out, name=name: wrote(name, out))
            stack.callback(hook.remove)
        stack.enter_context(reading(module, layers, read))
        run()
    unit = _unit_of(norms[next(iter(found))], model) if found else None
    return None if unit is None else Residual(found, unit)


def _unit_of(norm: nn.Module, model: Model) -> float | None:
    """Return the weight with which a norm is RMSNorm without a weight, or None if it is not for 1 or 0."""
    x = torch.randn(TOKENS, model.hidden, generator=torch.Generator().manual_seed(2)).to(model.device)
    expected = x * torch.rsqrt(x.square().mean(-1, keepdim=True))
    for unit in (1.0, 0.0):
        y = torch.func.functional_call(norm, {"weight": torch.full_like(x[0], unit)}, (x,))
        if same(y, expected):
            return unit
    return None


def hadamard(size: int, device: torch.device) -> Tensor:
    """Return an orthogonal matrix [size, size] in float64 that mixes all inputs.

    It is the Kronecker product of the Hadamard matrix of the largest power of two that divides ``size`` and a random
    orthogonal matrix, with random signs of its rows.
    """
    generator = torch.Generator().manual_seed(0)
    odd = size // (size & -size)
    matrix: Tensor = torch.linalg.qr(torch.randn(odd, odd, dtype=torch.float64, generator=generator)).Q
    while len(matrix) < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1))) / math.sqrt(2)
    signs = torch.randint(2, (size, 1), generator=generator) * 2 - 1
    return (matrix * signs).to(device)


def rotations(
    residual: Residual,
    weights: Mapping[str, Tensor],
    q: Tensor | None,
    pair: Pair | None = None,
    r: Tensor | None = None,
) -> Changes:
    """Return the changes of tensors that fold norms and rotate a block, or the ends of a model, by their names there.

    See `slidesparse.calibrate.rotation`.  The changes take and return float64.

    Args:
        weights: the tensors; only those of norms are read.
        q: [hidden, hidden] float64; None to fold norms only.
        pair: the layers whose heads are rotated by ``r`` [kv_heads, width, width] float64.
    """
    changes: Changes = {}
    for norm, readers in residual.norms.items():
        gain = weights[norm + WEIGHT].double() + (1 - residual.unit)
        add_change(changes, norm + WEIGHT, lambda w, _: torch.full_like(w, residual.unit))
        for name in readers:
            add_change(changes, name + WEIGHT, partial(_fold, gain, q))
    if pair and r is not None:
        for name in (pair.writers[0] + WEIGHT, pair.writers[0] + BIAS):
            add_change(changes, name, partial(rotate_rows, r), mixes_rows=True)
        heads = r.repeat_interleave(pair.heads // pair.kv_heads, 0)
        add_change(changes, pair.reader + WEIGHT, partial(rotate_columns, heads))
    if q is not None:
        for name in residual.writers:
            for full in (name + WEIGHT, name + BIAS):
                add_change(changes, full, lambda w, _: q.mT @ w, mixes_rows=True)
        if residual.embedding:
            add_change(changes, residual.embedding + WEIGHT, lambda w, _: w @ q)
    return {name: change for name, change in changes.items() if name in weights}


def _fold(gain: Tensor, q: Tensor | None, w: Tensor, _: slice) -> Tensor:
    """Return rows w [n, hidden] of a weight that reads a norm with ``gain`` [hidden], with the norm folded, rotated."""
    return w * gain if q is None else (w * gain) @ q


def rotate_rows(r: Tensor, w: Tensor, _: slice | None = None) -> Tensor:
    """Return R^T w for w [..., N, K] or [N] and block-diagonal R, whose blocks are ``r`` [..., heads, width, width]."""
    rotated: Tensor = r.mT @ w.reshape(*r.shape[:-1], -1)
    return rotated.view_as(w)


def rotate_columns(r: Tensor, w: Tensor, _: slice | None = None) -> Tensor:
    """Return w R for w [..., N, K] and block-diagonal R, whose blocks are ``r`` [..., heads, width, width]."""
    return torch.einsum("...nha,...hab->...nhb", w.unflatten(-1, (r.shape[-3], -1)), r).flatten(-2)
