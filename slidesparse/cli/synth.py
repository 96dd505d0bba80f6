"""The command ``slidesparse synth``: a checkpoint of random weights."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from slidesparse.cli.console import Layout, byte_progress, show
from slidesparse.pattern import parse_pattern

if TYPE_CHECKING:
    from slidesparse.synth import SynthReport


def synth(
    config: Annotated[
        str,
        typer.Argument(
            help="A config.json, a folder that holds one, or Qwen2.5-7B, Qwen2.5-14B, Llama3.2-1B, Llama3.2-3B,"
            " BitNet-2B.",
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
        report = run(
            config,
            target,
            quant=quant,
            pattern=pattern,
            layout=layout,
            layers=layers,
            progress=progress,
        )
    _summarize(report)


def _summarize(report: SynthReport) -> None:
    pruned = f"pruned to {report.pattern}, {report.layout} layout" if report.pattern else "not pruned"
    form = report.quant if report.quant == "bf16" else f"{report.quant} W8A8"
    show("model", f"{report.architecture}, {report.layers} layers in {form}, {pruned}")
    show("weights", "random: for measuring speed only, the output is meaningless")
    files = f"{report.files} file{'s' if report.files > 1 else ''}"
    speed = f"{report.seconds:.1f} s"
    show("size", f"{report.bytes_out / 1e6:.1f} MB in {files}, {speed}")
    folder = shlex.quote(str(report.out))
    show("tokenizer", "a placeholder whose tokens are the words t0, t1, t2, ...")
    if report.quant == "bf16":
        show("convert", f"slidesparse convert {folder} PRUNED --sparsity 6:8 --calib random")
    show("serve", f"vllm serve {folder} --tokenizer {folder}/tokenizer")
