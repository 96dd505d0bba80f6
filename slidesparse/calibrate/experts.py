"""Prune the routed experts of a block, each by the tokens that are routed to it.

transformers joins the experts of a layer in parameters [E, N, K], and runs them one at a time.  So a product with a
slice of such a parameter tells the inputs of one expert, whatever the model's router is.  An expert that few tokens are
routed to has a poor H (see `slidesparse.calibrate.inputs`), and is pruned by the sum of its layer's H instead.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from slidesparse.blocks import obeys
from slidesparse.calibrate.inputs import Hessian, output_error
from slidesparse.calibrate.model import Block, fast_products
from slidesparse.calibrate.sparsegpt import Pruner, pruner
from slidesparse.checkpoint.names import SCALE, WEIGHT
from slidesparse.errors import CalibrationError
from slidesparse.pattern import Pattern
from slidesparse.prune import prune
from slidesparse.quantize import NAMES, dequantize_rows, quantize_rows

if TYPE_CHECKING:
    from slidesparse.calibrate.pipeline import BlockRun
    from slidesparse.calibrate.task import Task

FLOOR = 8  # an expert with fewer than K / FLOOR tokens is pruned by those of the whole layer


class _Products(TorchFunctionMode):
    """Calls ``read`` with each input of the experts whose weights are in ``joined`` [E, N, K], and their numbers."""

    def __init__(self, joined: Tensor, read: Callable[[int, Tensor], None]) -> None:
        super().__init__()
        self._joined, self._read = joined, read

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is functional.linear:
            x, weight = args[:2]
            if weight.untyped_storage().data_ptr() == self._joined.untyped_storage().data_ptr():
                offset = weight.storage_offset() - self._joined.storage_offset()
                self._read(offset // self._joined.stride(0), x)
        return function(*args, **(kwargs or {}))


def groups_to_prune(task: Task, number: int) -> dict[str, tuple[str, ...]]:
    """Return the checkpoint's names of the matrices of a block's experts that are pruned, by their parameter.

    Parameters come in the order of the block, and so in that of execution.
    """
    skeleton = task.model.skeleton
    groups: dict[str, list[str]] = {name: [] for name, _ in skeleton.blocks[number].named_parameters()}
    for name, place in skeleton.experts(number).items():
        if name in task.layers:
            groups[place.parameter].append(name)
    return {parameter: tuple(names) for parameter, names in groups.items() if names}


def prune_experts(run: BlockRun, sweeps: int) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """Prune and quantize the experts of a block; the weights of ``run.block`` are replaced by the dequantized ones.

    Returns codes and scales by tensor name, and the report's rows of the matrices; those of an expert that no token
    reached in any sample have no error.  Raises CalibrationError for inputs that are not finite.
    """
    tensors: dict[str, Tensor] = {}
    rows = []
    for parameter, names in groups_to_prune(run.task, run.number).items():
        joined, pattern = run.block.weights[parameter], run.task.layers[names[0]]
        served: dict[str, Tensor] = {}
        for number, (own, used, prune_expert) in enumerate(expert_pruners(run, joined, sweeps)):
            started = time.monotonic()
            pruned = prune_expert(joined[number], pattern)
            of_expert = [name for name in names if run.experts[name].number == number]
            for name in of_expert:
                place = run.experts[name]
                w, part = place.of(joined), pruned.chunk(place.parts)[place.part]
                codes, scale = quantize_rows(part, NAMES[run.task.quant], "cuda")
                tensors[name + WEIGHT], tensors[name + SCALE] = codes, scale
                served[name] = dequantize_rows(codes, scale)
                rows.append(
                    {
                        "name": name,
                        "pattern": pattern.ratio,
                        "method": "sparsegpt" if used.tokens else "magnitude",
                        "error_pruned": output_error(w, part, used.matrix),
                        "error_quantized": output_error(w, served[name], used.matrix),
                        "tokens": own.tokens,
                        "pooled": used is not own,
                        "seconds": round((time.monotonic() - started) / len(of_expert), 3),
                    }
                )
        replace_experts(run, run.block, served)
    return tensors, rows


def expert_pruners(
    run: BlockRun, joined: Tensor, sweeps: int
) -> Iterator[tuple[Hessian, Hessian, Callable[[Tensor, Pattern], Tensor]]]:
    """Yield H of the tokens of each expert in ``joined`` [E, N, K], the H to prune by, and a function that prunes."""
    hessians, pooled = _gather(run, joined)
    for own in hessians:
        used = pooled if own.tokens < joined.shape[2] / FLOOR else own
        best = pruner(used.matrix, sweeps) if used.tokens else None
        yield own, used, partial(_prune, best)


def _prune(best: Pruner | None, w: Tensor, pattern: Pattern) -> Tensor:
    """Prune the weights [N, K] of an expert by ``best``, or by magnitude; those that obey the pattern stay."""
    if obeys(w, pattern):
        return w
    return best(w, pattern) if best else prune(w, pattern)


def _gather(run: BlockRun, joined: Tensor) -> tuple[list[Hessian], Hessian]:
    """Return H of the inputs of each expert whose weights are in ``joined`` [E, N, K], and their sum."""
    hessians = [Hessian(joined.shape[2], joined.device) for _ in joined]
    with fast_products(run.pruned.states.device):
        for batch in range(len(run.pruned)):
            with _Products(joined, lambda number, x: hessians[number].add(x)):
                run.block.output(run.pruned.states[batch])
    pooled = Hessian(joined.shape[2], joined.device)
    for hessian in hessians:
        pooled.merge(hessian)
    if not bool(torch.isfinite(pooled.matrix.diagonal()).all()):
        raise CalibrationError(
            "the inputs of an expert are not finite (NaN or Inf); the weights or the calibration samples are damaged, "
            "or the model overflows float32"
        )
    return hessians, pooled


def quantize_experts(run: BlockRun, block: Block, names: Iterable[str]) -> None:
    """Replace matrices of experts in the weights of a block, by the checkpoint's names, by dequantized ones."""
    places = {name: run.experts[name] for name in names}
    weights = {name: place.of(block.weights[place.parameter]) for name, place in places.items()}
    dtype = NAMES[run.task.quant]
    replace_experts(
        run, block, {name: dequantize_rows(*quantize_rows(w, dtype, "cuda")) for name, w in weights.items()}
    )


def replace_experts(run: BlockRun, block: Block, served: Mapping[str, Tensor]) -> None:
    """Replace matrices of experts in the weights of a block, by the checkpoint's names."""
    copied: dict[str, Tensor] = {}  # other copies of the block share its tensors
    for name, weight in served.items():
        place = run.experts[name]
        if place.parameter not in copied:
            copied[place.parameter] = block.weights[place.parameter].clone()
        place.of(copied[place.parameter]).copy_(weight)
    block.weights |= copied
