"""SLIDESPARSE_PROFILE: times of stages, by layer and number of tokens."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
import torch
from test_ops import layer
from torch import Tensor

from slidesparse import ops, profiling
from slidesparse.flags import FlagError, Flags
from slidesparse.profiling import Profiler
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
    calls = {key: entry.calls for key, entry in profiler.entries.items()}
    assert calls == {(kind, m): n for kind in ("qkv_proj", "o_proj") for m, n in ((1, 1), (8, 3))}
    assert all(us > 0 for entry in profiler.entries.values() for us in entry.us.values())
    assert profiler.steps == 3  # the fourth has not ended
    profiler.table()
    assert profiler.steps == 4
    assert 0 < sum(us for entry in profiler.entries.values() for us in entry.us.values()) <= profiler.step_us


def test_what_runs_between_two_steps_is_in_neither(profiler: Profiler) -> None:
    """Such as a wait for requests, or graphs that are replayed."""
    layers, length, columns = two_layers()
    for pause in (0.0, 0.5, 0.5):
        time.sleep(pause)
        run(5, layers, length, columns)
    time.sleep(0.5)
    profiler.table()
    assert profiler.steps == 3
    assert profiler.step_us < 0.5e6


def test_the_table_names_what_costs_most_first(profiler: Profiler) -> None:
    profiler.entries["small", 16].calls = 2
    profiler.entries["small", 16].us |= {"product": 10.0}
    big = profiler.entries["big", 4096]
    big.calls, big.captured, big.algorithm = 5, 1, "19"
    big.us = {"quantize": 40.0, "product": 400.0, "scale": 60.0}
    profiler.step_us, profiler.steps = 1000.0, 2
    head, columns, first, second = profiler.table().splitlines()
    assert head.startswith("SlideSparse profile: 2 steps")
    assert "1 calls went into CUDA graphs, not timed: serve with --enforce-eager" in head
    assert columns.split() == ["layer", "M", "calls", *profiling.STAGES, "of", "all", "steps", "algorithm"]
    assert first.split() == ["big", "4096", "5", "10.0", "100.0", "15.0", "50.0%", "19"]
    assert second.split() == ["small", "16", "2", "0.0", "5.0", "0.0", "1.0%", "-"]


def test_results_do_not_change(profiler: Profiler) -> None:
    layers, length, columns = two_layers()
    x = torch.randn(3, 32)
    weight, scale = layers[0]
    profiled = ops.linear(x, weight, scale, None, length, 0, INT8, columns, "reference")
    profiling.disable()
    assert torch.equal(profiled, ops.linear(x, weight, scale, None, length, 0, INT8, columns, "reference"))
    assert profiling.enable() is not profiler
    assert profiling.enable().table() == ""


IN_A_CHILD = """
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
def test_worker_processes_print_when_they_end(method: str, tmp_path: object) -> None:
    script = f"{tmp_path}/child.py"
    with open(script, "w") as file:
        file.write(IN_A_CHILD)
    done = subprocess.run(
        [sys.executable, script, method], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stderr.count("SlideSparse profile: 1 steps") == 1
    assert "2x4    4  1 " in done.stderr


def test_the_flag() -> None:
    assert Flags.from_environment({"SLIDESPARSE_PROFILE": "1"}).profile
    assert not Flags.from_environment({}).profile
    with pytest.raises(FlagError, match="SLIDESPARSE_PROFILE='maybe'"):
        Flags.from_environment({"SLIDESPARSE_PROFILE": "maybe"})


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["cusparselt", "cublaslt", "hopper"])
def test_times_on_a_gpu_and_counts_what_graphs_capture(backend: str, profiler: Profiler) -> None:
    from gpu_layers import layer as gpu_layer
    from gpu_layers import normal

    made = gpu_layer(backend, "6:8", INT8, 256, 256)
    x = normal(64, 256, 0)
    for _ in range(3):
        made.linear(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made.linear(x)
    graph.replay()
    ((kind, tokens),) = profiler.entries
    profiler.collect()
    entry = profiler.entries[kind, tokens]
    assert (kind, tokens) == (f"256x{made.columns}", 64)
    assert (entry.calls, entry.captured) == (4, 1)
    assert [us > 0 for us in entry.us.values()] == [True, True, backend != "hopper"]  # whose product scales
    assert profiler.steps == 2
    assert profiler.step_us > 0
