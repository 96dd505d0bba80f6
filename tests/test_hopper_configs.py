"""Configurations of the Hopper kernels: their text, which are worth trying, what the model says of them."""

from __future__ import annotations

import re

import pytest
import torch
from hopper_stand_in import SMS, fit
from hypothesis import given
from hypothesis import strategies as st

from slidesparse.gemm import hopper, hopper_configs
from slidesparse.gemm.hopper_configs import START_US, Config, Fit, candidates, parse, predicted_us
from slidesparse.gemm.library import LibraryError, Problem

pytest_plugins = ("hopper_fixtures",)

PROBLEM = Problem("int8", "bf16", 37888, 5376, 64, "both")
SIZES = st.integers(1, 40000)


@given(n=SIZES, k=SIZES, m=SIZES)
def test_every_shape_has_configurations_that_run(n: int, k: int, m: int) -> None:
    found = candidates(n, k, m, SMS, 48, fit)
    assert 1 <= len(found) <= 48
    assert len(set(found)) == len(found)
    times = [predicted_us(config, n, k, m, SMS, fit(config).clusters) for config in found]
    assert times == sorted(times)
    assert times[0] > 0
    for config in found:
        assert fit(config).stages >= hopper_configs.USEFUL_STAGES
        assert fit(config).clusters * config.cluster > SMS * (config.resident - 1)
        assert parse(str(config)) == config


def test_only_what_the_library_says_is_tried() -> None:
    """Of everything that has a name, that of which there is a kernel with room for as many blocks as it says."""
    only = Config("split", 3, 64, 1, 6, 2)

    def fits(config: Config) -> Fit:
        return Fit(5, 40) if config == only else Fit(2, 200) if config.strips == 1 else Fit(9, 10)

    assert candidates(37888, 5376, 64, SMS, 48, fits)[0] == only
    residents = {
        config.resident for config in candidates(37888, 5376, 64, SMS, 10**6, fits) if config != only
    }
    assert residents == {1}  # ten clusters of any size are no two blocks a multiprocessor
    assert not any(config.strips == 1 for config in candidates(37888, 5376, 64, SMS, 10**6, fits))


@pytest.mark.parametrize(
    "text", ["", "3", "split:2x64/1x4", "split:0x64/1x1/1", "split:2x64/1x4/2 ", "split:2x64/1x1/0"]
)
def test_text_that_names_no_configuration(text: str, standing_in: object) -> None:
    assert parse(text) is None
    with pytest.raises(LibraryError, match=re.escape(f"{text!r} is no configuration of the Hopper kernels")):
        hopper.LIBRARY.plan(PROBLEM, torch.device("cpu"), text)


@pytest.mark.parametrize(
    "text",
    [
        *("split:6x64/1x1/1", "split:1x256/1x1/1", "split:2x48/1x1/1", "split:2x64/4x4/1", "split:1x8/2x1/1"),
        *("split:3x256/1x1/1", "stream:5x128/1/1", "split:2x256/1x1/3", "stream:2x64/3/1"),
    ],
)
def test_configurations_without_a_kernel(text: str, standing_in: object) -> None:
    assert str(parse(text)) == text
    with pytest.raises(LibraryError, match=re.escape(f"no kernel was compiled for configuration {text}, or")):
        hopper.LIBRARY.plan(PROBLEM, torch.device("cpu"), text)


def test_the_widest_streaming_kernel_has_five_stages() -> None:
    """Four leave it waiting for what several blocks share: its outputs leave by little memory for that."""
    assert fit(Config("stream", 2, 256, 2, 1, 1)).stages == 5


def test_the_widest_splits_have_as_many() -> None:
    """Their sums come into the ring."""
    assert {fit(Config("split", 2, 256, 1, splits, 1)).stages for splits in (1, 2, 4, 8)} == {5}


def test_the_model_knows_what_it_is_for() -> None:
    """Few tokens: less weight is less time.  Many: half the columns are about half the time."""

    def best(k: int, m: int) -> float:
        config = candidates(37888, k, m, SMS, 1, fit)[0]
        return predicted_us(config, 37888, k, m, SMS, fit(config).clusters)

    assert 1.3 < best(5376, 64) / best(3584, 64) < 1.55
    assert 1.8 < best(7168, 8192) / best(3584, 8192) < 2.2


def test_clusters_that_do_not_fit_at_once_take_longer() -> None:
    """33 clusters of four, of which a GPU of 132 multiprocessors holds 30."""
    config = Config("split", 2, 64, 1, 4, 1)
    few, many = (predicted_us(config, 33 * 128, 8192, 64, SMS, clusters) for clusters in (30, 33))
    assert few - START_US > 1.5 * (many - START_US)  # two waves instead of one


def test_a_configuration_is_what_its_text_says() -> None:
    assert parse("split:2x64/1x4/2") == Config("split", 2, 64, 1, 4, 2)
    assert parse("stream:3x128/2/1") == Config("stream", 3, 128, 2, 1, 1)
