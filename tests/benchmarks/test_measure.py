"""The measuring commands handle times and energies; no GPU is needed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import measure
from benchmarks.energy import EnergyCounter
from benchmarks.measure import Figures, Window, take_turns


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
