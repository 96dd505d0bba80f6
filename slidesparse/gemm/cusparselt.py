"""NVIDIA's cuSPARSELt: 2:4 sparse GEMM on sparse tensor cores, through our binding csrc/cusparselt.cpp.

Its epilogue cannot scale by token, nor add a bias after that: `slidesparse.kernels.dequant_bias` applies all scales.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import torch
from torch import Tensor

from slidesparse.build.find import ToolchainError, require_supported
from slidesparse.gemm import cuda
from slidesparse.gemm.backend import LayerSpec, require_unbroken_blocks
from slidesparse.gemm.cuda import NativePlan
from slidesparse.gemm.library import LibraryBackend
from slidesparse.gemm.problem import TN, Layout, LibraryError, Problem, require_operand
from slidesparse.pattern import round_up

ALIGNMENT = {1: 32, 2: 16}  # bytes of an element -> the multiple of rows and columns of a weight
OUTPUTS = {
    "int8": ("bf16", "int32", "fp16", "int8"),
    "fp8": ("bf16", "fp32", "fp16"),
    "fp16": ("fp16",),
    "bf16": ("bf16",),
}
SPLIT_COUNTS = (2, 3, 4, 8)
SPLIT_MODES = (1, 2, 5)  # cusparseLtSplitKMode_t: one kernel, two kernels, split-K
UNSPLIT_MODES = (4, 6)  # without splits: data-parallel, stream-K
PROBE_SHAPE = (128, 2048, 64)  # n, k and m of the problem with which supported modes are probed
# (version, capability, dtype) -> ids of algorithms whose kernels fail with an illegal instruction, after which every
# CUDA call of the process fails.  Each of the 52 was run in a process of its own, at 64 x 64 x 64 and 4608 x 3584 x 64;
# the others give right results.
CRASHING_ALGORITHMS = {("0.8.0", (9, 0), "fp16"): range(36, 52)}
METADATA_TILE_ROWS = 128  # rows of a tile of metadata; a chunk of a weight is whole tiles
CHUNK_BYTES = 16 << 20  # bytes of windows that are compressed at a time
# Bytes allocated behind a compressed weight: the library's kernels read metadata in 128 x 64 tiles of 1 KiB, even if
# the number of rows is not a multiple of 128 (compute-sanitizer reports it).  The excess belongs to rows beyond N.
SLACK_BYTES = 4096


class CuSparseLt(LibraryBackend):
    """See `slidesparse.gemm.backend.Tunable`."""

    name = "cusparselt"
    takes_dense = False
    sparse = True
    alignment = 32  # K of a sparse 8-bit GEMM must be a multiple of this
    products = OUTPUTS

    def version(self) -> str:
        """See `Tunable.version`."""
        version = tuple(cuda.call(cuda.extension(self.name).version))
        try:
            require_supported(self.name, version)
        except ToolchainError as error:
            raise LibraryError(str(error)) from None
        return ".".join(map(str, version))

    def epilogue(self, dtype: str, out: str, device: torch.device | None = None) -> str:
        """See `Tunable.epilogue`: none, since the kernel that applies token scales applies both in one pass."""
        return "none"

    def operand(self, weight: Tensor, layout: Layout = TN) -> Tensor:
        """See `Tunable.operand`: the library's values and metadata, and slack; n and k are multiples of `ALIGNMENT`."""
        dtype = require_operand(weight.dtype)
        n, k = weight.shape
        multiple = ALIGNMENT[weight.element_size()]
        if not weight.is_cuda:
            raise LibraryError(
                f"cuSPARSELt packs weights on a GPU, but this one is on {weight.device}: move it to the GPU"
            )
        if n % multiple or k % multiple:
            raise LibraryError(
                f"cuSPARSELt takes weights whose sides are multiples of {multiple}, found {n} x {k}: pad it with zeros"
            )
        weight = weight.contiguous() if layout.weight_k else weight.t().contiguous()
        problem, index = Problem(dtype, OUTPUTS[dtype][0], n, k, cuda.MIN_ROWS), weight.device.index
        with cuda.on_device(index):
            compressor = cuda.plan_cache(self.name, index).get(
                ("compress", dtype, n, k, layout), self._native_plan, problem, weight.device, None, layout
            )
            size, buffer_size = cuda.call(compressor.compressed_size)
            compressed = torch.empty(size + SLACK_BYTES, dtype=torch.uint8, device=weight.device)
            buffer = torch.empty(max(1, buffer_size), dtype=torch.uint8, device=weight.device)
            stream = cuda.current_stream(index)
            cuda.call(
                compressor.compress, weight.data_ptr(), compressed.data_ptr(), buffer.data_ptr(), stream
            )
        return compressed

    def algorithms(self, problem: Problem, device: torch.device, layout: Layout = TN) -> list[str]:
        """See `Tunable.algorithms`: ids such as "3" and, if tiles are too few, "3/2x1": id/splits x mode."""
        count = self._native_plan(problem, device, None, layout).algorithms
        ids = [i for i in range(count) if i not in self._crashing_algorithms(problem, device)]
        names = [str(i) for i in ids]
        tiles = -(-problem.n // 128) * -(-problem.m // 128)
        if tiles < 2 * torch.cuda.get_device_properties(device).multi_processor_count:
            splits = self._split_variants(problem.dtype, problem.out, device)
            names += [f"{i}/{split}" for i in ids for split in splits]
        return names

    def unsplit(self, algorithm: str) -> str | None:
        """See `Tunable.unsplit`: "3/2x1" becomes "3"."""
        unsplit, suffix, _ = algorithm.partition("/")
        return unsplit if suffix else None

    def _crashing_algorithms(self, problem: Problem, device: torch.device) -> range:
        if problem.dtype not in {dtype for *_, dtype in CRASHING_ALGORITHMS}:
            return range(0)
        return CRASHING_ALGORITHMS.get(
            (self.version(), torch.cuda.get_device_capability(device), problem.dtype), range(0)
        )

    def plan(
        self, problem: Problem, device: torch.device, algorithm: str | None = None, layout: Layout = TN
    ) -> NativePlan:
        """See `Tunable.plan`."""
        native = self._native_plan(problem, device, algorithm, layout)
        return NativePlan(native, algorithm, cuda.device_index(device))

    def _native_plan(
        self, problem: Problem, device: torch.device, algorithm: str | None, layout: Layout = TN
    ) -> Any:
        self.require(problem)
        if problem.bias or problem.scale != "none":
            raise LibraryError(f"cuSPARSELt applies neither scales nor a bias, asked for {problem}")
        numbers = _parse_algorithm(algorithm)
        if numbers[0] in self._crashing_algorithms(problem, device):
            raise LibraryError(
                f"algorithm {algorithm} of cuSPARSELt {self.version()} crashes for {problem} on this GPU; take another"
            )
        module, index = cuda.extension(self.name), cuda.device_index(device)
        with cuda.on_device(index):
            return cuda.call(
                module.Plan,
                cuda.handle(self.name, index),
                *(problem.n, problem.k, problem.m),
                *(module.TYPES[problem.dtype], module.TYPES[problem.out], module.COMPUTE[problem.dtype]),
                module.Algorithm(*numbers),
                module.Layout(layout.weight_k, layout.activations_k, layout.output_n),
                f"{problem}, {layout}, by algorithm {algorithm or 'of its own choice'}",
            )

    @cache  # noqa: B019  there is one object
    def _split_variants(self, dtype: str, out: str, device: torch.device) -> tuple[str, ...]:
        """Return the split-K variants, such as "2x1", that every eighth algorithm has; on Hopper 0.8.0 has none."""
        problem = Problem(dtype, out, *PROBE_SHAPE)
        ids = range(0, self._native_plan(problem, device, None).algorithms, 8)  # rejecting one takes 8 ms
        variants = [f"{splits}x{mode}" for splits in SPLIT_COUNTS for mode in SPLIT_MODES]
        variants += [f"1x{mode}" for mode in UNSPLIT_MODES]
        return tuple(
            variant
            for variant in variants
            if any(self._accepts_algorithm(problem, device, f"{i}/{variant}") for i in ids)
        )

    def _accepts_algorithm(self, problem: Problem, device: torch.device, algorithm: str) -> bool:
        try:
            self._native_plan(problem, device, algorithm)
        except LibraryError:
            return False
        return True

    def pack(self, spec: LayerSpec, weight: Tensor) -> Tensor:
        """See `Backend.pack`: slid into 2:4 windows and compressed, [bytes].

        N and K' are padded with zeros to multiples of 32.  The weight is processed in chunks of rows, so that temporary
        memory is little more than CHUNK_BYTES.
        """
        from slidesparse.kernels.slide_weight import slide_weight  # late: needs Triton

        layout, columns = spec.layout, spec.columns(self.alignment)
        n, padded = weight.shape[0], round_up(weight.shape[0], self.alignment)
        step = max(
            METADATA_TILE_ROWS, CHUNK_BYTES // max(1, columns) // METADATA_TILE_ROWS * METADATA_TILE_ROWS
        )
        if padded % METADATA_TILE_ROWS or not self._compresses_in_chunks(weight.device, weight.dtype):
            step = padded
        broken = torch.zeros(1, dtype=torch.int32, device=weight.device)
        packed: Tensor | None = None
        for start in range(0, padded, step):
            rows = min(step, padded - start)
            windows = torch.empty(rows, columns, dtype=torch.int8, device=weight.device).view(weight.dtype)
            part = weight[start : min(start + rows, n)]
            broken += slide_weight(part, layout.length, layout.phase, windows[: len(part)])
            windows[len(part) :].view(torch.int8).zero_()
            compressed = self.operand(windows)
            if packed is None:
                size = (compressed.numel() - SLACK_BYTES) // rows * padded + SLACK_BYTES
                packed = compressed if rows == padded else compressed.new_empty(size)
            if rows < padded:
                _copy_chunk(packed, compressed, start, rows, padded, columns)
        assert packed is not None
        require_unbroken_blocks(spec, weight, int(broken.item()))
        return packed

    def is_packed_for(self, weight: Tensor, n: int, k: int, dtype: torch.dtype) -> bool:
        """See `LibraryBackend.is_packed_for`; the size of the metadata is up to the library."""
        return weight.dtype == torch.uint8 and weight.numel() >= n * k // 2

    @cache  # noqa: B019  there is one object
    def _compresses_in_chunks(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Return whether compressing chunks of rows gives what compressing the whole weight gives."""
        columns, rows = 256, 3 * METADATA_TILE_ROWS
        generator = torch.Generator(device).manual_seed(0)  # vLLM samples by torch's own
        weight = torch.randint(1, 100, (rows, columns), generator=generator, dtype=torch.int8, device=device)
        column = torch.arange(columns, device=device)
        row = torch.arange(rows, device=device)[:, None] % 12
        weight = torch.where((column + row // 3) % 4 < 2, weight, 0).view(dtype)
        expected = self.operand(weight)
        packed = torch.empty_like(expected)
        for start in range(0, rows, METADATA_TILE_ROWS):
            part = weight[start : start + METADATA_TILE_ROWS]
            compressed = self.operand(part)
            if (compressed.numel() - SLACK_BYTES) * rows != (expected.numel() - SLACK_BYTES) * len(part):
                return False
            _copy_chunk(packed, compressed, start, len(part), rows, columns)
        return torch.equal(packed[:-SLACK_BYTES], expected[:-SLACK_BYTES])


def _parse_algorithm(algorithm: str | None) -> tuple[int, int, int]:
    """Parse an algorithm into its id, splits and mode."""
    if not algorithm:
        return -1, 1, 0
    match = re.fullmatch(r"(\d+)(?:/(\d+)x(\d+))?", algorithm)
    if match is None:
        raise LibraryError(f"{algorithm!r} is no cuSPARSELt algorithm, such as '3' or '3/2x1'")
    algorithm_id, splits, mode = match.groups(default="")
    return int(algorithm_id), int(splits or 1), int(mode or 0)


# A compressed weight of N rows holds its values, K' / 2 bytes a row, and then its metadata, some bytes a row::
#
#     values of rows 0 .. N-1 | metadata of rows 0 .. N-1
#
# Metadata is laid out in tiles of METADATA_TILE_ROWS rows, so a weight of whole tiles can be compressed chunk by chunk.
# The library does not guarantee this, so `CuSparseLt._compresses_in_chunks` checks it once per device and type.


def _copy_chunk(
    packed: Tensor, compressed: Tensor, start: int, rows: int, total_rows: int, columns: int
) -> None:
    values, metadata = columns // 2, (compressed.numel() - SLACK_BYTES) // rows - columns // 2
    packed[start * values : (start + rows) * values] = compressed[: rows * values]
    offset = total_rows * values + start * metadata
    packed[offset : offset + rows * metadata] = compressed[rows * values : rows * (values + metadata)]
