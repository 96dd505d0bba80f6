"""The measuring commands on a GPU, with the real libraries, at small sizes."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
import torch
from gpu_layers import gpu, require_hopper
from typer.testing import CliRunner

from benchmarks.cli import app as benchmarks
from benchmarks.conditions import usable_libraries
from benchmarks.stock import find
from slidesparse.cli.main import app
from slidesparse.gemm import tuned
from slidesparse.gemm.hopper.backend import Hopper
from slidesparse.gemm.problem import ALL_2_4, CODED, LibraryError, Problem
from slidesparse.tune.inputs import Inputs
from slidesparse.tune.machine import require_gpu
from slidesparse.tune.measure import own_stream
from slidesparse.tune.search import gemm_contest, search

pytestmark = pytest.mark.gpu
GIB = 1 << 30


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(tuned.CACHE_VARIABLE, str(tmp_path / "cache"))


def test_clock_falls_back_to_events_if_capture_fails() -> None:
    gpu = require_gpu()
    x = torch.ones(1024, device=gpu.device)
    with own_stream(gpu.device) as clock:
        assert not clock.prepare(lambda i: x.sum().item(), 1, 1.0, 1.0).graphed
        torch.cuda.empty_cache()  # refuses while the allocator assumes a capture
        assert clock.prepare(lambda i: x.sum(), 1, 1.0, 1.0).graphed

        def refuse(i: int) -> None:
            raise LibraryError("refused")

        with pytest.raises(LibraryError, match="refused"):
            clock.prepare(refuse, 1, 1.0, 1.0)


def test_graphs_share_memory() -> None:
    """With memory of its own for each graph, searches of a 7B's block with 8192 tokens left no room for the last."""
    with own_stream(require_gpu().device) as clock:
        before = torch.cuda.memory_reserved()
        replays = [
            clock.prepare(lambda i: torch.zeros(GIB, dtype=torch.uint8, device="cuda"), 1, 1e6, 1.0)
            for _ in range(4)
        ]
        assert all(replay.graphed for replay in replays)
        assert torch.cuda.memory_reserved() - before < 2 * GIB


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
@pytest.mark.parametrize("name", ["cublaslt", "cusparselt", "hopper"])
def test_search_finds_an_algorithm_with_a_correct_result(name: str, dtype: str) -> None:
    """The result is compared with float64. FP8 tensor cores keep about 14 bits of a sum: 2^-9 of the norm is
    far above their error, and rounding to BF16 adds another 2^-9.
    """
    gpu = require_gpu()
    library = next((candidate for candidate in usable_libraries(gpu)[0] if candidate.name == name), None)
    if library is None:
        pytest.skip(f"{name} is not for {gpu.name}")
    for out in library.products.get(dtype, ())[:2]:
        problem = Problem(dtype, out, 256, 512, 128, library.epilogue(dtype, out))
        with own_stream(gpu.device) as clock:
            inputs = Inputs(gpu.device, gpu.l2_bytes)
            weight = inputs.weight(dtype, 256, 512, library.sparse)
            operands = inputs.operands(problem, [library.operand(weight)])
            result = search(gemm_contest(library, problem, operands, gpu.device), clock)
            operands.launch(library.plan(problem, gpu.device, result.algorithm))(0)
        assert result.tried > result.refused + result.wrong
        assert result.timing.graphed
        exact_sums = operands.activations[0].double() @ weight.double().t()
        if problem.scale == "both":
            exact_sums = exact_sums * operands.scale_w.double() * operands.scale_x.double()[:, None]
        error = (operands.outs[0].double() - exact_sums).norm() / exact_sums.norm()
        assert error <= (0 if out == "int32" else 2.0**-8)


def test_tune_searches_a_block_by_the_operators_that_serve_it() -> None:
    """With a norm, an activation and another kernel between its layers; each problem gets a configuration that runs."""
    require_hopper()
    shapes, ratios = "6144x2048,2048x2048,8192x2048,2048x4096", ("2:4", "4:6", "6:8", "2:4@50%")
    words = ["tune", "--shapes", shapes, "--pattern", ",".join(ratios), "--m", "48", "--library", "hopper"]
    result = CliRunner().invoke(app, [*words, "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.stderr
    summary = json.loads(result.stdout)
    assert (summary["tuned"], summary["wrong"], summary["skipped"]) == (4 * len(ratios) * 2, 0, [])
    hopper, device = Hopper(), gpu()
    for blocks in (ALL_2_4, CODED):
        problem = Problem("int8", "bf16", 6144, 2048, 48, "both", blocks=blocks)
        found = tuned.tuned_algorithm(require_gpu().subject(hopper), problem)
        assert found
        hopper.plan(problem, device, found)


def test_tune_and_benchmark_commands_fill_their_tables(tmp_path: Path) -> None:
    common = ["--shapes", "256x512,512x256", "--dtype", "int8,fp8", "--pattern", "2:4,6:8", "--m", "64,128"]

    def run(*command: str) -> dict[str, object]:
        program = app if command[0] == "tune" else benchmarks
        result = CliRunner().invoke(program, [*command, "--json"], catch_exceptions=False)
        assert result.exit_code == 0, result.stderr
        summary = json.loads(result.stdout)
        assert (summary["finished"], summary["skipped"]) == (True, [])
        return dict(summary)

    tune = ["tune", *common, "--library", "cusparselt"]
    first, second = run(*tune), run(*tune)
    assert first["known"] == second["tuned"] == 0
    gemms = 2 * 2 * 2  # in two types, patterns and outputs
    assert first["tuned"] == second["known"] == 2 * 2 * gemms  # layers and M
    bench = [*common, "--provider", "cublaslt,cusparselt", "--out", str(tmp_path / "out")]
    run("kernel", *bench)
    with_kernels = find() is not None  # vLLM's, of norms and activations between the layers
    run("linear", *(bench if with_kernels else [*common, *bench[-2:], "--provider", "hopper"]))
    with (tmp_path / "out" / "kernel.csv").open() as file:
        kernels = list(csv.DictReader(file))
    assert len(kernels) == 2 * 2 * 2 * 3  # layers, M and types
    assert all(0 < float(row["p20_us"]) <= float(row["p50_us"]) <= float(row["p80_us"]) for row in kernels)
    with (tmp_path / "out" / "linear.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 2 * 2 * 3  # types, M, and dense and two patterns
    conditions = json.loads((tmp_path / "out" / "kernel.json").read_text())
    assert conditions["gpu"] == torch.cuda.get_device_name()
