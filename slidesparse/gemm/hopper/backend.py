"""Our sparse kernels for Hopper, csrc/hopper/: a layer is two launches, quantization and a GEMM that scales.

The packed weight has one format, `slidesparse.gemm.hopper.format`.  A layer has one plan for any number of tokens.  C++
keeps the plans and finds them by the sizes of a layer, which torch's operators are called with; Python makes a plan
when a weight is packed, or at the first call of a layer.  With programmatic dependent launch, a kernel starts before
the previous one has ended, so `pack` waits until the packed weight is written.
"""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache, lru_cache, partial

import torch
from torch import Tensor

from slidesparse import kernels, profiling
from slidesparse.blocks import BLOCK, dense_blocks
from slidesparse.gemm import cuda
from slidesparse.gemm.backend import TWO_FOUR, LayerSpec, require_unbroken_blocks
from slidesparse.gemm.cuda import CudaBackend
from slidesparse.gemm.hopper import format as hopper_format
from slidesparse.gemm.hopper import native
from slidesparse.gemm.hopper.native import TYPES, Layer
from slidesparse.gemm.problem import BLOCKS, DTYPES, NAMES, TN, Layout, LibraryError, Problem, require_operand
from slidesparse.kernels import Producer, RmsNorm, SiluMul
from slidesparse.pattern import HARDWARE_LENGTH, SlideLayout, round_up
from slidesparse.quantize import FP8, INT8
from slidesparse.slide import slide

HOPPER_CAPABILITY = (9, 0)  # sm_90a: neither earlier nor later GPUs have its instructions
VERSION = "4"  # version of the configurations; tables of other versions are not read
CANDIDATES = 16  # configurations that tuning tries for a problem
MAX_SHAPE_DISTANCE = 1.0  # see `tuned.nearest_algorithm`
# How much slower than the best one, by the cost model, a configuration of another shape may be.  One more row of tiles
# can need a second wave of clusters, which takes up to 1.9 times as long: the model foresees that.
MAX_PREDICTED = 1.1
MAX_CONFIGURATIONS = 4096  # more than there are
MAX_TABLE_TOKENS = 1 << 15  # the last row in the table of a plan, also used for more tokens
OUTPUTS = (torch.bfloat16, torch.float16)
ALIGNMENT = 16  # bytes: alignment of the rows that TMA reads

_planning = threading.Lock()


class HopperPlan:
    """See `slidesparse.gemm.problem.Plan`.  It runs any number of tokens."""

    workspace = 0  # the kernels allocate it themselves

    def __init__(self, problem: Problem, algorithm: str) -> None:
        self.algorithm = algorithm
        layer = _product_layer(problem.n, problem.k, DTYPES[problem.dtype])
        self._plan = native.Plan(layer, algorithm)

    def run(
        self,
        activations: Tensor,
        weight: Tensor,
        out: Tensor,
        scale_w: Tensor | None = None,
        scale_x: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> None:
        """See `slidesparse.gemm.problem.Plan.run`; out is BF16 or FP16, bias of any float type."""
        assert scale_w is not None
        assert scale_x is not None
        _multiply(self._plan.handle, activations, scale_x, weight, scale_w, bias, out)


class Hopper(CudaBackend):
    """See `slidesparse.gemm.backend.Tunable`."""

    name = "hopper"
    takes_dense = True
    fuses = True
    threads = True
    sparse = True
    max_shape_distance = MAX_SHAPE_DISTANCE
    # TMA reads 128 bytes of a row at a time, from rows that begin at multiples of 16.  Where they do not begin at
    # multiples of 128, each piece straddles two cache lines: the GEMM of 3584 x 3584 at 8:10 and 1024
    # tokens takes 37 us with rows of 5744 codes, 24 with rows of 5760, on an H200.
    alignment = BLOCK
    products = dict.fromkeys(("int8", "fp8"), tuple(NAMES[dtype] for dtype in OUTPUTS))
    outputs: tuple[torch.dtype, ...] = OUTPUTS

    def version(self) -> str:
        """See `Tunable.version`: the version of the configurations."""
        native.call("unusable")
        return VERSION

    def unusable_library(self, capability: tuple[int, int], loads: bool) -> str | None:
        """See `CudaBackend.unusable_library`: compute capability 9.0, the kernels or nvcc, and a driver for them."""
        if capability != HOPPER_CAPABILITY:
            return (
                "its kernels need compute capability 9.0 (Hopper), but this GPU has "
                f"{capability[0]}.{capability[1]}"
            )
        return super().unusable_library(capability, loads)

    def epilogue(self, dtype: str, out: str, device: torch.device | None = None) -> str:
        """See `Tunable.epilogue`: always "both" scales."""
        return "both"

    def operand(self, weight: Tensor, layout: Layout = TN) -> Tensor:
        """See `Tunable.operand`: packed (`slidesparse.gemm.hopper.format`), with dense blocks where needed."""
        require_operand(weight.dtype)
        _require_layout(layout)
        spec = LayerSpec(weight.shape[0], weight.shape[1], None, 0, weight.dtype, OUTPUTS[0])
        return pack_without_plan(spec, weight)

    def algorithms(self, problem: Problem, device: torch.device, layout: Layout = TN) -> list[str]:
        """See `Tunable.algorithms`: the CANDIDATES configurations that the cost model predicts to be fastest."""
        self._require_supported(problem, layout)
        with cuda.on_device(cuda.device_index(device)):
            return [configuration for configuration, _ in _candidates(problem, CANDIDATES)]

    def suits(self, problem: Problem, device: torch.device, algorithm: str) -> bool:
        """See `Tunable.suits`: whether the cost model predicts it to be nearly as fast as the best."""
        predicted = _predictions(problem, cuda.device_index(device))
        return predicted.get(algorithm, math.inf) <= MAX_PREDICTED * min(predicted.values(), default=0.0)

    def plan(
        self, problem: Problem, device: torch.device, algorithm: str | None = None, layout: Layout = TN
    ) -> HopperPlan:
        """See `slidesparse.gemm.backend.Tunable`; its own choice is the first of `algorithms`."""
        self._require_supported(problem, layout)
        with cuda.on_device(cuda.device_index(device)):
            return HopperPlan(problem, _choose_configuration(problem, algorithm))

    def _require_supported(self, problem: Problem, layout: Layout) -> None:
        self.require(problem)
        _require_layout(layout)
        if problem.scale != "both":
            raise LibraryError(f"the Hopper kernels scale by out-feature and token, asked for {problem}")

    def pack(self, spec: LayerSpec, weight: Tensor) -> Tensor:
        """See `Backend.pack`: the packed windows, N padded to whole strips and K' to whole blocks.

        A weight without a pattern is stored in blocks of 64 out-features x 128 columns, 2:4 where their zeros allow it.
        Little temporary memory is used.  Raises LibraryError for dtypes other than INT8 and FP8.
        """
        packed = pack_without_plan(spec, weight)
        if packed.is_cuda and packed.numel():
            with cuda.on_device(packed.get_device()):
                self._find_plan(_native_layer(spec, self.alignment), packed.device)
        return packed

    def scaled_matmul(
        self,
        q: Tensor,
        scale_x: Tensor,
        packed: Tensor,
        scale_w: Tensor,
        bias: Tensor | None,
        out_dtype: torch.dtype,
    ) -> Tensor:
        """See `Backend.scaled_matmul`.  Raises LibraryError for outputs other than BF16 and FP16."""
        m, n = q.shape[0], scale_w.shape[0]
        _require_output(out_dtype)
        out = q.new_empty(m, n, dtype=out_dtype)
        if m == 0:
            return out
        q = _align_for_tma(cuda.pad(q, self.alignment))
        with cuda.on_device(q.get_device()):
            plan = self._find_plan(_product_layer(n, q.shape[1], q.dtype), q.device)
            _require_operands(scale_w, bias, n, q.device)
            _multiply(plan, q, scale_x, packed, scale_w, bias, out)
        return out

    def linear(
        self,
        spec: LayerSpec,
        x: Tensor,
        packed: Tensor,
        scale_w: Tensor,
        bias: Tensor | None,
        producer: Producer = None,
    ) -> Tensor:
        """See `Backend.linear`.

        Raises LibraryError for outputs other than BF16 and FP16, and for tensors that the kernels do not take: vectors
        must be contiguous, scale_w float32, and a norm's weight, residual and sum of x's dtype.
        """
        layer, m = _native_layer(spec, self.alignment), x.shape[0]
        _require_output(spec.out_dtype)
        _require_input(x, layer.k, producer)
        out = x.new_empty(m, layer.n, dtype=spec.out_dtype)
        if m == 0:
            return out
        x = _with_unit_stride(x)
        with cuda.on_device(x.get_device()):
            plan = self._find_plan(layer, x.device)
            _require_operands(scale_w, bias, layer.n, x.device)
            if profiling.enabled():  # time both parts separately
                q, scale_x = _quantize(plan, x, producer, spec.dtype, layer.columns)
                profiling.layer(packed, layer.n, q)
                _multiply(plan, q, scale_x, packed, scale_w, bias, out)
                return out
            run_layer(plan, x, producer, packed, scale_w, bias, out)
        return out

    def quantize(
        self, x: Tensor, length: int, phase: int, dtype: torch.dtype, columns: int, producer: Producer = None
    ) -> tuple[Tensor, Tensor]:
        """The first part of `linear`, as `slidesparse.gemm.backend.quantize` returns it."""
        k = x.shape[1] // 2 if isinstance(producer, SiluMul) else x.shape[1]
        _require_input(x, k, producer)
        if dtype not in (INT8, FP8):
            raise LibraryError(f"the Hopper kernels quantize to {INT8} and {FP8}; asked for {dtype}")
        with cuda.on_device(x.get_device()):
            plan = self._find_plan(Layer(0, k, length, phase, dtype == FP8, columns), x.device)
            return _quantize(plan, _with_unit_stride(x), producer, dtype, columns)

    def _find_plan(self, layer: Layer, device: torch.device) -> int:
        """Return the handle of the plan for ``layer`` on ``device``, the current device; make it if there is none.

        Raises LibraryError, also if it would have to be made during CUDA graph capture, because that loads kernels.
        """
        find = native.library().slidesparse_hopper_find
        plan: int | None = find(cuda.device_index(device), *layer)
        if plan:
            return plan
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise LibraryError(
                f"no plan for {layer} while a CUDA graph is being captured; run the layer once before the capture"
            )
        with _planning:
            plan = find(cuda.device_index(device), *layer)  # another thread may have been faster
            if not plan:
                plan = native.make_plan(layer, self._configuration_table(layer, device))
                native.library().slidesparse_hopper_serve(plan)
        return plan

    def _configuration_table(self, layer: Layer, device: torch.device) -> list[tuple[int, tuple[str, ...]]]:
        """Return the configurations of a layer by number of tokens, see `native.make_plan`.

        They are the same for outputs in BF16 and FP16, with and without a bias.  Where no near shape that was tuned on
        this GPU or a similar one has one that suits, it is the one that the cost model predicts to be fastest.  Weights
        with dense blocks use those of 2:4 blocks unless they were tuned themselves; slid weights have no dense blocks.
        """
        table: list[tuple[int, tuple[str, ...]]] = []
        if layer.n == 0:
            return table
        dtype, columns = "fp8" if layer.fp8 else "int8", round_up(layer.columns, self.alignment)
        kinds = BLOCKS[1:] if kernels.quantizer_kind(layer.length, layer.phase) == "quant_only" else ()
        for m in _token_counts():
            problem = Problem(dtype, NAMES[OUTPUTS[0]], layer.n, columns, m, "both")
            algorithm = cuda.call_with_tuned(self, problem, device, partial(_choose_configuration, problem))
            row = dict.fromkeys(BLOCKS, algorithm)
            for blocks in kinds:
                row[blocks] = (
                    cuda.find_tuned_algorithm(self, replace(problem, blocks=blocks), device) or algorithm
                )
            if table and table[-1][1] == tuple(row.values()):
                table.pop()
            table.append((m, tuple(row.values())))
        return table


def _choose_configuration(problem: Problem, tuned: str | None) -> str:
    """Return ``tuned``, or for None the configuration that the cost model predicts to be fastest on this device.

    Raises LibraryError for one that does not fit the current device.
    """
    if tuned is None:
        return _candidates(problem, 1)[0][0]
    native.fit(tuned, DTYPES[problem.dtype])
    return tuned


def _candidates(problem: Problem, max_count: int) -> list[tuple[str, float]]:
    sizes = problem.n, problem.k, problem.m, DTYPES[problem.dtype]
    return native.candidates(*sizes, max_count, problem.blocks)


@lru_cache(maxsize=1)  # asked for each of the near shapes in turn
def _predictions(problem: Problem, device_index: int) -> dict[str, float]:
    """Return the microseconds that the cost model predicts, by configuration."""
    with cuda.on_device(device_index):
        return dict(_candidates(problem, MAX_CONFIGURATIONS))


def _token_counts() -> Iterator[int]:
    """Yield the numbers of tokens to look configurations up for: powers of two to 16, then the buckets."""
    m = 1
    while m <= MAX_TABLE_TOKENS:
        yield m
        m = 2 * m if m < cuda.MIN_ROWS else cuda.bucket(m + 1)


@cache
def _native_layer(spec: LayerSpec, alignment: int) -> Layer:
    layout = spec.layout
    return Layer(
        *(spec.out_features, spec.in_features, layout.length, layout.phase, spec.dtype == FP8),
        spec.columns(alignment),
    )


def _product_layer(n: int, columns: int, dtype: torch.dtype) -> Layer:
    """Return the layer of a GEMM alone, whose activations have been quantized and lifted already."""
    return Layer(n, columns, HARDWARE_LENGTH, 0, dtype == FP8, round_up(columns, ALIGNMENT))


def pack_without_plan(spec: LayerSpec, weight: Tensor) -> Tensor:
    """Pack a weight as `Hopper.pack` does, without making a plan."""
    if weight.dtype not in (INT8, FP8):
        raise LibraryError(
            f"a weight of {weight.dtype}; the Hopper kernels take {INT8} and {FP8}: quantize it"
        )
    dense = dense_blocks(weight) if spec.pattern is None else None
    if dense is not None and not bool(dense.any()):
        dense = None
    if not weight.is_cuda:
        if dense is not None:
            return hopper_format.pack_mixed(weight, dense)
        return hopper_format.pack(slide(weight, spec.pattern or TWO_FOUR, spec.phase))
    packed, broken = pack_by_kernel(weight, spec.layout, dense)
    require_unbroken_blocks(spec, weight, broken)
    return packed


def pack_by_kernel(weight: Tensor, layout: SlideLayout, dense: Tensor | None = None) -> tuple[Tensor, int]:
    """Pack a pruned weight [N, K] INT8 or FP8 on the GPU; also return how many of its blocks break the pattern.

    Args:
        dense: from `slidesparse.blocks.dense_blocks`: the blocks to store dense; None if all are 2:4.
    """
    weight = _with_unit_stride(weight)
    sizes = *weight.shape, layout.length, layout.phase
    packed_bytes, scratch_bytes = ctypes.c_int64(), ctypes.c_int64()
    native.library().slidesparse_hopper_pack_bytes(
        *sizes, ctypes.byref(packed_bytes), ctypes.byref(scratch_bytes)
    )
    if dense is None:
        packed = weight.new_empty(packed_bytes.value, dtype=torch.uint8)
    else:
        packed = hopper_format.allocate_mixed(dense)
    if not packed.numel():
        return packed, 0
    scratch = weight.new_empty(scratch_bytes.value, dtype=torch.uint8)
    broken = weight.new_zeros(1, dtype=torch.int32)
    with cuda.on_device(weight.get_device()):
        native.call(
            "pack",
            *(*sizes, weight.dtype == FP8, weight.data_ptr(), weight.stride(0), dense is not None),
            *(packed.data_ptr(), scratch.data_ptr(), broken.data_ptr(), _stream(weight)),
        )
    return packed, int(broken.item())  # synchronizes, see the module docstring


def run_layer(
    plan: int,
    x: Tensor,
    producer: Producer,
    packed: Tensor,
    scale_w: Tensor,
    bias: Tensor | None,
    out: Tensor,
) -> None:
    """Quantize, multiply and scale by the plan with this handle, on torch's current stream, without any checks."""
    m = x.shape[0]
    scratch = x.new_empty(native.library().slidesparse_hopper_scratch_bytes(plan, m), dtype=torch.uint8)
    native.call(
        "linear",
        *(plan, m, *_input_args(x, producer), packed.data_ptr(), packed.numel()),
        *(scale_w.data_ptr(), *_bias_args(bias), out.data_ptr(), TYPES[out.dtype]),
        *(scratch.data_ptr(), _stream(x)),
    )


def _quantize(
    plan: int, x: Tensor, producer: Producer, dtype: torch.dtype, columns: int
) -> tuple[Tensor, Tensor]:
    """Quantize x [M, K], whose last stride is 1, to codes [M, columns] and scales [M, 1]."""
    m = x.shape[0]
    with profiling.stage("quantize", x):
        q, scale = x.new_empty(m, columns, dtype=dtype), x.new_empty(m, 1, dtype=torch.float32)
        native.call(
            "quantize", plan, m, *_input_args(x, producer), q.data_ptr(), scale.data_ptr(), _stream(x)
        )
    return q, scale


def _multiply(
    plan: int, q: Tensor, scale_x: Tensor, packed: Tensor, scale_w: Tensor, bias: Tensor | None, out: Tensor
) -> None:
    """out = (q @ weight.T) * scale_w * scale_x + bias on torch's current stream."""
    if profiling.enabled():
        configuration = native.library().slidesparse_hopper_configuration(plan, q.shape[0], packed.numel())
        profiling.chose(configuration.decode())
    with profiling.stage("product", q):
        native.call(
            "product",
            *(plan, q.shape[0], q.data_ptr(), q.shape[1], scale_x.data_ptr()),
            *(packed.data_ptr(), packed.numel(), scale_w.data_ptr(), *_bias_args(bias)),
            *(out.data_ptr(), TYPES[out.dtype], _stream(q)),
        )


def _input_args(
    x: Tensor, producer: Producer
) -> tuple[int, int, int, int, float, int | None, int | None, int, int | None]:
    """Return the kernels' arguments: x, type, stride, prologue, eps, weight of the norm, residual, its stride, sum."""
    tokens = x.data_ptr(), TYPES[x.dtype], x.stride(0)
    if producer is None:
        return *tokens, native.NO_PROLOGUE, 0.0, None, None, 0, None
    if isinstance(producer, SiluMul):
        return *tokens, native.SILU_MUL, 0.0, None, None, 0, None
    gain, eps, residual, total = producer
    if residual is None or total is None:
        return *tokens, native.RMS_NORM, eps, gain.data_ptr(), None, 0, None
    added = residual.data_ptr(), residual.stride(0), total.data_ptr()
    return *tokens, native.ADD_RMS_NORM, eps, gain.data_ptr(), *added


def _bias_args(bias: Tensor | None) -> tuple[int | None, int]:
    return (None, 0) if bias is None else (bias.data_ptr(), TYPES[bias.dtype])


def _stream(x: Tensor) -> int:
    return cuda.current_stream(x.get_device())


def _with_unit_stride(x: Tensor) -> Tensor:
    """Return x, or a copy if its last stride is not 1."""
    return x if x.stride(1) == 1 else x.contiguous()


def _align_for_tma(q: Tensor) -> Tensor:
    """Return q, or a copy where TMA cannot read it: rows with gaps, or an address that is not aligned."""
    if q.is_contiguous() and q.data_ptr() % ALIGNMENT == 0:
        return q
    return q.clone(memory_format=torch.contiguous_format)


def _require_layout(layout: Layout) -> None:
    if layout != TN:
        raise LibraryError(f"the Hopper kernels have one layout: {TN}; asked for {layout}")


def _require_output(dtype: torch.dtype) -> None:
    if dtype not in OUTPUTS:
        raise LibraryError(
            f"the Hopper kernels write {' or '.join(NAMES[output] for output in OUTPUTS)}, asked for {dtype}: "
            "use the backend cusparselt for it"
        )


def _require_input(x: Tensor, k: int, producer: Producer) -> None:
    """Raise LibraryError unless the quantizer takes x and the tensors of its producer."""
    width = 2 * k if isinstance(producer, SiluMul) else k
    if x.dtype not in TYPES or x.shape[1] != width:
        raise LibraryError(
            f"x is {x.dtype} {tuple(x.shape)}; it must be [M, {width}] of {_join_types(TYPES)}"
            + (", gates before as many values" if isinstance(producer, SiluMul) else "")
        )
    if not isinstance(producer, RmsNorm):
        return
    gain, _, residual, total = producer
    if gain.shape != (k,) or gain.dtype != x.dtype or not gain.is_contiguous() or gain.device != x.device:
        raise LibraryError(
            f"a norm's weight is {_describe(gain)}; it must be [{k}] of {x.dtype}, contiguous, on {x.device}: compute "
            "the norm outside of the layer"
        )
    if residual is None:
        return
    assert total is not None
    for name, tensor in (("residual", residual), ("sum", total)):
        if (
            tensor.shape != x.shape
            or tensor.dtype != x.dtype
            or tensor.device != x.device
            or tensor.stride(1) != 1
        ):
            raise LibraryError(f"the {name} is {_describe(tensor)}; it must be as x, {_describe(x)}")
    if not total.is_contiguous():
        raise LibraryError(f"the sum is {_describe(total)}; it must be contiguous")


def _require_operands(scale_w: Tensor, bias: Tensor | None, n: int, device: torch.device) -> None:
    """Raise LibraryError unless the GEMM takes these scales and this bias."""
    for name, vector, dtypes in (("scale_w", scale_w, (torch.float32,)), ("bias", bias, tuple(TYPES))):
        if vector is not None and (
            vector.numel() != n
            or vector.dtype not in dtypes
            or vector.device != device
            or not vector.is_contiguous()
        ):
            raise LibraryError(
                f"{name} is {_describe(vector)}; it must hold {n} elements of {_join_types(dtypes)}, contiguous, "
                f"on {device}"
            )


def _describe(tensor: Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)} with strides {tensor.stride()} on {tensor.device}"


def _join_types(dtypes: Iterable[torch.dtype]) -> str:
    return " or ".join(map(str, dtypes))
