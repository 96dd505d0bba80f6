"""Allocate patterns to layers within a budget: a multiple-choice knapsack problem.

Every layer group, the linear layers that share an input, stays dense or takes one of `PATTERNS`.  The loss of each
candidate was measured, and its saving is the time of the group on a GPU.  The gates and ups of a layer's experts are
one group, the downs another, as each is one weight of one pattern in vLLM.  A step takes for them what it takes for one
linear layer as wide as all experts that its tokens reach, with the tokens of one of them: that is how the grouped
kernel's gain was bounded, and within an eighth of the measured gain at 2:4.  The candidates of a group on the lower
convex hull of loss over saving are connected by steps of increasing slope.  Taking the steps of all groups in order of
slope yields the frontier: the choices that no convex combination of others improves on.

The time of a linear layer is a + b N K, by GPU, pattern and number of tokens.  ``slidesparse/layer_times.csv`` ships
with the package; `python -m benchmarks docs` writes it.  Each of its rows is a fit to times by our kernels, from
bfloat16 to bfloat16, that were measured on one GPU at one pattern and number of tokens.  On an H200 they are of the
layers of a block in a row, with norms and activations (five models, from which they differ by 1.3% on average, 3.1% on
average at one pattern and number of tokens, and 6.5% at worst); on an H100 of single layers (four of one model; 3.6%,
6.4% and 14%).
"""

from __future__ import annotations

import csv
import hashlib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch

from slidesparse.calibrate.losses import Losses
from slidesparse.calibrate.model import LayerGroup
from slidesparse.errors import CalibrationError
from slidesparse.gemm.tuned import slug
from slidesparse.pattern import DENSE_WEIGHT, Pattern, SlidePattern

FILE = Path(__file__).parent.parent / "layer_times.csv"
COLUMNS = ("gpu", "dtype", "pattern", "tokens", "us", "us_per_million_weights")
DEFAULT_GPU = "nvidia-h200"
DEFAULT_TOKENS = (16, 8192)  # a step of decode with 16 sequences, and one of prefill

PATTERNS = tuple(SlidePattern.parse(ratio) for ratio in ("6:8", "4:6", "2:4"))
# The pattern for which a rotation is learned, before patterns are chosen
MIDDLE = SlidePattern.parse("4:6")


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


def default_gpu() -> str:
    """Return the name of this machine's GPU if times of layers were measured on it, else DEFAULT_GPU."""
    name = slug(torch.cuda.get_device_name()) if torch.cuda.is_available() else DEFAULT_GPU
    return name if layer_fits(name) else DEFAULT_GPU


def layer_fits(gpu: str) -> dict[tuple[str, str, int], tuple[float, float]]:
    """Return (a, b) in microseconds for each dtype, pattern and number of tokens that was measured on a GPU."""
    fits = {}
    with FILE.open(newline="") as file:
        for row in csv.DictReader(file):
            if row["gpu"] == gpu:
                case = row["dtype"], row["pattern"], int(row["tokens"])
                fits[case] = float(row["us"]), float(row["us_per_million_weights"]) / 1e6
    return fits


def times_digest(gpu: str) -> str:
    """Hash the times of layers on a GPU, by which the same losses lead to the same choice."""
    return hashlib.sha256(repr(sorted(layer_fits(gpu).items())).encode()).hexdigest()


@dataclass(frozen=True)
class Budget:
    """The loss that an allocation may cost, and the steps and GPU whose layer times count.

    Raises CalibrationError for values out of range.
    """

    max_loss: float  # increase in perplexity, or 1 - cosine of embeddings: 0.01 is 1%
    tokens: tuple[int, ...] = DEFAULT_TOKENS  # tokens of the steps, which count equally
    gpu: str = DEFAULT_GPU

    def __post_init__(self) -> None:
        if not 0 < self.max_loss < 1:
            raise CalibrationError(f"{self.goal} is not between 0% and 100%")

    @property
    def goal(self) -> str:
        """The option that was given, such as ``--max-loss 1%``."""
        return f"--max-loss {percent(self.max_loss)}"


def percent(share: float, sign: str = "") -> str:
    """Format 0.0125 as ``1.25%``, or with the ``sign`` "+" as ``+1.25%``."""
    return f"{100 * share:{sign}.4g}%"


def parse_percent(option: str, text: str) -> float:
    """Read ``1%`` as 0.01.  Raises CalibrationError."""
    match = re.fullmatch(r"(\d{1,3}(?:\.\d{1,9})?)\s*%", text.strip())
    if not match:
        raise CalibrationError(f"{option} {text!r} is not a percentage, such as 1%")
    return float(match[1]) / 100


@dataclass(frozen=True)
class Candidate:
    """A pattern for a group, or None for dense, with its loss, time and zeros."""

    pattern: SlidePattern | None
    loss: float  # in nats or 1 - cosine, measured for the group alone
    time: float  # relative to that of all linear layers of the unpruned model; mean over ``Budget.tokens``
    zeros: int  # number of weights


Candidates = dict[LayerGroup, tuple[Candidate, ...]]  # candidates of each group, dense first


@dataclass(frozen=True)
class Choice:
    """A pattern for every group, with the totals of all groups."""

    patterns: Mapping[LayerGroup, SlidePattern | None]
    loss: float
    time: float
    zeros: float  # share of the weights of all groups

    @property
    def by_layer(self) -> dict[str, SlidePattern | None]:
        """The pattern of each layer."""
        return {name: pattern for group, pattern in self.patterns.items() for name in group}

    @property
    def mix(self) -> str:
        """The number of groups at each pattern as text, such as ``3 at 2:4, 5 at dense``."""
        counts = Counter(map(name_of, self.patterns.values()))
        return ", ".join(f"{count} at {name}" for name, count in sorted(counts.items()))


@dataclass(frozen=True)
class AllocationProblem:
    """The candidates of all groups."""

    candidates: Candidates
    weights: int  # number of weights of all linear layers
    fixed: float = 0.0  # time of the linear layers that stay dense, in the group of `Candidate.time`

    def choice(self, picked: Mapping[LayerGroup, Candidate]) -> Choice:
        """Return the choice of one candidate for each group."""
        return Choice(
            {group: candidate.pattern for group, candidate in picked.items()},
            sum(candidate.loss for candidate in picked.values()),
            self.fixed + sum(candidate.time for candidate in picked.values()),
            sum(candidate.zeros for candidate in picked.values()) / self.weights,
        )

    def uniform(self, pattern: SlidePattern) -> Choice:
        """Return the choice of the same pattern for all groups."""
        return self.choice(
            {
                group: next(o for o in options if o.pattern == pattern)
                for group, options in self.candidates.items()
            }
        )

    def frontier(self) -> list[Choice]:
        """Return the choices on the convex hull of loss over saving, from dense to the largest saving."""
        picked = {group: options[0] for group, options in self.candidates.items()}
        choices = [self.choice(picked)]
        # Along the hulls of all groups, in order of loss per saving
        steps = [
            (_slope(a, b), group, number, b)
            for group, options in self.candidates.items()
            for number, (a, b) in enumerate(pairwise(_hull(options)))
        ]
        for _, group, _, candidate in sorted(steps, key=lambda step: step[:3]):
            picked[group] = candidate
            choices.append(self.choice(picked))
        return choices

    def fastest(self, loss: float) -> Choice:
        """Return the last choice of the frontier whose total loss is at most ``loss``; possibly all dense."""
        return [choice for choice in self.frontier() if choice.loss <= loss][-1]


def _hull(options: Sequence[Candidate]) -> list[Candidate]:
    """Return the candidates on the lower convex hull of loss over saving, starting with dense: each is faster."""
    hull = [options[0]]
    better = [o for o in options[1:] if o.time < options[0].time]
    for candidate in sorted(better, key=lambda o: (-o.time, -o.loss)):
        while len(hull) > 1 and _slope(hull[-2], candidate) <= _slope(hull[-2], hull[-1]):
            hull.pop()
        hull.append(candidate)
    return hull


def _slope(a: Candidate, b: Candidate) -> float:
    """Return the loss per saving from ``a`` to ``b``, which is faster."""
    return (b.loss - a.loss) / (a.time - b.time)


class LayerTimes:
    """The times of linear layers in ``quant``, "int8" or "fp8", as measured on a GPU: see this module."""

    def __init__(self, gpu: str, quant: str) -> None:
        self._quant, self._fits = quant, layer_fits(gpu)

    def us(self, name: str, shape: Shape, tokens: int) -> float:
        """Return the microseconds of layers at a pattern of PATTERNS or DENSE_WEIGHT for a step's tokens."""
        reached = sum(1 - (1 - share) ** tokens for share in shape.shares)  # of independent tokens
        of_each = tokens * sum(shape.shares) / reached
        measured = [m for dtype, pattern, m in self._fits if (dtype, pattern) == (self._quant, name)]
        a, b = self._fits[
            self._quant, name, min((m for m in measured if m >= of_each), default=max(measured))
        ]
        return a + b * reached * shape.rows * shape.columns

    def speeds(
        self, layers: Sequence[tuple[Shape, Pattern | None]], tokens: Sequence[int] = DEFAULT_TOKENS
    ) -> dict[int, float]:
        """Return by tokens how many times as fast as unpruned ones layers with these patterns are."""
        kept = [(shape, pattern if pattern in PATTERNS else None) for shape, pattern in layers]
        return {
            m: sum(self.us(DENSE_WEIGHT, shape, m) for shape, _ in kept)
            / sum(self.us(name_of(pattern), shape, m) for shape, pattern in kept)
            for m in tokens
        }


def allocation_problem(
    losses: Losses, shapes: Mapping[LayerGroup, Shape], quant: str, budget: Budget, fixed: Sequence[Shape]
) -> AllocationProblem:
    """Return the allocation problem for the measured losses of groups and the times of their layers.

    Args:
        shapes: [N, K] of the fused matrix of each group, or of each of its experts.
        quant: "int8" or "fp8".
        fixed: [N, K] of the linear layers that stay dense, whose time and weights count, too.
    """
    us = LayerTimes(budget.gpu, quant).us
    all_shapes = [*shapes.values(), *fixed]
    baseline = {m: sum(us(DENSE_WEIGHT, shape, m) for shape in all_shapes) for m in budget.tokens}

    def share(pattern: SlidePattern | None, shape: Shape) -> float:
        parts = [us(name_of(pattern), shape, m) / time for m, time in baseline.items()]
        return sum(parts) / len(parts)

    candidates: Candidates = {}
    for group, shape in shapes.items():
        options = [Candidate(None, 0.0, share(None, shape), 0)]
        for pattern in PATTERNS:
            zeros = len(shape.shares) * shape.rows * (shape.columns // (pattern.length or shape.columns)) * 2
            loss = max(0.0, losses[group].by_pattern[pattern.ratio])
            options.append(Candidate(pattern, loss, share(pattern, shape), zeros))
        candidates[group] = tuple(options)
    fixed_time = sum(share(None, shape) for shape in fixed)
    return AllocationProblem(candidates, sum(shape.weights for shape in all_shapes), fixed_time)
