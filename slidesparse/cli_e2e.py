"""The command ``slidesparse bench e2e``: whole models through ``vllm bench throughput``, on a GPU or a CPU."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from slidesparse.cli_bench import USAGE, Json, Limit, Out, err, explained, fail

if TYPE_CHECKING:
    from slidesparse.bench.e2e import Run, Workload
    from slidesparse.bench.e2e_models import Model
    from slidesparse.bench.e2e_resident import Profiled
    from slidesparse.bench.e2e_runs import E2eBench, Failure
    from slidesparse.bench.measure import Deadline

FAILED = 1


def register(bench: typer.Typer) -> None:
    """Add the command to the group ``bench``."""
    bench.command("e2e")(e2e)


@contextmanager
def _refused() -> Iterator[None]:
    """As `explained`, with the errors of checkpoints and options besides."""
    with explained():
        from slidesparse.bench.e2e_models import E2eError
        from slidesparse.metadata import MetadataError

        try:
            yield
        except (E2eError, MetadataError) as error:
            fail(USAGE, error)


def e2e(
    model: Annotated[
        Path | None,
        typer.Option(
            help="A W8A8 checkpoint, or a folder of them named by pattern, as 2_8 (and dense, not pruned)."
        ),
    ] = None,
    models: Annotated[
        str | None, typer.Option(help="Instead of --model: PATTERN=DIR,..., such as 6:8=a,2:4=b,dense=c.")
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="The model's name in the table; default from the folder.")
    ] = None,
    patterns: Annotated[str | None, typer.Option(help="Comma-separated; default all there are.")] = None,
    stages: Annotated[str, typer.Option(help="Comma-separated.")] = "prefill,decode",
    m: Annotated[
        str | None,
        typer.Option("--m", help="Tokens of a step; default 512 to 65536 for prefill, 64 to 512 for decode."),
    ] = None,
    decode_m: Annotated[
        str | None, typer.Option("--decode-m", help="For decode, instead of --m: its sequences.")
    ] = None,
    systems: Annotated[
        str,
        typer.Option(
            help="stock: without the plugin; off: DISABLE_SLIDESPARSE=1; cublaslt; sparse; cusparselt: sparse by that "
            "backend; sparse+dense: the dense weights kept, SLIDESPARSE_KEEP_DENSE=1; unfused: norms and "
            "activations by themselves, SLIDESPARSE_FUSE=0."
        ),
    ] = "stock,off,cublaslt,sparse",
    rounds: Annotated[int, typer.Option(min=1, help="Runs of each, in alternating order.")] = 3,
    prompt_len: Annotated[int, typer.Option(help="Tokens of a prompt of prefill at most.")] = 1024,
    prefill_steps: Annotated[int, typer.Option(help="Steps of M tokens in a prefill run.")] = 128,
    decode_steps: Annotated[int, typer.Option(help="Output tokens of a sequence in a decode run.")] = 256,
    decode_prompt_len: Annotated[int, typer.Option(help="Tokens of a prompt of decode.")] = 16,
    vllm_args: Annotated[
        str, typer.Option(help="More options of vllm bench throughput, for all systems, as one string.")
    ] = "",
    out: Out = Path("bench_out"),
    time_limit: Limit = None,
    run_limit: Annotated[float, typer.Option(help="Seconds of one run, loading included.")] = 1800.0,
    resident: Annotated[
        bool,
        typer.Option(
            "--resident", help="Keep all engines loaded, side by side on the GPU, and let them take turns."
        ),
    ] = False,
    profile: Annotated[
        bool,
        typer.Option(
            "--profile",
            help="With --resident, on a GPU: record a step's kernels; writes OUT/e2e_profile.csv.",
        ),
    ] = False,
    profile_m: Annotated[
        str | None, typer.Option("--profile-m", help="With --profile: at these M only; it takes its time.")
    ] = None,
    profile_patterns: Annotated[
        str | None,
        typer.Option(
            "--profile-patterns", help="With --profile: at these patterns and of dense systems only."
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the commands still to run, and run none.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Tokens per second of whole models: stock vLLM, dense cuBLASLt, sparse; writes OUT/e2e.csv."""
    with _refused():
        from slidesparse.bench.e2e import DECODE, PREFILL, SLIDED, STAGES, SYSTEMS, TOKENS, Workload
        from slidesparse.bench.e2e import runs as plan
        from slidesparse.bench.e2e_models import find_model
        from slidesparse.bench.e2e_resident import Profiled
        from slidesparse.bench.measure import Deadline
        from slidesparse.bench.shapes import parse_choice, parse_patterns, parse_tokens

        if (profile and not resident) or ((profile_m or profile_patterns) and not profile):
            fail(USAGE, "--profile-m and --profile-patterns need --profile, and that --resident")
        deadline = Deadline(time_limit)
        chosen = parse_choice("--systems", systems, tuple(SYSTEMS))
        found = find_model(
            model,
            models,
            name,
            parse_patterns(patterns) if patterns else None,
            dense=not set(chosen) <= set(SLIDED),
            sparse=not set(chosen).isdisjoint(SLIDED),
        )
        work = Workload(
            prompt_len, prefill_steps, decode_prompt_len, decode_steps, tuple(shlex.split(vllm_args))
        )
        stages_asked = parse_choice("--stages", stages, STAGES)
        asked = {PREFILL: m, DECODE: decode_m or m}
        tokens = {stage: parse_tokens(text) for stage, text in asked.items() if text}
        runs = plan(found, stages_asked, {**TOKENS, **tokens}, chosen, rounds, work)
        if dry_run:
            _print_commands(out, runs, work)
            return
        cells = Profiled(
            frozenset(parse_tokens(profile_m)) if profile_m else None,
            frozenset(parse_patterns(profile_patterns)) if profile_patterns else None,
        )
        bench = _prepare(out, found, chosen, work, deadline, resident, cells if profile else None)
        with bench:
            bench.run_seconds = run_limit
            finished = _run(bench, runs)
        _report(bench, finished, as_json)
    if bench.failures:
        raise typer.Exit(FAILED)


def _print_commands(out: Path, runs: Sequence[Run], work: Workload) -> None:
    from slidesparse.bench import machine
    from slidesparse.bench.e2e import command
    from slidesparse.bench.e2e_runs import COLUMNS, KEY, find_vllm, log_of, shown, vllm_version
    from slidesparse.bench.records import Records

    try:
        vllm = find_vllm()
    except machine.MissingError:
        vllm = "vllm"
    version = vllm_version(machine.cpu_conditions())
    table = out / "e2e.csv"
    done = Records(table, COLUMNS, KEY) if table.exists() else None
    for run in runs:
        if not (done and done.has(**run.key)):
            result = log_of(out, run).with_suffix(".json")
            print(shown(run, command(vllm, version, run, work, result)))


def _prepare(
    out: Path,
    model: Model,
    systems: Sequence[str],
    work: Workload,
    deadline: Deadline,
    resident: bool,
    profile: Profiled | None,
) -> E2eBench:
    """Write the conditions, and open the table."""
    from slidesparse.bench import e2e_resident, e2e_runs
    from slidesparse.bench.e2e import SLIDED
    from slidesparse.bench.e2e_models import DENSE
    from slidesparse.bench.records import write_conditions

    vllm = e2e_runs.find_vllm()
    facts = e2e_runs.conditions(systems)
    folders = {pattern: str(variant.folder) for pattern, variant in model.sparse.items()}
    if not set(systems) <= set(SLIDED):
        folders[DENSE] = str(model.dense.folder)
    facts |= {f"{model.name} {pattern} checkpoint": folder for pattern, folder in folders.items()}
    facts["workload"] = e2e_resident.workload(work) if resident else work.conditions
    write_conditions(out / "e2e.json", facts, same=e2e_runs.CONDITIONS)
    version = e2e_runs.vllm_version(facts)
    if resident:
        return e2e_resident.ResidentBench(out, vllm, version, work, deadline, profile=profile)
    return e2e_runs.E2eBench(out, vllm, version, work, deadline)


def _run(bench: E2eBench, runs: Sequence[Run]) -> bool:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=err, transient=True) as bar:
        task = bar.add_task("starting", total=len(runs))

        def begin(done: int, label: str) -> None:
            bar.update(task, completed=done, description=label)

        bench.begin, bench.say = begin, lambda line: err.print(escape(line))
        return bench.run(runs)


def _report(bench: E2eBench, finished: bool, as_json: bool) -> None:
    for failure in bench.failures:
        err.print(f"[bold red]failed:[/] {escape(failure.run.label)}: {escape(failure.reason)}")
        err.print(escape(f"  the end of {failure.log}:"))
        for line in failure.lines:
            err.print(escape(f"    {line}"))
    if not finished:
        err.print("the time limit was reached; repeat the command to go on")
    elif bench.failures:
        err.print("repeat the command to try what failed again")
    rows, table = len(bench.records.rows), str(bench.out / "e2e.csv")
    if as_json:
        failed = [_failure(failure) for failure in bench.failures]
        print(json.dumps({"finished": finished, "rows": rows, "table": table, "failed": failed}, indent=1))
    else:
        print(f"rows         {rows}\ntable        {table}")


def _failure(failure: Failure) -> dict[str, object]:
    return {**failure.run.key, "reason": failure.reason, "log": str(failure.log)}
