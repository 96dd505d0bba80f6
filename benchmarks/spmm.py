"""Hand-written N:M products (`slidesparse.spmm`) beside one thread of the CPU, cuBLAS and sparse tensor cores.

Every result is compared with float64.  Figures of one shape are measured one after the other, on random numbers, dense
ones for cuBLAS: a pruned weight would let it run at less power.  cuBLAS is `torch.matmul` with x [M, K] and weights
[N, K] as in a model; our kernels get operands whose tokens and out-features are contiguous.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.kernel import DENSE, SQUARE
from benchmarks.records import SPMM, Records
from benchmarks.timing import percentiles, time_exactly
from slidesparse.gemm.backend import TWO_FOUR, Tunable
from slidesparse.gemm.problem import DTYPES, LibraryError, Problem
from slidesparse.spmm import MAX_GROUP, STRIP, Compressed, compress, decompress, prune, sequential, spmm
from slidesparse.tune.inputs import clones
from slidesparse.tune.measure import Launch, Timing
from slidesparse.tune.session import Session
from slidesparse.tune.shapes import Layer, ShapeError, slided_columns, split_list

VARIANTS = {  # name -> (variant of `spmm`, splits)
    "baseline": ("baseline", 1),
    "prefetch": ("prefetch", 1),
    "double": ("double", 1),
    "split2": ("double", 2),
    "split8": ("double", 8),
}
CUBLAS, TF32, CPU = "cublas", "cublas-tf32", "cpu"
TYPES = ("fp32", "fp16")
LIBRARY_TYPES = ("int8", "fp8", "fp16")
OWN, SHARED, NONE = "own", "strip", "-"
CPU_MAX_SIZE = 1024  # the largest square that one thread multiplies
CPU_SAMPLES, CPU_SECONDS = 5, 1.0
CHUNK_ELEMENTS = 2**26  # float64 elements that the check computes at a time
MAX_ERROR = 1e-3  # absolute limit for our kernels
ROUNDING_UNITS = {"fp32": 0.0, "fp16": 2.0**-11}  # for the rounding of a stored result


@dataclass(frozen=True)
class Shape:
    """A product [M, K] @ [N, K].T."""

    mode: str  # "square" or "model"
    model: str
    layer: Layer
    m: int


@dataclass(frozen=True)
class Job:
    """Cells that share their operands."""

    shape: Shape
    dtype: str
    sparsity: str
    offsets: str
    providers: tuple[str, ...]
    library: Tunable | None = None

    def row(self, provider: str) -> dict[str, object]:
        """Return the key of a cell."""
        shape, layer = self.shape, self.shape.layer
        return {
            "mode": shape.mode,
            "model": shape.model,
            "layer": layer.name,
            "dtype": self.dtype,
            "sparsity": self.sparsity,
            "offsets": self.offsets,
            "M": shape.m,
            "N": layer.n,
            "K": layer.k,
            "provider": provider,
        }


def squares(sizes: Sequence[int]) -> list[Shape]:
    """Return square products with M = N = K."""
    return [Shape(SQUARE, SQUARE, Layer(SQUARE, size, size), size) for size in sizes]


def layers(models: Sequence[tuple[str, tuple[Layer, ...]]], tokens: Sequence[int]) -> list[Shape]:
    """Return the layers of models at several numbers of tokens."""
    return [
        Shape("model", name, layer, m)
        for name, model_layers in models
        for layer in model_layers
        for m in tokens
    ]


def parse_sparsities(text: str) -> tuple[str, ...]:
    """Parse ``"2:4,1:4"`` into ("2:4", "1:4").  Raises ShapeError."""
    sparsities = tuple(split_list(text))
    for sparsity in sparsities:
        kept, group = split_sparsity(sparsity) if re.fullmatch(r"\d+:\d+", sparsity) else (0, 0)
        if not 1 <= kept <= group <= MAX_GROUP:
            raise ShapeError(
                f"--sparsity {sparsity!r} is not KEPT:GROUP, such as 2:4, of groups of at most {MAX_GROUP}"
            )
    if not sparsities:
        raise ShapeError("--sparsity is empty; use KEPT:GROUP, such as 2:4,1:4")
    return sparsities


def split_sparsity(sparsity: str) -> tuple[int, int]:
    """Parse ``"2:4"`` into (2, 4)."""
    kept, _, group = sparsity.partition(":")
    return int(kept), int(group)


def jobs(
    shapes: Sequence[Shape], dtypes: Sequence[str], sparsities: Sequence[str], libraries: Sequence[Tunable]
) -> list[Job]:
    """Return the jobs, shape by shape: dense, ours, the libraries' and the CPU's."""
    planned = []
    for shape in shapes:
        for dtype in dtypes:
            dense = (CUBLAS, TF32) if dtype == "fp32" else (CUBLAS,)
            planned.append(Job(shape, dtype, DENSE, NONE, dense))
            for number, sparsity in enumerate(sparsities):
                if number == 0 or shape.mode == SQUARE:
                    for offsets in (OWN, SHARED) if number == 0 else (OWN,):
                        planned.append(Job(shape, dtype, sparsity, offsets, tuple(VARIANTS)))
        for library in libraries:
            for dtype in LIBRARY_TYPES:
                if library.output_types(dtype):
                    planned.append(Job(shape, dtype, TWO_FOUR.ratio, OWN, (library.name,), library))
        if shape.mode == SQUARE and shape.m <= CPU_MAX_SIZE and "fp32" in dtypes:
            planned.append(Job(shape, "fp32", sparsities[0], OWN, (CPU,)))
    return planned


class SpmmBench:
    """Fills FOLDER/spmm.csv."""

    def __init__(self, session: Session, folder: Path, todo: Sequence[Job]) -> None:
        self._session, self._jobs = session, todo
        self.records = Records(folder, SPMM)
        self.count = sum(len(job.providers) for job in todo)

    def run(self) -> bool:
        """Measure what is not in the table; return False if the time limit was reached first."""
        return all(self._run(job) for job in self._jobs)

    def _run(self, job: Job) -> bool:
        missing = [name for name in job.providers if not self.records.has(job.row(name))]
        measured = self._measure(job, missing)
        try:
            for _ in missing:
                if self._session.deadline.passed:
                    return False
                self._note(job, *next(measured))
        except LibraryError as error:
            self._session.skipped.append(f"{missing[-1]} {job.dtype} {job.sparsity}: {error}")
        for provider in job.providers:
            self._session.advance(f"{job.shape.layer.name} {job.dtype} {provider} M={job.shape.m}")
        if missing:
            torch.cuda.empty_cache()
        return True

    def _note(self, job: Job, provider: str, timing: Timing, error: float, most: float) -> None:
        """Add a row, unless the result is wrong."""
        shape = job.shape
        subject = f"{provider} {job.dtype} {job.sparsity} {job.offsets} M={shape.m} {shape.layer}"
        if not error <= most:  # NaN is wrong, too
            self._session.skipped.append(f"{subject}: wrong by {error:.1e}, {most:.1e} is allowed")
            return
        if not timing.graphed:
            self._session.skipped.append(f"{subject} was timed without a CUDA graph")
        self.records.add(job.row(provider) | percentiles(timing) | {"error": f"{error:.1e}"})

    def _measure(self, job: Job, missing: Sequence[str]) -> Iterator[tuple[str, Timing, float, float]]:
        """Yield (provider, timing, error, allowed error) of each missing provider."""
        if job.library is not None:
            yield job.library.name, *self._by_library(job, job.library)
        elif job.sparsity == DENSE:
            yield from self._dense(job, missing)
        elif CPU in missing:
            yield CPU, *self._by_cpu(job)
        else:
            yield from self._ours(job, missing)

    def _weight(self, job: Job) -> Compressed:
        """Return a random pruned weight."""
        kept, group = split_sparsity(job.sparsity)
        strip = STRIP if job.offsets == SHARED else 1
        layer = job.shape.layer
        dense = self._session.inputs.floats((layer.n, layer.k), DTYPES[job.dtype])
        return compress(prune(dense, kept, group, strip), kept, group, strip)

    def _ours(self, job: Job, missing: Sequence[str]) -> Iterator[tuple[str, Timing, float, float]]:
        session, m, layer = self._session, job.shape.m, job.shape.layer
        weight = self._weight(job)
        size, rows = DTYPES[job.dtype].itemsize, weight.values.shape[0]
        copies = session.inputs.copies_exceeding_l2(
            (layer.k + layer.n) * m * size + rows * layer.n * (size + 1)
        )
        weights = [weight, *(weight.to(session.gpu.device, copy=True) for _ in range(copies - 1))]
        x = [tokens.t() for tokens in session.inputs.activations(job.dtype, layer.k, m, copies)]
        right = _Expected(x[0], decompress(weight))
        most = min(allowed_error(rows) + ROUNDING_UNITS[job.dtype], MAX_ERROR)
        for name in missing:
            variant, splits = VARIANTS[name]

            def launch(i: int, variant: str = variant, splits: int = splits) -> Tensor:
                return spmm(x[i], weights[i], variant, splits)

            yield name, *self._timed(launch, copies, right), most

    def _dense(self, job: Job, missing: Sequence[str]) -> Iterator[tuple[str, Timing, float, float]]:
        """Measure cuBLAS: float32 with and without TF32, float16 with float32 sums."""
        session, m, layer = self._session, job.shape.m, job.shape.layer
        dtype = DTYPES[job.dtype]
        copies = session.inputs.copies_exceeding_l2(
            ((layer.k + layer.n) * m + layer.k * layer.n) * dtype.itemsize
        )
        x = session.inputs.activations(job.dtype, m, layer.k, copies)
        weights = [session.inputs.floats((layer.n, layer.k), dtype) for _ in range(copies)]
        right = _Expected(x[0], weights[0])
        for name in missing:
            with matmul(tf32=name == TF32):
                timed = self._timed(lambda i: torch.mm(x[i], weights[i].t()), copies, right)
            # the worst-case bound, as tensor cores may truncate sums; TF32 truncates each factor to 10 bits
            yield (
                name,
                *timed,
                layer.k * 2.0**-23 + ROUNDING_UNITS[job.dtype] + (2.0**-9 if name == TF32 else 0),
            )

    def _timed(self, launch: Launch, copies: int, right: _Expected) -> tuple[Timing, float]:
        result = launch(0)
        assert isinstance(result, Tensor)
        return time_exactly(self._session.clock, launch, copies), right.error(result)

    def _by_library(self, job: Job, library: Tunable) -> tuple[Timing, float, float]:
        """Measure a sparse library with its best algorithm, in its own precision."""
        session, layer, dtype = self._session, job.shape.layer, job.dtype
        out = library.output_types(dtype)[0]
        columns = slided_columns(layer.k, TWO_FOUR.ratio, library.alignment)
        problem = Problem(dtype, out, layer.n, columns, job.shape.m, library.epilogue(dtype, out))
        weight = session.inputs.weight(dtype, layer.n, columns, sparse=True)
        packed = clones(library.operand(weight), session.inputs.copies(problem))
        result = session.search(library, problem, packed)
        operands = session.inputs.operands(problem, packed)
        operands.launch(library.plan(problem, session.gpu.device, result.algorithm))(0)
        x, w = operands.activations[0].float(), weight.float()
        if operands.scale_x is not None:
            x = x * operands.scale_x[:, None]
        if operands.scale_w is not None:
            w = w * operands.scale_w[:, None]
        # sums of FP8 are cut to 14 bits (`slidesparse.tune.search.outputs_agree`), and results to BF16
        return result.timing, _Expected(x, w).error(operands.outs[0]), 2.0**-7

    def _by_cpu(self, job: Job) -> tuple[Timing, float, float]:
        weight = self._weight(job).to("cpu")
        x = torch.randn(job.shape.layer.k, job.shape.m).t()
        samples: list[float] = []
        while len(samples) < 2 or (len(samples) < CPU_SAMPLES and sum(samples) < CPU_SECONDS * 1e6):
            result, seconds = sequential(x, weight)
            samples.append(seconds * 1e6)
        error = _Expected(x, decompress(weight)).error(result)
        most = 2 * allowed_error(weight.values.shape[0])  # products are rounded, too
        return Timing.of(samples), error, most


def exact_product(x: Tensor, weight: Tensor) -> Tensor:
    """Return x [m, k] @ weight [n, k].T in float64, some rows of the weight at a time."""
    out = torch.empty(x.shape[0], weight.shape[0], dtype=torch.float64, device=x.device)
    x = x.double()
    step = max(1, CHUNK_ELEMENTS // max(weight.shape[1], x.shape[0]))
    for start in range(0, weight.shape[0], step):
        out[:, start : start + step] = x @ weight[start : start + step].double().t()
    return out


class _Expected:
    """The exact product, computed on first use."""

    def __init__(self, x: Tensor, weight: Tensor) -> None:
        self._x, self._weight = x, weight
        self._known: tuple[Tensor, Tensor] | None = None

    def error(self, result: Tensor) -> float:
        """Return the largest error of an output, relative to the sum of the magnitudes of its products."""
        if self._known is None:
            pair = (self._x, self._weight), (self._x.abs(), self._weight.abs())
            right, sizes = (exact_product(x, weight) for x, weight in pair)
            self._known = right, sizes.clamp_min_(torch.finfo(torch.float64).tiny)
        right, sizes = self._known
        return float(((result.double() - right).abs() / sizes).max())


def allowed_error(products: int) -> float:
    """Return the largest expected error of a float32 sum of products, relative to the sum of their magnitudes.

    Every step rounds by at most u = 2^-24 of a partial sum.  Roundings of random sign stay within
    8 sqrt(products) u but for 2 exp(-32), once in 4e13 outputs (Higham and Mary, 2019).  The worst-case
    bound, products * u, would not detect that one product of 4096 is missing; this bound is a tenth of its share.
    """
    return 8 * math.sqrt(products) * 2.0**-24


@contextmanager
def matmul(tf32: bool) -> Iterator[None]:
    """Let torch.matmul use TF32 for float32 or not, and add float16 in float32."""
    settings = torch.backends.cuda.matmul
    before = torch.get_float32_matmul_precision(), settings.allow_fp16_reduced_precision_reduction
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    settings.allow_fp16_reduced_precision_reduction = False
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        settings.allow_fp16_reduced_precision_reduction = before[1]
