"""Times what the GPU takes for a step: its CUDA graph is replayed in a row, with no host to wait for.

A step of a few milliseconds may end before vLLM has prepared the next one, so that the time between steps is that of
the host, which differs from step to step and from machine to machine.  In decode, vLLM replays one graph a step, which
holds all decoder layers; lm_head and sampling follow it.
"""

from __future__ import annotations

from itertools import pairwise
from statistics import median

import torch

SETTLED = 16  # steps of one graph before it is timed: all sequences have begun, and none has ended
WARM, BATCHES, REPLAYS = 20, 5, 20


class GraphClock:
    """An extension of vLLM's workers (``worker_extension_cls``), which times one graph each time it is armed."""

    def watch_graphs(self) -> None:
        """Have each replay of a graph in this process call `_replayed`."""
        self._is_armed = False
        replay = torch.cuda.CUDAGraph.replay

        def watched(graph: torch.cuda.CUDAGraph) -> None:
            replay(graph)
            self._replayed(graph)

        torch.cuda.CUDAGraph.replay = watched  # type: ignore[assignment, method-assign]

    def arm_graph_clock(self) -> None:
        """Time the next graph that SETTLED steps in a row replay: none where vLLM splits the model at attention."""
        self._is_armed = True
        self._graph_ms: float | None = None
        self._last: torch.cuda.CUDAGraph | None = None
        self._times = 0

    def read_graph_clock(self) -> float | None:
        """Return the milliseconds of the graph that was timed, or None if none was."""
        self._is_armed = False
        return self._graph_ms

    def _replayed(self, graph: torch.cuda.CUDAGraph) -> None:
        if not self._is_armed:
            return
        self._last, self._times = graph, self._times + 1 if graph is self._last else 1
        if self._times == SETTLED:
            self._is_armed = False
            self._graph_ms = self._time(graph)

    @staticmethod
    def _time(graph: torch.cuda.CUDAGraph) -> float:
        """Return the median of batches of replays.

        A replay reads the step's inputs, and writes its hidden states and its places in the KV cache, once more.
        """
        for _ in range(WARM):
            graph.replay()
        edges = [torch.cuda.Event(enable_timing=True) for _ in range(BATCHES + 1)]
        edges[0].record()
        for edge in edges[1:]:
            for _ in range(REPLAYS):
                graph.replay()
            edge.record()
        torch.cuda.synchronize()
        milliseconds: list[float] = [before.elapsed_time(after) for before, after in pairwise(edges)]
        return median(milliseconds) / REPLAYS
