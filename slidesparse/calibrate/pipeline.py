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
from slidesparse.checkpoint.storage import Reader
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
def calibrate(task: Task, reader: Reader, work: WorkFolder, progress: Progress) -> None:
    """Prune and quantize the layers of ``task``, and save each finished block in ``work``.

    Blocks that are already there are run but not pruned again.  The result is deterministic on the same machine.

    Raises CalibrationError when activations are not finite or a block does not fit into memory.
    """
    if all(work.has(number) for number in _blocks_to_prune(task)):
        return
    report = block_counter(task, "pruning", progress)
    with walk(task, reader, work.folder, task.streams) as positions:
        for position in positions:
            quantize_skipped(position)
            if work.has(position.number):
                restore_block(position, work)
            else:
                work.save(position.number, *_prune_block(position))
            report(position.number)


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
        inputs = [BlockInputs(*pair, keep) for pair in zip(blocks, states, strict=True)]
        yield Position(task, number, inputs[0], inputs[1] if len(inputs) > 1 else None, batches)
        for stream_inputs in inputs if number < last else ():
            stream_inputs.advance()


def _blocks_to_prune(task: Task) -> list[int]:
    """Return the numbers of the blocks with layers to prune."""
    model = task.model
    return [n for n in range(model.blocks) if any(name in task.layers for name in model.linears(n))]


def block_counter(task: Task, phase: str, progress: Progress) -> Callable[[int], None]:
    """Return a function that reports a block as done; progress counts the bytes of linear layers to prune."""
    sizes = {name: task.model.checkpoint.require(name + WEIGHT).nbytes for name in task.layers}
    done = 0

    def finished(number: int) -> None:
        nonlocal done
        done += sum(sizes.get(name, 0) for name in task.model.linears(number))
        progress(phase, done, sum(sizes.values()))

    return finished


# One block


def _prune_block(position: Position) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """Prune, fine-tune and quantize a block.

    Returns its codes, scales and channel orders by tensor name, and the report's rows of its layers.  Errors there are
    |X (W - W')^T| / |X W^T| over the calibration tokens, where W is the dense model's weight and X the input after the
    layers before were pruned.
    """
    tensors: dict[str, Tensor] = {}
    rows: dict[str, dict[str, Any]] = {}
    pruned: dict[str, Tensor] = {}  # not quantized
    hessians: dict[str, Tensor] = {}
    for stage in range(len(position.block.stages)):
        if weights := position.weights_to_prune(stage):
            stage_weights, h = _prune_stage(position, stage, weights, tensors, rows)
            pruned |= stage_weights
            if position.task.epochs:
                hessians |= dict.fromkeys(stage_weights, h)
    if (trained := finetune_block(position, pruned, NAMES[position.task.quant])) is not None:
        assert position.dense
        for name, w in trained.weights.items():
            served = _quantize_layer(position, name, w, tensors)
            dense = position.dense.block.weights[name + WEIGHT]
            rows[name]["error_finetuned"] = output_error(dense, served, hessians[name])
        for row in rows.values():
            row |= {"block_error": trained.error_before, "block_error_finetuned": trained.error_after}
    return tensors, [*rows.values()]


def _prune_stage(
    position: Position,
    stage: int,
    weights: Mapping[str, Tensor],
    tensors: dict[str, Tensor],
    rows: dict[str, dict[str, Any]],
) -> tuple[dict[str, Tensor], Tensor]:
    """Prune and quantize the ``weights`` of a stage, and add to ``tensors`` and ``rows`` (see `_prune_block`).

    Returns the pruned weights before quantization, and H [K, K] of their inputs.
    """
    started = time.monotonic()
    hessian, drift = gather_statistics(position.inputs, stage, position.dense, weights)
    errors = drift.errors() if drift else None
    order = _find_order(position, stage, hessian, errors, weights)
    if order is not None:
        orders = layer_orders(position.block, stage, order)
        tensors |= {position.full_name(name): permutation for name, permutation in orders.items()}
    pruned = prune_rows(position, hessian, errors, weights, order)
    for name, w in weights.items():
        served = _quantize_layer(position, name, pruned[name], tensors)
        rows[name] = {
            "name": position.full_name(name),
            "pattern": position.task.layers[position.full_name(name)].ratio,
            "method": position.task.method,
            "error_pruned": output_error(w, pruned[name], hessian.matrix),
            "error_quantized": output_error(w, served, hessian.matrix),
            "tokens": hessian.tokens,
            # of the stage, shared by its layers; without fine-tuning
            "seconds": round((time.monotonic() - started) / len(weights), 3),
        }
    return pruned, hessian.matrix


def _find_order(
    position: Position,
    stage: int,
    hessian: Hessian,
    errors: Mapping[str, Tensor] | None,
    weights: Mapping[str, Tensor],
) -> Tensor | None:
    """Return the order [K] in which to prune the columns of a stage's only layer, or None to keep their order.

    The rows of a mixed weight are grouped into strips, so they are not permuted.
    """
    task, (name, w) = position.task, next(iter(weights.items()))
    pattern = task.layers[position.full_name(name)]
    if not task.permutes or not isinstance(pattern, SlidePattern) or obeys(w, pattern):
        return None
    if pattern.length is None or not may_permute(position.block, stage, pattern.length):
        return None
    if any(
        isinstance(task.layers.get(position.full_name(writer)), MixedPattern)
        for writer in writer_layers(position.block, stage)
    ):
        return None
    upper = factor(hessian.matrix, damping_for(len(hessian.matrix), hessian.tokens))
    target = compensated_target(w, errors[name], upper) if errors else w
    return find_order(position.block, stage, target, upper, pattern.length)


def prune_rows(
    position: Position,
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
    patterns = {name: position.task.layers[position.full_name(name)] for name in weights}
    pruned = {name: w.clone() for name, w in weights.items() if obeys(w, patterns[name])}
    remaining = {name: w for name, w in weights.items() if name not in pruned}
    if not remaining:
        return pruned
    sweeps = position.task.calibration.sweeps
    columns = slice(None) if order is None else order
    back = slice(None) if order is None else order.argsort()
    h = hessian.matrix[columns][:, columns]
    prune = position.task.pruner.calibrated(h, hessian.tokens, sweeps, position.task.ternary)
    groups = {name: name if isinstance(patterns[name], MixedPattern) else "" for name in remaining}
    for pattern, group in dict.fromkeys((patterns[name], groups[name]) for name in remaining):
        names = [name for name in remaining if (patterns[name], groups[name]) == (pattern, group)]
        w = torch.cat([remaining[name] for name in names])[:, columns]
        error = torch.cat([errors[name] for name in names])[:, columns] if errors is not None else None
        parts = prune(w, pattern, error)[:, back].split([len(remaining[name]) for name in names])
        pruned |= dict(zip(names, parts, strict=True))
    return pruned


def finetune_block(
    position: Position, weights: Mapping[str, Tensor], dtype: torch.dtype | None
) -> Finetuned | None:
    """Fine-tune the pruned ``weights`` of a block if the task says so; ``dtype`` is that of quantization, or None."""
    task = position.task
    patterns = {name: task.layers[position.full_name(name)] for name in weights}
    pruned = {name: w for name, w in weights.items() if patterns[name].density < 1}
    if not task.epochs or position.dense is None or not pruned:
        return None
    position.dense.advance()
    position.inputs.restart()
    prefix = position.full_name("")
    skipped = (name.removeprefix(prefix) for name in task.skipped if name.startswith(prefix))
    return finetune(position.inputs, position.dense.states, pruned, {*weights, *skipped}, dtype, task.epochs)


def quantize_skipped(position: Position) -> None:
    """Replace the weights of layers that are quantized but not pruned by their dequantized values."""
    for name in position.names:
        if position.full_name(name) in position.task.skipped:
            _quantize_layer(position, name, position.block.weights[name + WEIGHT], {})


def _quantize_layer(position: Position, name: str, w: Tensor, tensors: dict[str, Tensor]) -> Tensor:
    """Quantize a layer: add codes and scale to ``tensors``, and return the dequantized weight.

    The block's weight is replaced by it, too.
    """
    full = position.full_name(name)
    if not bool(torch.isfinite(w).all()):
        raise CalibrationError(
            f"pruning {full} gave weights that are not finite (NaN or Inf): its weights or inputs are too large for "
            "sums in float32; without --calib, --method magnitude computes no such sums"
        )
    if position.task.ternary:
        scale = position.block.weights[name + SCALE]
        codes = (w / scale).round_().to(torch.int8)
    else:
        codes, scale = quantize_rows(w, NAMES[position.task.quant], "cuda")
    tensors[full + WEIGHT], tensors[full + SCALE] = codes, scale
    served = position.block.weights[name + WEIGHT] = dequantize_rows(codes, scale)
    return served


def restore_block(position: Position, work: WorkFolder) -> None:
    """Replace the weights of a block by those of its finished layers."""
    with (finished := work.tensors()).reader() as reader:
        for name in position.names:
            full = position.full_name(name)
            if full + WEIGHT in finished.tensors:
                codes, scale = (reader.whole(full + suffix) for suffix in (WEIGHT, SCALE))
                device = position.block.weights[name + WEIGHT].device
                position.block.weights[name + WEIGHT] = dequantize_rows(codes.to(device), scale.to(device))
