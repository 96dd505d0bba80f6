"""The commands of ``python -m benchmarks``; benchmarks/README.md describes what each measures.

Without a GPU, a command that needs one reports what is missing and exits with 3.
"""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.accuracy import cli as accuracy
from slidesparse.cli.console import Json, application, err
from slidesparse.cli.tune import (
    Limit,
    Shapes,
    Tokens,
    open_session,
    parse_models,
    parse_token_counts,
    print_result,
)
from slidesparse.errors import FAILED

if TYPE_CHECKING:
    from benchmarks.e2e.plan import Run
    from benchmarks.e2e.run import E2eBench
    from benchmarks.measure import Gauge, Job
    from benchmarks.records import Records
    from benchmarks.stock import Stock
    from slidesparse.gemm.cuda import CudaBackend
    from slidesparse.tune.machine import Gpu
    from slidesparse.tune.session import Session

app = application("Measure SlideSparse on this machine, and turn the results into tables.", name="benchmarks")
app.add_typer(accuracy.app, name="accuracy")

Models = Annotated[
    str | None,
    typer.Option(
        "--model",
        help="Names such as Qwen2.5-7B, or folders of models, comma-separated; default: all known models.",
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
Providers = Annotated[
    str | None,
    typer.Option("--provider", help="stock and GEMM backends, comma-separated; default: all that run here."),
]
OUT = Path("bench_out")


def _fill(
    began: float,
    limit: float | None,
    gpu: Gpu,
    records: Records,
    count: int,
    jobs: Callable[[Session, Gauge], Iterable[Job]],
    as_json: bool,
) -> None:
    """Measure jobs until their table is complete or the time is up, and print the outcome."""
    from benchmarks.measure import CudaGauge, fill

    with open_session(gpu, began, limit, count) as session:
        finished = fill(session, records, jobs(session, CudaGauge(session.clock, gpu.uuid)))
    result = {"rows": len(records.rows), "table": str(records.path), "cells": session.cells, "planned": count}
    print_result(finished, session.skipped, result, as_json)


def _parse_patterns(text: str | None, mixed: bool = False) -> tuple[str, ...]:
    from slidesparse.tune.shapes import PATTERNS, parse_patterns

    return PATTERNS if text is None else parse_patterns(text, mixed)


def _subjects(conditions: Path, providers: str | None) -> tuple[Gpu, list[CudaBackend], Stock | None]:
    """Return the GPU, the backends and vLLM's kernels to measure, and write the conditions of their table."""
    from benchmarks import stock
    from benchmarks.conditions import gpu_conditions, usable_libraries
    from benchmarks.kernel import STOCK
    from benchmarks.records import write_conditions
    from slidesparse.tune import machine
    from slidesparse.tune.shapes import parse_choice

    gpu = machine.require_gpu()
    if providers:
        names = parse_choice("--provider", providers, (STOCK, *machine.tunable_names()))
        libraries = machine.require_libraries(gpu, [name for name in names if name != STOCK])
    else:
        libraries, notes = usable_libraries(gpu)
        for line in notes:
            err.print(escape(f"note: {line}"))
    kernels = stock.find() if not providers or STOCK in names else None
    if kernels is None and not providers:
        err.print("note: vLLM is not installed, so its kernels are not measured")
    write_conditions(
        conditions, gpu_conditions(gpu, {library.name: library.version() for library in libraries})
    )
    return gpu, libraries, kernels


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
    provider: Providers = None,
    as_json: Json = False,
) -> None:
    """Time single GEMMs of cuBLASLt, the sparse libraries at each pattern, and vLLM; writes OUT/kernel.csv."""
    began = time.monotonic()
    from benchmarks.kernel import MODEL, SQUARE, jobs, model_groups, square_groups
    from benchmarks.records import KERNEL, Records
    from slidesparse.gemm.problem import OPERANDS
    from slidesparse.tune.shapes import parse_choice

    dtypes = parse_choice("--dtype", dtype, OPERANDS)
    patterns, tokens = _parse_patterns(pattern), parse_token_counts(m)
    if parse_choice("--mode", mode, (SQUARE, MODEL)) == (SQUARE,):
        groups = square_groups(dtypes, tokens)
    else:
        groups = model_groups(parse_models(model, shapes), dtypes, tokens)
    gpu, libraries, stock = _subjects(out / "kernel.json", provider)
    make = partial(jobs, groups=groups, libraries=libraries, stock=stock, patterns=patterns)
    count = sum(len(group.tokens) for group in groups)
    _fill(began, time_limit, gpu, Records(out, KERNEL), count, make, as_json)


@app.command()
def linear(
    model: Models = None,
    shapes: Shapes = None,
    dtype: Dtypes = "int8,fp8",
    pattern: Patterns = None,
    m: Tokens = None,
    out: Out = OUT,
    time_limit: Limit = None,
    provider: Providers = None,
    as_json: Json = False,
) -> None:
    """Time the linear layers of models' blocks in a row, with tuned algorithms; writes OUT/linear.csv."""
    began = time.monotonic()
    from benchmarks.linear import jobs, model_groups
    from benchmarks.records import LINEAR, Records
    from slidesparse.tune import machine
    from slidesparse.tune.shapes import parse_choice

    dtypes = parse_choice("--dtype", dtype, machine.SERVED_DTYPES)
    patterns = _parse_patterns(pattern, mixed=True)
    groups = model_groups(parse_models(model, shapes), dtypes, parse_token_counts(m))
    gpu, libraries, stock = _subjects(out / "linear.json", provider)
    make = partial(jobs, groups=groups, libraries=libraries, stock=stock, patterns=patterns)
    count = sum(len(group.tokens) for group in groups)
    _fill(began, time_limit, gpu, Records(out, LINEAR), count, make, as_json)


@app.command()
def spmm(
    sizes: Annotated[
        str, typer.Option(help="Sizes of square products, M = N = K, comma-separated.")
    ] = "64,128,256,512,1024,2048,4096,8192",
    dtype: Annotated[str, typer.Option("--dtype", help="fp32, fp16 or both.")] = "fp32,fp16",
    sparsity: Annotated[str, typer.Option(help="KEPT:GROUP, comma-separated.")] = "2:4,1:4,4:8,1:2,2:8",
    out: Out = OUT,
    time_limit: Limit = None,
    as_json: Json = False,
) -> None:
    """Compare hand-written N:M kernels with cuBLAS and one thread of the CPU; writes OUT/spmm.csv."""
    began = time.monotonic()
    from benchmarks.conditions import gpu_conditions
    from benchmarks.records import Records, write_conditions
    from benchmarks.spmm.bench import SPMM, TYPES, jobs, parse_sparsities
    from slidesparse.doctor import cpu
    from slidesparse.tune import machine
    from slidesparse.tune.shapes import parse_choice, parse_tokens

    tokens, dtypes = parse_tokens(sizes), parse_choice("--dtype", dtype, TYPES)
    make = partial(jobs, sizes=tokens, dtypes=dtypes, sparsities=parse_sparsities(sparsity))
    gpu = machine.require_gpu()
    write_conditions(out / "spmm.json", {**gpu_conditions(gpu, {}), "cpu": cpu()[0]})
    _fill(began, time_limit, gpu, Records(out, SPMM), len(tokens) * len(dtypes), make, as_json)


@app.command()
def e2e(
    model: Annotated[
        list[Path],
        typer.Option(
            help="A W8A8 checkpoint, or a folder of them: named by pattern, such as 2_8, or dense, the unpruned one; "
            "any other, such as bf16 or w4a16, is a system of that name. May be repeated, for INT8 and FP8."
        ),
    ],
    name: Annotated[
        str | None, typer.Option(help="The model's name in the table; by default taken from the folder.")
    ] = None,
    patterns: Annotated[
        str | None, typer.Option(help="Patterns, comma-separated; default: those of all checkpoints.")
    ] = None,
    stages: Annotated[str, typer.Option(help="prefill, decode or both.")] = "prefill,decode",
    m: Annotated[str | None, typer.Option("--m", help="Tokens per step of prefill.")] = None,
    decode_m: Annotated[str | None, typer.Option("--decode-m", help="Batch sizes of decode.")] = None,
    systems: Annotated[
        str,
        typer.Option(
            help="stock: without the plugin; dense: unpruned weights with the plugin, without a flag; require: "
            "the same with SLIDESPARSE=require, which runs experts by our kernels, too; sparse; "
            "unfused: sparse with SLIDESPARSE_FUSE=0; cusparselt: sparse by that backend; cublaslt: dense weights by "
            "cuBLASLt; or a folder of --model, such as bf16, without the plugin."
        ),
    ] = "stock,dense,sparse",
    rounds: Annotated[
        int, typer.Option(min=1, help="Number of measurements of each cell, in alternating order.")
    ] = 3,
    prompt: Annotated[int, typer.Option(min=1, help="Maximum tokens per prompt in prefill.")] = 1024,
    context: Annotated[str, typer.Option(help="Tokens per prompt in decode, comma-separated.")] = "16",
    prefill_steps: Annotated[int, typer.Option(min=1, help="Steps of M tokens in a prefill run.")] = 128,
    decode_steps: Annotated[
        int, typer.Option(min=1, help="Output tokens per sequence in a decode run.")
    ] = 256,
    vllm_args: Annotated[
        str, typer.Option(help="More options of vllm bench throughput, for all systems, as one string.")
    ] = "",
    out: Out = OUT,
    time_limit: Limit = None,
    run_limit: Annotated[
        float, typer.Option(help="Time limit of one run in seconds, and of starting the engines.")
    ] = 1800.0,
    as_json: Json = False,
) -> None:
    """Measure whole models in tokens per second, all engines side by side on the GPU; writes OUT/e2e.csv.

    Tokens of mixtures with random weights are routed at random, uniformly: see VLLM_MOE_ROUTING_SIMULATION_STRATEGY.
    """
    from benchmarks.e2e.plan import DECODE, PREFILL, STAGES, TOKENS, Workload, find_model
    from benchmarks.e2e.plan import runs as plan
    from benchmarks.e2e.run import CONDITIONS, E2eBench, conditions
    from benchmarks.records import write_conditions
    from slidesparse.tune.shapes import parse_choice, parse_patterns, parse_tokens, split_list

    deadline = math.inf if time_limit is None else time.monotonic() + time_limit
    work = Workload(prompt, parse_tokens(context), prefill_steps, decode_steps, tuple(shlex.split(vllm_args)))
    given = {PREFILL: m, DECODE: decode_m}
    tokens = {**TOKENS, **{stage: parse_tokens(text) for stage, text in given.items() if text}}
    chosen = parse_patterns(patterns, mixed=True) if patterns else None
    models = [find_model(folder, name) for folder in model]
    runs = plan(
        models, parse_choice("--stages", stages, STAGES), tokens, split_list(systems), chosen, rounds, work
    )
    facts = {**conditions(), "workload": work.conditions}
    write_conditions(out / "e2e.json", facts, CONDITIONS)
    bench = E2eBench(out, work, deadline, run_limit)
    with closing(bench):
        finished = _run(bench, runs)
    if bench.served:
        write_conditions(out / "e2e.json", {**facts, **bench.served}, CONDITIONS)
    for failure in bench.failures:
        err.print(escape(failure), style="red")
    result: dict[str, Any] = {"rows": len(bench.records.rows), "table": str(bench.records.path)}
    result |= {"cells": sum(bench.records.has(run.key) for run in runs), "planned": len(runs)}
    print_result(finished, (), result | ({"failed": bench.failures} if as_json else {}), as_json)
    if bench.failures:
        raise typer.Exit(FAILED)


def _run(bench: E2eBench, runs: Sequence[Run]) -> bool:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=err, transient=True) as bar:
        task = bar.add_task("starting", total=len(runs))

        def begin(done: int, label: str) -> None:
            bar.update(task, completed=done, description=label)

        bench.begin, bench.say = begin, lambda line: err.print(escape(line))
        return bench.run(runs)


@app.command()
def w4(
    source: Annotated[Path, typer.Argument(help="An unpruned W8A8 checkpoint of `slidesparse synth`.")],
    out: Annotated[Path, typer.Argument(help="The folder to write, such as w4a16 beside it.")],
    fp8: Annotated[bool, typer.Option("--fp8", help="Activations in FP8 (W4A8) instead of 16 bits.")] = False,
) -> None:
    """Write a checkpoint of the same shapes with random 4-bit weights, to compare with."""
    from benchmarks.e2e.w4 import write

    write(source, out, fp8)


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(help="The results of the measuring commands.", metavar="FOLDER")],
) -> None:
    """Write FOLDER/README.md with tables of the results in a folder; prints its path."""
    from benchmarks import report as reports

    print(reports.write_page(folder))


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
    """Regenerate every table of figures in docs/ from the CSV files there; prints which files changed."""
    from benchmarks.docs import write

    for path in write(check):
        print(path)
