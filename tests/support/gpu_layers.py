"""Layers on the GPU for tests: weights as a backend packs them, exact products, fresh threads."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar, cast

import pytest
import torch
from torch import Tensor

from slidesparse import gemm, ops
from slidesparse.flags import AUTO, BACKEND
from slidesparse.gemm import cuda as plans
from slidesparse.gemm.backend import LayerSpec, Tunable, quantize
from slidesparse.gemm.hopper import native
from slidesparse.gemm.problem import NAMES, Problem
from slidesparse.pattern import SlideLayout, SlidePattern
from slidesparse.prune import prune
from slidesparse.quantize import FP8, INT8, quantize_rows
from slidesparse.slide import lift_layout

LIBRARIES = {name: cast("Tunable", gemm.get(name)) for name in ("cusparselt", "cublaslt")}  # NVIDIA's
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
    """q [M, K] @ weight [N, K].T by cuBLASLt's own choice of kernel: INT32, or float32 of FP8."""
    a, b = plans.pad(q, 16, 16), plans.pad(weight, 16, 16)
    out = torch.empty(a.shape[0], b.shape[0], dtype=plans.ACCUMULATOR_DTYPES[q.dtype], device=q.device)
    problem = Problem(NAMES[q.dtype], NAMES[out.dtype], b.shape[0], a.shape[1], a.shape[0])
    LIBRARIES["cublaslt"].plan(problem, q.device).run(a, b, out)
    return out[: len(q), : len(weight)]


@dataclass(frozen=True)
class Layer:
    """A packed layer, and the weight it was packed from."""

    backend: str
    dtype: torch.dtype
    layout: SlideLayout
    weight: Tensor  # [N, K], pruned, as it was before sliding
    packed: Tensor
    scale: Tensor  # [N, 1]
    columns: int  # of codes; a field, as torch.compile could not trace a property that looks up the backend

    def lifted(self, q: Tensor) -> Tensor:
        """Lift codes [M, K] -> [M, K'] with the reference, in memory that ends with the last row."""
        return lift_layout(q, self.layout)

    def quantized(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [M, K] -> codes [M, columns] and scales [M, 1], by Triton's kernel."""
        return quantize(x, self.layout, self.dtype, self.columns)

    def product(self, q: Tensor, scale_x: Tensor, bias: Tensor | None, out: torch.dtype) -> Tensor:
        """Multiply the results of `quantized` by the weight."""
        return gemm.get(self.backend).scaled_matmul(q, scale_x, self.packed, self.scale, bias, out)

    def linear(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """The whole layer, x [M, K] -> [M, N]."""
        layout = self.layout
        return ops.linear(
            x,
            self.packed,
            self.scale,
            bias,
            layout.length,
            layout.phase,
            self.dtype,
            self.columns,
            self.backend,
        )


def layer(backend: str, pattern: str, dtype: torch.dtype, n: int, k: int) -> Layer:
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
    implementation = gemm.get(backend)
    spec = LayerSpec(n, k, None if backend == "cublaslt" else parsed, 0, dtype, torch.bfloat16)
    packed, columns = implementation.pack(spec, weight), spec.columns(implementation.alignment)
    return Layer(backend, dtype, spec.layout, weight, packed, scale, columns)


def forget_plans() -> None:
    """Discard the plans of this thread, and the plans of the backend hopper on all threads."""
    plans._thread_state.caches.clear()
    native.library().slidesparse_hopper_forget()


def on_a_new_thread(function: Callable[[], T]) -> T:
    """Call ``function`` on a thread that has no handles and plans yet."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()
