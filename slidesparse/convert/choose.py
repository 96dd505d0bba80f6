"""Choose patterns of layers for a budget, prune with them, and check that the whole model is within the budget."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from slidesparse import files
from slidesparse.build.compile import cache_folder
from slidesparse.calibrate.losses import LayerGroup, Losses, layer_groups, layer_losses, whole_loss
from slidesparse.calibrate.pipeline import calibrate
from slidesparse.calibrate.resume import CHOICE, LOSSES, WorkFolder
from slidesparse.calibrate.task import Progress, Task
from slidesparse.checkpoint.names import WEIGHT
from slidesparse.checkpoint.storage import Reader
from slidesparse.convert.budget import (
    PATTERNS,
    AllocationProblem,
    Budget,
    Choice,
    allocation_problem,
    percent,
)
from slidesparse.convert.times import Shape
from slidesparse.errors import CalibrationError

# Initial estimate of the loss of the whole model, relative to the sum of its layers' losses
FIRST_PART = 0.7
ROUNDS = 3  # most choices that are tried for --max-loss
CLOSE = 0.75  # a loss of at least this share of the allowed one is close enough
MARGIN = 0.95  # share of the allowed loss for the next limit after a miss
MAX_STEP = 4  # largest factor between successive limits


@dataclass(frozen=True)
class Outcome:
    """The result of an allocation."""

    budget: Budget
    problem: AllocationProblem
    part: float  # loss of the whole model relative to the sum of its layers' losses
    in_nats: bool  # whether losses are differences in cross-entropy, not 1 - cosine
    choice: Choice | None = None
    measured_loss: float | None = None  # loss of the whole model on the validation split

    @property
    def allowed(self) -> float:
        """The allowed loss of the whole model, in nats or 1 - cosine; infinite unless the goal is a loss."""
        most = self.budget.max_loss
        if most is None:
            return math.inf
        return math.log1p(most) if self.in_nats else most

    def loss(self, choice: Choice) -> float:
        """Return the estimated loss of a choice, as `shown`."""
        return self.shown(choice.loss * self.part)

    def shown(self, loss: float) -> float:
        """Convert a loss to the relative increase in perplexity (0.01 is 1%); 1 - cosine is returned as it is."""
        return math.expm1(loss) if self.in_nats else loss

    @property
    def within_budget(self) -> bool:
        """Whether the loss of the whole model is within the budget."""
        most = self.budget.max_loss
        return most is None or self.measured_loss is None or self.shown(self.measured_loss) <= most

    @property
    def summary(self) -> str:
        """The measured loss as text; empty in a dry run."""
        if self.measured_loss is None:
            return ""
        metric = "perplexity" if self.in_nats else "1 - cosine"
        sign = "+" if self.in_nats else ""
        return (
            f"{metric} {sign}{percent(self.shown(self.measured_loss))} relative to the unpruned model with the same "
            "quantization"
        )


def loss_cache() -> Path:
    """Create the folder of measured losses in the user's cache.  Raises EnvironmentFault if it cannot be used."""
    return files.own_folder(cache_folder() / "losses", "set SLIDESPARSE_CACHE to another folder")


def require_usable(task: Task, budget: Budget) -> None:
    """Raise CalibrationError if the loss of a model is not known, or no pattern saves time; nothing is measured."""
    if task.model.is_causal and task.model.other_use:
        raise CalibrationError(
            f"a budget can be measured only for encoders and models that predict tokens, but {task.model.other_use}: "
            "give a pattern instead, such as --sparsity 6:8"
        )
    nothing = {group: dict.fromkeys((p.ratio for p in PATTERNS), 0.0) for group in layer_groups(task)}
    if len(_problem(task, nothing, budget).frontier()) == 1:
        raise CalibrationError(
            f"{budget.goal}: by the layer times on {budget.gpu}, no pattern makes any layer of this model faster at "
            f"{', '.join(map(str, budget.tokens))} tokens per forward pass; use --zeros"
        )


def _problem(task: Task, losses: Losses, budget: Budget) -> AllocationProblem:
    shapes = {group: _shape(task, group) for group in losses}
    fixed = [_shape(task, (name,)) for name in sorted(task.skipped)]
    return allocation_problem(losses, shapes, task.quant, budget, fixed)


def estimate(
    task: Task, reader: Reader, work: WorkFolder, budget: Budget, rotate: bool, progress: Progress
) -> Outcome:
    """Choose patterns for the budget from the losses of layers, which are measured or cached, without pruning.

    Args:
        rotate: whether ``reader`` reads a rotated model.

    Raises CalibrationError when the budget allows no pruning or cannot be reached.
    """
    losses = _losses(task, reader, work, rotate, progress)
    outcome = Outcome(budget, _problem(task, losses, budget), FIRST_PART, task.model.skeleton.generates)
    return replace(outcome, choice=_choose(outcome, outcome.allowed / FIRST_PART))


def _losses(task: Task, reader: Reader, work: WorkFolder, rotate: bool, progress: Progress) -> Losses:
    """Return the losses of all layer groups.

    They are kept in ``work``, so that a resumed run decides as before, and in the user's cache for other budgets.
    """
    state = {key: value for key, value in task.state().items() if key not in ("layers", "distill")}
    state |= {"layers": sorted(task.layers), "rotate": rotate, "patterns": [p.ratio for p in PATTERNS]}
    cached = loss_cache() / f"{hashlib.sha256(json.dumps(state).encode()).hexdigest()[:32]}.json"
    entries = work.read_json(LOSSES)
    if entries is None:
        with suppress(files.DamagedFile):  # measured again
            entries = files.read_json(cached)
    known: Losses = {tuple(group): by_pattern for group, by_pattern in entries or ()}

    def save(losses: Losses) -> None:
        work.write_json(LOSSES, [[list(group), by_pattern] for group, by_pattern in losses.items()])

    save(known)
    losses = layer_losses(task, PATTERNS, reader, known, save, progress)
    with suppress(OSError):  # what is not cached is measured again
        files.write_json(cached, [[list(group), by_pattern] for group, by_pattern in losses.items()])
    return losses


def _shape(task: Task, group: LayerGroup) -> Shape:
    specs = [task.model.checkpoint.require(name + WEIGHT) for name in group]
    return sum(spec.rows for spec in specs), specs[0].columns


def _choose(outcome: Outcome, limit: float) -> Choice:
    """Return the best choice for the budget; for ``--max-loss`` the sum of layers' losses is at most ``limit``."""
    budget, problem = outcome.budget, outcome.problem
    if budget.max_loss is not None:
        choice = problem.fastest(limit)
        if not any(choice.patterns.values()):
            first = outcome.loss(problem.frontier()[1])
            raise CalibrationError(
                f"{budget.goal} is too small to prune any layer: the smallest estimated loss is "
                f"{percent(first)}; allow a larger loss"
            )
        return choice
    best = problem.least_loss(budget.zeros or 0.0)
    if best is None:
        most = problem.frontier()[-1]
        raise CalibrationError(
            f"{budget.goal} cannot be reached: the maximum is {percent(most.zeros)}, with {most.mix}; choose a smaller "
            "value"
        )
    return best


def prune_within(
    reader: Reader,
    work: WorkFolder,
    outcome: Outcome,
    fitted: Callable[[Choice], Task],
    progress: Progress,
) -> Outcome:
    """Prune with the choice of an `estimate`; for ``--max-loss``, adjust it until the measured loss is close to it.

    An interrupted run can be resumed.  Afterwards, ``work`` holds the blocks of the returned choice.

    Args:
        fitted: a function that returns the task for a choice, with a validation split.
    """
    attempts = _attempts(work.read_json(CHOICE)) or [Attempt(outcome.allowed / FIRST_PART, None)]
    while True:
        choice = _choose(outcome, attempts[-1].limit)
        if attempts[-1].loss is None:
            chosen = fitted(choice)
            calibrate(chosen, reader, work, progress)
            attempts[-1] = Attempt(attempts[-1].limit, whole_loss(chosen, reader, work, progress))
            work.write_json(CHOICE, _saved(attempts))
        loss = attempts[-1].loss
        assert loss is not None
        most = choice.patterns == outcome.problem.frontier()[-1].patterns
        limit = (
            None
            if outcome.budget.max_loss is None
            else next_limit(attempts, outcome.allowed, choice.loss, most)
        )
        if limit is None:
            calibrate(fitted(choice), reader, work, progress)  # of a resumed run: check that all is there
            return replace(outcome, choice=choice, measured_loss=loss, part=max(loss, 0.0) / choice.loss)
        attempts.append(Attempt(limit, None))
        work.clear()
        work.write_json(CHOICE, _saved(attempts))


class Attempt(NamedTuple):
    """A limit ``limit`` on the sum of layers' losses, and the resulting loss of the whole model."""

    limit: float
    loss: float | None


def _attempts(saved: Sequence[Sequence[float | None]] | None) -> list[Attempt]:
    """Return the attempts that `_saved` wrote, none without a file."""
    return [Attempt(math.inf if limit is None else limit, loss) for limit, loss in saved or ()]


def _saved(attempts: Sequence[Attempt]) -> list[list[float | None]]:
    """Return attempts as JSON, the limit of a goal without one as null."""
    return [[limit if math.isfinite(limit) else None, loss] for limit, loss in attempts]


def next_limit(attempts: Sequence[Attempt], allowed: float, predicted: float, most: bool) -> float | None:
    """Return the next limit on the sum of layers' losses, or None to keep the last attempt.

    Args:
        attempts: at least one, all with a measured loss.
        predicted: the sum of layers' losses in the last attempt.
        most: whether the last attempt pruned as much as possible.
    """
    last = attempts[-1].loss
    assert last is not None
    good = [attempt.limit for attempt in attempts if attempt.loss is not None and attempt.loss <= allowed]
    bad = [attempt.limit for attempt in attempts if attempt.loss is not None and attempt.loss > allowed]
    if last <= allowed and (last >= CLOSE * allowed or most):
        return None
    if len(attempts) >= ROUNDS:
        # Repeat the best attempt within the allowed loss, unless it was the last
        return max(good) if good and last > allowed and len(attempts) == ROUNDS else None
    limit = MARGIN * allowed * predicted / max(last, allowed / MAX_STEP)
    if good and bad and not max(good) < limit < min(bad):
        return (max(good) + min(bad)) / 2
    return limit
