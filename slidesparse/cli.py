"""The command line: results on stdout, progress and errors on stderr; torch only in commands that need it.

Exit codes: 0 ok, 1 a check failed, 2 usage or unusable input, 3 environment, 130 interrupted.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from slidesparse import __version__, cli_bench, cli_convert, cli_e2e, cli_eval, cli_synth
from slidesparse.backends import INSTALL
from slidesparse.cli_bench import fail

if TYPE_CHECKING:
    from slidesparse.inspection import CheckpointReport, LayerReport
    from slidesparse.pattern import SlidePattern

FAILED, USAGE, ENVIRONMENT, INTERRUPTED = 1, 2, 3, 130
MOST_COLUMNS = 1000  # of characters, in a table

app = typer.Typer(
    name="slidesparse",
    help="(2N-2):2N structured sparsity on 2:4 sparse tensor cores, for vLLM.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
bench_app = typer.Typer(help="Measure this machine.", no_args_is_help=True)
app.add_typer(bench_app, name="bench")

out = Console(highlight=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, soft_wrap=True)

Json = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]
Sparsity = Annotated[
    str, typer.Option("--sparsity", "-s", help="The pattern: 6:8, or 2_8, which is the same.")
]


def main() -> None:
    """The ``slidesparse`` command."""
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


@contextmanager
def _explained() -> Iterator[None]:
    """Errors that a user can act on become one message and an exit code."""
    from slidesparse.pattern import PatternError

    try:
        from slidesparse.architectures import ArchitectureError
        from slidesparse.calibrate.errors import CalibrationError, MissingPackageError
        from slidesparse.checkpoint import CheckpointError
        from slidesparse.metadata import MetadataError
        from slidesparse.publish import SpaceError
        from slidesparse.stored import DamagedError
    except ImportError as error:
        missing = (getattr(error, "name", None) or "").split(".")[0]
        if missing not in ("torch", "numpy"):
            raise
        fail(
            ENVIRONMENT,
            f"this command needs {missing}, which cannot be imported ({error}): {INSTALL}",
        )
    try:
        yield
    except DamagedError as error:
        fail(FAILED, error)
    except (CheckpointError, ArchitectureError, CalibrationError, MetadataError, PatternError) as error:
        fail(USAGE, error)
    except (SpaceError, MissingPackageError) as error:
        fail(ENVIRONMENT, error)
    except OSError as error:
        fail(ENVIRONMENT, f"{error.strerror or error}: {error.filename or 'while reading or writing'}")
    except KeyboardInterrupt:
        err.print("interrupted; nothing is left behind")
        raise typer.Exit(INTERRUPTED) from None


def _pattern(text: str) -> SlidePattern:
    from slidesparse.pattern import PatternError, SlidePattern

    try:
        return SlidePattern.parse(text)
    except PatternError as error:
        fail(USAGE, f"--sparsity: {error}")


@app.command()
def inspect(
    folder: Annotated[Path, typer.Argument(help="Any checkpoint folder.", metavar="DIR")],
    as_json: Json = False,
) -> None:
    """Show each layer: shape, dtype, pattern, violations, bytes, expansion.  Exit 1 for a violation."""
    with _explained():
        from slidesparse.inspection import inspect as run

        report = run(folder)
    if as_json:
        print(json.dumps(report.to_json(), indent=2))
    else:
        _show_layers(report)
    raise typer.Exit(FAILED if report.violations else 0)


def _show_layers(report: CheckpointReport) -> None:
    claimed = f"{report.pattern} ({report.layout} layout)" if report.pattern else "none claimed"
    out.print(escape(f"{report.folder}: pattern {claimed}"))
    table = Table("layer", box=SIMPLE_HEAD, pad_edge=False)
    for name in ("N x K", "dtype", "pattern", "obeys", "violations", "bytes", "expansion"):
        table.add_column(name, justify="right", no_wrap=True)
    for layer in report.layers:
        table.add_row(*_cells(layer))
    natural = Console(width=MOST_COLUMNS).measure(table).maximum
    if out.is_terminal and out.width < natural:
        for layer in report.layers:
            name, shape, dtype, pattern, obeys, broken, size, expansion = _cells(layer)
            out.print(escape(name))
            out.print(f"  {shape} {dtype}, pattern {pattern}, obeys {obeys}, violations {broken}")
            out.print(f"  {size} bytes, expansion {expansion}")
    else:
        Console(highlight=False, width=natural).print(table)
    for layer in report.layers:
        if layer.first_violation:
            out.print(escape(layer.first_violation), style="red")
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


@app.command()
def verify(
    first: Annotated[Path, typer.Argument(help="A checkpoint folder.", metavar="A")],
    second: Annotated[Path, typer.Argument(help="Another one.", metavar="B")],
    as_json: Json = False,
) -> None:
    """Compare two checkpoints bit for bit, whatever their layouts and shards.  Exit 0 if equal, 1 if not."""
    with _explained():
        from slidesparse.inspection import verify as run

        found = run(first, second)
    if as_json:
        print(json.dumps(found.to_json(), indent=2))
    elif found.difference:
        out.print(escape(f"different: {found.difference}"))
    else:
        out.print(
            escape(
                f"equal: {found.tensors} tensors, {found.slided} of them compared through the slided layout"
            )
        )
    raise typer.Exit(0 if found.equal else FAILED)


@app.command()
def doctor(as_json: Json = False) -> None:
    """Tell what this machine can run, what is missing, and the remedy.  Never fails."""
    from slidesparse.doctor import main as run

    run(["--json"] if as_json else [])


@bench_app.command("convert")
def bench_convert(
    size: Annotated[
        str, typer.Option(help="Size of the synthetic BF16 model, such as 500MB or 2GB.")
    ] = "2GB",
    sparsity: Sparsity = "6:8",
    quant: Annotated[str, typer.Option(help="int8 or fp8.")] = "int8",
    layout: Annotated[str, typer.Option(help="dense or slided.")] = "dense",
    folder: Annotated[
        Path | None, typer.Option(help="Where to put the models; by default the system's temporary folder.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Convert a synthetic Llama-style model; report MB/s of BF16 input and the peak memory."""
    pattern = _pattern(sparsity)
    with _explained():
        from slidesparse.bench import convert as bench

        try:
            wanted = bench.parse_size(size)
        except ValueError as error:
            fail(USAGE, error)
        result = bench.run(wanted, pattern, quant, layout, folder)
    print(json.dumps(result.to_json(), indent=2) if as_json else result.render())


cli_convert.register(app, _explained)
cli_bench.register(app, bench_app)
cli_e2e.register(bench_app)
cli_eval.register(app, _explained)
cli_synth.register(app, _explained)


if __name__ == "__main__":
    main()
