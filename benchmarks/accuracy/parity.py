"""Parity of this project's SparseGPT with llm-compressor's, on the language model of protocol A, in float on the CPU.

    theirs/bin/python -m benchmarks.accuracy.parity theirs WORKFOLDER --model DENSE --data CORPUS/eval.npz
    ours/bin/python -m benchmarks.accuracy.parity ours WORKFOLDER --model DENSE --data CORPUS/eval.npz
    ours/bin/python -m benchmarks.accuracy.parity score WORKFOLDER --model DENSE --data CORPUS/eval.npz --out parity.csv

It needs two environments, because llm-compressor and vLLM pin different releases of compressed-tensors: ``theirs`` with
llmcompressor installed, and ``ours``, the project's.  Both tools prune the same checkpoint with the same calibration
windows, each with its own damping (1% in both here), and write BF16 checkpoints to WORKFOLDER, one per run.  Existing
results are kept.  All are scored in the same way: weights, activations and sums in float32, the same windows.

llm-compressor's mask structure N:M counts zeros: "2:8" is 6:8 here.  It restarts groups at every ``block_size``-th
column, so a block size that is not a multiple of M breaks the pattern: "default" shows it at 4:6, as 128 = 21 * 6 + 2.
It also removes N of the K mod M columns at the end of a row; this project counts their padding as zeros and removes
fewer.  Setting "padded" gives llm-compressor such padding, so that both tools remove the same number of weights.
"""

from __future__ import annotations

import argparse
import csv
import math
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

SAMPLES, SEQLEN = 64, 512
TEXT, WINDOWS = "validation", 40  # of 1024 tokens; of the training text's kind
DRAWS = 2000  # bootstrap
ZEROS = 2  # of a group
WEIGHTS = "model.safetensors"
SUFFIX = "_proj.weight"  # of the linear layers that are pruned
FIELDS = (
    *("pattern", "tool", "setting", "seed", "ppl", "delta_pct", "ci_low", "ci_high"),
    *("violations", "with_more_zeros", "groups", "zeros_pct", "windows"),
)


@dataclass(frozen=True)
class Run:
    """One pruned checkpoint."""

    pattern: str  # kept:of
    tool: str
    setting: str
    seed: int  # of the choice of calibration windows

    @property
    def name(self) -> str:
        """The name of its folder."""
        return f"{self.pattern.replace(':', '_')}-{self.tool}-{self.setting}-{self.seed}"

    @classmethod
    def parse(cls, name: str) -> Run:
        """Return the run with a `name`."""
        pattern, tool, setting, seed = name.split("-")
        return cls(pattern.replace("_", ":"), tool, setting, int(seed))

    @property
    def length(self) -> int:
        """Columns of a group."""
        return int(self.pattern.split(":")[1])


# setting -> columns per block, and whether rows are padded to whole groups
THEIRS: dict[str, dict[str, tuple[int, bool]]] = {
    "6:8": {"default": (128, False)},  # of whole groups, as it happens: 128 = 16 * 8
    "4:6": {"block126": (126, False), "padded": (126, True), "default": (128, False)},
}
SWEEPS = {"plain": 0, "sweeps4": 4}


def calibration_windows(data: Path, seed: int) -> np.ndarray:
    """Return the calibration ids, [SAMPLES, SEQLEN] int32."""
    with np.load(data) as arrays:
        pool = arrays["calibration"]
    chosen = np.sort(np.random.default_rng(seed).permutation(len(pool))[:SAMPLES])
    return pool[chosen, :SEQLEN].astype(np.int32)


def prune_theirs(run: Run, options: argparse.Namespace, out: Path) -> None:
    """Prune with llm-compressor's SparseGPTModifier; write the tensors that the source has, in BF16."""
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.pruning.sparsegpt import SparseGPTModifier, base
    from safetensors.torch import load_file, save_file
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

    ids = calibration_windows(options.data, run.seed).tolist()
    model = LlamaForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    block, padded = THEIRS[run.pattern][run.setting]
    structure = {"sparsity": ZEROS / run.length, "mask_structure": f"{ZEROS}:{run.length}"}
    recipe = SparseGPTModifier(**structure, block_size=block, ignore=["re:.*lm_head"])
    plain = base.sparsify_weight
    if padded:
        base.sparsify_weight = padding(plain, run.length)
    try:
        oneshot(
            model=model,
            tokenizer=PreTrainedTokenizerFast(tokenizer_file=str(options.model / "tokenizer.json")),
            dataset=Dataset.from_dict({"input_ids": ids, "attention_mask": np.ones_like(ids).tolist()}),
            recipe=recipe,
            max_seq_length=SEQLEN,
            num_calibration_samples=SAMPLES,
            shuffle_calibration_samples=False,
        )
    finally:
        base.sparsify_weight = plain
    source, state = load_file(options.model / WEIGHTS), model.state_dict()
    shutil.copytree(options.model, out, ignore=shutil.ignore_patterns(WEIGHTS))
    stored = {name: state[name].to(t.dtype).contiguous() for name, t in source.items()}
    save_file(stored, out / WEIGHTS, metadata={"format": "pt"})


def padding(plain: Callable[..., Any], length: int) -> Callable[..., Any]:
    """Wrap llm-compressor's ``sparsify_weight`` to pad K with zero columns to a multiple of ``length``.

    The columns have zero weights and inputs of average size, uncorrelated with the others: they are removed first,
    without effect on the rest or on the damping.
    """

    def padded(module: torch.nn.Module, hessians_dict: dict[Any, Tensor], **options: Any) -> Any:
        weight, h = module.weight, hessians_dict.pop(module)
        columns = weight.shape[1]
        extra = -columns % length
        wider = torch.nn.Linear(1, 1, bias=False)
        wider.weight = torch.nn.Parameter(torch.nn.functional.pad(weight.detach(), (0, extra)))
        wide = torch.block_diag(h, torch.eye(extra) * h.diagonal().mean())
        loss, pruned = plain(module=wider, hessians_dict={wider: wide}, **options)
        return loss, pruned[:, :columns].contiguous()

    return padded


def prune_ours(run: Run, options: argparse.Namespace, out: Path) -> None:
    """Prune with this project's SparseGPT."""
    from benchmarks.accuracy import float_prune
    from slidesparse.calibrate.task import Calibration

    windows = options.folder / f"calibration{run.seed}.npy"
    np.save(windows, calibration_windows(options.data, run.seed))
    # as in llm-compressor, layers are fitted to their own outputs on the pruned model's inputs
    calibration = Calibration(str(windows), SAMPLES, SEQLEN, "cpu", sweeps=SWEEPS[run.setting], target="own")
    float_prune.write_pruned(options.model, out, run.pattern, "sparsegpt", calibration, run.seed)


def is_broken(run: Run) -> bool:
    """Return whether llm-compressor's groups do not line up with the pattern's; shown for seed 0 only."""
    return run.setting in THEIRS[run.pattern] and THEIRS[run.pattern][run.setting][0] % run.length > 0


def prune_all(options: argparse.Namespace) -> None:
    """Make the checkpoints of a tool that the folder lacks."""
    settings: dict[str, Any] = dict.fromkeys(THEIRS, SWEEPS)
    tool, prune = "slidesparse", prune_ours
    if options.verb == "theirs":
        settings, tool, prune = THEIRS, "llmcompressor", prune_theirs
    runs = [Run(p, tool, s, seed) for seed in options.seeds for p, names in settings.items() for s in names]
    for run in runs:
        if (out := options.folder / run.name).exists() or (run.seed and is_broken(run)):
            continue
        partial = options.folder / f"partial-{run.name}"
        shutil.rmtree(partial, ignore_errors=True)
        prune(run, options, partial)
        partial.rename(out)
        print(run.name, flush=True)


@torch.no_grad()
def token_losses(folder: Path, windows: Tensor) -> np.ndarray:
    """Return the mean cross entropy of each window [B, T], all tokens but its first; float32 throughout."""
    from benchmarks.accuracy.language_model import Model, load

    model = Model(*load(folder, "cpu"), torch.float32, compiled=False)
    return np.array([float(model.loss(window)[1]) for window in windows.split(1)])


def count_zeros(run: Run, folder: Path) -> dict[str, Any]:
    """Count groups that break the pattern, and zeros; a partial group at the end of a row counts for zeros only."""
    from safetensors.torch import load_file

    groups = violations = with_more = zeros = weights = 0
    for name, w in load_file(folder / WEIGHTS).items():
        if name.endswith(SUFFIX):
            is_zero = w == 0
            columns = w.shape[1] // run.length * run.length
            per_group = is_zero[:, :columns].unflatten(-1, (-1, run.length)).sum(-1)
            groups += per_group.numel()
            zeros += int(is_zero.sum())
            weights += is_zero.numel()
            violations += int((per_group < ZEROS).sum())
            with_more += int((per_group > ZEROS).sum())
    counts = {"violations": violations, "with_more_zeros": with_more, "groups": groups}
    return {**counts, "zeros_pct": f"{100 * zeros / weights:.3f}"}


def interval(difference: np.ndarray) -> tuple[float, float, float]:
    """Return the increase in perplexity in percent of paired differences in nats, and its 95% bootstrap interval."""
    drawn = np.random.default_rng(0).integers(0, len(difference), (DRAWS, len(difference)))
    low, high = np.quantile(difference[drawn].mean(-1), (0.025, 0.975))
    return tuple(100 * math.expm1(x) for x in (float(difference.mean()), low, high))  # type: ignore[return-value]


def rows(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the row of the dense model, and those of every checkpoint in the folder."""
    with np.load(options.data) as arrays:
        windows = torch.from_numpy(arrays[TEXT][:WINDOWS].astype(np.int64))
    folders = sorted(options.folder.glob("[0-9]*-*-*-*"), key=lambda f: (f.name[:3] != "6_8", f.name))
    dense = np.zeros(0)
    for folder in (options.model, *folders):
        cache = options.folder / f"nats-{folder.name}.npy"
        if not cache.exists():
            np.save(cache, token_losses(folder, windows))
        nats = np.load(cache)
        row = {"ppl": f"{math.exp(nats.mean()):.5f}", "windows": len(nats)}
        if folder == options.model:
            dense = nats
            yield {"pattern": "dense", "tool": "-", "setting": "-", **row}
            continue
        up, low, high = (f"{x:.3f}" for x in interval(nats - dense))
        row |= {"delta_pct": up, "ci_low": low, "ci_high": high}
        yield {**asdict(run := Run.parse(folder.name)), **row, **count_zeros(run, folder)}


def main() -> None:
    """Prune with one of the tools, or score what both made."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("verb", choices=("theirs", "ours", "score"))
    parser.add_argument("folder", type=Path, help="folder of the checkpoints")
    parser.add_argument("--model", type=Path, required=True, help="the dense checkpoint")
    parser.add_argument("--data", type=Path, required=True, help="eval.npz of corpus.py")
    parser.add_argument("--out", type=Path, default=Path("parity.csv"), help="the CSV that score writes")
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[0], help="seeds of the choice of calibration windows"
    )
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    if options.verb == "score":
        with options.out.open("w", newline="") as file:
            writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows(options))
    else:
        prune_all(options)


if __name__ == "__main__":
    main()
