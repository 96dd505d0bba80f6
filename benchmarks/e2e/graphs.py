"""What the GPU takes for a step: its CUDA graph, replayed in a row, with no host to wait for.

Steps of a few milliseconds may end before vLLM has prepared the next one, so that their time is that of the host and
differs from machine to machine.  In decode, vLLM replays one graph a step, which holds all decoder layers; only lm_head
and sampling follow it.
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from statistics import median

import torch

WARM, BATCHES, REPLAYS = 20, 5, 20


class GraphClock:
    """An extension of vLLM's workers (``worker_extension_cls``)."""

    def watch_graphs(self) -> None:
        """Remember from now on which graphs this process replays."""
        self._replays: Counter[torch.cuda.CUDAGraph] = Counter()
        replay = torch.cuda.CUDAGraph.replay

        def remembered(graph: torch.cuda.CUDAGraph) -> None:
            self._replays[graph] += 1
            replay(graph)

        torch.cuda.CUDAGraph.replay = remembered  # type: ignore[assignment, method-assign]

    def time_graph(self) -> float | None:
        """Return the milliseconds of the graph of most steps since the last call: the median of batches in a row.

        Its inputs are those that the last step left, and it writes to their places in the KV cache.  The result is None
        where no graph was replayed more often than all others, as where vLLM splits the model at attention.
        """
        most = self._replays.most_common(2)
        self._replays.clear()
        if not most or len({times for _, times in most}) < len(most):
            return None
        graph = most[0][0]
        for _ in range(WARM):
            graph.replay()
        edges = [torch.cuda.Event(enable_timing=True) for _ in range(BATCHES + 1)]
        edges[0].record()
        for edge in edges[1:]:
            for _ in range(REPLAYS):
                graph.replay()
            edge.record()
        torch.cuda.synchronize()
        self._replays.clear()
        milliseconds: list[float] = [before.elapsed_time(after) for before, after in pairwise(edges)]
        return median(milliseconds) / REPLAYS
