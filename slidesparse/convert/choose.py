"""Choose patterns of layers for a budget, prune with them, and check that the whole model is within the budget."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from slidesparse import files
from slidesparse.build.compile import cache_folder, make_folder
from slidesparse.calibrate.losses import (
    GroupLoss,
    Losses,
    layer_groups,
    layer_losses,
    perplexity_change,
    whole_loss,
)
from slidesparse.calibrate.model import LayerGroup
from slidesparse.calibrate.pipeline import calibrate
from slidesparse.calibrate.resume import CHOICE, LOSSES, WorkFolder
from slidesparse.calibrate.task import HELD_BACK, TEXTS, Task
from slidesparse.checkpoint.names import WEIGHT, is_expert
from slidesparse.checkpoint.storage import Reader
from slidesparse.convert.budget import (
    PATTERNS,
    AllocationProblem,
    Budget,
    Choice,
    Shape,
    allocation_problem,
    percent,
)
from slidesparse.errors import CalibrationError
from slidesparse.progress import Progress

# Initial estimate of the loss of the whole model, relative to the sum of its layers' losses
FIRST_PART = 2.0
ROUNDS = 3  # most choices that are tried
CLOSE = 0.75  # a loss of at least this share of the allowed one is close enough
AIM = 0.9  # share of the allowed loss for the next limit after a miss
MAX_STEP = 4  # largest factor between successive limits
LEAST = 0.01  # share of the allowed loss that a smaller one counts as; noise may make it negative
POWERS = 0.5, 4.0  # the loss of the whole model grows as the sum of its layers' losses to a power in between


@dataclass(frozen=True)
class Outcome:
    """The result of an allocation."""

    budget: Budget
    problem: AllocationProblem
    part: float  # loss of the whole model relative to the sum of its layers' losses
    in_nats: bool  # whether losses are differences in cross-entropy, not 1 - cosine
    kinds: tuple[str, ...]  # the kinds of text that the loss of the whole model is measured on
    choice: Choice | None = None
    measured: tuple[float, ...] | None = None  # loss of the whole model on each kind of text

    @property
    def allowed(self) -> float:
        """The allowed loss of the whole model, in nats or 1 - cosine."""
        most = self.budget.max_loss
        return math.log1p(most) if self.in_nats else most

    def loss(self, choice: Choice) -> float:
        """Return the estimated loss of a choice, as `shown`."""
        return self.shown(choice.loss * self.part)

    def shown(self, loss: float) -> float:
        """Convert a loss to the relative increase in perplexity (0.01 is 1%); 1 - cosine is returned as it is."""
        return perplexity_change(loss) if self.in_nats else loss

    @property
    def measured_loss(self) -> float | None:
        """The loss that counts, on the kind of text on which it is largest."""
        return max(self.measured) if self.measured else None

    @property
    def within_budget(self) -> bool:
        """Whether the loss of the whole model is within the budget."""
        return self.measured_loss is None or self.shown(self.measured_loss) <= self.budget.max_loss

    @property
    def summary(self) -> str:
        """The measured losses as text; empty in a dry run."""
        metric, sign = ("perplexity", "+") if self.in_nats else ("1 - cosine", "")
        parts = [
            f"{percent(self.shown(loss), sign)} on {kind}"
            for kind, loss in zip(self.kinds, self.measured or (), strict=False)
        ]
        if not parts:
            return ""
        return f"{metric} {', '.join(parts)}, relative to the unpruned model with the same quantization"


def loss_cache() -> Path:
    """Create the folder of measured losses in the user's cache.  Raises EnvironmentFault if it cannot be used."""
    return make_folder(cache_folder() / "losses")


def require_usable(task: Task, budget: Budget) -> None:
    """Raise CalibrationError if the loss of a model is not known, or no pattern saves time; nothing is measured."""
    if task.model.is_causal and task.model.other_use:
        raise CalibrationError(
            f"a budget can be measured only for encoders and models that predict tokens, but {task.model.other_use}: "
            "give a pattern instead, such as --sparsity 6:8"
        )
    none = GroupLoss(dict.fromkeys((p.ratio for p in PATTERNS), 0.0))  # of experts that all tokens reach
    nothing = dict.fromkeys(layer_groups(task), none)
    if len(_problem(task, nothing, budget).frontier()) == 1:
        raise CalibrationError(
            f"{budget.goal}: by the layer times on {budget.gpu}, no pattern makes any layer of this model faster at "
            f"{', '.join(map(str, budget.tokens))} tokens per forward pass; leave the model unpruned: --sparsity dense"
        )


def _problem(task: Task, losses: Losses, budget: Budget) -> AllocationProblem:
    shapes = {group: _shape(task, group, loss.shares) for group, loss in losses.items()}
    fixed = [_shape(task, (name,)) for name in sorted(task.skipped) if not is_expert(name)]
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
    kinds = tuple(samples.origin for samples in task.held_back)
    problem = _problem(task, losses, budget)
    outcome = Outcome(budget, problem, FIRST_PART, task.model.skeleton.generates, kinds)
    return replace(outcome, choice=_choose(outcome, outcome.allowed / FIRST_PART))


def _losses(task: Task, reader: Reader, work: WorkFolder, rotate: bool, progress: Progress) -> Losses:
    """Return the losses of all layer groups.

    They are kept in ``work``, so that a resumed run decides as before, and in the user's cache for other budgets.
    """
    state = {key: value for key, value in task.state().items() if key not in ("layers", HELD_BACK, TEXTS)}
    state |= {"source": task.model.checkpoint.fingerprint, "layers": sorted(task.layers), "rotate": rotate}
    state |= {"patterns": [p.ratio for p in PATTERNS]}
    cached = loss_cache() / f"{hashlib.sha256(json.dumps(state).encode()).hexdigest()[:32]}.json"
    entries = work.read_json(LOSSES)
    if entries is None:
        with suppress(files.DamagedFile):  # measured again
            entries = files.read_json(cached)
    known: Losses = {tuple(group): GroupLoss(*loss) for group, *loss in entries or ()}

    def save(losses: Losses) -> None:
        entries = [[group, *loss] for group, loss in losses.items()]
        work.write_json(LOSSES, entries)
        with suppress(OSError):  # what is not cached is measured again
            files.write_json(cached, entries)

    save(known)
    return layer_losses(task, PATTERNS, reader, known, save, progress)


def _shape(task: Task, group: LayerGroup, shares: Sequence[float] = (1.0,)) -> Shape:
    specs = [task.model.checkpoint.require(name + WEIGHT) for name in group]
    return Shape(sum(spec.rows for spec in specs) // len(shares), specs[0].columns, tuple(shares))


def _choose(outcome: Outcome, limit: float) -> Choice:
    """Return the fastest choice whose sum of layers' losses is at most ``limit``."""
    choice = outcome.problem.fastest(limit)
    if not any(choice.patterns.values()):
        first = outcome.loss(outcome.problem.frontier()[1])
        raise CalibrationError(
            f"{outcome.budget.goal} is too small to prune any layer: the smallest estimated loss is "
            f"{percent(first)}; allow a larger loss"
        )
    return choice


def prune_within(
    reader: Reader,
    work: WorkFolder,
    outcome: Outcome,
    fitted: Callable[[Choice], Task],
    progress: Progress,
) -> Outcome:
    """Prune with the choice of an `estimate`, and adjust it until the measured loss is close to the allowed one.

    An interrupted run can be resumed.  Afterwards, ``work`` holds the blocks of the returned choice.

    Args:
        fitted: a function that returns the task for a choice, with samples to validate it.
    """
    assert outcome.choice
    # Limits on the sum of layers' losses, and the resulting losses of the whole model on each kind of text.  Once these
    # are measured, the limit is the sum itself, which leads to the same choice.
    attempts: list[tuple[float, list[float]]] = work.read_json(CHOICE) or [(outcome.choice.loss, [])]
    while True:
        last, measured = attempts[-1]
        choice = _choose(outcome, last)
        if not measured:
            chosen = fitted(choice)
            calibrate(chosen, reader, work, progress)
            measured = [whole_loss(chosen, held, reader, work, progress) for held in chosen.held_back]
            attempts[-1] = choice.loss, measured
            work.write_json(CHOICE, attempts)
        tried = [(limit, max(losses)) for limit, losses in attempts]
        most = choice.patterns == outcome.problem.frontier()[-1].patterns
        limit = next_limit(tried, outcome.allowed, most)
        if limit is None:
            calibrate(fitted(choice), reader, work, progress)  # of a resumed run: check that all is there
            part = max(*measured, 0.0) / (choice.loss or 1.0)  # 0 of weights that are sparse already
            return replace(outcome, choice=choice, measured=tuple(measured), part=part)
        attempts.append((limit, []))
        work.clear()
        work.write_json(CHOICE, attempts)


def next_limit(tried: Sequence[tuple[float, float]], allowed: float, most: bool) -> float | None:
    """Return the next limit on the sum of layers' losses, or None to keep the last choice.

    The loss of the whole model is taken to grow as a power of the sum: through the two choices nearest to the aim, or,
    after the first, in proportion.

    Args:
        tried: the sum of each choice, and the loss of the whole model on the kind of text where it is largest.
        most: whether the last choice prunes as much as possible.
    """
    last = tried[-1]
    good, bad = ([x for x in tried if (x[1] <= allowed) == within] for within in (True, False))
    if last[1] <= allowed and (last[1] >= CLOSE * allowed or most):
        return None
    if len(tried) >= ROUNDS:
        # Repeat the best choice within the allowed loss, unless it was the last
        return max(good)[0] if good and last in bad and len(tried) == ROUNDS else None
    points = [
        (math.log(total or LEAST * allowed), math.log(max(loss / allowed, LEAST) / AIM))
        for total, loss in tried
    ]
    (x, y), *others = sorted(points, key=lambda point: abs(point[1]))
    power = 1.0
    if others and others[0][0] != x:
        power = min(max((others[0][1] - y) / (others[0][0] - x), POWERS[0]), POWERS[1])
    limit = math.exp(x) * min(max(math.exp(-y / power), 1 / MAX_STEP), MAX_STEP)
    if good and bad:
        low, high = max(good)[0], min(bad)[0]
        return limit if low < limit < high else (low + high) / 2
    return limit
