"""The benchmark of N:M kernels without a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_library import FakeGauge, session
from torch import Tensor

from benchmarks import measure
from benchmarks.records import Records
from benchmarks.spmm import bench, report
from benchmarks.spmm.kernels import Compressed, reference


def test_wrong_results_have_no_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An output of one variant lacks its last kept value."""

    def broken(x: Tensor, weight: Compressed, variant: str, splits: int) -> Tensor:
        output = reference(x, weight)
        if variant == "prefetch":
            output[3, 5] = (x[3, :-2].double() @ bench.decompress(weight)[5, :-2].double()).float()
        return output

    monkeypatch.setattr(bench, "spmm", broken)
    monkeypatch.setattr(bench, "sequential", lambda x, weight: (reference(x, weight), 1e-4))  # no compiler
    monkeypatch.setattr(measure, "WARM_UP_SECONDS", 0.0)
    run, records = session(), Records(tmp_path, bench.SPMM)
    jobs = bench.jobs(run, FakeGauge(), (64,), ("fp32", "fp16"), ("2:4",))
    assert measure.fill(run, records, jobs)
    assert len(records.rows) == 2 * (1 + 2 * len(bench.VARIANTS)) + 2  # cuBLAS and ours; TF32, the CPU
    assert {row["provider"] for row in records.rows if not row["p50_us"]} == {"prefetch"}
    assert len(run.skipped) == 2 * 2
    assert report.squares(tmp_path).splitlines()[2].startswith("| FP32 | 64 | 5.0")
