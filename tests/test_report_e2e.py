"""The page of ``e2e.csv``: medians, spread, speed-ups and sentences that can be worked out by hand."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
from results import csv, tables

from slidesparse.bench import e2e as bench_e2e
from slidesparse.report import ReportError, render
from slidesparse.report.e2e import E2E_COLUMNS, SYSTEMS


def row(system: str, rate: float, pattern: str = "dense", m: int = 64, number: int = 1, **other: str) -> str:
    named = {"model": "tiny", "dtype": "int8", "stage": "prefill", **other}
    return ",".join([*named.values(), str(m), pattern, system, str(number), str(rate)])


def page(folder: Path, lines: Iterable[str]) -> str:
    csv(folder, "e2e.csv", E2E_COLUMNS, lines)
    (folder / "e2e.json").write_text('{"cpu": "a test"}')
    assert folder / "e2e.md" in render(folder)
    return (folder / "e2e.md").read_text()


@pytest.fixture
def no_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)


LINES = [
    *(row("stock", rate, number=i) for i, rate in enumerate((1000, 900, 1100), 1)),
    row("off", 1020),
    row("cublaslt", 800),
    row("sparse", 1600, "2:4"),
    *(row("sparse", rate, "6:8", number=i) for i, rate in enumerate((980, 100, 970), 1)),
    row("stock", 500, m=128),
    row("sparse", 400, "2_8", m=128),  # the other spelling of 6:8
]


def test_every_system_of_the_benchmark_has_a_place() -> None:
    assert set(SYSTEMS) == set(bench_e2e.SYSTEMS)


def test_medians_spread_and_speedups(tmp_path: Path, no_plots: None) -> None:
    text = page(tmp_path, LINES)
    rates, over_stock, over_dense, share, efficiency = tables(text, "tiny, prefill, INT8")
    assert rates == [
        ["M", "stock", "off", "cublaslt", "2:4", "6:8"],
        ["64", "1000 ±10.0%", "1020", "800", "1600", "970 ±45.4%"],  # 880 / 970 / 2
        ["128", "500", "-", "-", "-", "400"],
    ]
    assert over_stock == [
        ["M", "2:4", "6:8"],
        ["64", "1.60", "0.88"],  # of 980 / 1000, 100 / 900 and 970 / 1100 the middle one
        ["128", "-", "0.80"],
        ["N/(N-1)", "2.00", "1.33"],
    ]
    assert over_dense[1:3] == [["64", "2.00", "1.10"], ["128", "-", "-"]]
    assert share[1] == ["64", "100.0%", "82.7%"]  # 970 / 1100 / 0.8 / (4 / 3)
    assert efficiency[1] == ["64", "100.0%", "82.7%"]
    assert "Rounds: 1 to 3." in text
    assert "differ by 2.0% in the median" in text
    assert "6:8: not measured at M" not in text
    assert "cublaslt dense, off dense, sparse 2:4: not measured at M 128" in text


def test_sentences_count_the_cells(tmp_path: Path, no_plots: None) -> None:
    text = page(
        tmp_path, [*LINES, row("stock", 10, stage="decode"), row("sparse", 12.5, "6:8", stage="decode")]
    )
    assert (
        "Prefill: 6:8 is faster than stock vLLM in 0 of 2 cells, equal (within 1%) in 0 and slower in 2; "
        "best 1.13 of stock's time, tiny, prefill INT8 at M 64; worst 1.25 of stock's time" in text
    )
    assert "Prefill: 2:4 is faster than stock vLLM in 1 of 1 cells" in text
    assert "Decode: 6:8 is faster than stock vLLM in 1 of 1 cells" in text
    assert tables(text, "tiny, decode, INT8")[0][1] == ["64", "10.00", "12.50"]


def test_without_stock_the_rest_is_shown(tmp_path: Path, no_plots: None) -> None:
    text = page(tmp_path, [row("cublaslt", 800), row("sparse", 1000, "6:8")])
    assert "6:8 cannot be compared with stock vLLM" in text
    assert tables(text, "tiny, prefill, INT8")[1][1] == ["64", "1.25"]
    only = page(tmp_path, [row("stock", 800)])
    assert tables(only, "tiny, prefill, INT8") == [[["M", "stock"], ["64", "800"]]]


def test_repeated_and_torn_lines(tmp_path: Path, no_plots: None) -> None:
    text = page(tmp_path, [row("stock", 800), row("stock", 400), "tiny,int8"])
    assert tables(text, "tiny, prefill, INT8")[0][1] == ["64", "400"]
    readme = (tmp_path / "README.md").read_text()
    assert "The last line of `e2e.csv` is torn" in readme
    assert "[e2e.md](e2e.md)" in readme
    assert "a test" in readme


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            row("cutlass", 1),
            "system is 'cutlass'; allowed: stock, off, cublaslt, cusparselt, sparse, sparse.dense",
        ),
        (row("stock", 1, stage="both"), "stage is 'both'; allowed: prefill, decode"),
        (row("stock", 1, "6:8"), "line 2 of e2e.csv: stock with pattern '6:8'; allowed: dense"),
        (row("sparse", 1), "line 2 of e2e.csv: sparse with pattern 'dense'; allowed: a pattern"),
        (row("stock", -1), "tokens_per_s is '-1'"),
    ],
)
def test_lines_that_mean_nothing(tmp_path: Path, line: str, said: str) -> None:
    csv(tmp_path, "e2e.csv", E2E_COLUMNS, [line])
    with pytest.raises(ReportError, match=said):
        render(tmp_path)


def test_plots(tmp_path: Path) -> None:
    """A panel of speed-ups over stock vLLM for each stage."""
    pytest.importorskip("matplotlib")
    text = page(
        tmp_path, [*LINES, row("stock", 10, stage="decode"), row("sparse", 12, "6:8", stage="decode")]
    )
    for name in ("e2e-prefill-speedup-int8.svg", "e2e-decode-speedup-int8.svg"):
        assert f"({name})" in text
        assert "speed-up over stock" in (tmp_path / name).read_text()
