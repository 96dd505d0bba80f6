"""Distillation: train the remaining weights of all blocks together to match the dense model's predictions.

The loss is the Kullback-Leibler divergence of the pruned model's next tokens from the dense model's, in nats per token.
Weights and inputs of quantized layers are rounded as they will be served, with a straight-through gradient, and pruned
weights stay zero.  Norms, embeddings, lm_head and layers that are not pruned do not change.

A step runs all blocks forward and keeps the input of each.  The backward pass recomputes one block at a time with
gradients and updates its weights immediately, so that the gradients of only one block exist at a time::

    dense     x -> block 0 -> ... -> block n-1 -> logits --+
    pruned    x -> block 0 -> ... -> block n-1 -> logits --+--> softmax(pruned) - softmax(dense)
    back           update 0 <- ... <- update n-1 <---------+

The learning rate decays with elapsed time, so unlike the rest of calibration, distillation is not deterministic.  Every
few minutes the model is evaluated on held-out text, and the best weights are kept.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import sdpa_kernel

from slidesparse.calibrate.finetune import ATTENTION, BETAS, PIECE_TOKENS, fake_quantize, learning_rate_factor
from slidesparse.calibrate.inputs import free_bytes
from slidesparse.calibrate.losses import Criterion
from slidesparse.calibrate.model import Block, fast_products
from slidesparse.calibrate.resume import DISTILLED, DISTILLING, WorkFolder
from slidesparse.calibrate.task import Progress, Task
from slidesparse.checkpoint.names import SCALE, WEIGHT
from slidesparse.checkpoint.storage import Reader
from slidesparse.errors import CalibrationError, EnvironmentFault
from slidesparse.quantize import NAMES, dequantize_rows, quantize_rows

RATE = 0.004  # Adam's peak learning rate, relative to the root mean square of a layer's weights
EPSILON = 1e-10  # Adam's epsilon
STEP_TOKENS = {"cpu": 2048, "cuda": 16384}
LOGITS_PER_CHUNK = 2**27  # logits computed at a time
SAVE_SECONDS = 180.0  # least time between two evaluations, each of which saves the state
SAVE_PART = 10  # evaluations take at most 1 / SAVE_PART of the time
FACTS = "facts"  # tensor saved with the weights: seconds, steps, initial and best losses, float64


@dataclass(frozen=True)
class Loss:
    """The distance of a model from the dense one on held-out text, in nats per token."""

    divergence: float  # KL divergence of the next-token distributions
    entropy: float  # cross-entropy above that of the dense model


@dataclass(frozen=True)
class Distilled:
    """The outcome of a distillation."""

    text: str  # description of the distillation text
    seconds: float  # of training
    steps: int
    before: Loss
    after: Loss

    @property
    def summary(self) -> str:
        """The outcome as text."""
        losses = (f"{100 * math.expm1(loss.entropy):+.2f}%" for loss in (self.before, self.after))
        return (
            f"held-out perplexity relative to the dense model: {' -> '.join(losses)}; {self.steps} steps in "
            f"{self.seconds / 60:.3g} minutes"
        )


@torch.inference_mode(False)
@torch.no_grad()
def distill(task: Task, reader: Reader, work: WorkFolder, progress: Progress) -> Distilled:
    """Train the finished blocks in ``work``, and save the best codes and scales there, in the file DISTILLED.

    An interrupted run continues from its last save.

    Args:
        task: with text to distill with.
        reader: of the dense model that the blocks were pruned from.

    Raises CalibrationError when losses are not finite.
    """
    device = task.device
    if device.type == "cuda":
        torch.cuda.empty_cache()  # pieces of other sizes, of pruning
    with sdpa_kernel(ATTENTION[device.type]), fast_products(device):
        return _Training(task, reader, work).run(progress)


# Room


def disk_bytes(task: Task) -> int:
    """Return the peak bytes of saved state: weights and moments, and codes, each next to the file that it replaces."""
    return 2 * (4 + 2 + 1) * _count_trained_weights(task) if task.texts else 0


def memory_bytes(task: Task) -> int:
    """Estimate the bytes of memory that distillation takes on its device."""
    assert task.texts
    model, gpu = task.model, task.device.type == "cuda"
    tensors, half = model.checkpoint.tensors, 2 if gpu else 4
    blocks = [
        [tensors[name].spec for name in model.skeleton.tensors(model.skeleton.prefix(number))]
        for number in range(model.blocks)
    ]
    weights = [sum(spec.rows * spec.columns for spec in block) for block in blocks]
    length = len(task.texts[0].ids[0])
    step = max(STEP_TOKENS[task.device.type], length)
    piece = max(min(PIECE_TOKENS[task.device.type], step), length)
    ends = model.hidden * model.vocabulary * (4 + 2)
    # Inputs, outputs and their roundings of the linear layers of a block, in float32, with gradients
    inside = max(sum(spec.rows + spec.columns for spec in block if len(spec.shape) == 2) for block in blocks)
    return (
        (4 + 2) * _count_trained_weights(task)  # weights and moments
        + half * sum(weights)  # of the dense model
        + half * (sum(weights) - _count_trained_weights(task))  # layers that are quantized and not trained
        + (4 + half + 4) * max(weights)  # gradients and rounded weights of a block, and what an update takes
        + ends
        + 4 * model.hidden * step * (model.blocks + 4)
        + 3 * 4 * piece * inside
        + 6 * 4 * LOGITS_PER_CHUNK
    )


def require_memory(task: Task) -> str:
    """Describe the time and memory that distillation takes.  Raises EnvironmentFault if memory is short."""
    assert task.texts
    needed, available = (count / 1e9 for count in (memory_bytes(task), free_bytes(task.device)))
    if needed > available:
        raise EnvironmentFault(
            f"--distill trains all layers at once, which takes about {needed:.0f} GB of memory, but the device "
            f"{task.device} has {available:.0f} GB; leave --distill out, or use a GPU with more memory"
        )
    return f"{task.calibration.training_minutes:g} minutes on {task.texts[0].summary}; about {needed:.1f} GB of memory"


def _count_trained_weights(task: Task) -> int:
    """Return how many weights are trained, zeros included."""
    specs = (task.model.checkpoint.require(name + WEIGHT) for name in task.layers)
    return sum(spec.rows * spec.columns for spec in specs)


# Training


class _Weight:
    """A weight [N, K] that is trained, in float32, and the optimizer's state.

    The optimizer is Adam with its first moment [N, K] in BF16, and its second as the product of means over rows and
    over columns (Adafactor, arXiv 1804.04235).
    """

    def __init__(self, value: Tensor) -> None:
        self.value = value
        self.moment = torch.zeros_like(value, dtype=torch.bfloat16)
        self.rows, self.columns = value.new_zeros(len(value), 1), value.new_zeros(1, value.shape[1])
        nonzero = value != 0
        self._size = float((value.square().sum() / nonzero.sum().clamp(min=1)).sqrt())

    def state(self, name: str) -> dict[str, Tensor]:
        """Return the tensors of the state, by names that begin with the layer's."""
        parts = {"value": self.value, "moment": self.moment, "rows": self.rows, "columns": self.columns}
        return {f"{name}.{part}": tensor for part, tensor in parts.items()}

    def update(self, gradient: Tensor, rate: float, step: int) -> None:
        """Update the weight by step number ``step``, from 1 on, for ``gradient`` [N, K] float32; zeros stay zero."""
        first, second = BETAS
        mean = self.moment.float().lerp_(gradient, 1 - first)
        self.moment.copy_(mean)
        squares = gradient.square_()
        self.rows.lerp_(squares.mean(1, keepdim=True), 1 - second)
        self.columns.lerp_(squares.mean(0, keepdim=True), 1 - second)
        share = self.rows / self.rows.mean().clamp(min=torch.finfo(self.rows.dtype).tiny)
        deviation = torch.mul(share, self.columns, out=squares).div_(1 - second**step).sqrt_()
        change = mean.div_(1 - first**step).div_(deviation.add_(EPSILON)).mul_(self.value != 0)
        self.value.sub_(change, alpha=rate * self._size)


class _Training:
    def __init__(self, task: Task, reader: Reader, work: WorkFolder) -> None:
        assert task.texts
        model, self._device = task.model, task.device
        self._task, self._work, self._dtype = task, work, NAMES[task.quant]
        self._training_ids, self._validation_ids = (torch.stack(samples.ids) for samples in task.texts)
        length = self._training_ids.shape[1]
        kind = self._device.type
        self._per_step = min(len(self._training_ids), max(1, STEP_TOKENS[kind] // length))
        self._per_piece = max(1, PIECE_TOKENS[kind] // length)
        ends = model.ends(reader)
        self._embed, self._logits, self._criterion = ends.embed, ends.logits, Criterion(model, ends)
        self._runs: dict[tuple[str, frozenset[str]], Callable[..., Tensor]] = {}
        self._dense: list[Block] = []
        self._pruned: list[Block] = []  # without the weights that are trained
        self._weights: list[dict[str, _Weight]] = []
        with work.tensors().reader() as codes:
            for number in range(model.blocks):
                self._load(reader, codes, number)
        self._seconds, self._steps = 0.0, 0
        self._before = self._best = Loss(math.inf, math.inf)

    def _load(self, reader: Reader, codes: Reader, number: int) -> None:
        task = self._task
        dense = task.model.load(reader, number)
        pruned, weights = dense.copy(), {}
        for name in (name for group in dense.groups for name in group):
            full, w = task.model.full_name(number, name), dense.weights[name + WEIGHT]
            dense.weights[name + WEIGHT] = pruned.weights[name + WEIGHT] = self._to_product_dtype(w)
            if full in task.skipped:
                pruned.weights[name + WEIGHT] = self._fake_quantize(w)
            if full in task.layers:
                stored, scale = (codes.whole(full + suffix).to(self._device) for suffix in (WEIGHT, SCALE))
                weights[name] = _Weight(dequantize_rows(stored, scale))
                del pruned.weights[name + WEIGHT]
        self._dense.append(dense)
        self._pruned.append(pruned)
        self._weights.append(weights)

    def run(self, progress: Progress) -> Distilled:
        """Train until the time is up."""
        task, saved = self._task, time.monotonic()
        assert task.texts
        limit, total, pause = (
            60 * task.calibration.training_minutes,
            4 * _count_trained_weights(task),
            SAVE_SECONDS,
        )
        if not self._restore():
            self._before = self._best = self._validation_loss()
            if not math.isfinite(self._best.divergence):
                raise CalibrationError(
                    "the pruned model's predictions on the text of --distill are not finite (NaN or Inf); leave "
                    "--distill out, or prune to a milder pattern"
                )
        while self._seconds < limit:
            started = time.monotonic()
            self._step(RATE * learning_rate_factor(self._seconds / limit))
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            self._seconds += time.monotonic() - started
            progress("distilling", int(total * min(1.0, self._seconds / limit)), total)
            if self._seconds >= limit or time.monotonic() - saved > pause:
                started = time.monotonic()
                self._save(self._seconds >= limit)
                saved = time.monotonic()
                pause = max(SAVE_SECONDS, SAVE_PART * (saved - started))
        return Distilled(task.texts[0].summary, self._seconds, self._steps, self._before, self._best)

    def _step(self, rate: float) -> None:
        self._steps += 1
        ids = self._training_ids[_step_samples(len(self._training_ids), self._per_step, self._steps - 1)]
        states = [self._embed(piece) for piece in ids.split(self._per_piece)]
        targets, block_inputs = states, []
        for number in range(len(self._dense)):
            targets = [self._dense_output(number, x) for x in targets]
            block_inputs.append(states)
            weights = self._served_weights(number)
            states = [self._pruned_output(number, weights, x) for x in states]
        gradients = [
            self._divergence_gradient(*pair, ids.numel()) for pair in zip(states, targets, strict=True)
        ]
        del states, targets
        for number in reversed(range(len(self._pruned))):
            weights = self._served_weights(number)
            sums = [torch.zeros(w.shape, device=self._device) for w in weights.values()]
            for i, x in enumerate(block_inputs.pop()):
                with torch.enable_grad():
                    x = x.detach().requires_grad_()
                    y = self._pruned_output(number, weights, x)
                gradients[i], *parts = torch.autograd.grad(y, [x, *weights.values()], gradients[i])
                for total, part in zip(sums, parts, strict=True):
                    total += part
            for weight, gradient in zip(self._weights[number].values(), sums, strict=True):
                weight.update(gradient, rate, self._steps)

    def _dense_output(self, number: int, x: Tensor) -> Tensor:
        return self._output(self._dense[number], self._dense[number].weights, frozenset(), x)

    def _pruned_output(self, number: int, weights: dict[str, Tensor], x: Tensor) -> Tensor:
        block, task = self._pruned[number], self._task
        full = {name: task.model.full_name(number, name) for group in block.groups for name in group}
        served = frozenset(name for name in full if full[name] in task.layers or full[name] in task.skipped)
        tensors = block.weights | {name + WEIGHT: w for name, w in weights.items()}
        return self._output(block, tensors, served, x)

    def _output(self, block: Block, weights: dict[str, Tensor], rounded: frozenset[str], x: Tensor) -> Tensor:
        """Run a block; the inputs of the linear layers ``rounded`` are rounded as they will be served.

        Blocks of one structure share a copy of the module, and its compiled code.
        """
        key = self._task.model.structure(block.number), rounded
        if key not in self._runs:
            self._runs[key] = _runner(block.module, rounded, self._dtype, self._device.type)
        args, kwargs = self._task.model.call(block.number, x.shape[0], x.shape[1])
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._device.type == "cuda"):
            return self._runs[key](weights, x, args, kwargs)

    def _served_weights(self, number: int) -> dict[str, Tensor]:
        """Return the weights of a block that are trained, by layer name, rounded as they will be served."""
        return {
            name: self._fake_quantize(w.value).requires_grad_() for name, w in self._weights[number].items()
        }

    def _fake_quantize(self, w: Tensor) -> Tensor:
        return self._to_product_dtype(dequantize_rows(*quantize_rows(w, self._dtype)))

    def _to_product_dtype(self, w: Tensor) -> Tensor:
        """Return a weight in the dtype of the matrix products."""
        return w.bfloat16() if self._device.type == "cuda" else w

    # The loss, from x and ``targets`` [samples, tokens, hidden], the outputs of the last blocks

    def _divergence_gradient(self, x: Tensor, targets: Tensor, tokens: int) -> Tensor:
        """Return the gradient to x of the divergence, summed and divided by ``tokens``."""
        pieces: list[Tensor] = []
        size = max(1, LOGITS_PER_CHUNK // self._task.model.vocabulary)
        for rows, target_rows in zip(*(y.flatten(0, 1).split(size) for y in (x, targets)), strict=True):
            with torch.enable_grad():
                rows = rows.detach().requires_grad_()
                logits = self._logits(rows)
            slope = logits.detach().softmax(-1).sub_(self._logits(target_rows).softmax(-1)).div_(tokens)
            pieces += torch.autograd.grad(logits, rows, slope)
        return torch.cat(pieces).view_as(x)

    def _validation_loss(self) -> Loss:
        """Return the loss on the held-out samples."""
        divergence = entropy = 0.0
        for ids in self._validation_ids.split(self._per_piece):
            x = target = self._embed(ids)
            for number in range(len(self._dense)):
                target = self._dense_output(number, target)
                x = self._pruned_output(number, self._served_weights(number), x)
            divergence += self._criterion.distances(target, [x])[0]
            entropy += self._criterion.loss(target, x, ids)
        tokens = self._validation_ids.numel()
        return Loss(divergence / tokens, entropy / tokens)

    # Saving

    def _save(self, end: bool) -> None:
        """Evaluate, keep the best codes, and save the training state; at the ``end`` without weights and moments."""
        loss = self._validation_loss()
        if loss.divergence < self._best.divergence:
            self._best = loss
            self._work.write_tensors(DISTILLED, dict(self._quantized_tensors()))
        facts = [self._seconds, self._steps, *asdict(self._before).values(), *asdict(self._best).values()]
        tensors = {FACTS: torch.tensor(facts, dtype=torch.float64)}
        for name, weight in () if end else self._named_weights():
            tensors |= weight.state(name)
        self._work.write_tensors(DISTILLING, tensors)

    def _quantized_tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name, weight in self._named_weights():
            codes, scale = quantize_rows(weight.value, self._dtype)
            yield name + WEIGHT, codes.cpu()
            yield name + SCALE, scale.cpu()

    def _restore(self) -> bool:
        """Load the saved state; return whether there was any."""
        saved = self._work.open_files(DISTILLING)
        if not saved.files:
            return False
        ended = len(saved.tensors) == 1
        with saved.reader() as reader:
            self._seconds, steps, *losses = reader.whole(FACTS).tolist()
            self._steps, self._before, self._best = int(steps), Loss(*losses[:2]), Loss(*losses[2:])
            if self._best != self._before and not self._work.open_files(DISTILLED).files:
                raise self._work.damaged(f"{DISTILLED} is missing")
            for name, weight in () if ended else self._named_weights():
                for part, tensor in weight.state(name).items():
                    tensor.copy_(reader.whole(part))
        return True

    def _named_weights(self) -> Iterator[tuple[str, _Weight]]:
        for number, weights in enumerate(self._weights):
            for name, weight in weights.items():
                yield self._task.model.full_name(number, name), weight


def _runner(
    module: nn.Module, rounded: frozenset[str], dtype: torch.dtype, kind: str
) -> Callable[..., Tensor]:
    """Return a function that runs a copy of a block's module with given weights, on a GPU compiled.

    Compiled, a step of a small model takes a fraction of the time: most of it is thousands of short kernels.
    """
    own = copy.deepcopy(module)
    for name in rounded:
        own.get_submodule(name).register_forward_pre_hook(lambda _, args: (fake_quantize(args[0], dtype),))

    def run(weights: dict[str, Tensor], x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        out = functional_call(own, weights, (x, *args), kwargs)
        y: Tensor = out[0] if isinstance(out, tuple) else out
        return y

    return torch.compile(run, dynamic=False) if kind == "cuda" else run


def _step_samples(count: int, per_step: int, step: int) -> list[int]:
    """Return the ``per_step`` of ``count`` samples for a step, numbered from 0; each epoch uses all of them once."""
    places = range(step * per_step, (step + 1) * per_step)
    return [_epoch_order(count, place // count)[place % count] for place in places]


@lru_cache(2)
def _epoch_order(count: int, epoch: int) -> Sequence[int]:
    order: list[int] = torch.randperm(count, generator=torch.Generator().manual_seed(epoch)).tolist()
    return order
