"""The measuring commands handle times, energies and interruptions; no GPU is needed."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_library import FakeLibrary, Ticks, session

from benchmarks import measure
from benchmarks.energy import EnergyCounter
from benchmarks.measure import Figures, Job, Window, fill, take_turns
from benchmarks.records import LINEAR, Records
from slidesparse.gemm import tuned


@pytest.fixture(autouse=True)
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(tuned.CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(measure, "WARM_UP_SECONDS", 0.0)


def test_providers_take_turns_in_alternating_order() -> None:
    """On a GPU at its power limit, later measurements are slower: no provider may always be first."""
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
        return fill(session(FakeLibrary(), limit, Ticks()), Records(tmp_path, LINEAR), jobs(*providers))

    assert not run("stock", limit=1.5)
    assert measured == [16]
    assert run("stock")
    assert run("stock")
    assert measured == [16, 32]
    assert run("stock", "hopper")
    assert run("stock", "hopper")  # the refused one is not tried again
    assert measured == [16, 32, 16, 32]
    rows = Records(tmp_path, LINEAR).rows[2:]
    assert [float(row["p50_us"]) for row in rows if row["provider"] == "stock"] == [3.0, 4.0]
