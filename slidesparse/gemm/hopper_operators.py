"""The operators of whole layers in C++, csrc/hopper/operators.cu, which run what Python has prepared without Python.

An operator of `OPERATORS` is implemented by Python until `install`; then by C++, which knows a layer from its second
call on: `add` tells it what the first one, in Python, has prepared.  What C++ does not know or will not take goes on to
the operator NAME_by_python.

torch is called by its stable C interface, whose functions are handed over by their addresses: one build of the kernels
serves any torch from 2.10 on.  With an older one, operators stay Python's.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from slidesparse import profiling
from slidesparse.gemm.library import LibraryError
from slidesparse.quantize import FP8, INT8

NAMESPACE = "slidesparse"
OPERATORS = ("linear", "rms_norm_linear", "add_rms_norm_linear", "silu_mul_linear")
BY_PYTHON = "_by_python"
# As csrc/hopper/operators.cu has them, in its order.
FUNCTIONS = (
    *(
        f"aoti_torch_{name}"
        for name in (
            *(f"get_{what}" for what in ("data_ptr", "dim", "sizes", "strides", "dtype", "device_index")),
            "empty_strided",
            "delete_tensor_object",
        )
    ),
    *(f"torch_{name}" for name in ("string_c_str", "delete_string", "call_dispatcher")),
    "aoti_torch_library_init_impl",
    "torch_library_impl",
    "aoti_torch_get_current_cuda_stream",
    "aoti_torch_dtype_uint8",
)
STREAM = "aoti_torch_get_current_cuda_stream"  # only builds for CUDA have it
LIBRARIES = ("libtorch_cpu.so", "libtorch_cuda.so")  # that have them

_logger = logging.getLogger("slidesparse")
_native: Any = None  # the kernels' library, once it implements the operators
_raised = threading.local()  # .error: in `own_errors`, the last one of an operator that Python implements
if "_python" not in globals():  # a reload keeps what operators are implemented by
    _python: torch.library.Library | None = torch.library.Library(NAMESPACE, "IMPL", "CUDA")


def implement(name: str, implementation: Callable[..., Any]) -> None:
    """Implement an operator of `OPERATORS` on a GPU by Python, for as long as C++ does not."""
    if _python is not None:
        _python.impl(name, implementation)


def told(implementation: Callable[..., Any]) -> Callable[..., Any]:
    """``implementation`` of an operator NAME_by_python, whose errors C++ raises anew in their words (`own_errors`)."""

    @functools.wraps(implementation)
    def run(*arguments: Any) -> Any:
        try:
            return implementation(*arguments)
        except Exception as error:
            if _native is not None:
                _native.slidesparse_hopper_operators_failed(str(error).encode())
                if hasattr(_raised, "error"):
                    _raised.error = error
            raise

    return run


@contextmanager
def own_errors() -> Iterator[None]:
    """Let operators raise in here what Python raised, such as LibraryError, where C++ makes RuntimeErrors of it."""
    _raised.error = None
    try:
        yield
    except RuntimeError as error:
        raised: Exception | None = _raised.error
        if raised is None or raised is error or str(raised) not in str(error):
            raise
        raise raised from None
    finally:
        del _raised.error


def installed() -> bool:
    """Whether C++ implements the operators."""
    return _native is not None


def install(native: Any, space: str = NAMESPACE, key: str = "CUDA") -> None:
    """Let C++ implement the operators: those of ``native``, the kernels' library; once a process.

    With an older torch a line in the log says so, and they stay Python's.  Raises LibraryError when torch refuses them.

    Args:
        space: of the operators.
        key: the dispatch key they are implemented for.
    """
    global _native, _python
    if _native is not None:
        return
    found = _functions()
    missing = [name for name, address in found.items() if not address and (name != STREAM or key == "CUDA")]
    if missing:
        _logger.info(
            "torch %s has no %s: whole layers are called through Python, which takes the host some 10 us a layer more; "
            "torch 2.10 and later have it",
            *(torch.__version__, missing[0]),
        )
        return
    addresses = (ctypes.c_void_p * len(found))(*found.values())
    kinds = {"CPU": 0, "CUDA": 1}  # torch's types of devices
    native.slidesparse_hopper_operators.argtypes = [
        *(ctypes.c_void_p, ctypes.c_int32, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int32)
    ]
    native.slidesparse_hopper_operators.restype = ctypes.c_char_p
    native.slidesparse_hopper_operators_add.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
    native.slidesparse_hopper_operators_workspace.argtypes = [
        ctypes.c_int32,
        ctypes.c_void_p,
        ctypes.c_void_p,
    ]
    native.slidesparse_hopper_operators_failed.argtypes = [ctypes.c_char_p]
    for name in ("add", "workspace", "forget", "failed"):
        getattr(native, f"slidesparse_hopper_operators_{name}").restype = None
    if _python is not None and space == NAMESPACE:
        _python._destroy()
        _python = None
    error = native.slidesparse_hopper_operators(
        addresses, len(found), space.encode(), key.encode(), kinds[key]
    )
    if error:
        raise LibraryError(f"whole layers found no operators: {error.decode()}; reinstall slidesparse")
    _native = native
    profiling.when_enabled(forget)


def _functions() -> dict[str, int]:
    """The addresses of FUNCTIONS; 0 for what this torch does not have."""
    folder = Path(torch.__file__).parent / "lib"
    libraries = [ctypes.CDLL(str(folder / name)) for name in LIBRARIES if (folder / name).exists()]
    found = dict.fromkeys(FUNCTIONS, 0)
    for name in FUNCTIONS:
        for library in libraries:
            if hasattr(library, name):
                found[name] = ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0
                break
    return found


def add(
    device: int,
    kinds: tuple[torch.dtype, torch.dtype, torch.dtype | None],
    before: tuple[int, float],
    rows: int,
    call: Any,
    weight_bytes: int,
) -> None:
    """Let C++ run layers of this kind by ``call``, whose tensors do not count.

    Args:
        kinds: types of activations, outputs and bias.
        before: number and epsilon of the producer, `slidesparse.gemm.hopper_plans.Before`; ``call`` has rounded the
            latter.
        rows: the number of tokens as it is planned, `slidesparse.gemm.hopper.planned_rows`.
        call: a `slidesparse.gemm.hopper_native.Linear`.
    """
    if _native is None or profiling.enabled():
        return
    (source, out, bias), (number, eps), of = kinds, before, call.quantize
    words = (
        *(device, _code(source), _code(out), 0 if bias is None else _code(bias) + 1),
        *(_code(FP8 if of.fp8 else INT8), of.k, call.product.n, of.columns, of.length, of.phase),
        *(number, _bits(eps), rows),
    )
    key = (ctypes.c_int64 * len(words))(*words)
    _native.slidesparse_hopper_operators_add(key, ctypes.addressof(call), weight_bytes)


def workspace(device: int, stream: int, address: int) -> None:
    """Tell C++ the workspace of a stream, which never moves."""
    if _native is not None:
        _native.slidesparse_hopper_operators_workspace(device, stream, address)


def forget() -> None:
    """Let every layer go through Python again, such as to be timed."""
    if _native is not None:
        _native.slidesparse_hopper_operators_forget()


def _bits(value: float) -> int:
    found: int = struct.unpack("q", struct.pack("d", value))[0]
    return found


@functools.cache
def _code(dtype: torch.dtype) -> int:
    """torch's number of a type."""
    name = str(dtype).removeprefix("torch.")
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / LIBRARIES[0]))
    return int(getattr(library, f"aoti_torch_dtype_{name}")())
