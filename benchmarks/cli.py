"""The commands of ``python -m benchmarks``; benchmarks/README.md describes what each measures.

Without a GPU, a command that needs one reports what is missing and exits with 3.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from slidesparse.cli.console import Json, application, err
from slidesparse.cli.tune import (
    Limit,
    Shapes,
    Tokens,
    cell_counts,
    open_session,
    parse_models,
    parse_token_counts,
    print_result,
    start_progress,
)
from slidesparse.errors import FAILED, EnvironmentFault

if TYPE_CHECKING:
    from benchmarks.e2e import Run, Workload
    from benchmarks.e2e_models import Model
    from benchmarks.e2e_runs import E2eBench
    from benchmarks.records import Records
    from benchmarks.stock import Stock
    from slidesparse.gemm.backend import Tunable
    from slidesparse.tune.machine import Gpu
    from slidesparse.tune.session import Session

app = application(
    "Measure SlideSparse on this machine, and turn the results into tables, pages and plots.",
    name="benchmarks",
)

Models = Annotated[
    str | None,
    typer.Option(
        "--model",
        help="Names such as Qwen2.5-7B, or folders with a config.json, comma-separated; default: all known models.",
    ),
]
Dtypes = Annotated[str, typer.Option("--dtype", help="Operand types, comma-separated.")]
Patterns = Annotated[
    str | None,
    typer.Option(
        "--pattern", help="Patterns, comma-separated, such as 2:4,6:8; default: 2:4 to 14:16 and 2_inf."
    ),
]
Out = Annotated[Path, typer.Option("--out", help="Folder for the tables; rows already in them are kept.")]
VllmLibrary = Annotated[
    Path | None, typer.Option(help="vLLM's compiled kernels (_C*.so), for use without an installed vLLM.")
]
Libraries = Annotated[
    str | None,
    typer.Option("--library", help="GEMM libraries, comma-separated; default: all that support this GPU."),
]
NoStock = Annotated[bool, typer.Option("--no-stock", help="Do not measure vLLM's own kernels.")]
ModelNames = Annotated[
    str, typer.Argument(help="Names such as Qwen2.5-7B, or folders with a config.json, comma-separated.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the remaining commands without running them.")]
OUT = Path("bench_out")


class Bench(Protocol):
    """A benchmark that fills one table."""

    records: Records
    count: int  # of cells, those that are measured already included

    def run(self) -> bool:
        """Measure what is not in the table; return False if the time limit was reached first."""


def _fill(
    began: float, limit: float | None, gpu: Gpu, as_json: bool, make: Callable[[Session], Bench]
) -> None:
    """Run a benchmark until its table is complete or the time is up, and print the outcome."""
    with open_session(gpu, began, limit) as (session, bar):
        bench = make(session)
        start_progress(bar, bench.count)
        finished = bench.run()
        cells = cell_counts(bar)
    result = {"rows": len(bench.records.rows), "table": str(bench.records.path), **cells}
    print_result(finished, session.skipped, result, as_json)


def _parse_patterns(text: str | None, mixed: bool = False) -> tuple[str, ...]:
    from slidesparse.tune.shapes import PATTERNS, parse_patterns

    return PATTERNS if text is None else parse_patterns(text, mixed)


def _parse_libraries(gpu: Gpu, names: str | None) -> list[Tunable]:
    """Return the requested backends; by default all that run on ``gpu``, with a note on stderr for the others."""
    from slidesparse.tune import machine
    from slidesparse.tune.shapes import parse_choice

    if names:
        return machine.require_libraries(gpu, parse_choice("--library", names, machine.tunable_names()))
    libraries, notes = machine.usable_libraries(gpu)
    for line in notes:
        err.print(escape(f"note: {line}"))
    if not libraries:
        raise machine.MissingError(
            f"no GEMM backend runs on {gpu.name}; `slidesparse doctor` shows what is missing"
        )
    return libraries


def _subjects(
    conditions: Path, library: str | None, vllm_library: Path | None, no_stock: bool
) -> tuple[Gpu, list[Tunable], Stock | None]:
    """Return the GPU, the backends and vLLM's kernels to measure, and write the conditions of their table."""
    from benchmarks.conditions import gpu_conditions
    from benchmarks.records import write_conditions
    from benchmarks.stock import find
    from slidesparse.tune import machine

    gpu = machine.require_gpu()
    libraries, stock = _parse_libraries(gpu, library), None if no_stock else find(vllm_library)
    if not (stock or no_stock):
        err.print("vLLM is not installed, so its kernels are not measured; --vllm-library names them")
    facts = {**gpu_conditions(gpu, libraries), "vllm_library": stock.path if stock else None}
    write_conditions(conditions, facts)
    return gpu, libraries, stock


@app.command()
def kernel(
    mode: Annotated[str, typer.Option(help="square: M = N = K; model: the layers of models.")] = "model",
    model: Models = None,
    shapes: Shapes = None,
    dtype: Dtypes = "int8,fp8,fp16,bf16",
    pattern: Patterns = None,
    m: Tokens = None,
    out: Out = OUT,
    time_limit: Limit = None,
    library: Libraries = None,
    vllm_library: VllmLibrary = None,
    no_stock: NoStock = False,
    as_json: Json = False,
) -> None:
    """Time single GEMMs of cuBLASLt, the sparse libraries at each pattern, and vLLM; writes OUT/kernel.csv."""
    began = time.monotonic()
    from benchmarks.kernel import KernelBench, model_groups, square_groups
    from slidesparse.gemm.problem import OPERANDS
    from slidesparse.tune.shapes import parse_choice

    dtypes = parse_choice("--dtype", dtype, OPERANDS)
    patterns, tokens = _parse_patterns(pattern), parse_token_counts(m)
    if parse_choice("--mode", mode, ("square", "model")) == ("square",):
        groups = square_groups(dtypes, tokens)
    else:
        groups = model_groups(parse_models(model, shapes), dtypes, tokens)
    gpu, libraries, stock = _subjects(out / "kernel.json", library, vllm_library, no_stock)

    def make(session: Session) -> Bench:
        return KernelBench(session, out, groups, libraries, stock, patterns)

    _fill(began, time_limit, gpu, as_json, make)


@app.command()
def linear(
    model: Models = None,
    shapes: Shapes = None,
    dtype: Dtypes = "int8,fp8",
    pattern: Patterns = None,
    m: Tokens = None,
    out: Out = OUT,
    time_limit: Limit = None,
    library: Libraries = None,
    vllm_library: VllmLibrary = None,
    no_stock: NoStock = False,
    as_json: Json = False,
) -> None:
    """Time whole linear layers (quantize, GEMM, scale) with tuned algorithms; writes OUT/linear.csv."""
    began = time.monotonic()
    from benchmarks.kernel import model_groups
    from benchmarks.linear import LinearBench
    from slidesparse.tune import machine
    from slidesparse.tune.shapes import parse_choice

    dtypes = parse_choice("--dtype", dtype, machine.SERVED_DTYPES)
    patterns = _parse_patterns(pattern, mixed=True)
    groups = model_groups(parse_models(model, shapes), dtypes, parse_token_counts(m))
    gpu, libraries, stock = _subjects(out / "linear.json", library, vllm_library, no_stock)

    def make(session: Session) -> Bench:
        return LinearBench(session, out, groups, libraries, stock, patterns)

    _fill(began, time_limit, gpu, as_json, make)


@app.command()
def spmm(
    sizes: Annotated[
        str, typer.Option(help="Sizes of square products, M = N = K, comma-separated.")
    ] = "64,128,256,512,1024,2048,4096,8192",
    model: ModelNames = "Qwen2.5-7B",
    shapes: Shapes = None,
    m: Annotated[str, typer.Option("--m", help="Token counts for the model's layers.")] = "64,2048",
    dtype: Annotated[str, typer.Option("--dtype", help="fp32, fp16 or both.")] = "fp32,fp16",
    sparsity: Annotated[
        str, typer.Option(help="KEPT:GROUP, comma-separated; a model's layers use the first one.")
    ] = "2:4,1:4,4:8,1:2,2:8",
    library: Libraries = None,
    out: Out = OUT,
    time_limit: Limit = None,
    as_json: Json = False,
) -> None:
    """Compare hand-written N:M kernels with cuBLAS, sparse tensor cores and the CPU; writes OUT/spmm.csv."""
    began = time.monotonic()
    from benchmarks import spmm_counters
    from benchmarks.conditions import cpu_conditions, gpu_conditions
    from benchmarks.records import amend_conditions, write_conditions
    from benchmarks.spmm import TYPES, SpmmBench, jobs, layers, parse_sparsities, squares
    from slidesparse.tune import machine
    from slidesparse.tune.shapes import parse_choice, parse_tokens

    dtypes, sparsities = parse_choice("--dtype", dtype, TYPES), parse_sparsities(sparsity)
    models = parse_models(None if shapes else model, shapes)
    todo = [*squares(parse_tokens(sizes)), *layers(models, parse_tokens(m))]
    gpu = machine.require_gpu()
    libraries = [backend for backend in _parse_libraries(gpu, library) if backend.sparse]
    conditions = out / "spmm.json"
    write_conditions(conditions, {**gpu_conditions(gpu, libraries), "cpu": cpu_conditions()["cpu"]})
    work = jobs(todo, dtypes, sparsities, libraries)
    _fill(began, time_limit, gpu, as_json, lambda session: SpmmBench(session, out, work))
    left = None if time_limit is None else began + time_limit - time.monotonic()
    if left is None or left > 0:
        amend_conditions(conditions, {"counters": spmm_counters.measure(out, left)})


@app.command()
def e2e(
    model: Annotated[
        Path,
        typer.Option(
            help="A W8A8 checkpoint, or a folder of them named by pattern, such as 2_8, and dense for the unpruned one."
        ),
    ],
    name: Annotated[
        str | None, typer.Option(help="The model's name in the table; by default taken from the folder.")
    ] = None,
    patterns: Annotated[
        str | None, typer.Option(help="Patterns, comma-separated; default: those of all checkpoints.")
    ] = None,
    stages: Annotated[str, typer.Option(help="prefill, decode or both.")] = "prefill,decode",
    m: Annotated[
        str | None,
        typer.Option("--m", help="Tokens per step; default: 512 to 65536 for prefill, 64 to 512 for decode."),
    ] = None,
    decode_m: Annotated[
        str | None, typer.Option("--decode-m", help="Batch size in decode, instead of --m.")
    ] = None,
    systems: Annotated[
        str,
        typer.Option(
            help="stock: without the plugin; cublaslt: dense weights by cuBLASLt; "
            "dense: unpruned weights by the kernels for sparse ones; sparse; cusparselt: sparse by that backend; "
            "unfused: sparse with SLIDESPARSE_FUSE=0."
        ),
    ] = "stock,cublaslt,sparse",
    rounds: Annotated[
        int, typer.Option(min=1, help="Number of measurements of each cell, in alternating order.")
    ] = 3,
    first_round: Annotated[
        int, typer.Option(min=1, help="Number of the first round, to continue an earlier command.")
    ] = 1,
    prompt_len: Annotated[int, typer.Option(min=1, help="Maximum tokens per prompt in prefill.")] = 1024,
    prefill_steps: Annotated[int, typer.Option(min=1, help="Steps of M tokens in a prefill run.")] = 128,
    decode_steps: Annotated[
        int, typer.Option(min=1, help="Output tokens per sequence in a decode run.")
    ] = 256,
    decode_prompt_len: Annotated[
        int, typer.Option(min=1, help="Tokens per prompt in decode: the context's length at the start.")
    ] = 16,
    vllm_args: Annotated[
        str, typer.Option(help="More options of vllm bench throughput, for all systems, as one string.")
    ] = "",
    out: Out = OUT,
    time_limit: Limit = None,
    run_limit: Annotated[
        float, typer.Option(help="Time limit of one run in seconds, loading included.")
    ] = 1800.0,
    resident: Annotated[
        bool,
        typer.Option(
            "--resident", help="Keep all engines loaded side by side on the GPU, and run them in turn."
        ),
    ] = False,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Measure whole models in tokens per second: stock vLLM, dense cuBLASLt, sparse; writes OUT/e2e.csv."""
    from benchmarks.e2e import DECODE, PREFILL, SLIDED_SYSTEMS, STAGES, SYSTEMS, TOKENS, Workload
    from benchmarks.e2e import runs as plan
    from benchmarks.e2e_models import find_model
    from benchmarks.e2e_resident import ResidentBench
    from benchmarks.e2e_runs import E2eBench
    from slidesparse.evaluate.engine import vllm_command
    from slidesparse.tune.measure import Deadline
    from slidesparse.tune.shapes import parse_choice, parse_patterns, parse_tokens

    deadline = Deadline(time_limit)
    chosen = parse_choice("--systems", systems, tuple(SYSTEMS))
    selected = parse_patterns(patterns, mixed=True) if patterns else None
    dense, sparse = not set(chosen) <= set(SLIDED_SYSTEMS), not set(chosen).isdisjoint(SLIDED_SYSTEMS)
    subject = find_model(model, name, selected, dense=dense, sparse=sparse)
    work = Workload(prompt_len, prefill_steps, decode_steps, decode_prompt_len, tuple(shlex.split(vllm_args)))
    token_texts = {PREFILL: m, DECODE: decode_m or m}
    tokens = {**TOKENS, **{stage: parse_tokens(text) for stage, text in token_texts.items() if text}}
    runs = plan(subject, parse_choice("--stages", stages, STAGES), tokens, chosen, rounds, work, first_round)
    if dry_run:
        _print_commands(out, runs, work)
        return
    vllm = vllm_command()
    version = _write_e2e_conditions(out, subject, chosen, dense, work, resident)
    common = (out, vllm, version, work, deadline, run_limit)
    bench = ResidentBench(*common) if resident else E2eBench(*common)
    with closing(bench):
        finished = _run(bench, runs)
    _report(bench, runs, finished, as_json)
    if bench.failures:
        raise typer.Exit(FAILED)


def _print_commands(out: Path, runs: Sequence[Run], work: Workload) -> None:
    from benchmarks.conditions import cpu_conditions
    from benchmarks.e2e import command
    from benchmarks.e2e_runs import format_command, log_path, vllm_version
    from benchmarks.records import E2E, read_rows
    from slidesparse.evaluate.engine import vllm_command

    try:
        vllm = vllm_command()
    except EnvironmentFault:
        vllm = "vllm"
    version = vllm_version(cpu_conditions())
    rows, _ = read_rows(out / "e2e.csv", E2E.columns)
    measured = {tuple(row[name] for name in E2E.key) for row in rows}
    for run in runs:
        if tuple(str(run.key[name]) for name in E2E.key) not in measured:
            result = log_path(out, run).with_suffix(".json")
            print(format_command(run, command(vllm, version, run, work, result)))


def _write_e2e_conditions(
    out: Path, model: Model, systems: Sequence[str], dense: bool, work: Workload, resident: bool
) -> Any:
    """Write OUT/e2e.json; return vLLM's version."""
    from benchmarks import e2e_runs
    from benchmarks.e2e_models import DENSE
    from benchmarks.records import write_conditions

    facts = e2e_runs.conditions(systems)
    variants = {**model.sparse, **({DENSE: model.dense} if dense else {})}
    facts |= {
        f"{model.name} {pattern} checkpoint": str(variant.folder) for pattern, variant in variants.items()
    }
    facts["workload"] = work.conditions | ({"engines": "resident, side by side"} if resident else {})
    write_conditions(out / "e2e.json", facts, same=e2e_runs.CONDITIONS)
    return e2e_runs.vllm_version(facts)


def _run(bench: E2eBench, runs: Sequence[Run]) -> bool:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=err, transient=True) as bar:
        task = bar.add_task("starting", total=len(runs))

        def begin(done: int, label: str) -> None:
            bar.update(task, completed=done, description=label)

        bench.begin, bench.say = begin, lambda line: err.print(escape(line))
        return bench.run(runs)


def _report(bench: E2eBench, runs: Sequence[Run], finished: bool, as_json: bool) -> None:
    for failure in bench.failures:
        err.print(f"[bold red]failed:[/] {escape(failure.run.label)}: {escape(failure.reason)}")
        err.print(escape("\n".join([f"  the end of {failure.log}:", *(f"    {x}" for x in failure.lines)])))
    if finished and bench.failures:
        err.print("repeat the command to try what failed again")
    result: dict[str, Any] = {"rows": len(bench.records.rows), "table": str(bench.records.path)}
    result |= {"cells": sum(bench.records.has(run.key) for run in runs), "planned": len(runs)}
    if as_json:
        failed = [
            {**failure.run.key, "reason": failure.reason, "log": str(failure.log)}
            for failure in bench.failures
        ]
        result["failed"] = failed
    print_result(finished, (), result, as_json)


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(help="The results of the measuring commands.", metavar="FOLDER")],
    reference: Annotated[
        Path | None,
        typer.Option(help="Speed-ups to compare with, as docs/benchmarks/reference.csv.", metavar="FILE"),
    ] = None,
) -> None:
    """Make Markdown pages and plots from the tables of a folder; prints their paths."""
    from benchmarks import report as reports

    for path in reports.render(folder, reference):
        print(path)


@app.command()
def docs(
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="Write nothing; if a table is out of date, show the first difference and exit with 1.",
        ),
    ] = False,
) -> None:
    """Regenerate every table of figures in docs/ from the CSV files; prints which pages changed."""
    from benchmarks.report import docs as pages

    for path in pages.check() if check else pages.write():
        print(path)
