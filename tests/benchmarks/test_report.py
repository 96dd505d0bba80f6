"""Tables of small result files, computed by hand, and those of docs/ against their CSV files."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks import report
from benchmarks.cli import app
from benchmarks.records import E2E, KERNEL, LINEAR
from benchmarks.report import (
    REAL_MODELS,
    gemm_us,
    measured_layers,
    model_layers,
    over,
    page,
    whole_models,
    within_rounds,
)
from benchmarks.tables import read
from slidesparse.convert.times import layer_fits
from slidesparse.errors import EnvironmentFault


def csv(folder: Path, name: str, header: Iterable[str], lines: Iterable[str]) -> Path:
    path = folder / name
    path.write_text("".join(f"{line}\n" for line in (",".join(header), *lines)))
    return path


def rate(
    system: str,
    value: float,
    pattern: str = "dense",
    m: int = 64,
    number: int = 1,
    step: str = "",
    joule: str = "",
) -> str:
    return f"tiny,int8,prefill,{m},1024,{system},{pattern},{number},{step},{value},{joule}"


def test_ratios_of_whole_models_are_within_rounds(tmp_path: Path) -> None:
    """A machine's speed varies from round to round: ratios are 980 / 1000, 100 / 900 and 970 / 1100."""
    lines = [rate("stock", value, number=i) for i, value in enumerate((1000, 900, 1100), 1)]
    lines += [rate("sparse", value, "6:8", number=i) for i, value in enumerate((980, 100, 970), 1)]
    lines += [
        rate("sparse", 1, "2:4"),
        rate("sparse", 1600, "2:4"),
        rate("stock", 500, m=128),
    ]  # the last counts
    lines += [rate("sparse", 400, "2_8", m=128), rate("unfused", 300, "6:8", m=128), rate("bf16", 250, m=128)]
    csv(tmp_path, "e2e.csv", E2E.columns, lines)
    ratios = within_rounds(whole_models(tmp_path), "stock").groupby(level="M").median()
    assert ratios.loc[64].round(3).dropna().to_dict() == {"2:4": 1.6, "6:8": 0.882, "stock": 1.0}
    assert ratios.loc[128].dropna().to_dict() == {"6:8": 0.8, "bf16": 0.5, "stock": 1.0, "unfused 6:8": 0.6}
    row = next(line for line in page(tmp_path).splitlines() if line.startswith("| prefill | 128"))
    assert row == "| prefill | 128 | 1024 | 500.0 | 0.50 | - | 0.80 | 0.60 |"


def test_rates_are_those_of_the_median_step_where_a_round_has_it(tmp_path: Path) -> None:
    """M / step: 64 tokens in 0.5 ms; in round 2 one system lacks its step."""
    lines = [rate("stock", 500, step="0.5"), rate("sparse", 400, "6:8", step="0.25")]
    lines += [rate("stock", 600, number=2), rate("sparse", 900, "6:8", number=2, step="0.25")]
    csv(tmp_path, "e2e.csv", E2E.columns, lines)
    assert read(tmp_path, E2E)["rate"].tolist() == [128_000, 256_000, 600, 900]


def test_layers_are_summed_only_when_all_four_are_there(tmp_path: Path) -> None:
    """Layers of 1, 2, 3 and 94 us (100) against 1, 2, 3 and 44 us (50) give 2.00; the mean of ratios would be 1.28."""

    def rows(pattern: str, provider: str, times: Iterable[float], m: int = 512) -> list[str]:
        named = zip(("qkv", "o", "gate_up", "down"), times, strict=False)
        return [f"model,A,{n},int8,{pattern},{m},100,200,{provider},{us},{us},{us},,x" for n, us in named]

    square = "square,square,square,int8,6:8,64,64,64,cusparselt,,,,,"  # refused: no figure
    lines = [*rows("dense", "cublaslt", (1, 2, 3, 94)), *rows("6:8", "cusparselt", (1, 2, 3, 44)), square]
    lines += [*rows("2_6", "cusparselt", (1, 2, 3)), *rows("6:8", "cusparselt", (1, 2, 3, 4), m=64)]
    csv(tmp_path, "kernel.csv", KERNEL.columns, lines)
    assert over(gemm_us(tmp_path), "cublaslt", "cusparselt").loc["A", "int8"]["6:8"].dropna().to_dict() == {
        512: 2.0
    }
    assert "| 512 | 100.0 | 2.00 |" in page(tmp_path)


def test_layers_and_energies_over_stock(tmp_path: Path) -> None:
    lines = ["A,sum,int8,dense,64,stock,9,10,11,4", "A,sum,int8,6:8,64,hopper,7,8,9,2.5"]
    csv(tmp_path, "linear.csv", LINEAR.columns, [*lines, "A,sum,int8,2:4,64,hopper,4,5,6,"])
    assert over(model_layers(tmp_path), "stock", "hopper").loc["A", "int8", 64].to_dict() == {
        "2:4": 2.0,
        "6:8": 1.25,
    }
    text = page(tmp_path)
    assert "| sum | 64 | 10.00 | 2.00 | 1.25 |" in text  # microseconds
    assert "| sum | 64 | 4.000 | 1.60 |" in text  # millijoules: 2:4 has none


# --- docs


def test_tables_of_the_docs_equal_those_of_the_csvs() -> None:
    result = CliRunner().invoke(app, ["docs", "--check"])
    assert result.exit_code == 0, result.stderr
    names = [name for path in report.MARKED_PAGES for _, name, _ in report.MARKED.findall(path.read_text())]
    assert sorted(names) == sorted(report.TABLES)


# --- fits of layer times


def test_shipped_fits_are_as_close_to_the_measured_layers_as_stated() -> None:
    """The bounds are those that slidesparse/convert/times.py states: on average by pattern and tokens, and at worst."""
    gpus = ("nvidia-h200", report.H200, 0.09), ("nvidia-h100-80gb-hbm3", report.H100, 0.07)
    for gpu, folder, overall in gpus:
        fits, errors = layer_fits(gpu), []
        for (dtype, pattern, tokens), us in measured_layers(folder).items():
            a, b = fits[dtype, pattern, tokens]
            off = [abs((a + b * n * k) / measured - 1) for (n, k), measured in us.items()]
            assert sum(off) / len(off) < 0.155, (dtype, pattern, tokens)
            errors += off
        assert max(errors) < 0.525
        assert sum(errors) / len(errors) < overall


def test_plots_show_every_line_of_a_curve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plots = pytest.importorskip("benchmarks.plots", exc_type=EnvironmentFault)
    header = REAL_MODELS.read_text().splitlines()[0].split(",")
    lines = [
        "qwen-coder,bf16,dense,-,0,0,-,wikitext2,20,,",
        "qwen-coder,int8,dense,-,0,0,0,wikitext2,20.4,2,",
    ]
    lines += [f"qwen-coder,int8,2:4,sparsegpt,50,0,{seed},wikitext2,40,96,40" for seed in (0, 1)]
    lines += ["qwen-coder,int8,2:4,distilled,50,5,0,wikitext2,25,22.5,50"]
    lines += ["qwen-coder,fp8,6:8,sparsegpt,25,0,0,wikitext2,21,4,"]
    monkeypatch.setattr(report, "REAL_MODELS", csv(tmp_path, "real_models.csv", header, lines))
    text = plots.curve("a note")
    for word in ("a note", ">2:4<", ">6:8, FP8<", ">5<", ">qwen-coder<"):
        assert word in text
    assert ">INT8, 2:4<" in plots.frontier(report.H200, "")
    assert "| 40.00 ± 0.0 | +96.0 ± 0.0% |" in report.real_models()
