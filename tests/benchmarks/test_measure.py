"""The measuring commands, with a library and a clock that need no GPU."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
from fake_library import GPU, FakeGauge, FakeLibrary, Ticks, session, times_of
from torch import Tensor

from benchmarks import kernel, linear, measure
from benchmarks.energy import EnergyCounter
from benchmarks.measure import Figures, Job, Window, fill, take_turns
from benchmarks.records import KERNEL, LINEAR, Records
from benchmarks.stock import Stock
from slidesparse.gemm import tuned
from slidesparse.gemm.problem import Problem
from slidesparse.tune.inputs import Operands
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


def kernel_rows(
    folder: Path, dtypes: list[str], *found: FakeLibrary, patterns: Sequence[str] = PATTERNS
) -> tuple[list[dict[str, str]], Session]:
    run, records = session(*found), Records(folder, KERNEL)
    groups = kernel.model_groups(MODEL, dtypes, [16])
    assert fill(run, records, kernel.jobs(run, FakeGauge(*found), groups, found, FakeStock(), patterns))
    return records.rows, run


def test_every_provider_and_pattern_of_a_gemm_is_measured(tmp_path: Path) -> None:
    dense, sparse = FakeLibrary("cublaslt", sparse=False, outs=("int32", "int8")), FakeLibrary()
    refusing = FakeLibrary("other", times={"refused": 1.0})
    found, run = kernel_rows(tmp_path, ["int8", "fp16"], dense, sparse, refusing)
    at = [(row["provider"], row["pattern"], row["algorithm"]) for row in found if row["layer"] == "qkv"]
    assert at == [
        ("cublaslt", "dense", "good"),
        ("cublaslt-int8", "dense", "good"),
        *(("cusparselt", pattern, "good") for pattern in PATTERNS),
        *(("other", pattern, "") for pattern in PATTERNS),  # it refuses, which leaves the rest
        ("stock", "dense", "cutlass"),
    ]
    assert len(found) == 2 * len(at)  # fp16 has no library here
    assert len(run.skipped) == 2 * len(PATTERNS)
    for library in (dense, sparse):  # winners of what serving runs are saved
        for out, expected in (("bf16", sparse), ("int32", dense), ("int8", None)):
            name = tuned.tuned_algorithm(GPU.subject(library), Problem("int8", out, 64, 64, 16))
            assert name == ("good" if library is expected else None)


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
    layers = [(row["provider"], row["pattern"]) for row in records.rows if row["layer"] == "qkv"]
    assert layers == [("stock", "dense"), ("reference", "dense"), *(("reference", p) for p in PATTERNS)] * 2
    for row in records.rows:
        if row["layer"] == "sum":
            same = {name: row[name] for name in ("dtype", "pattern", "M", "provider")}
            parts = [times_of(records.rows, layer=layer.name, **same)[0] for layer in LAYERS]
            assert float(row["p50_us"]) == pytest.approx(sum(parts), abs=1e-3)
            assert float(row["mj"]) == pytest.approx(2 * 100 * 5.01 / 1e3, abs=1e-3)
