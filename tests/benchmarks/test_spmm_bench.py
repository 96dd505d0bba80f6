"""The benchmark of N:M kernels without a GPU, and its counters from an output of ncu."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fake_library import FakeGauge, session
from torch import Tensor

from benchmarks import measure
from benchmarks.measure import fill
from benchmarks.records import Records
from benchmarks.spmm import bench, counters, report
from benchmarks.spmm.kernels import Compressed, reference

OURS = len(bench.VARIANTS)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "sequential", lambda x, weight: (reference(x, weight), 1e-4))  # no compiler
    monkeypatch.setattr(measure, "WARM_UP_SECONDS", 0.0)


def test_every_cell_is_measured_and_shown(tmp_path: Path) -> None:
    run, records = session(), Records(tmp_path, bench.SPMM)
    assert fill(run, records, bench.jobs(run, FakeGauge(), (8, 32), ("fp32", "fp16"), ("2:4", "1:4")))
    assert run.skipped == []
    assert len(records.rows) == 2 * ((2 + 3 * OURS) + (1 + 3 * OURS) + 1)  # cuBLAS and ours; the CPU
    assert all(0 <= float(row["error"]) < 1e-2 for row in records.rows)
    assert {row["offsets"] for row in records.rows if row["sparsity"] == "1:4"} == {"own"}
    assert report.squares(tmp_path).splitlines()[2].startswith("| FP32 | 8 | 5.0")


def test_wrong_results_have_no_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(x: Tensor, weight: Compressed, variant: str, splits: int) -> Tensor:
        """Return the product, but for one variant an output lacks its last kept value."""
        output = reference(x, weight)
        if variant == "prefetch":
            output[3, 5] = (x[3, :-2].double() @ bench.decompress(weight)[5, :-2].double()).float()
        return output

    monkeypatch.setattr(bench, "spmm", broken)
    run, records = session(), Records(tmp_path, bench.SPMM)
    assert fill(run, records, bench.jobs(run, FakeGauge(), (64,), ("fp16",), ("2:4",)))
    assert {row["provider"] for row in records.rows if not row["p50_us"]} == {"prefetch"}
    assert len(run.skipped) == 2  # own offsets and strips
    assert all("wrong by" in line for line in run.skipped)


def test_missing_product_exceeds_the_allowed_error() -> None:
    """One of 4096 equal products has a share of 1/4096; the bound is a seventh of that."""
    assert bench.allowed_error(4096) < 1 / 4096 / 7
    x, weight = torch.ones(1, 4096), torch.ones(1, 4096)
    assert bench.Expected(x, weight).error(torch.tensor([[4095.0]])) == pytest.approx(1 / 4096)
    assert not bench.Expected(x, weight).error(torch.tensor([[torch.nan]])) <= 1


def test_counters_are_read_in_the_order_of_the_launches() -> None:
    first, second = list(counters.COUNTERS.values())[:2]
    text = f'==PROF== Connected\n"ID","Kernel Name","{first}","{second}"\n"","","%","%"\n"0","Spmm","1,250.5","n/a"\n'
    (row,) = counters.read(text)
    assert list(row.values())[:3] == ["1250.5", "", ""]
