"""Our sparse kernels for Hopper, csrc/hopper/: a layer is two launches, quantization and a GEMM that scales.

The packed weight has one format, `slidesparse.gemm.hopper.format`.  A layer has one plan for any number of tokens.  C++
keeps the plans and finds them by their `Layer`, which torch's operators are called with; Python makes a plan when a
weight is packed, or at the first call of a layer.  With programmatic dependent launch, a kernel starts before the
previous one has ended, so `pack` waits until the packed weight is written.
"""

from __future__ import annotations

import math
import threading
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from slidesparse.blocks import BLOCK, dense_blocks
from slidesparse.gemm import cuda, tuned
from slidesparse.gemm.cuda import CudaBackend
from slidesparse.gemm.hopper import native
from slidesparse.gemm.hopper.format import allocate_mixed
from slidesparse.gemm.hopper.native import TYPES
from slidesparse.gemm.problem import (
    ALL_2_4,
    BLOCKS,
    CODED,
    DTYPES,
    NAMES,
    SIX_EIGHT,
    TWO_FOUR,
    Layer,
    LibraryError,
    Problem,
    Tensors,
    stored_pattern,
)
from slidesparse.pattern import HARDWARE_LENGTH, SlidePattern, round_up
from slidesparse.quantize import FP8, INT8
from slidesparse.slide import require_pattern

HOPPER_CAPABILITY = (9, 0)  # sm_90a: neither earlier nor later GPUs have its instructions
VERSION = "4"  # version of the configurations; tables of other versions are not read
CANDIDATES = 32  # configurations that tuning tries for a problem
MAX_SHAPE_DISTANCE = 1.0  # see `tuned.tuned_algorithm`
# How much slower than the best one, by the cost model, a configuration of another shape may be.  One more row of tiles
# can need a second wave of clusters, which takes up to 1.9 times as long: the model foresees that.
MAX_PREDICTED = 1.1
MAX_EXPERTS = 512  # of a layer in one process
MAX_CONFIGURATIONS = 4096  # more than there are
# Rows of the table of a plan, beside the numbers of tokens that were tuned; the last is also used for more tokens
TABLE_TOKENS = tuple(1 << i for i in range(16))
OUTPUTS = (torch.bfloat16, torch.float16)
ALIGNMENT = 16  # bytes: alignment of the rows that TMA reads

_planning = threading.Lock()


class HopperPlan(native.Plan):
    """A `slidesparse.gemm.problem.Plan` for any number of tokens; out is BF16 or FP16, a bias of any float."""

    def __call__(self, tensors: Tensors) -> None:
        multiply(self.handle, tensors)


def multiply(plan: int, tensors: Tensors) -> None:
    """Multiply and scale by the plan with this handle, on torch's current stream, without any checks."""
    q, weight, out, scale_w, scale_x, bias = tensors
    assert scale_w is not None
    assert scale_x is not None
    scratch = q.new_empty(native.library().slidesparse_hopper_scratch_bytes(plan, len(q)), dtype=torch.uint8)
    native.call(
        "product",
        *(plan, len(q), q.data_ptr(), q.shape[1], scale_x.data_ptr()),
        *(weight.data_ptr(), weight.numel(), scale_w.data_ptr()),
        *((None, 0) if bias is None else (bias.data_ptr(), TYPES[bias.dtype])),
        *(out.data_ptr(), TYPES[out.dtype], scratch.data_ptr(), cuda.current_stream(q.get_device())),
    )


class Hopper(CudaBackend):
    """The sparse path by our own kernels."""

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
    outputs = OUTPUTS
    coded = True

    def version(self) -> str:
        """Return the version of the configurations."""
        native.call("unusable")
        return VERSION

    def require_library(self, capability: tuple[int, int], loads: bool) -> None:
        """Require compute capability 9.0, the kernels or nvcc, and a driver for them."""
        if capability != HOPPER_CAPABILITY:
            raise LibraryError(
                "its kernels need compute capability 9.0 (Hopper), but this GPU has "
                f"{capability[0]}.{capability[1]}"
            )
        if loads:
            self.version()
        else:
            native.compile_kernels()

    def refuses_experts(
        self, experts: int, pattern: SlidePattern | None, dtype: torch.dtype, asked: bool
    ) -> str | None:
        if experts > MAX_EXPERTS:
            return f"of more than {MAX_EXPERTS} a layer"
        # In INT8 vLLM 0.25.1 would give other texts: it does not quantize the inputs of experts
        served = asked or pattern is not None or dtype != torch.int8
        return None if served else "in INT8 that are not pruned (SLIDESPARSE=require serves them)"

    def epilogue(self, dtype: str, out: str, device: torch.device | None = None) -> str:
        return "both"

    def operand(self, weight: Tensor, blocks: str = ALL_2_4) -> Tensor:
        """Return the weight packed (`slidesparse.gemm.hopper.format`), with dense blocks where needed."""
        return pack_without_plan(weight, SIX_EIGHT if blocks == CODED else None)

    def algorithms(self, problem: Problem, device: torch.device) -> list[str]:
        """Return the CANDIDATES configurations that the cost model predicts to be fastest."""
        self._require_supported(problem)
        with cuda.on_device(cuda.device_index(device)):
            return [configuration for configuration, _ in _candidates(problem, CANDIDATES)]

    def suits(self, problem: Problem, device: torch.device, algorithm: str) -> bool:
        """Return whether the cost model predicts it to be nearly as fast as the best."""
        predicted = _predictions(problem, cuda.device_index(device))
        return predicted.get(algorithm, math.inf) <= MAX_PREDICTED * min(predicted.values(), default=0.0)

    def plan(self, problem: Problem, device: torch.device, algorithm: str | None = None) -> HopperPlan:
        """Make a plan; its own choice is the first of `algorithms`."""
        self._require_supported(problem)
        with cuda.on_device(cuda.device_index(device)):
            return HopperPlan(product_layer(problem), algorithm or _candidates(problem, 1)[0][0])

    def layer_plan(self, layer: Layer, algorithm: str) -> native.Plan:
        """Make a plan of a layer as operators are called with it, on the current device, by one configuration."""
        return native.Plan(layer, algorithm)

    def serve(self, plan: native.Plan) -> None:
        """Have operators run the plan's layer by it; it must be kept until another one does, or `forget`."""
        native.library().slidesparse_hopper_serve(plan.handle)

    def forget(self) -> None:
        """Have operators make new plans, from the tuned tables, for the layers that they run from now on."""
        native.library().slidesparse_hopper_forget()

    def _require_supported(self, problem: Problem) -> None:
        self.require(problem)
        if problem.scale != "both":
            raise LibraryError(f"the Hopper kernels scale by out-feature and token, asked for {problem}")

    def pack_experts(self, weight: Tensor, pattern: SlidePattern | None, phase: int = 0) -> Tensor:
        """Pack the weights [E, N, K] of experts, see `pack`: uint8 [E, bytes], padded to the longest.

        All have a table of their blocks if one has a dense block.
        """
        mixed = stored_pattern(pattern, self.coded) is None and any(
            bool(dense_blocks(one).any()) for one in weight
        )
        packed = [pack_without_plan(one, pattern, phase, mixed) for one in weight]
        self._plan_layer(weight, pattern, phase)
        return torch.nn.utils.rnn.pad_sequence(packed, batch_first=True)

    def pack(self, weight: Tensor, pattern: SlidePattern | None, phase: int = 0) -> Tensor:
        """Return the packed windows or codes, N padded to whole strips and K' or K to whole blocks.

        A weight without a pattern, or of one beyond 6:8, is stored in blocks of 64 out-features x 128 columns, 2:4
        where their zeros allow it.
        Little temporary memory is used.  Raises LibraryError for dtypes other than INT8 and FP8.
        """
        packed = pack_without_plan(weight, pattern, phase)
        self._plan_layer(weight, pattern, phase)
        return packed

    def _plan_layer(self, weight: Tensor, pattern: SlidePattern | None, phase: int) -> None:
        """Plan the layer of a weight [..., N, K], so that it can run while a CUDA graph is captured."""
        if weight.is_cuda and weight.numel():
            *_, n, k = weight.shape
            with cuda.on_device(weight.get_device()):
                plan_layer(self.layer(n, k, pattern, phase, weight.dtype), weight.get_device())


def plan_layer(layer: Layer, device: int) -> int:
    """Return the handle of the plan that serves ``layer`` on CUDA device ``device``, the current one; made if needed.

    Raises LibraryError, also if it would have to be made during CUDA graph capture, because that loads kernels.
    """
    plan = native.find_plan(layer, device)
    if plan is None and cuda.is_capturing():
        raise LibraryError(
            f"no plan for {layer} while a CUDA graph is being captured; run the layer once before the capture"
        )
    with _planning:
        plan = plan or native.find_plan(layer, device)  # another thread may have been faster
        if plan is None:
            plan = native.make_plan(layer, configuration_table(layer, torch.device("cuda", device)))
            native.library().slidesparse_hopper_serve(plan)
    return plan


native.plan_layer = plan_layer


def configuration_table(layer: Layer, device: torch.device) -> list[tuple[int, tuple[str, ...]]]:
    """Return the configurations of a layer by number of tokens, see `native.make_plan`, tuned ones where there are.

    They are the same for outputs in BF16 and FP16, with and without a bias.  Where no near shape that was tuned on this
    GPU or a similar one has one that suits, it is the one that the cost model predicts to be fastest.  Weights with
    dense blocks use those of 2:4 blocks unless they were tuned themselves; slid and coded weights have no dense blocks.
    """
    if layer.n == 0:
        return []
    backend = Hopper()
    subject, columns = cuda.subject_of(backend, device), round_up(layer.columns, backend.alignment)
    blocks = CODED if layer.length == SIX_EIGHT.length else ALL_2_4
    problem = Problem(NAMES[layer.dtype], NAMES[OUTPUTS[0]], layer.n, columns, 1, "both", blocks=blocks)
    slid = (layer.length, layer.phase) != (HARDWARE_LENGTH, 0)
    others = [] if slid else [replace(problem, blocks=blocks) for blocks in BLOCKS[1:]]
    tokens = {*TABLE_TOKENS, *(m for kind in (problem, *others) for m in tuned.tuned_tokens(subject, kind))}
    table: list[tuple[int, tuple[str, ...]]] = []
    for m in sorted(tokens):
        algorithm = _fitting_configuration(backend, replace(problem, m=m), device)
        row = dict.fromkeys(BLOCKS, algorithm)
        for kind in others:
            row[kind.blocks] = tuned.tuned_algorithm(subject, replace(kind, m=m)) or algorithm
        if table and table[-1][1] == tuple(row.values()):
            table.pop()
        table.append((m, tuple(row.values())))
    return table


def _fitting_configuration(backend: Hopper, problem: Problem, device: torch.device) -> str:
    """Return the tuned configuration if it fits the current device, else the one that the cost model predicts."""
    found = cuda.tuned_algorithm(backend, problem, device)
    if found is not None:
        try:
            native.fit(found, DTYPES[problem.dtype])
            return found
        except LibraryError as error:
            tuned.note_refused(backend.name, tuned.Shape.of_problem(problem), found, error)
    return _candidates(problem, 1)[0][0]


def _candidates(problem: Problem, max_count: int) -> list[tuple[str, float]]:
    return native.candidates(product_layer(problem), problem.m, max_count, problem.blocks)


@lru_cache(maxsize=1)  # asked for each of the near shapes in turn
def _predictions(problem: Problem, device_index: int) -> dict[str, float]:
    """Return the microseconds that the cost model predicts, by configuration."""
    with cuda.on_device(device_index):
        return dict(_candidates(problem, MAX_CONFIGURATIONS))


def product_layer(problem: Problem) -> Layer:
    """Return the layer of a GEMM alone, whose activations have been quantized and lifted already."""
    pattern = SIX_EIGHT if problem.blocks == CODED else TWO_FOUR
    return Layer.of(problem.n, problem.k, pattern, 0, DTYPES[problem.dtype], ALIGNMENT, Hopper.coded)


def pack_without_plan(
    weight: Tensor, pattern: SlidePattern | None, phase: int = 0, mixed: bool = False
) -> Tensor:
    """Pack a weight as `Hopper.pack` does, without making a plan.

    Args:
        mixed: whether a weight without a pattern has a table of its blocks even if none is dense.
    """
    if weight.dtype not in (INT8, FP8):
        raise LibraryError(
            f"a weight of {weight.dtype}; the Hopper kernels take {INT8} and {FP8}: quantize it"
        )
    if not weight.is_cuda:
        raise LibraryError(f"a weight on {weight.device}; the Hopper kernels pack it on a GPU: move it there")
    stored, dense = stored_pattern(pattern, Hopper.coded), None
    if stored is None:
        if pattern is not None:
            require_pattern(weight, pattern, "weight", phase)
        blocks = dense_blocks(weight)
        dense = blocks if mixed or bool(blocks.any()) else None
        stored, phase = TWO_FOUR, 0
    packed, broken = pack_by_kernel(weight, stored, phase, dense)
    if broken:
        require_pattern(weight, stored, "weight", phase)  # locates the first
        raise AssertionError(f"the GPU found {broken} blocks that break {stored}, the CPU none")
    return packed


def pack_by_kernel(
    weight: Tensor, pattern: SlidePattern, phase: int = 0, dense: Tensor | None = None
) -> tuple[Tensor, int]:
    """Pack a pruned weight [N, K] INT8 or FP8 on the GPU; also return how many of its blocks break the pattern.

    Args:
        dense: from `slidesparse.blocks.dense_blocks`: the blocks to store dense; None if all are 2:4.
    """
    weight = weight if weight.stride(1) == 1 else weight.contiguous()
    n, k = weight.shape
    layer = native.integers(Layer.of(n, k, pattern, phase, weight.dtype, BLOCK))
    if dense is None:
        size = native.library().slidesparse_hopper_pack_bytes(layer)
        packed = weight.new_empty(size, dtype=torch.uint8)
    else:
        packed = allocate_mixed(dense)
    if not packed.numel():
        return packed, 0
    broken = weight.new_zeros(1, dtype=torch.int32)
    index = weight.get_device()
    with cuda.on_device(index):
        native.call(
            "pack",
            *(layer, weight.data_ptr(), weight.stride(0), dense is not None),
            *(packed.data_ptr(), broken.data_ptr(), cuda.current_stream(index)),
        )
    return packed, int(broken.item())  # synchronizes, see the module docstring
