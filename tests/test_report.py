"""The report of small result files whose tables can be worked out by hand."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from results import FOUR, csv, four, layer, square, summed, tables

from slidesparse.pattern import SlidePattern
from slidesparse.report import ReportError, render
from slidesparse.report.data import KERNEL_COLUMNS, LINEAR_COLUMNS, read_kernel
from slidesparse.report.sections import Ceilings


@pytest.fixture(autouse=True)
def no_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables alone; the test of the plots undoes it."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)


def kernel(folder: Path, lines: Iterable[str], **conditions: Any) -> str:
    """kernel.md of these lines."""
    csv(folder, "kernel.csv", KERNEL_COLUMNS, lines)
    (folder / "kernel.json").write_text(json.dumps(conditions))
    assert folder / "kernel.md" in render(folder)
    return (folder / "kernel.md").read_text()


def test_speedups_share_of_the_bound_and_efficiency(tmp_path: Path) -> None:
    """Dense 100 us: 2:4 in 62.5 is 1.60 times, 6:8 in 80 is 1.25 times, 2_inf in 125 is 0.80 times."""
    lines = [
        square("int8", "dense", 64, "cublaslt", 100),
        square("int8", "dense", 64, "cublaslt-int8", 75),
        square("int8", "dense", 64, "stock", 50),
        square("int8", "2_inf", 64, "cusparselt", 125),
        square("int8", "2:4", 64, "cusparselt", 62.5),
        square("int8", "2_8", 64, "cusparselt", 80),  # the other spelling of 6:8
    ]
    text = kernel(tmp_path, lines)
    dense, own_type, stock, share, efficiency = tables(text, "Square, M = N = K, INT8")
    assert dense == [
        ["M", "cublaslt us", "cublaslt-int8 us", "stock us", "2:4", "6:8", "2_inf"],
        ["64", "100.0", "75.00", "50.00", "1.60", "1.25", "0.80"],
        ["N/(N-1)", "", "", "", "2.00", "1.33", "1.00"],
    ]
    assert own_type[1] == ["64", "75.00", "1.20", "0.94", "0.60"]
    assert stock[1] == ["64", "50.00", "0.80", "0.62", "0.40"]
    assert share[1] == ["64", "80.0%", "93.8%", "80.0%"]
    # (1.25 / 1.6) / (0.5 / 0.75) and (0.8 / 1.6) / (0.5 / 1)
    assert efficiency[1] == ["64", "100.0%", "117.2%", "100.0%"]
    assert "20.0% in the median, 20.0% at most" in text


def test_another_sparse_provider_has_a_section_of_its_own(tmp_path: Path) -> None:
    lines = [
        square("int8", "dense", 64, "cublaslt", 100),
        square("int8", "6:8", 64, "cusparselt", 80),
        square("int8", "6:8", 64, "hopper", 50),
    ]
    text = kernel(tmp_path, lines)
    (library, *_), (own, *_) = (tables(text, f"Square, M = N = K{by}, INT8") for by in ("", ", hopper"))
    assert (library[1], own[1]) == (["64", "100.0", "1.25"], ["64", "100.0", "2.00"])


# The paper's theoretical ratios (appendix D.5.1): a pattern that reaches them has 100%.
@pytest.mark.parametrize(
    ("pattern", "ratio"), [("4:6", 3 / 4), ("6:8", 2 / 3), ("8:10", 5 / 8), ("2_inf", 1 / 2)]
)
def test_efficiency_is_100_percent_at_the_ratio_of_the_paper(
    tmp_path: Path, pattern: str, ratio: float
) -> None:
    lines = [
        square("fp8", "dense", 256, "cublaslt", 90),
        square("fp8", "2:4", 256, "cusparselt", 60),
        square("fp8", pattern, 256, "cusparselt", 60 / ratio),
    ]
    assert tables(kernel(tmp_path, lines), "Square, M = N = K, FP8")[2][1] == ["256", "100.0%", "100.0%"]


def test_no_ratio_without_both_sides(tmp_path: Path) -> None:
    """Nothing is taken from another M, and no efficiency is there without 2:4."""
    lines = [
        square("int8", "dense", 64, "cublaslt", 100),
        square("int8", "6:8", 64, "cusparselt", 80),
        square("int8", "6:8", 128, "cusparselt", 160),
        square("int8", "2:4", 256, "cusparselt", 70),
    ]
    text = kernel(tmp_path, lines)
    speedups, share = tables(text, "Square, M = N = K, INT8")
    assert [row[2:] for row in speedups[1:4]] == [["-", "1.25"], ["-", "-"], ["-", "-"]]
    assert [row[1:] for row in share[1:]] == [["-", "93.8%"], ["-", "-"], ["-", "-"]]
    assert "efficiency" not in text
    assert "cublaslt dense: not measured at M 128, 256" in text
    assert "cusparselt 2:4: not measured at M 64, 128" in text


def test_layers_are_summed_only_when_all_four_are_there(tmp_path: Path) -> None:
    lines = [
        *four("A", "dense", 512, "cublaslt", 100),
        *four("A", "6:8", 512, "cusparselt", 80),
        *four("A", "4:6", 512, "cusparselt", 70)[:3],
        *four("B", "dense", 512, "cublaslt", 30)[:2],  # of B two layers are known at all
    ]
    text = kernel(tmp_path, lines)
    assert tables(text, "A, INT8")[0][1] == ["512", "100.0", "1.25"]
    assert "cusparselt 4:6: 3 of 4 layers, without down at M 512" in text
    assert "B, INT8" not in re.findall(r"^## (.*)", text, flags=re.MULTILINE)
    assert tables(text, "B qkv, INT8")[0][1] == ["512", "3.00"]
    readme = (tmp_path / "README.md").read_text()
    assert "A, INT8: cusparselt 4:6: 3 of 4 layers, without down at M 512" in readme
    assert "B qkv, INT8: cusparselt 4:6, cusparselt 6:8: not measured at M 512" in readme


def test_the_ratio_is_of_sums_not_a_mean_of_ratios(tmp_path: Path) -> None:
    """Layers 1, 2, 3, 94 (100 us) against 1, 2, 3, 44 (50 us): 2.00; the mean of their ratios is 1.28."""
    dense = [
        layer("A", name, "dense", 64, "cublaslt", us) for name, us in zip(FOUR, (1, 2, 3, 94), strict=True)
    ]
    ours = [
        layer("A", name, "2:4", 64, "cusparselt", us) for name, us in zip(FOUR, (1, 2, 3, 44), strict=True)
    ]
    assert tables(kernel(tmp_path, dense + ours), "A, INT8")[0][1] == ["64", "100.0", "2.00"]


def test_floor_by_hand() -> None:
    """INT8, M 10, N 100, K 200 at 1 GB/s (1 byte takes 1 ns) and 0.001 TOPS (1000 operations take 1 us)."""
    memory = Ceilings.of({"copy_GBps": 1})
    assert memory
    assert memory.floor("int8", None, 10, 100, 200) == pytest.approx(
        (10 * 200 + 100 * 200 + 2 * 10 * 100) / 1e3
    )
    # 6:8: K' = 300; of 100 rows 150 values each and 37.5 bytes of their places
    slided = 10 * 300 + 100 * 150 + 100 * 37.5 + 2 * 10 * 100
    assert memory.floor("int8", SlidePattern(8), 10, 100, 200) == pytest.approx(slided / 1e3)
    both = Ceilings.of({"copy_GBps": 1, "peak_TFLOPS": {"int8": 0.001}})
    assert both
    assert both.floor("int8", SlidePattern(8), 10, 100, 200) == pytest.approx(400.0 * 0.75)
    assert both.floor("fp8", None, 10, 100, 200) == pytest.approx(24.0)  # no peak for it
    assert Ceilings.of({}) is None


def test_the_floor_is_shown_only_where_it_was_measured(tmp_path: Path) -> None:
    lines = [*four("A", "dense", 10, "cublaslt", 100), *four("A", "6:8", 10, "cusparselt", 90)]
    assert "floor" not in kernel(tmp_path, lines)
    text = kernel(tmp_path, lines, copy_GBps=1)
    assert tables(text, "A, INT8")[-1] == [["M", "dense", "6:8"], ["10", "96.00", "95.00"]]


LINEAR = [
    summed("A", "dense", 64, "stock", 100),
    summed("A", "6:8", 64, "cusparselt", 80),  # 0.80: faster
    summed("A", "dense", 512, "stock", 100),
    summed("A", "6:8", 512, "cusparselt", 101),  # 1% is equal
    summed("A", "dense", 4096, "stock", 100),
    summed("A", "6:8", 4096, "cusparselt", 102),  # slower
    summed("B", "dense", 64, "stock", 100, "fp8"),
    summed("B", "6:8", 64, "cusparselt", 150, "fp8"),  # slower
    summed("B", "dense", 512, "stock", 100, "fp8"),  # ours was not measured
]


def test_where_sparse_loses_to_stock(tmp_path: Path) -> None:
    csv(tmp_path, "linear.csv", LINEAR_COLUMNS, LINEAR)
    render(tmp_path)
    text = (tmp_path / "linear.md").read_text()
    assert (
        "6:8 is faster than stock vLLM in 1 of 4 cells, equal (within 1%) in 1 and slower in 2; "
        "best 0.80 of stock's time, A INT8 at M 64; worst 1.50 of stock's time, B FP8 at M 64. "
        "1 more cells lack a measurement."
    ) in text
    rows = tables(text, "Where sparse loses to stock vLLM")[0]
    assert rows[1:] == [
        ["A", "INT8", "64", "100.0", "80.00", "0.80", "faster"],
        ["A", "INT8", "512", "100.0", "101.0", "1.01", "equal"],
        ["A", "INT8", "4096", "100.0", "102.0", "1.02", "slower"],
        ["B", "FP8", "64", "100.0", "150.0", "1.50", "slower"],
        ["B", "FP8", "512", "100.0", "-", "-", "-"],
    ]
    assert tables(text, "A, INT8")[0][1] == ["64", "100.0", "1.25"]


def test_only_the_measured_sum_of_linear_layers_counts(tmp_path: Path) -> None:
    parts = [line.replace(",sum,", f",{name},") for name in FOUR for line in LINEAR[:2]]
    csv(tmp_path, "linear.csv", LINEAR_COLUMNS, parts)
    render(tmp_path)
    text = (tmp_path / "linear.md").read_text()
    assert "cusparselt 6:8, stock dense: not measured at M 64" in text
    assert "faster" not in text


@pytest.mark.parametrize("cut", [3, 1])
def test_a_torn_last_line_does_not_count(tmp_path: Path, cut: int) -> None:
    """Whether fields are missing or only the line end: the last number may be cut short."""
    lines = [square("int8", "dense", m, "cublaslt", 100) for m in (64, 128)]
    path = csv(tmp_path, "kernel.csv", KERNEL_COLUMNS, lines)
    path.write_text(path.read_text()[:-cut])
    found = read_kernel(tmp_path)
    assert [row.m for row in found.rows] == [64]
    assert found.notes[0] == "The last line of `kernel.csv` is torn and was left out."


def test_a_short_last_line_does_not_count(tmp_path: Path) -> None:
    lines = [square("int8", "dense", 64, "cublaslt", 100), "square,square,squ"]
    csv(tmp_path, "kernel.csv", KERNEL_COLUMNS, lines)
    assert "torn" in read_kernel(tmp_path).notes[0]
    csv(tmp_path, "kernel.csv", KERNEL_COLUMNS, lines[::-1])
    with pytest.raises(ReportError, match="line 2 of kernel.csv has 3 fields, its head 13"):
        render(tmp_path)


def test_missing_files_are_named(tmp_path: Path) -> None:
    csv(tmp_path, "linear.csv", LINEAR_COLUMNS, LINEAR)
    assert [path.name for path in render(tmp_path)] == ["linear.md", "README.md"]
    readme = (tmp_path / "README.md").read_text()
    for name in ("kernel.csv", "bandwidth.csv", "linear.json"):
        assert f"`{name}` is not there" in readme
    assert "pip install '.[report]'" in readme


def test_a_failed_measurement_is_missing_and_a_repeated_one_counts_last(tmp_path: Path) -> None:
    lines = [
        square("int8", "dense", 64, "cublaslt", 100),
        square("int8", "dense", 64, "cublaslt", 110),
        "square,square,square,int8,6:8,64,64,64,cusparselt,nan,,nan,",
    ]
    csv(tmp_path, "kernel.csv", KERNEL_COLUMNS, lines)
    found = read_kernel(tmp_path)
    assert [row.p50 for row in found.rows] == [110]
    assert "1 lines of `kernel.csv` hold no latency" in found.notes[0]
    assert "1 measurements of `kernel.csv` were repeated: the last one counts." in found.notes[1]


def test_bandwidth_conditions_and_commands(tmp_path: Path) -> None:
    kernel(
        tmp_path,
        [square("fp16", "dense", 64, "cublaslt", 100)],
        commands=["slidesparse bench kernel --out x", "slidesparse bench kernel"],
        gpu="Some | GPU",
        versions={"torch": "2.11", "vllm": None},
    )
    head = ["kernel", "dtype", "M", "K", "us", "GBps", "copy_GBps", "fraction"]
    csv(tmp_path, "bandwidth.csv", head, ["quant_slide,int8,64,2560,9.5,1234.5,2000,0.617", "x,fp8,1,2,,,,"])
    render(tmp_path)
    (rows,) = tables((tmp_path / "bandwidth.md").read_text(), "Memory-bound kernels")
    assert rows[1:] == [["quant_slide", "int8", "64", "2560", "9.50", "1234", "2000", "61.7%"]]
    readme = (tmp_path / "README.md").read_text()
    assert "```\nslidesparse bench kernel --out x\nslidesparse bench kernel\n```" in readme
    for line in ("| gpu | Some \\| GPU |", "| versions.torch | 2.11 |", "| versions.vllm | null |"):
        assert line in readme
    assert "1 lines of `bandwidth.csv` hold no rate" in readme
    for name in ("kernel.md", "bandwidth.md"):
        assert f"[{name}]({name})" in readme
    assert "linear.md" not in readme


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (square("int8", "5:8", 64, "cusparselt", 1), "line 2 of kernel.csv: sparsity '5:8' prunes 3"),
        (square("int8", "6:8", 64, "cusparselt", -1), "p20_us is '-0.9'; allowed: a number above 0"),
        (square("int8", "6:8", 0, "cusparselt", 1), "M is '0'; allowed: a number above 0"),
        ("cube" + square("int8", "6:8", 8, "cusparselt", 1)[6:], "mode is 'cube'; allowed: square, model"),
    ],
)
def test_what_cannot_be_understood_is_an_error(tmp_path: Path, line: str, words: str) -> None:
    csv(tmp_path, "kernel.csv", KERNEL_COLUMNS, [line])
    with pytest.raises(ReportError, match=re.escape(words)):
        render(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["kernel.csv"]


def test_nothing_to_report(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match="holds no measurement"):
        render(tmp_path)
    with pytest.raises(ReportError, match="is not a folder"):
        render(tmp_path / "none")
    csv(tmp_path, "kernel.csv", ("mode", "model"), [])
    with pytest.raises(ReportError, match="kernel.csv lacks the columns layer, dtype"):
        render(tmp_path)


def test_plots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bytes each time, without a date; a panel for each section, bars at the largest common M."""
    monkeypatch.undo()
    pytest.importorskip("matplotlib")
    lines = []
    for m in (64, 1024):
        for pattern, provider, us in (
            ("dense", "cublaslt", 100),
            ("2:4", "cusparselt", 60),
            ("6:8", "cusparselt", 85),
        ):
            lines.append(square("int8", pattern, m, provider, us))
            lines += four("A", pattern, m, provider, us)
            lines += four("B", pattern, m, provider, us) if m == 64 else []
    lines.append(square("fp8", "dense", 64, "cublaslt", 100))  # nothing sparse: no plot
    csv(tmp_path, "kernel.csv", KERNEL_COLUMNS, lines)
    csv(tmp_path, "linear.csv", LINEAR_COLUMNS, LINEAR)
    first = {path.name: path.read_bytes() for path in render(tmp_path)}
    names = ["kernel-speedup-int8.svg", "kernel-models-int8.svg"]
    names += [f"linear-{what}-{dtype}.svg" for dtype in ("int8", "fp8") for what in ("speedup", "models")]
    assert [name for name in first if name.endswith(".svg")] == names
    assert {path.name: path.read_bytes() for path in render(tmp_path)} == first
    text = first[names[0]].decode()
    for words in ("Square, M = N = K", "6:8", "cublaslt, dense = 1", "1024"):
        assert words in text
    assert "INT8, M = 64; line over a bar" in first[names[1]].decode()
    for name in names:
        assert len(first[name]) < 200_000
        assert b"dc:date" not in first[name]
    assert f"![kernel speedup int8]({names[0]})" in (tmp_path / "kernel.md").read_text()
    assert "[report]" not in (tmp_path / "README.md").read_text()


def test_more_sections_than_a_plot_holds_go_on_in_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    pytest.importorskip("matplotlib")
    cells = (("dense", "cublaslt", 100), ("6:8", "cusparselt", 85))
    lines = [line for i in range(7) for p, name, us in cells for line in four(f"model {i}", p, 64, name, us)]
    csv(tmp_path, "kernel.csv", KERNEL_COLUMNS, lines)
    render(tmp_path)
    panels = [
        re.findall(r"model \d", (tmp_path / f"kernel-speedup-int8{end}.svg").read_text())
        for end in ("", "-2")
    ]
    assert [sorted(set(names)) for names in panels] == [[f"model {i}" for i in range(6)], ["model 6"]]
