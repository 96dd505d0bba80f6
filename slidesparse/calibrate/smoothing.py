"""Scale the inputs of `down` so that INT8 represents them better, without changing the model's outputs.

All channels of a token share one INT8 scale, so that a single large channel takes the precision of the others.  The
inputs of `down` have such channels, and a rotation of the residual stream does not reach them.  But these inputs are
products, act(gate) * up, so that factors s [K] can be moved out of them into the weights::

    up' = up / s         its rows, and its bias
    down' = down * s     its columns

as SmoothQuant (arXiv 2211.10438) moves factors into norms.  Rows of INT8 weights have scales of their own, so `up`
loses nothing.  Here s_k = sqrt(max |x_k|), with x the inputs on calibration samples: on a trained model of 107 M, INT8
moved predictions more with SmoothQuant's factors, sqrt(max |x_k| / max |w_k|), and with other powers.  A layer that
INT8 represents better without factors gets none.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F  # noqa: N812  (its usual name)
from torch import Tensor

from slidesparse.calibrate.changes import ChangedReader, Changes, add_change
from slidesparse.calibrate.inputs import Stream, power_of_two
from slidesparse.calibrate.model import Model
from slidesparse.calibrate.pipeline import run_blocks
from slidesparse.calibrate.resume import SMOOTHING, WorkFolder
from slidesparse.calibrate.roles import find_roles, roles_of, scalings
from slidesparse.calibrate.task import Task
from slidesparse.checkpoint.names import WEIGHT
from slidesparse.checkpoint.storage import Reader
from slidesparse.progress import Progress
from slidesparse.quantize import dequantize_rows, quantize_rows

TOKENS = 1024  # evenly spaced tokens of the samples from which errors are computed
OUTPUTS = 512  # evenly spaced outputs of `down` from which errors are computed
FACTORS, ERRORS = ".factors", ".errors"  # suffixes of the name of a `down` layer


def find_smoothing(
    task: Task, reader: Reader, work: WorkFolder, progress: Progress
) -> tuple[dict[str, Tensor], str]:
    """Return the factors [K] saved in ``work``, or find them on the samples of ``task`` and save them there.

    They are float32, by the name of the `down` layer, and ones where others do not help.  The text is the line for the
    report, empty if no layer is smoothed.  The result is deterministic on the same machine.
    """
    saved = work.keep_tensors(SMOOTHING, lambda: _search(task, reader, progress))
    factors, errors = (
        {name.removesuffix(suffix): x for name, x in saved.items() if name.endswith(suffix)}
        for suffix in (FACTORS, ERRORS)
    )
    smoothed = sum(bool((x != 1).any()) for x in factors.values())
    if not smoothed:
        return factors, ""
    before, after = torch.stack([*errors.values()]).mean(0).sqrt().tolist()
    return factors, (
        f"channels scaled before {smoothed} of {len(errors)} down_proj layers, folded into the "
        f"weights; their relative output error from INT8 alone: {before:.2%} -> {after:.2%}"
    )


@torch.inference_mode()
def _search(task: Task, reader: Reader, progress: Progress) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for run in run_blocks(task, reader, "smoothing", progress, to_the_end=True):
        quantized = task.quantized(run.number).keys()
        pairs = (pair for pair in find_roles(run.block).pairs if pair.scaled)
        readers = [pair.reader for pair in pairs if {pair.reader, *pair.writers} <= quantized]
        for layer, (x, peaks) in _sample_inputs(run.pruned, readers).items():
            factors, errors = choose_factors(x, peaks, run.block.weights[layer + WEIGHT])
            down = run.full_name(layer)
            tensors |= {down + FACTORS: factors.cpu(), down + ERRORS: errors.cpu()}
    return tensors


def _sample_inputs(stream: Stream, layers: Sequence[str]) -> dict[str, tuple[Tensor, Tensor]]:
    """Return evenly spaced tokens [M, K] of each layer's inputs, and max |x| [K] over all tokens, by its name.

    The stream advances meanwhile.
    """
    total = sum(samples * tokens for samples, tokens, _ in stream.states.shapes)
    step, starts = -(-total // TOKENS), Counter[str]()
    sampled, peaks = (defaultdict[str, list[Tensor]](list) for _ in range(2))

    def read(layer: str, x: Tensor) -> None:
        x = x.flatten(0, -2)
        sampled[layer].append(x[-starts[layer] % step :: step].clone())
        peaks[layer].append(x.abs().amax(0))
        starts[layer] += len(x)

    stream.advance(read, layers)
    return {layer: (torch.cat(x), torch.stack(peaks[layer]).amax(0)) for layer, x in sampled.items()}


def choose_factors(x: Tensor, peaks: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Return the factors [K] of a layer, ones if others do not reduce its error, and the errors.

    Args:
        x: [M, K] float32, tokens of the layer's input.
        peaks: [K], the maximum of |x| over these and other tokens.
        w: [N, K] float32.

    Both are float32; the errors [2], without and with factors, are the mean of |y' - y|^2 / |y|^2 over tokens.
    """
    w = w[:: -(-len(w) // OUTPUTS)]
    x, w = x / power_of_two(x), w / power_of_two(w)
    exact = F.linear(x, w)
    floor = torch.finfo(torch.float32).tiny
    energy = exact.square().sum(1).clamp(min=floor)

    def error(factors: Tensor) -> Tensor:
        operands = (x / factors, w * factors)
        xs, ws = (dequantize_rows(*quantize_rows(operand, torch.int8)) for operand in operands)
        return ((F.linear(xs, ws) - exact).square().sum(1) / energy).mean()

    used = peaks > 0  # other channels have no effect
    logs = torch.where(used, peaks, 1.0).log() / 2
    factors = torch.where(used, logs - logs.sum() / used.sum().clamp(min=1), 0.0).exp()
    before, after = error(torch.ones_like(factors)), error(factors)
    factors = factors if after < before else torch.ones_like(factors)
    return factors, torch.stack((before, torch.minimum(before, after)))


def smoothed_reader(reader: Reader, model: Model, factors: Mapping[str, Tensor]) -> ChangedReader:
    """Return a reader of a model with ``factors`` [K] moved out of the inputs of `down` layers, by their names.

    The tensors concerned are returned as float32, whatever the checkpoint's dtype.
    """
    changes: Changes = {}
    for number, roles in enumerate(roles_of(model, reader)):
        names = model.linears(number)
        for pair in roles.pairs:
            factor = factors.get(names[pair.reader])
            if factor is None or pair.scaled is None or not bool((factor != 1).any()):
                continue
            rows = reader.checkpoint.require(names[pair.scaled[0]] + WEIGHT).rows
            for name, change in scalings(pair, factor, rows).items():
                layer, _, kind = name.rpartition(".")
                add_change(changes, f"{names[layer]}.{kind}", change.apply)
    return ChangedReader(reader, changes, torch.float32)
