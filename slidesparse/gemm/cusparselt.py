"""NVIDIA's cuSPARSELt: 2:4 sparse GEMM on sparse tensor cores.

Its epilogue cannot scale by token, nor add a bias after that: `slidesparse.kernels.dequant_bias` applies all scales.

The library wants the structured matrix on the left, so it computes out.T [N, M] = weight [N, K] @ activations.T [K, M],
and the column-major out.T is the row-major out [M, N].
"""

from __future__ import annotations

from ctypes import byref, c_float, c_int, c_int32, c_int64, c_size_t, c_uint32, c_void_p
from functools import cache
from typing import Any

import torch
from torch import Tensor

from slidesparse.build.find import ToolchainError, require_supported
from slidesparse.gemm import cuda
from slidesparse.gemm.library import (
    DATA_TYPES,
    Functions,
    Handle,
    Library,
    LibraryBackend,
    LibraryPlan,
    opaque,
    pad,
    plan_cache,
)
from slidesparse.gemm.problem import MIN_ROWS, TWO_FOUR, LibraryError, Problem, Tensors, require_operand
from slidesparse.pattern import SlidePattern
from slidesparse.slide import bits, nonzero, slide

ALIGNMENT = {1: 32, 2: 16}  # bytes of an element -> the multiple of rows and columns of a weight
OUTPUTS = {
    "int8": ("bf16", "int32", "fp16", "int8"),
    "fp8": ("bf16", "fp32", "fp16"),
    "bf16": ("bf16",),
}
# Bytes allocated behind a compressed weight: the library's kernels read metadata in 128 x 64 tiles of 1 KiB, even if
# the number of rows is not a multiple of 128 (compute-sanitizer reports it).  The excess belongs to rows beyond N.
SLACK_BYTES = 4096

POINTER_ALIGNMENT = 16  # bytes
COLUMN_MAJOR, ROW_MAJOR = 1, 2  # cusparseOrder_t
HALF_OF_THE_ELEMENTS = 0  # cusparseLtSparsity_t
COMPUTE_INT32, COMPUTE_FLOAT32 = 0, 2  # cusparseComputeType
ALGORITHM_ID, LARGEST_ID = 0, 1  # cusparseLtMatmulAlgAttribute_t

FUNCTIONS: Functions = {
    "cusparseLtInit": (c_void_p,),
    "cusparseLtDestroy": (c_void_p,),
    "cusparseLtGetProperty": (c_int, c_void_p),
    # handle, matrix, rows, columns, leading dimension, alignment, type, order
    "cusparseLtDenseDescriptorInit": (c_void_p, c_void_p, *(c_int64,) * 3, c_uint32, c_int, c_int),
    "cusparseLtStructuredDescriptorInit": (
        c_void_p,
        c_void_p,
        *(c_int64,) * 3,
        c_uint32,
        c_int,
        c_int,
        c_int,
    ),
    "cusparseLtMatDescriptorDestroy": (c_void_p,),
    # handle, product, whether weight and activations are transposed, weight, activations, C, D, compute type
    "cusparseLtMatmulDescriptorInit": (c_void_p, c_void_p, c_int, c_int, *(c_void_p,) * 4, c_int),
    "cusparseLtMatmulAlgSelectionInit": (c_void_p, c_void_p, c_void_p, c_int),
    "cusparseLtMatmulAlgSelectionDestroy": (c_void_p,),
    "cusparseLtMatmulAlgSetAttribute": (c_void_p, c_void_p, c_int, c_void_p, c_size_t),
    "cusparseLtMatmulAlgGetAttribute": (c_void_p, c_void_p, c_int, c_void_p, c_size_t),
    "cusparseLtMatmulPlanInit": (c_void_p,) * 4,
    "cusparseLtMatmulPlanDestroy": (c_void_p,),
    "cusparseLtMatmulGetWorkspace": (c_void_p,) * 3,
    # handle, plan, alpha, weight, activations, beta, C, D, workspace, streams, their number
    "cusparseLtMatmul": (*(c_void_p,) * 10, c_int32),
    "cusparseLtSpMMACompressedSize": (c_void_p,) * 4,
    "cusparseLtSpMMACompress": (c_void_p,) * 6,
}


class CuSparseLtPlan(LibraryPlan):
    """A GEMM with its types and its algorithm."""

    def __init__(
        self, library: Library, handle: Handle, problem: Problem, algorithm: str | None, index: int
    ) -> None:
        super().__init__(library, algorithm, index)
        self._handle, self._problem = handle, problem
        self._one, self._zero = c_float(1), c_float(0)
        (n, k, m), operand = (problem.n, problem.k, problem.m), DATA_TYPES[problem.dtype]
        activations = self._matrix(m, k, operand, ROW_MAJOR)
        out = self._matrix(n, m, DATA_TYPES[problem.out], COLUMN_MAJOR)
        weight, product, selection, self._plan = (opaque() for _ in range(4))
        self._call(
            "cusparseLtStructuredDescriptorInit",
            *(weight, n, k, k, POINTER_ALIGNMENT, operand, ROW_MAJOR, HALF_OF_THE_ELEMENTS),
        )
        compute = COMPUTE_INT32 if problem.dtype == "int8" else COMPUTE_FLOAT32
        self._call("cusparseLtMatmulDescriptorInit", product, 0, 1, weight, activations, out, out, compute)
        self._product = product  # which is not destroyed, but must stay where it is
        # Not before: 0.8.0 crashes on destroying a weight that no product uses
        self.destroy_later("cusparseLtMatDescriptorDestroy", weight)
        self._call("cusparseLtMatmulAlgSelectionInit", selection, product, 0)
        self.destroy_later("cusparseLtMatmulAlgSelectionDestroy", selection)
        count = c_int()
        self._call("cusparseLtMatmulAlgGetAttribute", selection, LARGEST_ID, byref(count), 4)
        self.algorithms = count.value  # ids are 0 to one less
        if algorithm:
            number = c_int(_parse_algorithm(algorithm))
            self._call("cusparseLtMatmulAlgSetAttribute", selection, ALGORITHM_ID, byref(number), 4)
        self._call("cusparseLtMatmulPlanInit", self._plan, product, selection)
        self.destroy_later("cusparseLtMatmulPlanDestroy", self._plan)
        needed = c_size_t()
        self._call("cusparseLtMatmulGetWorkspace", self._plan, byref(needed))
        self.workspace = needed.value

    def compress(self, weight: Tensor) -> Tensor:
        """Return the library's values and metadata of a weight [n, k], and SLACK_BYTES."""
        size, buffer_size = c_size_t(), c_size_t()
        self._call("cusparseLtSpMMACompressedSize", self._plan, byref(size), byref(buffer_size))
        compressed = torch.empty(size.value + SLACK_BYTES, dtype=torch.uint8, device=weight.device)
        buffer = torch.empty(max(1, buffer_size.value), dtype=torch.uint8, device=weight.device)
        self._call(
            "cusparseLtSpMMACompress",
            *(
                self._plan,
                weight.data_ptr(),
                compressed.data_ptr(),
                buffer.data_ptr(),
                cuda.current_stream(self.index),
            ),
        )
        return compressed

    def launch(self, tensors: Tensors, workspace: int, stream: int) -> None:
        """See `LibraryPlan.launch`."""
        out = tensors.out.data_ptr()
        self._call(
            "cusparseLtMatmul",
            *(self._plan, byref(self._one), tensors.weight.data_ptr(), tensors.activations.data_ptr()),
            *(byref(self._zero), out, out, workspace, byref(c_void_p(stream)), 1),
        )

    def _matrix(self, rows: int, columns: int, kind: int, order: int) -> Any:
        """Make the descriptor of a dense matrix."""
        made, leading = opaque(), rows if order == COLUMN_MAJOR else columns
        self._call(
            "cusparseLtDenseDescriptorInit", made, rows, columns, leading, POINTER_ALIGNMENT, kind, order
        )
        self.destroy_later("cusparseLtMatDescriptorDestroy", made)
        return made

    def _call(self, function: str, *arguments: Any) -> None:
        what = f"{self._problem}, by algorithm {self.algorithm or 'of its own choice'}"
        self.library.call(what, function, self._handle.made, *arguments)


class CuSparseLt(LibraryBackend):
    """See `slidesparse.gemm.backend.Tunable`."""

    name = "cusparselt"
    takes_dense = False
    sparse = True
    alignment = 32  # K of a sparse 8-bit GEMM must be a multiple of this
    products = OUTPUTS

    @cache  # noqa: B019  there is one object
    def library(self) -> Library:
        """See `LibraryBackend.library`."""
        return Library(self.name, FUNCTIONS, ("cusparseLtGetErrorName", "cusparseLtGetErrorString"))

    def make_handle(self) -> Handle:
        """See `LibraryBackend.make_handle`."""
        return Handle(self.library(), opaque(), "cusparseLtInit", "cusparseLtDestroy")

    def version(self) -> str:
        """See `Tunable.version`."""
        parts = [c_int() for _ in range(3)]  # major, minor, patch level
        for number, part in enumerate(parts):
            self.library().call("asking for the version", "cusparseLtGetProperty", number, byref(part))
        version = [part.value for part in parts]
        try:
            require_supported(self.name, version)
        except ToolchainError as error:
            raise LibraryError(str(error)) from None
        return ".".join(map(str, version))

    def epilogue(self, dtype: str, out: str, device: torch.device | None = None) -> str:
        """See `Tunable.epilogue`: none, since the kernel that applies token scales applies both in one pass."""
        return "none"

    def operand(self, weight: Tensor) -> Tensor:
        """See `Tunable.operand`: the library's values and metadata, and slack; n and k are multiples of `ALIGNMENT`."""
        dtype = require_operand(weight.dtype)
        n, k = weight.shape
        multiple = ALIGNMENT[weight.element_size()]
        if not weight.is_cuda:
            raise LibraryError(
                f"cuSPARSELt packs weights on a GPU, but this one is on {weight.device}: move it to the GPU"
            )
        if n % multiple or k % multiple:
            raise LibraryError(
                f"cuSPARSELt takes weights whose sides are multiples of {multiple}, found {n} x {k}: pad it with zeros"
            )
        problem, index = Problem(dtype, OUTPUTS[dtype][0], n, k, MIN_ROWS), weight.get_device()
        with cuda.on_device(index):
            plan = plan_cache(self.name, index).get(
                ("compress", problem), lambda: self.plan(problem, weight.device)
            )
            compressed: Tensor = plan.compress(weight.contiguous())
        return compressed

    def algorithms(self, problem: Problem, device: torch.device) -> list[str]:
        """See `Tunable.algorithms`: ids such as "3", by the library's own division of K."""
        return [str(i) for i in range(self.plan(problem, device).algorithms)]

    def plan(self, problem: Problem, device: torch.device, algorithm: str | None = None) -> CuSparseLtPlan:
        """See `Tunable.plan`."""
        self.require(problem)
        if problem.bias or problem.scale != "none":
            raise LibraryError(f"cuSPARSELt applies neither scales nor a bias, asked for {problem}")
        index = cuda.device_index(device)
        with cuda.on_device(index):
            plan = CuSparseLtPlan(self.library(), self.handle(index), problem, algorithm, index)
        plan.require_workspace()
        return plan

    def pack(self, weight: Tensor, pattern: SlidePattern | None, phase: int = 0) -> Tensor:
        """See `Backend.pack`: slid into 2:4 windows and compressed, [bytes].

        N and K' are padded with zeros to multiples of 32, and -0.0 becomes +0.0, because the library takes every code
        but 0 for a value.
        """
        codes = torch.where(nonzero(weight), bits(weight), 0).view(weight.dtype)
        return self.operand(pad(slide(codes, pattern or TWO_FOUR, phase), self.alignment, self.alignment))

    def is_packed_for(self, weight: Tensor, n: int, k: int, dtype: torch.dtype) -> bool:
        """See `LibraryBackend.is_packed_for`; the size of the metadata is up to the library."""
        return weight.dtype == torch.uint8 and weight.numel() >= n * k // 2


def _parse_algorithm(algorithm: str) -> int:
    """Parse an algorithm into its id."""
    if not algorithm.isdecimal():
        raise LibraryError(f"{algorithm!r} is no cuSPARSELt algorithm, such as '3'; tune again")
    return int(algorithm)
