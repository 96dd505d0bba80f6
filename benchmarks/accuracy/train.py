"""Train the language model of protocol A for a number of seconds, on the corpus of corpus.py.

    python -m benchmarks.accuracy.train CORPUS OUT --seconds 400

The learning rate decays with elapsed time, not with steps, so that the decay is complete when the time is up.  The
result therefore depends on the machine.  OUT gets the checkpoint in BF16, log.jsonl and train.json.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks.accuracy.language_model import Model, Shape, batches, describe, initial, read_stream, save

RATE, MIN_RATE, WARM_UP = 2.5e-3, 0.02, 200  # peak at a width of 512, final share of it, steps
BETAS, WEIGHT_DECAY, CLIP = (0.9, 0.95), 0.1, 1.0
BATCH = 64  # windows a step
SYNC = 8  # steps between synchronizations with the GPU
LOG_SECONDS = 4.0


@dataclass
class Clock:
    """The training time, measured from the first `tick` on, when everything has been compiled."""

    seconds: float
    steps: int | None = None  # instead of seconds
    started: float | None = None
    step: int = 0

    def tick(self) -> None:
        """Count a step; the first one starts the clock."""
        self.step += 1
        if self.started is None:
            self.started = time.monotonic()

    @property
    def share(self) -> float:
        """The share of the time, or of the steps, that has passed, 0 to 1."""
        if self.steps:
            return min(1.0, self.step / self.steps)
        return 0.0 if self.started is None else min(1.0, (time.monotonic() - self.started) / self.seconds)

    @property
    def rate(self) -> float:
        """The current learning rate, relative to its peak."""
        falling = MIN_RATE + (1 - MIN_RATE) * 0.5 * (1 + math.cos(math.pi * self.share))
        return min(1.0, (self.step + 1) / WARM_UP) * falling


@dataclass
class Log:
    """A log with a line every few seconds, on stdout and in a file."""

    path: Path
    _last: float = field(default_factory=time.monotonic)
    _last_tokens: int = 0

    def __call__(self, step: int, loss: float, rate: float, tokens: int, end: bool = False) -> None:
        """Write a line if LOG_SECONDS have passed, or at the ``end``."""
        now = time.monotonic()
        if now - self._last < LOG_SECONDS and not end:
            return
        speed = (tokens - self._last_tokens) / (now - self._last)
        line = {
            "step": step,
            "tokens": tokens,
            "loss": round(loss, 4),
            "rate": f"{rate:.2e}",
            "tokens_s": round(speed),
        }
        self._last, self._last_tokens = now, tokens
        print(json.dumps(line), flush=True)
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def make_optimizer(weights: dict[str, Tensor], rate: float) -> torch.optim.AdamW:
    """Return AdamW without weight decay for norms and the embedding."""
    plain = [t for name, t in weights.items() if "norm" in name or name == "embedding"]
    decaying = [t for name, t in weights.items() if "norm" not in name and name != "embedding"]
    groups = [{"params": decaying, "weight_decay": WEIGHT_DECAY}, {"params": plain, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, rate, BETAS, fused=True)


def step(optimizer: torch.optim.AdamW, weights: list[Tensor], loss: Tensor, rate: float) -> None:
    """Update ``weights`` against the gradient of ``loss``."""
    loss.backward()
    torch.nn.utils.clip_grad_norm_(weights, CLIP, foreach=True)
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def train(
    weights: dict[str, Tensor],
    loss_of: Callable[[Tensor], tuple[Tensor, Tensor]],
    data: Iterator[Tensor],
    clock: Clock,
    log: Log,
    highest: float = RATE,
) -> int:
    """Train until the clock has run out; return the number of tokens.

    Args:
        loss_of: windows [B, T + 1] -> (the loss to minimize, the loss to log).
        highest: learning rate.
    """
    optimizer, every, tokens = make_optimizer(weights, highest), list(weights.values()), 0
    for windows in data:
        loss, shown = loss_of(windows)
        rate = highest * clock.rate
        step(optimizer, every, loss, rate)
        tokens += windows[:, 1:].numel()
        clock.tick()
        end = clock.share >= 1
        if clock.step % SYNC == 1 or end:
            log(clock.step, float(shown), rate, tokens, end)  # synchronizes
        if end:
            break
    return tokens


def prepare(device: str) -> tuple[torch.dtype, bool]:
    """Return the dtype to compute in, and whether to compile."""
    torch.backends.cuda.matmul.allow_tf32 = True
    return (torch.bfloat16, True) if device == "cuda" else (torch.float32, False)


def corpus_parts(folder: Path) -> list[Path]:
    """Return the parts of the training stream."""
    parts = sorted(folder.glob("part*.xz"))
    if not parts:
        raise SystemExit(f"{folder} has no part0.xz; make the corpus with corpus.py")
    sizes = json.loads((folder / "corpus.json").read_text())["bytes of parts"]
    if [path.stat().st_size for path in parts] != sizes:
        raise SystemExit(
            f"{folder} has {len(parts)} parts, of {len(sizes)} that corpus.json names; copy the others"
        )
    return parts


def read_parts(folder: Path, device: str) -> Tensor:
    """Return the training stream, whose parts are unpacked in parallel."""
    parts = corpus_parts(folder)
    with ThreadPoolExecutor(len(parts)) as pool:
        return torch.cat(list(pool.map(lambda part: read_stream(part, device), parts)))


def main() -> None:
    """Train and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=400.0, help="of training, without compilation")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--layers", type=int, help="number of layers")
    parser.add_argument(
        "--hidden", type=int, help="hidden size, in heads of 64; 768 with --layers 14 is 100 M"
    )
    options = parser.parse_args()
    shape = Shape()
    if options.layers:
        shape = replace(shape, layers=options.layers)
    if options.hidden:
        hidden = options.hidden
        shape = replace(shape, hidden=hidden, intermediate=hidden * 11 // 4, heads=max(1, hidden // 64))
    began = time.monotonic()
    dtype, compiled = prepare(options.device)
    stream = read_parts(options.corpus, options.device)
    facts = {**describe(shape), "corpus": len(stream), "read_s": round(time.monotonic() - began, 1)}
    print(json.dumps(facts), flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    model = Model(shape, initial(shape, options.device), dtype, compiled)
    clock, log = Clock(options.seconds), Log(options.out / "log.jsonl")
    data = batches(stream, BATCH, shape.window)
    highest = RATE * Shape().hidden / shape.hidden
    tokens = train(model.weights, model.loss, data, clock, log, highest)
    save(options.out, shape, model.weights, options.corpus)
    with np.load(options.corpus / "eval.npz") as stored:
        held_out = {name: torch.from_numpy(stored[name].astype(np.int64)) for name in stored.files}
        del held_out["calibration"]
    outcome = {
        "device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu",
        "corpus_tokens": len(stream),
        "tokens": tokens,
        "epochs": round(tokens / len(stream), 2),
        "steps": clock.step,
        "seconds": round(time.monotonic() - (clock.started or began), 1),
        "perplexity": {
            name: round(model.perplexity(w.to(options.device)), 4) for name, w in held_out.items()
        },
        **describe(shape),
    }
    (options.out / "train.json").write_text(json.dumps(outcome, indent=1) + "\n")
    print(json.dumps(outcome), flush=True)


if __name__ == "__main__":
    main()
