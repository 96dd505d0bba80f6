"""The time of a linear layer by GPU, shape, pattern and tokens, measured or estimated.

``slidesparse/layer_times/GPU.csv`` ships with the package; `python -m benchmarks docs` writes it.  It holds the times
of whole layers from bfloat16 to bfloat16, including quantization and scaling, for pruned and dense layers by our
kernels, and for dense layers by vLLM's own ("stock"), the baseline.  Times of other shapes are estimated by
a + b * N * K, fitted to the measured shapes of the same pattern and tokens.  Between measured numbers of tokens, times
are interpolated linearly in logarithms of both.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from slidesparse.errors import SlideSparseError
from slidesparse.pattern import DENSE_WEIGHT, SlidePattern

FOLDER = Path(__file__).parent.parent / "layer_times"
DEFAULT_GPU = "h200"
DEFAULT_TOKENS = (16, 8192)  # a step of decode with 16 sequences, and one of prefill

STOCK = "stock"  # value in the column of patterns

Shape = tuple[int, int]  # N, K


def name_of(pattern: SlidePattern | None) -> str:
    """Return a pattern as ``6:8``, or ``dense`` for None."""
    return pattern.ratio if pattern else DENSE_WEIGHT


class TimesError(SlideSparseError, ValueError):
    """No layer times are known for a GPU or a pattern, or a number of tokens is invalid."""


def times_of(gpu: str) -> Path:
    """Return the file with the times of the GPU whose name contains ``gpu``, such as ``h200``.  Raises TimesError."""
    files = [path for path in sorted(FOLDER.glob("*.csv")) if gpu.lower() in path.stem]
    if len(files) != 1 or not gpu:
        gpus = ", ".join(path.stem for path in sorted(FOLDER.glob("*.csv")))
        raise TimesError(
            f"--gpu {gpu!r}: times of layers were measured on {gpus}; name one of them, or give a share of zeros "
            "instead: --zeros 25%"
        )
    return files[0]


def default_gpu() -> str:
    """Return the name of this machine's GPU if times of layers were measured on it, else DEFAULT_GPU."""
    import torch  # late, as the rest of this file does without, and gemm imports it

    from slidesparse.gemm.tuned import slug

    if not torch.cuda.is_available():
        return DEFAULT_GPU
    name = slug(torch.cuda.get_device_name())
    return name if (FOLDER / f"{name}.csv").exists() else DEFAULT_GPU


@dataclass(frozen=True)
class LayerTimes:
    """The times of layers on one GPU, in microseconds."""

    gpu: str
    # (dtype, pattern) -> tokens -> shape -> time
    measured: Mapping[tuple[str, str], Mapping[int, Mapping[Shape, float]]]

    @classmethod
    def of(cls, gpu: str) -> LayerTimes:
        """Read the times of the GPU whose name contains ``gpu``, such as ``h200``.  Raises TimesError."""
        path = times_of(gpu)
        measured: dict[tuple[str, str], dict[int, dict[Shape, float]]] = {}
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                of_tokens = measured.setdefault((row["dtype"], row["pattern"]), {})
                shape = int(row["n"]), int(row["k"])
                of_tokens.setdefault(int(row["tokens"]), {})[shape] = float(row["us"])
        return cls(path.stem, measured)

    def us(self, dtype: str, pattern: SlidePattern | None, shape: Shape, tokens: int) -> float:
        """Return the time in microseconds of a layer [N, K] at a pattern, or dense (None), for ``tokens`` tokens.

        Raises TimesError for a dtype or pattern that was not measured.
        """
        return self._us(dtype, name_of(pattern), shape, tokens)

    def stock_us(self, dtype: str, shape: Shape, tokens: int) -> float:
        """Return the time in microseconds of the dense layer with vLLM's own kernels."""
        return self._us(dtype, STOCK, shape, tokens)

    def _us(self, dtype: str, name: str, shape: Shape, tokens: int) -> float:
        of_tokens = self.measured.get((dtype, name))
        if of_tokens is None:
            raise TimesError(
                f"there are no times of {name} {dtype} layers on {self.gpu}; give a share of zeros: --zeros 25%"
            )
        counts = sorted(of_tokens)
        upper = next((m for m in counts if m >= tokens), counts[-1])
        lower = max((m for m in counts if m <= tokens), default=counts[0])
        if lower == upper:
            # Above the largest measured number, time is proportional to tokens
            return self._at(dtype, name, shape, upper) * max(1.0, tokens / upper)
        part = math.log(tokens / lower) / math.log(upper / lower)
        a, b = (math.log(self._at(dtype, name, shape, m)) for m in (lower, upper))
        return math.exp(a + part * (b - a))

    def _at(self, dtype: str, name: str, shape: Shape, tokens: int) -> float:
        time_us = self.measured[dtype, name][tokens].get(shape)
        if time_us is not None:
            return time_us
        constant, per_weight = self._fits[dtype, name, tokens]
        return constant + per_weight * shape[0] * shape[1]

    @cached_property
    def _fits(self) -> dict[tuple[str, str, int], tuple[float, float]]:
        return {
            (*key, tokens): fit([(n * k, us) for (n, k), us in times.items()])
            for key, of_tokens in self.measured.items()
            for tokens, times in of_tokens.items()
        }


def fit(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Fit y = a + b x with a, b >= 0 by least squares of the relative errors; return (a, b)."""
    if len(points) == 1:
        return 0.0, points[0][1] / points[0][0]
    # minimise sum (a / y + b x / y - 1)^2
    aa = sum(1 / y**2 for _, y in points)
    ab = sum(x / y**2 for x, y in points)
    bb = sum((x / y) ** 2 for x, y in points)
    a1, b1 = sum(1 / y for _, y in points), sum(x / y for x, y in points)
    determinant = aa * bb - ab * ab
    if determinant <= 0:
        return 0.0, b1 / bb
    a, b = (a1 * bb - b1 * ab) / determinant, (b1 * aa - a1 * ab) / determinant
    if a < 0:
        return 0.0, b1 / bb
    return (a, b) if b >= 0 else (a1 / aa, 0.0)
