"""Products and whole layers of the Hopper kernels, ready to run: what is known beforehand is laid out once.

Launches are dependent ones: blocks may start, and load weights, while the kernel in front still runs, and wait for its
end before they read anything that it could have written.  A packed weight must therefore have been written before the
kernel in front began.
"""

from __future__ import annotations

import ctypes
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor

from slidesparse import kernels
from slidesparse.gemm import hopper_format, hopper_operators, plans
from slidesparse.gemm import hopper_native as native
from slidesparse.gemm.hopper_configs import STREAM, Config
from slidesparse.gemm.hopper_native import FLOATS, Call, Linear, Quantize
from slidesparse.gemm.library import DTYPES, LibraryError, Problem
from slidesparse.kernels import Producer, RmsNorm, SiluMul
from slidesparse.quantize import FP8, INT8

DEPENDENT = True  # whether kernels start before the one in front has ended
WORKSPACE = 48 << 20  # bytes, of a stream; more than any configuration of 132 multiprocessors wants
ROW = 16  # bytes; rows of codes begin at multiples of it
SCALES = 128  # bytes; codes begin at such a multiple behind the scales
TRIGGERS = ("off", "early", "late")  # `kernels.LAUNCH_DEPENDENTS`, as csrc/hopper/ numbers them


class HopperPlan:
    """See `slidesparse.gemm.library.Plan`.  It holds for any number of tokens; its problem's only chose it."""

    def __init__(self, problem: Problem, config: Config, index: int) -> None:
        self.algorithm = str(config)
        self.index = index
        self._native = native.native()
        dtype = DTYPES[problem.dtype]
        fit = native.fit(config, dtype, index)
        if not fit.stages:
            raise LibraryError(f"no kernel was compiled for configuration {config}, or it finds no room")
        self.grid, self.workspace = 0, 0
        if config.design == STREAM:
            self.grid = fit.clusters * config.sharers
            self.workspace = int(
                self._native.slidesparse_hopper_workspace(config.strips, config.tokens, self.grid)
            )
        if self.workspace > WORKSPACE:
            raise LibraryError(
                f"configuration {config} wants a workspace of {self.workspace} bytes, a stream has {WORKSPACE}"
            )
        self.constant = native.call_of(config, dtype)
        self.constant.n = problem.n
        self.constant.strips = hopper_format.strips_of(problem.n)
        self.constant.blocks = hopper_format.blocks_of(problem.k)
        self.constant.dependent = DEPENDENT

    def run(
        self,
        activations: Tensor,
        weight: Tensor,
        out: Tensor,
        scale_w: Tensor | None = None,
        scale_x: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> None:
        """See `slidesparse.gemm.library.Plan.run`; out is BF16 or FP16, bias of any float type."""
        assert scale_w is not None
        assert scale_x is not None
        call = Call.from_buffer_copy(self.constant)  # threads may share a plan
        call.q, call.weight, call.out = activations.data_ptr(), weight.data_ptr(), out.data_ptr()
        call.scale_w, call.scale_x = scale_w.data_ptr(), scale_x.data_ptr()
        call.m, call.k = activations.shape
        call.out_type = FLOATS[out.dtype]
        if bias is not None:
            call.bias, call.bias_type = bias.data_ptr(), FLOATS[bias.dtype]
        call.stream = stream = plans.stream_of(self.index)
        if self.grid:
            place = workspace(self.index, stream)
            error = self._native.slidesparse_hopper_stream(ctypes.addressof(call), place, self.grid)
        else:
            error = self._native.slidesparse_hopper_gemm(ctypes.addressof(call))
        native.require(error, f"configuration {self.algorithm}")


class Before(NamedTuple):
    """What a producer is, without its tensors."""

    number: int = 0  # as csrc/hopper/ has it
    eps: float = 0.0

    @classmethod
    def of(cls, producer: Producer) -> Before:
        """That of ``producer``."""
        if producer is None:
            return NOTHING
        if isinstance(producer, SiluMul):
            return cls(3)
        return cls(1 if producer.residual is None else 2, producer.eps)


NOTHING = Before()


def quantize_call(
    x: torch.dtype,
    k: int,
    length: int,
    phase: int,
    dtype: torch.dtype,
    columns: int,
    before: Before = NOTHING,
) -> Quantize:
    """What is the same for all tokens [M, k] of dtype ``x``: see `slidesparse.ops.quant_slide`.

    Raises LibraryError for types that the kernel does not take; other arguments it looks at itself.
    """
    if x not in FLOATS or dtype not in (INT8, FP8):
        raise LibraryError(
            f"the Hopper kernels quantize bfloat16, float16 and float32 to int8 and float8_e4m3fn; asked for {x} to "
            f"{dtype}"
        )
    return Quantize(
        k=k,
        columns=columns,
        type=FLOATS[x],
        fp8=dtype == FP8,
        length=length,
        phase=phase,
        trigger=TRIGGERS.index(kernels.LAUNCH_DEPENDENTS),
        dependent=DEPENDENT,
        before=before.number,
        eps=before.eps,
    )


def set_inputs(call: Quantize, x: Tensor, producer: Producer, stream: int) -> None:
    """Write into ``call`` what it reads, x [M, K] or of a producer [M, 2 K], and a producer's sum."""
    call.x, call.stream, call.stride, call.m = x.data_ptr(), stream, x.stride(0), x.shape[0]
    if isinstance(producer, RmsNorm):
        call.gain = producer.weight.data_ptr()
        if producer.residual is not None:
            assert producer.total is not None
            call.residual, call.total = producer.residual.data_ptr(), producer.total.data_ptr()
            call.residual_stride = producer.residual.stride(0)


class LinearPlan:
    """Quantization and product as one call, whose arguments lie in one structure.  For one thread: they are its state.

    The structure is all that a call changes, so that little of the host's time goes by; it holds for any number of
    tokens.
    """

    def __init__(
        self, plan: HopperPlan, quantize: Quantize, out: torch.dtype, bias: torch.dtype | None
    ) -> None:
        self.algorithm = plan.algorithm
        self._call = Linear(quantize, plan.constant, None, plan.grid)
        self._quantize, self._product = self._call.quantize, self._call.product  # views
        self._product.out_type = FLOATS[out]
        self._product.bias_type = 0 if bias is None else FLOATS[bias]
        self._address = ctypes.addressof(self._call)
        self._run = native.native().slidesparse_hopper_linear
        self._index, self._grid, self._columns = plan.index, plan.grid, int(quantize.columns)
        self.weight_bytes = hopper_format.packed_bytes(plan.constant.n, self._columns)

    def prepare_operators(
        self, kinds: tuple[torch.dtype, torch.dtype, torch.dtype | None], before: Before, rows: int
    ) -> None:
        """Let C++ run such layers without this object: see `slidesparse.gemm.hopper_operators.add`."""
        hopper_operators.add(self._index, kinds, before, rows, self._call, self.weight_bytes)

    def run(
        self,
        x: Tensor,
        weight: Tensor,
        out: Tensor,
        scale_w: Tensor,
        bias: Tensor | None,
        producer: Producer = None,
    ) -> None:
        """x [M, K] with a last stride of 1, out [M, N]: enqueued on torch's current stream.

        The producer is one of those that the structure was made for.
        Codes and scales get memory of torch's, which kernels of the same stream may have again after this call.
        """
        m = x.shape[0]
        scales = -(-4 * m // SCALES) * SCALES
        scratch = x.new_empty(scales + m * self._columns, dtype=torch.uint8)
        address, stream = scratch.data_ptr(), plans.stream_of(self._index)
        quantize, product = self._quantize, self._product
        set_inputs(quantize, x, producer, stream)
        quantize.scale, quantize.q = address, address + scales
        product.weight, product.scale_w = weight.data_ptr(), scale_w.data_ptr()
        product.out, product.bias = out.data_ptr(), None if bias is None else bias.data_ptr()
        if self._grid:
            self._call.workspace = workspace(self._index, stream)
        error = self._run(self._address)
        if error:
            native.require(error, f"configuration {self.algorithm}")


class _Workspaces:
    """Memory of streams, zero at first and left so by the kernels; it never moves, as captured graphs hold it.

    While a graph is captured none can be zeroed, so there is always one more than streams have asked for.
    """

    def __init__(self) -> None:
        self._of: dict[tuple[int, int], Tensor] = {}
        self._spare: dict[int, Tensor] = {}
        self._lock = threading.Lock()

    def address(self, index: int, stream: int) -> int:
        """Of the workspace of a stream of CUDA device ``index``.  Raises LibraryError."""
        found = self._of.get((index, stream))
        return (self._take(index, stream) if found is None else found).data_ptr()

    def _take(self, index: int, stream: int) -> Tensor:
        with self._lock:
            if (index, stream) in self._of:  # by another thread, meanwhile
                return self._of[index, stream]
            if not torch.cuda.is_current_stream_capturing():
                found = self._spare.pop(index, None)
                made = _zeros(index, 2 if found is None else 1)
                torch.cuda.synchronize(index)  # other streams may use them from now on
                self._spare[index] = made.pop()
                self._of[index, stream] = made.pop() if found is None else found
            elif index in self._spare:
                self._of[index, stream] = self._spare.pop(index)
            else:
                raise LibraryError(
                    "no workspace for this stream while a CUDA graph is being captured; run a product on it before"
                )
            found = self._of[index, stream]
            hopper_operators.workspace(index, stream, found.data_ptr())
            return found


def _zeros(index: int, count: int) -> list[Tensor]:
    """New workspaces on CUDA device ``index``, in no memory pool but torch's own.

    What runs while weights are loaded, to measure it or for MLA, runs in vLLM's pool for weights, whose contents sleep
    level 2 discards.  `torch.cuda.use_mem_pool` holds for one thread, so another one allocates.
    """

    def make() -> list[Tensor]:
        device = torch.device("cuda", index)
        return [torch.zeros(WORKSPACE, dtype=torch.uint8, device=device) for _ in range(count)]

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(make).result()


workspace = _Workspaces().address
