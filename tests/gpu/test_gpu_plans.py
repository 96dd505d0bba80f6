"""Plans, workspaces and streams of the GEMM libraries on a GPU, and their operators in CUDA graphs."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from gpu_layers import BACKENDS, LIBRARIES, PackedLayer, codes, gpu, layer, normal, on_a_new_thread
from torch import Tensor

from slidesparse.gemm import cusparselt
from slidesparse.gemm.cusparselt import CuSparseLt
from slidesparse.gemm.problem import LibraryError, Problem, Tensors, bucket
from slidesparse.quantize import FP8, INT8

pytestmark = pytest.mark.gpu

SIDE = 256  # N and K
KINDS = [(backend, dtype) for backend in BACKENDS for dtype in ("int8", "fp8")]


@pytest.fixture(scope="module", params=KINDS, ids="-".join)
def square_layer(request: pytest.FixtureRequest) -> PackedLayer:
    """Return a small square layer of each library and type."""
    backend, dtype = request.param
    return layer(backend, "6:8", {"int8": INT8, "fp8": FP8}[dtype], SIDE, SIDE)


@pytest.fixture(scope="module")
def cached() -> PackedLayer:
    """Return a layer of the backend whose plans serve one number of tokens and are cached per thread."""
    return layer("cusparselt", "6:8", INT8, SIDE, SIDE)


def at_once(jobs: Sequence[Callable[[], Tensor]]) -> list[int]:
    """Run each job in its own thread and stream; return the number of wrong elements of each."""
    torch.cuda.synchronize()
    streams, start = [torch.cuda.Stream() for _ in jobs], threading.Barrier(len(jobs))
    assert len({stream.cuda_stream for stream in streams}) == len(jobs)

    def work(stream: torch.cuda.Stream, job: Callable[[], Tensor]) -> int:
        with torch.cuda.stream(stream):
            start.wait(timeout=60)
            return int(job())

    with ThreadPoolExecutor(len(jobs)) as pool:
        return list(pool.map(work, streams, jobs))


def test_threads_on_separate_streams_are_independent(square_layer: PackedLayer) -> None:
    """Numbers of tokens change in two orders; products are compared with those of one thread."""
    tokens = (1, 16, 17, 40, 64, 100, 300)
    inputs = {m: square_layer.quantized(normal(m, SIDE, m)) for m in tokens}
    expected = {m: square_layer.product(*inputs[m], None, torch.bfloat16) for m in tokens}

    def job(order: Sequence[int]) -> Tensor:
        mismatches = torch.zeros((), dtype=torch.int64, device=gpu())
        for _ in range(30):
            for m in order:
                mismatches += (square_layer.product(*inputs[m], None, torch.bfloat16) != expected[m]).sum()
        return mismatches

    assert at_once([lambda: job(tokens), lambda: job(tokens[::-1])]) == [0, 0]


def test_streams_and_graphs_have_their_own_workspaces() -> None:
    """Algorithms keep partial sums in workspaces of two streams with different operands, which run at the same time.

    So do two graphs of one stream.
    """
    library, m, n, k = LIBRARIES["cusparselt"], 16, 256, 8192
    packed, problem = layer("cusparselt", "2:4", INT8, n, k).packed, Problem("int8", "int32", n, k, m)
    inputs = [codes(m, k, seed) for seed in (1, 2)]
    algorithm = _with_workspace(library, problem, inputs[0], packed)
    if algorithm is None:
        pytest.skip(f"the library has no algorithm with a workspace for {problem}")
    expected = [_run(library, problem, algorithm, q, packed) for q in inputs]

    def job(index: int) -> Tensor:
        mismatches = torch.zeros((), dtype=torch.int64, device=gpu())
        plan, out = library.plan(problem, gpu(), algorithm), torch.empty_like(expected[index])
        for _ in range(300):
            plan(Tensors(inputs[index], packed, out))
            mismatches += (out != expected[index]).sum()
        return mismatches

    assert at_once([lambda: job(0), lambda: job(1)]) == [0, 0]
    stream, graphs, outs = torch.cuda.Stream(), [torch.cuda.CUDAGraph() for _ in inputs], []
    plan = library.plan(problem, gpu(), algorithm)
    for graph, q in zip(graphs, inputs, strict=True):
        outs.append(torch.empty_like(expected[0]))
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(10):
                plan(Tensors(q, packed, outs[-1]))

    def replay(index: int) -> Tensor:
        mismatches = torch.zeros((), dtype=torch.int64, device=gpu())
        for _ in range(200):
            graphs[index].replay()
            mismatches += (outs[index] != expected[index]).sum()
        return mismatches

    assert at_once([lambda: replay(0), lambda: replay(1)]) == [0, 0]


def _run(library: CuSparseLt, problem: Problem, algorithm: str, q: Tensor, packed: Tensor) -> Tensor:
    out = torch.empty(problem.m, problem.n, dtype=torch.int32, device=gpu())
    library.plan(problem, gpu(), algorithm)(Tensors(q, packed, out))
    return out


def _with_workspace(library: CuSparseLt, problem: Problem, q: Tensor, packed: Tensor) -> str | None:
    """Return the first algorithm that needs a workspace and runs."""
    for algorithm in library.algorithms(problem, gpu()):
        try:
            if library.plan(problem, gpu(), algorithm).workspace:
                _run(library, problem, algorithm, q, packed)
                return algorithm
        except RuntimeError:  # refused when planned or run
            continue
    return None


def test_evicted_plans_leak_no_memory(cached: PackedLayer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of 8 creates all 48 plans of 1..1000 tokens again in each pass: 480 in ten passes.

    Plans take no device memory. The bound of 4 MiB of host memory, 9 KB per plan, covers rounding by allocators and
    memory kept by the driver; a leaked plan with its descriptors is larger.
    """
    inputs = cached.quantized(normal(1000, SIDE, 0))
    expected = cached.product(*inputs, None, torch.bfloat16)

    def passes(times: int) -> tuple[int, int]:
        for _ in range(times):
            for rows in sorted({bucket(m) for m in range(1, 1001)}):
                m = min(rows, 1000)
                output = cached.product(inputs[0][:m], inputs[1][:m], None, torch.bfloat16)
                assert cusparselt._thread.plan.cache_info().currsize <= 8
            assert torch.equal(output, expected)
        del output
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated(), _resident()

    def run() -> tuple[int, int]:
        (device, host), (device_later, host_later) = passes(2), passes(10)
        return device_later - device, host_later - host

    monkeypatch.setattr(cusparselt, "PLAN_CACHE_CAPACITY", 8)
    device, host = on_a_new_thread(run)
    assert device == 0
    assert host <= 4 << 20, f"{host >> 10} KiB more"


def _resident() -> int:
    """Return the bytes of resident host memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def test_cuda_graph_equals_eager(square_layer: PackedLayer) -> None:
    """Inputs change between replays."""
    tokens = (1, 17, 100)
    bias = normal(1, SIDE, 9)[0]
    inputs = {m: normal(m, SIDE, m) for m in tokens}
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for m in tokens:
            square_layer.linear(inputs[m], bias)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        outputs = {m: square_layer.linear(inputs[m], bias) for m in tokens}
    for seed in (1, 2, 3):
        fresh = {m: normal(m, SIDE, 100 * seed + m) * seed for m in tokens}
        for m in tokens:
            inputs[m].copy_(fresh[m])
        graph.replay()
        torch.cuda.synchronize()
        for m in tokens:
            assert torch.equal(outputs[m], square_layer.linear(fresh[m], bias)), f"{m} tokens, replay {seed}"


def test_cusparselt_refuses_other_sizes_and_algorithms() -> None:
    for n, k in ((40, 64), (64, 40)):
        with pytest.raises(LibraryError, match=f"multiples of 32, found {n} x {k}"):
            LIBRARIES["cusparselt"].operand(torch.zeros(n, k, dtype=INT8, device=gpu()))
    for n, algorithm in ((40, None), (64, "9999")):
        with pytest.raises(LibraryError, match=rf"cusparseLt.* int8 \[16, 64\] @ \[{n}, 64\].T -> int32"):
            LIBRARIES["cusparselt"].plan(Problem("int8", "int32", n, 64, 16), gpu(), algorithm)
