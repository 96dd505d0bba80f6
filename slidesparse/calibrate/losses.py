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

from slidesparse.calibrate.finetune import InputRounder
from slidesparse.calibrate.graphs import recordings
from slidesparse.calibrate.inputs import free_bytes
from slidesparse.calibrate.model import Block, Ends, LayerGroup, Model, fast_products
from slidesparse.calibrate.pipeline import (
    BlockRun,
    is_finished,
    quantize_skipped,
    restore_block,
    run_blocks,
)
from slidesparse.calibrate.resume import WorkFolder
from slidesparse.calibrate.samples import Samples
from slidesparse.calibrate.task import Task
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


class GroupLoss(NamedTuple):
    """The loss of pruning a group alone, by pattern, and of experts the share of tokens that is routed to each."""

    by_pattern: dict[str, float]
    shares: Sequence[float] = (1.0,)


Losses = dict[LayerGroup, GroupLoss]


def layer_groups(task: Task) -> list[LayerGroup]:
    """Return the groups of the layers of a task, in order of execution."""
    return [group for number in range(task.model.blocks) for group in task.groups(number)]


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
        if not all(group in losses for group in task.groups(run.number)):
            losses |= _measure(run, patterns, criterion, load)
            save(losses)
        kept.pop(run.number, None)
    return {group: losses[group] for group in groups}


def _measure(
    run: BlockRun, patterns: Sequence[SlidePattern], criterion: Criterion, load: Callable[[int], Block]
) -> Losses:
    """Return the losses of the layer groups of a block; ``load`` returns the dense model's others."""
    options: dict[tuple[LayerGroup, str], dict[str, Tensor]] = {((), ""): {}}  # the first is the dense model
    shares, tokens = dict[LayerGroup, list[float]](), sum(ids.numel() for ids in run.ids)
    for group in run.task.groups(run.number):
        for inputs in run.inputs(group):
            if run.places[group[0]].number is not None:
                shares.setdefault(group, []).append(inputs.own.tokens / tokens)
            names, weights = zip(*inputs.weights.items(), strict=True)
            prune = inputs.pruner(0, run.task.ternary)
            for pattern in patterns:
                parts = prune(torch.cat(weights), pattern).split([len(w) for w in weights])
                options.setdefault((group, pattern.ratio), {}).update(zip(names, parts, strict=True))
    # Evenly spaced batches, which are sorted by the length of samples
    chosen = range(0, len(run.ids), -(-tokens // LOSS_TOKENS[run.task.device.type]))
    states: dict[tuple[LayerGroup, str], list[Tensor]] = {}
    with fast_products(run.task.device):
        for option, changed in options.items():
            block = run.block.copy()
            run.replace(block, changed.items())
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
