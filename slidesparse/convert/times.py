"""The time of a linear layer by GPU, shape, pattern and tokens: a + b N K.

``slidesparse/layer_times.csv`` ships with the package; `python -m benchmarks docs` writes it.  Each of its rows is a
fit to the times of whole layers from bfloat16 to bfloat16, including quantization and scaling, that were measured on
one GPU at one pattern and number of tokens: pruned and dense layers by our kernels, and dense ones by vLLM's own
("stock"), the baseline.  Measured layers differ from their fit by 9% on average on an H200 (64 shapes) and 6% on an
H100 (8 shapes, or 4 of one model), at most by 15% on average at one pattern and number of tokens, and by 52% at worst.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import NamedTuple

from slidesparse.pattern import DENSE_WEIGHT, SlidePattern

FILE = Path(__file__).parent.parent / "layer_times.csv"
COLUMNS = ("gpu", "dtype", "pattern", "tokens", "us", "us_per_million_weights")
DEFAULT_GPU = "nvidia-h200"
DEFAULT_TOKENS = (16, 8192)  # a step of decode with 16 sequences, and one of prefill

STOCK = "stock"  # value in the column of patterns


class Shape(NamedTuple):
    """A matrix [N, K], or as many of this shape as a layer has experts, with the share of tokens that reach each."""

    rows: int
    columns: int
    shares: tuple[float, ...] = (1.0,)

    @property
    def weights(self) -> int:
        """The number of weights of all matrices."""
        return len(self.shares) * self.rows * self.columns


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


def layer_fits(gpu: str) -> dict[tuple[str, str, int], tuple[float, float]]:
    """Return (a, b) in microseconds for each dtype, pattern and number of tokens that was measured on a GPU."""
    return {
        (row["dtype"], row["pattern"], int(row["tokens"])): (
            float(row["us"]),
            float(row["us_per_million_weights"]) / 1e6,
        )
        for row in _rows()
        if row["gpu"] == gpu
    }
