"""The benchmark of N:M kernels without a GPU, and its counters from a fake ncu."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from fake_library import FakeLibrary, Ticks, session
from torch import Tensor

from benchmarks import spmm as bench
from benchmarks import spmm_counters
from benchmarks.records import COUNTERS, SPMM_COUNTERS, read_rows
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
