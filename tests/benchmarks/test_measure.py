"""The measuring commands handle times and energies; no GPU is needed."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_library import FakeLibrary, session

from benchmarks import linear, measure
from benchmarks.energy import EnergyCounter
from benchmarks.measure import Figures, Window, fill, take_turns
from benchmarks.records import LINEAR, Records
from benchmarks.stock import Stock
from slidesparse.tune.shapes import Layer


def test_providers_take_turns_in_alternating_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU at its power limit, later measurements are slower: no provider may always be first."""
    monkeypatch.setattr(measure, "WARM_UP_SECONDS", 0.0)
    turns: list[Any] = []
    gauge: Any = SimpleNamespace(
        prepare=lambda launch, copies: SimpleNamespace(number=copies, graphed=True),
        window=lambda replay, seconds: turns.append(replay) or Window([1.0], 100.0),
    )
    take_turns(gauge, [(lambda i: None, number) for number in range(3)])
    assert [replay.number for replay in turns] == [0, 1, 2, 2, 1, 0, 0, 1, 2]


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


@pytest.mark.parametrize(("seconds", "ticks", "watts"), [(0.001, 4, 100), (0.03, 4, None), (0.03, 40, 100)])
def test_moves_that_slow_reads_see_count_in_long_runs(
    monkeypatch: pytest.MonkeyPatch, seconds: float, ticks: int, watts: float | None
) -> None:
    """At 100 W the counter moves every 0.1 s by 10 J; reads that take 30 ms are a third of 0.1 s, 1% of 4 s."""
    now, counter = [0.0], EnergyCounter("GPU-none")

    def read() -> int:
        value = int(now[0] / 0.1 + 1e-6) * 10_000
        now[0] += seconds
        return value

    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    monkeypatch.setattr(counter, "read", read)
    counter.restart()
    for number in range(1, ticks + 1):
        now[0] = number * 0.1
        assert counter.poll()
    assert counter.watts == (watts and pytest.approx(watts))


def test_layers_are_timed_in_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All layers of a block are one row of the table; of what cannot run there is a note."""
    monkeypatch.setattr(linear, "find", lambda: None)
    library = FakeLibrary(fuses=True, outs=("bf16",))
    run, layers = session(library), (Layer("up", 128, 32), Layer("down", 32, 64))
    gauge: Any = SimpleNamespace(
        prepare=lambda launch, copies: [launch(i) for i in range(copies)] and SimpleNamespace(graphed=True),
        window=lambda replay, seconds: Window([1.0], 100.0),
    )
    libraries: Any = [library, FakeLibrary("cublaslt", sparse=False)]
    groups = linear.model_groups([("shapes", layers)], ["int8", "fp8"], [1, 16])
    records = Records(tmp_path, LINEAR)
    assert fill(run, records, linear.jobs(run, gauge, groups, libraries, None, ["2:4", "4:6"]))
    cells = [(row["layer"], row["pattern"], row["dtype"], row["M"], row["p50_us"]) for row in records.rows]
    expected = itertools.product(["int8", "fp8"], ["1", "16"], ["2:4", "4:6"])
    assert cells == [("up+down", pattern, dtype, m, "1.000") for dtype, m, pattern in expected]
    assert set(run.skipped) == {
        "cublaslt: norms and activations between its layers are vLLM's, which is not installed"
    }
    odd = linear.Group("shapes", (Layer("up", 136, 32), *layers[1:]), "int8", (1,))
    assert not linear.providers(run, odd, [], [], Stock())
    assert run.skipped[-1] == "stock: not all sizes of up+down are multiples of 16"
