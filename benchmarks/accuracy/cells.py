"""Convert models in many ways, score each as vLLM serves it, and keep the figures in a table.

A cell is a line of a file: the name of a model and the options of ``slidesparse convert``, or none for the model itself
in BF16::

    smollm2
    smollm2 --sparsity dense --calib own --samples 256 --seqlen 1024
    smollm2 --sparsity 6:8 --calib own --samples 256 --seqlen 1024

The word ``own`` in the options stands for text that the model wrote, and ``--seed 1``, which is no option of
``convert``, for another order of it: `convert` then calibrates on other samples.

WORK holds the models (WORK/smollm2, by `slidesparse.packaged`), their text, WORK/smollm2.own.npy and
WORK/smollm2.held_out.npy, and WORK/results.jsonl: a line for each finished cell with its figures and the negative
log-likelihood of every window, so that cells can be compared in pairs.
"""

from __future__ import annotations

import csv
import io
import json
import math
import shlex
import shutil
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

from benchmarks.accuracy import humaneval
from benchmarks.accuracy.texts import (
    OWN,
    PYTHON,
    WIKITEXT,
    WINDOW,
    Engine,
    Ids,
    windows,
)
from benchmarks.records import publish
from slidesparse.calibrate.samples import python_reference
from slidesparse.calibrate.task import MINUTES
from slidesparse.checkpoint.metadata import Metadata
from slidesparse.checkpoint.tokens import automatic_tokenizer
from slidesparse.errors import SlideSparseError
from slidesparse.files import locked
from slidesparse.packaged import CODERS, MODELS
from slidesparse.pattern import parse_pattern

COLUMNS = (
    *("model", "quant", "pattern", "method", "zeros", "minutes", "seed"),
    *("text", "perplexity", "delta_pct", "humaneval"),
)
DENSE, BF16, NONE = "dense", "bf16", "-"
HUMANEVAL = "humaneval"
DRAWS = 2000  # of the bootstrap
MAX_LOSS = "--max-loss"
SEED, DISTILL = "--seed", "--distill"
LISTED = {MAX_LOSS, SEED, DISTILL, "--minutes", "--sparsity", "--quant", "--calib", "--samples", "--seqlen"}


class CellError(SlideSparseError, ValueError):
    """A line of a file of cells is not valid."""


@dataclass(frozen=True)
class Cell:
    """A model, and how it is converted; without options it is served as it is."""

    model: str
    options: tuple[str, ...]

    @classmethod
    def parse(cls, line: str) -> Cell:
        """Parse a line of a file of cells.  Raises CellError."""
        model, *options = shlex.split(line)
        if model not in MODELS:
            raise CellError(f"{line!r} begins with none of the models {', '.join(MODELS)}")
        return cls(model, tuple(options))

    def _option(self, name: str, default: str = "") -> str:
        values = [b for a, b in zip(self.options, self.options[1:], strict=False) if a == name]
        return values[-1] if values else default

    @property
    def calibrated(self) -> bool:
        """Whether calibration data are used."""
        return bool(self._option("--calib"))

    @property
    def line(self) -> str:
        """The line of a file of cells."""
        return shlex.join((self.model, *self.options))

    @property
    def distilled(self) -> bool:
        """Whether the remaining weights are trained, for which no other conversion runs on the GPU."""
        return bool(self._option(DISTILL))

    def arguments(self, work: Path, folder: Path) -> list[str]:
        """Return the options of ``convert``; text in the order of the seed is written to ``folder``."""
        words, own = list(self.options), work / f"{self.model}.own.npy"
        if seed := self._option(SEED):
            at = words.index(SEED)
            del words[at : at + 2]
            ids, own = np.load(own), folder / "own.npy"
            np.save(own, np.random.default_rng(int(seed)).permutation(ids))
        return [str(own) if word == OWN else word for word in words]

    @cached_property
    def columns(self) -> dict[str, str]:
        """The columns of the table that follow from the options."""
        goal = f"{MAX_LOSS[2:]} {self._option(MAX_LOSS)}" if self._option(MAX_LOSS) else ""
        pattern = self._option("--sparsity", DENSE)
        quant = self._option("--quant", "int8") if self.options else BF16
        return {
            "model": self.model,
            "quant": quant,
            "pattern": goal or (pattern if pattern == DENSE else parse_pattern(pattern).ratio),
            "method": self._method,
            "minutes": self._option("--minutes", f"{MINUTES:g}") if self.distilled else "0",
            "seed": self._option(SEED, "0") if self.options else NONE,
        }

    @property
    def _method(self) -> str:
        """The method, text other than the model's own, and options that no other column shows.

        Such as ``sparsegpt rotate off``, or ``distilled on own and books`` for ``--distill own --distill books.jsonl``.
        """
        pruned = self._option("--sparsity") != DENSE
        if not self.options or not (self.calibrated or pruned):
            return NONE
        method = ("sparsegpt" if self.calibrated else "magnitude") if pruned else "calibrated"
        method = "distilled" if self.distilled else method
        pairs = [*zip(("", *self.options), self.options, strict=False)]
        rest = [word for before, word in pairs if not {before, word} & LISTED]
        name = DISTILL if self.distilled else "--calib"
        texts = [Path(word).stem for before, word in pairs if before == name]
        on = ["on", " and ".join(texts)] if {*texts} - {OWN} else []
        return " ".join([method, *on, *(word.removeprefix("--").rpartition("/")[2] for word in rest)])


def read_cells(path: Path) -> list[Cell]:
    """Read a file of cells; empty lines and those that begin with # are skipped.  Raises CellError."""
    lines = (line.strip() for line in path.read_text(encoding="utf-8").splitlines())
    return list(dict.fromkeys(Cell.parse(line) for line in lines if line and not line.startswith("#")))


@dataclass(frozen=True)
class Texts:
    """The texts and problems on which cells are scored."""

    work: Path
    wikitext: Path | None  # None leaves the text out
    code: Path | None  # of HumanEval; None: that of the package
    windows: int = 200

    def of(self, model: str) -> dict[str, list[Ids]]:
        """Return the windows of each text.  Raises CellError without the model's own text."""
        held_out = self.work / f"{model}.held_out.npy"
        if not held_out.exists():
            raise CellError(f"{held_out} is missing: python -m benchmarks accuracy prepare {model} WORK")
        tokenizer = automatic_tokenizer(self.work / model)
        found = {OWN: np.load(held_out).reshape(-1, WINDOW)[: self.windows].tolist()}
        if self.wikitext:
            found[WIKITEXT] = windows(tokenizer, self.wikitext.read_text(encoding="utf-8"), self.windows)
        return found | {PYTHON: windows(tokenizer, "\n\n".join(python_reference()), self.windows)}


def measure(
    cell: Cell, texts: Texts, engine: Engine, folder: Path, converted: Callable[[], None]
) -> dict[str, Any]:
    """Convert and score a cell; return its figures.

    Args:
        folder: for the checkpoint, which is deleted.
        converted: called when the conversion has ended.

    Raises SlideSparseError when a step fails.
    """
    source = model = texts.work / cell.model
    figures: dict[str, Any] = {"line": cell.line, "zeros": 0.0}
    try:
        if cell.options:
            folder.mkdir(parents=True)
            model, began = folder / "checkpoint", time.monotonic()
            log = engine.convert([str(source), str(model), *cell.arguments(texts.work, folder)])
            figures |= {"seconds": time.monotonic() - began, "zeros": 100 * zeros(model), "log": log}
    finally:
        converted()
    found, tokenizer = texts.of(cell.model), automatic_tokenizer(source)
    problems = humaneval.problems(texts.code) if cell.model in CODERS else []
    prompts = [humaneval.prompt_ids(tokenizer, problem) for problem in problems]
    greedy = {
        "temperature": 0.0,
        "stop_token_ids": [tokenizer.eos_token_id],
        "max_tokens": humaneval.MAX_TOKENS,
    }
    score = [ids for each in found.values() for ids in each]
    nll, outputs = engine.run(model, score, prompts, [greedy] * len(prompts))
    parts = np.split(nll, np.cumsum([len(each) for each in found.values()])[:-1])
    figures["nll"] = {name: part.round(5).tolist() for name, part in zip(found, parts, strict=True)}
    if problems:
        answers = [tokenizer.decode(ids, skip_special_tokens=True) for ids in outputs]
        figures[HUMANEVAL] = humaneval.pass_at_1(problems, answers)
    return figures


def zeros(folder: Path) -> float:
    """Return the share of weights of a converted checkpoint's quantized layers that patterns prune."""
    block = json.loads((folder / "config.json").read_text(encoding="utf-8"))["quantization_config"]
    metadata = Metadata.of_config(block)
    layers = metadata.layers if metadata else {}
    densities = {name: float(entry.pattern.density) for name, entry in layers.items()}
    total = pruned = 0.0
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "np") as file:
            names = set(file.keys())
            for name in names:
                layer = name.removesuffix(".weight")
                if f"{name}_scale" in names:
                    n, k = file.get_slice(name).get_shape()
                    total += n * k
                    pruned += n * k * (1 - densities.get(layer, 1.0))
    return pruned / total if total else 0.0


class _Queue:
    """Cells to measure, in order.  A GPU on which a model is distilled runs no other conversion."""

    def __init__(self, cells: Sequence[Cell]) -> None:
        self._cells, self._changed = deque(cells), threading.Condition()
        self._running: dict[str | None, list[Cell]] = defaultdict(list)  # conversions of each GPU

    def take(self, gpu: str | None) -> Cell | None:
        """Return the next cell when a GPU is free for it, or None if none is left."""
        with self._changed:
            while self._cells:
                running = self._running[gpu]
                if not (running and (self._cells[0].distilled or running[0].distilled)):
                    running.append(self._cells[0])
                    return self._cells.popleft()
                self._changed.wait()
            self._changed.notify_all()
            return None

    def stop(self) -> None:
        """Give no further cells."""
        with self._changed:
            self._cells.clear()
            self._changed.notify_all()

    def converted(self, cell: Cell, gpu: str | None) -> None:
        """Take note that a conversion has ended."""
        with self._changed:
            self._running[gpu].remove(cell)
            self._changed.notify_all()


def run(
    cells: Sequence[Cell],
    texts: Texts,
    gpus: Sequence[str],
    each: int,
    table: Path,
    say: Callable[[str], None],
) -> list[str]:
    """Measure the cells that are not done, ``each`` at a time on every GPU, and write the table after each of them.

    Args:
        gpus: values of CUDA_VISIBLE_DEVICES; none for a machine without a GPU.

    Returns a line for each cell that failed.  Raises CellError while another run uses the folder, or without a text.
    """
    done = load(texts.work)
    left = [cell for cell in cells if cell not in done]
    for model in dict.fromkeys(cell.model for cell in left):
        texts.of(model)  # what is missing is said before the first conversion
    waiting = _Queue(left)
    failures, lock = list[str](), threading.Lock()

    def work(number: int, gpu: str | None) -> None:
        engine = Engine(gpu, texts.work / "cache" / str(number))
        folder = texts.work / "running" / str(number)
        while cell := waiting.take(gpu):
            shutil.rmtree(folder, ignore_errors=True)
            try:
                figures = measure(cell, texts, engine, folder, partial(waiting.converted, cell, gpu))
            except Exception as error:  # the others go on
                failures.append(f"{cell.line}: {error}")
                say(failures[-1])
                continue
            with lock:
                with results(texts.work).open("a", encoding="utf-8") as file:
                    file.write(json.dumps(figures) + "\n")
                write_table(cells, texts.work, table)
            say(f"{cell.line}: done")
        shutil.rmtree(folder, ignore_errors=True)

    slots = [gpu for _ in range(each) for gpu in gpus or (None,)]
    busy = CellError(f"another run measures cells in {texts.work}; wait for it or stop it")
    with locked(texts.work, busy), ThreadPoolExecutor(len(slots)) as pool:
        try:
            list(pool.map(work, range(len(slots)), slots))
        finally:  # when interrupted, only the cells that are being measured are finished
            waiting.stop()
    write_table(cells, texts.work, table)
    return failures


def perplexity(nll: Sequence[float]) -> float:
    """Return the perplexity of windows of equal length from their mean negative log-likelihoods in nats."""
    return math.exp(float(np.mean(nll)))


def results(work: Path) -> Path:
    """Return the file with a line of JSON for each finished cell."""
    return work / "results.jsonl"


def load(work: Path) -> dict[Cell, dict[str, Any]]:
    """Return the figures of the cells that are done."""
    path = results(work)
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else ()
    return {Cell.parse(figures["line"]): figures for figures in map(json.loads, lines)}


def find_baseline(cell: Cell, done: Sequence[Cell]) -> Cell | None:
    """Return the cell over which a cell's loss counts, if there is one.

    That is the unpruned model of the same quant, calibrated if this one is, preferably with the same other options and
    seed; for an unpruned one, the model in BF16.
    """
    model, quant, pattern, method, _, seed = cell.columns.values()
    wanted = (model, BF16 if pattern == DENSE else quant, DENSE)
    kind = "calibrated" if pattern != DENSE and cell.calibrated else NONE
    rest = method.partition(" ")[2]

    def distance(other: Cell) -> tuple[bool, ...]:
        its_rest = other.columns["method"].partition(" ")[2]
        return its_rest != rest, bool(its_rest), other.columns["seed"] != seed

    columns = {other: tuple(other.columns.values()) for other in done if other != cell}
    found = [
        other for other, its in columns.items() if its[:3] == wanted and its[3].partition(" ")[0] == kind
    ]
    return min(found, key=distance, default=None)


def table_rows(cells: Sequence[Cell], work: Path) -> list[dict[str, str]]:
    """Return the rows of the table: one for each cell and text, and one for HumanEval."""
    done, rows = load(work), []
    for cell in (cell for cell in cells if cell in done):
        figures, base = done[cell], find_baseline(cell, list(done))
        common = {**cell.columns, "zeros": f"{figures['zeros']:.1f}"}
        for text, nll in figures["nll"].items():
            row = {**common, "text": text, "perplexity": f"{perplexity(nll):.3f}"}
            if base and text in done[base]["nll"]:
                row["delta_pct"] = f"{100 * (perplexity(nll) / perplexity(done[base]['nll'][text]) - 1):.2f}"
            rows.append(row)
        if passed := figures.get(HUMANEVAL):
            score = f"{100 * sum(passed) / len(passed):.1f}"
            rows.append({**common, "text": HUMANEVAL, "humaneval": score})
    return rows


def write_table(cells: Sequence[Cell], work: Path, table: Path) -> None:
    """Write the table of the cells that are done."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n", restval="")
    writer.writeheader()
    writer.writerows(table_rows(cells, work))
    publish(table, text.getvalue())


def compare(cell: Cell, base: Cell, work: Path) -> dict[str, tuple[float, float, float]]:
    """Return the increase in perplexity of a cell over another in percent by text, and its 95% interval.

    The interval is the bootstrap's over pairs of windows.
    """
    figures, found = load(work), {}
    for text, nll in figures[cell]["nll"].items():
        pairs = np.subtract(nll, figures[base]["nll"][text])
        drawn = np.random.default_rng(0).integers(0, len(pairs), (DRAWS, len(pairs)))
        low, high = np.quantile(pairs[drawn].mean(1), (0.025, 0.975))
        value, low, high = 100 * np.expm1((pairs.mean(), low, high))
        found[text] = float(value), float(low), float(high)
    return found
