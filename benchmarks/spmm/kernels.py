"""Hand-written N:M sparse products on CUDA cores, csrc/spmm/.

A weight keeps ``kept`` of every ``group`` in-features.  It is compressed to W = ceil(K / group) * kept rows of values
and of offsets within groups; each out-feature has its own offsets, or strips of 32 out-features share them::

    weight = compress(prune(dense, 2, 4), 2, 4)             # dense [N, K]
    y = spmm(x, weight, "double")                           # x [M, K] -> y [M, N]

Products are of float32, or of float16 with float32 sums.  Tokens are contiguous in memory: an x with strides (1, M)
is used as it is, any other is copied, and y has such strides.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from slidesparse.build import compile
from slidesparse.errors import SlideSparseError
from slidesparse.gemm.problem import LibraryError

VARIANTS = ("baseline", "prefetch", "double")  # as csrc/spmm/interface.h numbers them
STRIP = 32  # out-features that may share their offsets
MAX_GROUP = 32
DTYPES = (torch.float32, torch.float16)
OLDEST = (8, 0)  # compute capability; the first that has cp.async
VECTOR = 16  # bytes that are copied at once
# It is not among compile.TARGETS, so no installation builds it.  Code for sm_80 runs on 8.6 and 8.9 too, and GPUs after
# Hopper compile the PTX.
TARGET = compile.Target(
    "spmm",
    "SpMM kernels",
    ("spmm/units.txt", "spmm/*.cu", "spmm/*.cuh", "spmm/*.h"),
    gpus=(
        "-gencode=arch=compute_80,code=[sm_80,compute_80]",
        "-gencode=arch=compute_90,code=[sm_90,compute_90]",
    ),
)


class SpmmError(SlideSparseError, ValueError):
    """Operands cannot be compressed or multiplied."""


@dataclass(frozen=True)
class Compressed:
    """A weight [N, K] of which ``kept`` of every ``group`` in-features are stored.

    Row i of column j is the weight of out-feature j and in-feature i // kept * group + offsets[i, j].
    """

    values: Tensor  # [W, N] float32 or float16, rows at multiples of 16 elements
    offsets: Tensor  # [W, N] uint8, below ``group``, rows as far apart as those of values
    kept: int
    group: int
    in_features: int
    strip: int = 1  # number of out-features that share offsets: 1 or STRIP

    def to(self, device: torch.device | str, copy: bool = False) -> Compressed:
        """Return the weight on a device; itself if it is already there, unless ``copy`` is set."""
        values, offsets = (
            _room(matrix.to(device, copy=copy), VECTOR) for matrix in (self.values, self.offsets)
        )
        return replace(self, values=values, offsets=offsets)


def prune(weight: Tensor, kept: int, group: int, strip: int = 1) -> Tensor:
    """Zero all but the ``kept`` largest of every ``group`` in-features of weight [N, K].

    With ``strip`` 32 out-features keep the same ones, those of the largest sums of magnitudes.  Raises SpmmError.
    """
    blocks = _blocks(weight, kept, group, strip)
    sizes = _over_strips(blocks.abs(), strip, torch.sum)
    mask = torch.zeros_like(blocks, dtype=torch.bool).scatter_(-1, sizes.topk(kept, -1).indices, True)
    return torch.where(mask, blocks, 0).flatten(1)[:, : weight.shape[1]]


def compress(weight: Tensor, kept: int, group: int, strip: int = 1) -> Compressed:
    """Compress weight [N, K], float32 or float16.  Raises SpmmError where a group has more than ``kept`` non-zeros."""
    blocks = _blocks(weight, kept, group, strip)
    used = _over_strips(blocks != 0, strip, torch.any)
    over = used.sum(-1) > kept
    if over.any():
        row, block = over.nonzero()[0].tolist()
        raise SpmmError(
            f"row {row} of the weight has {int(used[row, block].sum())} non-zeros in columns {block * group} to "
            f"{block * group + group - 1}{' of its strip' * (strip > 1)}, {kept} of {group} may be kept: prune it first"
        )
    order = torch.argsort(used.logical_not().byte(), dim=-1, stable=True)[..., :kept].sort(-1).values
    values, offsets = (
        _room(tensor.permute(1, 2, 0).flatten(0, 1), VECTOR)
        for tensor in (blocks.gather(-1, order), order.byte())
    )
    return Compressed(values, offsets, kept, group, weight.shape[1], strip)


def decompress(weight: Compressed) -> Tensor:
    """Return the dense weight [N, K]."""
    groups = weight.values.shape[0] // weight.kept
    n = weight.values.shape[1]
    shape = (groups, weight.kept, n)
    blocks = weight.values.new_zeros(groups, weight.group, n)
    blocks.scatter_(1, weight.offsets.long().view(shape), weight.values.reshape(shape))
    return blocks.flatten(0, 1)[: weight.in_features].t().contiguous()


def spmm(x: Tensor, weight: Compressed, variant: str = "double", splits: int = 1) -> Tensor:
    """Return x [M, K] @ weight.T, [M, N] of x's dtype, by our kernels on a GPU and by `reference` on a CPU.

    Args:
        x: float32 or float16, as the weight's values.
        weight: offsets are trusted; those that `compress` makes are valid.
        variant: one of VARIANTS, which give the same bits: a tile at a time; the next tile loaded to registers
            meanwhile; two tiles in shared memory, the next copied asynchronously meanwhile.
        splits: K is split into at most this many parts, whose sums are added in order.

    Raises SpmmError for operands that do not fit, LibraryError for a GPU or launch that fails, ToolchainError where
    the kernels cannot be compiled.
    """
    if variant not in VARIANTS:
        raise SpmmError(f"variant {variant!r} is not one of {', '.join(VARIANTS)}")
    if not 1 <= splits <= 65535:
        raise SpmmError(f"K cannot be cut into {splits} parts: 1 to 65535")
    values = weight.values
    if x.dim() != 2 or x.shape[1] != weight.in_features:
        raise SpmmError(f"x has shape {tuple(x.shape)}; it must be [tokens, {weight.in_features}]")
    if x.dtype not in DTYPES or (x.dtype, x.device) != (values.dtype, values.device):
        raise SpmmError(
            f"x is {x.dtype} on {x.device}, the weight {values.dtype} on {values.device}; both must be equal and "
            f"one of {', '.join(map(str, DTYPES))}"
        )
    if not x.is_cuda:
        return reference(x, weight)
    capability = torch.cuda.get_device_capability(x.device)
    if capability < OLDEST:
        raise LibraryError(
            f"the SpMM kernels need compute capability 8.0 (cp.async); this GPU has {capability}"
        )
    with torch.cuda.device(x.device):
        stream = torch.cuda.current_stream(x.device).cuda_stream
        return launch(native().slidesparse_spmm, x, weight, variant, splits, stream)


def reference(x: Tensor, weight: Compressed) -> Tensor:
    """Compute `spmm` in torch operators, one kept value at a time.

    The kernels' fused multiply-adds are emulated in float64, whose second rounding may, rarely, change the last bit.
    """
    padding = weight.values.shape[0] // weight.kept * weight.group - weight.in_features
    rows = torch.nn.functional.pad(x, (0, padding)).t().double()
    sums = torch.zeros(weight.values.shape[1], x.shape[0], dtype=torch.float32, device=x.device)
    for i, (values, offsets) in enumerate(zip(weight.values.double(), weight.offsets.long(), strict=True)):
        sums = (sums + values[:, None] * rows[i // weight.kept * weight.group + offsets]).float()
    return sums.to(x.dtype).t()


def sequential(x: Tensor, weight: Compressed) -> tuple[Tensor, float]:
    """Return the float32 product by one thread of the CPU, and the seconds that it took.  Raises as `spmm` does."""
    if x.is_cuda or x.dtype != torch.float32:
        raise SpmmError(f"x is {x.dtype} on {x.device}; the sequential product is of float32 on the CPU")
    call, out, _ = _prepare(x, weight, VARIANTS[0], 1, 0)
    function = native().slidesparse_spmm_sequential
    began = time.perf_counter()
    error = function(ctypes.addressof(call))
    seconds = time.perf_counter() - began
    _require(error)
    return out[:, : x.shape[0]].t(), seconds


def _blocks(weight: Tensor, kept: int, group: int, strip: int) -> Tensor:
    """Return the groups of a weight [N, K] padded with zeros, [N, groups, group].  Raises SpmmError."""
    if not 1 <= kept <= group <= MAX_GROUP:
        raise SpmmError(
            f"{kept} of every {group} cannot be kept: at least 1, of groups of at most {MAX_GROUP}"
        )
    if strip not in (1, STRIP):
        raise SpmmError(f"strips of {strip} out-features: 1 or {STRIP}")
    if weight.dim() != 2 or weight.dtype not in DTYPES:
        raise SpmmError(
            f"a weight {tuple(weight.shape)} {weight.dtype}; it must be [N, K] of float32 or float16"
        )
    padded: Tensor = torch.nn.functional.pad(weight, (0, -weight.shape[1] % group))
    return padded.reshape(weight.shape[0], -(-weight.shape[1] // group), group)


def _over_strips(blocks: Tensor, strip: int, reduce: Callable[..., Tensor]) -> Tensor:
    """Reduce over the rows of each strip, and give every row its strip's result."""
    if strip == 1:
        return blocks
    n = blocks.shape[0]
    strips = torch.nn.functional.pad(blocks, (0, 0, 0, 0, 0, -n % strip)).unflatten(0, (-1, strip))
    return reduce(strips, dim=1).repeat_interleave(strip, 0)[:n]


def _room(matrix: Tensor, multiple: int) -> Tensor:
    """Return the matrix with a row stride that is a multiple of ``multiple`` elements, in fully allocated rows.

    Copies it unless it is already stored so.
    """
    rows, columns = matrix.shape
    stride, used = matrix.stride(0), matrix.storage_offset()
    available = matrix.untyped_storage().nbytes() // matrix.element_size() - used
    if (
        matrix.stride(1) == 1
        and stride >= columns
        and stride % multiple == 0
        and matrix.data_ptr() % VECTOR == 0
        and available >= rows * stride
    ):
        return matrix
    wide = matrix.new_zeros(rows, columns + -columns % multiple)
    wide[:, :columns] = matrix
    return wide[:, :columns]


class _Call(ctypes.Structure):
    """The struct SlidesparseSpmm of csrc/spmm/interface.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "values", "offsets", "out", "partials", "stream")),
        *((name, ctypes.c_int64) for name in ("ldx", "ldw", "ldo")),
        *((name, ctypes.c_int32) for name in ("m", "n", "k", "kept", "group", "half", "variant")),
        *((name, ctypes.c_int32) for name in ("strip", "splits")),
    )


def _prepare(
    x: Tensor, weight: Compressed, variant: str, splits: int, stream: int
) -> tuple[_Call, Tensor, tuple[Tensor | None, ...]]:
    """Return the call, its result's memory [N, at least M], and the tensors to keep alive until it is launched."""
    (m, k), n = x.shape, weight.values.shape[1]
    rows = _room(x.t(), VECTOR // x.element_size())
    values, offsets = _room(weight.values, VECTOR), _room(weight.offsets, VECTOR)
    if values.stride(0) != offsets.stride(0):
        raise SpmmError(f"rows of values are {values.stride(0)} apart, of offsets {offsets.stride(0)}")
    out = x.new_empty(n, m + -m % 4)
    splits = max(1, min(splits, values.shape[0]))
    partials = x.new_empty(splits, *out.shape, dtype=torch.float32) if splits > 1 else None
    call = _Call(
        *(rows.data_ptr(), values.data_ptr(), offsets.data_ptr(), out.data_ptr()),
        *(None if partials is None else partials.data_ptr(), stream),
        *(rows.stride(0), values.stride(0), out.stride(0)),
        *(m, n, k, weight.kept, weight.group, x.dtype == torch.float16, VARIANTS.index(variant)),
        *(weight.strip == STRIP, splits),
    )
    return call, out, (rows, values, offsets, partials)


def launch(function: Any, x: Tensor, weight: Compressed, variant: str, splits: int, stream: int) -> Tensor:
    """Call the compiled product, the GPU's or a test's."""
    call, out, _ = _prepare(x, weight, variant, splits, stream)
    _require(function(ctypes.addressof(call)))
    return out[:, : x.shape[0]].t()


def _require(error: bytes | None) -> None:
    """Raise LibraryError with the compiled library's error, if there is one."""
    if error:
        raise LibraryError(f"the SpMM kernels: {error.decode()}")


@cache
def native() -> Any:
    """Return the compiled kernels.  Raises ToolchainError, or LibraryError when they cannot be loaded."""
    try:
        library = ctypes.CDLL(str(compile.build(TARGET)))
    except OSError as error:
        raise LibraryError(f"the SpMM kernels cannot be loaded: {error}") from None
    for function in (library.slidesparse_spmm, library.slidesparse_spmm_sequential):
        function.argtypes, function.restype = [ctypes.c_void_p], ctypes.c_char_p
    return library
