"""Bootstrap intervals: samples are drawn again with replacement, the same draws for both of a pair."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

Array = np.ndarray
ROUNDS = 2000
COVERAGE = 0.95
DRAWS = 2**24  # indices at a time


@dataclass(frozen=True)
class Interval:
    """A figure and its bootstrap interval, which has the probability COVERAGE."""

    value: float
    low: float
    high: float

    def to_json(self) -> dict[str, float]:
        """Return plain values."""
        return {"value": self.value, "ci_low": self.low, "ci_high": self.high}


def bootstrap(
    statistic: Callable[..., Array], *columns: Array, rounds: int = ROUNDS, seed: int = 0
) -> Interval:
    """Return the percentile interval of ``statistic``, which maps columns indexed [..., samples] to [...].

    Columns are [samples] arrays; a draw takes the same samples of all of them, so that their values stay paired.
    """
    count = len(columns[0])
    generator = np.random.default_rng(seed)
    found, step = [], max(1, DRAWS // max(1, count))
    for start in range(0, rounds, step):
        drawn = generator.integers(0, count, (min(step, rounds - start), count))
        found.append(statistic(*(column[drawn] for column in columns)))
    low, high = np.quantile(np.concatenate(found), [(1 - COVERAGE) / 2, (1 + COVERAGE) / 2])
    return Interval(float(statistic(*columns)), float(low), float(high))


def mean(values: Array) -> Array:
    """Return the mean over the last dimension."""
    return np.asarray(values.mean(-1, dtype=np.float64))


def ratio(above: Array, below: Array) -> Array:
    """Return the sum of ``above`` over the sum of ``below``, over the last dimension."""
    return np.asarray(above.sum(-1, dtype=np.float64) / below.sum(-1, dtype=np.float64))


def percentile(share: float) -> Callable[[Array], Array]:
    """Return a function to the quantile ``share`` over the last dimension."""
    return lambda values: np.quantile(values, share, axis=-1)
