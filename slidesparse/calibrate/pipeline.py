"""Prune and quantize a model block by block, on the outputs of the blocks already pruned.

For each group of linear layers of a block (see `slidesparse.calibrate.model`): run the samples up to the group's
inputs, compute H from them, prune and quantize the layers, and replace their weights by the dequantized ones, so that
the next group sees the activations of serving.  The dense model runs on the same samples in parallel where blocks are
fine-tuned to its outputs afterwards (see `slidesparse.calibrate.finetune`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from slidesparse.blocks import obeys
from slidesparse.calibrate.experts import expert_pruners, groups_to_prune
from slidesparse.calibrate.finetune import Finetuned, finetune
from slidesparse.calibrate.graphs import recordings
from slidesparse.calibrate.inputs import Hessian, HiddenStates, Stream, gather_hessian, output_error
from slidesparse.calibrate.model import Block
from slidesparse.calibrate.permutation import find_order, may_permute
from slidesparse.calibrate.resume import WorkFolder
from slidesparse.calibrate.roles import find_roles, layer_orders
from slidesparse.calibrate.sparsegpt import factor, pruner
from slidesparse.calibrate.task import Task
from slidesparse.checkpoint.names import SCALE, WEIGHT
from slidesparse.checkpoint.skeleton import Expert
from slidesparse.checkpoint.storage import Reader
from slidesparse.errors import CalibrationError
from slidesparse.progress import Progress
from slidesparse.quantize import NAMES, dequantize_rows, quantize_rows

METHOD, SWEEPS = "sparsegpt", 4  # and passes that refine a layer afterwards
BATCH_TOKENS = {"cpu": 2048, "cuda": 16384}


@dataclass(frozen=True)
class BlockRun:
    """A block that the samples have reached."""

    task: Task
    number: int
    pruned: Stream
    dense: Stream | None  # the dense model on the same samples, if it runs
    ids: Sequence[Tensor]  # [samples, tokens] of each batch

    @property
    def block(self) -> Block:
        """The block, whose weights are replaced by the dequantized ones."""
        return self.pruned.block

    @cached_property
    def experts(self) -> dict[str, Expert]:
        """The checkpoint's names of the matrices of routed experts that are quantized, and their places."""
        quantized = {*self.task.layers, *self.task.skipped}
        places = self.task.model.skeleton.experts(self.number)
        return {name: place for name, place in places.items() if name in quantized}

    @cached_property
    def places(self) -> dict[str, tuple[str, Expert | None]]:
        """The parameters of the weights that are quantized, by the checkpoint's names, and the places of experts."""
        linears = {full: (name + WEIGHT, None) for name, full in self.task.quantized(self.number).items()}
        return {**linears, **{name: (place.parameter, place) for name, place in self.experts.items()}}

    def full_name(self, name: str) -> str:
        """Return the checkpoint's name of a linear layer of the block."""
        return self.task.model.skeleton.layer(self.number, name)

    def weight(self, block: Block, name: str) -> Tensor:
        """Return a weight [N, K] of a block that is quantized, by the checkpoint's name, as a view of its tensor."""
        parameter, place = self.places[name]
        return place.of(block.weights[parameter]) if place else block.weights[parameter]

    def replace(self, block: Block, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Replace weights of a block that are quantized, by the checkpoint's names."""
        copied = set[str]()  # other copies of the block share its tensors
        for name, w in weights:
            parameter, place = self.places[name]
            if place is None:
                block.weights[parameter] = w
                continue
            if parameter not in copied:
                block.weights[parameter] = block.weights[parameter].clone()
                copied.add(parameter)
            place.of(block.weights[parameter]).copy_(w)

    def weights_to_prune(self, group: Sequence[str]) -> dict[str, Tensor]:
        """Return the weights [N, K] of a group to prune, by their names within the block."""
        names = [name for name in group if self.full_name(name) in self.task.layers]
        return {name: self.block.weights[name + WEIGHT] for name in names}


@torch.inference_mode()
@recordings()
def calibrate(task: Task, reader: Reader, work: WorkFolder, progress: Progress) -> None:
    """Prune and quantize the layers of ``task``, and save each finished block in ``work``.

    Blocks that are already there are run but not pruned again.  The result is deterministic on the same machine.

    Raises CalibrationError when activations are not finite or a block does not fit into memory.
    """
    if all(is_finished(task, work, number) for number in _blocks_to_prune(task)):
        return
    for run in run_blocks(task, reader, "pruning", progress, 2 if task.epochs else 1):
        quantize_skipped(run)
        if is_finished(task, work, run.number):
            restore_block(run, work)
        else:
            work.save(run.number, *_prune_block(run))


def is_finished(task: Task, work: WorkFolder, number: int) -> bool:
    """Return whether ``work`` has a block with the patterns of ``task``."""
    return work.has(number, task.patterns(number))


def run_blocks(
    task: Task, reader: Reader, phase: str, progress: Progress, streams: int = 1, to_the_end: bool = False
) -> Iterator[BlockRun]:
    """Run the samples up to the last block with layers to prune, or through all blocks ``to_the_end``.

    With two ``streams``, the second always runs the dense model.  A block is reported as done, and run with the weights
    that it has then, when the next one is asked for.
    """
    model, report = task.model, block_counter(task, phase, progress)
    batches: list[Tensor] = []  # of samples of equal length: nothing is padded
    for length, group in groupby(sorted(task.samples.ids, key=len), key=len):
        size = max(1, BATCH_TOKENS[task.device.type] // length)
        batches += torch.stack(list(group)).split(size)
    shapes = [(*ids.shape, model.hidden) for ids in batches]
    states = [HiddenStates(shapes, task.device, streams) for _ in range(streams)]
    last = model.blocks - 1 if to_the_end else max(_blocks_to_prune(task), default=-1)
    try:
        ends = model.ends(reader)
        for i, ids in enumerate(batches):
            x = ends.embed(ids)
            for stream_states in states:
                stream_states[i] = x
        del ends, x
        for number in range(last + 1):
            block = model.load(reader, number)
            blocks = [block, *(block.copy() for _ in states[1:])]
            pruned, *dense = (Stream(*pair) for pair in zip(blocks, states, strict=True))
            yield BlockRun(task, number, pruned, dense[0] if dense else None, batches)
            report(number)
            for stream in (pruned, *dense) if number < last or to_the_end else ():
                stream.advance()
    except torch.OutOfMemoryError as error:
        raise CalibrationError(
            f"calibrating a layer of the model does not fit into the memory of {task.device} ({error}); use "
            "fewer --samples, or --device cpu"
        ) from None


def _blocks_to_prune(task: Task) -> list[int]:
    """Return the numbers of the blocks with layers to prune."""
    model = task.model
    return [n for n in range(model.blocks) if any(name in task.layers for name in model.layers(n))]


def block_counter(task: Task, phase: str, progress: Progress) -> Callable[[int], None]:
    """Return a function that reports a block as done; progress counts the bytes of linear layers to prune."""
    sizes = {name: task.model.checkpoint.require(name + WEIGHT).nbytes for name in task.layers}
    done = 0

    def finished(number: int) -> None:
        nonlocal done
        done += sum(sizes.get(name, 0) for name in task.model.layers(number))
        progress(phase, done, sum(sizes.values()))

    return finished


# One block


def _prune_block(run: BlockRun) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """Prune, fine-tune and quantize a block.

    Returns its codes, scales and channel orders by tensor name, and the report's rows of its layers.  Errors there are
    |X (W - W')^T| / |X W^T| over the calibration tokens, where W is the dense model's weight and X the input after the
    layers before were pruned.  Rows of an expert that no token reached in any sample have no error.  Raises
    CalibrationError for inputs or weights that are not finite.
    """
    tensors: dict[str, Tensor] = {}
    rows: dict[str, dict[str, Any]] = {}
    pruned: dict[str, Tensor] = {}  # not quantized
    hessians: dict[str, Tensor] = {}  # H [K, K] of the inputs of each layer

    def finish(name: str, w: Tensor, part: Tensor, hessian: Hessian, started: float, count: int) -> Tensor:
        """Quantize the pruned ``part`` of ``w``, one of ``count`` since the time ``started``; return it as served."""
        served = _quantize_layer(run, name, part, tensors)
        rows[name] = {
            "name": name,
            "pattern": run.task.layers[name].ratio,
            "method": METHOD if hessian.tokens else "magnitude",
            "error_pruned": output_error(w, part, hessian.matrix),
            "error_quantized": output_error(w, served, hessian.matrix),
            "tokens": hessian.tokens,
            # of the group, shared by its layers; without fine-tuning
            "seconds": round((time.monotonic() - started) / count, 3),
        }
        return served

    for group in run.block.groups:
        if not (weights := run.weights_to_prune(group)):
            continue
        started = time.monotonic()
        hessian = gather_hessian(run.pruned, group[0])
        order, orders = _find_order(run, group[0], hessian)
        tensors |= orders
        pruned |= _prune_rows(run, hessian, weights, order)
        for name, w in weights.items():
            hessians[name] = hessian.matrix
            served = finish(run.full_name(name), w, pruned[name], hessian, started, len(weights))
            run.block.weights[name + WEIGHT] = served
    for parameter, names in groups_to_prune(run.task, run.number).items():
        joined, of_experts = run.block.weights[parameter], dict[str, Tensor]()
        for number, (own, used, prune_expert) in enumerate(expert_pruners(run.pruned, joined, SWEEPS)):
            started = time.monotonic()
            whole = prune_expert(joined[number], run.task.layers[names[0]])
            places = {name: run.experts[name] for name in names if run.experts[name].number == number}
            for name, place in places.items():
                part = whole.chunk(place.parts)[place.part]
                of_experts[name] = finish(name, place.of(joined), part, used, started, len(places))
                rows[name] |= {"tokens": own.tokens, "pooled": used is not own}
        run.replace(run.block, of_experts.items())
    if run.dense and (trained := _finetune_block(run, run.dense, pruned)):
        for name, w in trained.weights.items():
            full = run.full_name(name)
            served = run.block.weights[name + WEIGHT] = _quantize_layer(run, full, w, tensors)
            dense = run.dense.block.weights[name + WEIGHT]
            rows[full]["error_finetuned"] = output_error(dense, served, hessians[name])
        for name in pruned:
            rows[run.full_name(name)] |= {
                "block_error": trained.error_before,
                "block_error_finetuned": trained.error_after,
            }
    return tensors, [*rows.values()]


def _find_order(run: BlockRun, reader: str, hessian: Hessian) -> tuple[Tensor | None, dict[str, Tensor]]:
    """Return the order [K] in which to prune the columns of a layer, and the permutations to save, by tensor name.

    The order is None, without permutations, for a layer that is the reader of no pair or keeps its order.
    """
    pair = find_roles(run.block).pair(reader) if run.task.permutes else None
    if pair is None:
        return None, {}
    w, pattern = run.block.weights[reader + WEIGHT], run.task.layers[run.full_name(reader)]
    if not pattern.length or not may_permute(pair, pattern.length) or obeys(w, pattern):
        return None, {}
    upper = factor(hessian.matrix)
    order = find_order(pair, w.to(upper.dtype), upper, pattern.length)
    orders = layer_orders(run.block, pair, order)
    return order, {run.full_name(name) + suffix: x for (name, suffix), x in orders.items()}


def _prune_rows(
    run: BlockRun, hessian: Hessian, weights: Mapping[str, Tensor], order: Tensor | None
) -> dict[str, Tensor]:
    """Prune layers that share their inputs; layers of one pattern are stacked, because rows are independent.

    A layer that already obeys its pattern is not changed.

    Args:
        order: permutation [K] of the columns in which the pattern holds; the result has the original order.
    """
    patterns = {name: run.task.layers[run.full_name(name)] for name in weights}
    pruned = {name: w.clone() for name, w in weights.items() if obeys(w, patterns[name])}
    remaining = {name: w for name, w in weights.items() if name not in pruned}
    if not remaining:
        return pruned
    columns = slice(None) if order is None else order
    back = slice(None) if order is None else order.argsort()
    h = hessian.matrix[columns][:, columns]
    prune = pruner(h, SWEEPS, run.task.ternary)
    for pattern in dict.fromkeys(patterns[name] for name in remaining):
        names = [name for name in remaining if patterns[name] == pattern]
        w = torch.cat([remaining[name] for name in names])[:, columns]
        parts = prune(w, pattern)[:, back].split([len(remaining[name]) for name in names])
        pruned |= dict(zip(names, parts, strict=True))
    return pruned


def _finetune_block(run: BlockRun, dense: Stream, weights: Mapping[str, Tensor]) -> Finetuned | None:
    """Fine-tune the pruned ``weights`` of a block to the outputs of the ``dense`` one, if any are not all zero."""
    task = run.task
    pruned = {name: w for name, w in weights.items() if task.layers[run.full_name(name)].density < 1}
    if not any(w.any() for w in pruned.values()):
        return None
    dense.advance()
    quantized = task.quantized(run.number)
    return finetune(run.pruned, dense.states, pruned, quantized, NAMES[task.quant], task.epochs)


def quantize_skipped(run: BlockRun) -> None:
    """Replace the weights of layers that are quantized but not pruned by their dequantized values."""
    skipped = (name for name in run.places if name in run.task.skipped)
    run.replace(
        run.block, ((name, _quantize_layer(run, name, run.weight(run.block, name), {})) for name in skipped)
    )


def _quantize_layer(run: BlockRun, name: str, w: Tensor, tensors: dict[str, Tensor]) -> Tensor:
    """Quantize a layer, by the checkpoint's name: add codes and scale to ``tensors``, return the dequantized weight."""
    if not bool(torch.isfinite(w).all()):
        raise CalibrationError(
            f"pruning {name} gave weights that are not finite (NaN or Inf): its weights or inputs are too large for "
            "sums in float32; pruning without --calib computes none"
        )
    parameter, place = run.places[name]
    if run.task.ternary and place is None:
        scale = run.block.scales[parameter.removesuffix(WEIGHT)]
        codes = (w / scale).round_().to(torch.int8)
    else:
        codes, scale = quantize_rows(w, NAMES[run.task.quant], "cuda")
    tensors[name + WEIGHT], tensors[name + SCALE] = codes, scale
    return dequantize_rows(codes, scale)


def restore_block(run: BlockRun, work: WorkFolder) -> None:
    """Replace the weights of a block by those of its finished layers."""
    with (finished := work.tensors()).reader() as reader:

        def served(name: str) -> Tensor:
            codes, scale = (reader.whole(name + suffix).to(run.task.device) for suffix in (WEIGHT, SCALE))
            return dequantize_rows(codes, scale)

        names = (name for name in run.places if name + WEIGHT in finished.tensors)
        run.replace(run.block, ((name, served(name)) for name in names))
