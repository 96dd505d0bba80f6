"""The common part of NVIDIA's GEMM libraries, cuBLASLt and cuSPARSELt: plans, workspaces and a kernel that scales.

A library's handles, descriptors and plans belong to one thread.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Hashable
from typing import Any, cast

import torch
from torch import Tensor

from slidesparse.build.find import ToolchainError, find_library
from slidesparse.gemm import cuda, tuned
from slidesparse.gemm.backend import Tunable, TwoStep
from slidesparse.gemm.cuda import CudaBackend
from slidesparse.gemm.problem import NAMES, LibraryError, Plan, Problem, Tensors, bucket
from slidesparse.pattern import round_up
from slidesparse.quantize import FP8, INT8

PLAN_CACHE_CAPACITY = 1024  # cached per thread, device and library; a plan takes some KB of host memory
WORKSPACE_BYTES = 64 << 20  # algorithms that need more are refused

ACCUMULATOR_DTYPES = {INT8: torch.int32, FP8: torch.float32}  # type of the operands -> type of exact sums
DATA_TYPES = {"fp32": 0, "fp16": 2, "int8": 3, "int32": 10, "bf16": 14, "fp8": 28}  # cudaDataType


class LibraryPlan:
    """See `slidesparse.gemm.problem.Plan`."""

    def __init__(self, algorithm: str | None, index: int) -> None:
        self.algorithm, self.workspace, self.index = algorithm or "", 0, index

    def require_workspace(self) -> None:
        """Raise LibraryError if the algorithm needs too large a workspace."""
        if self.workspace > WORKSPACE_BYTES:
            raise LibraryError(
                f"algorithm {self.algorithm} needs a workspace of {self.workspace} bytes, allowed are "
                f"{WORKSPACE_BYTES}"
            )

    def run(self, tensors: Tensors) -> None:
        """See `slidesparse.gemm.problem.Plan.run`."""
        # From torch's allocator, so that streams have their own, and so do CUDA graphs that do not share a pool
        workspace = tensors.activations.new_empty(self.workspace, dtype=torch.uint8)
        self.launch(tensors, workspace.data_ptr(), cuda.current_stream(self.index))

    @abstractmethod
    def launch(self, tensors: Tensors, workspace: int, stream: int) -> None:
        """Launch on a stream with a workspace of ``self.workspace`` bytes, addresses both."""


class PlanCache:
    """An LRU cache of ``capacity`` plans of one thread, device and library."""

    def __init__(self, capacity: int = PLAN_CACHE_CAPACITY) -> None:
        self.capacity = capacity
        self._plans: OrderedDict[Hashable, Any] = OrderedDict()

    def __len__(self) -> int:
        return len(self._plans)

    def get(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Return the plan of ``key``, made by ``make`` if there is none.

        Raises LibraryError if it would have to be made during CUDA graph capture, because libraries load code for it.
        """
        plan = self._plans.get(key)
        if plan is not None:
            self._plans.move_to_end(key)
            return plan
        if cuda.is_capturing():
            raise LibraryError(
                f"no plan for {key} while a CUDA graph is being captured; run the same shape once before the capture"
            )
        plan = self._plans[key] = make()
        if len(self._plans) > self.capacity:
            self._plans.popitem(last=False)
        return plan


class _ThreadState(threading.local):
    """A thread's own handles and plans, by (library, device index)."""

    def __init__(self) -> None:
        self.handles: dict[tuple[str, int], Any] = {}
        self.caches: defaultdict[tuple[str, int], PlanCache] = defaultdict(PlanCache)


_thread_state = _ThreadState()


def plan_cache(name: str, index: int) -> PlanCache:
    """Return this thread's plans of library ``name`` on CUDA device ``index``."""
    return _thread_state.caches[name, index]


def allocate_rows(x: Tensor, rows: int) -> Tensor:
    """Return x [M, K], contiguous and with memory for at least ``rows`` rows; a copy if it has less."""
    m, k = x.shape
    available_bytes = x.untyped_storage().nbytes() - x.storage_offset() * x.element_size()
    if x.is_contiguous() and available_bytes >= rows * k * x.element_size():
        return x
    padded = x.new_empty(rows, k)
    padded[:m].copy_(x)
    return padded


def pad(x: Tensor, columns: int, rows: int = 1) -> Tensor:
    """Pad x [M, K] of one-byte elements with zeros to multiples of ``columns`` and ``rows``; x itself if it fits."""
    missing = (0, -x.shape[1] % columns, 0, -x.shape[0] % rows)
    if not any(missing):
        return x
    return torch.nn.functional.pad(x.view(torch.int8), missing).view(x.dtype)


class LibraryBackend(CudaBackend, TwoStep):
    """A backend on a GEMM library: a plan for each bucket of tokens, and a kernel that scales.

    For BF16 layers the GEMM writes BF16 if the library supports it, and otherwise INT32 or float32 sums.  Stock vLLM
    rounds once, at the end; rounding the sum to BF16 as well adds half an ulp of error, but halves the bytes between
    GEMM and scaling.
    """

    alignment: int

    @abstractmethod
    def make_handle(self) -> Any:
        """Make a handle of the library for the current device and this thread.  Raises LibraryError."""

    @abstractmethod
    def plan(self, problem: Problem, device: torch.device, algorithm: str | None = None) -> Plan:
        """See `Tunable.plan`."""

    @abstractmethod
    def is_packed_for(self, weight: Tensor, n: int, k: int, dtype: torch.dtype) -> bool:
        """Return whether a weight is packed for products of [m, k] and [n, k].T of ``dtype``."""

    def unusable_library(self, capability: tuple[int, int], loads: bool) -> str | None:
        """See `CudaBackend.unusable_library`."""
        try:
            if loads:
                self.version()
            else:
                find_library(self.name)
        except (LibraryError, ToolchainError) as error:
            return str(error)
        return None

    def handle(self, index: int) -> Any:
        """Return this thread's handle on CUDA device ``index``, the current one.  Raises LibraryError."""
        made = _thread_state.handles.get((self.name, index))
        if made is None:
            torch.cuda.current_blas_handle()  # creates the device's context
            made = _thread_state.handles[self.name, index] = self.make_handle()
        return made

    def scaled_matmul(self, tensors: Tensors) -> None:
        """See `TwoStep.scaled_matmul`."""
        from slidesparse.kernels.dequant_bias import dequant_bias  # late: needs Triton

        q, packed, out, scale_w, scale_x, bias = tensors
        assert scale_w is not None
        assert scale_x is not None
        rounds = out.dtype == torch.bfloat16 and "bf16" in self.products[NAMES[q.dtype]]
        sums = out.dtype if rounds else ACCUMULATOR_DTYPES[q.dtype]
        dequant_bias(self.accumulate(q, packed, out.shape[1], sums), scale_x, scale_w, bias, out)

    def accumulate(
        self,
        q: Tensor,
        weight: Tensor,
        n: int,
        dtype: torch.dtype,
        scale_w: Tensor | None = None,
        scale_x: Tensor | None = None,
        bias: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return q [M, K'] @ weight.T, with scales and bias if the library applies them.

        The weight is from `pack`.  The result is [M, N] of ``dtype`` with strided rows, in ``out`` if no row or column
        need be padded; without scales INT32 and float32 hold full sums.  Raises LibraryError.
        """
        q = pad(q, self.alignment)
        (m, k), columns, index = q.shape, round_up(n, self.alignment), q.get_device()
        if not self.is_packed_for(weight, columns, k, q.dtype):
            raise LibraryError(
                f"a weight of {weight.dtype} {tuple(weight.shape)} for products [{m}, {k}] @ [{n}, {k}].T of "
                f"{q.dtype}: pack the weight for the backend {self.name}, from as many columns"
            )
        rows = bucket(m)
        scale = "none" if scale_w is None else "both"
        problem = Problem(NAMES[q.dtype], NAMES[dtype], columns, k, rows, scale, bias is not None)
        with cuda.on_device(index):
            plan: Plan = plan_cache(self.name, index).get(
                problem, lambda: self._tuned_plan(problem, q.device)
            )
            if out is None or out.shape != (rows, columns):
                out = q.new_empty(rows, columns, dtype=dtype)
            scale_x = None if scale_x is None else allocate_rows(scale_x, rows)
            plan.run(Tensors(allocate_rows(q, rows), weight, out, scale_w, scale_x, bias))
        return out[:m, :n]

    def _tuned_plan(self, problem: Problem, device: torch.device) -> Plan:
        """Make the plan with the tuned algorithm, or with the library's own choice where it refuses that."""
        algorithm = cuda.tuned_algorithm(cast("Tunable", self), problem, device)
        try:
            return self.plan(problem, device, algorithm)
        except LibraryError as error:
            if algorithm is None:
                raise
            # It was tuned for another shape or number of tokens, and this one may not support it
            tuned.note_refused(self.name, tuned.Shape.of_problem(problem), algorithm, str(error))
            return self.plan(problem, device)
