"""The command ``slidesparse synth``: a checkpoint of random weights."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from slidesparse.cli.console import Layout, byte_progress, out
from slidesparse.pattern import parse_pattern

if TYPE_CHECKING:
    from slidesparse.convert.synth import SynthReport


def synth(
    config: Annotated[
        str,
        typer.Argument(
            help="A config.json, a folder that holds one, or Qwen2.5-7B, Qwen2.5-14B, Llama3.2-1B, Llama3.2-3B,"
            " BitNet-2B.",
            metavar="CONFIG",
        ),
    ],
    target: Annotated[Path, typer.Argument(help="The folder to make.", metavar="OUT")],
    quant: Annotated[
        str,
        typer.Option(help="int8 or fp8 for W8A8; or bf16, without --sparsity, for a float model to convert."),
    ] = "int8",
    sparsity: Annotated[
        str | None,
        typer.Option("--sparsity", "-s", help="The pattern to prune to, such as 6:8; by default none."),
    ] = None,
    layout: Layout = "dense",
    seed: Annotated[int, typer.Option(help="Seed of the random weights.")] = 0,
    layers: Annotated[
        int | None, typer.Option(help="Write only the first N layers of the model.", metavar="N")
    ] = None,
    shard_size: Annotated[
        str, typer.Option(help="Maximum size of a file's tensors, such as 500MB or 4GB.")
    ] = "4GB",
) -> None:
    """Write a checkpoint of random weights in a model's shapes, for measuring speed."""
    pattern = None if sparsity is None else parse_pattern(sparsity)
    from slidesparse.convert.synth import parse_size
    from slidesparse.convert.synth import synth as run

    with byte_progress() as progress:
        report = run(
            config,
            target,
            quant=quant,
            pattern=pattern,
            layout=layout,
            seed=seed,
            layers=layers,
            shard_bytes=parse_size("--shard-size", shard_size),
            progress=progress,
        )
    _summarize(report)


def _summarize(report: SynthReport) -> None:
    pruned = f"pruned to {report.pattern}, {report.layout} layout" if report.pattern else "not pruned"
    if report.replaced:
        out.print(escape(f"config    its own quantization_config ({report.replaced}) is replaced"))
    form = report.quant if report.quant == "bf16" else f"{report.quant} W8A8"
    out.print(f"model     {report.architecture}, {report.layers} layers in {form}, {escape(pruned)}")
    out.print(f"weights   random, seed {report.seed}: for measuring speed, not for answers")
    files = f"{report.files} file{'s' if report.files > 1 else ''}"
    size = f"{report.bytes_out / 1e6:.1f} MB in {files}, {report.seconds:.1f} s, {report.rate:.0f} MB/s"
    out.print(f"bytes     {size}")
    folder = shlex.quote(str(report.out))
    out.print("tokens    one word each, t0 t1 t2 ...: the tokenizer is a placeholder for the model's own")
    if report.quant == "bf16":
        out.print(escape(f"convert   slidesparse convert {folder} PRUNED --sparsity 6:8 --calib random"))
    out.print(escape(f"serve     vllm serve {folder} --tokenizer {folder}/tokenizer"))
