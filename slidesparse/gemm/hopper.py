"""Our own sparse kernels for Hopper, csrc/hopper/: a whole product in one launch, scales and bias in its epilogue.

The weight is held in one form, `slidesparse.gemm.hopper_format`, from which few tokens and many are multiplied.  Any
number of tokens runs as it is; the number only chooses a configuration (`slidesparse.gemm.hopper_configs`) from the
tuned table.  The launch is a dependent one: blocks may start, and load weights, while the kernel in front still runs,
and wait for its end before they read anything that it could have written.  A packed weight must therefore have been
written before the kernel in front began; `pack` waits until it has been.
"""

from __future__ import annotations

import ctypes
import threading
from functools import cache
from typing import Any

import torch
from torch import Tensor

from slidesparse import nvcc, profiling
from slidesparse.backends import HOPPER_CAPABILITY
from slidesparse.gemm import hopper_configs, hopper_format, library, missing_triton, plans
from slidesparse.gemm.hopper_configs import SPLIT, Config
from slidesparse.gemm.library import NAMES, TN, Layout, LibraryError, Problem, require_operand
from slidesparse.gemm.native import NativeLibrary
from slidesparse.pattern import HARDWARE_LENGTH, SlideLayout, SlidePattern
from slidesparse.quantize import INT8
from slidesparse.slide import require_pattern
from slidesparse.toolchain import ToolchainError

VERSION = "1"  # of the configurations: tables tuned for others are not read
DEPENDENT = True  # whether products start before the kernel in front has ended
CANDIDATES = 48  # configurations that tuning tries for a problem
PLANNED_COLUMNS = 32  # problems are looked up with K' rounded up to this, as tuning does
CHUNK = 16 << 20  # bytes of windows that are packed at a time
WORKSPACE = 48 << 20  # bytes, of a stream; more than any configuration of 132 multiprocessors wants
FLOATS = {torch.bfloat16: 1, torch.float16: 2, torch.float32: 3}  # as csrc/hopper/ numbers them
OUTPUTS = (torch.bfloat16, torch.float16)


class Call(ctypes.Structure):
    """SlidesparseHopperCall of csrc/hopper/hopper.cu."""

    _fields_ = tuple(
        [(name, ctypes.c_void_p) for name in ("q", "weight", "out", "scale_w", "scale_x", "bias", "stream")]
        + [
            (name, ctypes.c_int32)
            for name in (
                *("m", "n", "k", "strips", "blocks", "fp8", "out_type", "bias_type"),
                *("block_strips", "tokens", "sharers", "splits", "shared_bytes", "dependent"),
            )
        ]
    )


@cache
def native() -> Any:
    """The compiled kernels, installed or compiled now.  Raises LibraryError."""
    try:
        found = ctypes.CDLL(str(nvcc.library()))
    except (ToolchainError, OSError) as error:
        raise LibraryError(f"the Hopper kernels: {error}") from None
    found.slidesparse_hopper_gemm.argtypes = [ctypes.POINTER(Call)]
    found.slidesparse_hopper_stream.argtypes = [ctypes.POINTER(Call), ctypes.c_void_p, ctypes.c_int32]
    found.slidesparse_hopper_workspace.argtypes = [ctypes.c_int32] * 3
    found.slidesparse_hopper_workspace.restype = ctypes.c_int64
    for name in ("gemm", "stream", "unusable"):
        getattr(found, f"slidesparse_hopper_{name}").restype = ctypes.c_char_p
    return found


class HopperPlan:
    """See `slidesparse.gemm.library.Plan`.  It holds for any number of tokens; its problem's only chose it."""

    def __init__(self, problem: Problem, config: Config, index: int) -> None:
        self.algorithm = str(config)
        self._native, self._index = native(), index
        self._grid = 0 if config.design == SPLIT else _multiprocessors(index) * config.resident
        self.workspace = 0
        if self._grid:
            self.workspace = int(
                self._native.slidesparse_hopper_workspace(config.strips, config.tokens, self._grid)
            )
            if self.workspace > WORKSPACE:
                raise LibraryError(
                    f"configuration {config} wants a workspace of {self.workspace} bytes, a stream has {WORKSPACE}"
                )
        self._constant = Call(
            n=problem.n,
            strips=hopper_format.strips_of(problem.n),
            blocks=hopper_format.blocks_of(problem.k),
            fp8=problem.dtype == "fp8",
            block_strips=config.strips,
            tokens=config.tokens,
            sharers=config.sharers,
            splits=config.splits,
            shared_bytes=config.shared_bytes,
            dependent=DEPENDENT,
        )

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
        call = Call.from_buffer_copy(self._constant)  # threads may share a plan
        call.q, call.weight, call.out = activations.data_ptr(), weight.data_ptr(), out.data_ptr()
        call.scale_w, call.scale_x = scale_w.data_ptr(), scale_x.data_ptr()
        call.m, call.k = activations.shape
        call.out_type = FLOATS[out.dtype]
        if bias is not None:
            call.bias, call.bias_type = bias.data_ptr(), FLOATS[bias.dtype]
        call.stream = stream = plans.stream_of(self._index)
        if self._grid:
            place = _workspace(self._index, stream)
            error = self._native.slidesparse_hopper_stream(call, place, self._grid)
        else:
            error = self._native.slidesparse_hopper_gemm(call)
        if error:
            raise LibraryError(f"{error.decode()}, by configuration {self.algorithm}")


@cache
def _multiprocessors(index: int) -> int:
    return int(torch.cuda.get_device_properties(index).multi_processor_count)


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
            if not torch.cuda.is_current_stream_capturing():
                found = self._spare.pop(index, None)
                device = torch.device("cuda", index)
                made = [
                    torch.zeros(WORKSPACE, dtype=torch.uint8, device=device)
                    for _ in range(2 if found is None else 1)
                ]
                torch.cuda.synchronize(index)  # other streams may use them from now on
                self._spare[index] = made.pop()
                self._of[index, stream] = made.pop() if found is None else found
            elif index in self._spare:
                self._of[index, stream] = self._spare.pop(index)
            else:
                raise LibraryError(
                    "no workspace for this stream while a CUDA graph is being captured; run a product on it before"
                )
            return self._of[index, stream]


_workspace = _Workspaces().address


class Library(NativeLibrary):
    """See `slidesparse.gemm.library.Library`."""

    name = "hopper"
    sparse = True
    products = dict.fromkeys(("int8", "fp8"), tuple(NAMES[dtype] for dtype in OUTPUTS))

    def version(self) -> str:
        """Of the configurations."""
        native()
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
        said = native().slidesparse_hopper_unusable()
        return said.decode() if said else missing_triton()

    def epilogue(self, dtype: str, out: str) -> str:
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
    count = _multiprocessors(plans.index_of(device))
    return hopper_configs.candidates(problem.n, problem.k, problem.m, count, most)


LIBRARY = Library()


def planned_rows(m: int) -> int:
    """The number of tokens that a product of ``m`` is looked up with: as in `plans.bucket`, below 16 a power of two."""
    return 1 << (m - 1).bit_length() if 0 < m < plans.LEAST_ROWS else plans.bucket(m)


class Hopper:
    """The provider: see `slidesparse.gemm.GemmProvider`."""

    name = "hopper"
    alignment = 16
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

        Chunk by chunk of rows, so that next to the weight and the result there is little more than CHUNK bytes.
        With blocks that break the pattern the packed form is of no use.
        """
        from slidesparse.kernels.pack_weight import pack_weight  # late: these need Triton
        from slidesparse.kernels.slide_weight import slide_weight

        n, strip, device = weight.shape[0], hopper_format.STRIP, weight.device
        strips, blocks = hopper_format.strips_of(n), hopper_format.blocks_of(layout.slided)
        columns, size = blocks * hopper_format.BLOCK, blocks * hopper_format.BLOCK_BYTES
        step = min(strips, max(1, CHUNK // max(1, columns * strip)))
        packed = torch.empty(strips * size, dtype=torch.uint8, device=device)
        if not packed.numel():
            return packed, 0
        windows = torch.empty(step * strip, columns, dtype=INT8, device=device).view(weight.dtype)
        broken = torch.zeros(1, dtype=torch.int32, device=device)
        for first in range(0, strips, step):
            part = weight[first * strip : (first + step) * strip]
            whole = windows[: hopper_format.strips_of(len(part)) * strip]
            broken += slide_weight(part, layout.length, layout.phase, whole[: len(part)], normalise_zero=True)
            whole[len(part) :].view(INT8).zero_()
            pack_weight(whole, packed[first * size : (first + len(whole) // strip) * size])
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
        if out_dtype not in OUTPUTS:
            raise LibraryError(
                f"the Hopper kernels write {' or '.join(NAMES[dtype] for dtype in OUTPUTS)}, asked for {out_dtype}: "
                "use the backend cusparselt for it"
            )
        out = q.new_empty(m, n, dtype=out_dtype)
        if m == 0:
            return out
        q = _aligned(plans.pad(q, self.alignment))
        size = hopper_format.packed_bytes(n, q.shape[1])
        if weight.numel() != size:
            raise LibraryError(
                f"a packed weight of {weight.numel()} bytes for products [{m}, {q.shape[1]}] @ [{n}, {q.shape[1]}].T, "
                f"which takes {size}: pack the weight for the backend hopper, from windows of as many columns"
            )
        key = (q.dtype, n, q.shape[1], planned_rows(m))
        with plans.on_device(index):
            plan = plans.plans(self.name, index).get(key, self._plan, *key, q.device)
            profiling.chose(plan.algorithm)
            with profiling.stage("product", q):
                plan.run(q, weight, out, scale_w, scale_x, bias)
        return out

    def _plan(self, operand: torch.dtype, n: int, k: int, rows: int, device: torch.device) -> library.Plan:
        """For outputs in BF16 and FP16 alike, with a bias or without: that changes no configuration.

        Untuned shapes take that of the least predicted time: how to cut K depends on the shape.
        """
        columns = k + -k % PLANNED_COLUMNS
        problem = Problem(NAMES[operand], NAMES[OUTPUTS[0]], n, columns, rows, "both")
        return plans.tuned_plan(LIBRARY, problem, device, neighbours=False)


def _aligned(q: Tensor) -> Tensor:
    """q itself, or a copy where the copy engine cannot read it: rows with gaps, or an address not a multiple of 16."""
    if q.is_contiguous() and q.data_ptr() % 16 == 0:
        return q
    return q.clone(memory_format=torch.contiguous_format)


PROVIDER = Hopper()
