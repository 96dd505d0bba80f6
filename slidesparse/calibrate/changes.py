"""Read the tensors of a checkpoint with some of them changed, such as by a rotation."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from slidesparse.checkpoint.storage import Reader

KEPT = 2  # whole tensors in memory; threads read the rows of one, or of two that follow each other


class Change(NamedTuple):
    """A change of a tensor.

    ``apply`` takes rows of it, in the dtype of the reader, and the slice of these rows, and returns as many.
    """

    apply: Callable[[Tensor, slice], Tensor]
    mixes_rows: bool = False  # whether it needs all rows at a time


Changes = dict[str, Change]  # by the tensor's name


def add_change(
    changes: Changes, name: str, apply: Callable[[Tensor, slice], Tensor], mixes_rows: bool = False
) -> None:
    """Add a change of the tensor ``name``, behind the one that it may have already."""
    if (before := changes.get(name)) is None:
        changes[name] = Change(apply, mixes_rows)
    else:
        first = before.apply
        changes[name] = Change(lambda w, rows: apply(first(w, rows), rows), before.mixes_rows or mixes_rows)


def changed(weights: Mapping[str, Tensor], changes: Changes) -> dict[str, Tensor]:
    """Return ``weights``, float32, with the ``changes`` of those that are there, computed in float64."""
    return {
        name: changes[name].apply(w.double(), slice(0, len(w))).float() if name in changes else w
        for name, w in weights.items()
    }


class ChangedReader(Reader):
    """Reads the tensors of ``reader``, those in ``changes`` changed.

    Args:
        dtype: computation dtype of the changes, whose results are rounded to float32; None keeps that of the tensor.
        device: where they are computed; results are on the CPU.
    """

    def __init__(
        self,
        reader: Reader,
        changes: Mapping[str, Change],
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> None:
        super().__init__(reader.checkpoint)
        self._reader, self._changes, self._dtype, self._device = reader, changes, dtype, device
        self._lock = threading.Lock()
        self._whole: dict[str, Tensor] = {}

    def rows(self, name: str, rows: slice) -> Tensor:
        """Read rows of a tensor as [rows, columns]."""
        change = self._changes.get(name)
        if change is None:
            return self._reader.rows(name, rows)
        if not change.mixes_rows:
            return self._changed(change, name, rows)
        with self._lock:
            if name not in self._whole:
                for older in [*self._whole][: 1 - KEPT]:
                    del self._whole[older]  # free it before computing the next
                self._whole[name] = self._changed(change, name, slice(0, self.checkpoint.require(name).rows))
            return self._whole[name][rows]

    def _changed(self, change: Change, name: str, rows: slice) -> Tensor:
        x = self._reader.rows(name, rows)
        if self._dtype is None:
            return change.apply(x, rows)
        return change.apply(x.to(device=self._device, dtype=self._dtype), rows).float().cpu()
