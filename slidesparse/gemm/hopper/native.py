"""The compiled kernels of csrc/hopper/ as Python calls them, and torch's operators for whole layers, by ctypes.

``torch.ops.slidesparse.linear`` and its fused forms are implemented for CUDA in C++, csrc/hopper/operators.cpp.  They
look a layer's plan up in the kernels' library; for a layer without one they call `plan_layer` here, once.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Sequence
from ctypes import POINTER, c_char_p, c_double, c_int32, c_int64, c_size_t, c_void_p
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from slidesparse.build.compile import build
from slidesparse.errors import EnvironmentFault
from slidesparse.gemm.problem import ALL_2_4, BLOCKS, CODED, Layer, LibraryError
from slidesparse.quantize import FP8

TYPES = {torch.bfloat16: 1, torch.float16: 2, torch.float32: 3}  # SlidesparseType
TEXT_BYTES = 32  # SLIDESPARSE_TEXT_BYTES

_LAYER = POINTER(c_int32)  # SlidesparseLayer
_INPUT = (c_void_p, c_int32, c_int64, c_int32, c_double, c_void_p, c_void_p, c_int64, c_void_p)
# The result and the arguments of each function without its prefix slidesparse_hopper_.
FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "unusable": (c_char_p,),
    "fit": (c_char_p, c_char_p, c_int32, POINTER(c_int32), POINTER(c_int32)),
    "candidates": (c_char_p, _LAYER, *(c_int32,) * 3, c_char_p, POINTER(c_double), POINTER(c_int32)),
    "plan": (c_char_p, _LAYER, c_int32, POINTER(c_int32), POINTER(c_char_p), POINTER(c_void_p)),
    "delete": (None, c_void_p),
    "serve": (None, c_void_p),
    "find": (c_void_p, c_int32, _LAYER),
    "forget": (None,),
    "scratch_bytes": (c_int64, c_void_p, c_int64),
    "quantize": (c_char_p, c_void_p, c_int64, *_INPUT, *(c_void_p,) * 3),
    "product": (
        *(c_char_p, c_void_p, c_int64, c_void_p, c_int64, c_void_p, c_void_p, c_int64),
        *(c_void_p, c_void_p, c_int32, c_void_p, c_int32, c_void_p, c_void_p),
    ),
    "linear": (
        *(c_char_p, c_void_p, c_int64, *_INPUT, c_void_p, c_int64, c_void_p, c_void_p),
        *(c_int32, c_void_p, c_int32, c_void_p, c_void_p),
    ),
    "route": (c_char_p, c_void_p, c_int32, c_int64, c_void_p, c_int32, c_int32, *(c_void_p,) * 4),
    "grouped": (
        *(c_char_p, c_void_p, c_int64, c_void_p, c_int32, c_int64, c_int32, c_void_p, c_int32, c_void_p),
        *(c_int32, c_void_p, c_void_p, c_int64, c_void_p, c_void_p, c_int32, c_char_p, c_void_p, c_void_p),
    ),
    "combine": (c_char_p, c_void_p, c_int32, c_int64, c_int32, c_int32, *(c_void_p,) * 3),
    "pack_bytes": (c_int64, _LAYER),
    "pack": (c_char_p, _LAYER, c_void_p, c_int64, c_int32, *(c_void_p,) * 3),
}
PLANNER = ctypes.CFUNCTYPE(None, c_int32, _LAYER, c_void_p, c_size_t)  # SlidesparsePlanner

# Makes and serves the plan of a layer on a CUDA device, the current one; set by `slidesparse.gemm.hopper.backend`
plan_layer: Callable[[Layer, int], object] | None = None


def _plan(device: int, layer: Any, message: int, size: int) -> None:
    """Plan a layer for C++; write why that failed to ``message``, memory of ``size`` bytes."""
    try:
        assert plan_layer is not None
        plan_layer(Layer(*layer[: len(Layer._fields)]), device)
    except Exception as error:
        text = (str(error) or type(error).__name__).encode()[: size - 1] + b"\0"
        ctypes.memmove(message, text, len(text))


_planner = PLANNER(_plan)  # kept as long as C++ may call it


@cache
def library() -> Any:
    """Return the kernels, compiled if needed, and install torch's operators that run them.  Raises LibraryError."""
    path, operators = compile_kernels()
    try:
        kernels = declare_functions(ctypes.CDLL(str(path)))
        load_operators(operators, path)
    except OSError as error:
        raise LibraryError(f"the Hopper kernels: {error}") from None
    return kernels


def compile_kernels() -> tuple[Path, Path]:
    """Return the files of the kernels and of torch's operators, compiled if needed.  Raises LibraryError."""
    try:
        return build("hopper"), build("hopper_operators")
    except EnvironmentFault as error:
        raise LibraryError(f"the Hopper kernels: {error}") from None


def declare_functions(kernels: Any) -> Any:
    """Tell ctypes the types of `FUNCTIONS`; return the library."""
    for name, (result, *arguments) in FUNCTIONS.items():
        function = getattr(kernels, f"slidesparse_hopper_{name}")
        function.restype, function.argtypes = result, arguments
    return kernels


def load_operators(path: Path, kernels: Path) -> None:
    """Load the compiled operators.cpp, which implements the operators by the library at ``kernels`` from then on.

    Raises LibraryError, and OSError for a file that cannot be loaded.
    """
    load = ctypes.CDLL(str(path)).slidesparse_operators_load
    load.argtypes, load.restype = [c_char_p, PLANNER], c_char_p
    error = load(str(kernels).encode(), _planner)
    if error:
        raise LibraryError(f"torch's operators in C++: {error.decode()}")


def call(name: str, *arguments: Any) -> None:
    """Call a function that returns None or an error message.  Raises LibraryError with that message."""
    error = getattr(library(), f"slidesparse_hopper_{name}")(*arguments)
    if error:
        raise LibraryError(error.decode(errors="replace"))


def integers(layer: Layer) -> Any:
    """Return a layer as C takes it."""
    return (c_int32 * len(layer))(*layer)


class Fit(NamedTuple):
    """The fit of a configuration to a GPU."""

    stages: int  # pipeline stages, for long rows
    clusters: int  # clusters that are resident at a time


def fit(configuration: str, dtype: torch.dtype) -> Fit:
    """Return how a configuration for codes of ``dtype`` fits the current device.  Raises LibraryError if it cannot."""
    stages, clusters = c_int32(), c_int32()
    call("fit", configuration.encode(), dtype == FP8, ctypes.byref(stages), ctypes.byref(clusters))
    return Fit(stages.value, clusters.value)


def candidates(layer: Layer, m: int, max_count: int, blocks: str = ALL_2_4) -> list[tuple[str, float]]:
    """Return up to ``max_count`` configurations for a layer of m tokens on this device, fastest first.

    Each with the microseconds that the model in csrc/hopper/configuration.cu predicts.  ``blocks`` is one of BLOCKS, or
    CODED for a layer whose weight is coded.
    """
    texts = ctypes.create_string_buffer(max_count * TEXT_BYTES)
    us, count = (c_double * max_count)(), c_int32()
    kind = 0 if blocks == CODED else BLOCKS.index(blocks)
    call("candidates", integers(layer), m, kind, max_count, texts, us, ctypes.byref(count))
    return [
        (texts.raw[TEXT_BYTES * i : TEXT_BYTES * (i + 1)].partition(b"\0")[0].decode(), us[i])
        for i in range(count.value)
    ]


def find_plan(layer: Layer, device: int) -> int | None:
    """Return the handle of the plan that serves ``layer`` on CUDA device ``device``, or None."""
    found: int | None = library().slidesparse_hopper_find(device, integers(layer))
    return found


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
    call("plan", integers(layer), len(table), tokens, texts, ctypes.byref(plan))
    assert plan.value
    return plan.value


class Plan:
    """A plan of one configuration that belongs to Python."""

    def __init__(self, layer: Layer, configuration: str) -> None:
        self.handle = make_plan(layer, [(1, (configuration,) * len(BLOCKS))])
        weakref.finalize(self, library().slidesparse_hopper_delete, self.handle)
