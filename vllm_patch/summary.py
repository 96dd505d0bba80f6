"""Count the sparse layers, and the others by reason, for the summary lines in the log."""

from __future__ import annotations

import itertools
import json
import weakref
from collections import Counter
from typing import Any, NamedTuple

from slidesparse.gemm import SPARSE
from slidesparse.pattern import DENSE_WEIGHT
from slidesparse.resolve import SUMMARY, Resolution


class Found(NamedTuple):
    """A layer as its weights turned out to be."""

    pattern: str
    columns: int  # K
    weights: int  # the number of weights of the checkpoint that it consists of


class LayerSummary:
    """The layers of one model in one process, each counted once its weights are loaded; the last triggers the lines."""

    def __init__(self) -> None:
        self._pending: dict[str, weakref.ref[Any]] = {}
        self._unnamed = itertools.count(1)
        self.concludes = False  # whether an expected layer concludes, or another one has
        self.sparse: dict[str, str] = {}  # layer -> its pattern
        self.dense: dict[str, str] = {}  # layer -> reason
        self.claimed: set[str] = set()  # layers that the metadata list and that vLLM has by name
        self.by_weights: dict[str, Found] = {}  # layer whose pattern its weights have decided
        self.fusion = ""  # the outcome of SLIDESPARSE_FUSE

    def unnamed(self, module: Any) -> str:
        """Return a name of its own for a layer that vLLM gives none, such as q_a_proj of MiniCPM3."""
        return f"{type(module).__name__} {next(self._unnamed)}"

    def expect(self, layer: str, module: Any) -> None:
        """Expect a layer, which `count` counts once its weights are loaded."""
        self._pending[layer] = weakref.ref(module)
        self.concludes = True

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

    @property
    def pruned_by_weights(self) -> int:
        """The number of weights that obey a pattern, in layers that the metadata do not list by vLLM's names."""
        return sum(found.weights for found in self.by_weights.values() if found.pattern != DENSE_WEIGHT)

    def lines(self, resolution: Resolution, remark: str = "") -> tuple[str, str]:
        """Return the numbers in JSON after SUMMARY, and the same in words.

        The words: ``SlideSparse 6:8 (2 of every 8 pruned): 24 layers sparse, 1 dense (1 lm_head); backend ...``.  The
        numbers: ``pattern``, ``path``, ``layout``, ``backend`` and ``reason`` of `Resolution`; ``layers``, the number
        of ours by pattern, and ``left``, of vLLM's own by reason; ``fusion``; and the ``words``.
        """
        # on the other path no pattern is used
        ours = Counter(
            self.sparse.values() if resolution.path == SPARSE else [DENSE_WEIGHT] * len(self.sparse)
        )
        left = Counter(self.dense.values())
        facts = {
            name: getattr(resolution, name) for name in ("pattern", "path", "layout", "backend", "reason")
        }
        words = "; ".join(filter(None, [self._words(resolution, ours, left), self.fusion, remark]))
        facts |= {"layers": dict(ours), "left": dict(left), "fusion": self.fusion, "words": words}
        return SUMMARY + json.dumps(facts), f"SlideSparse {words}"

    def _words(self, resolution: Resolution, ours: Counter[str], left: Counter[str]) -> str:
        reasons = ", ".join(f"{n} {reason}" for reason, n in sorted(left.items()))
        dense = f"{left.total()} dense" + (f" ({reasons})" if reasons else "")
        sparse = resolution.path == SPARSE
        pattern = resolution.parsed_pattern
        subject = str(pattern) if sparse else "dense"
        kind = "sparse" if sparse else "on the cuBLASLt path (dense)"
        if sparse and pattern.ratio == DENSE_WEIGHT:
            kind = "in blocks, each dense or 2:4 by its zeros"
        pruned = Counter(ours)
        unpruned = pruned.pop(DENSE_WEIGHT, 0) if sparse and pattern.ratio != DENSE_WEIGHT else 0
        if sparse and pruned.keys() - {pattern.ratio}:
            kind += f" ({', '.join(f'{n} at {pattern}' for pattern, n in sorted(pruned.items()))})"
        if unpruned:
            kind += f", {unpruned} not pruned (by the same backend)"
        return (
            f"{subject}: {pruned.total()} layers {kind}, {dense}; {resolution.layout} layout; "
            f"backend {resolution.backend}: {resolution.reason}"
        )


def _is_there(module: Any) -> bool:
    weight = None if module is None else next(module.parameters(recurse=False), None)
    return module is not None and (weight is None or weight.device.type != "meta")
