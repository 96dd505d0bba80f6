"""The compiled Hopper kernels without a GPU: refusals that need no device."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
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


def pack(n: int, k: int, length: int, phase: int = 0, mixed: int = 0) -> None:
    layer = native.integers(Layer(n, k, length, phase, 0, 0))
    native.call("pack", layer, None, 0, mixed, None, None, None)


def plan(*layer: int) -> None:
    native.make_plan(Layer(*layer), [(1, "split:2x64/1x1/1")])


REFUSALS: dict[str, tuple[Callable[[], object], str]] = {
    "an odd length": (lambda: pack(1, 8, 7), "blocks of 7 columns"),
    "too short": (lambda: pack(1, 8, 2), "a length of 4, 6 or 8"),
    "too long": (lambda: plan(64, 64, 10, 0, 0, 128), "a length of 4, 6 or 8"),
    "a whole block before": (lambda: pack(1, 8, 8, 8), "a phase below it"),
    "no such size": (lambda: pack(-1, 8, 8), r"\[-1, 8\]"),
    "long rows": (lambda: pack(1, 2**31 - 1, 8), "no such sizes"),
    "a large grid": (lambda: pack(2**31 - 1, 1 << 20, 8), "no such sizes"),
    "mixed blocks that are slid": (lambda: pack(64, 128, 8, 0, 1), "4 at phase 0"),
    "a plan of an odd length": (lambda: plan(64, 64, 5, 0, 0, 64), "blocks of 5 columns"),
    "a plan of a whole block before": (lambda: plan(64, 64, 8, 8, 0, 96), "phase 8"),
    "too few columns": (lambda: plan(64, 64, 6, 0, 0, 80), "become 88"),
    "unaligned columns": (lambda: plan(64, 64, 6, 0, 0, 100), "a multiple of 16"),
    "unaligned columns of a coded weight": (lambda: plan(64, 64, 8, 0, 0, 80), "a multiple of 32"),
    "too few columns of a coded weight": (lambda: plan(64, 121, 8, 0, 0, 96), "become 128"),
    "no out-features": (lambda: plan(0, 64, 8, 0, 0, 96), "0 out-features"),
    "no configuration": (lambda: native.fit("x" * 500, INT8), "is no configuration of the Hopper kernels"),
    **{
        f"{text} of {dtype}": (
            lambda text=text, dtype=dtype: native.fit(text, dtype),
            f"no kernel was compiled for configuration {text}",
        )
        for text in (
            *("split:6x64/1x1/1", "split:1x256/1x1/1", "split:2x48/1x1/1", "split:2x64/4x4/1"),
            *("split:1x8/2x1/1", "split:3x256/1x1/1", "stream:5x128/1/1", "stream:2x64/3/1"),
        )
        for dtype in (INT8, FP8)
    },
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals(case: str) -> None:
    act, message = REFUSALS[case]
    with pytest.raises(LibraryError, match=message):
        act()


def test_pack_of_empty_weights_launches_nothing() -> None:
    pack(0, 8, 4)
    pack(3, 0, 4)
