"""Code that the GPU backends share: devices and streams, whether they can run, and tuned algorithms."""

from __future__ import annotations

import math
from abc import abstractmethod
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from importlib.util import find_spec

import torch
from torch import Tensor

from slidesparse.errors import INSTALL_CUDA, EnvironmentFault
from slidesparse.gemm import tuned
from slidesparse.gemm.backend import Backend, TwoStep
from slidesparse.gemm.problem import ALL_2_4, NAMES, LibraryError, Plan, Problem, Tensors
from slidesparse.quantize import FP8, INT8

SPARSE_CAPABILITY = (8, 0)  # Ampere: the first sparse tensor cores
ACCUMULATOR_DTYPES = {INT8: torch.int32, FP8: torch.float32}  # type of the operands -> type of exact sums


def device_index(device: torch.device) -> int:
    """Return the index of a CUDA device; of the current one when ``device`` has no index."""
    return torch.cuda.current_device() if device.index is None else device.index


def current_stream(index: int) -> int:
    """Return the address of torch's current stream on CUDA device ``index``."""
    return torch._C._cuda_getCurrentRawStream(index)


def on_device(index: int) -> AbstractContextManager[object]:
    """Make CUDA device ``index`` the current one."""
    return nullcontext() if torch.cuda.current_device() == index else torch.cuda.device(index)


def is_capturing() -> bool:
    """Return whether a CUDA graph is being captured on the current stream, when no library may load code."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def no_gpu(needs_device: bool = True) -> str | None:
    """Return why torch can use no GPU, or None; whether there is one is only asked if ``needs_device``."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is a CPU build: {INSTALL_CUDA}"
    if needs_device and not torch.cuda.is_available():
        return (
            f"torch {torch.__version__}, built for CUDA {torch.version.cuda}, finds no GPU that it can use: "
            "nvidia-smi should list one, and its driver must support that CUDA version"
        )
    return None


def subject_of(backend: CudaBackend, device: torch.device) -> tuned.Subject:
    """Return the subject of a backend's tuned table for a GPU.  Raises EnvironmentFault if the library cannot load."""
    gpu, capability = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
    return tuned.Subject(backend.name, backend.version(), gpu, capability)


def tuned_algorithm(backend: CudaBackend, problem: Problem, device: torch.device) -> str | None:
    """Return the algorithm that `tuned.select_algorithm` finds, None for the backend's own choice; log an untuned one.

    Raises TableError for a damaged table.
    """
    subject, suits = subject_of(backend, device), partial(backend.suits, problem, device)
    algorithm, instead = tuned.select_algorithm(subject, problem, backend.max_shape_distance, suits)
    if instead:
        tuned.note_untuned(backend.name, problem.dtype, problem.n, problem.k, instead)
    return algorithm


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


class CudaBackend(Backend):
    """A backend on a GPU, whose GEMMs benchmarks time; `slidesparse tune` searches the algorithms of sparse ones."""

    device_type = "cuda"
    sparse: bool  # whether it multiplies 2:4 weights
    max_shape_distance: float = math.inf  # to a tuned shape, see `tuned.tuned_algorithm`
    products: dict[str, tuple[str, ...]]  # type of the operands -> output types; serving uses the first

    @abstractmethod
    def version(self) -> str:
        """Return the version, such as "0.8.0", that tuned tables are for.  Raises EnvironmentFault if there is none."""

    def require_library(self, capability: tuple[int, int], loads: bool) -> None:
        """Raise EnvironmentFault if a library that torch does not bring cannot be used on GPUs of ``capability``.

        It is loaded if ``loads``.
        """

    @abstractmethod
    def epilogue(self, dtype: str, out: str, device: torch.device | None = None) -> str:
        """Return the `Problem.scale` that its epilogue can apply, on the current device if ``device`` is None."""

    @abstractmethod
    def operand(self, weight: Tensor, blocks: str = ALL_2_4) -> Tensor:
        """Convert a weight [n, k] of a problem's ``blocks``, 2:4 if the backend is sparse, for a `Plan`."""

    @abstractmethod
    def algorithms(self, problem: Problem, device: torch.device) -> list[str]:
        """Return all algorithms for the problem; `plan` may still refuse some of them.

        Raises LibraryError when the problem is refused.
        """

    @abstractmethod
    def plan(self, problem: Problem, device: torch.device, algorithm: str | None = None) -> Plan:
        """Make a plan; nothing is cached.  ``algorithm`` None lets the backend choose.

        Raises LibraryError when it does not support the problem or the algorithm, or needs too large a workspace.
        """

    def suits(self, problem: Problem, device: torch.device, algorithm: str) -> bool:
        """Return whether an algorithm that was tuned for another shape may serve the problem."""
        return True  # the libraries refuse what they cannot run

    def unusable(self, device: torch.device, capability: tuple[int, int] | None = None) -> str | None:
        """See `Backend.unusable`: a GPU with sparse tensor cores, the library and Triton are needed."""
        if device.type != "cuda":
            return "it needs an NVIDIA GPU; the reference backend runs on this machine"
        if reason := no_gpu(needs_device=capability is None):
            return reason
        gpu_capability = capability or torch.cuda.get_device_capability(device)
        if gpu_capability < SPARSE_CAPABILITY:
            major, minor = gpu_capability
            return (
                f"this GPU has compute capability {major}.{minor}, without 2:4 sparse tensor cores, "
                "which 8.0 (Ampere) and later have: set DISABLE_SLIDESPARSE=1 to serve with vLLM's own kernels"
            )
        if not find_spec("triton"):
            return "Triton is not installed; install a CUDA build of torch, which brings it"
        try:
            self.require_library(gpu_capability, loads=capability is None)
        except EnvironmentFault as error:
            return str(error)
        return None

    def require(self, problem: Problem) -> None:
        """Raise LibraryError unless the backend has products of these types."""
        if problem.out not in self.products.get(problem.dtype, ()):
            raise LibraryError(f"{self.name} products are {self.products}, asked for {problem}")


class LibraryBackend(CudaBackend, TwoStep):
    """A backend on one of NVIDIA's GEMM libraries, cuBLASLt or cuSPARSELt, and a kernel that scales.

    For BF16 layers the GEMM writes BF16 if the library supports it, and otherwise INT32 or float32 sums.  Stock vLLM
    rounds once, at the end; rounding the sum to BF16 as well adds half an ulp of error, but halves the bytes between
    GEMM and scaling.
    """

    @abstractmethod
    def accumulate(self, q: Tensor, packed: Tensor, n: int, dtype: torch.dtype) -> Tensor:
        """Return q [M, K'] @ weight.T, [M, n] of ``dtype`` with strided rows; INT32 and float32 hold full sums.

        ``packed`` is the weight, from `pack`.  Raises LibraryError.
        """

    def scaled_matmul(self, tensors: Tensors) -> None:
        from slidesparse.kernels.dequant_bias import dequant_bias  # late: needs Triton

        q, packed, out, scale_w, scale_x, bias = tensors
        assert scale_w is not None
        assert scale_x is not None
        rounds = out.dtype == torch.bfloat16 and "bf16" in self.products[NAMES[q.dtype]]
        sums = out.dtype if rounds else ACCUMULATOR_DTYPES[q.dtype]
        dequant_bias(self.accumulate(q, packed, out.shape[1], sums), scale_x, scale_w, bias, out)
