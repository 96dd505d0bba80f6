"""Masked distillation for protocol A: pruned checkpoints learn from the dense one, their zeros fixed.

    python -m benchmarks.accuracy.distill CORPUS DENSE OUT PRUNED [PRUNED ...] --seconds 100

Each PRUNED, a float checkpoint, is trained for so many seconds against the Kullback-Leibler divergence from DENSE's
next-token distribution, and written to OUT/<its name> in BF16.  OUT/control is DENSE itself trained for the same number
of steps on the same text, with the same learning rates, against the text's next tokens; without a PRUNED it takes all
of the time.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks.accuracy.language_model import Model, batches, load, save
from benchmarks.accuracy.train import Clock, Log, prepare, read_parts, train

RATE, WARM_UP, BATCH, SEED = 8e-4, 50, 64, 1
PRUNED = ("qkv", "o", "gate_up", "down")
CONTROL = "control"


def masks_of(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """1 where a weight of a linear layer is not zero, 0 where it is."""
    return {
        name: (t.detach() != 0).float() for name, t in weights.items() if name.partition(".")[2] in PRUNED
    }


@torch.no_grad()
def apply(weights: dict[str, Tensor], masks: dict[str, Tensor]) -> None:
    """Zero what the masks leave out."""
    torch._foreach_mul_([weights[name] for name in masks], list(masks.values()))


def against(teacher: Model, student: Model, windows: Tensor) -> tuple[Tensor, Tensor]:
    """The divergence, to go down and to show."""
    found = student.divergence_from(teacher, windows)
    return found, found.detach()


def main() -> None:
    """Distil one after the other, then train the control."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("dense", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("pruned", type=Path, nargs="*")
    parser.add_argument("--seconds", type=float, default=100.0, help="for each")
    parser.add_argument("--steps", type=int, help="so many, instead of seconds")
    parser.add_argument("--no-control", action="store_true", help="leave it out, such as on a second GPU")
    parser.add_argument("--batch", type=int, default=BATCH)
    parser.add_argument("--windows", type=int, help="of held-out text, fewer to try things out")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    dtype, compiled = prepare(options.device)
    stream = read_parts(options.corpus, options.device)
    with np.load(options.corpus / "eval.npz") as found:
        held_out = torch.from_numpy(found["validation"][: options.windows].astype(np.int64)).to(
            options.device
        )
    shape, weights = load(options.dense, options.device)
    teacher = Model(shape, weights, dtype, compiled)
    print(json.dumps({"teacher": round(teacher.perplexity(held_out), 4)}), flush=True)
    outcomes, most = {}, options.steps
    for folder in [*options.pruned, *([] if options.no_control else [None])]:
        shape, weights = load(folder or options.dense, options.device)
        model, masks = Model(shape, weights, dtype, compiled), masks_of(weights)
        before = model.perplexity(held_out)
        clock = Clock(options.seconds, WARM_UP, most)
        out = options.out / (folder.name if folder else CONTROL)
        out.mkdir(parents=True, exist_ok=True)
        loss = partial(against, teacher, model) if folder else model.loss
        after = partial(apply, weights, masks) if folder else None
        data = batches(stream, options.batch, shape.window, SEED)
        tokens = train(weights, loss, data, clock, Log(out / "log.jsonl"), RATE, after)
        most = most or clock.step  # the others get the steps of the first
        save(out, shape, weights, options.dense)
        outcomes[out.name] = {
            "steps": clock.step,
            "tokens": tokens,
            "zeros": round(1 - float(torch.cat([m.flatten() for m in masks.values()]).mean()), 4),
            "perplexity": [round(before, 4), round(model.perplexity(held_out), 4)],
        }
        print(json.dumps({out.name: outcomes[out.name]}), flush=True)
        (options.out / "distill.json").write_text(json.dumps(outcomes, indent=1) + "\n")


if __name__ == "__main__":
    main()
