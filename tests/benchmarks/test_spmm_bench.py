"""The benchmark of N:M kernels without a GPU, its counters from a fake ncu, and its page."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from fake_library import FakeLibrary, Ticks, session
from results import csv, tables
from torch import Tensor

from benchmarks import spmm as bench
from benchmarks import spmm_counters
from benchmarks.records import COUNTERS, SPMM, SPMM_COUNTERS, read_rows
from benchmarks.report import render
from benchmarks.spmm import SpmmBench, jobs, layers, parse_sparsities, squares
from slidesparse.gemm.problem import LibraryError
from slidesparse.spmm import Compressed, reference
from slidesparse.tune.shapes import Layer, ShapeError

OURS = len(bench.VARIANTS)
Spmm = Callable[[Tensor, Compressed, str, int], Tensor]


@pytest.fixture(autouse=True)
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "sequential", lambda x, weight: (reference(x, weight), 1e-4))


def todo(library: FakeLibrary) -> list[bench.Job]:
    shapes = [*squares((8, 32)), *layers([("tiny", (Layer("qkv", 48, 32),))], (4,))]
    return jobs(shapes, ("fp32", "fp16"), ("2:4", "1:4"), [library])


def test_every_cell_is_measured_once(tmp_path: Path) -> None:
    library = FakeLibrary(name="hopper", outs=("bf16",), scale="both")
    stopped = SpmmBench(session(library, limit=7.5, now=Ticks()), tmp_path, todo(library))
    assert not stopped.run()
    run, steps = session(library), []
    run.advance = steps.append
    complete = SpmmBench(run, tmp_path, todo(library))
    assert complete.run()
    assert run.skipped == []
    rows = complete.records.rows
    # dense 2 + 1, ours for two patterns and strips, two library types; the CPU for squares; one pattern for layers
    square, model = 3 + 2 * 3 * OURS + 2 + 1, 3 + 2 * 2 * OURS + 2
    assert len(rows) == len(steps) == complete.count == 2 * square + model
    assert rows[: len(stopped.records.rows)] == stopped.records.rows
    assert all(0 <= float(row["error"]) < 1e-2 for row in rows)
    assert {row["offsets"] for row in rows if row["sparsity"] == "1:4"} == {"own"}
    assert {row["sparsity"] for row in rows if row["mode"] == "model"} == {"dense", "2:4"}
    assert {row["dtype"] for row in rows if row["provider"] == "hopper"} == {"int8", "fp8"}
    content = (tmp_path / "spmm.csv").read_bytes()
    assert SpmmBench(session(limit=0.0), tmp_path, todo(library)).run()
    assert (tmp_path / "spmm.csv").read_bytes() == content


def broken(x: Tensor, weight: Compressed, variant: str, splits: int) -> Tensor:
    """Return the product, but for one variant an output lacks its last kept value."""
    output = reference(x, weight)
    if variant == "prefetch":
        output[3, 5] = (x[3, :-2].double() @ bench.decompress(weight)[5, :-2].double()).float()
    return output


def refused(x: Tensor, weight: Compressed, variant: str, splits: int) -> Tensor:
    raise LibraryError("no such sizes")


@pytest.mark.parametrize(
    ("product", "rows", "message"), [(broken, OURS - 1, "wrong by"), (refused, 0, "no such sizes")]
)
def test_wrong_results_have_no_row(
    product: Spmm, rows: int, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "spmm", product)
    run = session()
    single_job = [job for job in jobs(squares((64,)), ("fp32",), ("2:4",), []) if job.offsets == "own"][:1]
    spmm_bench = SpmmBench(run, tmp_path, single_job)
    assert spmm_bench.run()
    assert len(spmm_bench.records.rows) == rows
    assert len(run.skipped) == 1
    assert message in run.skipped[0]


def test_missing_product_exceeds_the_allowed_error() -> None:
    """One of 4096 equal products has a share of 1/4096; the bound is a seventh of that."""
    assert bench.allowed_error(4096) < 1 / 4096 / 7
    x, weight = torch.ones(1, 4096), torch.ones(1, 4096)
    assert bench._Expected(x, weight).error(torch.tensor([[4095.0]])) == pytest.approx(1 / 4096)
    assert not bench._Expected(x, weight).error(torch.tensor([[torch.nan]])) <= 1


def test_matmul_precision_is_restored() -> None:
    precision = torch.get_float32_matmul_precision()
    with bench.matmul(tf32=True):
        assert torch.get_float32_matmul_precision() == "high"
        with bench.matmul(tf32=False):
            assert torch.get_float32_matmul_precision() == "highest"
    assert torch.get_float32_matmul_precision() == precision


@pytest.mark.parametrize("text", ["", "2", "4:2", "0:4", "3:40", "2:4,x"])
def test_invalid_sparsities_are_refused(text: str) -> None:
    with pytest.raises(ShapeError, match="KEPT:GROUP"):
        parse_sparsities(text)


# --- counters

NCU = """#!{python}
import sys
if "--version" in sys.argv:
    sys.exit(print("NVIDIA Nsight Compute\\nVersion 1.2.3"))
cells = sys.argv[sys.argv.index("benchmarks.spmm_counters") + 1:]
metrics = sys.argv[sys.argv.index("--metrics") + 1].split(",")
print("==PROF== Connected to process 1")
if {fails}:
    sys.exit("==ERROR== ERR_NVGPUCTRPERM: no permission")
print(",".join(f'"{{name}}"' for name in ["ID", "Kernel Name", *metrics]))
print(",".join(['""', '""', *('"%"' for _ in metrics)]))
for number, _ in enumerate(cells):
    values = [f'"1,{{number:03}}.5"', '"n/a"', *('"2"' for _ in metrics[2:])]
    print(",".join([f'"{{number}}"', '"Spmm"', *values]))
print("==PROF== Disconnected from process 1")
"""


@pytest.fixture
def ncu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    def install(fails: bool) -> None:
        path = tmp_path / "bin" / "ncu"
        path.parent.mkdir(exist_ok=True)
        path.write_text(NCU.format(python=sys.executable, fails=fails))
        path.chmod(0o755)
        monkeypatch.setenv("PATH", f"{path.parent}{os.pathsep}{os.environ['PATH']}")

    return install


def test_counters_are_read_in_the_order_of_the_launches(tmp_path: Path, ncu: Callable[[bool], None]) -> None:
    ncu(False)
    assert spmm_counters.measure(tmp_path) == "measured by ncu, Version 1.2.3"
    rows, _ = read_rows(tmp_path / "spmm_counters.csv", SPMM_COUNTERS.columns)
    cells = spmm_counters.cells()
    assert len(rows) == len(cells) == len(set(cells))
    first, second, *others = COUNTERS
    for number, (row, (size, dtype, offsets, provider)) in enumerate(zip(rows, cells, strict=True)):
        assert (row["M"], row["dtype"], row["offsets"], row["provider"]) == (
            str(size),
            dtype,
            offsets,
            provider,
        )
        assert (row[first], row[second]) == (f"1{number:03}.5", "")
        assert {row[name] for name in others} == {"2"}
    assert spmm_counters.measure(tmp_path) == "measured by ncu, Version 1.2.3"
    assert len(read_rows(tmp_path / "spmm_counters.csv", SPMM_COUNTERS.columns)[0]) == len(cells)


def test_missing_counters_are_explained(
    tmp_path: Path, ncu: Callable[[bool], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    ncu(True)
    assert "ERR_NVGPUCTRPERM" in spmm_counters.measure(tmp_path)
    monkeypatch.setattr(spmm_counters, "find_program", lambda: None)
    assert "not found" in spmm_counters.measure(tmp_path)
    assert not (tmp_path / "spmm_counters.csv").exists()


# --- the page


def cell(
    m: int, provider: str, us: float, dtype: str = "fp32", sparsity: str = "2:4", offsets: str = "own"
) -> str:
    return f"square,square,square,{dtype},{sparsity},{offsets},{m},{m},{m},{provider},{us},{us},{us},2.0e-06"


LINES = [
    cell(512, "cublas", 80, sparsity="dense", offsets="-"),
    cell(512, "cublas", 16, dtype="fp16", sparsity="dense", offsets="-"),
    cell(512, "baseline", 40),
    cell(512, "baseline", 20, offsets="strip"),
    cell(512, "double", 32),
    cell(512, "double", 64, sparsity="1:4"),
    cell(512, "cpu", 4000),
    cell(512, "hopper", 4, dtype="int8"),
    "model,A,qkv,fp32,2:4,own,64,10,20,double,5,5,5,1.0e-06",
]


def test_tables_of_the_spmm_page(tmp_path: Path) -> None:
    csv(tmp_path, "spmm.csv", SPMM.columns, LINES)
    (tmp_path / "spmm.json").write_text('{"counters": "ncu was not found"}')
    paths = render(tmp_path)
    assert {path.name for path in paths} == {"README.md", "spmm.md", "spmm-squares.svg"}
    text = (tmp_path / "spmm.md").read_text()
    assert "](spmm-squares.svg)" in text
    assert "2.0e-06 at most" in text
    squares = tables(text, "Squares at 2:4, M = N = K")[0]
    assert squares[1][:7] == ["FP32", "512", "80.00", "-", "2.00", "-", "2.50"]
    assert squares[1][9] == "4.00"  # the baseline for strips
    assert tables(text, "Squares at other patterns")[0][:2] == [
        ["", "M", "2:4", "1:4"],
        ["FP32", "512", "2.50", "1.25"],
    ]
    tensor_cores = tables(text, "Compared with sparse tensor cores at 2:4")[0]
    assert tensor_cores[1] == ["512", "16.00", "-", "4.00"]
    assert tables(text, "Layers of models at 2:4")[0][1][:3] == ["FP32", "A qkv, M 64", "-"]
    assert tables(text, "Compared with one CPU thread")[0][1][:4] == ["512", "4000", "50.00", "100.00"]
    assert "None: ncu was not found." in text
    measurements = {row[0]: row[2] for row in tables(text, "The study's claims and our measurements")[0]}
    assert measurements["The baseline is 10^2 to 10^4 times as fast as one thread of the CPU"] == "200 / 100"
    assert measurements["The baseline beats cuBLAS up to 2048 and loses from 4096 on"].startswith(
        "4.00 / 2.00 at 512, - / - at"
    )
    # 2 * 512^3 in 80 us
    assert measurements["cuBLAS, TFLOPS"].startswith("3.36 at 512, - at 2048")
    assert measurements["Errors stay below 1e-3"] == "2e-06"


def test_counters_of_the_spmm_page(tmp_path: Path) -> None:
    csv(tmp_path, "spmm.csv", SPMM.columns, LINES)
    padding = ",1" * (len(COUNTERS) - 2)
    lines = [
        f"fp32,2:4,{offsets},256,256,256,{name},{sm},{padding}"
        for offsets, name, sm in (("own", "baseline", 7.5), ("strip", "baseline", 8), ("own", "double", 9))
    ]
    csv(tmp_path, "spmm_counters.csv", SPMM_COUNTERS.columns, lines)
    render(tmp_path)
    text = (tmp_path / "spmm.md").read_text()
    assert tables(text, "Counters")[0][1][:6] == ["FP32", "256", "own", "baseline", "7.5", "-"]
    measurements = {row[0]: row[2] for row in tables(text, "The study's claims and our measurements")[0]}
    claim = measurements["SM throughput in percent, baseline -> double"]
    assert claim == "8 / 7.5 at 256, - / - at 2048 -> - / 9 at 256, - / - at 2048"


def test_folder_without_spmm_results_has_no_page(tmp_path: Path) -> None:
    csv(tmp_path, "bandwidth.csv", ("kernel,dtype,M,K,us,GBps,copy_GBps,fraction",), ["a,int8,1,1,1,1,1,1"])
    assert not [path for path in render(tmp_path) if "spmm" in path.name]
    assert "spmm" not in (tmp_path / "README.md").read_text()
