"""NVIDIA's cuSPARSELt: 2:4 sparse GEMM on sparse tensor cores.

Its epilogue cannot scale by token, nor add a bias after that: `slidesparse.kernels.dequant_bias` applies all scales.
The library is called by the extension csrc/cusparselt.cpp.  Its handles and plans belong to one thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache, lru_cache
from importlib.machinery import ExtensionFileLoader, ModuleSpec
from importlib.util import module_from_spec
from typing import Any

import torch
from torch import Tensor

from slidesparse.build.compile import build
from slidesparse.build.find import find_cusparselt, require_supported
from slidesparse.errors import EnvironmentFault
from slidesparse.gemm import cuda, tuned
from slidesparse.gemm.cuda import LibraryBackend, allocate_rows, pad
from slidesparse.gemm.problem import (
    ALL_2_4,
    MIN_ROWS,
    NAMES,
    TWO_FOUR,
    LibraryError,
    Problem,
    Tensors,
    bucket,
    require_operand,
)
from slidesparse.pattern import SlidePattern, round_up
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

PLAN_CACHE_CAPACITY = 1024  # of a thread; a plan takes some KB of host memory
WORKSPACE_BYTES = 64 << 20  # algorithms that need more are refused

DATA_TYPES = {"fp32": 0, "fp16": 2, "int8": 3, "int32": 10, "bf16": 14, "fp8": 28}  # cudaDataType
COMPUTE_TYPES = {"int8": 0, "fp8": 2, "bf16": 2}  # cusparseComputeType: of INT32, of float32
LIBRARYS_CHOICE = -1  # of an algorithm


@cache
def extension() -> Any:
    """Return the extension csrc/cusparselt.cpp, compiled if needed, with the library open.  Raises LibraryError."""
    try:
        path = str(build("cusparselt"))
        loader = ExtensionFileLoader("_cusparselt", path)
        module = module_from_spec(ModuleSpec("_cusparselt", loader, origin=path))
        loader.exec_module(module)
        major = int(torch.version.cuda.split(".")[0]) if torch.version.cuda else None
        module.load(find_cusparselt(major).path)
    except (EnvironmentFault, ImportError, RuntimeError) as error:
        raise LibraryError(f"cuSPARSELt: {error}") from None
    return module


def call(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function of the extension.  Raises LibraryError."""
    try:
        return function(*arguments)
    except RuntimeError as error:
        raise LibraryError(str(error)) from None


class CuSparseLtPlan:
    """A `slidesparse.gemm.problem.Plan`."""

    def __init__(self, handle: Any, problem: Problem, algorithm: str | None, index: int) -> None:
        """Make a plan on CUDA device ``index``, the current one.  Raises LibraryError."""
        self.index = index
        what = f"{problem}, by algorithm {algorithm or 'of its own choice'}"
        sizes, types = (problem.n, problem.k, problem.m), (DATA_TYPES[problem.dtype], DATA_TYPES[problem.out])
        number = _parse_algorithm(algorithm) if algorithm else LIBRARYS_CHOICE
        self._plan = call(
            extension().Plan, handle, *sizes, *types, COMPUTE_TYPES[problem.dtype], number, what
        )
        self.workspace, self.algorithms = self._plan.workspace, self._plan.algorithms
        if self.workspace > WORKSPACE_BYTES:
            raise LibraryError(
                f"{what}, needs a workspace of {self.workspace} bytes, allowed are {WORKSPACE_BYTES}"
            )

    def compress(self, weight: Tensor) -> Tensor:
        """Return the library's values and metadata of a weight [n, k], and SLACK_BYTES."""
        size, buffer_size = call(self._plan.compressed_size)
        compressed = torch.empty(size + SLACK_BYTES, dtype=torch.uint8, device=weight.device)
        buffer = torch.empty(max(1, buffer_size), dtype=torch.uint8, device=weight.device)
        stream = cuda.current_stream(self.index)
        call(self._plan.compress, weight.data_ptr(), compressed.data_ptr(), buffer.data_ptr(), stream)
        return compressed

    def __call__(self, tensors: Tensors) -> None:
        # From torch's allocator, so that streams have their own, and so do CUDA graphs that do not share a pool
        workspace = tensors.activations.new_empty(self.workspace, dtype=torch.uint8)
        operands = (tensor.data_ptr() for tensor in (*tensors[:3], workspace))
        call(self._plan.run, *operands, cuda.current_stream(self.index))


Make = Callable[[Problem, torch.device], CuSparseLtPlan]


def _new_plan(make: Make, problem: Problem, device: torch.device) -> CuSparseLtPlan:
    """Make a plan.  Raises LibraryError during CUDA graph capture, because the library loads code for it."""
    if cuda.is_capturing():
        raise LibraryError(
            f"no plan for {problem} while a CUDA graph is being captured; run the same shape once before the capture"
        )
    return make(problem, device)


def _new_handle(index: int) -> Any:
    torch.cuda.current_blas_handle()  # creates the device's context
    return call(extension().Handle)


class _Thread(threading.local):
    """A thread's own handles, by the index of the device, and the plans that it used last."""

    def __init__(self) -> None:
        self.handle = lru_cache(None)(_new_handle)
        self.plan = lru_cache(PLAN_CACHE_CAPACITY)(_new_plan)


_thread = _Thread()


class CuSparseLt(LibraryBackend):
    """The sparse path where our own kernels do not run."""

    name = "cusparselt"
    takes_dense = False
    sparse = True
    alignment = 32  # K of a sparse 8-bit GEMM must be a multiple of this
    products = OUTPUTS

    def require_library(self, capability: tuple[int, int], loads: bool) -> None:
        if loads:
            self.version()
        else:
            find_cusparselt()

    def version(self) -> str:
        version: tuple[int, ...] = call(extension().version)
        require_supported(version)
        return ".".join(map(str, version))

    def epilogue(self, dtype: str, out: str, device: torch.device | None = None) -> str:
        return "none"  # the kernel that applies token scales applies both in one pass

    def operand(self, weight: Tensor, blocks: str = ALL_2_4) -> Tensor:
        """Return the library's values and metadata, and slack; n and k are multiples of `ALIGNMENT`."""
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
            plan = _thread.plan(self.plan, problem, weight.device)
            compressed: Tensor = plan.compress(weight.contiguous())
        return compressed

    def algorithms(self, problem: Problem, device: torch.device) -> list[str]:
        """Return ids such as "3", by the library's own division of K."""
        return [str(i) for i in range(self.plan(problem, device).algorithms)]

    def plan(self, problem: Problem, device: torch.device, algorithm: str | None = None) -> CuSparseLtPlan:
        self.require(problem)
        if problem.scale != "none":
            raise LibraryError(f"cuSPARSELt applies no scales, asked for {problem}")
        index = cuda.device_index(device)
        with cuda.on_device(index):
            return CuSparseLtPlan(_thread.handle(index), problem, algorithm, index)

    def pack(self, weight: Tensor, pattern: SlidePattern | None, phase: int = 0) -> Tensor:
        """Return the weight slid into 2:4 windows and compressed, [bytes].

        N and K' are padded with zeros to multiples of 32, and -0.0 becomes +0.0, because the library takes every code
        but 0 for a value.
        """
        codes = torch.where(nonzero(weight), bits(weight), 0).view(weight.dtype)
        return self.operand(pad(slide(codes, pattern or TWO_FOUR, phase), self.alignment, self.alignment))

    def accumulate(self, q: Tensor, packed: Tensor, n: int, dtype: torch.dtype) -> Tensor:
        q = pad(q, self.alignment)
        (m, k), columns, index = q.shape, round_up(n, self.alignment), q.get_device()
        # the library gets only pointers; the size of the metadata is up to it
        if packed.dtype != torch.uint8 or packed.numel() < columns * k // 2:
            raise LibraryError(
                f"a weight of {packed.dtype} {tuple(packed.shape)} for products [{m}, {k}] @ [{n}, {k}].T of "
                f"{q.dtype}: pack the weight for the backend {self.name}, from as many columns"
            )
        rows = bucket(m)
        problem = Problem(NAMES[q.dtype], NAMES[dtype], columns, k, rows)
        with cuda.on_device(index):
            plan = _thread.plan(self._tuned_plan, problem, q.device)
            out = q.new_empty(rows, columns, dtype=dtype)
            plan(Tensors(allocate_rows(q, rows), packed, out))
        return out[:m, :n]

    def _tuned_plan(self, problem: Problem, device: torch.device) -> CuSparseLtPlan:
        """Make the plan with the tuned algorithm, or with the library's own choice where it refuses that."""
        algorithm = cuda.tuned_algorithm(self, problem, device)
        try:
            return self.plan(problem, device, algorithm)
        except LibraryError as error:
            if algorithm is None:
                raise
            # It was tuned for another shape or number of tokens, and this one may not support it
            tuned.note_refused(self.name, tuned.Shape.of_problem(problem), algorithm, error)
            return self.plan(problem, device)


def _parse_algorithm(algorithm: str) -> int:
    """Parse an algorithm into its id."""
    if not algorithm.isdecimal():
        raise LibraryError(f"{algorithm!r} is no cuSPARSELt algorithm, such as '3'; tune again")
    return int(algorithm)
