"""Protocol A: what pruning costs a language model of 30 million weights, served by vLLM with the plugin.

    python -m benchmarks.accuracy.protocol_a WORK --model DENSE --data CORPUS/eval.npz --out protocol_a.csv --jobs 8
    python -m benchmarks.accuracy.protocol_a WORK ... --distill CORPUS --minutes 10       # and distills, one at a time

A cell is a pattern, a method, a quantization and a seed of the choice of calibration samples.  vLLM is imported once;
each cell is a forked process that makes the checkpoint by `convert`, serves it and scores the texts, several at a time.
Cells already in the CSV are skipped.  WORKFOLDER keeps checkpoints, logs, and the log-probabilities.
"""

from __future__ import annotations

import argparse
import csv
import gc
import json
import os
import signal
import sys
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.accuracy import float_prune
from benchmarks.accuracy.corpus import CONVERSION
from benchmarks.accuracy.language_model import read_stream
from slidesparse.calibrate.task import EPOCHS, MINUTES, Calibration
from slidesparse.checkpoint.names import WEIGHT, family_of
from slidesparse.checkpoint.metadata import Metadata
from slidesparse.checkpoint.storage import Checkpoint
from slidesparse.convert.budget import MIDDLE, Budget, parse_percent
from slidesparse.convert.options import ConvertOptions
from slidesparse.convert.stream import convert
from slidesparse.convert.times import DEFAULT_GPU, LayerTimes
from slidesparse.evaluate import worker
from slidesparse.evaluate.engine import SERVED_LINE, Scored
from slidesparse.evaluate.perplexity import summarize
from slidesparse.pattern import parse_pattern

DENSE = "dense"
PATTERNS, METHODS = ("6:8", "4:6", "2:4", "8:10"), ("sparsegpt", "wanda", "magnitude")
DISTILLED = ("2:4", "4:6", "6:8")
UNSTRUCTURED = ("25%", "33%")
BUDGETS = ("zeros 25%", "zeros 33.3%", "loss 1%", "loss 2%")  # as patterns, of the method BUDGET
BUDGET = "budget"
PREFILL, DECODE = 8192, 16  # tokens of a step
SEEDS = (0, 1, 2)
SAMPLES, WINDOW = float_prune.SAMPLES, float_prune.SEQLEN
TEXTS = {"validation": "in", "other": "out"}  # of the training text's kind, or of another
FIELDS = (
    *("pattern", "method", "quant", "seed", "ppl", "delta_pct", "ci_low", "ci_high", "text", "distilled"),
    *("ppl_low", "ppl_high", "same_top", "windows", "tokens", "served_by"),
    *("samples", "epochs"),  # windows it was calibrated with, and how often it was fine-tuned on them
    *("zeros", "speed_prefill", "speed_decode"),  # see `zeros_and_speeds`
)
CELL_SECONDS = 900.0  # at most, distillation not counted
# Engine options.  On a GPU models are compiled and fused, as users serve them; scoring runs no step short enough for a
# CUDA graph.
GPU_OPTIONS = {
    "gpu_memory_utilization": 0.05,
    "kv_cache_memory_bytes": 1 << 30,
    "compilation_config": {"cudagraph_mode": "NONE"},
}
CPU_OPTIONS = {"gpu_memory_utilization": 0.2, "enforce_eager": True}
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in the cell's own process
    "VLLM_WORKER_MULTIPROC_METHOD": "fork",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # querying the GPU must not initialize CUDA for forked processes
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",  # cells run side by side
}


@dataclass(frozen=True)
class Cell:
    """One checkpoint to make and to score."""

    pattern: str
    method: str
    quant: str
    seed: int = 0
    distilled: str = ""  # or "kl"

    @property
    def name(self) -> str:
        """The stem of its files."""
        pattern = self.pattern.replace(":", "_").replace("%", "pct").replace(" ", "")
        parts = [pattern, self.method.replace("-", "none"), self.quant, str(self.seed)]
        return "-".join([*parts, self.distilled] if self.distilled else parts)

    @property
    def key(self) -> tuple[str, ...]:
        """The key of its rows."""
        return (self.pattern, self.method, self.quant, str(self.seed), self.distilled)

    def calibrated(self, samples: int, epochs: int) -> tuple[str, str]:
        """Its samples and epochs, where ``samples`` and ``epochs`` are those of the command; "" for none."""
        if self.method not in ("sparsegpt", "wanda", BUDGET):
            return "", ""
        tuned = self.method != "wanda" and self.pattern not in UNSTRUCTURED
        return str(samples), str(epochs if tuned else 0)


def cells() -> list[Cell]:
    """All cells, the reference first and then the most informative; several seeds only where they matter."""
    planned = [Cell(DENSE, "-", quant) for quant in ("bf16", "int8", "fp8")]
    planned.append(Cell(DENSE, "sparsegpt", "int8"))
    for pattern in PATTERNS:
        planned += [Cell(pattern, "sparsegpt", quant) for quant in ("bf16", "int8", "fp8")]
    for method in ("magnitude", "wanda"):
        planned += [Cell(pattern, method, "int8") for pattern in PATTERNS]
    for seed in SEEDS[1:]:
        planned += [Cell(p, m, "int8", seed) for m in ("sparsegpt", "wanda") for p in PATTERNS]
    planned += [Cell(share, method, "bf16") for share in UNSTRUCTURED for method in METHODS]
    planned += [Cell(budget, BUDGET, "int8", seed) for seed in SEEDS for budget in BUDGETS]
    planned += [
        Cell(p, m, quant) for quant in ("bf16", "fp8") for m in ("wanda", "magnitude") for p in PATTERNS
    ]
    return planned


def distilled_cells() -> list[Cell]:
    """The cells that are distilled, each with the one that it starts from."""
    planned = []
    for quant in ("int8", "fp8"):
        for pattern in DISTILLED:
            planned += [Cell(pattern, "sparsegpt", quant, distilled=by) for by in ("", "kl")]
    return planned


def make(cell: Cell, options: argparse.Namespace) -> Path:
    """The checkpoint of a cell."""
    out: Path = options.folder / "made" / cell.name
    if (out / "config.json").exists():
        return out
    source: Path = options.model
    pruned = cell.pattern != DENSE
    rotated = "on" if pruned else "auto"
    if cell.quant == "bf16" and not pruned:
        return source
    calibration = Calibration(
        str(options.calibration),
        options.samples,
        WINDOW,
        options.device,
        finetune=options.finetune,
        rotate=rotated if options.rotate else "off",
        resume=True,
        distill=str(options.text) if cell.distilled else None,
        minutes=options.minutes if cell.distilled else None,
    )
    if cell.quant == "bf16":
        float_prune.write_pruned(source, out, cell.pattern, cell.method, calibration, cell.seed)
        return out
    plain = cell.method in ("-", "magnitude")
    budget = parse_budget(cell.pattern) if cell.method == BUDGET else None
    convert_options = ConvertOptions(
        MIDDLE if budget else parse_pattern(cell.pattern),
        cell.quant,
        method="magnitude" if plain else "sparsegpt" if budget else cell.method,
        budget=budget,
        calibration=None if plain else calibration,
        seed=cell.seed,
    )
    report = convert(source, out, convert_options)
    if report.distilled:
        print(f"# {cell.name}: {report.distilled.summary}; {report.distilled}")
    if report.budget:
        (options.folder / "logs" / f"{cell.name}.json").write_text(json.dumps(report.budget.to_json()))
    return out


def zeros_and_speeds(folder: Path) -> tuple[str, str, str]:
    """Return the share of a checkpoint's linear weights that its patterns make zero, and how fast these layers are.

    That is over vLLM's dense ones, by `slidesparse.convert.times`, in steps of PREFILL and of DECODE tokens; "" for a
    checkpoint that is not quantized.
    """
    checkpoint = Checkpoint.open(folder)
    metadata = Metadata.of_config(checkpoint.quantization_config())
    if metadata is None:
        return "", "", ""
    family, times = family_of(checkpoint.config), LayerTimes.of(DEFAULT_GPU)
    names = family.layers(checkpoint.tensors)
    grouped = {name: group for group in family.groups(names) for name in group}
    zeros, weights = 0.0, 0
    spent = {(tokens, sparse): 0.0 for tokens in (PREFILL, DECODE) for sparse in (False, True)}
    for unit in {grouped.get(name, (name,)) for name in names}:
        specs = [checkpoint.require(name + WEIGHT) for name in unit]
        n, k = sum(spec.rows for spec in specs), specs[0].columns
        entry = metadata.layers.get(unit[0])
        pattern = entry.pattern if entry and entry.pattern.length else None
        weights += n * k
        zeros += n * k * (1 - float(pattern.density)) if pattern else 0
        dtype = "int8" if specs[0].dtype == "I8" else "fp8"
        for tokens, sparse in spent:
            us = times.us(dtype, pattern, (n, k), tokens) if sparse else times.stock_us(dtype, (n, k), tokens)
            spent[tokens, sparse] += us
    speeds = (f"{spent[tokens, False] / spent[tokens, True]:.4f}" for tokens in (PREFILL, DECODE))
    return f"{zeros / weights:.4f}", *speeds


def parse_budget(text: str) -> Budget:
    """Return the budget of one of BUDGETS."""
    goal, share = text.split()
    part = parse_percent(goal, share)
    return Budget(zeros=part) if goal == "zeros" else Budget(max_loss=part)


def score(cell: Cell, options: argparse.Namespace, ids: list[list[int]], out: Path) -> None:
    """Make a cell's checkpoint, serve it, and save vLLM's scores of ``ids``."""
    started = time.monotonic()
    checkpoint = make(cell, options)
    gc.collect()
    if options.device == "cuda":
        torch.cuda.empty_cache()
    converted = time.monotonic()
    request = {"model": str(checkpoint), "ids": ids, "top": 1, "options": options.engine}
    arrays = worker.perplexity(request)
    partial = out.with_suffix(".partial.npz")
    np.savez(partial, **arrays)
    partial.rename(out)
    print(
        f"# {cell.name}: made in {converted - started:.1f} s, scored in {time.monotonic() - converted:.1f} s"
    )


def start(cell: Cell, options: argparse.Namespace, ids: list[list[int]]) -> int:
    """The process of a cell."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        os.setsid()  # a process group, so that it can be ended with its children
        with (options.folder / "logs" / f"{cell.name}.log").open("w") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        score(cell, options, ids, options.folder / "scores" / f"{cell.name}.npz")
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


class Table:
    """The CSV and the scores that its rows are computed from."""

    def __init__(self, options: argparse.Namespace, texts: dict[str, list[list[int]]]) -> None:
        self._options, self._texts = options, texts
        self._rows: list[dict[str, str]] = []
        if options.out.exists():
            with options.out.open(newline="") as file:
                self._rows = list(csv.DictReader(file))
        self._waiting: list[Cell] = []

    def has(self, cell: Cell) -> bool:
        """Whether its rows are there."""
        return any(tuple(row[name] for name in (*FIELDS[:4], "distilled")) == cell.key for row in self._rows)

    def scored(self, cell: Cell) -> Scored | None:
        """The scores that vLLM gave in a cell's process."""
        path = self._options.folder / "scores" / f"{cell.name}.npz"
        if not path.exists():
            return None
        served_line = SERVED_LINE.search(
            (self._options.folder / "logs" / f"{cell.name}.log").read_text(errors="replace")
        )
        with np.load(path) as arrays:
            return Scored(
                {name: arrays[name] for name in arrays.files}, served_line[1] if served_line else ""
            )

    def add(self, cell: Cell) -> None:
        """Append the rows of a cell, and of those that were waiting for the reference."""
        self._waiting.append(cell)
        reference = self.scored(Cell(DENSE, "-", "bf16"))
        if reference is None:
            return
        for waiting in [cell for cell in self._waiting if not self.has(cell)]:
            scored = self.scored(waiting)
            assert scored
            if (waiting.quant == "bf16") == bool(scored.served_by):
                raise SystemExit(
                    f"{waiting.name} was served by {scored.served_by or 'vLLM itself'}; see its log"
                )
            self._rows += [self._row(waiting, text, scored, reference) for text in self._texts]
        self._waiting = []
        partial = self._options.out.with_suffix(".partial")
        with partial.open("w", newline="") as file:
            writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(self._rows)
        partial.rename(self._options.out)

    def _row(self, cell: Cell, text: str, scored: Scored, reference: Scored) -> dict[str, str]:
        ids, start = self._texts[text], 0
        for name, others in self._texts.items():
            if name == text:
                break
            start += sum(len(window) - 1 for window in others)
        part = slice(start, start + sum(len(window) - 1 for window in ids))
        parts = [Scored({n: a[part] for n, a in s.arrays.items()}, s.served_by) for s in (scored, reference)]
        summary = summarize(cell.name, DENSE, ids, *parts)
        assert summary.comparison
        delta, ppl = summary.comparison.delta_pct, summary.perplexity
        figures = (ppl.value, delta.value, delta.low, delta.high)
        values: list[Any] = [
            *cell.key[:4],
            *(f"{value:.4f}" for value in figures),
            TEXTS[text],
            cell.distilled,
        ]
        values += [f"{ppl.low:.4f}", f"{ppl.high:.4f}", f"{summary.comparison.top1.value:.4f}"]
        values += [summary.windows, summary.tokens, summary.served_by]
        values += cell.calibrated(self._options.samples, self._options.finetune)
        values += zeros_and_speeds(make(cell, self._options))
        return dict(zip(FIELDS, map(str, values), strict=True))


def run(todo: list[Cell], options: argparse.Namespace, ids: list[list[int]], table: Table) -> list[Cell]:
    """Score cells, ``options.jobs`` at a time; those that failed."""
    waiting, running, failed = list(todo), dict[int, tuple[Cell, float]](), list[Cell]()
    limit = CELL_SECONDS + (60 * options.minutes if options.distill else 0)
    while waiting or running:
        while waiting and len(running) < options.jobs:
            cell = waiting.pop(0)
            running[start(cell, options, ids)] = (cell, time.monotonic())
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            for late in [p for p, (_, since) in running.items() if time.monotonic() - since > limit]:
                with suppress(ProcessLookupError):
                    os.killpg(late, signal.SIGKILL)
            time.sleep(0.05)
            continue
        if pid not in running:
            continue  # not a cell: a child of vLLM's import or of a cell, inherited by this process
        cell, since = running.pop(pid)
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # files that it may have left
        seconds = time.monotonic() - since
        if status:
            failed.append(cell)
            print(
                f"{cell.name} failed after {seconds:.0f} s; see its log in {options.folder / 'logs'}",
                flush=True,
            )
        else:
            table.add(cell)
            print(f"{cell.name} {seconds:.1f} s, {len(waiting)} to start", flush=True)
    return failed


def import_vllm() -> None:
    """Import everything that engines need, unless that would initialize CUDA."""
    import vllm
    from vllm.model_executor.models.llama import LlamaForCausalLM
    from vllm.platforms import current_platform

    # otherwise vLLM starts a process to query the GPU
    vllm.ModelRegistry.register_model("LlamaForCausalLM", LlamaForCausalLM)
    with suppress(ImportError):  # the cells import them then
        if current_platform.is_cuda():
            import vllm.v1.attention.backends.flash_attn
            import vllm.v1.worker.gpu.model_runner
            import vllm.v1.worker.gpu_worker
        else:
            import vllm.v1.worker.cpu_worker
    if torch.cuda.is_initialized():
        raise SystemExit("importing vLLM has initialized CUDA: no forked process could use it")


def main() -> None:
    """Score what is missing; 1 when something failed."""
    os.environ.update(ENVIRONMENT)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path, help="for checkpoints, logs and scores")
    parser.add_argument("--model", type=Path, required=True, help="the dense checkpoint")
    parser.add_argument("--data", type=Path, required=True, help="eval.npz of corpus.py")
    parser.add_argument("--out", type=Path, required=True, help="the CSV")
    parser.add_argument(
        "--distill",
        type=Path,
        help="folder of corpus.py: distill on its text for conversion, and score the results",
    )
    parser.add_argument("--minutes", type=float, default=MINUTES, help="of distillation per cell")
    parser.add_argument("--jobs", type=int, default=1, help="cells at a time")
    parser.add_argument("--device", default="cuda" if torch.cuda.device_count() else "cpu")
    parser.add_argument("--only", help="NAME,NAME,...: these cells alone, such as 6_8-sparsegpt-int8-0")
    parser.add_argument("--samples", type=int, default=SAMPLES, help="calibration windows")
    parser.add_argument("--finetune", type=int, default=EPOCHS, help="epochs of fine-tuning after sparsegpt")
    parser.add_argument(
        "--rotate", action="store_true", help="rotate models before pruning; INT8 and FP8 cells only"
    )
    options = parser.parse_args()
    for name in ("made", "logs", "scores"):
        (options.folder / name).mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    options.calibration = options.folder / "calibration.npy"
    with np.load(options.data) as stored:
        np.save(options.calibration, stored["calibration"].astype(np.int32))
        texts = {name: stored[name].astype(int).tolist() for name in TEXTS if name in stored.files}
    ids = [window for windows in texts.values() for window in windows]
    if options.distill:
        options.text = options.folder / "text.npy"
        np.save(options.text, read_stream(options.distill / CONVERSION, "cpu").numpy())
    options.engine = {"max_model_len": WINDOW + 1, "max_num_seqs": 64, "enable_prefix_caching": False}
    options.engine |= GPU_OPTIONS if options.device == "cuda" else CPU_OPTIONS
    table = Table(options, texts)
    selected = distilled_cells() if options.distill else cells()
    if options.only:
        selected = [cell for cell in selected if cell.name in options.only.split(",")]
    if options.rotate:  # float_prune.py does not rotate its models
        selected = [cell for cell in selected if cell.quant != "bf16" or cell.pattern == DENSE]
    todo = [cell for cell in selected if not table.has(cell)]
    reference = Cell(DENSE, "-", "bf16")
    if todo and reference not in todo and table.scored(reference) is None:
        todo.insert(0, reference)
    ready = [cell for cell in todo if table.scored(cell)]
    for cell in ready:
        table.add(cell)
    todo = [cell for cell in todo if cell not in ready]
    if todo:
        import_vllm()
    missing = run(todo, options, ids, table)
    if missing:
        raise SystemExit(f"{len(missing)} cells are missing: {', '.join(cell.name for cell in missing)}")


if __name__ == "__main__":
    main()
