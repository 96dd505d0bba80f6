"""What the GEMM libraries of the GPU have in common: problems, algorithms, plans.

A `Problem` is one product with its types and epilogue, an algorithm one way in which a library computes it, named by
a short text that its author understands, and a `Plan` both, ready to run.  `slidesparse.gemm.cusparselt`,
`slidesparse.gemm.cublaslt` and `slidesparse.gemm.hopper` implement `Library`; tuning and benchmarks need no more than
this file.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Protocol

import torch
from torch import Tensor

# Names of element types, as tables and error messages spell them.
DTYPES = {
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "int32": torch.int32,
    "fp32": torch.float32,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
OPERANDS = ("int8", "fp8", "fp16", "bf16", "fp4")  # fp4 is E2M1, two to a byte
FP4_CAPABILITY = (10, 0)  # Blackwell


class LibraryError(RuntimeError):
    """A library refused a call, or is not here; with its own words, the shapes and the types."""


@dataclass(frozen=True)
class Problem:
    """out [m, n] = activations [m, k] @ weight [n, k].T, all row-major, K contiguous.

    ``k`` counts the columns that are multiplied, so K' for slided weights.
    """

    dtype: str  # of activations and weight, one of OPERANDS
    out: str  # a key of DTYPES
    n: int
    k: int
    m: int
    scale: str = (
        "none"  # what the epilogue multiplies by: "none", "channel" (scale_w) or "both" (scale_w, scale_x)
    )
    bias: bool = False  # whether the epilogue adds a bias [n]

    def __str__(self) -> str:
        epilogue = {"none": "", "channel": " * scale_w", "both": " * scale_w * scale_x"}[self.scale]
        epilogue += " + bias" if self.bias else ""
        return f"{self.dtype} [{self.m}, {self.k}] @ [{self.n}, {self.k}].T{epilogue} -> {self.out}"


@dataclass(frozen=True)
class Layout:
    """Which dimension of each matrix is contiguous in memory."""

    weight_k: bool = True  # K of the weight, stored [n, k]; else N, stored [k, n]
    activations_k: bool = True  # K of the activations, stored [m, k]; else M, stored [k, m]
    output_n: bool = True  # N of the output, stored [m, n]; else M, stored [n, m]

    @property
    def words(self) -> tuple[str, str, str]:
        """The contiguous dimensions of weight, activations and output, such as ("K", "M", "N")."""
        return "NK"[self.weight_k], "MK"[self.activations_k], "MN"[self.output_n]

    def __str__(self) -> str:
        weight, activations, output = self.words
        return f"weight {weight}-contiguous, activations {activations}-contiguous, output {output}-contiguous"


TN = Layout()  # what serving uses, as BLAS calls it: the weight transposed, the activations not
LAYOUTS = tuple(Layout(*flags) for flags in product((True, False), repeat=3))


def require_operand(dtype: torch.dtype) -> str:
    """The name of an operand's dtype.  Raises LibraryError for one that the libraries do not multiply."""
    for name in OPERANDS:
        if DTYPES.get(name) == dtype:
            return name
    raise LibraryError(f"the GEMM libraries multiply {', '.join(OPERANDS)}; found {dtype}: quantize it first")


def require_fp4(capability: tuple[int, int]) -> None:
    """Raise LibraryError: what FP4 needs, and that this version has no kernel that makes it."""
    if capability < FP4_CAPABILITY:
        raise LibraryError(
            f"FP4 (E2M1) products need compute capability 10.0 (Blackwell), this GPU has {capability[0]}."
            f"{capability[1]}; use int8 or fp8"
        )
    raise LibraryError(
        "FP4 (E2M1) needs block scales, which no quantizing kernel of this version writes; use int8 or fp8"
    )


class Plan(Protocol):
    """A problem and an algorithm, ready to run on one device."""

    algorithm: str
    workspace: int  # bytes it needs

    def run(
        self,
        activations: Tensor,
        weight: Tensor,
        out: Tensor,
        scale_w: Tensor | None = None,
        scale_x: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> None:
        """Launch on torch's current stream; never synchronizes, allocates nothing but the stream's workspace once.

        activations [m, k], weight as `Library.pack` gave it, out [m, n], in the plan's layout; scale_w [n],
        scale_x [m] float32 and bias [n] of out's dtype where the problem says so.  Shapes are those of the problem and
        are not checked again.
        """


class Library(Protocol):
    """A GEMM library."""

    name: str  # "cusparselt", "cublaslt", "hopper"
    sparse: bool  # whether it takes 2:4 weights (slided ones) instead of dense ones
    alignment: int  # the multiple that K, or K', of the problems that serving has is rounded up to

    def version(self) -> str:
        """Of the library that is loaded, such as "0.8.0".  Raises LibraryError when there is none."""

    def unusable(self, device: torch.device) -> str | None:
        """Why it cannot run on ``device``, in words with the remedy; None when it can.  Never raises."""

    def outputs(self, dtype: str) -> tuple[str, ...]:
        """The output types it has for operands of ``dtype``, the one that serving writes first."""

    def epilogue(self, dtype: str, out: str, device: torch.device | None = None) -> str:
        """The largest `Problem.scale` that it can apply itself for these types on ``device``, None: the current one."""

    def pack(self, weight: Tensor, layout: Layout = TN) -> Tensor:
        """A weight [n, k], 2:4 when `sparse`, in the form that `Plan.run` takes for plans of ``layout``."""

    def algorithms(self, problem: Problem, device: torch.device, layout: Layout = TN) -> list[str]:
        """Every algorithm the library offers for the problem; `plan` may still refuse some of them.

        Raises LibraryError when the library refuses the problem or the layout.
        """

    def unsplit(self, algorithm: str) -> str | None:
        """The algorithm of which ``algorithm`` is a way of splitting K; None for one that is no such way."""

    def plan(
        self,
        problem: Problem,
        device: torch.device,
        algorithm: str | None = None,
        layout: Layout = TN,
    ) -> Plan:
        """Make a plan, not cached.  ``algorithm`` None is the library's own heuristic.

        Raises LibraryError when the library refuses the problem, layout or algorithm, or wants a larger workspace than
        a stream has.
        """
