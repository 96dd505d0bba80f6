"""The compiled Hopper kernels without a GPU: refusals that need no device."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from slidesparse.build import find
from slidesparse.build.compile import build
from slidesparse.build.find import ToolchainError
from slidesparse.gemm.hopper import native
from slidesparse.gemm.problem import Layer, LibraryError
from slidesparse.quantize import FP8, INT8

pytestmark = pytest.mark.slow  # nvcc takes some minutes


@pytest.fixture(scope="module")
def library() -> Any:
    """Return the compiled kernels with the types of `native.FUNCTIONS`, all of which must exist."""
    try:
        find.nvcc_version(find.find_nvcc().path)
    except ToolchainError as error:
        pytest.skip(str(error))
    cdll = ctypes.CDLL(str(build("hopper")))
    native.declare_functions(cdll)
    return cdll


@pytest.fixture(autouse=True)
def loaded(library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "library", lambda: library)


# invalid n, k, length, phase and the error message
UNPACKABLE = {
    "an odd length": ((1, 8, 7, 0), "blocks of 7 columns"),
    "too short": ((1, 8, 2, 0), "an even length of 4 or more"),
    "no length": ((1, 8, 0, 0), "an even length of 4 or more"),
    "a whole block before": ((1, 8, 8, 8), "a phase below it"),
    "no such size": ((-1, 8, 8, 0), r"\[-1, 8\]"),
    "long rows": ((1, 2**31 - 1, 8, 0), "no such sizes"),
    "a large grid": ((2**31 - 1, 1 << 20, 8, 0), "no such sizes"),
}


@pytest.mark.parametrize("name", UNPACKABLE)
def test_pack_refuses_invalid_sizes(name: str) -> None:
    sizes, message = UNPACKABLE[name]
    with pytest.raises(LibraryError, match=message):
        native.call("pack", native.integers(Layer(*sizes, 0, 0)), None, 0, 0, None, None, None, None)


def test_pack_refuses_slided_mixed_blocks() -> None:
    with pytest.raises(LibraryError, match="4 at phase 0"):
        native.call("pack", native.integers(Layer(64, 128, 8, 0, 0, 0)), None, 0, 1, None, None, None, None)


def test_pack_of_empty_weights_launches_nothing() -> None:
    for n, k in ((0, 8), (3, 0)):
        native.call("pack", native.integers(Layer(n, k, 4, 0, 0, 0)), None, 0, 0, None, None, None, None)


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (Layer(64, 64, 5, 0, 0, 64), "blocks of 5 columns"),
        (Layer(64, 64, 8, 8, 0, 96), "phase 8"),
        (Layer(64, 64, 8, 0, 0, 80), "become 96"),
        (Layer(64, 64, 8, 0, 0, 100), "a multiple of 16"),
        (Layer(0, 64, 8, 0, 0, 96), "0 out-features"),
    ],
)
def test_make_plan_refuses_invalid_layers(layer: Layer, message: str) -> None:
    with pytest.raises(LibraryError, match=message):
        native.make_plan(layer, [(1, "split:2x64/1x1/1")])


@pytest.mark.parametrize("text", ["", "3", "split:2x64/1x4", "split:0x64/1x1/1", "x" * 500])
def test_fit_refuses_invalid_configuration_text(text: str) -> None:
    with pytest.raises(LibraryError, match="is no configuration of the Hopper kernels"):
        native.fit(text, INT8)


@pytest.mark.parametrize(
    "text",
    [
        *("split:6x64/1x1/1", "split:1x256/1x1/1", "split:2x48/1x1/1", "split:2x64/4x4/1", "split:1x8/2x1/1"),
        *("split:3x256/1x1/1", "stream:5x128/1/1", "stream:2x64/3/1"),
    ],
)
def test_fit_refuses_configurations_without_a_kernel(text: str) -> None:
    for dtype in (INT8, FP8):
        with pytest.raises(LibraryError, match=f"no kernel was compiled for configuration {text}"):
            native.fit(text, dtype)
