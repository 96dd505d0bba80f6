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
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from slidesparse.calibrate.graphs import Repeated
from slidesparse.calibrate.inputs import HiddenStates, Stream
from slidesparse.calibrate.model import fast_products
from slidesparse.checkpoint.names import WEIGHT
from slidesparse.quantize import dequantize_rows, quantize_rows

# Adam's peak learning rate for steps of STEP_TOKENS, relative to the root mean square of a layer's weights
RATE = 0.01
BETAS = (0.9, 0.95)
WARM_UP_SHARE = 0.05  # share of all steps, after which the learning rate decays to zero along a cosine
# An epoch has STEPS steps of STEP_TOKENS tokens at most, and MIN_STEP_TOKENS at least: in shorter steps most of the
# time would go into rounding the weights.
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

_Piece = tuple[int, slice]  # index of a batch, and some of its samples


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
    def __init__(
        self,
        stream: Stream,
        targets: HiddenStates,
        pruned: Mapping[str, Tensor],
        quantized: Collection[str],
        dtype: torch.dtype,
    ) -> None:
        self._states, self._targets, self._dtype = stream.states, targets, dtype
        self._block = stream.block.copy()
        replaced = {name + WEIGHT for name in pruned}  # `_load_weights` sets them
        weights = self._block.weights.items()
        self._block.weights = {name: w.clone() for name, w in weights if name not in replaced}
        self._block.read = InputRounder(dtype, quantized)
        self._values = {name: w.clone().requires_grad_() for name, w in pruned.items()}
        self._kept = {name: w != 0 for name, w in pruned.items()}
        tokens = sum(samples * length for samples, length, _ in targets.shapes)
        self._step_tokens = min(STEP_TOKENS, max(MIN_STEP_TOKENS, tokens // STEPS))
        max_tokens = min(PIECE_TOKENS[targets.device.type], self._step_tokens)
        self._training_pieces, self._validation_pieces = _pieces(targets.shapes, max_tokens)

    def run(self, epochs: int) -> Finetuned:
        validated = Repeated(self._validated, self._targets.device)
        before = lowest = self._validation_error(validated)
        best, rate = self._weights(), RATE * math.sqrt(self._step_tokens / STEP_TOKENS)
        optimizer, training = self._optimizer()
        order = torch.Generator().manual_seed(0)
        for epoch in range(epochs):
            steps = list(self._steps(order))
            for number, pieces in enumerate(steps):
                part = learning_rate_factor((epoch * len(steps) + number + 0.5) / (epochs * len(steps)))
                for group in optimizer.param_groups:
                    step_rate = group["size"] * rate * part
                    if isinstance(group["lr"], Tensor):
                        group["lr"].fill_(step_rate)
                    else:
                        group["lr"] = step_rate
                training([x for piece in pieces for x in self._read(piece)])
            error = self._validation_error(validated)
            if error < lowest:
                lowest, best = error, self._weights()
            else:
                with torch.no_grad():
                    for name, w in self._values.items():
                        w.copy_(best[name])
                rate, (optimizer, training) = rate * RATE_DECAY, self._optimizer()
        return Finetuned(best, before**0.5, lowest**0.5)

    def _optimizer(self) -> tuple[torch.optim.Optimizer, Repeated]:
        """Return Adam, and a step of it for the inputs and targets of pieces in turns.

        It has one parameter group per layer, whose "size" is the root mean square of its weights.
        """
        groups = [
            {"params": [w], "size": float(w.detach()[self._kept[name]].square().mean().sqrt())}
            for name, w in self._values.items()
            if self._kept[name].any()
        ]
        device = self._targets.device
        if device.type == "cpu":
            optimizer = torch.optim.Adam(groups, lr=0.0, betas=BETAS)
        else:
            for group in groups:
                group["lr"] = torch.zeros((), device=device)
            optimizer = torch.optim.Adam(groups, betas=BETAS, capturable=True)
        return optimizer, Repeated(partial(self._train, optimizer), device)

    def _steps(self, order: torch.Generator) -> Iterator[list[_Piece]]:
        """Shuffle the pieces and yield them in groups, one group per optimizer step."""
        pieces, tokens = [], 0
        for index in torch.randperm(len(self._training_pieces), generator=order).tolist():
            pieces.append(self._training_pieces[index])
            tokens += self._tokens(pieces[-1])
            if tokens >= self._step_tokens:
                yield pieces
                pieces, tokens = [], 0
        if pieces:
            yield pieces

    def _train(self, optimizer: torch.optim.Optimizer, *data: Tensor) -> None:
        optimizer.zero_grad(set_to_none=True)
        inputs, targets = data[::2], data[1::2]
        tokens = sum(x.shape[:-1].numel() for x in inputs)
        kind = self._targets.device.type
        for x, target in zip(inputs, targets, strict=True):
            with torch.autocast(kind, torch.bfloat16, enabled=kind == "cuda"):
                self._load_weights()
                loss = self._loss(x, target) / tokens
            loss.backward()
        optimizer.step()

    def _read(self, piece: _Piece) -> tuple[Tensor, Tensor]:
        """Return the input and the target of a piece."""
        batch, samples = piece
        x, target = (states[batch][samples].clone() for states in (self._states, self._targets))
        return x, target

    def _loss(self, x: Tensor, target: Tensor) -> Tensor:
        """Return the loss summed over tokens."""
        error = (self._block.output(x) - target).square().sum(-1)
        return (error / target.square().sum(-1).clamp(min=torch.finfo(target.dtype).tiny)).sum()

    def _load_weights(self) -> None:
        """Put the current weights, rounded, into the block."""
        for name, w in self._values.items():
            self._block.weights[name + WEIGHT] = fake_quantize(w * self._kept[name], self._dtype)

    @torch.no_grad()
    def _validation_error(self, validated: Repeated) -> float:
        tokens = sum(self._tokens(piece) for piece in self._validation_pieces)
        losses = (validated(self._read(piece)).double() for piece in self._validation_pieces)
        return float(sum(losses)) / tokens

    def _validated(self, x: Tensor, target: Tensor) -> Tensor:
        self._load_weights()
        return self._loss(x, target)

    def _weights(self) -> dict[str, Tensor]:
        return {name: w.detach() * self._kept[name] for name, w in self._values.items()}

    def _tokens(self, piece: _Piece) -> int:
        batch, samples = piece
        return int(samples.stop - samples.start) * self._targets.shapes[batch][1]


def _pieces(shapes: list[torch.Size], max_tokens: int) -> tuple[list[_Piece], list[_Piece]]:
    """Return the pieces of the training and validation splits; equal below VALIDATION_INTERVAL samples."""
    splits: dict[bool, list[_Piece]] = {False: [], True: []}  # by whether samples are for validation
    first = 0
    for batch, (samples, tokens, _) in enumerate(shapes):
        step = max(1, max_tokens // tokens)
        flags = [(first + i) % VALIDATION_INTERVAL == VALIDATION_INTERVAL - 1 for i in range(samples)]
        for validates, group in groupby(range(samples), flags.__getitem__):
            places = list(group)
            pieces = [places[i : i + step] for i in range(0, len(places), step)]
            splits[validates] += [(batch, slice(piece[0], piece[-1] + 1)) for piece in pieces]
        first += samples
    return splits[False], splits[True] or splits[False]


def learning_rate_factor(part: float) -> float:
    """Return the learning rate, relative to its peak, after a ``part`` (0 to 1) of all steps or of the time."""
    return min(1.0, part / WARM_UP_SHARE) * (0.5 + 0.5 * math.cos(math.pi * part))


class _FakeQuantize(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: Tensor, dtype: torch.dtype) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        return dequantize_rows(*quantize_rows(rows, dtype)).to(x.dtype).view(x.shape)

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
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
