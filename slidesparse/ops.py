"""The torch operators ``torch.ops.slidesparse.*``: what graphs see, and the only place that dispatches.

A sparse linear layer is two calls, [M, K] -> [M, N], or one where the backend has it (`slidesparse.gemm.FUSED`)::

    q, s_x = torch.ops.slidesparse.quant_slide(x, length, phase, dtype, columns)
    y: Tensor = torch.ops.slidesparse.scaled_matmul(q, s_x, weight, s_w, bias, out_dtype, backend)

    y: Tensor = torch.ops.slidesparse.linear(x, weight, s_w, bias, length, phase, dtype, columns, out_dtype, backend)

A layer that keeps its dense weight as well is one call, which takes the weight that is faster for M tokens::

    y: Tensor = torch.ops.slidesparse.sparse_or_dense(x, weight, dense, s_w, bias, ..., backend, dense_backend)

Those that compute a norm or an activation as well are in `slidesparse.fused_ops`.
Whole layers are called by C++ where the kernels' library is loaded (`slidesparse.gemm.hopper_operators`).
They are opaque to torch.compile, with fakes that are symbolic in M, so one graph serves every number of tokens.
They choose nothing from the environment: what is to run comes with the call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from slidesparse import gemm, kernels, profiling, reference
from slidesparse.gemm import crossover, hopper_operators
from slidesparse.gemm.plans import bucket
from slidesparse.kernels import Producer
from slidesparse.pattern import HARDWARE_LENGTH, SlideLayout
from slidesparse.quantize import arithmetic_of

ABI = 6  # of operators and packed weights; part of vLLM's compile-cache key

NAMESPACE = hopper_operators.NAMESPACE
# Parts of schemas: how a row is quantized, and a layer that begins with that.
WINDOWS = "SymInt length, SymInt phase, ScalarType dtype, SymInt columns"
LAYER = f"Tensor weight, Tensor scale_w, Tensor? bias, {WINDOWS}, ScalarType out_dtype, str backend"
if "_library" not in globals():  # a reload keeps the operators: they go when their library object does
    _library = torch.library.Library(NAMESPACE, "FRAGMENT")


def quant_slide(
    x: Tensor, length: int, phase: int, dtype: torch.dtype, columns: int
) -> tuple[Tensor, Tensor]:
    """Quantize each token and lift it into the windows of blocks of ``length`` after ``phase`` zero columns.

    x [M, K] float -> q [M, columns] of ``dtype`` (torch.int8 or torch.float8_e4m3fn), scale [M, 1] float32.
    ``columns`` is K' rounded up to what the backend wants (`gemm.GemmProvider.alignment`); zeros fill the rest.
    A length of 4 at phase 0 lifts nothing: the dense path.
    Rounds as stock vLLM does on x's device (`slidesparse.quantize`).
    """
    with profiling.stage("quantize", x):
        return quantize(x, length, phase, dtype, columns)


def quantize(
    x: Tensor, length: int, phase: int, dtype: torch.dtype, columns: int, producer: Producer = None
) -> tuple[Tensor, Tensor]:
    """`quant_slide` of what ``producer`` makes of x; see `slidesparse.kernels`.

    On a GPU by Triton, into memory that reaches to the next bucket of tokens, so that no GEMM need copy it to pad it.
    """
    if x.is_cuda:
        return kernels.quantize(x, length, phase, dtype, columns, bucket(x.shape[0]), producer)
    x = reference.produce(x, producer)
    layout = SlideLayout(x.shape[1], phase, length)
    q, scale = reference.quant_slide(x, layout, dtype, arithmetic_of(x))
    if columns > layout.slided:
        q = torch.nn.functional.pad(q.view(torch.int8), (0, columns - layout.slided)).view(dtype)
    return q, scale


def quant_slide_fake(
    x: Tensor, length: int, phase: int, dtype: torch.dtype, columns: int
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape[0], columns, dtype=dtype), x.new_empty(x.shape[0], 1, dtype=torch.float32)


def scaled_matmul(
    q: Tensor,
    scale_x: Tensor,
    weight: Tensor,
    scale_w: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    backend: str,
) -> Tensor:
    """(q @ weight.T) * scale_w * scale_x + bias, by ``backend`` (see `slidesparse.gemm`).

    q [M, K'] INT8 or FP8, scale_x [M, 1], weight as the backend packed it, scale_w [N, 1] float32, bias [N] or
    None -> [M, N] of ``out_dtype``.
    """
    profiling.layer(weight, scale_w.shape[0], q)
    return gemm.provider(backend).scaled_matmul(q, scale_x, weight, scale_w, bias, out_dtype)


def _scaled_matmul_fake(q: Tensor, scale_x: Tensor, weight: Tensor, scale_w: Tensor, *rest: Any) -> Tensor:
    _bias, out_dtype, _backend = rest
    return q.new_empty(q.shape[0], scale_w.shape[0], dtype=out_dtype)


def whole_layer(
    x: Tensor,
    producer: Producer,
    weight: Tensor,
    scale_w: Tensor,
    bias: Tensor | None,
    length: int,
    phase: int,
    dtype: torch.dtype,
    columns: int,
    out_dtype: torch.dtype,
    backend: str,
) -> Tensor:
    """`quantize` and `scaled_matmul` in one call of ``backend``, one of `slidesparse.gemm.FUSED`."""
    return gemm.linear_provider(backend).linear(
        x, weight, scale_w, bias, length, phase, dtype, columns, out_dtype, producer
    )


def _linear(x: Tensor, *layer: Any) -> Tensor:
    return whole_layer(x, None, *layer)


def linear_fake(x: Tensor, weight: Tensor, scale_w: Tensor, *rest: Any) -> Tensor:
    *_bias_and_windows, out_dtype, _backend = rest
    return x.new_empty(x.shape[0], scale_w.shape[0], dtype=out_dtype)


def _sparse_or_dense(
    x: Tensor,
    weight: Tensor,
    dense: Tensor,
    scale_w: Tensor,
    bias: Tensor | None,
    length: int,
    phase: int,
    dtype: torch.dtype,
    columns: int,
    out_dtype: torch.dtype,
    backend: str,
    dense_backend: str,
) -> Tensor:
    """x [M, K] -> [M, N] by ``weight`` or by ``dense``, [N, K] as ``dense_backend`` packed it.

    Whichever `slidesparse.gemm.crossover` measured to be faster for M tokens; sparse where it did not measure.
    """
    m, k = x.shape
    if crossover.prefers_dense(crossover.Shape.of(scale_w, k, dtype, columns, backend), m):
        return dense_linear(x, dense, scale_w, bias, dtype, out_dtype, dense_backend)
    return sparse_linear(x, weight, scale_w, bias, length, phase, dtype, columns, out_dtype, backend)


def _sparse_or_dense_fake(x: Tensor, weight: Tensor, dense: Tensor, scale_w: Tensor, *rest: Any) -> Tensor:
    *_bias_and_windows, out_dtype, _backend, _dense_backend = rest
    return x.new_empty(x.shape[0], scale_w.shape[0], dtype=out_dtype)


def sparse_linear(
    x: Tensor,
    weight: Tensor,
    scale_w: Tensor,
    bias: Tensor | None,
    length: int,
    phase: int,
    dtype: torch.dtype,
    columns: int,
    out_dtype: torch.dtype,
    backend: str,
) -> Tensor:
    """x [M, K] -> [M, N] by a sparse weight that ``backend`` packed."""
    if backend in gemm.FUSED:
        return _linear(x, weight, scale_w, bias, length, phase, dtype, columns, out_dtype, backend)
    q, scale_x = quant_slide(x, length, phase, dtype, columns)
    return scaled_matmul(q, scale_x, weight, scale_w, bias, out_dtype, backend)


def dense_linear(
    x: Tensor,
    dense: Tensor,
    scale_w: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    out_dtype: torch.dtype,
    backend: str,
) -> Tensor:
    """x [M, K] -> [M, N] by a dense weight that ``backend`` packed."""
    k = x.shape[1]
    q, scale_x = quant_slide(x, HARDWARE_LENGTH, 0, dtype, gemm.columns(backend, k + -k % HARDWARE_LENGTH))
    return scaled_matmul(q, scale_x, dense, scale_w, bias, out_dtype, backend)


def register(name: str, schema: str, implementation: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Define an operator once a process, however often the plugin is loaded."""
    if hasattr(getattr(torch.ops, NAMESPACE), name):
        return
    replaceable = name in hopper_operators.OPERATORS
    names = [name, name + hopper_operators.BY_PYTHON] if replaceable else [name]
    for one in names:
        _library.define(one + schema, tags=(torch.Tag.pt2_compliant_tag,))
        torch.library.register_fake(f"{NAMESPACE}::{one}", fake, lib=_library)
        _library.impl(one, implementation, "CPU")
    if replaceable:
        hopper_operators.implement(name, implementation)
        implementation = hopper_operators.told(implementation)
    _library.impl(names[-1], implementation, "CUDA")


register(
    "quant_slide",
    f"(Tensor x, {WINDOWS}) -> (Tensor, Tensor)",
    quant_slide,
    quant_slide_fake,
)
register(
    "scaled_matmul",
    "(Tensor q, Tensor scale_x, Tensor weight, Tensor scale_w, Tensor? bias, ScalarType out_dtype, str backend)"
    " -> Tensor",
    scaled_matmul,
    _scaled_matmul_fake,
)
register(
    "linear",
    f"(Tensor x, {LAYER}) -> Tensor",
    _linear,
    linear_fake,
)
register(
    "sparse_or_dense",
    "(Tensor x, Tensor weight, Tensor dense, Tensor scale_w, Tensor? bias, SymInt length, SymInt phase,"
    " ScalarType dtype, SymInt columns, ScalarType out_dtype, str backend, str dense_backend) -> Tensor",
    _sparse_or_dense,
    _sparse_or_dense_fake,
)


def linear(
    x: Tensor,
    weight: Tensor,
    scale_w: Tensor,
    bias: Tensor | None,
    length: int,
    phase: int,
    dtype: torch.dtype,
    columns: int,
    backend: str,
    dense: Tensor | None = None,
    dense_backend: str = "",
) -> Tensor:
    """A whole layer: x [..., K] -> [..., N] of x's dtype.  The arguments are those of the operators."""
    tokens = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    y: Tensor
    if dense is not None:
        y = torch.ops.slidesparse.sparse_or_dense(
            *(
                tokens,
                weight,
                dense,
                scale_w,
                bias,
                length,
                phase,
                dtype,
                columns,
                x.dtype,
                backend,
                dense_backend,
            )
        )
    elif backend in gemm.FUSED:
        y = torch.ops.slidesparse.linear(
            tokens, weight, scale_w, bias, length, phase, dtype, columns, x.dtype, backend
        )
    else:
        q, scale_x = torch.ops.slidesparse.quant_slide(tokens, length, phase, dtype, columns)
        y = torch.ops.slidesparse.scaled_matmul(q, scale_x, weight, scale_w, bias, x.dtype, backend)
    return y if x.dim() == 2 else y.view(*x.shape[:-1], scale_w.shape[0])
