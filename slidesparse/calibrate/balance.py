"""Even out the inputs of a layer before they are quantized per token, at the cost of its weights: y = (x / s) (w s)^T.

An input that is much larger than a token's others takes the steps of INT8 for itself.  Where layer b reads what layer
a gives, each output times something (`slidesparse.calibrate.forward.Block.products`), a's rows are divided by s and
b's columns multiplied by it.  Powers of two change no bit of what the model computes in floats, and a's scales per row
take them up whole; of b's weights the rounding grows, so s is as strong as makes b's quantized outputs best.

SmoothQuant (arXiv 2211.10438) divides by the largest input ever seen.  Here it is the 8th power mean over tokens,
each divided by its own size, since every token has its own scale: a few tokens of huge inputs would else decide alone.
"""

from __future__ import annotations

from collections.abc import Container

import torch
from torch import Tensor

from slidesparse.architectures import WEIGHT
from slidesparse.calibrate.cache import Inputs
from slidesparse.quantize import dequantize_rows, quantize_rows

TOKENS = 2**15  # that s is taken from, at most
JUDGED = 2**12  # of these, what its strength is chosen by
STRENGTHS = (0.0, 0.25, 0.5, 0.75)  # s = size of the input to this power
MOST_BITS = 8  # s is from 2^-8 to 2^8
POWER = 8


def balance(inputs: Inputs, chosen: Container[str], dtype: torch.dtype) -> dict[str, Tensor]:
    """The weights of the block of ``inputs`` that take up s, by name; only those of layers in ``chosen``.

    A layer whose outputs have a bias is left out, as s would have to go into it.  ``dtype``: torch.int8 or
    torch.float8_e4m3fn.
    """
    block, changed = inputs.block, dict[str, Tensor]()
    for first, second in block.products:
        if first not in chosen or second not in chosen or f"{first}.bias" in block.weights:
            continue
        stage = next(i for i, names in enumerate(block.stages) if second in names)
        w = block.weights[second + WEIGHT]
        s = scales(*_seen(inputs, stage), w, dtype)
        changed[first + WEIGHT], changed[second + WEIGHT] = block.weights[first + WEIGHT] / s[:, None], w * s
    return changed


def scales(size: Tensor, x: Tensor, w: Tensor, dtype: torch.dtype) -> Tensor:
    """s [K], powers of two: of STRENGTHS the one whose quantized x and ``w`` [N, K] give the least relative error.

    Args:
        size: [K] how large each input is.
        x: [tokens, K] some inputs to choose by.
    """
    exact = x @ w.t()
    weigh = 1 / exact.square().mean(-1).clamp(min=torch.finfo(exact.dtype).tiny)
    logarithm = size.clamp(min=torch.finfo(size.dtype).tiny).log2()
    logarithm = (logarithm - logarithm[size > 0].mean()).masked_fill(size <= 0, 0.0)
    best, least = torch.ones_like(size), float("inf")
    for strength in STRENGTHS:
        s = torch.exp2((strength * logarithm).round().clamp(-MOST_BITS, MOST_BITS))
        found = _quantized(x / s, dtype) @ _quantized(w * s, dtype).t()
        error = float(((found - exact).square().mean(-1) * weigh).mean(dtype=torch.float64))
        if error < least:
            best, least = s, error
    return best


def _quantized(x: Tensor, dtype: torch.dtype) -> Tensor:
    return dequantize_rows(*quantize_rows(x, dtype, "cuda"))


def _seen(inputs: Inputs, stage: int) -> tuple[Tensor, Tensor]:
    """The size [K] of each input of a stage, and a few of the inputs [tokens, K], evenly from all batches."""
    total: Tensor | None = None
    parts: list[Tensor] = []
    batches = range(0, len(inputs), max(1, len(inputs) * _tokens(inputs) // TOKENS))
    for batch in batches:
        x = inputs.block.input(stage, inputs.states[batch])
        x = x.reshape(-1, x.shape[-1])
        relative = x * x.square().mean(-1, keepdim=True).clamp(min=torch.finfo(x.dtype).tiny).rsqrt()
        powers = relative.pow(POWER).sum(0, dtype=torch.float64)
        total = powers if total is None else total + powers
        parts.append(x[:: max(1, len(x) * len(batches) // JUDGED)])
    assert total is not None
    return total.pow(1 / POWER).to(parts[0].dtype), torch.cat(parts)


def _tokens(inputs: Inputs) -> int:
    """Of a batch, on average, at least one."""
    shapes = inputs.states.shapes
    return max(1, sum(shape[:-1].numel() for shape in shapes) // len(shapes))
