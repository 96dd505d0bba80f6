"""Prune the routed experts of a block, each by the tokens that are routed to it.

transformers joins the experts of a layer in parameters [E, N, K], and runs them one at a time.  So a product with a
slice of such a parameter tells the inputs of one expert, whatever the model's router is.  An expert that few tokens are
routed to has a poor H (see `slidesparse.calibrate.inputs`), and is pruned by the sum of its layer's H instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from slidesparse.blocks import obeys
from slidesparse.calibrate.inputs import Hessian, Stream
from slidesparse.calibrate.model import fast_products
from slidesparse.calibrate.sparsegpt import Pruner, pruner
from slidesparse.calibrate.task import Task
from slidesparse.pattern import Pattern
from slidesparse.prune import prune

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


def expert_pruners(
    stream: Stream, joined: Tensor, sweeps: int
) -> Iterator[tuple[Hessian, Hessian, Callable[[Tensor, Pattern], Tensor]]]:
    """Yield H of the tokens of each expert in ``joined`` [E, N, K], the H to prune by, and a function that prunes.

    All are pruned by magnitude if no token reaches any; those that obey the pattern stay.
    """
    hessians = [Hessian(joined.shape[2], joined.device) for _ in joined]
    products = _Products(joined, lambda number, x: hessians[number].add(x))
    with fast_products(stream.states.device), products:
        for states in stream.states:
            stream.block.output(states)
    pooled = Hessian(joined.shape[2], joined.device)
    for hessian in hessians:
        pooled.merge(hessian)
    pooled.require_finite("an expert")
    for own in hessians:
        used = pooled if own.tokens < joined.shape[2] / FLOOR else own
        best = pruner(used.matrix, sweeps) if used.tokens else prune
        yield own, used, partial(_prune, best)


def _prune(best: Pruner, w: Tensor, pattern: Pattern) -> Tensor:
    return w if obeys(w, pattern) else best(w, pattern)
