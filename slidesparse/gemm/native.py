"""What libraries have in common above their bindings: running a plan, and whether there is a GPU for it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from slidesparse.backends import SPARSE_CAPABILITY
from slidesparse.gemm import missing_triton, plans
from slidesparse.gemm.library import LibraryError, Problem, require_fp4


class NativePlan:
    """See `slidesparse.gemm.library.Plan`."""

    def __init__(self, native: Any, algorithm: str | None, index: int) -> None:
        self._native = native
        self._index = index
        self.algorithm = algorithm or ""
        self.workspace = int(native.workspace)
        if self.workspace > plans.WORKSPACE:
            raise LibraryError(
                f"algorithm {algorithm} wants a workspace of {self.workspace} bytes, a stream has {plans.WORKSPACE}"
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
        """See `slidesparse.gemm.library.Plan.run`."""
        stream = plans.stream_of(self._index)
        try:
            self._native.run(
                activations.data_ptr(),
                weight.data_ptr(),
                out.data_ptr(),
                plans.workspace(self._index, stream) if self.workspace else 0,
                stream,
                0 if scale_w is None else scale_w.data_ptr(),
                0 if scale_x is None else scale_x.data_ptr(),
                0 if bias is None else bias.data_ptr(),
            )
        except RuntimeError as error:
            raise LibraryError(str(error)) from None


class NativeLibrary(ABC):
    """The part of `slidesparse.gemm.library.Library` that most of them share."""

    name: str
    products: dict[str, tuple[str, ...]]  # operands' type -> output types, that of serving first

    @abstractmethod
    def version(self) -> str:
        """See `slidesparse.gemm.library.Library`."""

    def outputs(self, dtype: str) -> tuple[str, ...]:
        """See `slidesparse.gemm.library.Library`."""
        return self.products.get(dtype, ())

    def unsplit(self, algorithm: str) -> str | None:
        """None: no algorithm is another one's way of splitting K."""
        return None

    def require(self, problem: Problem, device: torch.device) -> None:
        """Raise LibraryError unless the library has products of these types, and the GPU too."""
        if problem.dtype == "fp4":
            require_fp4(torch.cuda.get_device_capability(device))
        if problem.out not in self.outputs(problem.dtype):
            raise LibraryError(f"{self.name} products are {self.products}, asked for {problem}")

    def unusable(self, device: torch.device) -> str | None:
        """Needs a GPU of compute capability 8.0 (for FP8 8.9, which vLLM asks for), library, extension, and Triton."""
        if device.type != "cuda" or not torch.cuda.is_available():
            return "it needs an NVIDIA GPU; the reference backend runs on this machine"
        capability = torch.cuda.get_device_capability(device)
        if capability < SPARSE_CAPABILITY:
            return (
                f"this GPU has compute capability {capability[0]}.{capability[1]}, without 2:4 sparse tensor cores, "
                "which 8.0 (Ampere) and later have: DISABLE_SLIDESPARSE=1 serves by vLLM's own kernels"
            )
        try:
            self.version()
        except LibraryError as error:
            return str(error)
        return missing_triton()
