"""Count the sparse layers, and the others by reason, for the summary line in the log."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any

from slidesparse.pattern import DENSE_WEIGHT
from slidesparse.resolve import Resolution


class LayerSummary:
    """The layers of one model in one process, each counted once its weights are loaded; the last triggers the line."""

    def __init__(self) -> None:
        self._pending: dict[str, weakref.ref[Any]] = {}
        self.sparse: dict[str, str] = {}  # layer -> its pattern
        self.dense: dict[str, str] = {}  # layer -> reason
        self.listed = False  # whether the checkpoint's metadata list any of them
        self.fusion = ""  # the outcome of SLIDESPARSE_FUSE

    def expect(self, layer: str, module: Any) -> None:
        """Expect a layer, which `count` counts once its weights are loaded."""
        self._pending[layer] = weakref.ref(module)

    def is_pending(self) -> bool:
        """Return whether any expected layer is not counted yet.

        Layers that vLLM creates and then drops, or whose weights it moves to the device meta, are not expected any
        more, such as those of a vision tower that no request will use.
        """
        return any(_is_there(module()) for module in self._pending.values())

    def count(self, layer: str, reason: str | None = None, pattern: str = "") -> bool:
        """Count a layer as ours, or for ``reason`` as vLLM's own; return True for the last one expected."""
        awaited = self._pending.pop(layer, None) is not None
        if reason is None:
            self.sparse[layer] = pattern
            self.dense.pop(layer, None)
        else:
            self.dense[layer] = reason
            self.sparse.pop(layer, None)
        return awaited and not self.is_pending()

    def line(self, resolution: Resolution) -> str:
        """Return ``SlideSparse 6:8 (2 of every 8 pruned): 24 layers sparse, 1 dense (1 lm_head); backend ...``"""
        reasons = ", ".join(f"{n} {reason}" for reason, n in sorted(Counter(self.dense.values()).items()))
        dense = f"{len(self.dense)} dense" + (f" ({reasons})" if reasons else "")
        sparse = resolution.path == "sparse"
        pattern = resolution.parsed_pattern
        subject = str(pattern) if sparse else "dense"
        kind = "sparse" if sparse else "on the cuBLASLt path (dense)"
        if sparse and pattern.ratio == DENSE_WEIGHT:
            kind = "in blocks, each dense or 2:4 by its zeros"
        patterns = Counter(self.sparse.values())
        unpruned = patterns.pop(DENSE_WEIGHT, 0) if sparse and pattern.ratio != DENSE_WEIGHT else 0
        if patterns.keys() - {pattern.ratio}:
            kind += f" ({', '.join(f'{n} at {pattern}' for pattern, n in sorted(patterns.items()))})"
        fusion = f"; {self.fusion}" if self.fusion else ""
        if unpruned:
            kind += f", {unpruned} not pruned (by the same backend)"
        return (
            f"SlideSparse {subject}: {len(self.sparse) - unpruned} layers {kind}, {dense}; "
            f"{resolution.layout} layout; backend {resolution.backend}: {resolution.reason}" + fusion
        )


def _is_there(module: Any) -> bool:
    weight = getattr(module, "weight", None)
    return module is not None and (weight is None or weight.device.type != "meta")
