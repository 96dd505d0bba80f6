"""The interface of backends, which run linear layers, and the two steps of those that take quantized activations."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from slidesparse import reference
from slidesparse.gemm.problem import MIN_INT8_ROWS, Layer, LibraryError, Tensors, bucket
from slidesparse.pattern import SlidePattern
from slidesparse.quantize import Arithmetic, arithmetic_of


class Backend(ABC):
    """A way to run a linear layer.  Implementations keep no state per call.

    The layers of one backend for each type of device, `slidesparse.ops.NATIVE`, are run by operators of their own; any
    other backend is a `TwoStep`.
    """

    name: str
    device_type: str  # "cuda" or "cpu": the type of device for which it is chosen automatically
    takes_dense: bool  # whether it serves weights without a pattern
    fuses = False  # whether its operators fuse a producer with the quantization
    threads = False  # whether each step of the model may run in a new thread
    alignment: int  # rows of quantized activations are zero-padded to a multiple of this many columns
    outputs: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16, torch.float32)
    coded = False  # whether 6:8 weights are coded, not slid, and those of milder patterns are stored dense

    @abstractmethod
    def unusable(self, device: torch.device, capability: tuple[int, int] | None = None) -> str | None:
        """Return why this backend cannot run on ``device``, with the remedy, or None when it can.  Never raises.

        Args:
            capability: the GPU's compute capability, if CUDA must not be initialized; then nothing is loaded.
        """

    @abstractmethod
    def pack(self, weight: Tensor, pattern: SlidePattern | None, phase: int = 0) -> Tensor:
        """Pack a weight [N, K] INT8 or FP8 into the one tensor that operators take.

        Args:
            pattern: what the weight obeys, None for a dense weight.
            phase: zero columns before the first, see `Layer`.

        Raises PatternError for a weight that breaks the pattern.
        """

    def pack_experts(self, weight: Tensor, pattern: SlidePattern | None, phase: int = 0) -> Tensor:
        """Pack the weights [E, N, K] of experts, each as `pack` does, into [E, ...]."""
        return torch.stack([self.pack(expert, pattern, phase) for expert in weight])

    def refuses_experts(
        self, experts: int, pattern: SlidePattern | None, dtype: torch.dtype, asked: bool
    ) -> str | None:
        """Return why vLLM serves that many experts of a pattern, None if unpruned, as text for the log; or None.

        Args:
            asked: whether a flag asks for our kernels.
        """
        return "which the backend does not run"

    def layer(self, n: int, k: int, pattern: SlidePattern | None, phase: int, dtype: torch.dtype) -> Layer:
        """Return the `Layer` of a weight [n, k] as this backend stores it."""
        return Layer.of(n, k, pattern, phase, dtype, self.alignment, self.coded)


class TwoStep(Backend):
    """A backend whose GEMM takes activations that `quantize` has quantized."""

    @abstractmethod
    def scaled_matmul(self, tensors: Tensors) -> None:
        """Write (activations @ weight.T) * scale_w * scale_x + bias, rounded once to out's dtype, to out.

        There is at least one token.
        """

    def linear(
        self,
        layer: Layer,
        x: Tensor,
        packed: Tensor,
        scale_w: Tensor,
        bias: Tensor | None,
        out_dtype: torch.dtype,
    ) -> Tensor:
        """Quantize, multiply and scale: x [M, k] bfloat16, float16 or float32 -> [M, n] of ``out_dtype``.

        Args:
            packed: the weight, from `Backend.pack`.
            scale_w: [n, 1] float32.
            bias: [n] or None.
        """
        out = x.new_empty(x.shape[0], layer.n, dtype=out_dtype)
        if x.shape[0]:
            q, scale_x = quantize(x, layer)
            self.scaled_matmul(Tensors(q, packed, out, scale_w, scale_x, bias))
        return out


def quantize(x: Tensor, layer: Layer, arithmetic: Arithmetic | None = None) -> tuple[Tensor, Tensor]:
    """Quantize each token, and lift it into the windows of ``layer``.

    Rounds as stock vLLM does on x's device (`slidesparse.quantize`).  On a GPU, a Triton kernel does this, and the
    memory of the result is padded to the next bucket of tokens, so that the GEMM need not copy it.

    Args:
        x: [M, k] bfloat16, float16 or float32.
        arithmetic: whose rounding to follow instead, on a CPU.

    Returns:
        q [M, columns] of the layer's dtype, scale [M, 1] float32.

    Raises LibraryError if x is not [M, k].
    """
    if x.dim() != 2 or x.shape[1] != layer.k:
        raise LibraryError(f"x is {tuple(x.shape)}; it must be [M, {layer.k}], the layer's in-features")
    if x.is_cuda:
        from slidesparse.kernels.quant_slide import quant_slide  # late: needs Triton

        return quant_slide(
            x, layer.layout, layer.dtype, layer.columns, max(bucket(x.shape[0]), MIN_INT8_ROWS)
        )
    q, scale = reference.quant_slide(x, layer.layout, layer.dtype, arithmetic or arithmetic_of(x))
    missing = layer.columns - layer.layout.slided
    return (torch.nn.functional.pad(q.view(torch.int8), (0, missing)).view(q.dtype) if missing else q), scale
