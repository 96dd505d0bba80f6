"""The report of small result files, with tables computed by hand.

test_docs.py covers the other pages: it compares all those of docs/ with their result files.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.records import E2E, KERNEL, LINEAR, RecordsError
from benchmarks.report import plots, render
from benchmarks.report.data import read
from benchmarks.report.pages import Results

FOUR = ("qkv", "o", "gate_up", "down")


def csv(folder: Path, name: str, header: Iterable[str], lines: Iterable[str]) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text("".join(f"{line}\n" for line in (",".join(header), *lines)))
    return path


def square(dtype: str, pattern: str, m: int, provider: str, us: float) -> str:
    return f"square,square,square,{dtype},{pattern},{m},{m},{m},{provider},{us * 0.9},{us},{us * 1.1},auto"


def layer(model: str, name: str, pattern: str, m: int, provider: str, us: float) -> str:
    return f"model,{model},{name},int8,{pattern},{m},100,200,{provider},{us},{us},{us},auto"


def four(model: str, pattern: str, m: int, provider: str, us: float) -> list[str]:
    """Rows of four layers that take ``us`` together: 1, 2, 3 and 4 tenths of it."""
    return [layer(model, name, pattern, m, provider, us * (i + 1) / 10) for i, name in enumerate(FOUR)]


def summed(model: str, pattern: str, m: int, provider: str, us: float, dtype: str = "int8") -> str:
    return f"{model},sum,{dtype},{pattern},{m},{provider},{us},{us},{us}"


def tables(text: str, heading: str) -> list[list[list[str]]]:
    """Return the cells of every table under a heading, the header row first, without the separator row."""
    body = re.split(r"^#+ ", text.split(f"# {heading}\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]
    blocks = re.findall(r"(?:^\|.*\n)+", body, flags=re.MULTILINE)
    split = [
        [[cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines()]
        for block in blocks
    ]
    return [[rows[0], *rows[2:]] for rows in split]


@pytest.fixture(autouse=True)
def no_plots(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip drawing except in tests of plots."""
    if "plots" not in request.node.name:
        monkeypatch.setattr(plots, "draw", lambda *_: [])


def kernel(folder: Path, lines: Iterable[str], **conditions: Any) -> str:
    """Return kernel.md for the lines of kernel.csv."""
    csv(folder, "kernel.csv", KERNEL.columns, lines)
    (folder / "kernel.json").write_text(json.dumps(conditions))
    assert folder / "kernel.md" in render(folder)
    return (folder / "kernel.md").read_text()


def missing(folder: Path) -> list[list[str]]:
    """Return the rows of the table of missing measurements."""
    return tables((folder / "README.md").read_text(), "Missing")[0][1:]


# --- GEMMs


def test_speedups_of_gemms(tmp_path: Path) -> None:
    """Dense takes 100 us; 2:4 in 62.5 us is 1.60 times as fast, 6:8 in 80 us 1.25, and 2_inf in 125 us 0.80."""
    lines = [
        square("int8", "dense", 64, "cublaslt", 100),
        square("int8", "dense", 64, "cublaslt-int8", 75),
        square("int8", "dense", 64, "stock", 50),
        square("int8", "2_inf", 64, "cusparselt", 125),
        square("int8", "2:4", 64, "cusparselt", 62.5),
        square("int8", "2_8", 64, "cusparselt", 80),  # the other spelling of 6:8
        square("int8", "6:8", 64, "hopper", 50),
        square("int8", "dense", 64, "hopper", 80),
    ]
    text = kernel(tmp_path, lines)
    dense, stock = tables(text, "Square, M = N = K, INT8")
    assert dense == [
        ["M", "cublaslt us", "2:4", "6:8", "2_inf"],
        ["64", "100.0", "1.60", "1.25", "0.80"],
        ["N/(N-1)", "", "2.00", "1.33", "1.00"],
    ]
    assert stock[1] == ["64", "50.00", "0.80", "0.62", "0.40"]
    hopper = tables(text, "Square, M = N = K, hopper, INT8")
    assert hopper[0][0][-2:] == ["dense", "6:8"]
    assert hopper[0][1] == ["64", "100.0", "1.25", "2.00"]
    assert "20.0% in the median, 20.0% at most" in text


def test_no_ratio_without_both_sides(tmp_path: Path) -> None:
    """No value comes from another M."""
    lines = [
        square("int8", "dense", 64, "cublaslt", 100),
        square("int8", "6:8", 64, "cusparselt", 80),
        square("int8", "6:8", 128, "cusparselt", 160),
        square("int8", "2:4", 256, "cusparselt", 70),
    ]
    (speedups,) = tables(kernel(tmp_path, lines), "Square, M = N = K, INT8")
    assert [row[2:] for row in speedups[1:4]] == [["-", "1.25"], ["-", "-"], ["-", "-"]]
    subject = ["kernel.csv, square", "INT8", "Square, M = N = K"]
    assert missing(tmp_path) == [
        [*subject, "cublaslt", "dense", "128, 256"],
        [*subject, "cusparselt", "2:4", "64, 128"],
        [*subject, "cusparselt", "6:8", "256"],
    ]


def test_layers_are_summed_only_when_all_four_are_there(tmp_path: Path) -> None:
    """Layers of 1, 2, 3 and 94 us (100) against 1, 2, 3 and 44 us (50) give 2.00; the mean of ratios would be 1.28."""
    lines = [
        *(layer("A", n, "dense", 512, "cublaslt", us) for n, us in zip(FOUR, (1, 2, 3, 94), strict=True)),
        *(layer("A", n, "6:8", 512, "cusparselt", us) for n, us in zip(FOUR, (1, 2, 3, 44), strict=True)),
        *four("A", "4:6", 512, "cusparselt", 70)[:3],
        *four("B", "dense", 512, "cublaslt", 30)[:2],  # only two layers of B were measured
    ]
    text = kernel(tmp_path, lines)
    assert tables(text, "A, INT8")[0][:2] == [["M", "cublaslt us", "6:8"], ["512", "100.0", "2.00"]]
    # 2 x 512 x 100 x 200 operations per layer; four layers in 100 us and in 50 us
    assert Results(tmp_path).models.sections[0].tops().round(2).loc[512].to_dict() == {
        "cublaslt": 0.82,
        "6:8": 1.64,
    }
    titles = re.findall(r"^## (.*)", text, flags=re.MULTILINE)
    assert titles == ["A, INT8", "B o, INT8", "B qkv, INT8"]
    file = ["kernel.csv", "INT8"]
    assert missing(tmp_path) == [
        [*file, "A", "cusparselt", "4:6", "all"],
        [*file, "B o, B qkv", "cusparselt", "4:6, 6:8", "all"],
    ]


# --- whole models


def rate(
    system: str, value: float, pattern: str = "dense", m: int = 64, number: int = 1, stage: str = "prefill"
) -> str:
    return f"tiny,int8,{stage},{m},{pattern},{system},{number},{value},,"


RATES = [
    *(rate("stock", value, number=i) for i, value in enumerate((1000, 900, 1100), 1)),
    rate("cublaslt", 800),
    rate("sparse", 1600, "2:4"),
    *(rate("sparse", value, "6:8", number=i) for i, value in enumerate((980, 100, 970), 1)),
    rate("stock", 500, m=128),
    rate("sparse", 400, "2_8", m=128),  # the other spelling of 6:8
    rate("unfused", 300, "6:8", m=128),  # another sparse system
    rate("stock", 20, stage="decode"),
    rate("stock", 10, stage="decode"),  # repeated: the last one counts
    rate("sparse", 12.5, "6:8", stage="decode"),
]


def test_tables_of_whole_models(tmp_path: Path) -> None:
    csv(tmp_path, "e2e.csv", E2E.columns, RATES)
    render(tmp_path)
    text = (tmp_path / "e2e.md").read_text()
    rates, over_stock = tables(text, "tiny, prefill, INT8")
    assert rates == [
        ["M", "stock", "cublaslt", "2:4", "6:8"],
        ["64", "1000 ±10.0%", "800", "1600", "970 ±45.4%"],  # 880 / 970 / 2
        ["128", "500", "-", "-", "400"],
    ]
    assert over_stock == [
        ["M", "2:4", "6:8"],
        ["64", "1.60", "0.88"],  # the median of 980 / 1000, 100 / 900 and 970 / 1100
        ["128", "-", "0.80"],
        ["N/(N-1)", "2.00", "1.33"],
    ]
    (efficiency, *_), _ = (part.sections for part in Results(tmp_path).stages.values())
    # 970 / 1100 / 1.6 / (2 / 3)
    assert efficiency.efficiency().round(3).loc[64].to_dict() == {"2:4": 1.0, "6:8": 0.827}
    assert tables(text, "tiny, unfused, prefill, INT8")[1][2] == ["128", "0.60"]
    assert tables(text, "tiny, decode, INT8")[0][1] == ["64", "10.00", "12.50"]
    counts = {(row[0], row[1]): row[2:6] for row in tables(text, "Compared with stock vLLM")[0][1:]}
    assert counts == {
        ("prefill", "2:4"): ["1", "1", "0", "0"],
        ("prefill", "6:8"): ["3", "0", "0", "3"],
        ("decode", "6:8"): ["1", "1", "0", "0"],
    }
    assert "1 lines of `e2e.csv` were repeated" in (tmp_path / "README.md").read_text()


def test_rates_are_those_of_the_median_step_where_a_round_has_it(tmp_path: Path) -> None:
    lines = [rate("stock", 500), rate("sparse", 400, "6:8"), rate("stock", 600, number=2)]
    lines = [line + step for line, step in zip(lines, ("0.5", "0.25", ""), strict=True)]
    csv(tmp_path, "e2e.csv", E2E.columns, [*lines, rate("sparse", 900, "6:8", number=2) + "0.25"])
    assert read(tmp_path, E2E).rows["rate"].tolist() == [128_000, 256_000, 600, 900]


# --- torn or invalid files


def test_a_torn_or_failed_line_does_not_count(tmp_path: Path) -> None:
    lines = [square("int8", "dense", m, "cublaslt", 100) for m in (64, 128)]
    lines.insert(1, "square,square,square,int8,6:8,64,64,64,cusparselt,nan,,nan,")
    path = csv(tmp_path, "kernel.csv", KERNEL.columns, lines)
    path.write_text(path.read_text()[:-3])
    render(tmp_path)
    readme = (tmp_path / "README.md").read_text()
    for text in (
        "`kernel.csv` is torn",
        "1 lines of `kernel.csv` hold no figure",
        "`linear.csv` is not there",
    ):
        assert text in readme


@pytest.mark.parametrize(
    ("line", "fact"),
    [
        (square("int8", "5:8", 64, "cusparselt", 1), "5:8"),
        (square("int8", "6:8", 64, "cusparselt", 1).replace("0.9", "fast"), "fast"),
        ("cube" + square("int8", "6:8", 8, "cusparselt", 1)[6:], "'cube'"),
    ],
)
def test_invalid_line_is_an_error(tmp_path: Path, line: str, fact: str) -> None:
    csv(tmp_path, "kernel.csv", KERNEL.columns, [line])
    with pytest.raises(RecordsError, match=rf"kernel\.csv.*{fact}"):
        render(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["kernel.csv"]


def test_folder_without_results_is_an_error(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "none"):
        with pytest.raises(RecordsError, match=str(folder)):
            render(folder)


# --- plots


def test_plots_are_deterministic_and_complete(tmp_path: Path) -> None:
    """Plots are reproducible, without a date. A file has panels of six sections."""
    cells = (("dense", "stock", 100), ("2:4", "cusparselt", 60), ("6:8", "cusparselt", 85))
    lines = [summed(f"model {i}", *cell[:1], 64, *cell[1:]) for i in range(7) for cell in cells]
    lines.append(summed("A", "dense", 64, "stock", 100, "fp8"))  # no sparse rows: no plot
    csv(tmp_path, "linear.csv", LINEAR.columns, lines)
    csv(tmp_path, "e2e.csv", E2E.columns, RATES)
    files = {path.name: path.read_bytes() for path in render(tmp_path)}
    names = ["linear-speedup-int8.svg", "linear-speedup-int8-2.svg"]
    names += [f"e2e-{stage}-speedup-int8.svg" for stage in ("prefill", "decode")]
    assert [name for name in files if name.endswith(".svg")] == names
    assert {path.name: path.read_bytes() for path in render(tmp_path)} == files
    shown = [files[name].decode() for name in names]
    assert [sorted(set(re.findall(r"model \d", text))) for text in shown[:2]] == [
        [f"model {i}" for i in range(6)],
        ["model 6"],
    ]
    assert "speed-up over stock" in shown[0]
    for name, text in zip(names, shown, strict=True):
        assert "dc:date" not in text
        assert f"]({name})" in (tmp_path / f"{name.split('-')[0]}.md").read_text()
