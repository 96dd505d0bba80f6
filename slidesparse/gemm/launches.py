"""Launch the Triton kernels that quantize and scale, with the parameters tuned for this GPU or else the default ones.

Tuned launches are stored in tables like those of the GEMMs (`slidesparse.gemm.tuned`), one for each of `kernels.KINDS`.
An algorithm is a launch as text, such as "1024x1x8", and a problem is m rows of k columns read and n columns written:
n = k = N for dequant_bias, k = K and n = K' without padding for the others.  All launches give the same bits.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from slidesparse import kernels
from slidesparse.gemm import tuned
from slidesparse.gemm.cuda import bucket
from slidesparse.gemm.problem import NAMES, Problem
from slidesparse.kernels import Config
from slidesparse.pattern import SlideLayout

VERSION = "1"  # version of the kernels; tables of other versions are not read
MAX_SHAPE_DISTANCE = 1.0  # see `tuned.nearest_algorithm`: beyond this, the kernels' own table is closer
EQUAL_WIDTH_TYPES = {
    torch.float16: torch.bfloat16,
    torch.float32: torch.int32,
}  # of equal width, so the same launch

_logger = logging.getLogger("slidesparse")


@dataclass(frozen=True)
class Kernel:
    """A kernel, by its name in tables; see `tuned.Versioned`."""

    name: str  # one of `kernels.KINDS`

    def version(self) -> str:
        """The version of the kernels."""
        return VERSION


def launch_problem(source: torch.dtype, target: torch.dtype, n: int, k: int, m: int) -> Problem:
    """Return the problem, for tables, of turning m rows of k ``source`` elements into n ``target`` ones."""
    read, written = (NAMES.get(EQUAL_WIDTH_TYPES.get(dtype, dtype), str(dtype)) for dtype in (source, target))
    return Problem(read, written, n, k, m)


def quantize(x: Tensor, layout: SlideLayout, dtype: torch.dtype, columns: int) -> tuple[Tensor, Tensor]:
    """Quantize x [M, K] on a GPU by `kernels.quant_slide`, with memory padded to the next bucket of tokens."""
    from slidesparse.kernels.quant_slide import quant_slide  # late: needs Triton

    m, k = x.shape
    kind = kernels.quantizer_kind(layout.length, layout.phase)
    launch = _find_launch(kind, x.dtype, dtype, layout.slided, k, bucket(m), x.device)
    return quant_slide(x, layout.length, layout.phase, dtype, columns, bucket(m), launch)


def dequant_bias(
    acc: Tensor, scale_x: Tensor, scale_w: Tensor, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """See `slidesparse.kernels.dequant_bias`; acc [M, N] is on a GPU."""
    from slidesparse.kernels.dequant_bias import dequant_bias as kernel  # late: needs Triton

    m, n = acc.shape
    launch = _find_launch("dequant_bias", acc.dtype, out_dtype, n, n, bucket(m), acc.device)
    return kernel(acc, scale_x, scale_w, bias, out_dtype, launch=launch)


@cache  # called for every layer, and there are few buckets
def _find_launch(
    kind: str, source: torch.dtype, target: torch.dtype, n: int, k: int, m: int, device: torch.device
) -> Config | None:
    """Return the launch tuned for the problem or a near one; None to use that of `kernels.TABLE`.

    Raises TableError for a table that cannot be used.
    """
    subject = tuned.Subject(
        kind, VERSION, torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
    )
    launch, instead = tuned.select_algorithm(
        subject, launch_problem(source, target, n, k, m), MAX_SHAPE_DISTANCE
    )
    if instead:
        _log_untuned(kind, subject.gpu, instead if launch else "that of the kernel's own table")
    try:
        return None if launch is None else Config.parse(launch)
    except ValueError as error:
        path = tuned.tables_folder() / subject.file_name
        raise tuned.TableError(
            f"a table of tuned launches has {error}; delete {path} and run `slidesparse tune MODEL --library triton`"
        ) from error


@cache
def _log_untuned(kind: str, gpu: str, instead: str) -> None:
    """Log once per kernel that a launch is not tuned, and how to tune it."""
    _logger.info(
        "%s has no tuned launch for some shapes on %s and uses %s; to tune: slidesparse tune MODEL --library triton",
        *(kind, gpu, instead),
    )
