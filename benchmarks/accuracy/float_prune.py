"""Pruned checkpoints that stay in float, for protocol A: by the project's own methods, and unstructured.

    python -m benchmarks.accuracy.float_prune DENSE OUT 6:8 sparsegpt --calib CALIBRATION.npy

`slidesparse convert` also quantizes; these checkpoints show the cost of pruning alone.  Unstructured pruning, which no
hardware accelerates, is a reference.  It follows the papers: magnitude over a layer, Wanda over a row (arXiv
2306.11695), SparseGPT over 128 columns at a time (arXiv 2301.00774), without the sweeps that the project's SparseGPT
adds.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from slidesparse.calibrate.inputs import Hessian, gather_statistics
from slidesparse.calibrate.pipeline import Position, finetune_block, prune_rows, walk
from slidesparse.calibrate.task import Calibration, Task
from slidesparse.checkpoint.names import WEIGHT
from slidesparse.checkpoint.storage import DTYPES, Checkpoint, Reader
from slidesparse.convert.options import ConvertOptions
from slidesparse.convert.plan import calibration_task, make_plan
from slidesparse.methods.sparsegpt import damping_for, factor
from slidesparse.pattern import SlidePattern
from slidesparse.prune import prune

SAMPLES, SEQLEN = 256, 1024
COLUMNS = 128  # between two mask selections of SparseGPT
FILE = "model.safetensors"


def magnitude(w: Tensor, _: Hessian, share: float) -> Tensor:
    """Zero the ``share`` of a layer's weights that are smallest."""
    return _zero_smallest(w.flatten(), w.abs().flatten(), share).view_as(w)


def wanda(w: Tensor, hessian: Hessian, share: float) -> Tensor:
    """Zero the ``share`` of each row whose |w| times the size of its input is smallest."""
    return _zero_smallest(w, w.abs() * hessian.matrix.diagonal().sqrt(), share)


def sparsegpt(w: Tensor, hessian: Hessian, share: float) -> Tensor:
    """Zero a ``share`` of the weights in each COLUMNS columns, and update the others to compensate."""
    h = hessian.matrix
    upper = factor(h, damping_for(len(h), hessian.tokens))
    out = w.clone()
    for start in range(0, w.shape[1], COLUMNS):
        columns = slice(start, min(start + COLUMNS, w.shape[1]))
        part, corner = out[:, columns], upper[columns, columns]
        scores = (part / corner.diagonal()).square()
        removed = scores <= scores.flatten().kthvalue(max(1, round(share * scores.numel()))).values
        errors = torch.zeros_like(part)
        for i in range(part.shape[1]):
            errors[:, i] = torch.where(removed[:, i], part[:, i], 0) / corner[i, i]
            part[:, i:] -= torch.outer(errors[:, i], corner[i, i:])
        part[removed] = 0.0
        out[:, columns.stop :] -= errors @ upper[columns, columns.stop :]
    return out


def _zero_smallest(w: Tensor, scores: Tensor, share: float) -> Tensor:
    count = round(share * w.shape[-1])
    return w.scatter(-1, scores.argsort(dim=-1, stable=True)[..., :count], 0.0)


RULES: dict[str, Callable[[Tensor, Hessian, float], Tensor]] = {
    "magnitude": magnitude,
    "wanda": wanda,
    "sparsegpt": sparsegpt,
}


@torch.inference_mode()
def prune_floats(
    task: Task, reader: Reader, folder: Path, rule: Callable[[Tensor, Hessian], Tensor] | None = None
) -> dict[str, Tensor]:
    """Prune the layers of ``task`` without quantizing; return the weights in the source's dtype, by layer name.

    As in `slidesparse.calibrate.pipeline.calibrate`, each layer is pruned on the outputs of those already pruned.

    Args:
        folder: where hidden states may be spilled.
        rule: replaces the task's method: a function of a weight [N, K] and the `Hessian` of its inputs that returns
            the pruned weight.
    """
    results: dict[str, Tensor] = {}
    with walk(task, reader, folder, 1 if rule else task.streams) as positions:
        for position in positions:

            def put(weights: Mapping[str, Tensor], position: Position = position) -> None:
                for name, w in weights.items():
                    full = position.full_name(name)
                    stored = w.to(DTYPES[task.model.checkpoint.require(full + WEIGHT).dtype])
                    position.block.weights[name + WEIGHT], results[full] = stored.float(), stored.cpu()

            pruned: dict[str, Tensor] = {}
            for stage in range(len(position.block.stages)):
                if not (weights := position.weights_to_prune(stage)):
                    continue
                hessian, drift = gather_statistics(position.inputs, stage, position.dense, weights)
                if rule:
                    stage_weights = {name: rule(w, hessian) for name, w in weights.items()}
                else:
                    stage_weights = prune_rows(position, hessian, drift.errors() if drift else None, weights)
                put(stage_weights)
                pruned |= stage_weights
            if (trained := finetune_block(position, pruned, None)) is not None:
                put(trained.weights)
    return results


def write_pruned(
    source: Path, out: Path, pattern: str, method: str, calibration: Calibration, seed: int = 0
) -> None:
    """Prune ``source``, a checkpoint of one file, and write the result in the same form.

    ``pattern``: such as "6:8", or a percentage such as "25%", unstructured.  Magnitude does not use the data.
    """
    from safetensors.torch import load_file, save_file

    share = float(pattern[:-1]) / 100 if pattern.endswith("%") else None
    parsed = SlidePattern.parse("2:4" if share else pattern)
    checkpoint = Checkpoint.open(source)
    options = ConvertOptions(parsed, method=method, seed=seed, calibration=calibration)
    if share:
        rule: Callable[[Tensor, Hessian], Tensor] | None = partial(RULES[method], share=share)
    else:
        rule = (lambda w, _: prune(w, parsed)) if method == "magnitude" else None
    task = calibration_task(make_plan(checkpoint, options))
    with tempfile.TemporaryDirectory() as folder, checkpoint.reader() as reader:
        pruned = prune_floats(task, reader, Path(folder), rule)
    tensors = load_file(source / FILE)
    tensors |= {name + WEIGHT: w.contiguous() for name, w in pruned.items()}
    shutil.copytree(source, out, ignore=shutil.ignore_patterns(FILE), dirs_exist_ok=True)
    save_file(tensors, out / FILE, metadata={"format": "pt"})


def main() -> None:
    """Prune one checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("pattern", help="such as 6:8, or 25%%")
    parser.add_argument("method", choices=RULES)
    parser.add_argument("--calib", required=True, help="as for slidesparse convert")
    parser.add_argument("--samples", type=int, default=SAMPLES)
    parser.add_argument("--seqlen", type=int, default=SEQLEN)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    calibration = Calibration(options.calib, options.samples, options.seqlen, options.device)
    write_pruned(options.source, options.out, options.pattern, options.method, calibration, options.seed)


if __name__ == "__main__":
    main()
