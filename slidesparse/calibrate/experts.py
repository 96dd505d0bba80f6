"""Prune the routed experts of a block, each by the tokens that are routed to it.

transformers joins the experts of a layer in parameters [E, N, K], and runs them one at a time.  So a product with a
slice of such a parameter tells the inputs of one expert, whatever the model's router is.  An expert that few tokens are
routed to has a poor H (see `slidesparse.calibrate.inputs`), and is pruned by the sum of its layer's H instead.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from slidesparse.blocks import obeys
from slidesparse.calibrate.inputs import Hessian, output_error
from slidesparse.calibrate.model import fast_products
from slidesparse.calibrate.sparsegpt import pruner
from slidesparse.checkpoint.names import SCALE, WEIGHT
from slidesparse.errors import CalibrationError
from slidesparse.prune import prune
from slidesparse.quantize import NAMES, dequantize_rows, quantize_rows

if TYPE_CHECKING:
    from slidesparse.calibrate.pipeline import BlockRun

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


def prune_experts(run: BlockRun, sweeps: int) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """Prune and quantize the experts of a block; the weights of ``run.block`` are replaced by the dequantized ones.

    Returns codes and scales by tensor name, and the report's rows of the matrices; those of an expert that no token
    reached in any sample have no error.  Raises CalibrationError for inputs that are not finite.
    """
    tensors: dict[str, Tensor] = {}
    rows = []
    places = {name: place for name, place in run.experts.items() if name in run.task.layers}
    used = {place.parameter for place in places.values()}
    for parameter in (name for name, _ in run.block.module.named_parameters() if name in used):
        joined = run.block.weights[parameter]
        own, pooled = _gather(run, joined)
        served: dict[str, Tensor] = {}
        for number, weight in enumerate(joined):
            started = time.monotonic()
            names = [
                name
                for name, place in places.items()
                if (place.parameter, place.number) == (parameter, number)
            ]
            if not names:
                continue
            few = own[number].tokens < weight.shape[1] / FLOOR
            hessian, pattern = pooled if few else own[number], run.task.layers[names[0]]
            if obeys(weight, pattern):
                pruned = weight
            elif hessian.tokens:
                pruned = pruner(hessian.matrix, hessian.tokens, sweeps)(weight, pattern, None)
            else:
                pruned = prune(weight, pattern)
            for name in names:
                place = places[name]
                w, part = place.of(joined), pruned.chunk(place.parts)[place.part]
                codes, scale = quantize_rows(part, NAMES[run.task.quant], "cuda")
                tensors[name + WEIGHT], tensors[name + SCALE] = codes, scale
                served[name] = dequantize_rows(codes, scale)
                rows.append(
                    {
                        "name": name,
                        "pattern": pattern.ratio,
                        "method": "sparsegpt" if hessian.tokens else "magnitude",
                        "error_pruned": output_error(w, part, hessian.matrix),
                        "error_quantized": output_error(w, served[name], hessian.matrix),
                        "tokens": own[number].tokens,
                        "pooled": few,
                        "seconds": round((time.monotonic() - started) / len(names), 3),
                    }
                )
        replace_experts(run, served)
    return tensors, rows


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


def replace_experts(run: BlockRun, served: dict[str, Tensor]) -> None:
    """Replace matrices of experts in the weights of a block, by the checkpoint's names."""
    copied: dict[str, Tensor] = {}  # other copies of the block share its tensors
    for name, weight in served.items():
        place = run.experts[name]
        if place.parameter not in copied:
            copied[place.parameter] = run.block.weights[place.parameter].clone()
        place.of(copied[place.parameter]).copy_(weight)
    run.block.weights |= copied
