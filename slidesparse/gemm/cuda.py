"""Code shared by the GPU backends: token buckets, cached plans, workspaces of streams, and a base class.

A plan is for one M, but a step may have any number of tokens.  Activations are therefore padded to buckets, 16 from
each power of two to the next, so that at most 1/16 of the rows are padding (below 256 tokens: up to 15 rows, which a
tensor-core tile computes anyway).
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import math
import threading
from abc import ABC, abstractmethod
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from importlib.util import find_spec
from types import ModuleType
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from slidesparse.build.compile import build
from slidesparse.build.find import ToolchainError, find_library
from slidesparse.errors import INSTALL_CUDA
from slidesparse.gemm import tuned
from slidesparse.gemm.backend import Tunable, TwoStep
from slidesparse.gemm.problem import LibraryError, Plan, Problem
from slidesparse.pattern import round_up
from slidesparse.quantize import FP8, INT8

SPARSE_CAPABILITY = (8, 0)  # Ampere: the first sparse tensor cores
MIN_ROWS = 16
PLAN_CACHE_CAPACITY = 1024  # cached per thread, device and library; a plan takes some KB of host memory
WORKSPACE_BYTES = 64 << 20  # bytes per stream; algorithms that need more are refused

# type of the operands -> type of exact accumulators
ACCUMULATOR_DTYPES = {INT8: torch.int32, FP8: torch.float32}

T = TypeVar("T")


def bucket(m: int) -> int:
    """Round the number of tokens up to the number of rows that products are planned for; 0 stays 0."""
    if m <= MIN_ROWS:
        return MIN_ROWS if m else 0
    step = max(MIN_ROWS, 1 << ((m - 1).bit_length() - 5))
    return round_up(m, step)


@cache
def extension(name: str) -> ModuleType:
    """Return the extension module ``_name`` with its library loaded, compiled if needed.  Raises LibraryError."""
    try:
        loader = importlib.machinery.ExtensionFileLoader(f"_{name}", str(build(name)))
        spec = importlib.util.spec_from_file_location(f"_{name}", loader.path, loader=loader)
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
        major = int(torch.version.cuda.split(".")[0]) if torch.version.cuda else None
        module.load(find_library(name, major).path)
    except (ToolchainError, ImportError, RuntimeError) as error:
        raise LibraryError(str(error)) from None
    return module


class PlanCache(Generic[T]):
    """An LRU cache of ``capacity`` plans of one thread, device and library."""

    def __init__(self, capacity: int = PLAN_CACHE_CAPACITY) -> None:
        self.capacity = capacity
        self._plans: OrderedDict[Hashable, T] = OrderedDict()

    def __len__(self) -> int:
        return len(self._plans)

    def get(self, key: Hashable, make: Callable[..., T], *arguments: Any) -> T:
        """Return the plan of ``key``, made by ``make(*arguments)`` if there is none.

        Raises LibraryError if it would have to be made during CUDA graph capture, because libraries load code for it.
        """
        plan = self._plans.get(key)
        if plan is not None:
            self._plans.move_to_end(key)
            return plan
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise LibraryError(
                f"no plan for {key} while a CUDA graph is being captured; run the same shape once before the capture"
            )
        plan = make(*arguments)
        self._plans[key] = plan
        if len(self._plans) > self.capacity:
            self._plans.popitem(last=False)
        return plan


class _ThreadState(threading.local):
    """A thread's own handles and plans, by (library, device index)."""

    def __init__(self) -> None:
        self.handles: dict[tuple[str, int], Any] = {}
        self.caches: defaultdict[tuple[str, int], PlanCache[Any]] = defaultdict(PlanCache)


_thread_state = _ThreadState()


def handle(name: str, index: int) -> Any:
    """Return this thread's handle of library ``name`` on CUDA device ``index``.  Raises LibraryError."""
    library_handle = _thread_state.handles.get((name, index))
    if library_handle is None:
        module = extension(name)
        with torch.cuda.device(index):
            torch.cuda.current_blas_handle()  # creates the device's context
            library_handle = _thread_state.handles[name, index] = call(module.Handle)
    return library_handle


def plan_cache(name: str, index: int) -> PlanCache[Any]:
    """Return this thread's plans of library ``name`` on CUDA device ``index``."""
    return _thread_state.caches[name, index]


def call(function: Callable[..., T], *arguments: Any) -> T:
    """Call a function of an extension, converting its errors to LibraryError."""
    try:
        return function(*arguments)
    except RuntimeError as error:
        raise LibraryError(str(error)) from None


def device_index(device: torch.device) -> int:
    """Return the index of a CUDA device; of the current one when ``device`` has no index."""
    return torch.cuda.current_device() if device.index is None else device.index


def current_stream(index: int) -> int:
    """Return the address of torch's current stream on CUDA device ``index``."""
    return torch._C._cuda_getCurrentRawStream(index)


_workspaces: dict[tuple[int, int], Tensor] = {}
_workspaces_lock = threading.Lock()


def workspace(index: int, stream: int) -> int:
    """Return the address of a stream's workspace, allocated once and never moved, because captured graphs use it."""
    buffer = _workspaces.get((index, stream))
    if buffer is None:
        with _workspaces_lock:
            buffer = _workspaces.get((index, stream))
            if buffer is None:
                buffer = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=torch.device("cuda", index))
                _workspaces[index, stream] = buffer
    return buffer.data_ptr()


def on_device(index: int) -> AbstractContextManager[object]:
    """Make CUDA device ``index`` the current one."""
    return nullcontext() if torch.cuda.current_device() == index else torch.cuda.device(index)


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


def make_tuned_plan(backend: Tunable, problem: Problem, device: torch.device) -> Plan:
    """Make the plan with the algorithm that `tuned.select_algorithm` finds; log an untuned shape once."""
    return call_with_tuned(
        backend, problem, device, lambda algorithm: backend.plan(problem, device, algorithm)
    )


def call_with_tuned(
    backend: Tunable, problem: Problem, device: torch.device, make: Callable[[str | None], T]
) -> T:
    """Call ``make`` with the algorithm that `tuned.select_algorithm` finds, or None for the backend's own choice.

    If ``make`` raises LibraryError for a tuned algorithm, it is called again with None.  Logs both once.
    """
    suits = partial(backend.suits, problem, device)
    algorithm, instead = tuned.select_algorithm(
        _tuning_subject(backend, device), problem, backend.max_shape_distance, suits
    )
    if instead:
        tuned.note_untuned(backend.name, problem.dtype, problem.n, problem.k, instead)
    try:
        return make(algorithm)
    except LibraryError as error:
        if algorithm is None:
            raise
        # It was tuned for another shape or number of tokens, and this one may not support it
        tuned.note_refused(backend.name, tuned.Shape.of_problem(problem), algorithm, str(error))
        return make(None)


def find_tuned_algorithm(backend: Tunable, problem: Problem, device: torch.device) -> str | None:
    """Return the algorithm tuned for ``problem``, or None."""
    return tuned.tuned_algorithm(_tuning_subject(backend, device), problem)


def _tuning_subject(backend: Tunable, device: torch.device) -> tuned.Subject:
    gpu, capability = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
    return tuned.Subject(backend.name, backend.version(), gpu, capability)


class NativePlan:
    """See `slidesparse.gemm.problem.Plan`."""

    def __init__(self, native: Any, algorithm: str | None, index: int) -> None:
        self._native = native
        self._index = index
        self.algorithm = algorithm or ""
        self.workspace = int(native.workspace)
        if self.workspace > WORKSPACE_BYTES:
            raise LibraryError(
                f"algorithm {algorithm} needs a workspace of {self.workspace} bytes, but a stream has {WORKSPACE_BYTES}"
            )

    def run(
        self,
        activations: Tensor,
        weight: Tensor,
        out: Tensor,
        scale_w: Tensor | None = None,
        scale_x: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> None:
        """See `slidesparse.gemm.problem.Plan.run`."""
        stream = current_stream(self._index)
        try:
            self._native.run(
                activations.data_ptr(),
                weight.data_ptr(),
                out.data_ptr(),
                workspace(self._index, stream) if self.workspace else 0,
                stream,
                0 if scale_w is None else scale_w.data_ptr(),
                0 if scale_x is None else scale_x.data_ptr(),
                0 if bias is None else bias.data_ptr(),
            )
        except RuntimeError as error:
            raise LibraryError(str(error)) from None


class CudaBackend(TwoStep, ABC):
    """The base class of GPU backends, a `slidesparse.gemm.backend.Tunable`."""

    device_type = "cuda"
    sparse: bool
    outputs: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16, torch.float32)
    max_shape_distance: float = math.inf
    products: dict[str, tuple[str, ...]]  # type of the operands -> output types; serving uses the first

    @abstractmethod
    def version(self) -> str:
        """See `Tunable.version`."""

    def suits(self, problem: Problem, device: torch.device, algorithm: str) -> bool:
        """See `Tunable.suits`: always true, as the libraries refuse what they cannot run."""
        return True

    def unusable(self, device: torch.device, capability: tuple[int, int] | None = None) -> str | None:
        """See `Backend.unusable`: a GPU with sparse tensor cores, the library, its extension and Triton are needed."""
        if device.type != "cuda":
            return "it needs an NVIDIA GPU; the reference backend runs on this machine"
        if torch.version.cuda is None:
            return f"torch {torch.__version__} is a CPU build: {INSTALL_CUDA}"
        if capability is None and not torch.cuda.is_available():
            return (
                f"torch {torch.__version__}, built for CUDA {torch.version.cuda}, finds no GPU that it can use: "
                "nvidia-smi should list one, and its driver must support that CUDA version"
            )
        gpu_capability = capability or torch.cuda.get_device_capability(device)
        if gpu_capability < SPARSE_CAPABILITY:
            major, minor = gpu_capability
            return (
                f"this GPU has compute capability {major}.{minor}, without 2:4 sparse tensor cores, "
                "which 8.0 (Ampere) and later have: set DISABLE_SLIDESPARSE=1 to serve with vLLM's own kernels"
            )
        if not find_spec("triton"):
            return "Triton is not installed; install a CUDA build of torch, which brings it"
        return self.unusable_library(gpu_capability, loads=capability is None)

    def unusable_library(self, capability: tuple[int, int], loads: bool) -> str | None:
        """Return why the library cannot be used on GPUs of ``capability``, or None; load it if ``loads``."""
        try:
            if loads:
                self.version()
            else:
                build(self.name)
        except (LibraryError, ToolchainError) as error:
            return str(error)
        return None

    def output_types(self, dtype: str) -> tuple[str, ...]:
        """See `Tunable.output_types`."""
        return self.products.get(dtype, ())

    def unsplit(self, algorithm: str) -> str | None:
        """See `Tunable.unsplit`; by default no algorithm is a split-K form of another."""
        return None

    def require(self, problem: Problem) -> None:
        """Raise LibraryError unless the backend has products of these types."""
        if problem.out not in self.output_types(problem.dtype):
            raise LibraryError(f"{self.name} products are {self.products}, asked for {problem}")
