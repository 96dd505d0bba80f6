"""Prune and quantize a model layer by layer, each fed by the layers already pruned.

For a layer of the model and each of its stages (see `slidesparse.calibrate.forward`): run the samples as far as the
stage's inputs, sum up H, prune the linear layers that read them, quantize the result with its mask kept, and put what
will be served in their place, so that the next stage sees what it will see.  Beside that the dense model is run on the
same samples, a layer at a time too, to tell what the pruned layers should give (see `slidesparse.calibrate.target`),
and what a whole layer of the model should, whose weights are trained together at last (see
`slidesparse.calibrate.finetune`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slidesparse.architectures import SCALE, WEIGHT
from slidesparse.calibrate.cache import HiddenStates, Inputs, may_keep
from slidesparse.calibrate.data import Samples
from slidesparse.calibrate.errors import CalibrationError
from slidesparse.calibrate.finetune import Finetuned, finetune
from slidesparse.calibrate.forward import Block
from slidesparse.calibrate.hessian import Hessian, output_error
from slidesparse.calibrate.models import Model
from slidesparse.calibrate.refine import refine
from slidesparse.calibrate.sparsegpt import damping_for, factor, sparsegpt
from slidesparse.calibrate.target import Drift, gather, target_of
from slidesparse.calibrate.task import Task, stages_of, widest
from slidesparse.calibrate.wanda import wanda
from slidesparse.calibrate.work import RANKING, Work
from slidesparse.checkpoint import DTYPES, Reader
from slidesparse.prune import prune
from slidesparse.quantize import NAMES, dequantize_rows, quantize_rows
from slidesparse.slide import obeys

BATCH_TOKENS = {"cpu": 2048, "cuda": 16384}

Progress = Callable[[str, int, int], None]  # phase, bytes done, bytes in all


@dataclass(frozen=True)
class LayerResult:
    """What became of one linear layer."""

    name: str
    pattern: str
    method: str
    # |X (W - W')^T| / |X W^T| over the calibration tokens, W of the dense model, X as the pruned layers before give it
    error_pruned: float  # before fine-tuning
    error_quantized: float  # the same with W' quantized
    tokens: int
    seconds: float  # of the stage, shared by its layers; without fine-tuning


def calibrate(task: Task, reader: Reader, work: Work, progress: Progress | None = None) -> None:
    """Prune and quantize the layers of ``task``; `Work.publish` each layer of the model as it is done.

    What is published already is run, not made again.  The same task on the same machine gives the same bytes.
    Raises CalibrationError when activations are not finite.
    """
    counted = _Progress(task, "pruning", progress)

    def visit(number: int, inputs: Inputs, dense: Inputs | None) -> None:
        _quantize_skipped(task, number, inputs.block)
        if work.done(number):
            _restore(task.model, number, inputs.block, work)
        else:
            pruned: dict[str, Tensor] = {}
            tensors: dict[str, Tensor] = {}
            rows: dict[str, dict[str, Any]] = {}
            seen: dict[str, Tensor] = {}
            for stage, names in enumerate(inputs.block.stages):
                for name, result, w, h in _prune_stage(task, number, stage, names, inputs, dense, tensors):
                    pruned[name], rows[name] = w, asdict(result)
                    if task.finetune and dense:
                        seen[name] = h
            if (trained := _finetune(task, number, inputs, dense, pruned, NAMES[task.quant])) is not None:
                assert dense
                for name, w in trained.weights.items():
                    served = _serve(task, number, name, w, inputs.block, tensors)
                    whole = dense.block.weights[name + WEIGHT]
                    rows[name]["error_finetuned"] = output_error(whole, served, seen[name])
                for row in rows.values():
                    row |= {"block_error": trained.error_before, "block_error_finetuned": trained.error_after}
            work.publish(number, tensors, [*rows.values()])
        counted.finished(number)

    _walk(task, reader, work.folder, visit, task.streams)


def rank(task: Task, reader: Reader, work: Work, progress: Progress | None = None) -> dict[str, float]:
    """The relative output error each layer of ``task`` would have, pruned by Wanda in the dense model: a cheap
    guess, without factorizations, at what costs most.  Kept in ``work``."""
    kept = work.read_json(RANKING)
    if kept is not None:
        return {str(name): float(error) for name, error in kept.items()}
    found: dict[str, float] = {}
    counted = _Progress(task, "ranking", progress)

    def visit(number: int, inputs: Inputs, _: Inputs | None) -> None:
        for stage, names in enumerate(inputs.block.stages):
            chosen = [name for name in names if task.model.prefix(number) + name in task.layers]
            if not chosen:
                continue
            h = gather(inputs, stage)[0].matrix
            for name in chosen:
                full, w = task.model.prefix(number) + name, inputs.block.weights[name + WEIGHT]
                found[full] = output_error(w, wanda(w, h, task.layers[full]), h)
        counted.finished(number)

    _walk(task, reader, work.folder, visit, 1)
    work.write_json(RANKING, found)
    return found


class _Progress:
    """Bytes of the linear layers to prune, done and in all."""

    def __init__(self, task: Task, phase: str, report: Progress | None) -> None:
        self._model, self._phase, self._report, self._done = task.model, phase, report, 0
        self._sizes = {name: task.model.checkpoint.require(name + WEIGHT).nbytes for name in task.layers}

    def finished(self, number: int) -> None:
        """A layer of the model is done."""
        self._done += sum(
            self._sizes.get(name, 0) for stage in stages_of(self._model, number) for name in stage
        )
        if self._report:
            self._report(self._phase, self._done, sum(self._sizes.values()))


@torch.inference_mode()
def _walk(
    task: Task,
    reader: Reader,
    folder: Path,
    visit: Callable[[int, Inputs, Inputs | None], None],
    streams: int,
) -> None:
    """Run the samples through the model's layers up to the last one with something to prune.

    With two ``streams`` the second goes through the layers as they are read, whatever ``visit`` makes of the first's.
    """
    batches = list(_batches(task.samples, BATCH_TOKENS.get(task.device.type, BATCH_TOKENS["cpu"])))
    shapes = [(*ids.shape, task.model.hidden) for ids in batches]
    states = [HiddenStates(shapes, task.device, folder, streams=streams) for _ in range(streams)]
    keep = may_keep(states[0], widest(task.model))
    embed = task.model.embedder(reader, task.samples.ids, task.device)
    wanted = [
        number
        for number in range(task.model.blocks)
        if any(name in task.layers for stage in stages_of(task.model, number) for name in stage)
    ]
    try:
        for i, ids in enumerate(batches):
            x = embed(ids)
            for stream in states:
                stream[i] = x
        del embed, x
        last = max(wanted, default=-1)
        for number in range(last + 1):
            block = task.model.load(reader, number, task.device)
            blocks = [block, *(block.copy() for _ in states[1:])]
            inputs = [Inputs(each, stream, keep) for each, stream in zip(blocks, states, strict=True)]
            visit(number, inputs[0], inputs[1] if streams > 1 else None)
            for each in inputs if number < last else ():
                each.advance()
    except torch.OutOfMemoryError as error:
        raise CalibrationError(
            f"calibrating a layer of the model does not fit into the memory of {task.device} ({error}); fewer "
            "--samples take less, and --device cpu takes the host's"
        ) from None
    finally:
        for stream in states:
            stream.close()


def _batches(samples: Samples, tokens: int) -> Iterator[Tensor]:
    """Samples of equal length together, [batch, tokens], about ``tokens`` in each; nothing is padded."""
    for length, group in groupby(sorted(samples.ids, key=len), key=len):
        alike = torch.stack(list(group))
        yield from alike.split(max(1, tokens // length))


def _prune_stage(
    task: Task,
    number: int,
    stage: int,
    names: tuple[str, ...],
    inputs: Inputs,
    dense: Inputs | None,
    tensors: dict[str, Tensor],
) -> Iterator[tuple[str, LayerResult, Tensor, Tensor]]:
    """Prune the linear layers of a stage and `_serve` them; name by name, with the weights not quantized, and H."""
    prefix, block = task.model.prefix(number), inputs.block
    chosen = [name for name in names if prefix + name in task.layers]
    if not chosen:
        return
    started = time.monotonic()
    weights = {name: block.weights[name + WEIGHT] for name in chosen}
    hessian, drift = gather(inputs, stage, dense, weights)
    pruned = _prune_rows(task, hessian, drift, weights, prefix)
    for name in chosen:
        w = block.weights[name + WEIGHT]
        served = _serve(task, number, name, pruned[name], block, tensors)
        result = LayerResult(
            name=prefix + name,
            pattern=task.layers[prefix + name].ratio,
            method=task.method,
            error_pruned=output_error(w, pruned[name], hessian.matrix),
            error_quantized=output_error(w, served, hessian.matrix),
            tokens=hessian.tokens,
            seconds=round((time.monotonic() - started) / len(chosen), 3),
        )
        yield name, result, pruned[name], hessian.matrix


def _quantize_skipped(task: Task, number: int, block: Block) -> None:
    """Put what will be served in place of the layers of a block that are quantized and not pruned."""
    for name in (name for stage in block.stages for name in stage):
        if task.model.prefix(number) + name in task.skipped:
            _serve(task, number, name, block.weights[name + WEIGHT], block, {})


def _serve(task: Task, number: int, name: str, w: Tensor, block: Block, tensors: dict[str, Tensor]) -> Tensor:
    """Quantize a layer: codes and scale go to ``tensors``, and what they stand for, returned, to its place."""
    full = task.model.prefix(number) + name
    if not bool(torch.isfinite(w).all()):
        raise CalibrationError(
            f"pruning {full} gave weights that are not finite (NaN or Inf): the source's are too large, or its inputs "
            "are, for sums in float32; without --calib, --method magnitude sums nothing"
        )
    codes, scale = quantize_rows(w, NAMES[task.quant], "cuda")
    tensors[full + WEIGHT], tensors[full + SCALE] = codes, scale
    served = block.weights[name + WEIGHT] = dequantize_rows(codes, scale)
    return served


def _finetune(
    task: Task,
    number: int,
    inputs: Inputs,
    dense: Inputs | None,
    weights: Mapping[str, Tensor],
    dtype: torch.dtype | None,
) -> Finetuned | None:
    """What training makes of the pruned ones of the ``weights`` of a block, if that is asked for."""
    prefix = task.model.prefix(number)
    pruned = {name: w for name, w in weights.items() if task.prunes(prefix + name)}
    if not task.finetune or dense is None or not pruned:
        return None
    dense.advance()
    inputs.restart()
    quantized = {*weights, *(name.removeprefix(prefix) for name in task.skipped if name.startswith(prefix))}
    return finetune(inputs, dense.states, pruned, quantized, dtype, task.finetune)


def _prune_rows(
    task: Task, hessian: Hessian, drift: Drift | None, weights: Mapping[str, Tensor], prefix: str
) -> dict[str, Tensor]:
    """Prune layers that read the same inputs; those of one pattern together, as their rows do not see each other.

    A layer that obeys its pattern already is kept as it is.
    """
    found = {n: w.clone() for n, w in weights.items() if obeys(w, task.layers[prefix + n])}
    weights = {name: w for name, w in weights.items() if name not in found}
    h, damping = hessian.matrix, damping_for(len(hessian.matrix), hessian.tokens)
    upper = factor(h, damping) if task.method == "sparsegpt" and weights else None
    errors = drift.errors() if drift else {}
    for pattern in dict.fromkeys(task.layers[prefix + name] for name in weights):
        names = [name for name in weights if task.layers[prefix + name] == pattern]
        w = torch.cat([weights[name] for name in names])
        if upper is not None:
            if errors and pattern.length is not None:
                w = target_of(w, torch.cat([errors[name] for name in names]), upper)
            first = sparsegpt(w, upper, pattern)
            pruned = refine(w, first, h, pattern, sweeps=task.sweeps, damping=damping)
        elif task.method == "wanda":
            pruned = wanda(w, h, pattern)
        else:
            pruned = prune(w, pattern, task.method)
        parts = pruned.split([weights[name].shape[0] for name in names])
        found |= dict(zip(names, parts, strict=True))
    return found


def prune_floats(
    task: Task,
    reader: Reader,
    folder: Path,
    rule: Callable[[Tensor, Hessian], Tensor] | None = None,
) -> dict[str, Tensor]:
    """The weights of ``task`` pruned and not quantized, in the dtype of the source, by name of the layer.

    Each layer is fed by those already pruned, as in `calibrate`.

    Args:
        folder: where hidden states may be spilled.
        rule: another way to prune: a weight [N, K] and the `Hessian` of its inputs give the pruned [N, K].
    """
    found: dict[str, Tensor] = {}

    def put(prefix: str, block: Block, weights: Mapping[str, Tensor]) -> None:
        for name, w in weights.items():
            stored = w.to(DTYPES[task.model.checkpoint.require(prefix + name + WEIGHT).dtype])
            block.weights[name + WEIGHT], found[prefix + name] = stored.float(), stored.cpu()

    def visit(number: int, inputs: Inputs, dense: Inputs | None) -> None:
        prefix, block, pruned = task.model.prefix(number), inputs.block, dict[str, Tensor]()
        for stage, names in enumerate(block.stages):
            chosen = [name for name in names if prefix + name in task.layers]
            if not chosen:
                continue
            weights = {name: block.weights[name + WEIGHT] for name in chosen}
            hessian, drift = gather(inputs, stage, dense, weights)
            if rule:
                rows = {name: rule(w, hessian) for name, w in weights.items()}
            else:
                rows = _prune_rows(task, hessian, drift, weights, prefix)
            put(prefix, block, rows)
            pruned |= rows
        if (trained := _finetune(task, number, inputs, dense, pruned, None)) is not None:
            put(prefix, block, trained.weights)

    _walk(task, reader, folder, visit, 1 if rule else task.streams)
    return found


def _restore(model: Model, number: int, block: Block, work: Work) -> None:
    """Put published layers in place of the source's."""
    with (found := work.tensors()).reader() as reader:
        for name in (name for stage in block.stages for name in stage):
            full = model.prefix(number) + name
            if full + WEIGHT in found.tensors:
                codes, scale = (reader.whole(full + suffix) for suffix in (WEIGHT, SCALE))
                device = block.weights[name + WEIGHT].device
                block.weights[name + WEIGHT] = dequantize_rows(codes.to(device), scale.to(device))
