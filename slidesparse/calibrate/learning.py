"""Learn the rotation of a decoder that minimizes the estimated loss of pruning.

If a weight w [n, k] of a linear layer is removed and the others of its row are updated to compensate, the loss of the
model grows by about::

    g_n w^2 / (2 [H^-1]_kk)        H: the mean over tokens of x x^T, x the layer's input
                                   g_n: the mean squared gradient of the loss with respect to output n

by the formulas of the optimal brain surgeon, with the Fisher matrix of each output in place of its Hessian.  The cost
of a rotation is the sum, over the blocks of all layers at their patterns, of the two cheapest weights, which pruning
would remove.  A rotation changes W, H and g (see `slidesparse.calibrate.rotation`)::

    reads x     (W Q)^2 g / diag(Q^T H^-1 Q)         adds to x    (Q^T W)^2 diag(Q^T G Q) / diag(H^-1)

H and G are computed in one forward and one backward pass through the dense model, a transformer block at a time.  The
cost is then minimized by Adam on the orthogonal group, starting from a Hadamard matrix.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  (its usual name)
from torch import Tensor
from torch.nn.attention import sdpa_kernel
from torch.optim.lr_scheduler import LambdaLR

from slidesparse.calibrate.changes import ChangedReader
from slidesparse.calibrate.finetune import ATTENTION, BETAS, fixed_order, learning_rate_factor
from slidesparse.calibrate.inputs import HiddenStates, gather_hessians
from slidesparse.calibrate.model import Block, fast_products
from slidesparse.calibrate.pipeline import BlockRun, block_counter, run_blocks
from slidesparse.calibrate.resume import ROTATION, WorkFolder
from slidesparse.calibrate.roles import Roles, hadamard, roles_of, rotate_columns, rotate_rows
from slidesparse.calibrate.rotation import Q, rotated_reader, value_pair
from slidesparse.calibrate.sparsegpt import factor
from slidesparse.calibrate.task import Task
from slidesparse.checkpoint.names import WEIGHT
from slidesparse.checkpoint.storage import Reader
from slidesparse.errors import CalibrationError
from slidesparse.progress import Progress
from slidesparse.quantize import is_finite

ROTATING = "rotating"  # the phase in progress reports
LOSSES = "losses"  # the name of the stored losses without and with the rotation
STEPS = 100
RATE = 0.012  # peak learning rate: radians a step in each plane of Q, for a hidden size of 512
GRADIENT_TOKENS = 16384  # tokens whose gradients are computed; at least one batch
GRADIENT_PIECE = 4096  # tokens of a backward pass
LOGITS_PER_CHUNK = 2**28  # logits computed at a time
# Bytes of layers whose costs are computed at once: a GPU waits for launches with less, and a CPU's caches end with more
BATCH_BYTES = {"cpu": 2**24, "cuda": 2**27}
SAMPLED_OUTPUTS = 4096  # evenly spaced outputs of a layer, or inputs of `down`, that costs are estimated from


def find_rotation(task: Task, reader: Reader, work: WorkFolder, progress: Progress) -> dict[str, Tensor]:
    """Return the rotation saved in ``work``, or learn one by `learn_rotation` and save it there."""
    return work.keep_tensors(ROTATION, lambda: learn_rotation(task, reader, progress))


@torch.inference_mode(False)
@torch.no_grad()
def learn_rotation(task: Task, reader: Reader, progress: Progress) -> dict[str, Tensor]:
    """Learn the rotation for the layers and patterns of ``task``; a Hadamard matrix where nothing is pruned.

    LOSSES [2] are the estimated losses of pruning without and with it, in nats per token.  The result is deterministic
    on the same machine.
    """
    model = task.model
    roles = roles_of(model, reader)
    pairs = {str(number): value_pair(of_block) for number, of_block in enumerate(roles)}
    r = {number: (pair.kv_heads, pair.width, pair.width) for number, pair in pairs.items() if pair}
    shapes: dict[str, tuple[int, ...]] = {Q: (model.hidden, model.hidden), **r}
    rotation = {name: hadamard(x[-1], task.device).expand(x) for name, x in shapes.items()}
    before = after = 0.0
    if any(pattern.density < 1 for pattern in task.layers.values()):
        batches = _layer_costs(task, rotated_reader(reader, model, roles), roles, progress)
        with fast_products(task.device):  # costs are estimates, and sums of millions of terms
            identities = {
                name: torch.eye(x.shape[-1]).to(x.device).expand_as(x) for name, x in rotation.items()
            }
            before = _total_cost(batches, identities)
            after = _minimize_cost(batches, rotation, _report_third(2, progress))
    losses = torch.tensor([before, after], dtype=torch.float64)
    return {**{name: x.cpu() for name, x in rotation.items()}, LOSSES: losses}


def _report_third(number: int, progress: Progress) -> Progress:
    """Return a progress that reports the ``number``-th of three parts of learning: forward, backward, descent."""
    return lambda phase, done, total: progress(phase, number * total + done, 3 * total)


# The cost


def sum_two_smallest(scores: Tensor, length: int) -> Tensor:
    """Return the sums [...] of the two smallest ``scores`` [..., N, K] of each whole block of ``length`` columns."""
    blocks = scores[..., : scores.shape[-1] // length * length].unflatten(-1, (-1, length))
    smallest = blocks.detach().argmin(-1, keepdim=True)
    second = blocks.scatter(-1, smallest, float("inf")).amin(-1)
    total: Tensor = (blocks.gather(-1, smallest)[..., 0] + second).sum((-2, -1))
    return total


@dataclass(frozen=True)
class _Layers:
    """Layers of equal shapes and patterns, whose costs are computed at once.

    Args:
        blocks: the number of the block of each.
        w: weights [layers, N, K].
        g: mean squared gradients [layers, N], or means of g g^T [layers, matrices, size, size] of rotated outputs.
        inverse: diag(H^-1) [layers, K], or diagonal blocks of H^-1 [layers, matrices, size, size] for rotated inputs.
        length: of the pattern's blocks.
        scale: of costs: weights are a sample.
    """

    blocks: tuple[int, ...]
    w: Tensor
    g: Tensor
    inverse: Tensor
    length: int
    scale: float

    def costs(self, rotation: Mapping[str, Tensor]) -> Tensor:
        """Return the cost [layers] of each at a float32 rotation."""
        left, right = (self._matrices(x, rotation) for x in (self.g, self.inverse))
        w = self.w if right is None else rotate_columns(right, self.w)
        w = w if left is None else rotate_rows(left, w)
        scores = w.square() * _diagonal(self.g, left)[..., None] / _diagonal(self.inverse, right)[:, None]
        return self.scale * sum_two_smallest(scores, self.length)

    def _matrices(self, statistics: Tensor, rotation: Mapping[str, Tensor]) -> Tensor | None:
        """Return the matrices [layers, matrices, size, size] that rotate what the statistics are of."""
        if statistics.dim() == 2:
            return None
        if statistics.shape[-1] == len(rotation[Q]):
            return rotation[Q].expand_as(statistics)
        r = torch.stack([rotation[str(number)] for number in self.blocks])
        return r.repeat_interleave(statistics.shape[1] // r.shape[1], 1)


def _sampled(
    w: Tensor, g: Tensor, inverse: Tensor, length: int
) -> tuple[tuple[Tensor, Tensor, Tensor], float]:
    """Return a sample of a layer's outputs, and of blocks of inputs, unless they are rotated; and the costs' scale."""
    rows, blocks = w.shape[0], w.shape[1] // length
    if g.dim() == 1:
        step = -(-rows // SAMPLED_OUTPUTS)
        w, g = w[::step].clone(), g[::step]
    if inverse.dim() == 1:
        step = -(-blocks * length // SAMPLED_OUTPUTS)
        w, inverse = (
            x[..., : blocks * length].unflatten(-1, (blocks, length))[..., ::step, :].flatten(-2)
            for x in (w, inverse)
        )
    return (w, g, inverse), rows * blocks / (w.shape[0] * (w.shape[1] // length))


def _diagonal(statistics: Tensor, matrices: Tensor | None) -> Tensor:
    """Return the diagonals [layers, N or K] of rotated statistics."""
    return statistics if matrices is None else ((statistics @ matrices) * matrices).sum(-2).flatten(1)


# The statistics that costs are computed from


def _layer_costs(task: Task, reader: ChangedReader, roles: list[Roles], progress: Progress) -> list[_Layers]:
    """Run the dense model of ``reader`` forward and backward, and return what the costs of all layers follow from."""
    inverses: list[dict[str, Tensor]] = []
    states: HiddenStates | None = None
    for run in run_blocks(task, reader, ROTATING, _report_third(0, progress), to_the_end=True):
        shapes = run.pruned.states.shapes
        totals = accumulate(shape[:-1].numel() for shape in shapes)  # tokens of the first batches
        batches = min(len(shapes), 1 + sum(total < GRADIENT_TOKENS for total in totals))
        if states is None:
            states = HiddenStates(shapes[:batches] * task.model.blocks, task.device)
        for i in range(batches):
            states[run.number * batches + i] = run.pruned.states[i]
        inverses.append(_inverse_hessians(run, roles[run.number]))
    assert states
    ids = run.ids[:batches]
    gradients = _output_gradients(task, reader, run.pruned.states, ids)
    tokens = sum(x.shape[:-1].numel() for x in gradients)
    report = block_counter(task, ROTATING, _report_third(1, progress))
    # layers that can be computed at once: their blocks and tensors
    kinds = defaultdict[tuple[Any, ...], list[tuple[int, tuple[Tensor, ...]]]](list)
    for number in reversed(range(task.model.blocks)):
        block = task.model.load(reader, number)
        sums: dict[str, Tensor] = {}
        for i in range(batches):
            size = max(1, GRADIENT_PIECE // ids[i].shape[1])
            pairs = zip(states[number * batches + i].split(size), gradients[i].split(size), strict=True)
            gradients[i] = torch.cat([_backpropagate(block, roles[number], *pair, sums) for pair in pairs])
        pair = value_pair(roles[number])
        for name, inverse in inverses[number].items():
            pattern = task.layers.get(task.model.skeleton.layer(number, name))
            w = block.weights[name + WEIGHT]
            if pattern and pattern.density < 1 and pattern.length and w.shape[1] >= pattern.length:
                tensors, scale = _sampled(w, sums[name] / tokens, inverse, pattern.length)
                kind = *(x.shape for x in tensors), pair and pair.kv_heads, pattern.length, scale
                kinds[kind].append((number, tensors))
        report(number)
    layers = []
    for (*_, length, scale), alike in kinds.items():
        size = max(1, BATCH_BYTES[task.device.type] // sum(x.nbytes for x in alike[0][1]))
        for start in range(0, len(alike), size):
            numbers, parts = zip(*alike[start : start + size], strict=True)
            # those of one layer may share memory with another's
            w, g, inverse = (x[0][None] if len(x) == 1 else torch.stack(x) for x in zip(*parts, strict=True))
            layers.append(_Layers(numbers, w, g, inverse, length, scale))
    return layers


def _inverse_hessians(run: BlockRun, roles: Roles) -> dict[str, Tensor]:
    """Return the parts of H^-1 that `_cost` needs, in float32, for each layer that a rotation changes.

    They are [1, K, K] for layers that read the residual stream, [heads, width, width] for that which reads rotated
    values, and [K] for others that add to the stream.
    """
    residual, pair = roles.residual, value_pair(roles)
    inverses: dict[str, Tensor] = {}
    assert residual
    groups = [
        group for group in run.block.groups if any(run.full_name(name) in run.task.layers for name in group)
    ]
    hessians = gather_hessians(run.pruned, [group[0] for group in groups])
    for group in groups:
        hessian = hessians.pop(group[0])
        upper = factor(hessian.matrix)
        upper *= math.sqrt(hessian.tokens)
        for name in group:
            if residual.norm_before(name):
                inverses[name] = inverses[group[0]] if group[0] in inverses else (upper.mT @ upper)[None]
            elif pair and name == pair.reader:
                heads = upper.unflatten(1, (pair.heads, -1)).transpose(0, 1)  # [heads, K, head_dim]
                inverses[name] = heads.mT @ heads
            elif name in residual.writers:
                inverses[name] = upper.square().sum(0)
    return inverses


def _output_gradients(
    task: Task, reader: Reader, outputs: HiddenStates, ids: Sequence[Tensor]
) -> list[Tensor]:
    """Return the gradient of the summed loss, in nats, to the last block's ``outputs``, for each batch of ``ids``."""
    vocabulary, ends = task.model.vocabulary, task.model.ends(reader)
    gradients = []
    for i, batch in enumerate(ids):
        size = max(1, LOGITS_PER_CHUNK // (vocabulary * batch.shape[1]))
        pieces = []
        for part, tokens in zip(outputs[i].split(size), batch.to(task.device).split(size), strict=True):
            with torch.enable_grad():
                part = part.detach().requires_grad_()
                logits = ends.logits(part[:, :-1]).flatten(0, 1)
                loss = F.cross_entropy(logits, tokens[:, 1:].flatten(), reduction="sum")
                pieces += torch.autograd.grad(loss, part)
        gradients.append(torch.cat(pieces))
    if not all(map(is_finite, gradients)):
        raise CalibrationError(
            "the gradient of the loss is not finite (NaN or Inf), so no rotation can be learned; use --rotate off"
        )
    return gradients


def _backpropagate(
    block: Block, roles: Roles, x: Tensor, gradient: Tensor, sums: dict[str, Tensor]
) -> Tensor:
    """Return the gradient to a block's input ``x`` [batch, tokens, hidden] for the ``gradient`` to its output.

    The sum over tokens of g g^T, or of its diagonal, where g [N] is the gradient to a layer's output, is added to
    ``sums`` by the name of each layer.
    """
    assert roles.residual
    pair = value_pair(roles)
    outputs: dict[str, Tensor] = {}
    with (
        torch.enable_grad(),
        fast_products(x.device),
        sdpa_kernel(ATTENTION[x.device.type]),
        fixed_order(),
        ExitStack() as stack,
    ):
        for name in block.linears:
            layer = block.module.get_submodule(name)
            hook = layer.register_forward_hook(lambda _, __, out, name=name: outputs.update({name: out}))
            stack.callback(hook.remove)
        x = x.detach().requires_grad_()
        out = block.output(x)
        inputs = [x, *outputs.values()]
        input_gradient, *output_gradients = torch.autograd.grad(out, inputs, gradient)
    for name, output_gradient in zip(outputs, output_gradients, strict=True):
        g = output_gradient.flatten(0, -2)
        if name in roles.residual.writers:
            squares = (g.mT @ g)[None]
        elif pair and name in pair.writers:
            heads = g.unflatten(1, (pair.kv_heads, -1)).transpose(0, 1)
            squares = heads.mT @ heads
        else:
            squares = g.square().sum(0)
        sums[name] = sums[name] + squares if name in sums else squares
    return input_gradient


# Optimization


def _total_cost(batches: Iterable[_Layers], rotation: Mapping[str, Tensor]) -> float:
    """Return half the sum of all costs at a float32 rotation, and add to the gradients of what requires them."""
    total = torch.zeros((), dtype=torch.float64, device=rotation[Q].device)
    for layers in batches:
        with torch.enable_grad():
            value = layers.costs(rotation).sum()
            if value.requires_grad:
                value.backward()  # batch by batch, so that each one's memory is freed
        total += 0.5 * value.detach()  # without waiting for the GPU
    return float(total)


def _minimize_cost(batches: list[_Layers], rotation: dict[str, Tensor], progress: Progress) -> float:
    """Minimize the cost of ``rotation`` in STEPS steps, in place, and return it.

    Adam takes steps in the skew-symmetric matrices whose exponentials turn it.
    """
    alike = defaultdict[torch.Size, list[str]](list)  # names of matrices that turn at once
    for name, x in rotation.items():
        alike[x.shape].append(name)
    stacks = [torch.stack([rotation[name] for name in names]) for names in alike.values()]
    turns = [torch.zeros_like(x, dtype=torch.float32) for x in stacks]
    rate = RATE * math.sqrt(512 / len(rotation[Q]))
    rates = [rate if names == [Q] else 2 * rate for names in alike.values()]
    groups = [{"params": [turn], "lr": rate} for turn, rate in zip(turns, rates, strict=True)]
    optimizer = torch.optim.Adam(groups, betas=BETAS, eps=1e-30)
    schedule = LambdaLR(optimizer, lambda step: learning_rate_factor((step + 0.5) / STEPS))
    for step in range(STEPS):
        floats = [x.float().requires_grad_() for x in stacks]
        with torch.enable_grad():
            single = dict(zip(chain(*alike.values()), chain(*floats), strict=True))
        _total_cost(batches, single)
        for x, turn in zip(floats, turns, strict=True):
            if x.grad is not None:
                skew = x.detach().mT @ x.grad
                turn.grad = skew - skew.mT
        optimizer.step()
        schedule.step()
        stacks = [x @ torch.matrix_exp(turn.double()) for x, turn in zip(stacks, turns, strict=True)]
        for turn in turns:
            turn.zero_()
        progress(ROTATING, step + 1, STEPS)
    rotation |= zip(chain(*alike.values()), chain(*stacks), strict=True)
    return _total_cost(batches, {name: x.float() for name, x in rotation.items()})
