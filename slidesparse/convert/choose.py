"""Choose the patterns of layers for a budget, prune by them, and see whether the whole model keeps the promise."""

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
from slidesparse.convert.budget import PATTERNS, Budget, Choice, Market, market, percent
from slidesparse.convert.times import Shape, spelled
from slidesparse.errors import CalibrationError

# What the whole model loses, as a part of the sum of what its layers lose alone; until it is measured
FIRST_PART = 0.7
ROUNDS = 3  # how often a model is pruned for --max-loss, if it loses too much, or so little that more could be saved
CLOSE = 0.75  # of the loss allowed is near enough
MARGIN = 0.95  # of the loss allowed is aimed at when it was missed
MOST_STEP = 4  # times the last aim is the most of the next


@dataclass(frozen=True)
class Outcome:
    """The outcome of a budget."""

    budget: Budget
    market: Market
    part: float  # loss of the whole model over the sum of its layers' losses
    in_nats: bool  # whether losses are differences of cross-entropy; else 1 - cosine
    choice: Choice | None = None
    found: float | None = None  # the whole model's loss on samples held back

    @property
    def allowed(self) -> float:
        """The most that the whole model may lose, in nats or 1 - cosine; infinite where something else is asked for."""
        most = self.budget.max_loss
        if most is None:
            return math.inf
        return math.log1p(most) if self.in_nats else most

    def loss(self, choice: Choice) -> float:
        """Return what a choice is estimated to cost: of perplexity, or of the cosine."""
        return self.shown(choice.loss * self.part)

    def shown(self, loss: float) -> float:
        """Return a loss as users are told it: of perplexity above the dense model's, or of the cosine."""
        return math.expm1(loss) if self.in_nats else loss

    @property
    def kept(self) -> bool:
        """Whether the whole model loses no more than it may."""
        most = self.budget.max_loss
        return most is None or self.found is None or self.shown(self.found) <= most

    @property
    def words(self) -> str:
        """The loss that was found, in words; empty in a dry run."""
        if self.found is None:
            return ""
        what = "perplexity" if self.in_nats else "1 - cosine"
        sign = "+" if self.in_nats else ""
        return f"{what} {sign}{percent(self.shown(self.found))} above the dense model quantized alike"

    def to_json(self) -> dict[str, Any]:
        """Return what ``--report`` writes of it."""
        return {
            "goal": self.budget.goal,
            "gpu": self.budget.gpu,
            "tokens": list(self.budget.tokens),
            "loss_of": "perplexity" if self.in_nats else "1 - cosine",
            "loss": None if self.found is None else self.shown(self.found),
            "kept": self.kept,
            "part": self.part,
            "chosen": None if self.choice is None else self._row(self.choice),
            "uniform": {p.ratio: self._row(self.market.uniform(p)) for p in self.market.patterns},
            "frontier": [self._row(choice) for choice in self.market.frontier()],
            "units": [
                {
                    "layers": list(unit),
                    "pattern": None if self.choice is None else spelled(self.choice.patterns[unit]),
                    "options": [
                        {"pattern": spelled(o.pattern), "loss": o.loss, "time": o.time, "zeros": o.zeros}
                        for o in options
                    ],
                }
                for unit, options in self.market.menu.items()
            ],
        }

    def _row(self, choice: Choice) -> dict[str, Any]:
        return {
            "loss": self.loss(choice),
            "speedup": None if self.market.by_zeros else choice.speedup,
            "zeros": choice.zeros,
            "patterns": choice.counts,
        }


def estimate(
    task: Task, reader: Reader, work: WorkFolder, budget: Budget, rotate: bool, progress: Progress | None
) -> Outcome:
    """Measure what layers lose, or take it from the cache; choose for the budget, but prune nothing.

    Args:
        rotate: whether the model that ``reader`` gives is rotated.

    Raises CalibrationError when nothing can be pruned within the budget, or not enough.
    """
    losses = _losses(task, reader, work, rotate, progress)
    shapes = {unit: _shape(task, unit) for unit in losses}
    fixed = [_shape(task, (name,)) for name in sorted(task.skipped)]
    outcome = Outcome(
        budget, market(losses, shapes, task.quant, budget, fixed), FIRST_PART, task.model.is_decoder
    )
    return replace(outcome, choice=_choose(outcome, outcome.allowed / FIRST_PART))


def _losses(task: Task, reader: Reader, work: WorkFolder, rotate: bool, progress: Progress | None) -> Losses:
    """Return the losses of all units, kept in the user's cache for other budgets."""
    without = ("layers", "sweeps", "target", "finetune")
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
    """Choose for the budget, or with ``aim`` as the most that the losses of all layers may add up to."""
    budget, found = outcome.budget, outcome.market
    if len(found.frontier()) == 1:
        raise CalibrationError(
            f"{budget.goal}: by the times of layers on {budget.gpu} no pattern makes a layer of this model faster in "
            f"steps of {', '.join(map(str, budget.tokens))} tokens; choose by zeros, or by other --tokens"
        )
    if budget.max_loss is not None:
        choice = found.fastest(aim)
        if not any(choice.patterns.values()):
            first = outcome.loss(found.frontier()[1])
            raise CalibrationError(
                f"{budget.goal} is too little to prune any layer: the first is estimated to lose {percent(first)}; "
                "allow more"
            )
        return choice
    saved = budget.zeros if budget.min_speedup is None else 1 - 1 / budget.min_speedup
    some = found.least_loss(saved or 0.0)
    if some is None:
        most = found.frontier()[-1]
        reached = percent(most.zeros) if found.by_zeros else f"{most.speedup:.3f}"
        raise CalibrationError(
            f"{budget.goal} cannot be reached: the most is {reached}, with {most.mix}; ask for less"
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
    """Prune by the choice of an `estimate`; for a loss allowed again, until it is near what is found and not below.

    A run that was killed goes on where it was.  The blocks of the choice returned are in ``work``.

    Args:
        task: the task of all layers, with samples held back.
        fitted: gives the task of a choice.
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
        most = choice.patterns == outcome.market.frontier()[-1].patterns
        again = (
            None if outcome.budget.max_loss is None else next_aim(tries, outcome.allowed, choice.loss, most)
        )
        if again is None:
            return replace(outcome, choice=choice, found=found, part=max(found, 0.0) / choice.loss)
        tries.append(Try(again, None))
        work.clear()
        work.write_json(CHOICE, tries)


class Try(NamedTuple):
    """A choice for which layers' losses added up to ``aim`` at most, and what the whole model then lost."""

    aim: float
    found: float | None


def next_aim(tries: Sequence[Try], allowed: float, predicted: float, most: bool) -> float | None:
    """Return what to aim at next, or None when the last try shall stay.

    Args:
        tries: at least one, all with what was found.
        predicted: what the losses of layers add up to in the last one.
        most: whether nothing more can be pruned than in the last one.
    """
    last = tries[-1].found
    assert last is not None
    good = [each.aim for each in tries if each.found is not None and each.found <= allowed]
    bad = [each.aim for each in tries if each.found is not None and each.found > allowed]
    if last <= allowed and (last >= CLOSE * allowed or most):
        return None
    if len(tries) >= ROUNDS:
        # the best that kept the promise is made again, if it is not the last
        return max(good) if good and last > allowed and len(tries) == ROUNDS else None
    aim = MARGIN * allowed * predicted / max(last, allowed / MOST_STEP)
    if good and bad and not max(good) < aim < min(bad):
        return (max(good) + min(bad)) / 2
    return aim
