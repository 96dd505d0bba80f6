"""Hand-written N:M products of squares, M = N = K, beside one thread of the CPU and cuBLAS.

Every result is compared with float64.  All providers of one size and type take turns, on random numbers, dense ones
for cuBLAS: a pruned weight would let it run at less power.  cuBLAS is `torch.matmul` with x [M, K] and weights [N, K]
as in a model; our kernels get operands whose tokens and out-features are contiguous.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor

from benchmarks.kernel import DENSE, SQUARE
from benchmarks.measure import Figures, Gauge, Job, take_turns
from benchmarks.records import TIMES, Format, Row
from benchmarks.spmm.kernels import (
    MAX_GROUP,
    STRIP,
    Compressed,
    compress,
    decompress,
    prune,
    sequential,
    spmm,
)
from slidesparse.gemm.problem import DTYPES, LibraryError
from slidesparse.tune.measure import Launch, Timing
from slidesparse.tune.session import Session
from slidesparse.tune.shapes import ShapeError, split_list

# `sparsity` is "2:4" or "dense"; `offsets` are each out-feature's "own" or those of a "strip" of 32, "-" when dense.
PRODUCT = ("dtype", "sparsity", "offsets", "M", "N", "K", "provider")
SPMM = Format("spmm", ("mode", "model", "layer", *PRODUCT), (*TIMES, "error"))
VARIANTS = {  # name -> (variant of `spmm`, splits)
    "baseline": ("baseline", 1),
    "prefetch": ("prefetch", 1),
    "double": ("double", 1),
    "split2": ("double", 2),
    "split8": ("double", 8),
}
CUBLAS, TF32, CPU = "cublas", "cublas-tf32", "cpu"
TYPES = ("fp32", "fp16")
OWN, SHARED, NONE = "own", "strip", "-"
CPU_MAX_SIZE = 1024  # the largest square that one thread multiplies
CPU_SAMPLES, CPU_SECONDS = 5, 1.0
CHUNK_ELEMENTS = 2**26  # float64 elements that the check computes at a time
MAX_ERROR = 1e-3  # absolute limit for our kernels
ROUNDING_UNITS = {"fp32": 0.0, "fp16": 2.0**-11}  # for the rounding of a stored result


@dataclass(frozen=True)
class Prepared:
    """A launch with its number of copies and its error, relative to the sum of the magnitudes of its products."""

    launch: Launch
    copies: int
    error: float
    allowed: float


Cell = tuple[dict[str, object], Callable[[], Prepared]]  # its key, and a function that prepares it


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
    session: Session, gauge: Gauge, sizes: Sequence[int], dtypes: Sequence[str], sparsities: Sequence[str]
) -> Iterator[Job]:
    """Yield a job for each size, M = N = K, and type: cuBLAS and ours; and for one thread of the CPU."""
    for size in sizes:
        for dtype in dtypes:
            cells = _cells(session, size, dtype, sparsities)
            label = f"{dtype} M={size}"
            yield Job(label, [key for key, _ in cells], partial(_measure, session, gauge, cells))
            if dtype == "fp32" and size <= CPU_MAX_SIZE:
                key = _key(size, dtype, sparsities[0], OWN, CPU)
                yield Job(f"{label}, CPU", [key], partial(_by_cpu, session, size, sparsities[0]))
            torch.cuda.empty_cache()


def _key(size: int, dtype: str, sparsity: str, offsets: str, provider: str) -> dict[str, object]:
    values = (SQUARE, SQUARE, SQUARE, dtype, sparsity, offsets, size, size, size, provider)
    return dict(zip(SPMM.key, values, strict=True))


def _measure(session: Session, gauge: Gauge, cells: Sequence[Cell]) -> list[Row]:
    """Return the values of each cell; none where the result is wrong or the library refuses."""
    prepared: dict[int, Prepared] = {}
    for number, (key, make) in enumerate(cells):
        subject = " ".join(map(str, key.values()))
        try:
            cell = make()
        except LibraryError as error:
            session.skipped.append(f"{subject}: {error}")
            continue
        if cell.error <= cell.allowed:  # NaN is wrong, too
            prepared[number] = cell
        else:
            session.skipped.append(f"{subject}: wrong by {cell.error:.1e}, {cell.allowed:.1e} is allowed")
    figures = take_turns(gauge, [(cell.launch, cell.copies) for cell in prepared.values()])
    rows = {
        number: found.row | {"error": f"{cell.error:.1e}"}
        for (number, cell), found in zip(prepared.items(), figures, strict=True)
    }
    return [rows.get(number, {}) for number in range(len(cells))]


def _cells(session: Session, size: int, dtype: str, sparsities: Sequence[str]) -> list[Cell]:
    """Return cuBLAS, and ours at each sparsity, for the first one also with offsets in strips."""
    operands = cache(partial(_dense_operands, session, size, dtype))
    names = (CUBLAS, TF32) if dtype == "fp32" else (CUBLAS,)
    cells: list[Cell] = [
        (_key(size, dtype, DENSE, NONE, name), partial(_dense, operands, dtype, name)) for name in names
    ]
    for sparsity, offsets in ((sparsities[0], SHARED), *((each, OWN) for each in sparsities)):
        ours = cache(partial(_our_operands, session, size, dtype, sparsity, offsets))
        cells += [
            (_key(size, dtype, sparsity, offsets, name), partial(_ours, ours, dtype, name))
            for name in VARIANTS
        ]
    return cells


def _pruned(session: Session, size: int, dtype: str, sparsity: str, offsets: str) -> Compressed:
    """Return a random pruned weight."""
    kept, group = split_sparsity(sparsity)
    strip = STRIP if offsets == SHARED else 1
    dense = session.inputs.floats((size, size), DTYPES[dtype])
    return compress(prune(dense, kept, group, strip), kept, group, strip)


Ours = tuple[list[Tensor], list[Compressed], "Expected"]  # x [K, M].T, weights, for each copy; the product
Dense = tuple[list[Tensor], list[Tensor], "Expected"]


def _our_operands(session: Session, size: int, dtype: str, sparsity: str, offsets: str) -> Ours:
    weight, item = _pruned(session, size, dtype, sparsity, offsets), DTYPES[dtype].itemsize
    copies = session.inputs.copies_exceeding_l2(
        size * (2 * size * item + weight.values.shape[0] * (item + 1))
    )
    weights = [weight, *(weight.to(session.gpu.device, copy=True) for _ in range(copies - 1))]
    x = [session.inputs.floats((size, size), DTYPES[dtype]).t() for _ in range(copies)]
    return x, weights, Expected(x[0], decompress(weight))


def _ours(operands: Callable[[], Ours], dtype: str, name: str) -> Prepared:
    x, weights, right = operands()
    variant, splits = VARIANTS[name]

    def launch(i: int) -> Tensor:
        return spmm(x[i], weights[i], variant, splits)

    allowed = min(allowed_error(weights[0].values.shape[0]) + ROUNDING_UNITS[dtype], MAX_ERROR)
    return Prepared(launch, len(x), right.error(launch(0)), allowed)


def _dense_operands(session: Session, size: int, dtype: str) -> Dense:
    copies = session.inputs.copies_exceeding_l2(3 * size * size * DTYPES[dtype].itemsize)
    x, weights = (
        [session.inputs.floats((size, size), DTYPES[dtype]) for _ in range(copies)] for _ in range(2)
    )
    return x, weights, Expected(x[0], weights[0])


def _dense(operands: Callable[[], Dense], dtype: str, name: str) -> Prepared:
    """Prepare cuBLAS: float32 with or without TF32, float16 with float32 sums."""
    x, weights, right = operands()

    def launch(i: int) -> Tensor:
        with matmul(tf32=name == TF32):
            return torch.mm(x[i], weights[i].t())

    # the worst-case bound, as tensor cores may truncate sums; TF32 truncates each factor to 10 bits
    allowed = x[0].shape[1] * 2.0**-23 + ROUNDING_UNITS[dtype] + (2.0**-9 if name == TF32 else 0)
    return Prepared(launch, len(x), right.error(launch(0)), allowed)


def _by_cpu(session: Session, size: int, sparsity: str) -> list[Row]:
    weight = _pruned(session, size, "fp32", sparsity, OWN).to("cpu")
    x = torch.randn(size, size).t()
    samples: list[float] = []
    while len(samples) < 2 or (len(samples) < CPU_SAMPLES and sum(samples) < CPU_SECONDS * 1e6):
        result, seconds = sequential(x, weight)
        samples.append(seconds * 1e6)
    error = Expected(x, decompress(weight)).error(result)
    if not error <= 2 * allowed_error(weight.values.shape[0]):  # products are rounded, too
        session.skipped.append(f"{CPU} M={size}: wrong by {error:.1e}")
        return [{}]
    return [Figures(Timing.of(samples), None).row | {"error": f"{error:.1e}"}]


class Expected:
    """The exact product of x [M, K] and weight [N, K], computed on first use."""

    def __init__(self, x: Tensor, weight: Tensor) -> None:
        self._x, self._weight = x, weight
        self._known: tuple[Tensor, Tensor] | None = None

    def error(self, result: Tensor) -> float:
        """Return the largest error of an output, relative to the sum of the magnitudes of its products."""
        if self._known is None:
            right, sizes = exact(self._x, self._weight), exact(self._x.abs(), self._weight.abs())
            self._known = right, sizes.clamp_min_(torch.finfo(torch.float64).tiny)
        right, sizes = self._known
        return float(((result.double() - right).abs() / sizes).max())


def exact(x: Tensor, weight: Tensor) -> Tensor:
    """Return x [M, K] @ weight [N, K].T in float64, some rows of the weight at a time."""
    out = torch.empty(x.shape[0], weight.shape[0], dtype=torch.float64, device=x.device)
    x = x.double()
    step = max(1, CHUNK_ELEMENTS // max(weight.shape[1], x.shape[0]))
    for start in range(0, weight.shape[0], step):
        out[:, start : start + step] = x @ weight[start : start + step].double().t()
    return out


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
