"""Bootstrap confidence intervals, which resample with replacement; paired values share the draws."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

Array = np.ndarray
ROUNDS = 2000
COVERAGE = 0.95
DRAWS = 2**24  # indices drawn at a time


@dataclass(frozen=True)
class Interval:
    """An estimate and its bootstrap confidence interval at level COVERAGE."""

    value: float
    low: float
    high: float

    def to_json(self) -> dict[str, float]:
        """Return plain values."""
        return {"value": self.value, "ci_low": self.low, "ci_high": self.high}


def bootstrap(statistic: Callable[..., Array], *columns: Array) -> Interval:
    """Return the percentile interval of ``statistic``, a function of arrays [..., samples] that returns [...].

    Each of the ``columns`` has shape [samples].  A draw takes the same samples from all of them, so their values stay
    paired.
    """
    count = len(columns[0])
    generator = np.random.default_rng(0)
    resampled, step = [], max(1, DRAWS // max(1, count))
    for start in range(0, ROUNDS, step):
        drawn = generator.integers(0, count, (min(step, ROUNDS - start), count))
        resampled.append(statistic(*(column[drawn] for column in columns)))
    low, high = np.quantile(np.concatenate(resampled), [(1 - COVERAGE) / 2, (1 + COVERAGE) / 2])
    return Interval(float(statistic(*columns)), float(low), float(high))


def mean(values: Array) -> Array:
    """Return the mean over the last dimension."""
    return np.asarray(values.mean(-1, dtype=np.float64))


def ratio(above: Array, below: Array) -> Array:
    """Return the sum of ``above`` over the sum of ``below``, over the last dimension."""
    return np.asarray(above.sum(-1, dtype=np.float64) / below.sum(-1, dtype=np.float64))
