"""The command line: results on stdout, progress and errors on stderr; torch only in commands that need it.

Exit codes: 0 ok, 1 a check failed, 2 usage or unusable input, 3 environment, 130 interrupted.
"""

from __future__ import annotations

import io
import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from slidesparse import __version__
from slidesparse.build.compile import TARGETS, build, cache_folder, target_path
from slidesparse.cli import convert, evaluate, tune
from slidesparse.cli.console import (
    Json,
    Layout,
    application,
    byte_progress,
    err,
    fail,
    note_work,
    out,
    show,
    whole,
)
from slidesparse.errors import ENVIRONMENT, FAILED, EnvironmentFault, SlideSparseError, argument
from slidesparse.pattern import parse_pattern

if TYPE_CHECKING:
    from slidesparse.checkpoint.inspection import CheckpointReport

app = application(
    "Prune language models to N:M patterns such as 6:8 and serve them with vLLM on 2:4 sparse tensor cores.  Start "
    "with doctor, then convert, then vllm serve, which needs no extra flag.",
    name="slidesparse",
)


def main() -> None:
    """Run the ``slidesparse`` command.  Names that the terminal's encoding lacks are printed by their codes."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # None if it was closed
            stream.reconfigure(errors="backslashreplace")
    code: Any = 0
    problem: OSError | None = None
    try:
        app()
    except SystemExit as ended:
        code = ended.code
    except OSError as error:  # of Typer, which prints help and what is wrong with options
        problem, code = error, getattr(error.__context__, "exit_code", 0)
    problem = _flush(sys.stdout) or problem
    if problem and not code:
        code = ENVIRONMENT
        if isinstance(problem, BrokenPipeError):  # its reader, such as `head`, has closed the pipe
            code = FAILED
        else:
            err.print(f"[bold red]error:[/] {problem.strerror}: while writing")
    _flush(sys.stderr)
    sys.exit(code)


def _flush(stream: TextIO | None) -> OSError | None:
    """Write what a stream has buffered; return why it cannot be written, and drop it, as Python fails with it later."""
    try:
        if stream:
            stream.flush()
    except OSError as error:
        assert stream
        with open(os.devnull, "w") as nothing:
            os.dup2(nothing.fileno(), stream.fileno())
        return error
    return None


@app.callback(invoke_without_command=True)
def _top(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        out.print(f"slidesparse {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        raise typer.Exit


def doctor(
    model: Annotated[
        str | None,
        typer.Argument(
            help="Ask vLLM, without weights, how it serves a checkpoint: a folder, or ORG/NAME on the Hub."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show what this machine can run, what is missing, and how to get it.  Without MODEL, always exits 0.

    With MODEL: exit 0 if SlideSparse serves it here, 1 if not, 2 if it is invalid, 3 if the machine lacks something.
    """
    from slidesparse.doctor import announce_compiling, collect, examine, lines, render

    announce_compiling()
    if model is None:
        machine = collect()
        print(json.dumps(machine, indent=2) if as_json else render(machine))
        return
    from slidesparse.checkpoint.hub import local_folder

    report = examine(model, local_folder(model))
    note_work(model)
    if as_json:
        print(json.dumps({**asdict(report), "patterns": report.patterns}, indent=2))
    else:
        for line in lines(report):
            out.print(escape(line))
    raise typer.Exit(report.code)


def inspect(
    folder: Annotated[
        str, typer.Argument(help="Any checkpoint folder, or ORG/NAME on the Hub.", metavar="DIR")
    ],
    as_json: Json = False,
) -> None:
    """Show the shape, pattern and size of each layer; exit 1 if a layer violates its pattern."""
    from slidesparse.checkpoint.hub import local_folder
    from slidesparse.checkpoint.inspection import inspect as run

    report = run(local_folder(folder))
    note_work(folder)
    if as_json:
        print(json.dumps({**asdict(report), "violations": report.violations}, indent=2))
    else:
        _show_layers(report)
    raise typer.Exit(FAILED if report.violations else 0)


def _show_layers(report: CheckpointReport) -> None:
    claimed = f"{report.pattern or 'none declared'}{f' ({report.layout} layout)' if report.layout else ''}"
    out.print(escape(f"{report.folder}: pattern {claimed}"))
    table = Table("layer", box=SIMPLE_HEAD, pad_edge=False)
    for name in ("N x K", "dtype", "pattern", "satisfies", "violations", "bytes", "expansion"):
        table.add_column(name, justify="right", no_wrap=True)
    for layer in report.layers:
        table.add_row(
            layer.name,
            f"{layer.out_features} x {layer.in_features}",
            layer.dtype,
            layer.pattern or "-",
            layer.satisfies or "-",
            str(layer.violations) if layer.pattern else "-",
            f"{layer.bytes:,}",
            f"{layer.expansion:.3f}" if layer.expansion else "-",
        )
    whole(table).print(table)
    for layer in report.layers:
        if layer.first_violation:
            out.print(escape(layer.first_violation), style="red")
    for dtype, count in report.experts.items():
        out.print(f"{count} weights of routed experts in {dtype}")
    for pattern, count in report.expert_patterns.items():
        out.print(f"{count} of them satisfy {pattern}")
    if report.unread:
        out.print(f"weights in another tool's format, which are not read: {report.unread}")
    total = sum(layer.bytes for layer in report.layers)
    out.print(f"{len(report.layers)} layers, {total / 1e6:.1f} MB, {report.violations} violations")


def build_targets(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME]...", help=f"What to compile: {', '.join(TARGETS)}. Default: all."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Compile the kernels ahead of time instead of when vLLM first starts.  Needs no GPU.

    If one cannot be compiled, the others still are, and the command prints the reason and exits with 3.
    """
    unknown = [name for name in names or () if name not in TARGETS]
    if unknown:
        raise SlideSparseError(f"{unknown[0]!r} is not a build target; choose from {', '.join(TARGETS)}")
    results: list[dict[str, Any]] = []
    failed: list[str] = []
    for name in names or TARGETS:
        began = time.monotonic()
        try:
            target = target_path(name)
            state = "up to date" if target.is_file() else "built"
            if state == "built":
                err.print(f"building the {TARGETS[name].title} ...")
            result = {"state": state, "path": str(build(name))}
        except EnvironmentFault as error:
            failed.append(f"the {TARGETS[name].title}: {error}")
            result = {"state": "failed", "what": error.what, "remedy": error.remedy}
        results.append({"name": name, **result, "seconds": round(time.monotonic() - began, 1)})
        if not as_json and "path" in result:
            out.print(escape(f"{name:<12} {state:<10} {results[-1]['seconds']:>6} s  {result['path']}"))
    if as_json:
        print(json.dumps({"cache": str(cache_folder()), "targets": results}, indent=2))
    if failed:  # the JSON document has the reasons
        fail(ENVIRONMENT, "could not compile " + "\n".join(failed))


def synth(
    config: Annotated[
        str,
        typer.Argument(
            help="A config.json, a folder that holds one, or Qwen2.5-7B, Qwen2.5-14B, Llama3.1-8B, Llama3.2-1B,"
            " Llama3.2-3B, BitNet-2B; of mixtures Qwen3-30B-A3B, Qwen1.5-MoE-A2.7B, Mixtral-8x7B.",
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
        typer.Option(
            "--sparsity",
            "-s",
            help="The sparsity pattern, such as 6:8, of routed experts, too; by default not pruned.",
        ),
    ] = None,
    layout: Layout = "dense",
    layers: Annotated[
        int | None, typer.Option(help="Write only the first N layers of the model.", metavar="N")
    ] = None,
    layer: Annotated[
        list[str] | None,
        typer.Option(
            help="Another pattern for layers whose name matches, as in convert, such as 'lm_head=dense'; may be "
            "repeated.",
            metavar="REGEX=PATTERN",
        ),
    ] = None,
) -> None:
    """Write a checkpoint with random weights and the shapes of a real model, for benchmarks."""
    pattern = None if sparsity is None else parse_pattern(sparsity)
    from slidesparse.convert.options import parse_layer_pattern
    from slidesparse.synth import synth as run

    of_layers = tuple(map(parse_layer_pattern, layer or ()))
    with byte_progress() as progress:
        plan, skeleton = run(
            config,
            target,
            quant=quant,
            layout=layout,
            pattern=pattern,
            layers=layers,
            layer_patterns=of_layers,
            progress=progress,
        )
    pruned = f"pruned to {pattern}, {layout} layout" if pattern else "not pruned"
    pruned += ", but for --layer" * bool(layer)
    form = quant if quant == "bf16" else f"{quant} W8A8"
    show("model", f"{type(skeleton.model).__name__}, {len(skeleton.blocks)} layers in {form}, {pruned}")
    show("weights", "random: for measuring speed only, the output is meaningless")
    files = len(plan.checkpoint.files)
    show("size", f"{plan.bytes_out / 1e6:.1f} MB in {files} file{'s' if files > 1 else ''}")
    folder = argument(target)
    show("tokenizer", "a placeholder whose tokens are the words t0, t1, t2, ...")
    if quant == "bf16":
        show("convert", f"slidesparse convert {folder} PRUNED --sparsity 6:8 --calib random")
    show("serve", f"vllm serve {folder} --tokenizer {folder}/tokenizer")


app.command("doctor")(doctor)  # in the order of --help
app.command("convert")(convert.convert)
app.command("tune")(tune.tune)
app.command("inspect")(inspect)
app.command("build")(build_targets)
app.command("synth")(synth)
app.add_typer(evaluate.app, name="eval")


if __name__ == "__main__":
    main()
