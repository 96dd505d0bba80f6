"""The commands that measure a GPU: tune, bench kernel, linear, bandwidth and layout, and report.

Without a GPU they say what is missing, and exit with 3.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from slidesparse.backends import INSTALL_CUDA

if TYPE_CHECKING:
    from slidesparse.bench.kernel import Group
    from slidesparse.bench.machine import Gpu
    from slidesparse.bench.session import Session
    from slidesparse.bench.shapes import Layer
    from slidesparse.bench.stock import Stock
    from slidesparse.gemm.library import Library

USAGE, ENVIRONMENT, INTERRUPTED = 2, 3, 130

err = Console(stderr=True, highlight=False, soft_wrap=True)

Models = Annotated[
    str | None,
    typer.Option(
        "--model",
        help="Names such as Qwen2.5-7B, or folders with a config.json, comma-separated; default all.",
    ),
]
Shapes = Annotated[str | None, typer.Option(help="Instead of a model: weights as NxK,NxK.")]
Dtypes = Annotated[str, typer.Option("--dtype", help="Operand types, comma-separated.")]
Patterns = Annotated[
    str | None,
    typer.Option("--pattern", help="Comma-separated, such as 2:4,6:8; default 2:4 to 14:16 and 2_inf."),
]
Tokens = Annotated[
    str | None, typer.Option("--m", help="Token counts, comma-separated; default 64 to 16384.")
]
Out = Annotated[Path, typer.Option("--out", help="The folder of the tables; what is in them is kept.")]
Limit = Annotated[
    float | None, typer.Option("--time-limit", help="Seconds after which to stop; repeat to go on.")
]
VllmLibrary = Annotated[
    Path | None, typer.Option(help="vLLM's compiled kernels (_C*.so), when vLLM is not installed.")
]
Libraries = Annotated[
    str | None, typer.Option("--library", help="GEMM libraries, comma-separated; default all for this GPU.")
]
NoStock = Annotated[bool, typer.Option("--no-stock", help="Leave vLLM's own kernels out.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]


def register(app: typer.Typer, bench: typer.Typer) -> None:
    """Add the commands to the command line and to its group ``bench``."""
    app.command()(tune)
    app.command()(report)
    bench.command("kernel")(kernel)
    bench.command("linear")(linear)
    bench.command("bandwidth")(bandwidth)
    bench.command("layout")(layout)


def fail(code: int, message: object) -> NoReturn:
    err.print(f"[bold red]error:[/] {escape(str(message))}")
    raise typer.Exit(code)


@contextmanager
def explained() -> Iterator[None]:
    """Errors that a user can act on become one message and an exit code."""
    try:
        from slidesparse.bench.machine import MissingError
        from slidesparse.bench.records import RecordsError
        from slidesparse.bench.shapes import ShapeError
        from slidesparse.gemm.library import LibraryError
        from slidesparse.gemm.tuned import TableError
        from slidesparse.pattern import PatternError
    except ImportError as error:
        if (error.name or "").partition(".")[0] not in ("torch", "numpy"):
            raise
        fail(ENVIRONMENT, f"this command needs {error.name}: {INSTALL_CUDA} ({error})")
    try:
        yield
    except (ShapeError, PatternError, RecordsError) as error:
        fail(USAGE, error)
    except (MissingError, TableError, LibraryError) as error:
        fail(ENVIRONMENT, error)
    except OSError as error:
        fail(ENVIRONMENT, f"{error.strerror or error}: {error.filename or 'while reading or writing'}")
    except KeyboardInterrupt:
        err.print("interrupted; repeat the command to go on")
        raise typer.Exit(INTERRUPTED) from None


@contextmanager
def _session(gpu: Gpu, began: float, limit: float | None) -> Iterator[tuple[Session, Progress]]:
    """A session whose progress is shown on stderr; ``limit`` seconds count from ``began`` (time.monotonic)."""
    from slidesparse.bench.inputs import Inputs
    from slidesparse.bench.measure import CudaClock, Deadline
    from slidesparse.bench.session import Session

    deadline = Deadline(None if limit is None else began + limit - time.monotonic())
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with CudaClock(gpu.device) as clock, Progress(*columns, console=err, transient=True) as bar:
        task = bar.add_task("starting", total=None)

        def advance(label: str) -> None:
            bar.update(task, advance=1, description=label)

        yield Session(gpu, clock, Inputs(gpu.device, gpu.l2_bytes), deadline, advance), bar


def _begin(bar: Progress, count: int) -> None:
    bar.update(bar.task_ids[0], total=count)


def _tokens(text: str | None) -> tuple[int, ...]:
    from slidesparse.bench.shapes import TOKENS, parse_tokens

    return TOKENS if text is None else parse_tokens(text)


def _patterns(text: str | None) -> tuple[str, ...]:
    from slidesparse.bench.shapes import PATTERNS, parse_patterns

    return PATTERNS if text is None else parse_patterns(text)


def _models(names: str | None, shapes: str | None) -> list[tuple[str, tuple[Layer, ...]]]:
    """(name, layers) of what was asked for; all models by default."""
    from slidesparse.bench.shapes import MODELS, ShapeError, model, parse_shapes, split

    if names and shapes:
        raise ShapeError("a model and --shapes exclude each other: give one of them")
    if shapes:
        return [("shapes", parse_shapes(shapes))]
    return [model(name) for name in (split(names) if names else MODELS)]


def _libraries(gpu: Gpu, names: str | None) -> list[Library]:
    from slidesparse.bench import machine
    from slidesparse.bench.shapes import parse_choice

    chosen = (
        parse_choice("--library", names, tuple(machine.LIBRARIES)) if names else machine.libraries_of(gpu)
    )
    return machine.require_libraries(gpu, chosen)


def _stock(path: Path | None, left_out: bool) -> Stock | None:
    from slidesparse.bench.stock import find

    if left_out:
        return None
    found = find(path)
    if found is None:
        err.print("vLLM is not installed, so its kernels are not measured; --vllm-library names them")
    return found


def _finish(finished: bool, skipped: Sequence[str], result: dict[str, Any], as_json: bool) -> None:
    from slidesparse.bench.session import describe

    for line in describe(skipped):
        err.print(escape(f"note: {line}"))
    if not finished:
        err.print("the time limit was reached; repeat the command to go on")
    if as_json:
        print(json.dumps({"finished": finished, **result, "skipped": list(skipped)}, indent=1))
    else:
        for name, value in result.items():
            print(f"{name:<12} {value}")


def tune(
    model: Annotated[
        str | None,
        typer.Argument(help="A model's name, or a folder with a config.json; default all that are known."),
    ] = None,
    shapes: Shapes = None,
    dtype: Dtypes = "int8,fp8",
    pattern: Patterns = None,
    m: Tokens = None,
    library: Annotated[
        str | None,
        typer.Option(help="Comma-separated; default hopper where it runs, else cublaslt,cusparselt."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Search again what is in the tables.")] = False,
    time_limit: Limit = None,
    as_json: Json = False,
) -> None:
    """Search the fastest GEMM algorithms for this GPU, and save them where serving looks."""
    began = time.monotonic()
    with explained():
        from slidesparse.bench import machine
        from slidesparse.bench.shapes import FEW_TOKENS, parse_choice
        from slidesparse.gemm.tuned import folder
        from slidesparse.tune import jobs
        from slidesparse.tune import tune as run

        layers = [layer for _, found in _models(model, shapes) for layer in found]
        dtypes = parse_choice("--dtype", dtype, machine.SERVED)
        names = None if library is None else parse_choice("--library", library, tuple(machine.LIBRARIES))
        patterns, tokens = _patterns(pattern), _tokens(m)
        gpu = machine.require_gpu()
        names = names or machine.served_by(gpu)
        if m is None and "hopper" in names:
            tokens = (*FEW_TOKENS, *tokens)
        todo = jobs(machine.require_libraries(gpu, names), layers, dtypes, patterns, tokens)
        with _session(gpu, began, time_limit) as (session, bar):
            _begin(bar, sum(len(job.tokens) for job in todo))
            summary = run(session, todo, force)
        counts = {
            name: getattr(summary, name) for name in ("tuned", "known", "algorithms", "refused", "wrong")
        }
        _finish(summary.finished, summary.skipped, {**counts, "tables": str(folder())}, as_json)


def kernel(
    mode: Annotated[str, typer.Option(help="square: M = N = K; model: the layers of models.")] = "model",
    model: Models = None,
    shapes: Shapes = None,
    dtype: Dtypes = "int8,fp8,fp16,bf16",
    pattern: Patterns = None,
    m: Tokens = None,
    out: Out = Path("bench_out"),
    time_limit: Limit = None,
    library: Libraries = None,
    vllm_library: VllmLibrary = None,
    no_stock: NoStock = False,
    as_json: Json = False,
) -> None:
    """GEMM alone: cuBLASLt, the sparse libraries at each pattern and vLLM's kernel; writes OUT/kernel.csv."""
    began = time.monotonic()
    with explained():
        from slidesparse.bench import machine
        from slidesparse.bench.kernel import DTYPES, KernelBench, model_groups, square_groups
        from slidesparse.bench.records import amend_conditions, write_conditions
        from slidesparse.bench.shapes import parse_choice

        dtypes = parse_choice("--dtype", dtype, DTYPES)
        patterns, tokens = _patterns(pattern), _tokens(m)
        groups: list[Group]
        if parse_choice("--mode", mode, ("square", "model")) == ("square",):
            groups = square_groups(dtypes, tokens)
        else:
            groups = model_groups(_models(model, shapes), dtypes, tokens)
        gpu = machine.require_gpu()
        libraries, stock = _libraries(gpu, library), _stock(vllm_library, no_stock)
        write_conditions(out / "kernel.json", _facts(gpu, libraries, stock))
        with _session(gpu, began, time_limit) as (session, bar):
            bench = KernelBench(session, libraries, stock, patterns, out)
            _begin(bar, bench.count(groups))
            amend_conditions(out / "kernel.json", {"copy_GBps": round(session.copy_rate(), 1)})
            finished = bench.run(groups)
        amend_conditions(out / "kernel.json", {"peak_TFLOPS": bench.peaks()})
        _finish(
            finished,
            session.skipped,
            {"rows": len(bench.records.rows), "table": str(out / "kernel.csv")},
            as_json,
        )


def linear(
    model: Models = None,
    shapes: Shapes = None,
    dtype: Dtypes = "int8,fp8",
    pattern: Patterns = None,
    m: Tokens = None,
    out: Out = Path("bench_out"),
    time_limit: Limit = None,
    library: Libraries = None,
    vllm_library: VllmLibrary = None,
    no_stock: NoStock = False,
    as_json: Json = False,
) -> None:
    """Whole layers: quantize, GEMM, scale, with the tuned algorithms; writes OUT/linear.csv."""
    began = time.monotonic()
    with explained():
        from slidesparse.bench import machine
        from slidesparse.bench.kernel import model_groups
        from slidesparse.bench.linear import LinearBench
        from slidesparse.bench.records import write_conditions
        from slidesparse.bench.shapes import parse_choice

        dtypes = parse_choice("--dtype", dtype, machine.SERVED)
        patterns, groups = _patterns(pattern), model_groups(_models(model, shapes), dtypes, _tokens(m))
        gpu = machine.require_gpu()
        libraries, stock = _libraries(gpu, library), _stock(vllm_library, no_stock)
        write_conditions(out / "linear.json", _facts(gpu, libraries, stock))
        with _session(gpu, began, time_limit) as (session, bar):
            bench = LinearBench(session, libraries, stock, patterns, out)
            _begin(bar, bench.count(groups))
            finished = bench.run(groups)
        _finish(
            finished,
            session.skipped,
            {"rows": len(bench.records.rows), "table": str(out / "linear.csv")},
            as_json,
        )


def bandwidth(out: Out = Path("bench_out"), time_limit: Limit = None, as_json: Json = False) -> None:
    """The quantizing and scaling kernels against a copy of as many bytes; writes OUT/bandwidth.csv."""
    began = time.monotonic()
    with explained():
        from slidesparse.bench import machine
        from slidesparse.bench.bandwidth import BandwidthBench, cells, libraries
        from slidesparse.bench.records import write_conditions

        gpu = machine.require_gpu()
        write_conditions(out / "bandwidth.json", machine.conditions(gpu, libraries(gpu.device)))
        with _session(gpu, began, time_limit) as (session, bar):
            bench = BandwidthBench(session, out)
            _begin(bar, len(cells(gpu.device)))
            finished = bench.run()
        _finish(
            finished,
            session.skipped,
            {"rows": len(bench.records.rows), "table": str(out / "bandwidth.csv")},
            as_json,
        )


def layout(
    model: Annotated[
        str, typer.Argument(help="A model's name, or a folder with a config.json; several, comma-separated.")
    ] = "Qwen2.5-7B",
    shapes: Shapes = None,
    dtype: Dtypes = "int8,fp8,bf16",
    m: Annotated[str, typer.Option("--m", help="Token counts, comma-separated.")] = "64,2048",
    out: Out = Path("bench_out"),
    time_limit: Limit = None,
    as_json: Json = False,
) -> None:
    """Both libraries in the eight memory layouts, weights at 6:8; writes OUT/layout.csv."""
    began = time.monotonic()
    with explained():
        from slidesparse.bench import machine
        from slidesparse.bench.kernel import DTYPES
        from slidesparse.bench.layout import PATTERN, LayoutBench, outputs_of, products
        from slidesparse.bench.records import write_conditions
        from slidesparse.bench.shapes import parse_choice, parse_tokens
        from slidesparse.gemm.library import LAYOUTS

        dtypes, tokens = parse_choice("--dtype", dtype, DTYPES), parse_tokens(m)
        layers = [layer for _, found in _models(None if shapes else model, shapes) for layer in found]
        gpu = machine.require_gpu()
        libraries = machine.require_libraries(gpu)
        todo = products(libraries, layers, dtypes)
        facts = {**machine.conditions(gpu, libraries), "pattern": PATTERN, "outputs": outputs_of(todo)}
        write_conditions(out / "layout.json", facts)
        with _session(gpu, began, time_limit) as (session, bar):
            bench = LayoutBench(session, out)
            _begin(bar, len(todo) * len(tokens) * len(LAYOUTS))
            finished = bench.run(todo, tokens)
        _finish(
            finished,
            session.skipped,
            {"rows": len(bench.records.rows), "table": str(out / "layout.csv")},
            as_json,
        )


def _facts(gpu: Gpu, libraries: Sequence[Library], stock: Stock | None) -> dict[str, Any]:
    from slidesparse.bench.machine import conditions

    return {**conditions(gpu, libraries), "vllm_library": stock.path if stock else None}


def report(
    folder: Annotated[Path, typer.Argument(help="What the bench commands wrote.", metavar="FOLDER")],
    reference: Annotated[
        Path | None, typer.Option(help="A folder of other figures to compare with.", metavar="FOLDER")
    ] = None,
) -> None:
    """Turn the tables of a folder into Markdown pages and plots; prints their paths."""
    with explained():
        from slidesparse import report as reports

        try:
            written = reports.render(folder, reference)
        except reports.ReportError as error:
            fail(USAGE, error)
        for path in written:
            print(path)
