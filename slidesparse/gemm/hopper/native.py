"""The compiled kernels of csrc/hopper/ as Python calls them: the functions of interface.cuh, by ctypes."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from ctypes import POINTER, c_char_p, c_double, c_int32, c_int64, c_void_p
from functools import cache
from typing import Any, NamedTuple

import torch

from slidesparse.build.compile import build
from slidesparse.build.find import ToolchainError
from slidesparse.gemm.hopper import operators
from slidesparse.gemm.problem import ALL_2_4, BLOCKS, LibraryError
from slidesparse.quantize import FP8

TYPES = {torch.bfloat16: 1, torch.float16: 2, torch.float32: 3}  # SlidesparseType
NO_PROLOGUE, RMS_NORM, ADD_RMS_NORM, SILU_MUL = range(4)  # SlidesparsePrologue
TEXT_BYTES = 32  # SLIDESPARSE_TEXT_BYTES

_LAYER = (c_int32,) * 6  # n, k, length, phase, fp8, columns
_INPUT = (c_void_p, c_int32, c_int64, c_int32, c_double, c_void_p, c_void_p, c_int64, c_void_p)
# The result and the arguments of each function without its prefix slidesparse_hopper_.
FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "unusable": (c_char_p,),
    "fit": (c_char_p, c_char_p, c_int32, POINTER(c_int32), POINTER(c_int32)),
    "candidates": (c_char_p, *(c_int32,) * 6, c_char_p, POINTER(c_double), POINTER(c_int32)),
    "plan": (*(c_char_p, *_LAYER, c_int32, POINTER(c_int32), POINTER(c_char_p)), POINTER(c_void_p)),
    "delete": (None, c_void_p),
    "serve": (None, c_void_p),
    "find": (c_void_p, c_int32, *_LAYER),
    "forget": (None,),
    "configuration": (c_char_p, c_void_p, c_int64, c_int64),
    "scratch_bytes": (c_int64, c_void_p, c_int64),
    "quantize": (c_char_p, c_void_p, c_int64, *_INPUT, *(c_void_p,) * 3),
    "product": (
        *(c_char_p, c_void_p, c_int64, c_void_p, c_int64, c_void_p, c_void_p, c_int64),
        *(c_void_p, c_void_p, c_int32, c_void_p, c_int32, c_void_p),
    ),
    "linear": (
        *(c_char_p, c_void_p, c_int64, *_INPUT, c_void_p, c_int64, c_void_p, c_void_p),
        *(c_int32, c_void_p, c_int32, c_void_p, c_void_p),
    ),
    "pack_bytes": (None, *(c_int32,) * 4, POINTER(c_int64), POINTER(c_int64)),
    "pack": (c_char_p, *(c_int32,) * 5, c_void_p, c_int64, c_int32, *(c_void_p,) * 4),
}


class Layer(NamedTuple):
    """The layer that a plan is for, on the device where it is made."""

    n: int  # 0 for a plan that only quantizes
    k: int
    length: int  # block length of the pattern
    phase: int
    fp8: bool
    columns: int  # width of the quantized activations


@cache
def library() -> Any:
    """Return the kernels, compiled if needed, and install torch's operators that run them.  Raises LibraryError."""
    try:
        path = build("hopper")
        kernels = ctypes.CDLL(str(path))
    except (ToolchainError, OSError) as error:
        raise LibraryError(f"the Hopper kernels: {error}") from None
    declare_functions(kernels)
    operators.install(path)
    return kernels


def declare_functions(kernels: Any) -> None:
    """Tell ctypes the types of `FUNCTIONS`."""
    for name, (result, *arguments) in FUNCTIONS.items():
        function = getattr(kernels, f"slidesparse_hopper_{name}")
        function.restype, function.argtypes = result, arguments


def call(name: str, *arguments: Any) -> None:
    """Call a function that returns None or an error message.  Raises LibraryError with that message."""
    error = getattr(library(), f"slidesparse_hopper_{name}")(*arguments)
    if error:
        raise LibraryError(error.decode(errors="replace"))


class Fit(NamedTuple):
    """The fit of a configuration to a GPU."""

    stages: int  # pipeline stages, for long rows
    clusters: int  # clusters that are resident at a time


def fit(configuration: str, dtype: torch.dtype) -> Fit:
    """Return how a configuration for codes of ``dtype`` fits the current device.  Raises LibraryError if it cannot."""
    stages, clusters = c_int32(), c_int32()
    call("fit", configuration.encode(), dtype == FP8, ctypes.byref(stages), ctypes.byref(clusters))
    return Fit(stages.value, clusters.value)


def candidates(
    n: int, columns: int, m: int, dtype: torch.dtype, max_count: int, blocks: str = ALL_2_4
) -> list[tuple[str, float]]:
    """Return up to ``max_count`` configurations for a weight [n, columns] and m tokens on this device, fastest first.

    Each with the microseconds that the model in csrc/hopper/configuration.cu predicts.  ``blocks`` is one of BLOCKS.
    """
    texts = ctypes.create_string_buffer(max_count * TEXT_BYTES)
    us, count = (c_double * max_count)(), c_int32()
    kind = BLOCKS.index(blocks)
    call("candidates", n, columns, m, dtype == FP8, kind, max_count, texts, us, ctypes.byref(count))
    return [
        (texts.raw[TEXT_BYTES * i : TEXT_BYTES * (i + 1)].partition(b"\0")[0].decode(), us[i])
        for i in range(count.value)
    ]


def make_plan(layer: Layer, table: Sequence[tuple[int, tuple[str, ...]]]) -> int:
    """Return the handle of a new plan for the current device.  Raises LibraryError.

    Args:
        layer: the layer.
        table: the largest number of tokens that each row is for, ascending, the last for more, too; and its
            configurations, one for each of BLOCKS.
    """
    tokens = (c_int32 * len(table))(*(m for m, _ in table))
    rows = [text.encode() for _, row in table for text in row]
    texts = (c_char_p * len(rows))(*rows)
    plan = c_void_p()
    call("plan", *layer, len(table), tokens, texts, ctypes.byref(plan))
    assert plan.value
    return plan.value


class Plan:
    """A plan of one configuration that belongs to Python."""

    def __init__(self, layer: Layer, configuration: str) -> None:
        self.handle = make_plan(layer, [(1, (configuration,) * len(BLOCKS))])
        weakref.finalize(self, library().slidesparse_hopper_delete, self.handle)
