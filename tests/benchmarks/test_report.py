"""Tables and fits of docs/ against the CSV files that they come from."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from benchmarks import report
from benchmarks.cli import app
from benchmarks.docs import MARKED, MARKED_PAGES
from benchmarks.report import measured_layers
from slidesparse.convert.budget import LayerTimes, Shape, layer_fits
from slidesparse.pattern import SlidePattern
from slidesparse.tune.shapes import MODELS


def test_tables_of_the_docs_equal_those_of_the_csvs() -> None:
    result = CliRunner().invoke(app, ["docs", "--check"])
    assert result.exit_code == 0, result.stderr
    names = [name for path in MARKED_PAGES for _, name, _ in MARKED.findall(path.read_text())]
    assert sorted(names) == sorted(report.TABLES)


def test_estimated_speeds_are_those_measured() -> None:
    """To within twice the largest error of a fit, as both sides of a ratio have one."""
    us = report.model_layers(report.H200).loc["Qwen2.5-7B", "int8"]
    for pattern, name in ((None, "dense"), (SlidePattern(8), "6:8"), (SlidePattern(4), "2:4")):
        layers = [(Shape(layer.n, layer.k), pattern) for layer in MODELS["Qwen2.5-7B"]]
        for m, speed in LayerTimes("nvidia-h200", "int8").speeds(layers, (16, 8192)).items():
            measured = us.loc[m, ("hopper", "dense")] / us.loc[m, ("hopper", name)]
            assert speed == pytest.approx(measured, rel=0.13)
            assert (speed > 1) == (measured > 1)


def test_shipped_fits_are_as_close_to_the_measured_layers_as_stated() -> None:
    """The bounds are those that convert/budget.py states: on average, so by pattern and tokens, and at worst."""
    gpus = (
        ("nvidia-h200", report.H200, 0.0135, 0.0315, 0.065),
        ("nvidia-h100-80gb-hbm3", report.H100, 0.0365, 0.0645, 0.1395),
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
