"""NVIDIA's cuSPARSELt: 2:4 sparse GEMM on sparse tensor cores, through our binding csrc/cusparselt.cpp.

The library puts the sparse matrix on the left, so that a vector of scales in its epilogue is one per out-feature.  The
scale of a token, and a bias, which comes after it, it cannot apply: `slidesparse.kernels.dequant_bias` does.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import torch
from torch import Tensor

from slidesparse import profiling, toolchain
from slidesparse.gemm import library, plans
from slidesparse.gemm.library import (
    NAMES,
    TN,
    Layout,
    LibraryError,
    Problem,
    require_operand,
)
from slidesparse.gemm.native import NativeLibrary, NativePlan
from slidesparse.pattern import HARDWARE_LENGTH, SlideLayout, SlidePattern
from slidesparse.slide import require_pattern

ALIGNMENT = {1: 32, 2: 16}  # bytes of an element -> the multiple of rows and columns of a weight
OUTPUTS = {
    "int8": ("bf16", "int32", "fp16", "int8"),
    "fp8": ("bf16", "fp32", "fp16"),
    "fp16": ("fp16",),
    "bf16": ("bf16",),
}
SPLITS = (2, 3, 4, 8)
SPLIT_MODES = (1, 2, 5)  # cusparseLtSplitKMode_t: one kernel, two kernels, split-K
WHOLE_MODES = (4, 6)  # without a number of splits: data-parallel, stream-K
PROBED = (128, 2048, 64)  # n, k and m of the product that is asked whether a mode is there
# (version, capability, dtype) -> ids of algorithms whose kernel dies of an illegal instruction, which ends every CUDA
# call of the process.  Each of the 52 was run in its own, at 64 x 64 x 64 and 4608 x 3584 x 64; the others are right.
CRASHING = {("0.8.0", (9, 0), "fp16"): range(36, 52)}
ROWS = 128  # of a chunk of a weight, or a multiple
CHUNK = 16 << 20  # bytes of windows that are compressed at a time
# Bytes behind a compressed weight: the library's kernels read metadata by 128 x 64 tiles of 1 KiB, also the last one of
# a weight whose rows are no multiple of 128 (compute-sanitizer sees it).  What is read there concerns rows beyond N.
SLACK = 4096


class Library(NativeLibrary):
    """See `slidesparse.gemm.library.Library`."""

    name = "cusparselt"
    sparse = True
    alignment = 32  # of K in a sparse 8-bit product
    products = OUTPUTS

    def version(self) -> str:
        """Such as "0.8.0"; see `slidesparse.gemm.library.Library`."""
        found = tuple(plans.call(plans.extension(self.name).version))
        try:
            toolchain.require_supported(self.name, found)
        except toolchain.ToolchainError as error:
            raise LibraryError(str(error)) from None
        return ".".join(map(str, found))

    def epilogue(self, dtype: str, out: str, device: torch.device | None = None) -> str:
        """What serving asks for: nothing, since the kernel that applies token scales applies both in one pass."""
        return "none"

    def pack(self, weight: Tensor, layout: Layout = TN) -> Tensor:
        """2:4 [n, k] -> the library's values and metadata, and SLACK [bytes]; n and k are multiples of `ALIGNMENT`."""
        dtype = require_operand(weight.dtype)
        n, k = weight.shape
        multiple = ALIGNMENT[weight.element_size()]
        if not weight.is_cuda:
            raise LibraryError(
                f"cuSPARSELt packs weights on a GPU, found one on {weight.device}: move it there"
            )
        if n % multiple or k % multiple:
            raise LibraryError(
                f"cuSPARSELt takes weights whose sides are multiples of {multiple}, found {n} x {k}: pad it with zeros"
            )
        weight = weight.contiguous() if layout.weight_k else weight.t().contiguous()
        problem, index = Problem(dtype, OUTPUTS[dtype][0], n, k, plans.LEAST_ROWS), weight.device.index
        with plans.on_device(index):
            compressor = plans.plans(self.name, index).get(
                ("compress", dtype, n, k, layout), self._native, problem, weight.device, None, layout
            )
            size, buffer_size = plans.call(compressor.compressed_size)
            compressed = torch.empty(size + SLACK, dtype=torch.uint8, device=weight.device)
            buffer = torch.empty(max(1, buffer_size), dtype=torch.uint8, device=weight.device)
            stream = plans.stream_of(index)
            plans.call(
                compressor.compress, weight.data_ptr(), compressed.data_ptr(), buffer.data_ptr(), stream
            )
        return compressed

    def algorithms(self, problem: Problem, device: torch.device, layout: Layout = TN) -> list[str]:
        """Ids, and where tiles are too few to fill the GPU, ids with each way of splitting K that the GPU has.

        As text: "3", "3/2x1" (id/splits x mode).
        """
        count = self._native(problem, device, None, layout).algorithms
        ids = [i for i in range(count) if i not in self._crashing(problem, device)]
        found = [str(i) for i in ids]
        tiles = -(-problem.n // 128) * -(-problem.m // 128)
        if tiles < 2 * torch.cuda.get_device_properties(device).multi_processor_count:
            splits = _splits(problem.dtype, problem.out, problem.scale, device)
            found += [f"{i}/{split}" for i in ids for split in splits]
        return found

    def unsplit(self, algorithm: str) -> str | None:
        """Of "3/2x1" it is "3"."""
        whole, way, _ = algorithm.partition("/")
        return whole if way else None

    def _crashing(self, problem: Problem, device: torch.device) -> range:
        if problem.dtype not in {dtype for *_, dtype in CRASHING}:
            return range(0)
        return CRASHING.get(
            (self.version(), torch.cuda.get_device_capability(device), problem.dtype), range(0)
        )

    def plan(
        self,
        problem: Problem,
        device: torch.device,
        algorithm: str | None = None,
        layout: Layout = TN,
    ) -> NativePlan:
        """See `slidesparse.gemm.library.Library`."""
        native = self._native(problem, device, algorithm, layout)
        return NativePlan(native, algorithm, plans.index_of(device))

    def _native(
        self, problem: Problem, device: torch.device, algorithm: str | None, layout: Layout = TN
    ) -> Any:
        self.require(problem, device)
        if problem.bias or problem.scale == "both":
            raise LibraryError(f"cuSPARSELt can scale by out-feature only, asked for {problem}")
        numbers = _numbers(algorithm)
        if numbers[0] in self._crashing(problem, device):
            raise LibraryError(
                f"algorithm {algorithm} of cuSPARSELt {self.version()} crashes for {problem} on this GPU; take another"
            )
        module, index = plans.extension(self.name), plans.index_of(device)
        with plans.on_device(index):
            return plans.call(
                module.Plan,
                plans.handle(self.name, index),
                *(problem.n, problem.k, problem.m),
                *(module.TYPES[problem.dtype], module.TYPES[problem.out], module.COMPUTE[problem.dtype]),
                problem.scale == "channel",
                module.Algorithm(*numbers),
                module.Layout(layout.weight_k, layout.activations_k, layout.output_n),
                f"{problem}, {layout}, by algorithm {algorithm or 'of its own choice'}",
            )


LIBRARY = Library()


@cache
def _splits(dtype: str, out: str, scale: str, device: torch.device) -> tuple[str, ...]:
    """The ways of splitting K, as "2x1", that one of every eighth algorithm takes; on Hopper none of 0.8.0 does."""
    problem = Problem(dtype, out, *PROBED, scale)
    ids = range(0, LIBRARY._native(problem, device, None).algorithms, 8)  # a refusal takes 8 ms
    ways = [f"{splits}x{mode}" for splits in SPLITS for mode in SPLIT_MODES]
    ways += [f"1x{mode}" for mode in WHOLE_MODES]
    return tuple(way for way in ways if any(_accepts(problem, device, f"{i}/{way}") for i in ids))


def _accepts(problem: Problem, device: torch.device, algorithm: str) -> bool:
    try:
        LIBRARY._native(problem, device, algorithm)
    except LibraryError:
        return False
    return True


def _numbers(algorithm: str | None) -> tuple[int, int, int, int]:
    """id, splits, mode and buffers of an algorithm's text."""
    if not algorithm:
        return -1, 1, 0, 0
    found = re.fullmatch(r"(\d+)(?:/(\d+)x(\d+))?", algorithm)
    if found is None:
        raise LibraryError(f"{algorithm!r} is no cuSPARSELt algorithm, such as '3' or '3/2x1'")
    first, splits, mode = found.groups(default="")
    return int(first), int(splits or 1), int(mode or 0), 0


class CuSparseLt:
    """The provider: see `slidesparse.gemm.GemmProvider`.

    BF16 layers take the product in BF16 and scale that; others take INT32 or float32 sums.  Both libraries and
    stock vLLM round to BF16 at the end; here the sum is rounded to BF16 as well, half an ulp more, which halves the
    bytes between GEMM and scaling.
    """

    name = "cusparselt"
    alignment = LIBRARY.alignment
    outputs = (torch.bfloat16, torch.float16, torch.float32)

    def unusable(self, device: torch.device) -> str | None:
        """See `Library.unusable`."""
        return LIBRARY.unusable(device)

    def pack(self, weight: Tensor) -> Tensor:
        """2:4 [N, K'] INT8 or FP8 -> packed; N and K' are padded with zeros to multiples of 32.

        Raises PatternError for a weight that is not 2:4.
        """
        pattern = SlidePattern(HARDWARE_LENGTH)
        packed, broken = self.slide_and_pack(weight, pattern.layout(weight.shape[1]))
        if broken:
            require_pattern(weight, pattern, "weight")
        return packed

    def scaled_matmul(
        self,
        q: Tensor,
        scale_x: Tensor,
        weight: Tensor,
        scale_w: Tensor,
        bias: Tensor | None,
        out_dtype: torch.dtype,
    ) -> Tensor:
        """See `slidesparse.gemm.GemmProvider.scaled_matmul`."""
        from slidesparse.kernels.dequant_bias import dequant_bias  # late: needs Triton

        m, n = q.shape[0], scale_w.shape[0]
        if m == 0:
            return q.new_empty(0, n, dtype=out_dtype)
        sums = out_dtype if out_dtype == torch.bfloat16 else plans.SUMS[q.dtype]
        with profiling.stage("product", q):
            acc = self.accumulate(q, weight, n, sums)
        with profiling.stage("scale", q):
            return dequant_bias(acc, scale_x, scale_w, bias, out_dtype)

    def accumulate(self, q: Tensor, weight: Tensor, n: int, dtype: torch.dtype) -> Tensor:
        """q [M, K'] @ weight.T, not scaled -> [M, N] of ``dtype`` (INT32 or float32: full sums; BF16), rows strided."""
        if q.shape[1] % self.alignment:
            q = plans.pad(q, self.alignment)
        (m, k), columns, index = q.shape, n + -n % self.alignment, q.get_device()
        if weight.dtype != torch.uint8 or weight.numel() < columns * k // 2:  # its values alone
            raise LibraryError(
                f"a weight of {weight.dtype} {tuple(weight.shape)} for products [{m}, {k}] @ [{n}, {k}].T: pack the "
                "weight for the backend cusparselt, from windows of as many columns"
            )
        rows = plans.bucket(m)
        key = (q.dtype, dtype, columns, k, rows)
        with plans.on_device(index):
            plan = plans.plans(self.name, index).get(key, self._plan, *key, q.device)
            profiling.chose(plan.algorithm)
            out = q.new_empty(rows, columns, dtype=dtype)
            plan.run(q if rows == m else plans.with_rows(q, rows), weight, out)
        return out if rows == m and columns == n else out[:m, :n]

    def slide_and_pack(self, weight: Tensor, layout: SlideLayout) -> tuple[Tensor, int]:
        """A pruned weight [N, K] INT8 or FP8 -> the packed form of its windows, and how many blocks break the pattern.

        Chunk by chunk of rows, so that next to the weight and the result there is little more than CHUNK bytes.
        With blocks that break the pattern the packed form is of no use.
        """
        from slidesparse.kernels.slide_weight import slide_weight  # late: needs Triton

        n, columns = weight.shape[0], layout.slided + -layout.slided % self.alignment
        padded = n + -n % self.alignment
        step = max(ROWS, CHUNK // max(1, columns) // ROWS * ROWS)
        if padded % ROWS or not _concatenates(weight.device, weight.dtype):
            step = padded
        broken = torch.zeros(1, dtype=torch.int32, device=weight.device)
        packed: Tensor | None = None
        for start in range(0, padded, step):
            rows = min(step, padded - start)
            windows = torch.empty(rows, columns, dtype=torch.int8, device=weight.device).view(weight.dtype)
            part = weight[start : min(start + rows, n)]
            broken += slide_weight(
                part, layout.length, layout.phase, windows[: len(part)], normalise_zero=True
            )
            windows[len(part) :].view(torch.int8).zero_()
            compressed = LIBRARY.pack(windows)
            if packed is None:
                packed = compressed if rows == padded else _empty_like_whole(compressed, padded, rows)
            if rows < padded:
                _place(packed, compressed, start, rows, padded, columns)
        assert packed is not None
        return packed, int(broken.item())

    def _plan(
        self, operand: torch.dtype, out: torch.dtype, n: int, k: int, m: int, device: torch.device
    ) -> library.Plan:
        problem = Problem(NAMES[operand], NAMES[out], n, k, m)
        return plans.tuned_plan(LIBRARY, problem, device)


# A compressed weight of N rows holds its values, K' / 2 bytes a row, and then its metadata, some bytes a row::
#
#     values of rows 0 .. N-1 | metadata of rows 0 .. N-1
#
# Metadata is laid out in tiles of ROWS rows, so a weight of whole tiles can be compressed chunk by chunk.  The library
# does not promise it: `_concatenates` looks, once a device and type.


def _empty_like_whole(compressed: Tensor, whole: int, rows: int) -> Tensor:
    return compressed.new_empty((compressed.numel() - SLACK) // rows * whole + SLACK)


def _place(packed: Tensor, compressed: Tensor, start: int, rows: int, whole: int, columns: int) -> None:
    values, metadata = columns // 2, (compressed.numel() - SLACK) // rows - columns // 2
    packed[start * values : (start + rows) * values] = compressed[: rows * values]
    at = whole * values + start * metadata
    packed[at : at + rows * metadata] = compressed[rows * values : rows * (values + metadata)]


@cache
def _concatenates(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether compressing chunks of rows gives what compressing the whole weight gives."""
    columns, whole = 256, 3 * ROWS
    weight = torch.randint(1, 100, (whole, columns), dtype=torch.int8, device=device)
    column = torch.arange(columns, device=device)
    kept = torch.stack([(column + row // 3) % 4 < 2 for row in range(12)]).repeat(whole // 12 + 1, 1)[:whole]
    weight = torch.where(kept, weight, 0).view(dtype)
    expected = LIBRARY.pack(weight)
    found = torch.empty_like(expected)
    for start in range(0, whole, ROWS):
        part = weight[start : start + ROWS]
        compressed = LIBRARY.pack(part)
        if (compressed.numel() - SLACK) * whole != (expected.numel() - SLACK) * len(part):
            return False
        _place(found, compressed, start, len(part), whole, columns)
    return torch.equal(found[:-SLACK], expected[:-SLACK])
