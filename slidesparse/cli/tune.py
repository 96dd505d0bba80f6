"""The command ``slidesparse tune``, and functions shared with other commands that measure a GPU.

Without a GPU these commands report what is missing and exit with code 3.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from slidesparse.cli.console import Json, err

if TYPE_CHECKING:
    from slidesparse.tune.machine import Gpu
    from slidesparse.tune.session import Session
    from slidesparse.tune.shapes import Layer

MAX_SHOWN = 5  # refusals of libraries
Shapes = Annotated[str | None, typer.Option(help="Weight shapes instead of a model, as NxK,NxK.")]
Tokens = Annotated[
    str | None, typer.Option("--m", help="Numbers of tokens, comma-separated; default 64 to 16384.")
]
Limit = Annotated[
    float | None,
    typer.Option("--time-limit", min=0, help="Stop after this many seconds; repeat the command to continue."),
]


def tune(
    model: Annotated[
        str | None,
        typer.Argument(
            help="A converted model, another one's folder, or a name such as Qwen2.5-7B; default: every name."
        ),
    ] = None,
    shapes: Shapes = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="Operand types, comma-separated; default: those of a converted MODEL, otherwise int8,fp8."
        ),
    ] = None,
    pattern: Annotated[
        str | None,
        typer.Option(
            help="Patterns, comma-separated, such as 2:4,6:8; default: dense and those of a converted MODEL, otherwise "
            "all."
        ),
    ] = None,
    m: Annotated[
        str | None,
        typer.Option(
            "--m", help="Numbers of tokens, comma-separated; default 1 to 16384, for cusparselt 64 to 16384."
        ),
    ] = None,
    library: Annotated[
        str | None,
        typer.Option(
            help="Backends to tune, comma-separated; default: the one that serves sparse layers on this GPU."
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Tune again what was tuned here before.")] = False,
    time_limit: Limit = None,
    as_json: Json = False,
) -> None:
    """Find the fastest kernel configurations on this GPU and save them for serving."""
    began = time.monotonic()
    from slidesparse import gemm
    from slidesparse.gemm.tuned import tables_folder
    from slidesparse.tune import machine
    from slidesparse.tune.session import plan_jobs
    from slidesparse.tune.session import tune as run
    from slidesparse.tune.shapes import FEW_TOKENS, MIXED_PATTERNS, PATTERNS, parse_choice, parse_patterns

    models = [layers for _, layers in parse_models(model, shapes)]
    own_patterns, own_dtypes = _converted_types(model) or (
        (*PATTERNS, *MIXED_PATTERNS),
        machine.SERVED_DTYPES,
    )
    dtypes = parse_choice("--dtype", dtype, machine.SERVED_DTYPES) if dtype is not None else own_dtypes
    tunable = tuple(name for name in machine.tunable_names() if name in gemm.names(gemm.SPARSE))
    names = parse_choice("--library", library, tunable) if library is not None else None
    patterns = parse_patterns(pattern, mixed=True) if pattern is not None else own_patterns
    tokens = parse_token_counts(m)
    gpu = machine.require_gpu()
    names = names or (gemm.choose(gemm.SPARSE, gpu.device)[0],)
    if m is None and any(gemm.get(name).fuses for name in names):
        tokens = (*FEW_TOKENS, *tokens)
    todo = plan_jobs(machine.require_libraries(gpu, names), models, dtypes, patterns, tokens)
    planned = sum(len(job.tokens) * len(set(job.problems)) for job in todo)
    with open_session(gpu, began, time_limit, planned) as session:
        finished, counts = run(session, todo, force)
    result = {**counts, "tables": str(tables_folder()), "cells": session.cells, "planned": planned}
    print_result(finished, session.skipped, result, as_json)


def _converted_types(models: str | None) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
    """Return the patterns and operand types of converted checkpoints, or None unless all models are such."""
    from slidesparse.checkpoint.metadata import Metadata
    from slidesparse.checkpoint.w8a8 import parse_block
    from slidesparse.pattern import DENSE_WEIGHT
    from slidesparse.tune.shapes import split_list

    patterns, dtypes = {DENSE_WEIGHT}, set()  # unpruned layers of a pruned model run on the same backend
    for name in split_list(models or ""):
        path = Path(name) / "config.json"
        block = json.loads(path.read_bytes()).get("quantization_config") if path.is_file() else None
        metadata = Metadata.of_config(block)
        if block is None or metadata is None:
            return None
        patterns |= {entry.pattern.ratio for entry in metadata.layers.values()}
        dtypes |= {scheme.quant for scheme in parse_block(block).schemes}
    return (tuple(sorted(patterns)), tuple(sorted(dtypes))) if dtypes else None


@contextmanager
def open_session(gpu: Gpu, began: float, limit: float | None, planned: int) -> Iterator[Session]:
    """Open a session of ``planned`` cells, shown on stderr; it ends ``limit`` seconds after ``began`` (monotonic)."""
    from slidesparse.tune.inputs import Inputs
    from slidesparse.tune.measure import own_stream
    from slidesparse.tune.session import Session

    deadline = math.inf if limit is None else began + limit
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with own_stream(gpu.device) as clock, Progress(*columns, console=err, transient=True) as bar:
        task = bar.add_task("starting", total=planned)

        def show(label: str) -> None:
            bar.update(task, advance=1, description=label)

        yield Session(gpu, clock, Inputs(gpu.device, gpu.l2_bytes), deadline, show)


def parse_token_counts(text: str | None) -> tuple[int, ...]:
    from slidesparse.tune.shapes import TOKENS, parse_tokens

    return TOKENS if text is None else parse_tokens(text)


def parse_models(names: str | None, shapes: str | None) -> list[tuple[str, tuple[Layer, ...]]]:
    """Return (name, layers) for the requested models or shapes, or for all known models."""
    from slidesparse.tune.shapes import MODELS, ShapeError, find_model, parse_shapes, split_list

    if names is not None and shapes is not None:
        raise ShapeError("give either a model or --shapes, not both")
    if shapes is not None:
        return [("shapes", parse_shapes(shapes))]
    return [find_model(name) for name in (MODELS if names is None else split_list(names) or [""])]


def print_result(finished: bool, skipped: Sequence[str], result: dict[str, Any], as_json: bool) -> None:
    for line in skipped[:MAX_SHOWN]:
        err.print(escape(f"note: {line}"))
    if len(skipped) > MAX_SHOWN:
        err.print(f"note: and {len(skipped) - MAX_SHOWN} more")
    if not finished:
        err.print("the time limit was reached; repeat the command to continue")
    if as_json:
        print(json.dumps({"finished": finished, **result, "skipped": list(skipped)}, indent=1))
    else:
        for name, value in result.items():
            print(f"{name:<12} {value}")
