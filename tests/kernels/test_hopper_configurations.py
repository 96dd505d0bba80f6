"""Configurations of the Hopper kernels: text format and candidates.

The tests compile csrc/hopper/configuration.cu for the CPU, and define how configurations fit on the GPU.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
from configurations import Configuration
from hypothesis import given, settings
from hypothesis import strategies as st
from test_hopper_pack import compile_source

SMS = 132
MAX_CONFIGURATIONS = 4096
BYTES = 32  # of a configuration's text
SIZES = st.integers(1, 40000)
AROUND = """
#include <cstring>

#include "configuration.cu"
using namespace slidesparse::hopper;
#define EXPORT extern "C" __attribute__((visibility("default")))
EXPORT int parses(const char* text, char* again) {
  Configuration found;
  if (!Parse(text, &found)) return 0;
  std::strcpy(again, ToText(found).c_str());
  return 1;
}
EXPORT int candidates(int n, int columns, int m, int most, int sms,
                      void (*fits)(const char*, int, int*), char* texts, double* us) {
  const auto fit = [=](const Configuration& one) {
    int found[2];
    fits(ToText(one).c_str(), one.resident, found);
    return Fit{found[0], found[1]};
  };
  int count = 0;
  for (const Candidate& one : FindCandidates(n, columns, m, 0.0, 5120, most, sms, fit)) {
    std::strcpy(texts + 32 * count, ToText(one.configuration).c_str());
    us[count++] = one.us;
  }
  return count;
}
"""
FITS = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_int, ctypes.POINTER(ctypes.c_int))

Fit = Callable[[str, int], tuple[int, int]]  # text, resident -> stages, clusters


def fits_as_named(text: str, resident: int) -> tuple[int, int]:
    """Return stages and clusters on a GPU that holds as many CTAs as each configuration names."""
    return 5, SMS * resident // Configuration.parse(text).cluster


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return compile_source(tmp_path_factory.mktemp("configuration"), AROUND)


def candidates(
    native: Any, n: int, k: int, m: int, fit: Fit = fits_as_named, limit: int = MAX_CONFIGURATIONS
) -> list[tuple[str, float]]:
    def fits(text: bytes, resident: int, result: Any) -> None:
        result[0], result[1] = fit(text.decode(), resident)

    texts = ctypes.create_string_buffer(MAX_CONFIGURATIONS * BYTES)
    us = (ctypes.c_double * MAX_CONFIGURATIONS)()
    count = native.candidates(n, k, m, limit, SMS, FITS(fits), texts, us)
    return [(texts.raw[BYTES * i :].partition(b"\0")[0].decode(), us[i]) for i in range(count)]


@settings(max_examples=25, deadline=None)
@given(n=SIZES, k=SIZES, m=SIZES)
def test_every_shape_has_candidates(native: Any, n: int, k: int, m: int) -> None:
    """Candidates are unique and sorted by predicted time, and their texts survive parsing."""
    ranked = candidates(native, n, k, m, limit=48)
    buffer = ctypes.create_string_buffer(BYTES)
    assert 1 <= len(ranked) <= 48
    assert len({text for text, _ in ranked}) == len(ranked)
    assert [us for _, us in ranked] == sorted(us for _, us in ranked)
    assert ranked[0][1] > 0
    for text, _ in ranked:
        assert native.parses(text.encode(), buffer) == 1
        assert buffer.value.decode() == text


def test_candidates_fit_on_the_gpu(native: Any) -> None:
    """Candidates are only kernels with enough stages and as many resident CTAs as their text names."""
    fitting = "split:3x64/1x6/2"

    def fit(text: str, resident: int) -> tuple[int, int]:
        return (5, 60) if text == fitting else (2, 200) if Configuration.parse(text).strips == 1 else (9, 10)

    texts = candidates(native, 37888, 5376, 64, fit)
    assert fitting in {text for text, _ in texts}
    configs = [Configuration.parse(text) for text, _ in texts if text != fitting]
    assert configs
    # ten clusters of any size give fewer than two CTAs per SM
    assert {config.resident for config in configs} == {1}
    assert not any(config.strips == 1 for config in configs)  # two stages are too few


@pytest.mark.parametrize(
    "text",
    [
        *("", "3", "split:2x64/1x4", "split:0x64/1x1/1", "split:2x64/1x4/2 ", "split:2x64/1x1/0"),
        *("stream:2x64/1x4/2", "split:2x64/4/2", "tree:2x64/1x4/2", "split:2x1000000000000/1x4/2"),
    ],
)
def test_invalid_configuration_text_is_refused(native: Any, text: str) -> None:
    assert native.parses(text.encode(), ctypes.create_string_buffer(BYTES)) == 0
