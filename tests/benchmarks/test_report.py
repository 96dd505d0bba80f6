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
    """The bounds are those that convert/budget.py states: on average by pattern and tokens, and at worst."""
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
