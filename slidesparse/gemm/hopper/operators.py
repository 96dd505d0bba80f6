"""Load the C++ torch operators for whole layers: csrc/hopper/operators.cpp, compiled against torch's stable headers.

Each operator of `slidesparse.ops` is implemented in Python until the kernels are loaded (`install`), then in C++.  C++
forwards what it cannot run to the operator NAME_by_python: other backends, layers without a plan, profiling, and
errors.  With torch older than 2.10, or without a C++ compiler, the Python implementation stays.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from slidesparse import profiling
from slidesparse.build.compile import build
from slidesparse.build.find import ToolchainError
from slidesparse.gemm.problem import LibraryError

NAMESPACE = "slidesparse"
PYTHON_SUFFIX = "_by_python"

_logger = logging.getLogger("slidesparse")
_native: Any = None  # the compiled operators.cpp, once it implements the operators
if "_python" not in globals():  # kept across reloads: implementations disappear with their library object
    _python = torch.library.Library(NAMESPACE, "FRAGMENT")


def implement(name: str, implementation: Callable[..., Any]) -> None:
    """Implement an operator in Python; implementations for a CPU or in C++ take precedence."""
    _python.impl(name, implementation, "CompositeExplicitAutograd")


def record_errors(implementation: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap an operator NAME_by_python, so that C++ can raise its errors as RuntimeErrors with the same message."""

    @functools.wraps(implementation)
    def run(*arguments: Any) -> Any:
        try:
            return implementation(*arguments)
        except Exception as error:
            if _native is not None:
                _native.slidesparse_operators_failed(str(error).encode())
            raise

    return run


def install(kernels: Path) -> None:
    """Install the C++ operators, which call the kernels' library at ``kernels``; once per process.

    If they cannot be compiled, the reason is logged and the Python ones stay.  Raises LibraryError.
    """
    global _native
    if _native is not None:
        return
    try:
        path = build("hopper_operators")
    except ToolchainError as error:
        _logger.warning(
            "layers are called through Python, which costs about 10 us of CPU time per layer: %s", error
        )
        return
    _native = load(path, kernels)


def load(path: Path, kernels: Path) -> Any:
    """Load the compiled operators.cpp, which implements the operators from then on.  Raises LibraryError."""
    try:
        native = ctypes.CDLL(str(path))
    except OSError as error:
        raise LibraryError(f"torch's operators in C++: {error}") from None
    native.slidesparse_operators_load.argtypes = [ctypes.c_char_p]
    native.slidesparse_operators_load.restype = ctypes.c_char_p
    native.slidesparse_operators_failed.argtypes = [ctypes.c_char_p]
    native.slidesparse_operators_failed.restype = None
    native.slidesparse_operators_enable.argtypes = [ctypes.c_int32]
    native.slidesparse_operators_enable.restype = None
    message = native.slidesparse_operators_load(str(kernels).encode())
    if message:
        raise LibraryError(f"torch's operators in C++: {message.decode()}")
    profiling.on_switch(lambda on: native.slidesparse_operators_enable(not on))
    return native
