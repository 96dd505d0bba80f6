"""The compiled kernels of csrc/hopper/ as Python calls them: structures, functions, and what fits on a GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from slidesparse import nvcc
from slidesparse.gemm import hopper_operators, plans
from slidesparse.gemm.hopper_configs import STREAM, Config, Fit
from slidesparse.gemm.library import LibraryError
from slidesparse.quantize import FP8
from slidesparse.toolchain import ToolchainError

FLOATS = {torch.bfloat16: 1, torch.float16: 2, torch.float32: 3}  # as csrc/hopper/ numbers them

_Fields = list[tuple[str, Any]]


def _pointers(*names: str) -> _Fields:
    return [(name, ctypes.c_void_p) for name in names]


def _numbers(*names: str) -> _Fields:
    return [(name, ctypes.c_int32) for name in names]


class Call(ctypes.Structure):
    """SlidesparseHopperCall of csrc/hopper/hopper.cu."""

    _fields_ = (
        *_pointers("q", "weight", "out", "scale_w", "scale_x", "bias", "stream"),
        *_numbers("m", "n", "k", "strips", "blocks", "fp8", "out_type", "bias_type"),
        *_numbers("block_strips", "tokens", "sharers", "splits", "shared_bytes", "dependent"),
    )


class Quantize(ctypes.Structure):
    """SlidesparseHopperQuantize."""

    _fields_ = (
        *_pointers("x", "q", "scale", "stream", "residual", "total", "gain"),
        ("stride", ctypes.c_int64),
        ("residual_stride", ctypes.c_int64),
        *_numbers("m", "k", "columns", "type", "fp8", "length", "phase", "trigger", "dependent"),
        *_numbers("parts", "vectors", "before"),
        ("eps", ctypes.c_float),
    )


class Linear(ctypes.Structure):
    """SlidesparseHopperLinear."""

    _fields_ = (
        ("quantize", Quantize),
        ("product", Call),
        *_pointers("workspace"),
        *_numbers("grid", "spare"),
    )


class Pack(ctypes.Structure):
    """SlidesparseHopperPack."""

    _fields_ = (
        *_pointers("weight", "packed", "broken", "zeros", "stream"),
        ("stride", ctypes.c_int64),
        *_numbers("n", "k", "length", "phase", "blocks", "fp8"),
    )


@cache
def native() -> Any:
    """The compiled kernels, installed or compiled now.  Raises LibraryError.

    Structures are handed over by their addresses (`ctypes.addressof`), which is what takes the host least time.
    """
    try:
        found = ctypes.CDLL(str(nvcc.library()))
    except (ToolchainError, OSError) as error:
        raise LibraryError(f"the Hopper kernels: {error}") from None
    call, number = ctypes.c_void_p, ctypes.c_int32
    found.slidesparse_hopper_gemm.argtypes = [call]
    found.slidesparse_hopper_stream.argtypes = [call, ctypes.c_void_p, number]
    found.slidesparse_hopper_quantize.argtypes = [call]
    found.slidesparse_hopper_linear.argtypes = [call]
    found.slidesparse_hopper_pack.argtypes = [call]
    found.slidesparse_hopper_fit.argtypes = [call, number, ctypes.c_void_p, ctypes.c_void_p]
    found.slidesparse_hopper_workspace.argtypes = [number] * 3
    found.slidesparse_hopper_workspace.restype = ctypes.c_int64
    for name in ("gemm", "stream", "quantize", "linear", "pack", "fit", "unusable"):
        getattr(found, f"slidesparse_hopper_{name}").restype = ctypes.c_char_p
    hopper_operators.install(found)
    return found


def require(error: bytes | None, what: object) -> None:
    """Raise LibraryError when a function of `native` has said what went wrong; ``what`` was asked for."""
    if error:
        raise LibraryError(f"{error.decode()}, by {what}")


def call_of(config: Config, dtype: torch.dtype) -> Call:
    """What a configuration sets of a call, for codes of ``dtype``."""
    return Call(
        fp8=dtype == FP8,
        block_strips=config.strips,
        tokens=config.tokens,
        sharers=config.sharers,
        splits=config.splits,
        shared_bytes=config.shared_bytes,
    )


def fits(dtype: torch.dtype, index: int) -> Callable[[Config], Fit]:
    """How configurations for codes of ``dtype`` fit on CUDA device ``index``.  What is returned raises LibraryError."""
    return lambda config: fit(config, dtype, index)


@cache
def fit(config: Config, dtype: torch.dtype, index: int) -> Fit:
    """How a configuration fits on CUDA device ``index``, asked once.  Raises LibraryError."""
    stages, clusters = ctypes.c_int32(), ctypes.c_int32()
    call = call_of(config, dtype)
    with plans.on_device(index):
        error = native().slidesparse_hopper_fit(
            ctypes.addressof(call),
            config.design == STREAM,
            ctypes.addressof(stages),
            ctypes.addressof(clusters),
        )
    require(error, f"configuration {config}")
    return Fit(stages.value, clusters.value)


@cache
def multiprocessors(index: int) -> int:
    """Of CUDA device ``index``."""
    return int(torch.cuda.get_device_properties(index).multi_processor_count)
