"""GEMM providers, one a file, behind one interface.

A provider holds a weight in the form it likes (`GemmProvider.pack`) and multiplies quantized activations with it.
A sparse provider is given slided [N, K'] weights, a dense one weights as they are; both get activations with columns
up to a multiple of `GemmProvider.alignment`.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from slidesparse.flags import BACKEND, KEEP_DENSE
from slidesparse.kernels import Producer
from slidesparse.pattern import SlideLayout, SlidePattern
from slidesparse.slide import require_pattern, slide

PROVIDERS = {
    "cusparselt": "slidesparse.gemm.cusparselt:CuSparseLt",
    "cublaslt": "slidesparse.gemm.cublaslt:CublasLt",
    "hopper": "slidesparse.gemm.hopper:Hopper",
    "stock": "slidesparse.gemm.stock:Stock",
    "reference": "slidesparse.gemm.reference:Reference",
}
FUSED = ("hopper",)  # whose providers are a `LinearProvider`; a constant, as torch.compile traces who asks


class BackendError(RuntimeError):
    """A backend that was asked for cannot run here; the message says what is missing and the remedy."""


class GemmProvider(Protocol):
    """What `slidesparse.ops` needs of a backend.  Implementations keep no state per call."""

    name: str
    alignment: int  # the multiple that the columns of activations are padded to, with zeros
    outputs: tuple[torch.dtype, ...]  # of `scaled_matmul`

    def unusable(self, device: torch.device) -> str | None:
        """Why this provider cannot run on ``device``, in words with the remedy; None when it can.  Never raises."""

    def pack(self, weight: Tensor) -> Tensor:
        """Turn a weight [N, K'] INT8 or FP8 E4M3 into the one tensor `scaled_matmul` wants."""

    def scaled_matmul(
        self,
        q: Tensor,
        scale_x: Tensor,
        weight: Tensor,
        scale_w: Tensor,
        bias: Tensor | None,
        out_dtype: torch.dtype,
    ) -> Tensor:
        """(q @ weight.T) * scale_w * scale_x + bias.

        q [M, K'] INT8 or FP8, scale_x [M, 1] float32, weight from `pack`, scale_w [N, 1] float32, bias [N] or
        None -> [M, N] of ``out_dtype``.  M may be 0.
        """


@runtime_checkable
class LinearProvider(Protocol):
    """A provider that runs a whole layer in one call."""

    def linear(
        self,
        x: Tensor,
        weight: Tensor,
        scale_w: Tensor,
        bias: Tensor | None,
        length: int,
        phase: int,
        dtype: torch.dtype,
        columns: int,
        out_dtype: torch.dtype,
        producer: Producer = None,
    ) -> Tensor:
        """What `slidesparse.ops.quant_slide` and then `GemmProvider.scaled_matmul` compute: x [M, K] -> [M, N].

        With a ``producer`` of what it makes of x, for `kernels.SiluMul` [M, 2 K].
        """


@runtime_checkable
class SlidingProvider(Protocol):
    """A sparse provider that slides weights on the GPU itself."""

    def slide_and_pack(self, weight: Tensor, layout: SlideLayout) -> tuple[Tensor, int]:
        """A pruned weight [N, K] -> the packed form of its windows, and how many blocks break the pattern."""


@cache
def provider(name: str) -> GemmProvider:
    """The provider called ``name``.  Raises BackendError for a name that is not known."""
    if name not in PROVIDERS:
        raise BackendError(f"backend {name!r} is not known; the backends are {', '.join(PROVIDERS)}")
    module, attribute = PROVIDERS[name].split(":")
    made: GemmProvider = getattr(import_module(module), attribute)()
    return made


@cache  # a check of a protocol takes the host 5 us
def linear_provider(name: str) -> LinearProvider:
    """The provider called ``name``, of FUSED.  Raises BackendError for one that runs layers in two calls."""
    found = provider(name)
    if not isinstance(found, LinearProvider):
        raise BackendError(
            f"backend {name} has no whole layers, {', '.join(FUSED)} has: use slidesparse.ops.linear"
        )
    return found


def missing_triton() -> str | None:
    """What GPU backends say without Triton, whose kernels quantize and scale for them; None when it is there."""
    return (
        None
        if find_spec("triton")
        else "Triton is not installed; install a CUDA build of torch, which brings it"
    )


def columns(name: str, slided: int) -> int:
    """The width of the activations that backend ``name`` takes for weights of ``slided`` columns."""
    return slided + -slided % provider(name).alignment


def require(name: str, device: torch.device) -> GemmProvider:
    """The provider, or BackendError with the reason when it cannot run on ``device``."""
    found = provider(name)
    reason = found.unusable(device)
    if reason:
        instead = f"; {BACKEND}=cusparselt takes NVIDIA's library instead" if name == "hopper" else ""
        raise BackendError(f"backend {name} cannot run on {device}: {reason}{instead}")
    return found


def require_output(name: str, dtype: torch.dtype) -> None:
    """Raise BackendError when backend ``name`` has no outputs of ``dtype``, the model's."""
    outputs = provider(name).outputs
    if dtype not in outputs:
        instead = f"unset {KEEP_DENSE}" if name == "stock" else f"take another backend ({BACKEND}=cusparselt)"
        raise BackendError(
            f"backend {name} writes {', '.join(map(str, outputs))}, this model computes in {dtype}; serve it with "
            f"--dtype bfloat16 or float16, or {instead}"
        )


def slide_and_pack(name: str, weight: Tensor, pattern: SlidePattern, phase: int, layer: str) -> Tensor:
    """A pruned weight [N, K] INT8 or FP8, slid into 2:4 windows and packed for the sparse backend ``name``.

    On a GPU it takes little memory beside the weight and the result.
    Raises PatternError, with what ``layer`` is called, when the weight breaks the pattern.
    """
    backend = provider(name)
    if weight.is_cuda and isinstance(backend, SlidingProvider):
        packed, broken = backend.slide_and_pack(weight, pattern.layout(weight.shape[1], phase))
        if broken:
            require_pattern(weight, pattern, layer, phase)
            raise AssertionError(
                f"{layer}: the GPU found {broken} blocks that break {pattern}, the check none"
            )
        return packed
    return backend.pack(slide(weight, pattern, phase, layer))
