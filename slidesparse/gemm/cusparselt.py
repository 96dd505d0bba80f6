"""NVIDIA's cuSPARSELt: 2:4 sparse GEMM on sparse tensor cores.

Its epilogue cannot scale by token, nor add a bias after that: `slidesparse.kernels.dequant_bias` applies all scales.
The library is called by the extension csrc/cusparselt.cpp.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.machinery import ExtensionFileLoader, ModuleSpec
from importlib.util import module_from_spec
from typing import Any

import torch
from torch import Tensor

from slidesparse.build.compile import build
from slidesparse.build.find import ToolchainError, find_library, require_supported
from slidesparse.gemm import cuda
from slidesparse.gemm.library import DATA_TYPES, LibraryBackend, LibraryPlan, pad, plan_cache
from slidesparse.gemm.problem import (
    ALL_2_4,
    MIN_ROWS,
    TWO_FOUR,
    LibraryError,
    Problem,
    Tensors,
    require_operand,
)
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
        module.load(find_library("cusparselt", major).path)
    except (ToolchainError, ImportError, RuntimeError) as error:
        raise LibraryError(f"cuSPARSELt: {error}") from None
    return module


def call(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function of the extension.  Raises LibraryError."""
    try:
        return function(*arguments)
    except RuntimeError as error:
        raise LibraryError(str(error)) from None


class CuSparseLtPlan(LibraryPlan):
    """A GEMM with its types and its algorithm."""

    def __init__(self, handle: Any, problem: Problem, algorithm: str | None, index: int) -> None:
        super().__init__(algorithm, index)
        what = f"{problem}, by algorithm {algorithm or 'of its own choice'}"
        sizes, types = (problem.n, problem.k, problem.m), (DATA_TYPES[problem.dtype], DATA_TYPES[problem.out])
        number = _parse_algorithm(algorithm) if algorithm else LIBRARYS_CHOICE
        self._plan = call(
            extension().Plan, handle, *sizes, *types, COMPUTE_TYPES[problem.dtype], number, what
        )
        self.workspace, self.algorithms = self._plan.workspace, self._plan.algorithms

    def compress(self, weight: Tensor) -> Tensor:
        """Return the library's values and metadata of a weight [n, k], and SLACK_BYTES."""
        size, buffer_size = call(self._plan.compressed_size)
        compressed = torch.empty(size + SLACK_BYTES, dtype=torch.uint8, device=weight.device)
        buffer = torch.empty(max(1, buffer_size), dtype=torch.uint8, device=weight.device)
        stream = cuda.current_stream(self.index)
        call(self._plan.compress, weight.data_ptr(), compressed.data_ptr(), buffer.data_ptr(), stream)
        return compressed

    def launch(self, tensors: Tensors, workspace: int, stream: int) -> None:
        """See `LibraryPlan.launch`."""
        activations, weight, out = (tensor.data_ptr() for tensor in tensors[:3])
        call(self._plan.run, activations, weight, out, workspace, stream)


class CuSparseLt(LibraryBackend):
    """See `slidesparse.gemm.backend.Tunable`."""

    name = "cusparselt"
    takes_dense = False
    sparse = True
    alignment = 32  # K of a sparse 8-bit GEMM must be a multiple of this
    products = OUTPUTS

    def make_handle(self) -> Any:
        """See `LibraryBackend.make_handle`."""
        return call(extension().Handle)

    def version(self) -> str:
        """See `Tunable.version`."""
        version: tuple[int, ...] = call(extension().version)
        try:
            require_supported(self.name, version)
        except ToolchainError as error:
            raise LibraryError(str(error)) from None
        return ".".join(map(str, version))

    def epilogue(self, dtype: str, out: str, device: torch.device | None = None) -> str:
        """See `Tunable.epilogue`: none, since the kernel that applies token scales applies both in one pass."""
        return "none"

    def operand(self, weight: Tensor, blocks: str = ALL_2_4) -> Tensor:
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
            plan = CuSparseLtPlan(self.handle(index), problem, algorithm, index)
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
