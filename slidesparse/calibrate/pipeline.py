"""Prune and quantize a model block by block, on the outputs of the blocks already pruned.

For each group of linear layers of a block (see `slidesparse.calibrate.model`): run the samples up to the group's
inputs, compute H from them, prune and quantize the layers, and replace their weights by the dequantized ones, so that
the next group sees the activations of serving.  The dense model runs on the same samples in parallel where blocks are
fine-tuned to its outputs afterwards (see `slidesparse.calibrate.finetune`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slidesparse.calibrate.experts import expert_hessians
from slidesparse.calibrate.finetune import Finetuned, finetune
from slidesparse.calibrate.graphs import recordings
from slidesparse.calibrate.inputs import Hessian, HiddenStates, Stream, gather_hessian, output_error
from slidesparse.calibrate.model import Block, LayerGroup
from slidesparse.calibrate.permutation import find_order, may_permute
from slidesparse.calibrate.resume import WorkFolder, served_weight
from slidesparse.calibrate.roles import find_roles, layer_orders
from slidesparse.calibrate.sparsegpt import Pruner, factor, pruner
from slidesparse.calibrate.task import Task
from slidesparse.checkpoint.names import SCALE, WEIGHT
from slidesparse.checkpoint.skeleton import Place
from slidesparse.checkpoint.storage import Reader
from slidesparse.errors import CalibrationError
from slidesparse.progress import Progress
from slidesparse.prune import prune
from slidesparse.quantize import NAMES, dequantize_rows, is_finite, quantize_rows
from slidesparse.slide import obeys

METHOD, SWEEPS = "sparsegpt", 4  # and passes that refine a layer afterwards
BATCH_TOKENS = {"cpu": 2048, "cuda": 16384}


class Inputs(NamedTuple):
    """The inputs of layers of a group: of all, or of the matrices of one expert, the tokens routed to it."""

    weights: dict[str, Tensor]  # [N, K] by the checkpoint's names
    own: Hessian  # of the inputs
    used: Hessian  # to prune by

    def pruner(self, sweeps: int, ternary: bool, columns: Tensor | slice = slice(None)) -> Pruner:
        """Return a function that prunes the layers, with their ``columns`` [K] in this order.

        It prunes by magnitude if no token reaches any expert.
        """
        return pruner(self.used.matrix[columns][:, columns], sweeps, ternary) if self.used.tokens else prune


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
    def places(self) -> dict[str, Place]:
        """The places of the weights that are quantized, by the checkpoint's names."""
        linears = {full: Place(name + WEIGHT) for name, full in self.task.quantized(self.number).items()}
        experts = self.task.model.skeleton.experts(self.number).items()
        quantized = {*self.task.layers, *self.task.skipped}
        return linears | {name: place for name, place in experts if name in quantized}

    def full_name(self, name: str) -> str:
        """Return the checkpoint's name of a linear layer of the block."""
        return self.task.model.skeleton.layer(self.number, name)

    def weight(self, block: Block, name: str) -> Tensor:
        """Return a weight [N, K] of a block that is quantized, by the checkpoint's name, as a view of its tensor."""
        place = self.places[name]
        return place.of(block.weights[place.parameter])

    def replace(self, block: Block, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Replace weights of a block that are quantized, by the checkpoint's names."""
        copied = set[str]()  # other copies of the block share its tensors
        for name, w in weights:
            parameter = self.places[name].parameter
            if parameter not in copied:
                block.weights[parameter] = block.weights[parameter].clone()
                copied.add(parameter)
            self.weight(block, name).copy_(w)

    def inputs(self, group: LayerGroup) -> Iterator[Inputs]:
        """Yield the inputs of a group, or of each of its experts, after the layers of earlier groups were replaced.

        Raises CalibrationError when an input is NaN or infinite, or H overflows.
        """
        parameter, is_expert = self.places[group[0]].parameter, self.places[group[0]].number is not None
        if is_expert:
            hessians = expert_hessians(self.pruned, self.block.weights[parameter])
        else:
            hessians = [(gather_hessian(self.pruned, parameter.removesuffix(WEIGHT)),) * 2]
        for number, (own, used) in enumerate(hessians):
            names = [name for name in group if not is_expert or self.places[name].number == number]
            yield Inputs({name: self.weight(self.block, name) for name in names}, own, used)


@torch.inference_mode()
@recordings()
def calibrate(task: Task, reader: Reader, work: WorkFolder, progress: Progress) -> None:
    """Prune and quantize the layers of ``task``, and save each finished block in ``work``.

    Blocks that are already there are run but not pruned again.  The result is deterministic on the same machine.

    Raises CalibrationError when activations are not finite.
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


def _blocks_to_prune(task: Task) -> list[int]:
    """Return the numbers of the blocks with layers to prune."""
    return [number for number in range(task.model.blocks) if task.groups(number)]


def block_counter(task: Task, phase: str, progress: Progress) -> Callable[[int], None]:
    """Return a function that reports a block as done; progress counts the bytes of linear layers to prune."""
    sizes = {name: task.model.checkpoint.require(name + WEIGHT).nbytes for name in task.layers}
    done = 0

    def finished(number: int) -> None:
        nonlocal done
        done += sum(sizes[name] for group in task.groups(number) for name in group)
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
    pruned: dict[str, Tensor] = {}  # linear layers, by their names in the block, not quantized
    hessians: dict[str, Tensor] = {}  # H [K, K] of the inputs of each
    for group in run.task.groups(run.number):
        served: dict[str, Tensor] = {}
        for inputs in run.inputs(group):
            weights, own, used = inputs
            order, orders = _find_order(run, group[0], used)
            tensors |= orders
            parts = _prune_rows(run, inputs, order)
            for name, w in weights.items():
                part, place = parts[name], run.places[name]
                served[name] = _quantize_layer(run, name, part, tensors)
                rows[name] = {
                    "name": name,
                    "pattern": run.task.layers[name].ratio,
                    "error_pruned": output_error(w, part, used.matrix),
                    "error_quantized": output_error(w, served[name], used.matrix),
                    "tokens": own.tokens,
                }
                if place.number is None:
                    inside = place.parameter.removesuffix(WEIGHT)
                    pruned[inside], hessians[inside] = part, used.matrix
                else:
                    rows[name]["pooled"] = used is not own
        run.replace(run.block, served.items())
    if run.dense and (trained := _finetune_block(run, run.dense, pruned)):
        for name, w in trained.weights.items():
            full = run.full_name(name)
            run.block.weights[name + WEIGHT] = _quantize_layer(run, full, w, tensors)
            dense, tuned = (run.weight(block, full) for block in (run.dense.block, run.block))
            rows[full]["error_finetuned"] = output_error(dense, tuned, hessians[name])
        for name in pruned:
            rows[run.full_name(name)] |= {
                "block_error": trained.error_before,
                "block_error_finetuned": trained.error_after,
            }
    return tensors, [*rows.values()]


def _find_order(run: BlockRun, name: str, hessian: Hessian) -> tuple[Tensor | None, dict[str, Tensor]]:
    """Return the order [K] in which to prune the columns of a layer, and the permutations to save, by tensor name.

    The order is None, without permutations, for a layer that is the reader of no pair or keeps its order.
    """
    reader = run.places[name].parameter.removesuffix(WEIGHT)
    pair = find_roles(run.block).pair(reader) if run.task.permutes else None
    if pair is None:
        return None, {}
    w, pattern = run.weight(run.block, name), run.task.layers[name]
    if not pattern.length or not may_permute(pair, pattern.length) or obeys(w, pattern):
        return None, {}
    upper = factor(hessian.matrix)
    order = find_order(pair, w.to(upper.dtype), upper, pattern.length)
    orders = layer_orders(run.block, pair, order)
    return order, {run.full_name(name) + suffix: x for (name, suffix), x in orders.items()}


def _prune_rows(run: BlockRun, inputs: Inputs, order: Tensor | None) -> dict[str, Tensor]:
    """Prune layers that share their inputs; layers of one pattern are stacked, because rows are independent.

    A layer that already obeys its pattern is not changed.

    Args:
        order: permutation [K] of the columns in which the pattern holds; the result has the original order.
    """
    weights, patterns = inputs.weights, {name: run.task.layers[name] for name in inputs.weights}
    pruned = {name: w.clone() for name, w in weights.items() if obeys(w, patterns[name])}
    remaining = [name for name in weights if name not in pruned]
    if not remaining:
        return pruned
    columns = slice(None) if order is None else order
    back = slice(None) if order is None else order.argsort()
    best = inputs.pruner(SWEEPS, run.task.ternary, columns)
    for pattern in dict.fromkeys(patterns[name] for name in remaining):
        names = [name for name in remaining if patterns[name] == pattern]
        w = torch.cat([weights[name] for name in names])[:, columns]
        parts = best(w, pattern)[:, back].split([len(weights[name]) for name in names])
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
    if not is_finite(w):
        raise CalibrationError(
            f"pruning {name} gave weights that are not finite (NaN or Inf): its weights or inputs are too large for "
            "sums in float32; pruning without --calib computes none"
        )
    place = run.places[name]
    if run.task.ternary and place.number is None:
        scale = run.block.scales[place.parameter.removesuffix(WEIGHT)]
        codes = (w / scale).round_().to(torch.int8)
    else:
        codes, scale = quantize_rows(w, NAMES[run.task.quant], "cuda")
    tensors[name + WEIGHT], tensors[name + SCALE] = codes, scale
    return dequantize_rows(codes, scale)


def restore_block(run: BlockRun, work: WorkFolder) -> None:
    """Replace the weights of a block by those of its finished layers."""
    with (finished := work.tensors()).reader() as reader:
        names = (name for name in run.places if name + WEIGHT in finished.tensors)
        run.replace(run.block, ((name, served_weight(reader, name, run.task.device)) for name in names))
