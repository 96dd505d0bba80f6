"""Measure how pruning changes a model's outputs: each layer alone before pruning, and the whole model afterwards.

The loss of pruning a single layer is the KL divergence of the next-token distributions from the dense model's, in nats
per token, or for an encoder 1 - cosine similarity of the embeddings.  Both are zero for the dense model and never
negative; the change in cross-entropy itself would be lost in the noise of so few tokens.  The loss of the whole model
is measured on held-out samples of each kind of text, against the dense model with the same quantization: the difference
in cross-entropy, or again 1 - cosine.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812  (its usual name)
from torch import Tensor

from slidesparse.calibrate.experts import expert_pruners, groups_to_prune
from slidesparse.calibrate.finetune import InputRounder
from slidesparse.calibrate.graphs import recordings
from slidesparse.calibrate.inputs import free_bytes, gather_hessian
from slidesparse.calibrate.model import Block, Ends, Model, fast_products
from slidesparse.calibrate.pipeline import (
    BlockRun,
    is_finished,
    quantize_skipped,
    restore_block,
    run_blocks,
)
from slidesparse.calibrate.resume import WorkFolder
from slidesparse.calibrate.samples import Samples
from slidesparse.calibrate.sparsegpt import pruner
from slidesparse.calibrate.task import Task
from slidesparse.checkpoint.names import WEIGHT
from slidesparse.checkpoint.storage import Reader
from slidesparse.errors import CalibrationError
from slidesparse.pattern import SlidePattern
from slidesparse.progress import Progress
from slidesparse.quantize import NAMES, dequantize_rows, quantize_rows

LOSS_TOKENS = {"cpu": 4096, "cuda": 16384}  # tokens to measure a layer's loss on; at least one batch
LOGITS_PER_CHUNK = 2**25  # logits computed at a time
CACHE_PART = {"cpu": 4, "cuda": 2}  # cached blocks may take 1 / CACHE_PART of the free memory
POOLING = "1_Pooling/config.json"  # of sentence-transformers
FIRST_TOKEN = "pooling_mode_cls_token"

# Linear layers that share an input, or the experts whose weights are one tensor in vLLM; they have one pattern
LayerGroup = tuple[str, ...]


class GroupLoss(NamedTuple):
    """The loss of pruning a group alone, by pattern, and of experts the share of tokens that is routed to each."""

    by_pattern: dict[str, float]
    shares: Sequence[float] = (1.0,)


Losses = dict[LayerGroup, GroupLoss]


def layer_groups(task: Task, number: int | None = None) -> list[LayerGroup]:
    """Return the groups of the layers of a task, or of its block ``number``, in order of execution."""
    model, groups = task.model, list[LayerGroup]()
    for i in range(model.blocks) if number is None else (number,):
        linears = (tuple(model.skeleton.layer(i, name) for name in group) for group in model.groups(i))
        pruned = (tuple(name for name in group if name in task.layers) for group in linears)
        groups += [*filter(None, pruned), *groups_to_prune(task, i).values()]
    return groups


@torch.inference_mode()
@recordings()
def layer_losses(
    task: Task,
    patterns: Sequence[SlidePattern],
    reader: Reader,
    known: Losses,
    save: Callable[[Losses], None],
    progress: Progress,
) -> Losses:
    """Measure the loss of each layer group at each of ``patterns``: prune it alone, and compare the model's outputs.

    The patterns of ``task.layers`` are not used.  The result is deterministic on the same machine.

    Args:
        known: losses that are not measured again.
        save: called with all losses after each block.
    """
    groups = layer_groups(task)
    losses = {group: known[group] for group in groups if group in known}
    if len(losses) == len(groups):
        return losses
    criterion = Criterion(task.model, task.model.ends(reader))
    room, kept = free_bytes(task.device) // CACHE_PART[task.device.type], dict[int, Block]()

    def load(number: int) -> Block:
        """Return a block of the dense model, which is kept if there is room."""
        block = kept.get(number) or task.model.load(reader, number)
        if sum(x.nbytes for x in {block, *kept.values()}) <= room:
            kept[number] = block
        return block

    for run in run_blocks(task, reader, "measuring", progress):
        if not all(group in losses for group in layer_groups(task, run.number)):
            losses |= _measure(run, patterns, criterion, load)
            save(losses)
        kept.pop(run.number, None)
    return {group: losses[group] for group in groups}


def _measure(
    run: BlockRun, patterns: Sequence[SlidePattern], criterion: Criterion, load: Callable[[int], Block]
) -> Losses:
    """Return the losses of the layer groups of a block; ``load`` returns the dense model's others."""
    options: dict[tuple[LayerGroup, str], dict[str, Tensor]] = {((), ""): {}}  # the first is the dense model
    for group in run.block.groups:
        if not (weights := run.weights_to_prune(group)):
            continue
        hessian = gather_hessian(run.pruned, group[0])
        prune = pruner(hessian.matrix, 0, run.task.ternary)
        stacked, sizes = torch.cat([*weights.values()]), [len(w) for w in weights.values()]
        for pattern in patterns:
            parts = prune(stacked, pattern).split(sizes)
            options[tuple(map(run.full_name, weights)), pattern.ratio] = {
                name + WEIGHT: w for name, w in zip(weights, parts, strict=True)
            }
    shares, tokens = dict[LayerGroup, list[float]](), sum(ids.numel() for ids in run.ids)
    for parameter, names in groups_to_prune(run.task, run.number).items():
        joined = run.block.weights[parameter]
        copies, shares[names] = [joined.clone() for _ in patterns], []
        for number, (own, _, prune_expert) in enumerate(expert_pruners(run.pruned, joined, 0)):
            shares[names].append(own.tokens / tokens)
            for pattern, copy in zip(patterns, copies, strict=True):
                copy[number] = prune_expert(joined[number], pattern)
        options |= {
            (names, pattern.ratio): {parameter: w} for pattern, w in zip(patterns, copies, strict=True)
        }
    # Evenly spaced batches, which are sorted by the length of samples
    chosen = range(0, len(run.ids), -(-tokens // LOSS_TOKENS[run.task.device.type]))
    states: dict[tuple[LayerGroup, str], list[Tensor]] = {}
    with fast_products(run.task.device):
        for option, changed in options.items():
            block = run.block.copy()
            block.weights |= changed
            states[option] = [block.output(run.pruned.states[i]) for i in chosen]
        for number in range(run.number + 1, run.task.model.blocks):
            block = load(number)
            for outputs in states.values():
                outputs[:] = [block.output(x) for x in outputs]
    (_, dense), *others = states.items()
    totals = [0.0] * len(others)
    for i, x in enumerate(dense):
        for number, lost in enumerate(criterion.distances(x, [outputs[i] for _, outputs in others])):
            totals[number] += lost
    count = sum(criterion.count(x) for x in dense)
    losses: Losses = {}
    for ((group, ratio), _), total in zip(others, totals, strict=True):
        if not math.isfinite(total):
            raise CalibrationError(
                f"the loss of {group[0]} at {ratio} is not finite (NaN or Inf): the model overflows on these samples"
            )
        losses.setdefault(group, GroupLoss({}, shares.get(group, (1.0,)))).by_pattern[ratio] = total / count
    return losses


class Criterion:
    """Compares models by the outputs of their last block, [batch, tokens, hidden]."""

    def __init__(self, model: Model, ends: Ends) -> None:
        self._logits = ends.logits if model.skeleton.generates else None
        self._vocabulary = model.vocabulary
        # An embedding of sentence-transformers is the output of the first token, or the mean
        path = model.checkpoint.folder / POOLING
        first = path.is_file() and bool(json.loads(path.read_bytes()).get(FIRST_TOKEN))
        self._pool: Callable[[Tensor], Tensor] = (lambda x: x[:, 0]) if first else (lambda x: x.mean(1))

    def count(self, x: Tensor) -> int:
        """Return the number of tokens, or of embeddings, in ``x``."""
        return x.shape[0] * (x.shape[1] if self._logits else 1)

    def distances(self, dense: Tensor, others: Sequence[Tensor]) -> list[float]:
        """Return the divergence of each of ``others`` from ``dense``, summed over `count`."""
        if self._logits is None:
            pooled = self._pool(dense)
            return [float((1 - F.cosine_similarity(pooled, self._pool(x))).sum()) for x in others]
        totals = [0.0] * len(others)
        size = max(1, LOGITS_PER_CHUNK // self._vocabulary)
        for pieces in zip(*(x.flatten(0, 1).split(size) for x in (dense, *others)), strict=True):
            expected = self._logits(pieces[0]).log_softmax(-1)
            for number, piece in enumerate(pieces[1:]):
                predicted = self._logits(piece).log_softmax(-1)
                divergence = F.kl_div(predicted, expected, reduction="sum", log_target=True)
                totals[number] += float(divergence.double())
        return totals

    def loss(self, dense: Tensor, x: Tensor, ids: Tensor) -> float:
        """Return the loss of ``x`` minus that of ``dense``, summed over `count`; ``ids`` are [batch, tokens]."""
        if self._logits is None:
            return self.distances(dense, [x])[0]
        return self._entropy(x, ids) - self._entropy(dense, ids)

    def _entropy(self, x: Tensor, ids: Tensor) -> float:
        """Return the mean next-token cross-entropy in nats, times `count`."""
        assert self._logits
        total = 0.0
        rows, targets = x[:, :-1].flatten(0, 1), ids[:, 1:].flatten().to(x.device)
        size = max(1, LOGITS_PER_CHUNK // self._vocabulary)
        for piece, tokens in zip(rows.split(size), targets.split(size), strict=True):
            total += float(F.cross_entropy(self._logits(piece), tokens, reduction="sum").double())
        return total / len(targets) * self.count(x)


@torch.inference_mode()
def whole_loss(task: Task, samples: Samples, reader: Reader, work: WorkFolder, progress: Progress) -> float:
    """Return the loss of the pruned model in ``work`` minus the dense model's, on ``samples``.

    Both models run as they will be served, with weights and activations quantized, but for the inputs of experts.  The
    loss is cross-entropy in nats per token, or 1 - cosine.
    """
    held = replace(task, samples=samples)
    dtype, criterion, total, count = NAMES[task.quant], Criterion(task.model, task.model.ends(reader)), 0.0, 0
    for run in run_blocks(held, reader, "judging", progress, 2, to_the_end=True):
        assert run.dense
        for stream in (run.pruned, run.dense):
            stream.block.read = InputRounder(dtype, task.quantized(run.number))
        dense = run.dense.block
        weights = ((name, quantize_rows(run.weight(dense, name), dtype, "cuda")) for name in run.places)
        run.replace(dense, ((name, dequantize_rows(*parts)) for name, parts in weights))
        quantize_skipped(run)
        if is_finished(task, work, run.number):
            restore_block(run, work)
    assert run.dense
    with fast_products(task.device):
        for i, ids in enumerate(run.ids):
            x = run.pruned.states[i]
            total += criterion.loss(run.dense.states[i], x, ids)
            count += criterion.count(x)
    return total / count


def perplexity_change(nats: float) -> float:
    """Return the relative change in perplexity, possibly infinite, for one in cross-entropy."""
    try:
        return math.expm1(nats)
    except OverflowError:
        return math.inf
