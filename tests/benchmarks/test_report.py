"""Tables and fits of docs/ against the CSV files that they come from."""

from __future__ import annotations

from typer.testing import CliRunner

from benchmarks import report
from benchmarks.cli import app
from benchmarks.docs import MARKED, MARKED_PAGES
from benchmarks.report import measured_layers
from slidesparse.convert.budget import layer_fits


def test_tables_of_the_docs_equal_those_of_the_csvs() -> None:
    result = CliRunner().invoke(app, ["docs", "--check"])
    assert result.exit_code == 0, result.stderr
    names = [name for path in MARKED_PAGES for _, name, _ in MARKED.findall(path.read_text())]
    assert sorted(names) == sorted(report.TABLES)


def test_shipped_fits_are_as_close_to_the_measured_layers_as_stated() -> None:
    """The bounds are those that convert/budget.py states: on average, so by pattern and tokens, and at worst."""
    gpus = (
        ("nvidia-h200", report.H200, 0.0145, 0.032, 0.065),
        ("nvidia-h100-80gb-hbm3", report.H100, 0.04, 0.083, 0.18),
    )
    for gpu, folder, overall, by_case, worst in gpus:
        fits, errors = layer_fits(gpu), []
        for case, measured in measured_layers(folder).items():
            a, b = fits[case]
            off = [abs((a * row.layers + b * 1e6 * row.weights) / row.us - 1) for row in measured.values()]
            assert sum(off) / len(off) < by_case, case
            errors += off
        assert max(errors) < worst
        assert sum(errors) / len(errors) < overall
