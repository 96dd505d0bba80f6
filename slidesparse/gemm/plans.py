"""What calls of the GEMM libraries share: token buckets, per-thread plan caches, per-stream workspaces.

A plan is made for one number of tokens, and prompts have any: activations are therefore padded to buckets, 16 sizes an
octave, so that an octave of lengths makes 16 plans and at most 1/16 of the rows are padding (below 256 tokens:
up to 15 rows, which a tensor-core tile computes anyway).
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import math
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cache
from types import ModuleType
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from slidesparse import toolchain
from slidesparse.gemm import tuned
from slidesparse.gemm.library import Library, LibraryError, Plan, Problem
from slidesparse.quantize import FP8, INT8

LEAST_ROWS = 16
PLANS = 1024  # of a thread, device and library; a plan is some KB of host memory
WORKSPACE = 64 << 20  # bytes, of a stream; algorithms that want more are refused

SUMS = {INT8: torch.int32, FP8: torch.float32}  # what full accumulators are

T = TypeVar("T")


def bucket(m: int) -> int:
    """The rows that a product of ``m`` tokens is planned for, m or some more; 0 for none."""
    if m <= LEAST_ROWS:
        return LEAST_ROWS if m else 0
    step = max(LEAST_ROWS, 1 << ((m - 1).bit_length() - 5))
    return -(-m // step) * step


@cache
def extension(name: str) -> ModuleType:
    """The compiled module ``_name`` with its library loaded: installed, or built now.  Raises LibraryError."""
    try:
        module = _installed(name) or _built(name)
        major = int(torch.version.cuda.split(".")[0]) if torch.version.cuda else None
        module.load(toolchain.find_library(name, major).path)
    except (toolchain.ToolchainError, ImportError, RuntimeError) as error:
        raise LibraryError(str(error)) from None
    return module


def _installed(name: str) -> ModuleType | None:
    """The module built at install time, unless its sources have changed since."""
    full = f"slidesparse.gemm._{name}"
    if importlib.util.find_spec(full) is None:
        return None
    module = importlib.import_module(full)
    return module if toolchain.sources_digest() == module.SOURCES else None


def _built(name: str) -> ModuleType:
    path = str(toolchain.build(name))
    loader = importlib.machinery.ExtensionFileLoader(f"_{name}", path)
    spec = importlib.util.spec_from_file_location(f"_{name}", path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    sys.modules.setdefault(f"slidesparse.gemm._{name}_built", module)
    return module


class PlanCache(Generic[T]):
    """The plans of one thread, device and library, the least recently used dropped beyond ``capacity``."""

    def __init__(self, capacity: int = PLANS) -> None:
        self.capacity = capacity
        self._plans: OrderedDict[Hashable, T] = OrderedDict()

    def __len__(self) -> int:
        return len(self._plans)

    def get(self, key: Hashable, make: Callable[..., T], *arguments: Any) -> T:
        """The plan of ``key``, made by ``make(*arguments)`` when there is none.

        Raises LibraryError instead of making one while a CUDA graph is captured: libraries load code then.
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


class _Local(threading.local):
    """A thread's own handles and plans, by (library, device index)."""

    def __init__(self) -> None:
        self.handles: dict[tuple[str, int], Any] = {}
        self.caches: dict[tuple[str, int], PlanCache[Any]] = {}


_local = _Local()


def handle(name: str, index: int) -> Any:
    """This thread's handle of library ``name`` on CUDA device ``index``.  Raises LibraryError."""
    found = _local.handles.get((name, index))
    if found is None:
        module = extension(name)
        with torch.cuda.device(index):
            torch.cuda.current_blas_handle()  # brings the device's context up
            found = _local.handles[name, index] = call(module.Handle)
    return found


def plans(name: str, index: int) -> PlanCache[Any]:
    """This thread's plans of library ``name`` on CUDA device ``index``."""
    found = _local.caches.get((name, index))
    if found is None:
        found = _local.caches[name, index] = PlanCache()
    return found


def call(function: Callable[..., T], *arguments: Any) -> T:
    """``function(*arguments)`` of an extension, its error a LibraryError."""
    try:
        return function(*arguments)
    except RuntimeError as error:
        raise LibraryError(str(error)) from None


def index_of(device: torch.device) -> int:
    """The index of a CUDA device; of the current one when ``device`` names none."""
    return torch.cuda.current_device() if device.index is None else device.index


def stream_of(index: int) -> int:
    """The address of torch's current stream on CUDA device ``index``."""
    return torch._C._cuda_getCurrentRawStream(index)


_workspaces: dict[tuple[int, int], Tensor] = {}
_workspaces_lock = threading.Lock()


def workspace(index: int, stream: int) -> int:
    """The address of the workspace of a stream: made once, never moved, as captured graphs hold it."""
    found = _workspaces.get((index, stream))
    if found is None:
        with _workspaces_lock:
            found = _workspaces.get((index, stream))
            if found is None:
                made = torch.empty(WORKSPACE, dtype=torch.uint8, device=torch.device("cuda", index))
                found = _workspaces[index, stream] = made
    return found.data_ptr()


def on_device(index: int) -> AbstractContextManager[object]:
    """Make CUDA device ``index`` the current one."""
    return nullcontext() if torch.cuda.current_device() == index else torch.cuda.device(index)


def with_rows(x: Tensor, rows: int) -> Tensor:
    """x [M, K] contiguous, with at least ``rows`` readable rows behind its address; copied when it has not."""
    m, k = x.shape
    there = x.untyped_storage().nbytes() - x.storage_offset() * x.element_size()
    if x.is_contiguous() and there >= rows * k * x.element_size():
        return x
    padded = x.new_empty(rows, k)
    padded[:m].copy_(x)
    return padded


def pad(x: Tensor, columns: int, rows: int = 1) -> Tensor:
    """x [M, K] of one-byte elements with zeros up to multiples of ``columns`` and ``rows``; x itself if it fits."""
    missing = (0, -x.shape[1] % columns, 0, -x.shape[0] % rows)
    if not any(missing):
        return x
    return torch.nn.functional.pad(x.view(torch.int8), missing).view(x.dtype)


def tuned_plan(library: Library, problem: Problem, device: torch.device, within: float = math.inf) -> Plan:
    """The plan by the algorithm that tuning found.

    For an untuned shape, which is logged once, by that of the nearest tuned one if that is ``within`` reach (see
    `tuned.neighbour`), else by the one for fewer tokens, else by the library's heuristic.
    A bias changes no algorithm, so problems with one look theirs up without.
    """
    gpu, capability = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
    subject = (library.name, library.version(), gpu, capability)
    plain = replace(problem, bias=False)
    algorithm = tuned.choice(*subject, plain)
    if algorithm is None:
        algorithm = tuned.neighbour(*subject, plain, within)
        instead = "its own heuristic" if algorithm is None else "that of the nearest tuned shape"
        if algorithm is None and (algorithm := tuned.choice(*subject, plain, any_tokens=True)):
            instead = "that for fewer tokens"
        tuned.note_untuned(library.name, problem, instead)
    try:
        return library.plan(problem, device, algorithm)
    except (
        LibraryError
    ) as error:  # tuned for another shape or number of tokens, which may allow what this one does not
        if algorithm is None:
            raise
        tuned.note_refused(library.name, problem, algorithm, str(error))
        return library.plan(problem, device)
