"""Load the C++ torch operators for whole layers: csrc/hopper/operators.cpp, compiled against torch's stable headers.

An operator of `OPERATORS` is implemented by Python until the kernels are loaded (`install`), then by C++.  Calls that
C++ cannot run go on to the operator NAME_by_python: another backend, a layer without a plan, profiling, and whatever is
wrong.  With torch older than 2.10, or without a C++ compiler, operators stay Python's.
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
OPERATORS = ("linear", "rms_norm_linear", "add_rms_norm_linear", "silu_mul_linear")
BY_PYTHON = "_by_python"

_logger = logging.getLogger("slidesparse")
_native: Any = None  # the compiled operators.cpp, once it implements the operators
if "_python" not in globals():  # a reload keeps the implementations: they go when their library object does
    _python = torch.library.Library(NAMESPACE, "FRAGMENT")


def implement(name: str, implementation: Callable[..., Any]) -> None:
    """Implement an operator of `OPERATORS` by Python, where neither a CPU's implementation nor C++ takes precedence."""
    _python.impl(name, implementation, "CompositeExplicitAutograd")


def with_errors_kept(implementation: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap an operator NAME_by_python, so that C++ can raise its errors again, as RuntimeErrors in their words."""

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
    """Let C++ implement the operators with the kernels' library at ``kernels``; once a process.

    Where it cannot be compiled a line in the log says why, and they stay Python's.  Raises LibraryError.
    """
    global _native
    if _native is not None:
        return
    try:
        path = build("hopper_operators")
    except ToolchainError as error:
        _logger.warning(
            "layers are called through Python, which takes the host some 10 us a layer more: %s", error
        )
        return
    _native = load(path, kernels)


def load(path: Path, kernels: Path) -> Any:
    """Load the compiled operators.cpp, which implements the operators from then on.  Raises LibraryError."""
    try:
        found = ctypes.CDLL(str(path))
    except OSError as error:
        raise LibraryError(f"torch's operators in C++: {error}") from None
    found.slidesparse_operators_load.argtypes = [ctypes.c_char_p]
    found.slidesparse_operators_load.restype = ctypes.c_char_p
    found.slidesparse_operators_failed.argtypes = [ctypes.c_char_p]
    found.slidesparse_operators_failed.restype = None
    found.slidesparse_operators_enable.argtypes = [ctypes.c_int32]
    found.slidesparse_operators_enable.restype = None
    wrong = found.slidesparse_operators_load(str(kernels).encode())
    if wrong:
        raise LibraryError(f"torch's operators in C++: {wrong.decode()}")
    profiling.when_switched(lambda on: found.slidesparse_operators_enable(not on))
    return found
