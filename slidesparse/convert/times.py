"""The time of a linear layer by GPU, shape, pattern and tokens: a + b N K.

``slidesparse/layer_times.csv`` ships with the package; `python -m benchmarks docs` writes it.  Each of its rows is a
fit to the times of whole layers from bfloat16 to bfloat16, including quantization and scaling, that were measured on
one GPU at one pattern and number of tokens: pruned and dense layers by our kernels, and dense ones by vLLM's own
("stock"), the baseline.  Measured layers differ from their fit by 9% on average on an H200 (64 shapes) and 6% on an
H100 (8 shapes), at most by 15% on average at one pattern and number of tokens, and by 52% at worst.

Between measured numbers of tokens, times are interpolated linearly in logarithms of both.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from slidesparse.pattern import DENSE_WEIGHT, SlidePattern

FILE = Path(__file__).parent.parent / "layer_times.csv"
COLUMNS = ("gpu", "dtype", "pattern", "tokens", "us", "us_per_million_weights")
DEFAULT_GPU = "nvidia-h200"
DEFAULT_TOKENS = (16, 8192)  # a step of decode with 16 sequences, and one of prefill

STOCK = "stock"  # value in the column of patterns

Shape = tuple[int, int]  # N, K


def name_of(pattern: SlidePattern | None) -> str:
    """Return a pattern as ``6:8``, or ``dense`` for None."""
    return pattern.ratio if pattern else DENSE_WEIGHT


def _rows() -> list[dict[str, str]]:
    with FILE.open(newline="") as file:
        return list(csv.DictReader(file))


def default_gpu() -> str:
    """Return the name of this machine's GPU if times of layers were measured on it, else DEFAULT_GPU."""
    import torch  # late, as the rest of this file does without, and gemm imports it

    from slidesparse.gemm.tuned import slug

    if not torch.cuda.is_available():
        return DEFAULT_GPU
    name = slug(torch.cuda.get_device_name())
    return name if any(row["gpu"] == name for row in _rows()) else DEFAULT_GPU


@dataclass(frozen=True)
class LayerTimes:
    """The times of layers on one GPU, in microseconds."""

    # (dtype, pattern) -> tokens -> (a, b): a + b N K microseconds
    fits: Mapping[tuple[str, str], Mapping[int, tuple[float, float]]]

    @classmethod
    def of(cls, gpu: str) -> LayerTimes:
        """Read the times of a GPU of the file."""
        fits = dict[tuple[str, str], dict[int, tuple[float, float]]]()
        for row in _rows():
            if row["gpu"] == gpu:
                of_tokens = fits.setdefault((row["dtype"], row["pattern"]), {})
                of_tokens[int(row["tokens"])] = float(row["us"]), float(row["us_per_million_weights"]) / 1e6
        return cls(fits)

    def us(self, dtype: str, pattern: SlidePattern | None, shape: Shape, tokens: int) -> float:
        """Return the time in microseconds of a layer [N, K] at a pattern, or dense (None), for ``tokens`` tokens."""
        return self._us(dtype, name_of(pattern), shape, tokens)

    def stock_us(self, dtype: str, shape: Shape, tokens: int) -> float:
        """Return the time in microseconds of the dense layer with vLLM's own kernels."""
        return self._us(dtype, STOCK, shape, tokens)

    def _us(self, dtype: str, name: str, shape: Shape, tokens: int) -> float:
        weights = shape[0] * shape[1]
        us = {m: a + b * weights for m, (a, b) in self.fits[dtype, name].items()}
        upper = min((m for m in us if m >= tokens), default=max(us))
        lower = max((m for m in us if m <= tokens), default=min(us))
        if lower == upper:
            # Above the largest measured number, time is proportional to tokens
            return us[upper] * max(1.0, tokens / upper)
        part = math.log(tokens / lower) / math.log(upper / lower)
        return math.exp(math.log(us[lower]) * (1 - part) + math.log(us[upper]) * part)
