"""Our own sparse kernels for Hopper, csrc/hopper/: a layer in two launches and one call, scales and bias in the second.

The weight is held in one form, `slidesparse.gemm.hopper_format`, from which few tokens and many are multiplied.  Any
number of tokens runs as it is; the number only chooses a configuration (`slidesparse.gemm.hopper_configs`) from the
tuned table.  Kernels start before the one in front has ended (`slidesparse.gemm.hopper_plans`), so `pack` waits until a
packed weight has been written.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache

import torch
from torch import Tensor

from slidesparse import kernels, profiling
from slidesparse.backends import HOPPER_CAPABILITY
from slidesparse.gemm import hopper_configs, hopper_format, hopper_native, missing_triton, plans
from slidesparse.gemm.hopper_configs import Config
from slidesparse.gemm.hopper_plans import ROW, Before, HopperPlan, LinearPlan, quantize_call, set_inputs
from slidesparse.gemm.library import DTYPES, NAMES, TN, Layout, LibraryError, Problem, require_operand
from slidesparse.gemm.native import NativeLibrary
from slidesparse.kernels import Producer, RmsNorm, SiluMul
from slidesparse.pattern import HARDWARE_LENGTH, SlideLayout, SlidePattern
from slidesparse.quantize import FP8, INT8
from slidesparse.slide import require_pattern

VERSION = "4"  # of the configurations: tables tuned for others are not read
CANDIDATES = 16  # configurations that tuning tries for a problem; see `hopper_configs`
LONG = 64  # columns of a pattern's block: in longer ones the zeros that packing asks for are looked for once
NEAR = 0.5  # see `tuned.neighbour`: as far as 4:6 is from 2:4 and 6:8 of the same layer
OUTPUTS = (torch.bfloat16, torch.float16)
SCALES, BIASES = (torch.float32,), tuple(hopper_native.FLOATS)
# Of more tokens and longer rows than these Triton's kernel quantizes, else ours.  8192 x 18944 at 6:8 takes it 134 us
# and ours 164, 2048 x 18944 37 and 44, 2048 x 8192 17 and 18, 2048 x 3584 8 and 7, on an H200; but to call it takes
# the host 40 us more, which fewer tokens do not hide.  After a norm or an activation ours was faster at every size
# tried, 1 to 8192 tokens: 8192 x 3584 with a sum and its norm 66 and 121 us, 8192 x 18944 with SiLU 287 and 429.
TRITON_TOKENS, TRITON_COLUMNS = 2048, 8192


class Library(NativeLibrary):
    """See `slidesparse.gemm.library.Library`."""

    name = "hopper"
    sparse = True
    alignment = hopper_format.BLOCK
    products = dict.fromkeys(("int8", "fp8"), tuple(NAMES[dtype] for dtype in OUTPUTS))

    def version(self) -> str:
        """Of the configurations."""
        hopper_native.native()
        return VERSION

    def unusable(self, device: torch.device) -> str | None:
        """Needs a GPU of compute capability 9.0, the kernels compiled or nvcc, a driver for them, and Triton."""
        if device.type == "cuda" and torch.cuda.is_available():
            capability = torch.cuda.get_device_capability(device)
            if capability != HOPPER_CAPABILITY:
                return (
                    "its kernels are for compute capability 9.0 (Hopper) alone, this GPU has "
                    f"{capability[0]}.{capability[1]}; use the backend cusparselt"
                )
        reason = super().unusable(device)
        if reason:
            return reason
        said = hopper_native.native().slidesparse_hopper_unusable()
        return said.decode() if said else missing_triton()

    def epilogue(self, dtype: str, out: str, device: torch.device | None = None) -> str:
        """ "both": the kernels scale by out-feature and by token, and nothing less."""
        return "both"

    def pack(self, weight: Tensor, layout: Layout = TN) -> Tensor:
        """2:4 [n, k] -> `slidesparse.gemm.hopper_format`.  Raises LibraryError, or PatternError when it is not 2:4."""
        require_operand(weight.dtype)
        _require_layout(layout)
        return PROVIDER.pack(weight)

    def algorithms(self, problem: Problem, device: torch.device, layout: Layout = TN) -> list[str]:
        """The configurations of the least predicted times."""
        self._require(problem, device, layout)
        return [str(config) for config in _candidates(problem, device, CANDIDATES)]

    def plan(
        self, problem: Problem, device: torch.device, algorithm: str | None = None, layout: Layout = TN
    ) -> HopperPlan:
        """See `slidesparse.gemm.library.Library`; its own choice is the first of `algorithms`."""
        self._require(problem, device, layout)
        config = _candidates(problem, device, 1)[0] if algorithm is None else hopper_configs.parse(algorithm)
        if config is None:
            raise LibraryError(
                f"{algorithm!r} is no configuration of the Hopper kernels, such as 'split:2x64/1x4/2'"
            )
        return HopperPlan(problem, config, plans.index_of(device))

    def _require(self, problem: Problem, device: torch.device, layout: Layout) -> None:
        self.require(problem, device)
        _require_layout(layout)
        if problem.scale != "both":
            raise LibraryError(f"the Hopper kernels scale by out-feature and token, asked for {problem}")


def _require_layout(layout: Layout) -> None:
    if layout != TN:
        raise LibraryError(f"the Hopper kernels have one layout: {TN}; asked for {layout}")


def _candidates(problem: Problem, device: torch.device, most: int) -> list[Config]:
    index = plans.index_of(device)
    return hopper_configs.candidates(
        problem.n,
        problem.k,
        problem.m,
        hopper_native.multiprocessors(index),
        most,
        hopper_native.fits(DTYPES[problem.dtype], index),
    )


LIBRARY = Library()


@lru_cache(maxsize=1 << 16)
def planned_rows(m: int) -> int:
    """The number of tokens that a product of ``m`` is looked up with: as in `plans.bucket`, below 16 a power of two."""
    return 1 << (m - 1).bit_length() if 0 < m < plans.LEAST_ROWS else plans.bucket(m)


class Hopper:
    """The provider: see `slidesparse.gemm.GemmProvider`."""

    name = "hopper"
    # The copy engine reads 128 bytes of a row at a time, from rows that begin at multiples of 16.  Where they do not
    # begin at multiples of 128, each such piece lies in two lines of the cache: the product of 3584 x 3584 at 8:10 and
    # 1024 tokens takes 37 us with rows of 5744 codes, 24 with rows of 5760, on an H200.
    alignment = LIBRARY.alignment
    outputs = OUTPUTS

    def unusable(self, device: torch.device) -> str | None:
        """See `Library.unusable`."""
        return LIBRARY.unusable(device)

    def pack(self, weight: Tensor) -> Tensor:
        """2:4 [N, K'] INT8 or FP8 -> packed; N is padded with zeros to whole strips, K' to whole blocks.

        On a CPU by `hopper_format.pack`.  Raises PatternError for a weight that is not 2:4.
        """
        pattern = SlidePattern(HARDWARE_LENGTH)
        if not weight.is_cuda:
            require_pattern(weight, pattern, "weight")
            return hopper_format.pack(weight)
        packed, broken = self.slide_and_pack(weight, pattern.layout(weight.shape[1]))
        if broken:
            require_pattern(weight, pattern, "weight")
        return packed

    def slide_and_pack(self, weight: Tensor, layout: SlideLayout) -> tuple[Tensor, int]:
        """A pruned weight [N, K] INT8 or FP8 -> the packed form of its windows, and how many blocks break the pattern.

        Without memory beside the weight and the result, but for two numbers for each block of more than LONG columns.
        With blocks that break the pattern the packed form is of no use.  Raises LibraryError for other dtypes.
        """
        if weight.dtype not in (INT8, FP8):
            raise LibraryError(
                f"a weight of {weight.dtype}; the Hopper kernels take {INT8} and {FP8}: quantize it"
            )
        (n, k), index = weight.shape, weight.get_device()
        packed = weight.new_empty(hopper_format.packed_bytes(n, layout.slided), dtype=torch.uint8)
        if not packed.numel():
            return packed, 0
        weight = _with_dense_rows(weight)
        broken = weight.new_zeros(1, dtype=torch.int32)
        numbers = 2 * n * layout.blocks if layout.length > LONG else 0
        zeros = weight.new_empty(numbers, dtype=torch.int32)
        with plans.on_device(index):
            call = hopper_native.Pack(
                *(weight.data_ptr(), packed.data_ptr(), broken.data_ptr(), zeros.data_ptr() or None),
                plans.stream_of(index),
                *(weight.stride(0), n, k, layout.length, layout.phase),
                *(hopper_format.blocks_of(layout.slided), weight.dtype == FP8),
            )
            error = hopper_native.native().slidesparse_hopper_pack(ctypes.addressof(call))
            hopper_native.require(error, f"a weight {tuple(weight.shape)} {weight.dtype}")
        return packed, int(broken.item())  # waits for the GPU, see the top of the file

    def scaled_matmul(
        self,
        q: Tensor,
        scale_x: Tensor,
        weight: Tensor,
        scale_w: Tensor,
        bias: Tensor | None,
        out_dtype: torch.dtype,
    ) -> Tensor:
        """See `slidesparse.gemm.GemmProvider.scaled_matmul`.  Raises LibraryError for an output but BF16 and FP16."""
        m, n, index = q.shape[0], scale_w.shape[0], q.get_device()
        _require_output(out_dtype)
        out = q.new_empty(m, n, dtype=out_dtype)
        if m == 0:
            return out
        _require_vectors(scale_w, bias, n, q.device)
        q = _aligned(plans.pad(q, self.alignment))
        _require_size(weight, m, n, q.shape[1], hopper_format.packed_bytes(n, q.shape[1]))
        key = (q.dtype, n, q.shape[1], planned_rows(m))
        with plans.on_device(index):
            plan = plans.plans(self.name, index).get(key, self._plan, *key, q.device)
            profiling.chose(plan.algorithm)
            with profiling.stage("product", q):
                plan.run(q, weight, out, scale_w, scale_x, bias)
        return out

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
        """See `slidesparse.gemm.LinearProvider.linear`.

        Raises LibraryError for an output but BF16 and FP16, and for what the kernels refuse.
        """
        m, k, n, index = x.shape[0], _columns_of(x, producer), scale_w.shape[0], x.get_device()
        _require_output(out_dtype)
        if profiling.enabled() or _by_triton(x, k, producer):  # the first times the two parts apart
            q, scale_x = self.quantize(x, length, phase, dtype, columns, producer)
            profiling.layer(weight, n, q)
            return self.scaled_matmul(q, scale_x, weight, scale_w, bias, out_dtype)
        out = x.new_empty(m, n, dtype=out_dtype)
        if m == 0:
            return out
        _require_vectors(scale_w, bias, n, x.device)
        kinds = x.dtype, out_dtype, None if bias is None else bias.dtype
        key = (kinds, k, length, phase, dtype, columns, Before.of(producer), n, planned_rows(m))
        with plans.on_device(index):
            plan = plans.plans(self.name, index).get(key, self._linear_plan, *key, x.device)
            if weight.numel() != plan.weight_bytes:
                _require_size(weight, m, n, columns, plan.weight_bytes)
            plan.run(_with_dense_rows(x), weight, out, scale_w, bias, producer)
        return out

    def quantize(
        self,
        x: Tensor,
        length: int,
        phase: int,
        dtype: torch.dtype,
        columns: int,
        producer: Producer = None,
    ) -> tuple[Tensor, Tensor]:
        """The first part of `linear`: what `slidesparse.ops.quant_slide` returns."""
        m, k, index = x.shape[0], _columns_of(x, producer), x.get_device()
        x = _with_dense_rows(x)
        if _by_triton(x, k, producer):
            with profiling.stage("quantize", x):
                return kernels.quantize(x, length, phase, dtype, columns, 0, producer)
        with profiling.stage("quantize", x), plans.on_device(index):
            q, scale = x.new_empty(m, columns, dtype=dtype), x.new_empty(m, 1, dtype=torch.float32)
            call = quantize_call(x.dtype, k, length, phase, dtype, columns, Before.of(producer))
            set_inputs(call, x, producer, plans.stream_of(index))
            call.q, call.scale = q.data_ptr(), scale.data_ptr()
            error = hopper_native.native().slidesparse_hopper_quantize(ctypes.addressof(call))
            hopper_native.require(error, f"x {tuple(x.shape)} {x.dtype}")
        return q, scale

    def _linear_plan(
        self,
        kinds: tuple[torch.dtype, torch.dtype, torch.dtype | None],
        k: int,
        length: int,
        phase: int,
        dtype: torch.dtype,
        columns: int,
        before: Before,
        n: int,
        rows: int,
        device: torch.device,
    ) -> LinearPlan:
        source, out, bias = kinds
        quantize = quantize_call(source, k, length, phase, dtype, columns, before)
        plan = LinearPlan(self._plan(dtype, n, columns, rows, device), quantize, out, bias)
        plan.prepare_operators(kinds, before, rows)
        return plan

    def _plan(self, operand: torch.dtype, n: int, k: int, rows: int, device: torch.device) -> HopperPlan:
        """For outputs in BF16 and FP16 alike, with a bias or without: that changes no configuration.

        Shapes far from all tuned ones take that of the least predicted time: how to cut K depends on the shape.
        """
        columns = k + -k % LIBRARY.alignment
        problem = Problem(NAMES[operand], NAMES[OUTPUTS[0]], n, columns, rows, "both")
        plan = plans.tuned_plan(LIBRARY, problem, device, NEAR)
        assert isinstance(plan, HopperPlan)
        return plan


def _columns_of(x: Tensor, producer: Producer) -> int:
    """K: those of the rows that are quantized.  Raises LibraryError where the producer's tensors do not fit x."""
    width = x.shape[1]
    if producer is None:
        return width
    if isinstance(producer, SiluMul):
        if width % 2:
            raise LibraryError(f"x has {width} columns; of gates and values there must be as many")
        return width // 2
    weight, _, residual, total = producer
    if weight.shape != (width,):
        raise LibraryError(f"a norm's weight has shape {tuple(weight.shape)}; x has {width} columns")
    if residual is not None:
        _require_alike("residual", residual, x)
        if residual.stride(1) != 1:
            raise LibraryError(f"the residual has strides {residual.stride()}; the last must be 1")
        assert total is not None
        _require_alike("sum", total, x)
        if not total.is_contiguous():
            raise LibraryError(f"the sum has strides {total.stride()}; it must be contiguous")
    return width


def _require_vectors(scale_w: Tensor, bias: Tensor | None, n: int, device: torch.device) -> None:
    for name, vector, dtypes in (("scale_w", scale_w, SCALES), ("bias", bias, BIASES)):
        if vector is not None and (
            vector.numel() != n
            or vector.dtype not in dtypes
            or vector.device != device
            or not vector.is_contiguous()
        ):
            raise LibraryError(
                f"{name} is {vector.dtype} {tuple(vector.shape)} with strides {vector.stride()} on {vector.device}; it "
                f"must hold {n} elements of {' or '.join(map(str, dtypes))}, contiguous, on {device}"
            )


def _require_alike(name: str, one: Tensor, x: Tensor) -> None:
    if one.shape != x.shape or one.dtype != x.dtype:
        raise LibraryError(
            f"the {name} is {one.dtype} {tuple(one.shape)}; it must be as x, {x.dtype} {tuple(x.shape)}"
        )


def _by_triton(x: Tensor, k: int, producer: Producer) -> bool:
    if isinstance(producer, RmsNorm) and (
        producer.weight.dtype != x.dtype or producer.weight.stride() != (1,)
    ):
        return True  # ours wants them alike, and the weight's elements next to each other
    return producer is None and x.shape[0] > TRITON_TOKENS and k > TRITON_COLUMNS


def _require_output(dtype: torch.dtype) -> None:
    if dtype not in OUTPUTS:
        raise LibraryError(
            f"the Hopper kernels write {' or '.join(NAMES[one] for one in OUTPUTS)}, asked for {dtype}: "
            "use the backend cusparselt for it"
        )


def _require_size(weight: Tensor, m: int, n: int, columns: int, size: int) -> None:
    if weight.numel() != size:
        raise LibraryError(
            f"a packed weight of {weight.numel()} bytes for products [{m}, {columns}] @ [{n}, {columns}].T, "
            f"which takes {size}: pack the weight for the backend hopper, from windows of as many columns"
        )


def _with_dense_rows(x: Tensor) -> Tensor:
    """x itself, or a copy when the elements of a row do not follow each other."""
    return x if x.stride(1) == 1 else x.contiguous()


def _aligned(q: Tensor) -> Tensor:
    """q itself, or a copy where the copy engine cannot read it: rows with gaps, or an address not a multiple of ROW."""
    if q.is_contiguous() and q.data_ptr() % ROW == 0:
        return q
    return q.clone(memory_format=torch.contiguous_format)


PROVIDER = Hopper()
