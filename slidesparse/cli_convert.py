"""The command ``slidesparse convert``: prune a model and write it as a W8A8 checkpoint."""

from __future__ import annotations

import json
import shlex
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

import slidesparse

if TYPE_CHECKING:
    from slidesparse.calibrate.run import Calibration
    from slidesparse.convert import Progress as Callback
    from slidesparse.convert import Report

USAGE, INTERRUPTED = 2, 130
MOST_NAMES = 3  # of layers, in a summary
LINE_SECONDS = 30.0  # between two lines of progress in a log
MOST_WORST = 5  # of layers, ranked by what pruning costs
WITHOUT_CALIBRATION = (
    "pruned by magnitude, without calibration data, which costs much of the accuracy that the pattern could keep; "
    "give texts of the kind the model will meet: --calib FILE.jsonl"
)

out = Console(highlight=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, soft_wrap=True)

_REGEX = "REGEX"


def register(app: typer.Typer, explained: Callable[[], AbstractContextManager[None]]) -> None:
    """Add the command; ``explained`` turns errors that a user can act on into a message and an exit code."""

    @app.command()
    def convert(
        source: Annotated[
            Path, typer.Argument(help="A Hugging Face folder: FP32, FP16, BF16, or W8A8.", metavar="SRC")
        ],
        target: Annotated[Path, typer.Argument(help="The folder to make.", metavar="OUT")],
        sparsity: Annotated[
            str, typer.Option("--sparsity", "-s", help="The pattern: 6:8, or 2_8, which is the same.")
        ],
        quant: Annotated[
            str | None, typer.Option(help="int8 or fp8; by default int8, or what a W8A8 source has.")
        ] = None,
        layout: Annotated[
            str, typer.Option(help="dense, which stock vLLM serves too, or slided, packed offline.")
        ] = "dense",
        method: Annotated[
            str | None,
            typer.Option(
                help="sparsegpt (with --calib the default), wanda, magnitude (without --calib the default), random."
            ),
        ] = None,
        calib: Annotated[
            str | None,
            typer.Option(
                help="Calibration data: FILE.jsonl (a text a line), FILE.npy (token ids), or random.",
                metavar="FILE",
            ),
        ] = None,
        samples: Annotated[
            int | None, typer.Option(help="How many samples to calibrate with; by default 128.", metavar="N")
        ] = None,
        seqlen: Annotated[
            int | None,
            typer.Option(help="Tokens of a sample; by default 2048, or what the model takes.", metavar="N"),
        ] = None,
        device: Annotated[
            str | None,
            typer.Option(help="Where to calibrate: auto (the default: a GPU if there is one), cpu, cuda."),
        ] = None,
        sweeps: Annotated[
            int | None,
            typer.Option(
                help="How often sparsegpt goes over a layer again to lessen its error; by default 4.",
                metavar="N",
            ),
        ] = None,
        target_of: Annotated[
            str | None,
            typer.Option(
                "--target",
                help="What sparsegpt's layers should give: dense, the default, what the dense model does, or own.",
            ),
        ] = None,
        finetune: Annotated[
            int | None,
            typer.Option(
                help="How often each layer of the model is trained on the samples after sparsegpt; by default 4, "
                "0: not at all.",
                metavar="EPOCHS",
            ),
        ] = None,
        resume: Annotated[
            bool, typer.Option("--resume", help="Go on from the layers that a killed run finished.")
        ] = False,
        layer: Annotated[
            list[str] | None,
            typer.Option(
                help="Another pattern for some layers, such as 'down_proj=8:10'; may be repeated, the last counts.",
                metavar="REGEX=PATTERN",
            ),
        ] = None,
        skip: Annotated[
            list[str] | None,
            typer.Option(
                help="Quantize layers whose name matches without pruning them; may be repeated.",
                metavar=_REGEX,
            ),
        ] = None,
        skip_worst: Annotated[
            str | None,
            typer.Option(
                help="Skip also so many of the layers, those that pruning costs most, such as 5%.",
                metavar="PERCENT",
            ),
        ] = None,
        ignore: Annotated[
            list[str] | None,
            typer.Option(
                help="Leave layers whose name matches this regex as they are; may be repeated.",
                metavar=_REGEX,
            ),
        ] = None,
        linear: Annotated[
            str | None,
            typer.Option(help="Which layers to prune, for architectures that are not known.", metavar=_REGEX),
        ] = None,
        seed: Annotated[int, typer.Option(help="Of the choice of samples, and of --method random.")] = 0,
        report: Annotated[
            Path | None,
            typer.Option(help="Write what became of each layer to this JSON file.", metavar="FILE.json"),
        ] = None,
        dry_run: Annotated[
            bool,
            typer.Option("--dry-run", help="Check everything and say what would be done; write nothing."),
        ] = False,
    ) -> None:
        """Prune a model to a pattern and write it as a W8A8 checkpoint."""
        pattern = _pattern(sparsity)
        with explained(), _resumable(calib is not None), _progress_bar() as progress:
            from slidesparse.convert import convert as run

            data = {"samples": samples, "seqlen": seqlen, "device": device, "resume": resume or None}
            ways = {"sweeps": sweeps, "target": target_of, "finetune": finetune}
            calibration = _calibration(calib, method, data, ways)
            _require_writable(report)
            done = run(
                source,
                target,
                pattern=pattern,
                quant=quant,
                layout=layout,
                method=method,
                ignore=ignore or [],
                linear=linear,
                seed=seed,
                layer=layer or [],
                skip=skip or [],
                skip_worst=skip_worst,
                calibration=calibration,
                check=report is not None,
                dry_run=dry_run,
                progress=progress,
            )
        if report is not None and not dry_run:
            with explained():
                report.write_text(json.dumps(to_json(done), indent=2) + "\n")
        _warn(done)
        _summarize(done, dry_run)


def _refuse(message: object) -> None:
    err.print(f"[bold red]error:[/] {escape(str(message))}")
    raise typer.Exit(USAGE)


def _pattern(text: str) -> Any:
    from slidesparse.pattern import PatternError, SlidePattern

    try:
        return SlidePattern.parse(text)
    except PatternError as error:
        _refuse(f"--sparsity: {error}")


def _calibration(
    calib: str | None, method: str | None, data: dict[str, Any], ways: dict[str, Any]
) -> Calibration | None:
    """How to calibrate, by the options that were given: ``data`` of any method, ``ways`` of sparsegpt alone."""
    from slidesparse.calibrate.run import Calibration

    data, ways = ({n: v for n, v in found.items() if v is not None} for found in (data, ways))
    given = " and ".join(f"--{name}" for name in ways if method not in (None, "sparsegpt"))
    if given:
        _refuse(f"--method {method} has no use for {given}, which sparsegpt has; leave {given} out")
    if calib is not None:
        return Calibration(calib, **data, **ways)
    if data or ways:
        given = " and ".join(f"--{name}" for name in (*data, *ways))
        _refuse(
            f"without --calib nothing is calibrated, so {given} would do nothing: give --calib FILE as well"
        )
    return None


def _require_writable(report: Path | None) -> None:
    """Before hours of work: that the report can be written."""
    if report is None:
        return
    if report.is_dir() or not report.resolve().parent.is_dir():
        _refuse(f"--report {report}: it is a folder, or its folder is not there; name a file in one that is")
    new = not report.exists()
    try:
        report.open("a").close()
    except OSError as error:
        _refuse(f"--report {report}: {error.strerror}; name a file that can be written")
    if new:
        report.unlink()


@contextmanager
def _resumable(calibrated: bool) -> Iterator[None]:
    """An interrupted calibration leaves its finished layers, and says so."""
    try:
        yield
    except KeyboardInterrupt:
        if not calibrated:
            raise
        err.print("interrupted; --resume goes on from the layers that are finished")
        raise typer.Exit(INTERRUPTED) from None


def _progress_lines() -> Callback:
    """For a log: a line on stderr at most every LINE_SECONDS, so that what is done sooner says nothing."""
    called = said = time.monotonic()
    current, began = "", called

    def advance(phase: str, done: int, total: int) -> None:
        nonlocal called, said, current, began
        if phase != current:
            current, began = phase, called  # since the phase before ended
        called = time.monotonic()
        if called - said < LINE_SECONDS or not 0 < done < total:
            return
        said, took = called, called - began
        err.print(
            f"{phase} {done / total:.0%} in {took:.0f} s, about {took * (total - done) / done:.0f} s left"
        )

    return advance


@contextmanager
def _progress_bar() -> Iterator[Callback]:
    """A bar for each pass, on stderr; lines when that is not a terminal."""
    if not err.is_terminal:
        yield _progress_lines()
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=err, transient=True) as bar:
        tasks: dict[str, Any] = {}

        def advance(phase: str, done: int, total: int) -> None:
            if phase not in tasks:
                tasks[phase] = bar.add_task(f"{phase:8}", total=total)
            bar.update(tasks[phase], completed=done)

        yield advance


def _warn(report: Report) -> None:
    if report.method == "magnitude" and not report.samples and report.made:
        err.print(f"[yellow]warning:[/] {escape(WITHOUT_CALIBRATION)}")
    if report.note:
        err.print(f"[yellow]note:[/] {escape(report.note)}")


def _summarize(report: Report, dry_run: bool) -> None:
    out.print(escape(f"pattern   {report.pattern}; as a flag, SPARSITY={report.pattern.flag}"))
    out.print(escape(f"layers    {len(report.pruned)} in {report.quant} W8A8, {report.layout} layout"))
    for pattern, count in Counter(p.ratio for p in report.patterns.values() if p != report.pattern).items():
        out.print(escape(f"          {count} of them at {pattern}"))
    if report.samples:
        out.print(escape(f"method    {report.method}, calibrated with {report.samples}"))
    for verb, names in (("skipped", report.skipped), ("kept", report.kept)):
        reasons = defaultdict(list)
        for name, why in names.items():
            reasons[why].append(name)
        how = "quantized, not pruned" if verb == "skipped" else "as in the source"
        for why, found in sorted(reasons.items()):
            shown = f"{', '.join(found[:MOST_NAMES])}{', ...' if len(found) > MOST_NAMES else ''}"
            out.print(escape(f"{verb:9} {len(found)} {how} ({why}): {shown}"))
    size = f"{report.bytes_in / 1e6:.1f} MB -> {report.bytes_out / 1e6:.1f} MB"
    if dry_run:
        out.print(f"bytes     {size}")
        out.print("dry run   nothing was written")
        return
    _show_errors(report)
    out.print(f"bytes     {size} in {report.seconds:.1f} s, {report.rate:.0f} MB/s of input")
    out.print(escape(f"serve     vllm serve {shlex.quote(str(report.out))}"))


def _show_errors(report: Report) -> None:
    """The layers that pruning costs most, if calibration measured it."""
    errors = {row["name"]: row for row in report.layers}
    ranked = report.sensitivity[:MOST_WORST]
    for name in ranked:
        row = errors[name]
        found = f"{row['error_pruned']:.4f} pruned, {row['error_quantized']:.4f} quantized"
        if row["error_finetuned"] is not None:
            found += f", {row['error_finetuned']:.4f} fine-tuned"
        out.print(escape(f"error     {found}: {name}{'  (the largest)' if name == ranked[0] else ''}"))


def to_json(report: Report) -> dict[str, Any]:
    """What ``--report`` writes."""
    return {
        "slidesparse": slidesparse.__version__,
        "source": str(report.source),
        "out": str(report.out),
        "pattern": report.pattern.ratio,
        "quant": report.quant,
        "layout": report.layout,
        "method": report.method,
        "calibration": report.samples or None,
        "seconds": round(report.seconds, 3),
        "violations": sum(row["violations"] for row in report.layers),
        "dead_columns": sum(row["dead_columns"] for row in report.layers),
        "layers": list(report.layers),
        "sensitivity": report.sensitivity,
        "skipped": report.skipped,
        "kept": report.kept,
    }
