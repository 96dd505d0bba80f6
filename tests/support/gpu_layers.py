"""Layers on the GPU for tests: weights as a backend packs them, the two steps of a layer, exact products."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar

import pytest
import torch
from torch import Tensor

from slidesparse import gemm, ops
from slidesparse.flags import AUTO, BACKEND
from slidesparse.gemm import backend as backends
from slidesparse.gemm import cuda, cusparselt
from slidesparse.gemm.hopper import native
from slidesparse.gemm.hopper.backend import multiply, plan_layer, product_layer
from slidesparse.gemm.hopper.native import TYPES
from slidesparse.gemm.problem import ALL_2_4, CODED, NAMES, SIX_EIGHT, Layer, Problem, Tensors
from slidesparse.pattern import SlideLayout, SlidePattern
from slidesparse.prune import prune
from slidesparse.quantize import FP8, INT8, quantize_rows
from slidesparse.slide import lift

LIBRARIES: dict[str, Any] = {name: gemm.get(name) for name in ("cusparselt", "cublaslt")}  # NVIDIA's
BACKENDS = (*LIBRARIES, "hopper")
HOPPER = (9, 0)
ON_CPU = 100  # largest number of rows for which exact products are computed on the CPU, by code other than the GPU's

T = TypeVar("T")


def gpu() -> torch.device:
    """The current GPU, with its index, which plans need."""
    return torch.device("cuda", torch.cuda.current_device())


def require_served() -> str:
    """Return the backend of sparse layers on this GPU, after building it, so that no measured process has to."""
    backend = os.environ.get(BACKEND) or AUTO
    if backend == AUTO:
        backend = "hopper" if torch.cuda.get_device_capability() == HOPPER else "cusparselt"
    gemm.require(backend, gpu())
    return backend


def require_hopper() -> None:
    """Skip the test unless the GPU is a Hopper GPU."""
    capability = torch.cuda.get_device_capability()
    if capability != HOPPER:
        pytest.skip(f"the Hopper kernels are for compute capability 9.0, this GPU has {capability}")


def codes(rows: int, columns: int, seed: int) -> Tensor:
    """[rows, columns] of every INT8 code, -128 included, on the GPU."""
    generator = torch.Generator("cuda").manual_seed(seed)
    numbers = torch.randint(-128, 128, (rows, columns), generator=generator, device=gpu(), dtype=torch.int16)
    return numbers.to(INT8)


def normal(rows: int, columns: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """[rows, columns] of normal numbers on the GPU."""
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(rows, columns, generator=generator, device=gpu()).to(dtype)


def exact(q: Tensor, weight: Tensor) -> Tensor:
    """q [M, K] @ weight [N, K].T in float64, where sums of INT8 products are exact and those of FP8 nearly so."""
    device = torch.device("cpu") if len(q) <= ON_CPU else q.device
    product = q.to(device).float().double() @ weight.to(device).float().double().t()
    return product.to(q.device)


def dense_sums(q: Tensor, weight: Tensor) -> Tensor:
    """q [M, K] @ weight [N, K].T by cuBLASLt: INT32, or float32 of FP8."""
    dense, dtype = LIBRARIES["cublaslt"], cuda.ACCUMULATOR_DTYPES[q.dtype]
    sums: Tensor = dense.accumulate(q, dense.pack(weight, None), len(weight), dtype)
    return sums


class RmsNorm(NamedTuple):
    """Quantize RMSNorm(x), or with a residual RMSNorm(x + residual)."""

    weight: Tensor  # [K] of x's dtype
    eps: float
    residual: Tensor | None = None  # [M, K] of x's dtype
    total: Tensor | None = None  # with a residual: contiguous memory [M, K] of x's dtype, for the sum


SILU_MUL = "silu_mul"  # quantize silu(gate) * up for x [M, 2 K], gate before up
Producer = RmsNorm | Literal["silu_mul"] | None


def hopper_quantize(x: Tensor, layer: Layer, producer: Producer = None) -> tuple[Tensor, Tensor]:
    """Quantize by the Hopper kernels alone: codes [M, columns] and scales [M, 1]."""
    m = x.shape[0]
    with cuda.on_device(x.get_device()):
        plan = plan_layer(layer._replace(n=0), x.get_device())
        q = x.new_empty(m, layer.columns, dtype=layer.dtype)
        scale = x.new_empty(m, 1, dtype=torch.float32)
        stream = cuda.current_stream(x.get_device())
        native.call(
            "quantize", plan, m, *input_arguments(x, producer), q.data_ptr(), scale.data_ptr(), stream
        )
    return q, scale


def coded_order(q: Tensor, layer: Layer) -> Tensor:
    """Put codes [M, K] into the order in which a coded weight is multiplied, [M, columns]."""
    right = layer.columns - layer.phase - q.shape[1]
    rows = torch.nn.functional.pad(q.view(torch.int8), (layer.phase, right))
    groups = rows.view(len(q), layer.columns // 32, 4, 2, 4)  # of eight columns, in two halves
    return groups.transpose(2, 3).reshape(len(q), layer.columns).view(q.dtype)


def run_hopper(plan: int, x: Tensor, packed: Tensor, scale: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Run a whole layer by the plan with this handle, without any checks, in scratch memory that is not zero."""
    size = native.library().slidesparse_hopper_scratch_bytes(plan, len(x))
    scratch = torch.full((size,), 1, dtype=torch.uint8, device=x.device)
    native.call(
        "linear",
        *(plan, len(x), *input_arguments(x, None), packed.data_ptr(), packed.numel(), scale.data_ptr()),
        *((None, 0) if bias is None else (bias.data_ptr(), TYPES[bias.dtype])),
        *(out.data_ptr(), TYPES[out.dtype], scratch.data_ptr(), cuda.current_stream(x.get_device())),
    )


def input_arguments(x: Tensor, producer: Producer) -> tuple[Any, ...]:
    """Return the kernels' arguments: x, type, stride, prologue, eps, weight of the norm, residual, its stride, sum."""
    tokens = x.data_ptr(), TYPES[x.dtype], x.stride(0)
    nothing, norm, add_norm, silu_mul = range(4)  # SlidesparsePrologue
    if producer is None or producer == SILU_MUL:
        return *tokens, silu_mul if producer else nothing, 0.0, None, None, 0, None
    gain, eps, residual, total = producer
    if residual is None or total is None:
        return *tokens, norm, eps, gain.data_ptr(), None, 0, None
    added = residual.data_ptr(), residual.stride(0), total.data_ptr()
    return *tokens, add_norm, eps, gain.data_ptr(), *added


@dataclass(frozen=True)
class PackedLayer:
    """A packed layer, and the weight it was packed from."""

    backend: str
    layer: Layer
    weight: Tensor  # [N, K], pruned, as it was before sliding
    packed: Tensor
    scale: Tensor  # [N, 1]

    @property
    def dtype(self) -> torch.dtype:
        return self.layer.dtype

    @property
    def layout(self) -> SlideLayout:
        return self.layer.layout

    @property
    def coded(self) -> bool:
        """Whether the weight is coded, for activations that are not lifted."""
        return self.backend == "hopper" and self.layer.length == SIX_EIGHT.length

    def lifted(self, q: Tensor) -> Tensor:
        """Lift codes [M, K] -> [M, K'] with the reference, in memory that ends with the last row.

        For a coded weight reorder them, [M, columns].
        """
        return coded_order(q, self.layer) if self.coded else lift(q, self.layout)

    def quantized(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [M, K] -> codes [M, columns] and scales [M, 1], by Triton's kernel."""
        if not self.coded:
            return backends.quantize(x, self.layer)
        q, scale_x = backends.quantize(x, Layer.of(self.layer.n, self.layer.k, None, 0, self.dtype, 4))
        return coded_order(q[:, : self.layer.k], self.layer), scale_x

    def product(self, q: Tensor, scale_x: Tensor, bias: Tensor | None, out: torch.dtype) -> Tensor:
        """Multiply the results of `quantized` by the weight."""
        y = q.new_empty(len(q), self.layer.n, dtype=out)
        tensors = Tensors(q, self.packed, y, self.scale, scale_x, bias)
        implementation: Any = gemm.get(self.backend)
        if self.backend != "hopper":
            implementation.scaled_matmul(tensors)
            return y
        q = cuda.pad(q, implementation.alignment).contiguous()
        blocks = CODED if self.coded else ALL_2_4
        problem = Problem(NAMES[self.dtype], NAMES[out], self.layer.n, *q.shape[::-1], "both", blocks=blocks)
        with cuda.on_device(q.get_device()):
            made = self.layer if self.coded else product_layer(problem)
            multiply(plan_layer(made, q.get_device()), tensors._replace(activations=q))
        return y

    def arguments(self, bias: Tensor | None, out: torch.dtype) -> tuple[Any, ...]:
        """Return the arguments of the backend's own operators after x."""
        return self.packed, self.scale, bias, [*self.layer], out

    def linear(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """The whole layer, x [M, K] -> [M, N]."""
        return ops.linear(x, self.packed, self.scale, bias, self.layer, self.backend)


def layer(backend: str, pattern: str, dtype: torch.dtype, n: int, k: int) -> PackedLayer:
    """Make a layer of INT8 weights of every code, or FP8 weights of normal numbers.

    The dense backend gets pruned weights that are not slid.  Skips the test if the backend is for other GPUs.
    """
    if backend == "hopper":
        require_hopper()
    parsed = SlidePattern.parse(pattern)
    if dtype == FP8:
        weight, scale = quantize_rows(prune(normal(n, k, n * k, torch.float32), parsed), dtype)
    else:
        weight = prune(codes(n, k, n * k), parsed)
        scale = torch.linspace(0.005, 0.015, n, device=gpu()).reshape(n, 1)
    implementation, slides = gemm.get(backend), None if backend == "cublaslt" else parsed
    made = implementation.layer(n, k, slides, 0, dtype)
    return PackedLayer(backend, made, weight, implementation.pack(weight, slides), scale)


def forget_plans() -> None:
    """Discard the plans of this thread, and the plans of the backend hopper on all threads."""
    cusparselt._thread.plan.cache_clear()
    native.library().slidesparse_hopper_forget()


def on_a_new_thread(function: Callable[[], T]) -> T:
    """Call ``function`` on a thread that has no handles and plans yet."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()
