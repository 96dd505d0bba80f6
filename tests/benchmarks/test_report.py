"""Tables of small result files, computed by hand, and those of docs/ against their CSV files."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from benchmarks import report
from benchmarks.cli import app
from benchmarks.records import E2E
from benchmarks.report import measured_layers, page, whole_models, within_rounds
from slidesparse.convert.times import layer_fits


def rate(system: str, value: float, pattern: str = "dense", m: int = 64, number: int = 1) -> str:
    return f"tiny,int8,prefill,{m},1024,{system},{pattern},{number},,{value},"


def test_ratios_of_whole_models_are_within_rounds(tmp_path: Path) -> None:
    """A machine's speed varies from round to round: ratios are 980 / 1000, 100 / 900 and 970 / 1100."""
    lines = [rate("stock", value, number=i) for i, value in enumerate((1000, 900, 1100), 1)]
    lines += [rate("sparse", value, "6:8", number=i) for i, value in enumerate((980, 100, 970), 1)]
    lines += [rate("sparse", 1, "2:4"), rate("sparse", 1600, "2:4")]  # the last counts
    lines += [rate("stock", 500, m=128)]
    lines += [rate("sparse", 400, "2_8", m=128), rate("unfused", 300, "6:8", m=128), rate("bf16", 250, m=128)]
    (tmp_path / "e2e.csv").write_text("\n".join([",".join(E2E.columns), *lines, ""]))
    ratios = within_rounds(whole_models(tmp_path), "stock").groupby(level="M").median()
    assert ratios.loc[64].round(3).dropna().to_dict() == {"2:4": 1.6, "6:8": 0.882, "stock": 1.0}
    assert ratios.loc[128].dropna().to_dict() == {"6:8": 0.8, "bf16": 0.5, "stock": 1.0, "unfused 6:8": 0.6}
    row = next(line for line in page(tmp_path).splitlines() if line.startswith("| prefill | 128"))
    assert row == "| prefill | 128 | 1024 | 500.0 | 0.50 | - | 0.80 | 0.60 |"


# --- docs


def test_tables_of_the_docs_equal_those_of_the_csvs() -> None:
    result = CliRunner().invoke(app, ["docs", "--check"])
    assert result.exit_code == 0, result.stderr
    names = [name for path in report.MARKED_PAGES for _, name, _ in report.MARKED.findall(path.read_text())]
    assert sorted(names) == sorted(report.TABLES)


# --- fits of layer times


def test_shipped_fits_are_as_close_to_the_measured_layers_as_stated() -> None:
    """The bounds are those that slidesparse/convert/times.py states: on average by pattern and tokens, and at worst."""
    gpus = ("nvidia-h200", report.H200, 0.095), ("nvidia-h100-80gb-hbm3", report.H100, 0.07)
    for gpu, folder, overall in gpus:
        fits, errors = layer_fits(gpu), []
        for (dtype, pattern, tokens), us in measured_layers(folder).items():
            a, b = fits[dtype, pattern, tokens]
            if pattern == "8:10":  # the same layers again
                assert (a, b) == fits[dtype, "dense", tokens]
                continue
            off = [abs((a + b * n * k) / measured - 1) for (n, k), measured in us.items()]
            assert sum(off) / len(off) < 0.155, (dtype, pattern, tokens)
            errors += off
        assert max(errors) < 0.525
        assert sum(errors) / len(errors) < overall
