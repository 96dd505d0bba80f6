"""The benchmarks and their command lines, with a library and a clock that need no GPU."""

from __future__ import annotations

import dataclasses
import json
import os
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import pytest
import torch
from fake_library import CPU, GPU, FakeClock, FakeLibrary, Ticks, session, times_of
from hopper_stand_in import StandIn
from torch import Tensor
from typer.testing import CliRunner

from slidesparse import reference
from slidesparse.bench import bandwidth, machine, measure, stock
from slidesparse.bench import linear as linears
from slidesparse.bench import session as sessions
from slidesparse.bench.bandwidth import Cell, cells
from slidesparse.bench.inputs import Inputs, Rotation
from slidesparse.bench.kernel import COLUMNS, KernelBench, model_groups, square_groups
from slidesparse.bench.linear import LinearBench, add_sums
from slidesparse.bench.machine import MissingError
from slidesparse.bench.measure import Launch
from slidesparse.bench.records import Records
from slidesparse.bench.session import Session
from slidesparse.bench.shapes import Layer
from slidesparse.bench.stock import Stock
from slidesparse.cli import app
from slidesparse.gemm import hopper, tuned
from slidesparse.gemm.library import Problem
from slidesparse.pattern import SlidePattern

pytest_plugins = ("hopper_fixtures",)

LAYERS = (Layer("qkv", 64, 64), Layer("down", 32, 128))
MODEL = [("tiny", LAYERS)]
PATTERNS = ("2:4", "6:8", "14:16")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(tuned.CACHE, str(tmp_path / "cache"))
    tuned._tables.cache_clear()


def rows(path: Path) -> list[dict[str, str]]:
    return Records(path, COLUMNS, COLUMNS[:9]).rows


# --- kernel


@dataclass(frozen=True)
class FakeStock(Stock):
    """Exact, and counts its launches."""

    path: str = "fake"
    calls: list[str] = field(default_factory=list)

    def gemm(self, rotation: Rotation) -> Launch:
        assert rotation.scale_x is not None
        assert rotation.scale_w is not None
        return lambda i: self.calls.append("gemm")

    def linear(self, x: Tensor, weight: Tensor, scale_w: Tensor) -> Tensor:
        self.calls.append("linear")
        return x.new_zeros(x.shape[0], weight.shape[0])


def libraries() -> tuple[FakeLibrary, FakeLibrary]:
    return FakeLibrary("cublaslt", sparse=False, outs=("int32", "int8")), FakeLibrary()


def kernel_bench(run: Session, folder: Path, *found: FakeLibrary) -> KernelBench:
    return KernelBench(run, found, FakeStock(), PATTERNS, folder)


def test_model_mode_measures_every_provider_and_pattern(tmp_path: Path) -> None:
    dense, sparse = libraries()
    run, steps = session(dense, sparse), []
    run.advance = steps.append
    bench = kernel_bench(run, tmp_path, dense, sparse)
    groups = model_groups(MODEL, ["int8", "fp16"], [16, 32])
    assert bench.run(groups)
    assert len(steps) == bench.count(groups)
    assert (tmp_path / "kernel.csv").read_text().splitlines()[0] == (
        "mode,model,layer,dtype,pattern,M,N,K,provider,p20_us,p50_us,p80_us,algorithm"
    )
    found = rows(tmp_path / "kernel.csv")
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
    assert bench.peaks() == {"int8": round(2 * 32 * 32 * 128 / 5.02 / 1e6, 1)}


def test_patterns_with_the_same_columns_are_searched_once(tmp_path: Path) -> None:
    """K = 32: 6:8 and 14:16 have K' 48 and 56, for the library both 64."""
    dense, sparse = libraries()
    bench = kernel_bench(session(dense, sparse), tmp_path, dense, sparse)
    groups = model_groups([("tiny", (Layer("qkv", 32, 32),))], ["int8"], [16, 32])
    assert bench.run(groups)
    assert [problem.k for problem in sparse.searched] == [32, 64, 32, 64]
    assert sparse.packed == [(32, 32), (32, 64)]
    assert times_of(bench.records.rows, pattern="6:8") == times_of(bench.records.rows, pattern="14:16")


def test_square_mode(tmp_path: Path) -> None:
    dense, sparse = libraries()
    bench = kernel_bench(session(dense, sparse), tmp_path, dense, sparse)
    assert bench.run(square_groups(["fp8"], [32, 64]))
    sizes = {(row["M"], row["N"], row["K"], row["model"], row["layer"]) for row in bench.records.rows}
    assert sizes == {(size, size, size, "square", "square") for size in ("32", "64")}


def test_a_stopped_run_is_continued_without_measuring_twice(tmp_path: Path) -> None:
    dense, sparse = libraries()
    groups = model_groups(MODEL, ["int8"], [16, 32])
    assert not kernel_bench(session(dense, sparse, limit=4.5, now=Ticks()), tmp_path, dense, sparse).run(
        groups
    )
    first = rows(tmp_path / "kernel.csv")
    assert len(first) == 4
    with (tmp_path / "kernel.csv").open("a") as file:
        file.write("model,tiny,qkv,int8,14:16,16,64,6")
    before = len(dense.searched), len(sparse.searched)
    assert kernel_bench(session(dense, sparse), tmp_path, dense, sparse).run(groups)
    found = rows(tmp_path / "kernel.csv")
    assert found[:4] == first
    assert len(found) == len({tuple(row.values())[:9] for row in found}) == 24
    assert (len(dense.searched), len(sparse.searched)) == (before[0] + 6, before[1] + 10)
    assert kernel_bench(session(limit=0.0), tmp_path, dense, sparse).run(groups)


def test_winners_of_what_serving_runs_are_saved(tmp_path: Path) -> None:
    dense, sparse = libraries()
    assert kernel_bench(session(dense, sparse), tmp_path, dense, sparse).run(
        model_groups(MODEL, ["int8"], [16])
    )
    for library in (dense, sparse):
        for out, expected in (("bf16", sparse), ("int32", dense), ("int8", None)):
            problem = Problem("int8", out, 64, 64, 16)
            found = tuned.choice(library.name, "1.2.3", GPU.name, GPU.capability, problem)
            assert found == ("good" if library is expected else None)


def test_what_a_library_refuses_is_noted_and_the_rest_measured(tmp_path: Path) -> None:
    dense, sparse = libraries()
    sparse.times = {"refused": 1.0}
    run = session(dense, sparse)
    bench = kernel_bench(run, tmp_path, dense, sparse)
    assert bench.run(model_groups(MODEL, ["int8"], [16]))
    assert len(run.skipped) == 2 * len(PATTERNS)
    assert {row["provider"] for row in bench.records.rows} == {"cublaslt", "cublaslt-int8", "stock"}


# --- linear


@pytest.fixture
def linear_libraries() -> list[FakeLibrary]:
    """Names of the backend that runs on this machine; the layers are those of `slidesparse.ops`."""
    return [FakeLibrary("reference", sparse=False), FakeLibrary("reference")]


def test_whole_layers_and_their_sums(tmp_path: Path, linear_libraries: list[FakeLibrary]) -> None:
    bench = LinearBench(session(), linear_libraries, FakeStock(), PATTERNS, tmp_path)
    groups = model_groups(MODEL, ["int8", "fp8"], [4])
    assert bench.run(groups)
    assert (tmp_path / "linear.csv").read_text().splitlines()[0] == (
        "model,layer,dtype,pattern,M,provider,p20_us,p50_us,p80_us"
    )
    found = bench.records.rows
    layers = [
        (row["provider"], row["pattern"]) for row in found if (row["layer"], row["dtype"]) == ("qkv", "fp8")
    ]
    assert layers == [("stock", "dense"), ("reference", "dense"), *(("reference", p) for p in PATTERNS)]
    assert len(found) == 3 * 2 * 5
    for row in found:
        if row["layer"] == linears.SUM:
            same = {name: row[name] for name in ("dtype", "pattern", "M", "provider")}
            parts = [times_of(found, layer=layer.name, **same)[0] for layer in LAYERS]
            assert float(row["p50_us"]) == pytest.approx(sum(parts), abs=1e-3)
    before = (tmp_path / "linear.csv").read_bytes()
    assert LinearBench(session(limit=0.0), linear_libraries, FakeStock(), PATTERNS, tmp_path).run(groups)
    assert (tmp_path / "linear.csv").read_bytes() == before


def test_the_layer_that_is_timed_computes_the_product(linear_libraries: list[FakeLibrary]) -> None:
    providers = linears.providers(LAYERS[0], "int8", ["6:8"], linear_libraries, None)
    assert len(providers) == len(linear_libraries) > 0
    for provider in providers:
        weight = Inputs(CPU, 0).weight("int8", 64, provider.columns, provider.sparse)
        x = torch.randn(4, 64).to(torch.bfloat16)
        y = provider.launch([x], [provider.pack(weight)], torch.full((64, 1), 0.01))(0)
        assert isinstance(y, Tensor)
        assert (y.shape, y.dtype) == ((4, 64), torch.bfloat16)
        assert float(y.float().abs().mean()) > 1.0


def test_a_sum_needs_all_layers_and_adds_absolute_times(tmp_path: Path) -> None:
    table = Records(tmp_path / "t.csv", linears.COLUMNS, linears.KEY)
    groups = model_groups(MODEL, ["int8"], [16])

    def add(layer: str, m: int, *times: float) -> None:
        key = {"model": "tiny", "layer": layer, "dtype": "int8", "pattern": "6:8", "M": m, "provider": "p"}
        table.add(key | dict(zip(linears.TIMES, times, strict=True)))

    add("qkv", 16, 1.0, 2.0, 3.0)
    add("qkv", 32, 1.0, 2.0, 3.0)
    add_sums(table, groups)
    assert len(table.rows) == 2
    add("down", 16, 10.0, 20.5, 30.0)
    for _ in range(2):  # once only
        add_sums(table, groups)
        assert [list(row.values()) for row in table.rows[3:]] == [
            ["tiny", "sum", "int8", "6:8", "16", "p", "11.000", "22.500", "33.000"]
        ]


# --- bandwidth, stock, command line


def test_bytes_that_a_kernel_moves() -> None:
    assert Cell("quant_only", "int8", 16, 64).moved == 16 * 64 * 3 + 16 * 4
    assert Cell("quant_slide 6:8", "fp8", 16, 64).moved == 16 * (64 * 2 + 96) + 16 * 4
    for norm in ("norm_quant_slide 6:8", "norm, quant_slide 6:8"):
        assert Cell(norm, "int8", 16, 64).moved == 16 * (64 * 2 * 3 + 96) + 64 * 2 + 16 * 4
    for silu in ("silu_quant_slide 6:8", "silu, quant_slide 6:8"):
        assert Cell(silu, "int8", 16, 64).moved == 16 * (64 * 2 * 2 + 96) + 16 * 4
    assert Cell("dequant_bias", "int32", 16, 64).moved == 16 * 64 * (4 + 2) + 16 * 4 + 64 * (4 + 2)
    for name in ("quant_slide 6:8", "norm_quant_slide 6:8", "silu_quant_slide 6:8"):
        assert Cell(f"hopper {name}", "int8", 16, 64).moved == Cell(name, "int8", 16, 64).moved


def test_kernels_of_the_hopper_backend_where_it_runs(
    standing_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is launched computes what its name says, each copy of the input by itself."""
    before = cells(CPU)
    monkeypatch.setattr(hopper.LIBRARY, "unusable", lambda gpu: None)
    added = {cell.kernel for cell in set(cells(CPU)) - set(before)}
    assert added == {f"hopper {name} 6:8" for name in ("quant_slide", "norm_quant_slide", "silu_quant_slide")}
    generator = torch.Generator().manual_seed(0)
    x, residual, other = (torch.randn(5, 64, generator=generator).to(torch.bfloat16) for _ in range(3))
    weight, both = torch.rand(64, generator=generator).to(torch.bfloat16), torch.cat([x, residual], 1)
    layout = SlidePattern(8).layout(64)
    for launch, i, expected in (
        (bandwidth._quantize(Cell("hopper quant_slide 6:8", "int8", 5, 64), [x, other]), 1, other),
        (
            bandwidth._norm(Cell("hopper norm_quant_slide 6:8", "int8", 5, 64), [(x, residual)], weight),
            0,
            reference.rms_norm(x, weight, bandwidth.EPS, residual)[0],
        ),
        (
            bandwidth._activate(Cell("hopper silu_quant_slide 6:8", "int8", 5, 64), [both]),
            0,
            reference.silu_mul(both),
        ),
    ):
        q, scale = cast(tuple[Tensor, Tensor], launch(i))
        found, found_scale = reference.quant_slide(expected, layout, torch.int8, "cuda")
        assert torch.equal(q[:, : layout.slided], found)
        assert torch.equal(scale, found_scale)


def test_stock_without_its_kernels_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stock, "_has", lambda namespace, name: name != "cutlass_scaled_mm")
    (tmp_path / "lib.so").write_text("no library")
    with pytest.raises(
        MissingError, match="cutlass_scaled_mm are not in .*lib.so.* cannot be loaded"
    ) as error:
        stock.find(tmp_path / "lib.so")
    assert "--vllm-library" in str(error.value)
    monkeypatch.setattr(stock, "_installed", list)
    assert stock.find(None) is None


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch is built with CUDA")
@pytest.mark.parametrize(
    "command", [["tune"], ["bench", "kernel"], ["bench", "linear"], ["bench", "bandwidth"]], ids=" ".join
)
def test_without_a_gpu_commands_say_so_and_exit_3(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, command)
    assert (done.exit_code, done.stdout) == (3, "")
    assert "measures an NVIDIA GPU, but torch" in done.stderr
    assert "pip install '.[cuda]'" in done.stderr
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["tune", "Llama9"], "neither one of the models"),
        (["tune", "BitNet-2B", "--shapes", "1x1"], "exclude each other"),
        (["tune", "--dtype", "fp16"], "['fp16'] is not one of int8, fp8"),
        (["tune", "--pattern", "2:8"], "did you mean 6:8"),
        (["tune", "--library", "cutlass"], "is not one of cublaslt, cusparselt"),
        (["bench", "kernel", "--mode", "round"], "is not one of square, model"),
        (["bench", "kernel", "--m", "x"], "is not a list of token counts"),
        (["bench", "linear", "--shapes", "64"], "is not a shape"),
        (["report", "missing-folder"], "missing-folder"),
    ],
    ids=" ".join,
)
def test_wrong_usage_exits_2(command: list[str], words: str) -> None:
    done = CliRunner().invoke(app, command)
    assert (done.exit_code, done.stdout) == (2, "")
    assert words in done.stderr


@pytest.mark.parametrize(
    ("capability", "reason", "names"),
    [
        ((9, 0), None, ("hopper",)),
        ((9, 0), "no nvcc", ("cublaslt", "cusparselt")),
        ((8, 0), None, ("cublaslt", "cusparselt")),
    ],
)
def test_what_is_tuned_when_no_library_is_named(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], reason: str | None, names: tuple[str, ...]
) -> None:
    """What serves there; the other libraries are not even asked, which would build them."""
    monkeypatch.setattr(hopper.Library, "unusable", lambda self, device: reason)
    gpu = dataclasses.replace(GPU, capability=capability)
    assert sorted(machine.served_by(gpu)) == sorted(names)


def test_the_commands_from_options_to_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dense, sparse = libraries()
    monkeypatch.setattr(machine, "require_gpu", lambda: GPU)
    monkeypatch.setattr(machine, "require_libraries", lambda gpu, names=(): [dense, sparse])
    monkeypatch.setattr(measure, "CudaClock", lambda device: nullcontext(FakeClock(dense, sparse)))
    monkeypatch.setattr(sessions, "COPIED", 1 << 16)
    options = ["--shapes", "64x64,32x128", "--dtype", "int8", "--pattern", "2_4,6:8", "--m", "16,32"]

    def run(*command: str) -> dict[str, object]:
        done = CliRunner().invoke(app, [*command, *options, "--json"], catch_exceptions=False)
        assert done.exit_code == 0, done.stderr
        return dict(json.loads(done.stdout))

    assert run("tune")["tuned"] == 2 * 2 * (1 + 2 * 2)
    assert run("tune")["known"] == 2 * 2 * (1 + 2 * 2)
    bench = ["bench", "kernel", "--no-stock", "--out", str(tmp_path / "out")]
    stopped = run(*bench, "--time-limit", "0")
    assert (stopped["finished"], stopped["rows"]) == (False, 0)
    done = run(*bench)
    assert (done["finished"], done["rows"], done["skipped"]) == (True, 2 * 2 * (2 + 2), [])
    document = json.loads((tmp_path / "out" / "kernel.json").read_text())
    assert document["gpu"] == GPU.name
    assert document["copy_GBps"] == round(2 * (1 << 16) / 5.07 / 1e3, 1)
    assert set(document["peak_TFLOPS"]) == {"int8"}
    assert len(document["commands"]) == 2
