"""Prune and quantize a model block by block, on the outputs of the blocks already pruned.

For each stage of a transformer block (see `slidesparse.calibrate.models`): run the samples up to the stage's inputs,
compute H from them, prune and quantize the stage's linear layers, and replace their weights by the dequantized ones, so
that the next stage sees the activations of serving.  The dense model may run on the same samples in parallel, also a
block at a time.  Its outputs are the targets of pruning, and of fine-tuning whole blocks afterwards (see
`slidesparse.calibrate.finetune`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slidesparse.blocks import obeys
from slidesparse.calibrate.finetune import Finetuned, finetune
from slidesparse.calibrate.inputs import (
    BlockInputs,
    Hessian,
    HiddenStates,
    gather_statistics,
    may_keep,
    output_error,
)
from slidesparse.calibrate.models import Block
from slidesparse.calibrate.permutation import find_order, layer_orders, may_permute, writer_layers
from slidesparse.calibrate.resume import WorkFolder
from slidesparse.calibrate.task import Progress, Task
from slidesparse.checkpoint.architectures import SCALE, WEIGHT
from slidesparse.checkpoint.storage import DTYPES, Reader
from slidesparse.errors import CalibrationError
from slidesparse.methods.sparsegpt import compensated_target, damping_for, factor
from slidesparse.pattern import MixedPattern, SlidePattern
from slidesparse.quantize import NAMES, dequantize_rows, quantize_rows

BATCH_TOKENS = {"cpu": 2048, "cuda": 16384}


@dataclass(frozen=True)
class Position:
    """The current block of a walk through the model."""

    task: Task
    number: int
    inputs: BlockInputs  # of the pruned model
    dense: BlockInputs | None  # of the dense model on the same samples, if it runs
    ids: Sequence[Tensor]  # [batch, tokens] of each batch

    @property
    def block(self) -> Block:
        """The block, whose weights are replaced by the dequantized ones."""
        return self.inputs.block

    @property
    def names(self) -> list[str]:
        """The names within the block of all its linear layers, in order of stages."""
        return [name for stage in self.block.stages for name in stage]

    def full_name(self, name: str) -> str:
        """Return the checkpoint's name of a linear layer of the block."""
        return self.task.model.prefix(self.number) + name

    def weights_to_prune(self, stage: int) -> dict[str, Tensor]:
        """Return the weights [N, K] of a stage to prune, by their names within the block."""
        names = [name for name in self.block.stages[stage] if self.full_name(name) in self.task.layers]
        return {name: self.block.weights[name + WEIGHT] for name in names}


@torch.inference_mode()
def calibrate(task: Task, reader: Reader, work: WorkFolder, progress: Progress | None = None) -> None:
    """Prune and quantize the layers of ``task``, and save each finished block in ``work``.

    Blocks that are already there are run but not pruned again.  The result is deterministic on the same machine.

    Raises CalibrationError when activations are not finite or a block does not fit into memory.
    """
    if all(work.has(number) for number in _blocks_to_prune(task)):
        return
    report = block_counter(task, "pruning", progress)
    with walk(task, reader, work.folder, task.streams) as positions:
        for at in positions:
            quantize_skipped(at)
            if work.has(at.number):
                restore_block(at, work)
            else:
                work.save(at.number, *_prune_block(at))
            report(at.number)


@torch.inference_mode()
def prune_floats(
    task: Task, reader: Reader, folder: Path, rule: Callable[[Tensor, Hessian], Tensor] | None = None
) -> dict[str, Tensor]:
    """Prune the layers of ``task`` without quantizing; return the weights in the source's dtype, by layer name.

    As in `calibrate`, each layer is pruned on the outputs of those already pruned.

    Args:
        folder: where hidden states may be spilled.
        rule: replaces the task's method: a function of a weight [N, K] and the `Hessian` of its inputs that returns
            the pruned weight.
    """
    found: dict[str, Tensor] = {}
    with walk(task, reader, folder, 1 if rule else task.streams) as positions:
        for at in positions:

            def put(weights: Mapping[str, Tensor], at: Position = at) -> None:
                for name, w in weights.items():
                    stored = w.to(DTYPES[task.model.checkpoint.require(at.full_name(name) + WEIGHT).dtype])
                    at.block.weights[name + WEIGHT], found[at.full_name(name)] = stored.float(), stored.cpu()

            pruned: dict[str, Tensor] = {}
            for stage in range(len(at.block.stages)):
                if not (weights := at.weights_to_prune(stage)):
                    continue
                hessian, drift = gather_statistics(at.inputs, stage, at.dense, weights)
                if rule:
                    made = {name: rule(w, hessian) for name, w in weights.items()}
                else:
                    made = _prune_rows(at, hessian, drift.errors() if drift else None, weights)
                put(made)
                pruned |= made
            if (trained := _finetune(at, pruned, None)) is not None:
                put(trained.weights)
    return found


# The walk


@contextmanager
def walk(
    task: Task, reader: Reader, folder: Path, streams: int, to_the_end: bool = False
) -> Iterator[Iterator[Position]]:
    """Run the samples through the blocks, up to the last one with layers to prune, or ``to_the_end``.

    With two ``streams``, the second always runs the dense model.
    """
    batches: list[Tensor] = []  # of samples of equal length: nothing is padded
    for length, group in groupby(sorted(task.samples.ids, key=len), key=len):
        size = max(1, BATCH_TOKENS[task.device.type] // length)
        batches += torch.stack(list(group)).split(size)
    shapes = [(*ids.shape, task.model.hidden) for ids in batches]
    states = [HiddenStates(shapes, task.device, folder, streams=streams) for _ in range(streams)]
    widest = max(task.model.checkpoint.require(name + WEIGHT).columns for name in task.model.linears(0))
    keep = may_keep(states[0], widest)
    embed = task.model.embedder(reader, task.samples.ids, task.device)
    try:
        for i, ids in enumerate(batches):
            x = embed(ids)
            for stream in states:
                stream[i] = x
        del embed, x
        yield _positions(task, reader, states, keep, batches, to_the_end)
    except torch.OutOfMemoryError as error:
        raise CalibrationError(
            f"calibrating a layer of the model does not fit into the memory of {task.device} ({error}); use "
            "fewer --samples, or --device cpu"
        ) from None
    finally:
        for stream in states:
            stream.close()


def _positions(
    task: Task,
    reader: Reader,
    states: list[HiddenStates],
    keep: bool,
    batches: Sequence[Tensor],
    to_the_end: bool,
) -> Iterator[Position]:
    model = task.model
    last = model.blocks - 1 if to_the_end else max(_blocks_to_prune(task), default=-1)
    for number in range(last + 1):
        block = model.load(reader, number, task.device)
        blocks = [block, *(block.copy() for _ in states[1:])]
        inputs = [BlockInputs(each, stream, keep) for each, stream in zip(blocks, states, strict=True)]
        yield Position(task, number, inputs[0], inputs[1] if len(inputs) > 1 else None, batches)
        for each in inputs if number < last else ():
            each.advance()


def _blocks_to_prune(task: Task) -> list[int]:
    """Return the numbers of the blocks with layers to prune."""
    model = task.model
    return [n for n in range(model.blocks) if any(name in task.layers for name in model.linears(n))]


def block_counter(task: Task, phase: str, progress: Progress | None) -> Callable[[int], None]:
    """Return a function that reports a block as done; progress counts the bytes of linear layers to prune."""
    sizes = {name: task.model.checkpoint.require(name + WEIGHT).nbytes for name in task.layers}
    done = 0

    def finished(number: int) -> None:
        nonlocal done
        done += sum(sizes.get(name, 0) for name in task.model.linears(number))
        if progress:
            progress(phase, done, sum(sizes.values()))

    return finished


# One block


def _prune_block(at: Position) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """Prune, fine-tune and quantize a block.

    Returns its codes, scales and channel orders by tensor name, and the report's rows of its layers.  Errors there are
    |X (W - W')^T| / |X W^T| over the calibration tokens, where W is the dense model's weight and X the input after the
    layers before were pruned.
    """
    tensors: dict[str, Tensor] = {}
    rows: dict[str, dict[str, Any]] = {}
    pruned: dict[str, Tensor] = {}  # not quantized
    hessians: dict[str, Tensor] = {}
    for stage in range(len(at.block.stages)):
        if weights := at.weights_to_prune(stage):
            made, h = _prune_stage(at, stage, weights, tensors, rows)
            pruned |= made
            if at.task.epochs:
                hessians |= dict.fromkeys(made, h)
    if (trained := _finetune(at, pruned, NAMES[at.task.quant])) is not None:
        assert at.dense
        for name, w in trained.weights.items():
            served = _quantize_layer(at, name, w, tensors)
            whole = at.dense.block.weights[name + WEIGHT]
            rows[name]["error_finetuned"] = output_error(whole, served, hessians[name])
        for row in rows.values():
            row |= {"block_error": trained.error_before, "block_error_finetuned": trained.error_after}
    return tensors, [*rows.values()]


def _prune_stage(
    at: Position,
    stage: int,
    weights: Mapping[str, Tensor],
    tensors: dict[str, Tensor],
    rows: dict[str, dict[str, Any]],
) -> tuple[dict[str, Tensor], Tensor]:
    """Prune and quantize the ``weights`` of a stage, and add to ``tensors`` and ``rows`` (see `_prune_block`).

    Returns the pruned weights before quantization, and H [K, K] of their inputs.
    """
    started = time.monotonic()
    hessian, drift = gather_statistics(at.inputs, stage, at.dense, weights)
    errors = drift.errors() if drift else None
    order = _find_order(at, stage, hessian, errors, weights)
    if order is not None:
        tensors |= {at.full_name(name): found for name, found in layer_orders(at.block, stage, order).items()}
    pruned = _prune_rows(at, hessian, errors, weights, order)
    for name, w in weights.items():
        served = _quantize_layer(at, name, pruned[name], tensors)
        rows[name] = {
            "name": at.full_name(name),
            "pattern": at.task.layers[at.full_name(name)].ratio,
            "method": at.task.method,
            "error_pruned": output_error(w, pruned[name], hessian.matrix),
            "error_quantized": output_error(w, served, hessian.matrix),
            "tokens": hessian.tokens,
            # of the stage, shared by its layers; without fine-tuning
            "seconds": round((time.monotonic() - started) / len(weights), 3),
        }
    return pruned, hessian.matrix


def _find_order(
    at: Position,
    stage: int,
    hessian: Hessian,
    errors: Mapping[str, Tensor] | None,
    weights: Mapping[str, Tensor],
) -> Tensor | None:
    """Return the order [K] in which to prune the columns of a stage's only layer, or None to keep their order.

    The rows of a mixed weight are grouped into strips, so they are not permuted.
    """
    task, (name, w) = at.task, next(iter(weights.items()))
    pattern = task.layers[at.full_name(name)]
    if not task.permutes or not isinstance(pattern, SlidePattern) or obeys(w, pattern):
        return None
    if pattern.length is None or not may_permute(at.block, stage, pattern.length):
        return None
    if any(
        isinstance(task.layers.get(at.full_name(each)), MixedPattern)
        for each in writer_layers(at.block, stage)
    ):
        return None
    upper = factor(hessian.matrix, damping_for(len(hessian.matrix), hessian.tokens))
    target = compensated_target(w, errors[name], upper) if errors else w
    return find_order(at.block, stage, target, upper, pattern.length)


def _prune_rows(
    at: Position,
    hessian: Hessian,
    errors: Mapping[str, Tensor] | None,
    weights: Mapping[str, Tensor],
    order: Tensor | None = None,
) -> dict[str, Tensor]:
    """Prune layers that share their inputs; layers of one pattern are stacked, because rows are independent.

    Rows of a mixed pattern depend on each other, so its layers are pruned separately.  A layer that already obeys its
    pattern is not changed.

    Args:
        errors: E [N, K] of each layer (see `slidesparse.calibrate.inputs.Drift`).
        order: permutation [K] of the columns in which the pattern holds; the result has the original order.
    """
    patterns = {name: at.task.layers[at.full_name(name)] for name in weights}
    found = {name: w.clone() for name, w in weights.items() if obeys(w, patterns[name])}
    left = {name: w for name, w in weights.items() if name not in found}
    if not left:
        return found
    sweeps = at.task.calibration.sweeps
    columns = slice(None) if order is None else order
    back = slice(None) if order is None else order.argsort()
    h = hessian.matrix[columns][:, columns]
    prune = at.task.pruner.calibrated(h, hessian.tokens, sweeps, at.task.ternary)
    together = {name: name if isinstance(patterns[name], MixedPattern) else "" for name in left}
    for pattern, layer in dict.fromkeys((patterns[name], together[name]) for name in left):
        names = [name for name in left if (patterns[name], together[name]) == (pattern, layer)]
        w = torch.cat([left[name] for name in names])[:, columns]
        error = torch.cat([errors[name] for name in names])[:, columns] if errors is not None else None
        parts = prune(w, pattern, error)[:, back].split([len(left[name]) for name in names])
        found |= dict(zip(names, parts, strict=True))
    return found


def _finetune(at: Position, weights: Mapping[str, Tensor], dtype: torch.dtype | None) -> Finetuned | None:
    """Fine-tune the pruned ``weights`` of a block if the task says so; ``dtype`` is that of quantization, or None."""
    task = at.task
    pruned = {name: w for name, w in weights.items() if task.layers[at.full_name(name)].length is not None}
    if not task.epochs or at.dense is None or not pruned:
        return None
    at.dense.advance()
    at.inputs.restart()
    prefix = at.full_name("")
    skipped = (name.removeprefix(prefix) for name in task.skipped if name.startswith(prefix))
    return finetune(at.inputs, at.dense.states, pruned, {*weights, *skipped}, dtype, task.epochs)


def quantize_skipped(at: Position) -> None:
    """Replace the weights of layers that are quantized but not pruned by their dequantized values."""
    for name in at.names:
        if at.full_name(name) in at.task.skipped:
            _quantize_layer(at, name, at.block.weights[name + WEIGHT], {})


def _quantize_layer(at: Position, name: str, w: Tensor, tensors: dict[str, Tensor]) -> Tensor:
    """Quantize a layer: add codes and scale to ``tensors``, and return the dequantized weight.

    The block's weight is replaced by it, too.
    """
    full = at.full_name(name)
    if not bool(torch.isfinite(w).all()):
        raise CalibrationError(
            f"pruning {full} gave weights that are not finite (NaN or Inf): its weights or inputs are too large for "
            "sums in float32; without --calib, --method magnitude computes no such sums"
        )
    if at.task.ternary:
        scale = at.block.weights[name + SCALE]
        codes = (w / scale).round_().to(torch.int8)
    else:
        codes, scale = quantize_rows(w, NAMES[at.task.quant], "cuda")
    tensors[full + WEIGHT], tensors[full + SCALE] = codes, scale
    served = at.block.weights[name + WEIGHT] = dequantize_rows(codes, scale)
    return served


def restore_block(at: Position, work: WorkFolder) -> None:
    """Replace the weights of a block by those of its finished layers."""
    with (found := work.tensors()).reader() as reader:
        for name in at.names:
            full = at.full_name(name)
            if full + WEIGHT in found.tensors:
                codes, scale = (reader.whole(full + suffix) for suffix in (WEIGHT, SCALE))
                device = at.block.weights[name + WEIGHT].device
                at.block.weights[name + WEIGHT] = dequantize_rows(codes.to(device), scale.to(device))
