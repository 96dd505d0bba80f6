"""The measuring commands, with a library and a clock that need no GPU."""

from __future__ import annotations

import os
from collections.abc import Iterable
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from fake_library import CPU, GPU, FakeGauge, FakeLibrary, Ticks, session, times_of
from torch import Tensor
from typer.testing import CliRunner

from benchmarks import kernel, linear, measure, stock
from benchmarks.cli import app
from benchmarks.energy import EnergyCounter
from benchmarks.measure import Figures, Job, Window, fill, take_turns
from benchmarks.records import KERNEL, LINEAR, Records
from benchmarks.stock import Stock
from slidesparse.blocks import dense_blocks
from slidesparse.gemm import tuned
from slidesparse.gemm.problem import Problem
from slidesparse.pattern import SlidePattern
from slidesparse.slide import obeys
from slidesparse.tune.inputs import Inputs, Operands, with_sparse_blocks
from slidesparse.tune.machine import MissingError
from slidesparse.tune.measure import Launch
from slidesparse.tune.session import Session
from slidesparse.tune.shapes import Layer

LAYERS = (Layer("qkv", 64, 64), Layer("down", 32, 128))
MODEL = [("tiny", LAYERS)]
PATTERNS = ("2:4", "6:8", "14:16")


@pytest.fixture(autouse=True)
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(tuned.CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(measure, "WARM_UP_SECONDS", 0.0)


class FakeStock(Stock):
    def gemm(self, operands: Operands) -> Launch:
        assert operands.scale_x is not None
        assert operands.scale_w is not None
        return lambda i: None

    def linear(self, x: Tensor, weight: Tensor, scale_w: Tensor) -> Tensor:
        return x.new_zeros(x.shape[0], weight.shape[0])


# --- turns, times and energies


def test_providers_take_turns_in_alternating_order() -> None:
    """On a GPU at its power limit, later measurements are slower: no provider may always be first."""
    gauge = FakeGauge()
    take_turns(gauge, [(lambda i: None, 1)] * 3)
    a, b, c = gauge.turns[:3]
    assert len({id(replay) for replay in (a, b, c)}) == 3
    assert gauge.turns == [a, b, c, c, b, a, a, b, c]


def test_energy_of_a_call_is_power_times_its_mean_time() -> None:
    """100 W for 20 us are 2 mJ, 300 W for 10 us 3 mJ; a window without power does not count."""
    windows = [Window([10.0, 30.0], 100.0), Window([10.0, 10.0], 300.0), Window([90.0, 90.0], None)]
    figures = Figures.of(windows, graphed=True)
    assert figures.row["mj"] == pytest.approx(2.5)
    assert figures.row["p50_us"] == 20.0
    assert Figures.of(windows[2:], graphed=True).row["mj"] is None


def test_power_is_that_between_ticks_of_the_counter(monkeypatch: pytest.MonkeyPatch) -> None:
    """The counter moves at 0.1, 0.2 and 0.3 s, by 40, 50 and 60 J; the first is of what ran before."""
    now, values = [0.0], [0, 0, 40_000, 40_000, 90_000, 150_000, 150_000]
    counter = EnergyCounter("GPU-none")
    assert not counter.poll()  # no NVML here
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    monkeypatch.setattr(counter, "read", lambda: values.pop(0))
    counter.restart()
    assert counter.watts is None
    for now[0] in (0.05, 0.1, 0.15, 0.2, 0.3, 0.35):
        assert counter.poll()
    assert counter.watts == pytest.approx((50 + 60) / 0.2)


def test_interrupted_tables_are_completed_by_whole_cells(tmp_path: Path) -> None:
    """Providers of a cell are compared, so one that lacks a provider is measured again, and the last rows count."""
    measured: list[int] = []

    def jobs(*providers: str) -> Iterable[Job]:
        for m in (16, 32):
            keys = [dict(zip(LINEAR.key, ("a", "qkv", "int8", "2:4", m, p), strict=True)) for p in providers]

            def values(m: int = m) -> list[dict[str, object]]:
                measured.append(m)
                return [{"p50_us": float(len(measured))}, *({} for _ in providers[1:])]

            yield Job("", keys, values)

    def run(*providers: str, limit: float | None = None) -> bool:
        return fill(session(limit=limit, now=Ticks()), Records(tmp_path, LINEAR), jobs(*providers))

    assert not run("stock", limit=1.5)
    assert measured == [16]
    assert run("stock")
    assert run("stock")
    assert measured == [16, 32]
    assert run("stock", "hopper")
    assert run("stock", "hopper")  # the refused one is not tried again
    assert measured == [16, 32, 16, 32]
    assert times_of(Records(tmp_path, LINEAR).rows[2:], provider="stock") == [3.0, 4.0]


# --- kernel


def libraries() -> tuple[FakeLibrary, FakeLibrary]:
    return FakeLibrary("cublaslt", sparse=False, outs=("int32", "int8")), FakeLibrary()


def kernel_rows(
    run: Session, folder: Path, groups: list[kernel.Group], *found: FakeLibrary
) -> list[dict[str, str]]:
    records = Records(folder, KERNEL)
    gauge = FakeGauge(*found)
    assert fill(run, records, kernel.jobs(run, gauge, groups, found, FakeStock(), PATTERNS))
    return records.rows


def test_every_provider_and_pattern_of_a_gemm_is_measured(tmp_path: Path) -> None:
    dense, sparse = libraries()
    groups = kernel.model_groups(MODEL, ["int8", "fp16"], [16, 32])
    found = kernel_rows(session(dense, sparse), tmp_path, groups, dense, sparse)
    at = [row for row in found if row["layer"] == "qkv" and row["M"] == "16"]
    assert [(row["provider"], row["pattern"], row["algorithm"]) for row in at] == [
        ("cublaslt", "dense", "good"),
        ("cublaslt-int8", "dense", "good"),
        *(("cusparselt", pattern, "good") for pattern in PATTERNS),
        ("stock", "dense", "cutlass"),
    ]
    assert len(found) == 2 * 2 * len(at)  # fp16 has no library here
    for library in (dense, sparse):  # winners of what serving runs are saved
        for out, expected in (("bf16", sparse), ("int32", dense), ("int8", None)):
            found_name = tuned.tuned_algorithm(GPU.subject(library), Problem("int8", out, 64, 64, 16))
            assert found_name == ("good" if library is expected else None)


def test_patterns_with_the_same_columns_are_searched_once(tmp_path: Path) -> None:
    """K = 32: 6:8 and 14:16 have K' 48 and 56, for the library both 64."""
    dense, sparse = libraries()
    groups = kernel.model_groups([("tiny", (Layer("qkv", 32, 32),))], ["int8"], [16, 32])
    rows = kernel_rows(session(dense, sparse), tmp_path, groups, dense, sparse)
    assert [problem.k for problem in sparse.searched] == [32, 64, 32, 64]
    assert sparse.packed == [(32, 32), (32, 64)]
    assert times_of(rows, pattern="6:8") == times_of(rows, pattern="14:16")


class FakeBlocks(FakeLibrary):
    """A sparse library that takes weights without a pattern, as ``hopper``."""

    takes_dense = True  # type: ignore[assignment]

    def pack(self, weight: Tensor, pattern: object, phase: int = 0) -> Tensor:
        assert pattern is None
        assert int(weight.count_nonzero()) > weight.numel() // 2
        return weight


def test_winner_of_a_dense_weight_does_not_replace_that_of_sparse_ones(tmp_path: Path) -> None:
    library = FakeBlocks("hopper")
    groups = kernel.model_groups(MODEL, ["int8"], [16])
    rows = kernel_rows(session(library), tmp_path, groups, library)
    assert [row["pattern"] for row in rows] == [*PATTERNS, "dense", "dense"] * 2
    for columns, found in (
        (96, "good"),
        (64, "good"),
    ):  # of 6:8, and of 2:4, whose K' is that of the dense weight
        problem = Problem("int8", "bf16", 64, columns, 16)
        assert tuned.tuned_algorithm(GPU.subject(library), problem) == found
    assert [problem.k for problem in library.searched].count(64) == 2


def test_what_a_library_refuses_is_noted_and_the_rest_measured(tmp_path: Path) -> None:
    dense, sparse = libraries()
    sparse.times = {"refused": 1.0}
    run = session(dense, sparse)
    rows = kernel_rows(run, tmp_path, kernel.model_groups(MODEL, ["int8"], [16]), dense, sparse)
    assert len(run.skipped) == 2 * len(PATTERNS)
    assert {row["provider"] for row in rows if row["p50_us"]} == {"cublaslt", "cublaslt-int8", "stock"}


# --- linear; the backend of this machine is the reference


def linear_libraries() -> list[FakeLibrary]:
    return [FakeLibrary("reference", sparse=False, alignment=4), FakeLibrary("reference", alignment=4)]


def test_whole_layers_and_their_sums(tmp_path: Path) -> None:
    groups, run = kernel.model_groups(MODEL, ["int8", "fp8"], [4]), session()
    records = Records(tmp_path, LINEAR)
    jobs = list(linear.jobs(run, FakeGauge(), groups, linear_libraries(), FakeStock(), PATTERNS))
    assert fill(run, records, jobs[:3])
    linear.add_sums(records, groups)
    sums = [row for row in records.rows if row["layer"] == "sum"]
    assert {row["dtype"] for row in sums} == {"int8"}  # a sum needs all layers
    assert fill(run, records, jobs)
    linear.add_sums(records, groups)
    layers = [
        (row["provider"], row["pattern"])
        for row in records.rows
        if (row["layer"], row["dtype"]) == ("qkv", "fp8")
    ]
    assert layers == [("stock", "dense"), ("reference", "dense"), *(("reference", p) for p in PATTERNS)]
    assert len(records.rows) == 3 * 2 * 5
    for row in records.rows:
        if row["layer"] == "sum":
            same = {name: row[name] for name in ("dtype", "pattern", "M", "provider")}
            parts = [times_of(records.rows, layer=layer.name, **same)[0] for layer in LAYERS]
            assert float(row["p50_us"]) == pytest.approx(sum(parts), abs=1e-3)
            assert float(row["mj"]) == pytest.approx(2 * 100 * 5.01 / 1e3, abs=1e-3)


def test_the_layer_that_is_timed_computes_the_product() -> None:
    for provider in linear.providers(LAYERS[0], "int8", ["6:8"], linear_libraries(), None):
        weight = Inputs(CPU, 0).weight("int8", 64, provider.columns, provider.sparse)
        x = torch.randn(4, 64).to(torch.bfloat16)
        y = linear._launch(provider.call, [x], [provider.pack(weight)], torch.full((64, 1), 0.01), 0)
        assert (y.shape, y.dtype) == ((4, 64), torch.bfloat16)
        assert float(y.float().abs().mean()) > 1.0


@pytest.mark.parametrize(("share", "most"), [(Fraction(1, 2), 7), (Fraction(1, 3), 5)])
def test_mixed_weights_have_their_share_of_blocks_with_random_masks(share: Fraction, most: int) -> None:
    """No strip of ten blocks is far from its share, so that all CTAs have as much to do."""
    weight = with_sparse_blocks(torch.ones(640, 1280, dtype=torch.int8), float(share))
    sparse = ~dense_blocks(weight)
    assert int(sparse.sum()) == round(100 * share)
    assert most - 4 <= int(sparse.sum(1).min()) <= int(sparse.sum(1).max()) <= most
    assert weight.count_nonzero() == weight.numel() - int(sparse.sum()) * 64 * 128 // 2
    groups = weight.view(-1, 4)
    masks, counts = groups[groups.sum(1) == 2].unique(dim=0, return_counts=True)
    assert len(masks) == 6
    assert int(counts.min()) > 0.9 * int(counts.sum()) / 6


def test_int8_codes_are_normal() -> None:
    """Uniform codes would make a GPU at its power limit run at another clock than a model's."""
    codes = Inputs(CPU, 0).weight("int8", 256, 1024, sparse=False).double()
    assert float(codes.std()) == pytest.approx(35, rel=0.02)
    assert float((codes.abs() < 24).double().mean()) == pytest.approx(0.5, abs=0.02)  # 0.674 sigma
    sparse = Inputs(CPU, 0).weight("int8", 256, 1024, sparse=True)
    assert obeys(sparse, SlidePattern.parse("2:4"))
    assert sparse.count_nonzero() == sparse.numel() // 2


# --- command line


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch is built with CUDA")
@pytest.mark.parametrize("command", ["kernel", "linear", "spmm"])
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
        ("spmm --sparsity 3:40", "KEPT:GROUP"),
        ("report missing-folder", "missing-folder"),
    ],
)
def test_wrong_usage_exits_2(command: str, fact: str) -> None:
    done = CliRunner().invoke(app, command.split())
    assert (done.exit_code, done.stdout) == (2, "")
    assert fact in done.stderr


def test_stock_without_its_kernels_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stock, "LIBRARIES", "__init__.py")  # loads as no library
    monkeypatch.setattr(stock, "NEEDED", ("no_such_kernel",))
    with pytest.raises(MissingError, match=r"no_such_kernel .*cannot be loaded"):
        stock.find()
    monkeypatch.setattr(stock, "LIBRARIES", "no such file")
    assert stock.find() is None
