"""SLIDESPARSE_PROFILE: times of stages, by layer and number of tokens."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
import torch
from layers import layer
from torch import Tensor

from slidesparse import ops, profiling
from slidesparse.flags import FlagError, Flags
from slidesparse.profiling import Entry, Profiler
from slidesparse.quantize import INT8


@pytest.fixture
def profiler() -> Iterator[Profiler]:
    yield profiling.enable()
    profiling.disable()


def run(tokens: int, layers: list[tuple[Tensor, Tensor]], length: int, columns: int) -> None:
    x = torch.randn(tokens, 32)
    for weight, scale in layers:
        x = ops.linear(x, weight, scale, None, length, 0, INT8, columns, "reference")


def two_layers() -> tuple[list[tuple[Tensor, Tensor]], int, int]:
    layout, first, scale, _ = layer("6:8", INT8, 32, 32)
    return [(first, scale), (first.clone(), scale)], layout.length, layout.slided


def test_calls_are_counted_and_timed_by_layer_and_tokens(profiler: Profiler) -> None:
    layers, length, columns = two_layers()
    profiler.kinds = {layers[0][0].data_ptr(): "qkv_proj", layers[1][0].data_ptr(): "o_proj"}
    for tokens in (1, 5, 8, 5):
        run(tokens, layers, length, columns)
    profiler.collect()
    times = profiler.times
    calls = {key: (entry.calls, entry.timed) for key, entry in times.entries.items()}
    assert calls == {(kind, m): (n, n) for kind in ("qkv_proj", "o_proj") for m, n in ((1, 1), (8, 3))}
    assert all(us > 0 for entry in times.entries.values() for us in entry.us.values())
    assert times.steps == 3  # the fourth has not ended
    profiler.table()
    assert times.steps == 4
    assert (
        0
        < sum(us for entry in times.entries.values() for us in entry.us.values())
        <= sum(times.step_us.values())
    )


def test_time_between_steps_is_not_counted(profiler: Profiler) -> None:
    """Requests are awaited, or graphs replayed, in that time."""
    layers, length, columns = two_layers()
    for pause in (0.0, 0.5, 0.5):
        time.sleep(pause)
        run(5, layers, length, columns)
    time.sleep(0.5)
    profiler.table()
    assert profiler.times.steps == 3
    assert sum(profiler.times.step_us.values()) < 0.5e6


def test_table_is_sorted_by_cost(profiler: Profiler) -> None:
    times = profiler.times
    times.entries["small", 16] = Entry(2, 2, {"quantize": 0.0, "product": 10.0, "scale": 0.0})
    times.entries["big", 4096] = Entry(4, 4, {"quantize": 40.0, "product": 400.0, "scale": 60.0}, "19")
    times.step_us, times.steps = {16: 100.0, 4096: 900.0}, 2
    head, columns, first, second = profiler.table().splitlines()
    assert head == "SlideSparse profile: 2 steps; microseconds are means of a call"
    assert columns.split() == ["layer", "M", "calls", *profiling.STAGES, "of", "all", "steps", "algorithm"]
    assert first.split() == ["big", "4096", "4", "10.0", "100.0", "15.0", "50.0%", "19"]
    assert second.split() == ["small", "16", "2", "0.0", "5.0", "0.0", "1.0%", "-"]


class Event:
    """An event of a graph, whose time is set when the graph is replayed."""

    def __init__(self, place: int) -> None:
        self.place = place
        self.at: float | None = None


class FakeGraph:
    """A fake machine on which every call is captured; after a replay, consecutive events are ``us``
    microseconds apart.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[Event] = []
        monkeypatch.setattr(profiling, "_capturing", lambda x: True)
        monkeypatch.setattr(profiling, "_mark", self._mark)
        monkeypatch.setattr(profiling, "_between", self._between)

    def _mark(self, x: Tensor, captured: bool) -> Event:
        assert captured
        self.events.append(Event(len(self.events)))
        return self.events[-1]

    @staticmethod
    def _between(start: Event, end: Event) -> float:
        if start.at is None or end.at is None:
            raise RuntimeError("invalid resource handle")
        return end.at - start.at

    def replay(self, first: int, last: int, us: float) -> None:
        for event in self.events[first:last]:
            event.at = us * event.place


def test_graph_calls_are_timed_by_the_last_replay(
    profiler: Profiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers, length, columns = two_layers()
    profiler.kinds = {layers[0][0].data_ptr(): "qkv_proj", layers[1][0].data_ptr(): "o_proj"}
    run(64, layers, length, columns)  # as vLLM warms up
    launched = profiler.table()
    assert "graphs" not in launched
    graph, ends = FakeGraph(monkeypatch), [0]
    for tokens in (16, 8, 4):
        run(tokens, layers, length, columns)
        ends.append(len(graph.events))
    assert profiler.replayed().steps == 0  # nothing was replayed
    graph.replay(ends[0], ends[1], us=5.0)
    graph.replay(ends[0], ends[1], us=2.0)  # counts
    graph.replay(ends[1], ends[2], us=3.0)
    table = profiler.table()
    assert table.startswith(launched)
    head, header, *rows = table[len(launched) + 1 :].splitlines()
    assert head.startswith(
        "SlideSparse profile: 6 calls captured into CUDA graphs; 2 steps, as each graph was last"
    )
    assert header.split() == ["layer", "M", "calls", *profiling.STAGES, "of", "its", "steps", "algorithm"]
    cells = [row.split()[:7] for row in rows]
    # a layer has three stages with two marks each; a step spans 11 gaps between marks
    share = f"{3 / 11:.1%}"
    assert cells == [
        *([kind, "8", "1", *["3.0"] * 3, share] for kind in ("qkv_proj", "o_proj")),
        *([kind, "16", "1", *["2.0"] * 3, share] for kind in ("qkv_proj", "o_proj")),
    ]  # and none of the graph of 4 tokens, which was not replayed


def test_event_errors_are_reported(profiler: Profiler, monkeypatch: pytest.MonkeyPatch) -> None:
    layers, length, columns = two_layers()
    FakeGraph(monkeypatch)
    run(16, layers, length, columns)
    assert "could not be read" not in profiler.table()
    monkeypatch.setattr(profiling, "NEVER_SET", ())
    assert "; some could not be read: invalid resource handle\n" in profiler.table()


def test_profiling_does_not_change_results(profiler: Profiler) -> None:
    layers, length, columns = two_layers()
    x = torch.randn(3, 32)
    weight, scale = layers[0]
    profiled = ops.linear(x, weight, scale, None, length, 0, INT8, columns, "reference")
    profiling.disable()
    assert torch.equal(profiled, ops.linear(x, weight, scale, None, length, 0, INT8, columns, "reference"))
    assert profiling.enable() is not profiler
    assert profiling.enable().table() == ""


CHILD_PROGRAM = """
import multiprocessing, sys
def work():
    import torch
    from slidesparse import profiling
    profiler = profiling.enable()
    assert profiling.enable() is profiler
    profiler.layer(torch.zeros(4), 2, torch.zeros(3, 4, dtype=torch.int8))
    with profiling.stage("product", torch.zeros(1)):
        pass
if __name__ == "__main__":
    child = multiprocessing.get_context(sys.argv[1]).Process(target=work)
    child.start()
    child.join()
"""


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_worker_processes_print_their_profile_at_exit(method: str, tmp_path: object) -> None:
    script = f"{tmp_path}/child.py"
    with open(script, "w") as file:
        file.write(CHILD_PROGRAM)
    process = subprocess.run(
        [sys.executable, script, method], capture_output=True, text=True, timeout=120, check=True
    )
    assert process.stderr.count("SlideSparse profile: 1 steps") == 1
    assert "2x4    4  1 " in process.stderr


def test_profile_flag_parsing() -> None:
    assert Flags.from_environment({"SLIDESPARSE_PROFILE": "1"}).profile
    assert not Flags.from_environment({}).profile
    with pytest.raises(FlagError, match="SLIDESPARSE_PROFILE='maybe'"):
        Flags.from_environment({"SLIDESPARSE_PROFILE": "maybe"})


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["cusparselt", "cublaslt", "hopper"])
def test_gpu_calls_are_timed_eagerly_and_in_graphs(backend: str, profiler: Profiler) -> None:
    from gpu_layers import layer as gpu_layer
    from gpu_layers import normal

    sparse_layer = gpu_layer(backend, "6:8", INT8, 256, 256)
    x = normal(64, 256, 0)
    for _ in range(3):
        sparse_layer.linear(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(2):
            sparse_layer.linear(x)
    key = f"256x{sparse_layer.columns}", 64
    assert not profiler.replayed().entries  # not replayed yet
    for _ in range(3):
        graph.replay()
    profiler.table()
    times, replayed = profiler.times, profiler.replayed()
    assert (list(times.entries), list(replayed.entries)) == ([key], [key])
    assert (times.entries[key].calls, replayed.entries[key].calls) == (3, 2)
    assert (times.steps, replayed.steps) == (3, 2)  # a step has only one layer
    for step_times in (times, replayed):
        entry = step_times.entries[key]
        assert entry.timed == entry.calls
        assert [us > 0 for us in entry.us.values()] == [
            True,
            True,
            backend != "hopper",
        ]  # whose product scales
        assert 0 < sum(entry.us.values()) <= step_times.step_us[64]
        assert entry.algorithm
