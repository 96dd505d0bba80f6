"""Prune the routed experts of a block, each by the tokens that are routed to it.

transformers joins the experts of a layer in parameters [E, N, K], and runs them one at a time.  So a product with a
slice of such a parameter tells the inputs of one expert, whatever the model's router is.  An expert that few tokens are
routed to has a poor H (see `slidesparse.calibrate.inputs`), and is pruned by the sum of its layer's H instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from slidesparse.calibrate.inputs import Hessian, Stream
from slidesparse.calibrate.model import fast_products

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


def expert_hessians(stream: Stream, joined: Tensor) -> list[tuple[Hessian, Hessian]]:
    """Return H of the tokens of each expert in ``joined`` [E, N, K], and the H to prune it by.

    Raises CalibrationError when an input is NaN or infinite, or H overflows.
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
    return [(own, pooled if own.tokens < joined.shape[2] / FLOOR else own) for own in hessians]
