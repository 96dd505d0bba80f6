"""Fine-tune the remaining weights of one transformer block at a time to match the dense model's outputs.

Pruning treats one linear layer after the other.  Afterwards, all linear layers of a block are trained together, as they
will be served: weights and inputs are rounded to INT8 or FP8 with a straight-through gradient, and pruned weights stay
zero.  The loss compares the block's output y, on the outputs of the pruned blocks before it, with the output d of the
same block in the dense model, as a mean over tokens::

    |y - d|^2 / |d|^2

One sample in `VALIDATION_INTERVAL` is a validation sample, and the epoch with the lowest validation loss is kept.
After an epoch that raised it, training restarts from the best weights with a lower learning rate.  If no epoch lowers
it, the weights do not change.  The method is that of EBFT (arXiv 2402.12419).
"""

from __future__ import annotations

import math
import os
import warnings
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar
from unittest.mock import patch

import torch
import torch.utils.deterministic
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from slidesparse.calibrate.graphs import Repeated
from slidesparse.calibrate.inputs import HiddenStates, Stream
from slidesparse.calibrate.model import fast_products
from slidesparse.checkpoint.names import WEIGHT
from slidesparse.pattern import HARDWARE_LENGTH, SlidePattern
from slidesparse.quantize import dequantize_rows, quantize_rows

# Adam's peak learning rate for steps of STEP_TOKENS, relative to about the root mean square of a layer's weights
RATE = 0.01
BETAS, EPSILON = (0.9, 0.95), 1e-10  # the latter for gradients to weights of about one
WARM_UP_SHARE = 0.05  # share of all steps, after which the learning rate decays to zero along a cosine
# An epoch has about STEPS steps.  They have about STEP_TOKENS tokens where there are many, and MIN_STEP_TOKENS where
# there are few: in shorter steps most of the time would go into rounding the weights.
STEP_TOKENS = 8192
STEPS = 32
MIN_STEP_TOKENS = 512
PIECE_TOKENS = {"cpu": 2048, "cuda": 8192}  # tokens of a forward pass
# Attention kernels.  Those of a GPU do not write the attention weights to memory.
ATTENTION = {
    "cpu": [SDPBackend.MATH],
    "cuda": [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH],
}
RATE_DECAY = 0.25  # factor on the learning rate after an epoch that raised the validation loss
VALIDATION_INTERVAL = 8

T = TypeVar("T")

_Sample = tuple[int, int]  # index of a batch, and of a sample in it
_Piece = Sequence[_Sample]  # of equal length


@dataclass(frozen=True)
class Finetuned:
    """The trained weights, and the block's error |y - d| / |d| as a root mean square over tokens."""

    weights: dict[str, Tensor]  # [N, K] by name of the linear layer
    error_before: float
    error_after: float


def finetune(
    stream: Stream,
    targets: HiddenStates,
    pruned: Mapping[str, Tensor],
    quantized: Collection[str],
    dtype: torch.dtype,
    epochs: int,
) -> Finetuned:
    """Train the linear layers ``pruned`` of the block ``stream.block``, whose input is ``stream.states``.

    The result is deterministic for the same arguments on the same machine.

    Args:
        targets: d, in the same shapes as the states.
        pruned: [N, K] float32 by name; zeros stay zero.
        quantized: names of the linear layers that are served quantized.
        dtype: torch.int8 or torch.float8_e4m3fn.
    """
    device = targets.device
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        sdpa_kernel(ATTENTION[device.type]),
        fast_products(device),
        fixed_order(),
    ):
        return _Trainer(stream, targets, pruned, quantized, dtype).run(epochs)


class _Trainer:
    """Trains weights divided by about their root mean square, so that one learning rate serves all layers."""

    def __init__(
        self,
        stream: Stream,
        targets: HiddenStates,
        pruned: Mapping[str, Tensor],
        quantized: Collection[str],
        dtype: torch.dtype,
    ) -> None:
        self._states, self._targets, self._pruned, self._dtype = stream.states, targets, pruned, dtype
        self._block = stream.block.copy()
        replaced = {name + WEIGHT for name in pruned}  # `_load_weights` sets them
        weights = self._block.weights.items()
        self._block.weights = {name: w.clone() for name, w in weights if name not in replaced}
        self._block.read = InputRounder(dtype, quantized)
        # By powers of two, so that the products are the weights to the last bit
        sizes = {name: _power_of_two(w) for name, w in pruned.items()}
        self._scales = {name: torch.where(w != 0, sizes[name], 0.0) for name, w in pruned.items()}
        self._values = {name: (w / sizes[name]).requires_grad_() for name, w in pruned.items()}
        self._rate = torch.zeros((), device=targets.device)
        self._optimizer = torch.optim.Adam(
            [*self._values.values()], self._rate, BETAS, EPSILON, capturable=True, fused=True
        )
        samples = [(i, j) for i, (count, *_) in enumerate(targets.shapes) for j in range(count)]
        self._step_tokens = min(STEP_TOKENS, max(MIN_STEP_TOKENS, self._tokens(samples) // STEPS))
        # Both are all samples if there are fewer than VALIDATION_INTERVAL
        validation = samples[VALIDATION_INTERVAL - 1 :: VALIDATION_INTERVAL]
        self._validation_pieces = self._pieces(validation or samples)
        self._training_samples = [*samples]
        del self._training_samples[VALIDATION_INTERVAL - 1 :: VALIDATION_INTERVAL]

    def run(self, epochs: int) -> Finetuned:
        device = self._targets.device
        training, validated = Repeated(self._train, device), Repeated(self._validated, device)
        before = lowest = self._validation_error(validated)
        best, rate = self._copy(), RATE * math.sqrt(self._step_tokens / STEP_TOKENS)
        order = torch.Generator().manual_seed(0)
        for epoch in range(epochs):
            steps = [*self._steps(order)]
            for number, pieces in enumerate(steps):
                part = learning_rate_factor((epoch * len(steps) + number + 0.5) / (epochs * len(steps)))
                self._rate.fill_(rate * part)
                training([x for piece in pieces for x in self._read(piece)])
            error = self._validation_error(validated)
            if error < lowest:
                lowest, best = error, self._copy()
            else:
                rate *= RATE_DECAY
                self._restart(best)
        trained = {name: value * self._scales[name] for name, value in best.items()}
        return Finetuned(trained if lowest < before else {**self._pruned}, before**0.5, lowest**0.5)

    @torch.no_grad()
    def _restart(self, values: Mapping[str, Tensor]) -> None:
        """Continue from these values as if no step had been taken."""
        for name, value in self._values.items():
            value.copy_(values[name])
        for state in self._optimizer.state.values():
            for x in state.values():
                x.zero_()

    def _pieces(self, samples: Iterable[_Sample]) -> list[_Piece]:
        """Return the samples in pieces of equal length, as large as memory and a step allow."""
        alike = defaultdict[int, list[_Sample]](list)
        for sample in samples:
            alike[self._tokens([sample])].append(sample)
        most = min(PIECE_TOKENS[self._targets.device.type], self._step_tokens)
        pieces: list[_Piece] = []
        for length, found in alike.items():
            size = max(1, most // length)
            pieces += (found[start : start + size] for start in range(0, len(found), size))
        return pieces

    def _steps(self, order: torch.Generator) -> Iterator[list[_Piece]]:
        """Yield shuffled pieces of shuffled samples in groups, one group per optimizer step."""
        step, tokens = list[_Piece](), 0
        for piece in _shuffled(self._pieces(_shuffled(self._training_samples, order)), order):
            step.append(piece)
            tokens += self._tokens(piece)
            # with another piece, a step would be further from its size
            if tokens + self._tokens(piece) / 2 > self._step_tokens:
                yield step
                step, tokens = [], 0
        if step:
            yield step

    def _train(self, *data: Tensor) -> None:
        """Take a step for the inputs and targets of pieces in turns."""
        self._optimizer.zero_grad(set_to_none=True)
        inputs, targets = data[::2], data[1::2]
        tokens = sum(x.shape[:-1].numel() for x in inputs)
        kind = self._targets.device.type
        for x, target in zip(inputs, targets, strict=True):
            with torch.autocast(kind, torch.bfloat16, enabled=kind == "cuda"):
                self._load_weights()
                loss = self._loss(x, target) / tokens
            loss.backward()
        self._optimizer.step()

    def _read(self, piece: _Piece) -> tuple[Tensor, Tensor]:
        """Return the input and the target of a piece."""
        return self._states.samples(piece), self._targets.samples(piece)

    def _loss(self, x: Tensor, target: Tensor) -> Tensor:
        """Return the loss summed over tokens."""
        error = (self._block.output(x) - target).square().sum(-1)
        return (error / target.square().sum(-1).clamp(min=torch.finfo(target.dtype).tiny)).sum()

    def _load_weights(self) -> None:
        """Put the current weights, rounded, into the block."""
        for name, value in self._values.items():
            self._block.weights[name + WEIGHT] = fake_quantize(value * self._scales[name], self._dtype)

    @torch.no_grad()
    def _validation_error(self, validated: Repeated) -> float:
        tokens = sum(map(self._tokens, self._validation_pieces))
        losses = (validated(self._read(piece)).double() for piece in self._validation_pieces)
        return float(sum(losses)) / tokens

    def _validated(self, x: Tensor, target: Tensor) -> Tensor:
        self._load_weights()
        return self._loss(x, target)

    def _copy(self) -> dict[str, Tensor]:
        return {name: value.detach().clone() for name, value in self._values.items()}

    def _tokens(self, samples: Iterable[_Sample]) -> int:
        return sum(self._targets.shapes[batch][1] for batch, _ in samples)


def _power_of_two(w: Tensor) -> float:
    """Return the power of two that is next to the root mean square of the weights that are not zero."""
    norm, count = float(torch.linalg.vector_norm(w, dtype=torch.float64)), int((w != 0).sum())
    return 2.0 ** max(-100, min(100, round(math.log2(norm / count**0.5)))) if 0 < norm < math.inf else 1.0


def _shuffled(entries: Sequence[T], order: torch.Generator) -> list[T]:
    return [entries[i] for i in torch.randperm(len(entries), generator=order).tolist()]


def learning_rate_factor(part: float) -> float:
    """Return the learning rate, relative to its peak, after a ``part`` (0 to 1) of all steps or of the time."""
    return min(1.0, part / WARM_UP_SHARE) * (0.5 + 0.5 * math.cos(math.pi * part))


class _FakeQuantize(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: Tensor, dtype: torch.dtype) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        if rows.is_cuda and not torch.compiler.is_compiling():  # which makes one kernel of the others
            from slidesparse.kernels.quant_slide import quant_slide  # late: needs Triton

            layout = SlidePattern(HARDWARE_LENGTH).layout(rows.shape[1])  # whose windows do not overlap
            q, scale = quant_slide(rows, layout, dtype, layout.slided)
            q = q[:, : layout.in_features]
        else:
            q, scale = quantize_rows(rows, dtype)
        return dequantize_rows(q, scale).to(x.dtype).view(x.shape)

    @staticmethod
    def backward(_: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


def fake_quantize(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Quantize and dequantize each row of x [..., K], in the dtype of x; the gradient is passed on."""
    rounded: Tensor = _FakeQuantize.apply(x, dtype)
    return rounded


class InputRounder:
    """Round the inputs of quantized layers, once for successive layers that share an input."""

    def __init__(self, dtype: torch.dtype, quantized: Collection[str]) -> None:
        self._dtype, self._quantized = dtype, quantized
        self._last: tuple[Tensor, Tensor] | None = None

    def __call__(self, name: str, x: Tensor) -> Tensor:
        if name not in self._quantized:
            return x
        if self._last is None or self._last[0] is not x:
            self._last = x, fake_quantize(x, self._dtype)
        return self._last[1]


class _Attention(torch.autograd.Function):
    """Attention that is computed again for its gradients, which are summed in a fixed order.

    The backward passes of torch's fused kernels do that only in the strict deterministic mode, in which other
    operations fail; so it holds for them alone.  For the matrix products of unfused attention, which are deterministic
    on one stream, the mode asks for a setting of cuBLAS.
    """

    repeats = False  # whether the gradients of one are being computed, also by another thread

    @staticmethod
    def forward(context: Any, compute: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        kind = tensors[0].device.type
        enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        context.compute, context.autocast = compute, partial(torch.autocast, kind, dtype, enabled)
        context.save_for_backward(*tensors)
        return compute(*tensors)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        tensors = [t.detach().requires_grad_() for t in context.saved_tensors]
        _Attention.repeats = True
        try:
            with torch.enable_grad(), context.autocast(), sdpa_kernel(ATTENTION[tensors[0].device.type]):
                out = context.compute(*tensors)
            with _deterministic(warn_only=False), patch.dict(os.environ, CUBLAS_WORKSPACE_CONFIG=":4096:8"):
                return (None, *torch.autograd.grad(out, tensors, gradients[0]))
        finally:
            _Attention.repeats = False


class _FixedAttention(TorchFunctionMode):
    """Computes the attention of all modules by `_Attention`."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is not scaled_dot_product_attention or _Attention.repeats:
            return function(*args, **kwargs)
        names = ("query", "key", "value")
        tensors = [*args[:3], *(kwargs.pop(name) for name in names[len(args) :])]

        def compute(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return scaled_dot_product_attention(q, k, v, *args[3:], **kwargs)

        return _Attention.apply(compute, *tensors)


@contextmanager
def fixed_order() -> Iterator[None]:
    """Make sums deterministic where torch can, those of attention's backward pass above all."""
    with _deterministic(warn_only=True), _FixedAttention(), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


@contextmanager
def _deterministic(warn_only: bool) -> Iterator[None]:
    memory: Any = torch.utils.deterministic
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        memory.fill_uninitialized_memory,
    )
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    memory.fill_uninitialized_memory = False  # no result depends on it
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        memory.fill_uninitialized_memory = before[2]
