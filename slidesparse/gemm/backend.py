"""The interface of backends: `LayerSpec` describes a linear layer, and a `Backend` runs it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from slidesparse import gemm, profiling, reference
from slidesparse.gemm.problem import TN, Layout, Plan, Problem
from slidesparse.kernels import Producer
from slidesparse.pattern import HARDWARE_LENGTH, MAX_LENGTH, SlideLayout, SlidePattern, round_up
from slidesparse.quantize import arithmetic_of
from slidesparse.slide import require_pattern

TWO_FOUR = SlidePattern(HARDWARE_LENGTH)  # 2:4: the identity, because its windows do not overlap


@dataclass(frozen=True)
class LayerSpec:
    """A linear layer as a backend sees it: [M, in_features] -> [M, out_features]."""

    out_features: int  # N
    in_features: int  # K
    pattern: SlidePattern | None  # None: the weight is dense
    # zero columns before the first: those of its block that belong to another tensor-parallel shard
    phase: int
    dtype: torch.dtype  # type of the weight and the quantized activations: int8 or float8_e4m3fn
    out_dtype: torch.dtype

    @property
    def layout(self) -> SlideLayout:
        """The windows that activations are lifted into; those of 2:4 and of a dense weight lift nothing."""
        return (self.pattern or TWO_FOUR).layout(self.in_features, self.phase if self.pattern else 0)

    def columns(self, alignment: int) -> int:
        """K' rounded up to a multiple of ``alignment``, the width of quantized activations."""
        return round_up(self.layout.slided, alignment)


@lru_cache(maxsize=1 << 12)
def layer_spec(
    n: int, k: int, length: int, phase: int, dtype: torch.dtype, out_dtype: torch.dtype
) -> LayerSpec:
    """Return the `LayerSpec` of a layer whose pattern has blocks of ``length``; cached, because every call needs one.

    Blocks longer than those of any other pattern are rows of 2_inf.
    """
    return LayerSpec(n, k, SlidePattern(length if length <= MAX_LENGTH else None), phase, dtype, out_dtype)


class Backend(Protocol):
    """A way to run a linear layer.  Implementations keep no state per call."""

    name: str
    device_type: str  # "cuda" or "cpu": the type of device for which it is chosen automatically
    takes_dense: bool  # whether it serves weights without a pattern
    fuses: bool  # whether `linear` fuses a producer with the quantization
    threads: bool  # whether each step of the model may run in a new thread
    alignment: int  # rows of quantized activations are zero-padded to a multiple of this many columns
    outputs: tuple[torch.dtype, ...]  # supported out_dtypes

    def unusable(self, device: torch.device, capability: tuple[int, int] | None = None) -> str | None:
        """Return why this backend cannot run on ``device``, with the remedy, or None when it can.  Never raises.

        Args:
            capability: the GPU's compute capability, if CUDA must not be initialized; then nothing is loaded.
        """

    def pack(self, spec: LayerSpec, weight: Tensor) -> Tensor:
        """Pack a weight [N, K] of ``spec.dtype`` into the one tensor that `linear` takes.

        Raises PatternError for a weight that breaks the pattern.
        """

    def linear(
        self,
        spec: LayerSpec,
        x: Tensor,
        packed: Tensor,
        scale_w: Tensor,
        bias: Tensor | None,
        producer: Producer = None,
    ) -> Tensor:
        """Quantize, multiply and scale: x [M, K] -> [M, N] of ``spec.out_dtype``.

        Args:
            x: [M, K] bfloat16, float16 or float32; [M, 2 K] for a `kernels.SiluMul`.
            packed: the weight, from `pack`.
            scale_w: [N, 1] float32.
            bias: [N] or None.
            producer: a norm or an activation to apply to x before it is quantized.
        """

    def scaled_matmul(
        self,
        q: Tensor,
        scale_x: Tensor,
        packed: Tensor,
        scale_w: Tensor,
        bias: Tensor | None,
        out_dtype: torch.dtype,
    ) -> Tensor:
        """Return (q @ weight.T) * scale_w * scale_x + bias, [M, N] of ``out_dtype``.

        q [M, columns] INT8 or FP8, scale_x [M, 1] float32; the rest as in `linear`.  M may be 0.
        """


class Tunable(Backend, Protocol):
    """A backend whose algorithms `slidesparse tune` and the benchmarks can search."""

    sparse: bool  # whether it multiplies 2:4 weights
    max_shape_distance: float  # to a tuned shape whose algorithm is used, see `tuned.nearest_algorithm`

    def suits(self, problem: Problem, device: torch.device, algorithm: str) -> bool:
        """Return whether an algorithm that was tuned for another shape may serve the problem."""

    def version(self) -> str:
        """Return the version, such as "0.8.0", that tuned tables are for.  Raises LibraryError if it cannot load."""

    def output_types(self, dtype: str) -> tuple[str, ...]:
        """Return the output types for operands of ``dtype``; serving uses the first."""

    def epilogue(self, dtype: str, out: str, device: torch.device | None = None) -> str:
        """Return the `Problem.scale` that its epilogue can apply, on the current device if ``device`` is None."""

    def operand(self, weight: Tensor, layout: Layout = TN) -> Tensor:
        """Convert a weight [n, k], 2:4 if the backend is sparse, for `Plan.run` of plans with this ``layout``."""

    def algorithms(self, problem: Problem, device: torch.device, layout: Layout = TN) -> list[str]:
        """Return all algorithms for the problem; `plan` may still refuse some of them.

        Raises LibraryError when the problem or the layout is refused.
        """

    def unsplit(self, algorithm: str) -> str | None:
        """Return an algorithm without its split-K; None for one that does not split K."""

    def plan(
        self, problem: Problem, device: torch.device, algorithm: str | None = None, layout: Layout = TN
    ) -> Plan:
        """Make a plan; nothing is cached.  ``algorithm`` None lets the backend choose.

        Raises LibraryError when it does not support the problem, the layout or the algorithm, or needs a larger
        workspace than a stream has.
        """


def quantize(
    x: Tensor, layout: SlideLayout, dtype: torch.dtype, columns: int, producer: Producer = None
) -> tuple[Tensor, Tensor]:
    """Quantize each token, and lift it into the windows of ``layout``.

    Rounds as stock vLLM does on x's device (`slidesparse.quantize`).  On a GPU, a Triton kernel does this, and the
    memory of the result is padded to the next bucket of tokens, so that the GEMM need not copy it.

    Args:
        x: [M, K] float; [M, 2 K] for a `kernels.SiluMul`.
        layout: the windows over K columns; a length of 4 at phase 0 is the identity.
        dtype: int8 or float8_e4m3fn.
        columns: the width of the result, at least ``layout.slided``; zeros fill the rest.
        producer: a norm or an activation to apply to x first, in torch operators.

    Returns:
        q [M, columns] of ``dtype``, scale [M, 1] float32.
    """
    with profiling.stage("quantize", x):
        x = reference.produce(x, producer)
        if x.is_cuda:
            from slidesparse.gemm import launches  # imported late, as it imports this module

            return launches.quantize(x, layout, dtype, columns)
        q, scale = reference.quant_slide(x, layout, dtype, arithmetic_of(x))
        if columns > layout.slided:
            q = torch.nn.functional.pad(q.view(torch.int8), (0, columns - layout.slided)).view(dtype)
        return q, scale


class TwoStep:
    """`Backend.linear` as two steps, for backends whose GEMM takes quantized activations."""

    name: str
    alignment: int
    fuses = False
    threads = False

    def linear(
        self: Backend,
        spec: LayerSpec,
        x: Tensor,
        packed: Tensor,
        scale_w: Tensor,
        bias: Tensor | None,
        producer: Producer = None,
    ) -> Tensor:
        """See `Backend.linear`."""
        q, scale_x = quantize(x, spec.layout, spec.dtype, spec.columns(self.alignment), producer)
        profiling.layer(packed, spec.out_features, q)
        return self.scaled_matmul(q, scale_x, packed, scale_w, bias, spec.out_dtype)


def require_unbroken_blocks(spec: LayerSpec, weight: Tensor, broken: int) -> None:
    """Raise PatternError, which locates the first, if a kernel counted ``broken`` blocks that break the pattern."""
    if broken:
        require_pattern(weight, spec.pattern or TWO_FOUR, "weight", spec.phase)
        raise AssertionError(f"the GPU found {broken} blocks that break {spec.pattern}, the CPU none")


def require_output(name: str, dtype: torch.dtype) -> None:
    """Raise BackendError when backend ``name`` cannot write outputs of the model's ``dtype``."""
    outputs = gemm.get(name).outputs
    if dtype not in outputs:
        raise gemm.BackendError(
            f"backend {name} writes {', '.join(map(str, outputs))}, this model computes in {dtype}; "
            "serve it with --dtype bfloat16 or float16"
        )
