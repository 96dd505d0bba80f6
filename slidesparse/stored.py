"""Rows of a pruned layer as a converted checkpoint stores them, turned back to [rows, K] and checked."""

from __future__ import annotations

from torch import Tensor

from slidesparse.metadata import Metadata
from slidesparse.pattern import PatternError
from slidesparse.slide import Violation, bits, slide, unslide, violation_message, violations


class DamagedError(PatternError):
    """Stored rows that break their pattern, with what was found."""

    def __init__(self, message: str, found: Violation) -> None:
        super().__init__(message)
        self.found = found


def restore(values: Tensor, metadata: Metadata, layer: str, first_row: int = 0) -> Tensor:
    """Rows of ``layer`` as stored, [rows, K] or [rows, K'], from row ``first_row`` on -> [rows, K].

    Raises DamagedError with layer, row, block and count when they break the layer's pattern, or are slided
    but not what `slide` makes of any weight.
    """
    entry = metadata.layers[layer]
    slided = metadata.layout == "slided"
    dense = unslide(values, entry.pattern, entry.in_features) if slided else values
    found = violations(dense, entry.pattern)
    if found:
        found = found._replace(row=first_row + found.row)
        raise DamagedError(violation_message(layer, found, entry.pattern), found)
    if slided:
        different = (bits(slide(dense, entry.pattern)) != bits(values)).any(-1)
        if bool(different.any()):
            row = first_row + int(different.nonzero()[0])
            message = (
                f"{layer}: row {row} is not the slided form of any weight at {entry.pattern}; the "
                "checkpoint is damaged, convert the original one again"
            )
            raise DamagedError(message, Violation(int(different.sum()), row, 0, 0))
    return dense
