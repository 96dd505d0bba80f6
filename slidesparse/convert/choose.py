"""Choose the patterns of layers for a budget, prune with them, and measure whether the whole model is within it."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from slidesparse.build.compile import cache_folder, make_folder
from slidesparse.calibrate.losses import Losses, Unit, layer_losses, whole_loss
from slidesparse.calibrate.pipeline import calibrate
from slidesparse.calibrate.resume import CHOICE, WorkFolder
from slidesparse.calibrate.task import Progress, Task
from slidesparse.checkpoint.architectures import WEIGHT
from slidesparse.checkpoint.storage import Reader
from slidesparse.convert.budget import (
    PATTERNS,
    AllocationProblem,
    Budget,
    Choice,
    allocation_problem,
    percent,
)
from slidesparse.convert.times import Shape, name_of
from slidesparse.errors import CalibrationError

# The loss of the whole model over the sum of its layers' losses, until it is measured
FIRST_PART = 0.7
ROUNDS = 3  # the most choices that are tried for --max-loss
CLOSE = 0.75  # a loss from this part of the allowed one on is close enough
MARGIN = 0.95  # the part of the allowed loss to aim at after a miss
MOST_STEP = 4  # the next aim is at most this many times the last


@dataclass(frozen=True)
class Outcome:
    """The outcome of a budget."""

    budget: Budget
    problem: AllocationProblem
    part: float  # loss of the whole model over the sum of its layers' losses
    in_nats: bool  # whether losses are differences of cross-entropy; else 1 - cosine
    choice: Choice | None = None
    found: float | None = None  # the whole model's loss on samples held back

    @property
    def allowed(self) -> float:
        """The most that the whole model may lose, in nats or 1 - cosine; infinite for other goals than a loss."""
        most = self.budget.max_loss
        if most is None:
            return math.inf
        return math.log1p(most) if self.in_nats else most

    def loss(self, choice: Choice) -> float:
        """Return the estimated loss of a choice: perplexity above the dense model's, as a share, or 1 - cosine."""
        return self.shown(choice.loss * self.part)

    def shown(self, loss: float) -> float:
        """Return a loss as the report shows it: perplexity above the dense model's, as a share, or 1 - cosine."""
        return math.expm1(loss) if self.in_nats else loss

    @property
    def kept(self) -> bool:
        """Whether the whole model loses no more than it may."""
        most = self.budget.max_loss
        return most is None or self.found is None or self.shown(self.found) <= most

    @property
    def words(self) -> str:
        """The measured loss as text; empty in a dry run."""
        if self.found is None:
            return ""
        what = "perplexity" if self.in_nats else "1 - cosine"
        sign = "+" if self.in_nats else ""
        return (
            f"{what} {sign}{percent(self.shown(self.found))} above the dense model with the same quantization"
        )

    def to_json(self) -> dict[str, Any]:
        """Return the part of the ``--report`` file about the budget."""
        return {
            "goal": self.budget.goal,
            "gpu": self.budget.gpu,
            "tokens": list(self.budget.tokens),
            "loss_of": "perplexity" if self.in_nats else "1 - cosine",
            "loss": None if self.found is None else self.shown(self.found),
            "kept": self.kept,
            "part": self.part,
            "chosen": None if self.choice is None else self._row(self.choice),
            "uniform": {p.ratio: self._row(self.problem.uniform(p)) for p in self.problem.patterns},
            "frontier": [self._row(choice) for choice in self.problem.frontier()],
            "units": [
                {
                    "layers": list(unit),
                    "pattern": None if self.choice is None else name_of(self.choice.patterns[unit]),
                    "options": [
                        {"pattern": name_of(o.pattern), "loss": o.loss, "time": o.time, "zeros": o.zeros}
                        for o in options
                    ],
                }
                for unit, options in self.problem.candidates.items()
            ],
        }

    def _row(self, choice: Choice) -> dict[str, Any]:
        return {
            "loss": self.loss(choice),
            "speedup": None if self.problem.by_zeros else choice.speedup,
            "zeros": choice.zeros,
            "patterns": choice.counts,
        }


def estimate(
    task: Task, reader: Reader, work: WorkFolder, budget: Budget, rotate: bool, progress: Progress | None
) -> Outcome:
    """Choose patterns for the budget by the losses of layers, measured now or cached; prune nothing.

    Args:
        rotate: whether ``reader`` gives a rotated model.

    Raises CalibrationError when the budget allows no pruning, or cannot be reached.
    """
    losses = _losses(task, reader, work, rotate, progress)
    shapes = {unit: _shape(task, unit) for unit in losses}
    fixed = [_shape(task, (name,)) for name in sorted(task.skipped)]
    outcome = Outcome(
        budget,
        allocation_problem(losses, shapes, task.quant, budget, fixed),
        FIRST_PART,
        task.model.is_decoder,
    )
    return replace(outcome, choice=_choose(outcome, outcome.allowed / FIRST_PART))


def _losses(task: Task, reader: Reader, work: WorkFolder, rotate: bool, progress: Progress | None) -> Losses:
    """Return the losses of all units, kept in the user's cache for other budgets."""
    without = ("layers", "sweeps", "target", "finetune", "permutes", "distill", "minutes")
    state = {key: value for key, value in task.state().items() if key not in without}
    state |= {"layers": sorted(task.layers), "rotate": rotate, "patterns": [p.ratio for p in PATTERNS]}
    name = f"{hashlib.sha256(json.dumps(state).encode()).hexdigest()[:32]}.json"
    cache = WorkFolder(cache_folder() / "losses")
    make_folder(cache.folder)
    return layer_losses(task, PATTERNS, reader, work.folder, cache, name, progress)


def _shape(task: Task, unit: Unit) -> Shape:
    specs = [task.model.checkpoint.require(name + WEIGHT) for name in unit]
    return sum(spec.rows for spec in specs), specs[0].columns


def _choose(outcome: Outcome, aim: float) -> Choice:
    """Choose for the budget; for a loss, so that the losses of all layers add up to ``aim`` at most."""
    budget, problem = outcome.budget, outcome.problem
    if len(problem.frontier()) == 1:
        raise CalibrationError(
            f"{budget.goal}: by the times of layers on {budget.gpu} no pattern makes a layer of this model faster in "
            f"steps of {', '.join(map(str, budget.tokens))} tokens; choose by zeros, or by other --tokens"
        )
    if budget.max_loss is not None:
        choice = problem.fastest(aim)
        if not any(choice.patterns.values()):
            first = outcome.loss(problem.frontier()[1])
            raise CalibrationError(
                f"{budget.goal} is too little to prune any layer: the first is estimated to lose {percent(first)}; "
                "allow more"
            )
        return choice
    saved = budget.zeros if budget.min_speedup is None else 1 - 1 / budget.min_speedup
    some = problem.least_loss(saved or 0.0)
    if some is None:
        most = problem.frontier()[-1]
        reached = percent(most.zeros) if problem.by_zeros else f"{most.speedup:.3f}"
        raise CalibrationError(
            f"{budget.goal} cannot be reached: the most is {reached}, with {most.mix}; ask for less"
        )
    if not any(some.patterns.values()):
        raise CalibrationError(
            f"{budget.goal} is reached without pruning: dense kernels are here {some.speedup:.3f} times as fast as "
            "stock vLLM's. Ask for more, or serve a W8A8 model that is not pruned with USE_CUSPARSELT=1 SPARSITY=dense"
        )
    return some


def prune_within(
    task: Task,
    reader: Reader,
    work: WorkFolder,
    outcome: Outcome,
    fitted: Callable[[Choice], Task],
    progress: Progress | None,
) -> Outcome:
    """Prune by the choice of an `estimate`; for ``--max-loss`` again with another one, until the loss is close to it.

    A killed run can be resumed.  The blocks of the choice that is returned are in ``work``.

    Args:
        task: the task of all layers, with samples held back.
        fitted: returns the task of a choice.
    """
    tries = [Try(*each) for each in work.read_json(CHOICE) or [(outcome.allowed / FIRST_PART, None)]]
    while True:
        choice = _choose(outcome, tries[-1].aim)
        if tries[-1].found is None:
            chosen = fitted(choice)
            calibrate(chosen, reader, work, progress)
            tries[-1] = Try(tries[-1].aim, whole_loss(chosen, reader, work, progress))
            work.write_json(CHOICE, tries)
        found = tries[-1].found
        assert found is not None
        most = choice.patterns == outcome.problem.frontier()[-1].patterns
        again = (
            None if outcome.budget.max_loss is None else next_aim(tries, outcome.allowed, choice.loss, most)
        )
        if again is None:
            return replace(outcome, choice=choice, found=found, part=max(found, 0.0) / choice.loss)
        tries.append(Try(again, None))
        work.clear()
        work.write_json(CHOICE, tries)


class Try(NamedTuple):
    """The limit ``aim`` on the sum of layers' losses, and the loss that the whole model then had."""

    aim: float
    found: float | None


def next_aim(tries: Sequence[Try], allowed: float, predicted: float, most: bool) -> float | None:
    """Return the next limit on the sum of layers' losses, or None to keep the last try.

    Args:
        tries: at least one, all with a measured loss.
        predicted: the sum of layers' losses in the last one.
        most: whether nothing more can be pruned than in the last one.
    """
    last = tries[-1].found
    assert last is not None
    good = [each.aim for each in tries if each.found is not None and each.found <= allowed]
    bad = [each.aim for each in tries if each.found is not None and each.found > allowed]
    if last <= allowed and (last >= CLOSE * allowed or most):
        return None
    if len(tries) >= ROUNDS:
        # the best within the limit is made again, if it is not the last
        return max(good) if good and last > allowed and len(tries) == ROUNDS else None
    aim = MARGIN * allowed * predicted / max(last, allowed / MOST_STEP)
    if good and bad and not max(good) < aim < min(bad):
        return (max(good) + min(bad)) / 2
    return aim
