"""NVIDIA's cuBLASLt, called through ctypes: the dense GEMM that the paper compares with.

FP8 uses fast accumulation, as stock vLLM's kernels do; on Hopper and later its epilogue applies both vectors of scales
and the bias.  INT8 operands give INT32 (or INT8, which no layer uses), which a Triton kernel scales.

The library is column-major, so it computes out.T [N, M] = weight [N, K] @ activations.T [K, M].
"""

from __future__ import annotations

import contextlib
import ctypes
import weakref
import zlib
from ctypes import byref, c_char, c_char_p, c_int, c_int8, c_int64, c_size_t, c_void_p
from functools import cache
from typing import Any

import torch
from torch import Tensor

from slidesparse.build.find import ToolchainError, find_library
from slidesparse.gemm import cuda
from slidesparse.gemm.library import DATA_TYPES, WORKSPACE_BYTES, LibraryBackend, LibraryPlan, pad
from slidesparse.gemm.problem import ALL_2_4, NAMES, LibraryError, Problem, Tensors, require_operand
from slidesparse.pattern import SlidePattern
from slidesparse.quantize import FP8

VECTOR_CAPABILITY, VECTOR_VERSION = (9, 0), 120900  # the first with an epilogue that scales by vectors
# Up to this many tokens a GEMM to BF16 and a scaling kernel are faster than a GEMM that scales, for which the library
# has only one algorithm: at 64 tokens Qwen2.5-7B's four FP8 GEMMs take 74 us on an H200, and 149 us with scales.
MAX_UNSCALED_TOKENS = 256
MAX_PROPOSALS = 100  # algorithms to request from the heuristics, more than there are
ALGORITHM_BYTES = 64
OUTPUTS = {
    "int8": ("int32", "int8"),
    "fp8": ("bf16", "fp16", "fp32"),
    "fp16": ("fp16", "fp32"),
    "bf16": ("bf16", "fp32"),
}
COMPUTE_FLOAT32, COMPUTE_INT32 = 68, 72  # cublasComputeType_t
# cublasLtMatmulDescAttributes_t
TRANSPOSE_WEIGHT, EPILOGUE, BIAS, FAST_ACCUMULATION, BIAS_TYPE = 3, 7, 8, 25, 26
WEIGHT_SCALES, TOKEN_SCALES, WEIGHT_SCALE_MODE, TOKEN_SCALE_MODE = 17, 18, 31, 32
TRANSPOSED, ADD_BIAS, BY_VECTOR = 1, 4, 3
MAX_WORKSPACE = 1  # of cublasLtMatmulPreferenceAttributes_t

FUNCTIONS: dict[str, tuple[Any, ...]] = {  # name -> types of the arguments
    "cublasLtCreate": (c_void_p,),
    "cublasLtDestroy": (c_void_p,),
    "cublasLtMatrixLayoutCreate": (c_void_p, c_int, c_int64, c_int64, c_int64),
    "cublasLtMatrixLayoutDestroy": (c_void_p,),
    "cublasLtMatmulDescCreate": (c_void_p, c_int, c_int),
    "cublasLtMatmulDescDestroy": (c_void_p,),
    "cublasLtMatmulDescSetAttribute": (c_void_p, c_int, c_void_p, c_size_t),
    "cublasLtMatmulPreferenceCreate": (c_void_p,),
    "cublasLtMatmulPreferenceDestroy": (c_void_p,),
    "cublasLtMatmulPreferenceSetAttribute": (c_void_p, c_int, c_void_p, c_size_t),
    "cublasLtMatmulAlgoGetHeuristic": (*(c_void_p,) * 7, c_int, c_void_p, c_void_p),
    "cublasLtMatmulAlgoCheck": (c_void_p,) * 8,
    # handle, operation, alpha, weight, layout, activations, layout, beta, C, layout, D, layout, algorithm, workspace,
    # its size, stream
    "cublasLtMatmul": (*(c_void_p,) * 14, c_size_t, c_void_p),
}
DESCRIBE = (
    "cublasLtGetStatusName",
    "cublasLtGetStatusString",
)  # the functions that name and explain a status


class Library:
    """cuBLASLt's `FUNCTIONS`, each of which returns a status."""

    def __init__(self) -> None:
        """Load the library.  Raises LibraryError."""
        try:
            major = int(torch.version.cuda.split(".")[0]) if torch.version.cuda else None
            self.path = find_library("cublaslt", major).path
            self.functions = ctypes.CDLL(self.path)
        except ToolchainError as error:
            raise LibraryError(str(error)) from None
        except OSError as error:
            raise LibraryError(f"cannot load {self.path}: {error}") from None
        for function, (result, *arguments) in (
            *((name, (c_int, *types)) for name, types in FUNCTIONS.items()),
            *((name, (c_char_p, c_int)) for name in DESCRIBE),
            ("cublasLtGetVersion", (c_size_t,)),
        ):
            found = getattr(self.functions, function, None)
            if found is None:
                raise LibraryError(f"{self.path} has no function {function}: it is too old")
            found.restype, found.argtypes = result, arguments

    def call(self, what: str, function: str, *arguments: Any) -> None:
        """Call a function.  Raises LibraryError with the library's words and ``what``, the problem."""
        status = getattr(self.functions, function)(*arguments)
        if status:
            name, words = (getattr(self.functions, describe)(status) for describe in DESCRIBE)
            raise LibraryError(f"{function} failed: {name.decode()} ({words.decode()}); {what}")


class Owner:
    """An object that destroys what it has made of a library, the last first, when it is collected."""

    def __init__(self, library: Library) -> None:
        self.library = library
        self._made = contextlib.ExitStack()
        weakref.finalize(self, self._made.close).atexit = False  # CUDA may be gone by then

    def destroy_later(self, function: str, made: Any) -> None:
        """Call ``function`` to destroy ``made`` in the end."""
        self._made.callback(getattr(self.library.functions, function), made)


class Handle(Owner):
    """A handle of the library on the current device, for one thread."""

    def __init__(self, library: Library) -> None:
        """Make the handle.  Raises LibraryError."""
        super().__init__(library)
        self.made = c_void_p()
        library.call("making a handle", "cublasLtCreate", byref(self.made))
        self.destroy_later("cublasLtDestroy", self.made)


class Proposal(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algorithm", c_char * ALGORITHM_BYTES),
        ("workspace", c_size_t),
        ("state", c_int),
        ("waves", ctypes.c_float),
        ("reserved", c_int * 4),
    )


class CublasLtPlan(Owner, LibraryPlan):
    """A GEMM with its types, epilogue and, after `choose`, its algorithm."""

    def __init__(
        self, library: Library, handle: Handle, problem: Problem, algorithm: str | None, index: int
    ) -> None:
        Owner.__init__(self, library)
        LibraryPlan.__init__(self, algorithm, index)
        self._handle, self._problem, self._chosen = handle, problem, Proposal()
        n, k, m = problem.n, problem.k, problem.m
        operand, out = DATA_TYPES[problem.dtype], DATA_TYPES[problem.out]
        self._weight, self._activations, self._out = (
            self._make("cublasLtMatrixLayout", kind, rows, columns, rows)
            for kind, rows, columns in ((operand, k, n), (operand, k, m), (out, n, m))
        )
        integer = problem.out == "int32"
        compute = COMPUTE_INT32 if problem.dtype == "int8" else COMPUTE_FLOAT32
        self._operation = self._make(
            "cublasLtMatmulDesc", compute, DATA_TYPES["int32" if integer else "fp32"]
        )
        number = c_int if integer else ctypes.c_float
        self._one, self._zero = number(1), number(0)
        self._set(TRANSPOSE_WEIGHT, c_int(TRANSPOSED))
        if problem.dtype == "fp8":
            self._set(FAST_ACCUMULATION, c_int8(1))
        anything = c_void_p(1)  # heuristics only test whether a pointer is null
        if problem.scale == "both":
            self._set(WEIGHT_SCALE_MODE, c_int(BY_VECTOR))
            self._set(TOKEN_SCALE_MODE, c_int(BY_VECTOR))
            self._set(WEIGHT_SCALES, anything)
            self._set(TOKEN_SCALES, anything)
        if problem.bias:
            self._set(EPILOGUE, c_int(ADD_BIAS))
            self._set(BIAS_TYPE, c_int(out))
            self._set(BIAS, anything)

    def proposals(self, most: int) -> list[bytes]:
        """Return at most ``most`` algorithms that a stream's workspace suffices for, the library's favourite first."""
        found, count, limit = (Proposal * most)(), c_int(), c_size_t(WORKSPACE_BYTES)
        preference = c_void_p()
        self._call("cublasLtMatmulPreferenceCreate", byref(preference))
        try:
            size = ctypes.sizeof(limit)
            self._call("cublasLtMatmulPreferenceSetAttribute", preference, MAX_WORKSPACE, byref(limit), size)
            self._call(
                "cublasLtMatmulAlgoGetHeuristic",
                *(self._handle.made, self._operation, self._weight, self._activations, self._out, self._out),
                *(preference, most, found, byref(count)),
            )
        finally:
            self.library.functions.cublasLtMatmulPreferenceDestroy(preference)
        return [bytes(found[i])[:ALGORITHM_BYTES] for i in range(count.value) if not found[i].state]

    def choose(self, algorithm: bytes) -> None:
        """Run by an algorithm that `proposals` of the same problem returned, of this plan or another."""
        asked = (c_char * ALGORITHM_BYTES).from_buffer_copy(algorithm)
        self._call(
            "cublasLtMatmulAlgoCheck",
            *(self._handle.made, self._operation, self._weight, self._activations, self._out, self._out),
            *(asked, byref(self._chosen)),
        )
        self._algorithm, self.workspace = asked, self._chosen.workspace
        self.require_workspace()

    def launch(self, tensors: Tensors, workspace: int, stream: int) -> None:
        """See `LibraryPlan.launch`."""
        activations, weight, out, *factors = tensors
        for attribute, tensor in zip((WEIGHT_SCALES, TOKEN_SCALES, BIAS), factors, strict=True):
            if tensor is not None:
                self._set(attribute, c_void_p(tensor.data_ptr()))
        self._call(
            "cublasLtMatmul",
            *(self._handle.made, self._operation, byref(self._one), weight.data_ptr(), self._weight),
            *(activations.data_ptr(), self._activations, byref(self._zero), out.data_ptr(), self._out),
            *(out.data_ptr(), self._out, self._algorithm, workspace, self.workspace, stream),
        )

    def _make(self, kind: str, *arguments: int) -> c_void_p:
        made = c_void_p()
        self._call(f"{kind}Create", byref(made), *arguments)
        self.destroy_later(f"{kind}Destroy", made)
        return made

    def _set(self, attribute: int, value: Any) -> None:
        size = ctypes.sizeof(value)
        self._call("cublasLtMatmulDescSetAttribute", self._operation, attribute, byref(value), size)

    def _call(self, function: str, *arguments: Any) -> None:
        self.library.call(str(self._problem), function, *arguments)


class CublasLt(LibraryBackend):
    """See `slidesparse.gemm.backend.Tunable`."""

    name = "cublaslt"
    sparse = False
    takes_dense = True
    alignment = 16
    products = OUTPUTS

    @cache  # noqa: B019  there is one object
    def library(self) -> Library:
        """Return the library, loaded.  Raises LibraryError."""
        return Library()

    def make_handle(self) -> Handle:
        """See `LibraryBackend.make_handle`."""
        return Handle(self.library())

    def version(self) -> str:
        """See `Tunable.version`: such as "13.1.0"."""
        number = self._version()
        return f"{number // 10000}.{number // 100 % 100}.{number % 100}"

    def _version(self) -> int:
        return int(self.library().functions.cublasLtGetVersion())

    def epilogue(self, dtype: str, out: str, device: torch.device | None = None) -> str:
        """See `Tunable.epilogue`: "both" for FP8 to 16 bits on Hopper and later with cuBLAS 12.9, else "none"."""
        if dtype != "fp8" or out not in ("bf16", "fp16"):
            return "none"
        able = (
            torch.cuda.get_device_capability(device) >= VECTOR_CAPABILITY
            and self._version() >= VECTOR_VERSION
        )
        return "both" if able else "none"

    def operand(self, weight: Tensor, blocks: str = ALL_2_4) -> Tensor:
        """See `Tunable.operand`: [n, k] contiguous."""
        require_operand(weight.dtype)
        return weight.contiguous()

    def algorithms(self, problem: Problem, device: torch.device) -> list[str]:
        """See `Tunable.algorithms`: the proposals of the library's heuristics, best first, as hexadecimal text."""
        with cuda.on_device(cuda.device_index(device)):
            return [
                _encode_algorithm(proposal)
                for proposal in self._plan(problem, device).proposals(MAX_PROPOSALS)
            ]

    def plan(self, problem: Problem, device: torch.device, algorithm: str | None = None) -> CublasLtPlan:
        """See `Tunable.plan`."""
        with cuda.on_device(cuda.device_index(device)):
            plan = self._plan(problem, device, algorithm)
            chosen = [_decode_algorithm(algorithm)] if algorithm else plan.proposals(1)
            if not chosen:
                raise LibraryError(f"cuBLASLt has no algorithm for {problem}")
            plan.choose(chosen[0])
        return plan

    def _plan(self, problem: Problem, device: torch.device, algorithm: str | None = None) -> CublasLtPlan:
        self.require(problem)
        if problem.scale == "both" and problem.dtype != "fp8":
            raise LibraryError(f"cuBLASLt scales FP8 only, by out-feature and token, asked for {problem}")
        index = cuda.device_index(device)
        return CublasLtPlan(self.library(), self.handle(index), problem, algorithm, index)

    def pack(self, weight: Tensor, pattern: SlidePattern | None, phase: int = 0) -> Tensor:
        """See `Backend.pack`: [N, K] padded with zeros to multiples of 16; weights are not slid."""
        return self.operand(pad(weight, self.alignment, self.alignment))

    def scaled_matmul(self, tensors: Tensors) -> None:
        """See `TwoStep.scaled_matmul`."""
        q, packed, out, scale_w, scale_x, bias = tensors
        if out.shape[1] % self.alignment or q.shape[0] <= MAX_UNSCALED_TOKENS or not self._can_scale(q, out):
            super().scaled_matmul(tensors)
            return
        bias = bias.to(out.dtype) if bias is not None else None
        made = self.accumulate(q, packed, out.shape[1], out.dtype, scale_w, scale_x, bias, out)
        if made.data_ptr() != out.data_ptr():
            out.copy_(made)

    def is_packed_for(self, weight: Tensor, n: int, k: int, dtype: torch.dtype) -> bool:
        """See `LibraryBackend.is_packed_for`."""
        return weight.shape == (n, k) and weight.dtype == dtype

    def _can_scale(self, q: Tensor, out: Tensor) -> bool:
        return q.dtype == FP8 and self.epilogue("fp8", NAMES[out.dtype], q.device) == "both"


def _encode_algorithm(algorithm: bytes) -> str:
    """Format an algorithm in hexadecimal with a checksum, as the library crashes on a wrong one."""
    return f"{algorithm.hex().rstrip('0')}-{zlib.crc32(algorithm):08x}"


def _decode_algorithm(text: str) -> bytes:
    """Read what `_encode_algorithm` wrote.  Raises LibraryError for anything else."""
    digits, _, checksum = text.partition("-")
    try:
        algorithm = bytes.fromhex(digits.ljust(2 * ALGORITHM_BYTES, "0"))
        if len(algorithm) == ALGORITHM_BYTES and zlib.crc32(algorithm) == int(checksum, 16):
            return algorithm
    except ValueError:
        pass
    raise LibraryError(f"{text!r} is no cuBLASLt algorithm in hexadecimal with its checksum; tune again")
