"""Train a ternary language model, BitNet b1.58 of 30 M weights, and measure the loss of pruning it to each pattern.

    python -m benchmarks.accuracy.bitnet CORPUS OUT --seconds 200

The model is that of protocol A with BitNet's norms, squared ReLU and linear layers: trained from scratch with codes -1,
0 and 1 and INT8 activations, with straight-through gradients.  CORPUS is the output of corpus.py.  OUT gets

    model/            BF16 master weights, as transformers and `slidesparse convert` read them
    checkpoints/      the converted models, W8A8 INT8: dense, and each pattern by each method
    bitnet.csv        loss of each on held-out text, and its share of zero codes
    bitnet.json       the conditions

Losses are computed in float32 from the codes and scales of the checkpoints with activations rounded to INT8 per token.
So neither vLLM nor a GPU is needed; --steps 20 --layers 1 --hidden 64 --window 64 runs everything in seconds.
"""

from __future__ import annotations

import argparse
import csv
import json
import time
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  (its usual name)
from torch import Tensor

from benchmarks.accuracy import language_model as lm
from benchmarks.accuracy.train import BATCH, Clock, Log, prepare, read_parts, train
from benchmarks.conditions import cpu_conditions, gpu_conditions
from slidesparse.calibrate.task import Calibration
from slidesparse.checkpoint.inspection import Fit, inspect
from slidesparse.convert.options import ConvertOptions
from slidesparse.convert.stream import convert
from slidesparse.pattern import SlidePattern
from slidesparse.tune.machine import require_gpu

PATTERNS = ("14:16", "8:10", "6:8", "4:6", "2:4")
METHODS = ("magnitude", "wanda", "sparsegpt")
DENSE = SlidePattern(None)
RATE = 1.5e-3  # peak learning rate
SAMPLES = 256
LAYER = ("norm", "qkv", "attn_norm", "o", "norm2", "gate_up", "ffn_norm", "down")
NAMES = {**lm.NAMES, "attn_norm": ("self_attn.attn_sub_norm",), "ffn_norm": ("mlp.ffn_sub_norm",)}
FIELDS = (
    *("pattern", "method", "loss", "perplexity", "loss_added", "perplexity_up_pct"),
    *("zeros", "blocks_over", "nonzeros_gone"),
)


@dataclass(frozen=True)
class Shape(lm.Shape):
    """The shape of the BitNet: that of protocol A's model."""

    def config(self) -> dict[str, object]:
        """Return the content of config.json."""
        kind = {"architectures": ["BitNetForCausalLM"], "model_type": "bitnet", "hidden_act": "relu2"}
        return {**super().config(), **kind}


# The layer: as in language_model.py, with two more norms and ternary linear layers


def rounded_inputs(x: Tensor) -> Tensor:
    """Round ``x`` to INT8 per token, in its dtype, with a straight-through gradient."""
    wide = x.float()
    scale = 127 / wide.detach().abs().amax(-1, keepdim=True).clamp(min=1e-5)
    rounded = ((wide * scale).round().clamp(-128, 127) / scale).to(x.dtype)
    return rounded.detach() + (x - x.detach())  # exactly the rounded values


def ternary(w: Tensor, parts: int) -> Tensor:
    """Round each of ``parts`` stacked matrices to codes times mean |w|, with a straight-through gradient."""
    matrices = w.unflatten(0, (parts, -1))
    scale = matrices.detach().abs().mean((1, 2), keepdim=True).clamp(min=1e-5)
    rounded = ((matrices / scale).round().clamp(-1, 1) * scale).flatten(0, 1)
    return rounded.detach() + (w - w.detach())


def layer(x: Tensor, cos: Tensor, sin: Tensor, *weights: Tensor, master: bool = True) -> Tensor:
    """Run one layer; ``weights`` in the order of LAYER, master weights or else codes times scales."""
    first, qkv, attn_norm, o, second, gate_up, ffn_norm, down = weights
    heads = qkv.shape[1] // (2 * cos.shape[-1])

    def linear(x: Tensor, w: Tensor, parts: int = 1) -> Tensor:
        return F.linear(rounded_inputs(x), (ternary(w, parts) if master else w).to(x.dtype))

    h = linear(lm.norm(x, first), qkv, 3)
    q, k, v = h.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
    q, k = lm.rotate(q, cos, sin), lm.rotate(k, cos, sin)
    attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
    x = x + linear(lm.norm(attended, attn_norm), o)
    gate, up = linear(lm.norm(x, second), gate_up, 2).chunk(2, dim=-1)
    return x + linear(lm.norm(F.relu(gate).square() * up, ffn_norm), down)


class Model(lm.Model):
    """Protocol A's model with a BitNet's layer."""

    names = LAYER
    run = staticmethod(layer)


class Served(Model):
    """The same model of a converted checkpoint."""

    run = staticmethod(partial(layer, master=False))  # never compiled


def initial(shape: Shape, device: str) -> lm.Weights:
    """Return random weights, and norms of 1."""
    weights = lm.initial(shape, device)
    for i in range(shape.layers):
        weights[f"{i}.attn_norm"] = torch.ones(shape.hidden, device=device, requires_grad=True)
        weights[f"{i}.ffn_norm"] = torch.ones(shape.intermediate, device=device, requires_grad=True)
    return weights


def served_weights(folder: Path, shape: Shape, device: str) -> lm.Weights:
    """Read a converted checkpoint: codes times scales, and the rest, float32."""
    from safetensors.torch import load_file

    stored = load_file(folder / "model.safetensors")
    for name in [name for name in stored if name.endswith(".weight_scale")]:
        stored[name.removesuffix("_scale")] = stored[name.removesuffix("_scale")] * stored[name]
    return lm.from_stored(stored, shape, NAMES, device)


# The measurement


def make_model(options: argparse.Namespace, shape: Shape) -> dict[str, Any]:
    """Train and save the model; return facts about the training."""
    began = time.monotonic()
    dtype, compiled = prepare(options.device)
    stream = read_parts(options.corpus, options.device)
    model = Model(shape, initial(shape, options.device), dtype, compiled)
    clock, log = Clock(options.seconds, options.steps), Log(options.out / "log.jsonl")
    data = lm.batches(stream, options.batch, shape.window)
    tokens = train(model.weights, model.loss, data, clock, log, RATE)
    lm.save(options.out / "model", shape, model.weights, options.corpus, NAMES)
    return {
        "weights": sum(t.numel() for t in model.weights.values()),
        "corpus_tokens": len(stream),
        "tokens": tokens,
        "steps": clock.step,
        "rate": RATE,
        "seconds": round(time.monotonic() - (clock.started or began), 1),
    }


def make(options: argparse.Namespace, pattern: SlidePattern, method: str, calibration: Path) -> Path:
    """Return the checkpoint of a pattern by a method; make it if it does not exist."""
    out: Path = options.out / "checkpoints" / f"{pattern.flag}-{method}"
    if not (out / "config.json").exists():
        data = Calibration(str(calibration), options.samples, options.window, options.device)
        calibrated = data if method in ("wanda", "sparsegpt") else None
        convert(options.out / "model", out, ConvertOptions(pattern, method=method, calibration=calibrated))
    return out


def result_rows(
    options: argparse.Namespace, shape: Shape, windows: Tensor, calibration: Path
) -> list[dict[str, Any]]:
    """Return the rows of the table."""
    fits: dict[str, Fit] = {}
    rows: list[dict[str, Any]] = []
    cells = [
        (DENSE, "magnitude"),
        *((SlidePattern.parse(p), m) for p in options.patterns.split(",") for m in METHODS),
    ]
    for pattern, method in cells:
        folder = make(options, pattern, method, calibration)
        report = inspect(folder)
        fits = fits or {fit.pattern: fit for fit in report.fits}
        model = Served(shape, served_weights(folder, shape, options.device), torch.float32, compiled=False)
        perplexity, fit = model.perplexity(windows), fits.get(pattern.ratio)
        loss = float(np.log(perplexity))
        dense = rows[0]["loss"] if rows else loss
        rows.append(
            {
                "pattern": "dense" if pattern == DENSE else pattern.ratio,
                "method": "-" if pattern == DENSE else method,
                "loss": round(loss, 5),
                "perplexity": round(perplexity, 4),
                "loss_added": round(loss - dense, 5),
                "perplexity_up_pct": round(100 * float(np.expm1(loss - dense)), 3),
                "zeros": round(report.fits[0].zeros, 5),
                "blocks_over": round(fit.share_over, 5) if fit else "",
                "nonzeros_gone": round(fit.share_gone, 5) if fit else "",
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> None:
    """Train, prune, measure; existing results are kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=200.0, help="of training, without compilation")
    parser.add_argument("--steps", type=int, help="number of steps, instead of --seconds")
    parser.add_argument("--batch", type=int, default=BATCH)
    parser.add_argument("--samples", type=int, default=SAMPLES, help="windows to calibrate with")
    parser.add_argument("--patterns", default=",".join(PATTERNS))
    parser.add_argument("--window", type=int, default=Shape.window, help="tokens per window")
    parser.add_argument("--layers", type=int, default=Shape.layers, help="number of layers")
    parser.add_argument("--hidden", type=int, default=Shape.hidden, help="hidden size")
    parser.add_argument("--vocabulary", type=int, default=Shape.vocabulary, help="number of token ids")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    intermediate = options.hidden * 11 // 4
    shape = replace(
        Shape(),
        layers=options.layers,
        hidden=options.hidden,
        intermediate=intermediate,
        window=options.window,
        vocabulary=options.vocabulary,
    )
    options.out.mkdir(parents=True, exist_ok=True)
    conditions = options.out / "bitnet.json"
    calibration = options.out / "calibration.npy"
    with np.load(options.corpus / "eval.npz") as stored:
        windows = torch.from_numpy(stored["validation"][:, : options.window].astype(np.int64))
        np.save(calibration, stored["calibration"][:, : options.window].astype(np.int64))
    trained = json.loads(conditions.read_text())["training"] if conditions.exists() else None
    if not trained:
        trained = make_model(options, shape)
    gpu = options.device == "cuda"
    facts = {
        "conditions": gpu_conditions(require_gpu(), ()) if gpu else cpu_conditions(),
        "model": asdict(shape),
        "training": trained,
        "calibration": {"samples": options.samples, "tokens": options.window},
        "held_out": list(windows.shape),
    }
    conditions.write_text(json.dumps(facts, indent=1) + "\n")
    # products of codes and INT8 activations are exact in float32
    torch.backends.cuda.matmul.allow_tf32 = False
    rows = result_rows(options, shape, windows.to(options.device), calibration)
    with (options.out / "bitnet.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
