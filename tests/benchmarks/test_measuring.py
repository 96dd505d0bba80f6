"""The measuring commands, with a library and a clock that need no GPU."""

from __future__ import annotations

import json
import os
from contextlib import nullcontext
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_library import CPU, GPU, FakeClock, FakeLibrary, Ticks, session, times_of
from torch import Tensor
from typer.testing import CliRunner

from benchmarks import linear, stock
from benchmarks.cli import app
from benchmarks.kernel import Group, KernelBench, model_groups
from benchmarks.linear import LinearBench
from benchmarks.stock import Stock
from slidesparse.blocks import dense_blocks
from slidesparse.gemm import tuned
from slidesparse.gemm.backend import LayerSpec
from slidesparse.gemm.problem import Problem
from slidesparse.tune import machine, measure
from slidesparse.tune.inputs import Inputs, Operands
from slidesparse.tune.machine import MissingError
from slidesparse.tune.measure import Launch
from slidesparse.tune.session import Session
from slidesparse.tune.shapes import Layer

LAYERS = (Layer("qkv", 64, 64), Layer("down", 32, 128))
MODEL = [("tiny", LAYERS)]
PATTERNS = ("2:4", "6:8", "14:16")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(tuned.CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


class FakeStock(Stock):
    def gemm(self, operands: Operands) -> Launch:
        assert operands.scale_x is not None
        assert operands.scale_w is not None
        return lambda i: None

    def linear(self, x: Tensor, weight: Tensor, scale_w: Tensor) -> Tensor:
        return x.new_zeros(x.shape[0], weight.shape[0])


def libraries() -> tuple[FakeLibrary, FakeLibrary]:
    return FakeLibrary("cublaslt", sparse=False, outs=("int32", "int8")), FakeLibrary()


def kernel_bench(run: Session, folder: Path, groups: list[Group], *found: FakeLibrary) -> KernelBench:
    return KernelBench(run, folder, groups, found, FakeStock(""), PATTERNS)


# --- kernel


def test_model_mode_measures_every_provider_and_pattern(tmp_path: Path) -> None:
    dense, sparse = libraries()
    run, steps = session(dense, sparse), []
    run.advance = steps.append
    bench = kernel_bench(run, tmp_path, model_groups(MODEL, ["int8", "fp16"], [16, 32]), dense, sparse)
    assert bench.run()
    assert len(steps) == bench.count
    found = bench.records.rows
    at = [row for row in found if row["layer"] == "qkv" and row["M"] == "16"]
    assert [(row["provider"], row["pattern"], row["algorithm"]) for row in at] == [
        ("cublaslt", "dense", "good"),
        ("cublaslt-int8", "dense", "good"),
        *(("cusparselt", pattern, "good") for pattern in PATTERNS),
        ("stock", "dense", "cutlass"),
    ]
    assert {(row["N"], row["K"], row["mode"], row["model"], row["dtype"]) for row in at} == {
        ("64", "64", "model", "tiny", "int8")
    }
    assert len(found) == 2 * 2 * len(at)  # fp16 has no library here


def test_patterns_with_the_same_columns_are_searched_once(tmp_path: Path) -> None:
    """K = 32: 6:8 and 14:16 have K' 48 and 56, for the library both 64."""
    dense, sparse = libraries()
    groups = model_groups([("tiny", (Layer("qkv", 32, 32),))], ["int8"], [16, 32])
    bench = kernel_bench(session(dense, sparse), tmp_path, groups, dense, sparse)
    assert bench.run()
    assert [problem.k for problem in sparse.searched] == [32, 64, 32, 64]
    assert sparse.packed == [(32, 32), (32, 64)]
    assert times_of(bench.records.rows, pattern="6:8") == times_of(bench.records.rows, pattern="14:16")


def test_a_stopped_run_is_continued_without_measuring_twice(tmp_path: Path) -> None:
    dense, sparse = libraries()
    groups = model_groups(MODEL, ["int8"], [16, 32])
    stopped = kernel_bench(session(dense, sparse, limit=4.5, now=Ticks()), tmp_path, groups, dense, sparse)
    assert not stopped.run()
    first = stopped.records.rows
    assert len(first) == 4
    with (tmp_path / "kernel.csv").open("a") as file:
        file.write("model,tiny,qkv,int8,14:16,16,64,6")
    before = len(dense.searched), len(sparse.searched)
    again = kernel_bench(session(dense, sparse), tmp_path, groups, dense, sparse)
    assert again.run()
    found = again.records.rows
    assert found[:4] == first
    assert len(found) == len({tuple(row.values())[:9] for row in found}) == 24
    assert (len(dense.searched), len(sparse.searched)) == (before[0] + 6, before[1] + 10)
    assert kernel_bench(session(limit=0.0), tmp_path, groups, dense, sparse).run()


def test_winners_of_what_serving_runs_are_saved(tmp_path: Path) -> None:
    dense, sparse = libraries()
    groups = model_groups(MODEL, ["int8"], [16])
    assert kernel_bench(session(dense, sparse), tmp_path, groups, dense, sparse).run()
    for library in (dense, sparse):
        for out, expected in (("bf16", sparse), ("int32", dense), ("int8", None)):
            problem = Problem("int8", out, 64, 64, 16)
            found = tuned.tuned_algorithm(GPU.subject(library), problem)
            assert found == ("good" if library is expected else None)


class FakeBlocks(FakeLibrary):
    """A sparse library that takes weights without a pattern, as ``hopper``."""

    takes_dense = True  # type: ignore[assignment]

    def pack(self, spec: LayerSpec, weight: Tensor) -> Tensor:
        assert spec.pattern is None
        assert int(weight.count_nonzero()) > weight.numel() // 2
        return weight


def test_a_sparse_library_multiplies_dense_weights_and_keeps_the_winner_of_sparse_ones(
    tmp_path: Path,
) -> None:
    blocks = FakeBlocks("hopper")
    groups = model_groups(MODEL, ["int8"], [16])
    bench = KernelBench(session(blocks), tmp_path, groups, [blocks], None, ["6:8"])
    assert bench.run()
    assert [row["pattern"] for row in bench.records.rows] == ["6:8", "dense"] * 2
    for columns, found in ((96, "good"), (64, None)):  # of 6:8, and of the dense weight, which 2:4 would have
        problem = Problem("int8", "bf16", 64, columns, 16)
        assert tuned.tuned_algorithm(GPU.subject(blocks), problem) == found


def test_what_a_library_refuses_is_noted_and_the_rest_measured(tmp_path: Path) -> None:
    dense, sparse = libraries()
    sparse.times = {"refused": 1.0}
    run = session(dense, sparse)
    bench = kernel_bench(run, tmp_path, model_groups(MODEL, ["int8"], [16]), dense, sparse)
    assert bench.run()
    assert len(run.skipped) == 2 * len(PATTERNS)
    assert {row["provider"] for row in bench.records.rows} == {"cublaslt", "cublaslt-int8", "stock"}


# --- linear; the backend of this machine is the reference


def linear_libraries() -> list[FakeLibrary]:
    return [FakeLibrary("reference", sparse=False, alignment=4), FakeLibrary("reference", alignment=4)]


def test_whole_layers_and_their_sums(tmp_path: Path) -> None:
    groups = model_groups(MODEL, ["int8", "fp8"], [4])

    def bench(run: Session) -> LinearBench:
        return LinearBench(run, tmp_path, groups, linear_libraries(), FakeStock(""), PATTERNS)

    stopped = bench(session(limit=5.5, now=Ticks()))
    assert not stopped.run()
    assert linear.SUM_LAYER not in {row["layer"] for row in stopped.records.rows}  # it needs all layers
    first = bench(session())
    assert first.run()
    found = first.records.rows
    layers = [
        (row["provider"], row["pattern"]) for row in found if (row["layer"], row["dtype"]) == ("qkv", "fp8")
    ]
    assert layers == [("stock", "dense"), ("reference", "dense"), *(("reference", p) for p in PATTERNS)]
    assert len(found) == 3 * 2 * 5
    for row in found:
        if row["layer"] == linear.SUM_LAYER:
            same = {name: row[name] for name in ("dtype", "pattern", "M", "provider")}
            parts = [times_of(found, layer=layer.name, **same)[0] for layer in LAYERS]
            assert float(row["p50_us"]) == pytest.approx(sum(parts), abs=1e-3)
    before = (tmp_path / "linear.csv").read_bytes()
    assert bench(session(limit=0.0)).run()
    assert (tmp_path / "linear.csv").read_bytes() == before


def test_the_layer_that_is_timed_computes_the_product() -> None:
    for provider in linear.providers(LAYERS[0], "int8", ["6:8"], linear_libraries(), None):
        weight = Inputs(CPU, 0).weight("int8", 64, provider.columns, provider.sparse)
        x = torch.randn(4, 64).to(torch.bfloat16)
        y = provider.launch([x], [provider.pack(weight)], torch.full((64, 1), 0.01))(0)
        assert isinstance(y, Tensor)
        assert (y.shape, y.dtype) == ((4, 64), torch.bfloat16)
        assert float(y.float().abs().mean()) > 1.0


# --- command line


def run(*command: object) -> dict[str, Any]:
    done = CliRunner().invoke(app, [*map(str, command), "--json"], catch_exceptions=False)
    assert done.exit_code == 0, done.stderr
    return dict(json.loads(done.stdout))


def test_the_commands_from_options_to_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dense, sparse = libraries()
    monkeypatch.setattr(machine, "require_gpu", lambda: GPU)
    monkeypatch.setattr(machine, "require_libraries", lambda gpu, names: [dense, sparse])
    monkeypatch.setattr(machine, "usable_libraries", lambda gpu: ([dense, sparse], []))
    monkeypatch.setattr(measure, "CudaClock", lambda device: nullcontext(FakeClock(dense, sparse)))
    options = ["--shapes", "64x64,32x128", "--dtype", "int8", "--m", "16,32", "--out", tmp_path / "out"]
    kernel = ["kernel", *options, "--pattern", "2_4,6:8", "--no-stock"]
    stopped = run(*kernel, "--time-limit", "0")
    assert (stopped["finished"], stopped["rows"], stopped["cells"], stopped["planned"]) == (False, 0, 0, 16)
    done = run(*kernel)
    assert (done["finished"], done["rows"], done["skipped"]) == (True, 2 * 2 * (2 + 2), [])
    assert done["cells"] == done["planned"] == 16
    document = json.loads((tmp_path / "out" / "kernel.json").read_text())
    assert document["gpu"] == GPU.name
    assert len(document["commands"]) == 2


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch is built with CUDA")
@pytest.mark.parametrize("command", ["spmm"])
def test_without_a_gpu_commands_say_so_and_exit_3(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, [command])
    assert (done.exit_code, done.stdout) == (3, "")
    assert "NVIDIA GPU" in done.stderr
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("command", "fact"),
    [
        ("kernel --mode round", "round"),
        ("kernel --m x", "'x'"),
        ("linear --shapes 64", "'64'"),
        ("spmm --dtype int8", "int8"),
        ("spmm --sparsity 5:4", "5:4"),
        ("report missing-folder", "missing-folder"),
    ],
)
def test_wrong_usage_exits_2(command: str, fact: str) -> None:
    done = CliRunner().invoke(app, command.split())
    assert (done.exit_code, done.stdout) == (2, "")
    assert fact in done.stderr


def test_stock_without_its_kernels_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stock, "NEEDED", ("no_such_kernel",))
    (tmp_path / "lib.so").write_text("no library")
    with pytest.raises(MissingError, match=r"no_such_kernel .*lib\.so.* --vllm-library"):
        stock.find(tmp_path / "lib.so")
    monkeypatch.setattr(stock, "_installed", list)
    assert stock.find(None) is None


@pytest.mark.parametrize(("share", "most"), [(Fraction(1, 2), 7), (Fraction(1, 3), 5)])
def test_mixed_weights_have_their_share_of_blocks(share: Fraction, most: int) -> None:
    """No strip of ten blocks is far from its share, so that all CTAs have as much to do."""
    weight = linear._with_dense_share(lambda made: made, share)(torch.ones(640, 1280, dtype=torch.int8))
    sparse = ~dense_blocks(weight)
    assert int(sparse.sum()) == round(100 * share)
    assert most - 4 <= int(sparse.sum(1).min()) <= int(sparse.sum(1).max()) <= most
    assert weight.count_nonzero() == weight.numel() - int(sparse.sum()) * 64 * 128 // 2
