"""The command line: results on stdout, progress and errors on stderr; torch only in commands that need it.

Exit codes: 0 ok, 1 a check failed, 2 usage or unusable input, 3 environment, 130 interrupted.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from slidesparse import __version__
from slidesparse.cli import build, convert, doctor, evaluate, synth, tune
from slidesparse.cli.console import Json, application, out, whole
from slidesparse.errors import FAILED

if TYPE_CHECKING:
    from slidesparse.checkpoint.inspection import CheckpointReport, LayerReport

app = application(
    "Prune language models to N:M patterns such as 6:8 and serve them with vLLM on 2:4 sparse tensor cores.  Start "
    "with doctor, then convert, then vllm serve, which needs no extra flag.",
    name="slidesparse",
)


def main() -> None:
    """Run the ``slidesparse`` command."""
    app()


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
    if as_json:
        print(json.dumps(report.to_json(), indent=2))
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
        table.add_row(*_cells(layer))
    console = whole(table)
    if out.is_terminal and out.width < console.width:
        for layer in report.layers:
            name, shape, dtype, pattern, obeys, broken, size, expansion = _cells(layer)
            out.print(escape(name))
            out.print(f"  {shape} {dtype}, pattern {pattern}, satisfies {obeys}, violations {broken}")
            out.print(f"  {size} bytes, expansion {expansion}")
    else:
        console.print(table)
    for layer in report.layers:
        if layer.first_violation:
            out.print(escape(layer.first_violation), style="red")
    for dtype, count in report.experts.items():
        out.print(f"{count} weights of routed experts in {dtype}")
    if report.unread:
        out.print(f"weights in another tool's format, which are not read: {report.unread}")
    total = sum(layer.bytes for layer in report.layers)
    out.print(f"{len(report.layers)} layers, {total / 1e6:.1f} MB, {report.violations} violations")


def _cells(layer: LayerReport) -> tuple[str, ...]:
    return (
        layer.name,
        f"{layer.out_features} x {layer.in_features}",
        layer.dtype,
        layer.pattern or "-",
        layer.satisfies or "-",
        str(layer.violations) if layer.pattern else "-",
        f"{layer.bytes:,}",
        f"{layer.expansion:.3f}" if layer.expansion else "-",
    )


app.command("doctor")(doctor.doctor)  # in the order of --help
app.command("convert")(convert.convert)
app.command("tune")(tune.tune)
app.command("inspect")(inspect)
app.command("build")(build.build_targets)
app.command("synth")(synth.synth)
app.add_typer(evaluate.app, name="eval")


if __name__ == "__main__":
    main()
