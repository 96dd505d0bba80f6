"""The command ``slidesparse synth``: a checkpoint of random weights."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from slidesparse.cli.console import Layout, byte_progress, show
from slidesparse.pattern import parse_pattern


def synth(
    config: Annotated[
        str,
        typer.Argument(
            help="A config.json, a folder that holds one, or Qwen2.5-7B, Qwen2.5-14B, Llama3.2-1B, Llama3.2-3B,"
            " BitNet-2B; of mixtures Qwen3-30B-A3B, Qwen1.5-MoE-A2.7B, Mixtral-8x7B.",
            metavar="CONFIG",
        ),
    ],
    target: Annotated[Path, typer.Argument(help="The folder to write the checkpoint to.", metavar="OUT")],
    quant: Annotated[
        str,
        typer.Option(
            help="int8 or fp8 for W8A8; or bf16, without --sparsity, for an unquantized model to convert."
        ),
    ] = "int8",
    sparsity: Annotated[
        str | None,
        typer.Option("--sparsity", "-s", help="The sparsity pattern, such as 6:8; by default not pruned."),
    ] = None,
    layout: Layout = "dense",
    layers: Annotated[
        int | None, typer.Option(help="Write only the first N layers of the model.", metavar="N")
    ] = None,
) -> None:
    """Write a checkpoint with random weights and the shapes of a real model, for benchmarks."""
    pattern = None if sparsity is None else parse_pattern(sparsity)
    from slidesparse.synth import synth as run

    with byte_progress() as progress:
        plan = run(
            config, target, quant=quant, pattern=pattern, layout=layout, layers=layers, progress=progress
        )
    architecture, blocks = plan.config["architectures"][0], plan.config["num_hidden_layers"]
    pruned = f"pruned to {pattern}, {layout} layout" if pattern else "not pruned"
    form = quant if quant == "bf16" else f"{quant} W8A8"
    show("model", f"{architecture}, {blocks} layers in {form}, {pruned}")
    show("weights", "random: for measuring speed only, the output is meaningless")
    files = len(plan.checkpoint.files)
    show("size", f"{plan.bytes_out / 1e6:.1f} MB in {files} file{'s' if files > 1 else ''}")
    folder = shlex.quote(str(target))
    show("tokenizer", "a placeholder whose tokens are the words t0, t1, t2, ...")
    if quant == "bf16":
        show("convert", f"slidesparse convert {folder} PRUNED --sparsity 6:8 --calib random")
    show("serve", f"vllm serve {folder} --tokenizer {folder}/tokenizer")
