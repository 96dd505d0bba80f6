"""Consoles, progress display, and the conversion of errors to messages and exit codes."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, NoReturn

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
from rich.table import Table
from typer.core import TyperGroup

from slidesparse.errors import ENVIRONMENT, INTERRUPTED, USAGE, SlideSparseError, is_out_of_memory

LINE_SECONDS = 30.0  # least time between two lines of progress in a log
NO_MEMORY = "the memory of this machine is full; end other programs, or use a machine with more"
NO_GPU_MEMORY = "the memory of a GPU is full; end other programs that use it, or use one with more"
MAX_COLUMNS = 1000  # characters of a table's line
# Packages that commands import when they need them
LIBRARIES = ("datasets", "huggingface_hub", "numpy", "pyarrow", "regex", "torch", "transformers")


class Remarks(Console):
    """The console of stderr, which ends no command if it cannot be written, as where the disk of a log is full."""

    def print(self, *objects: Any, **options: Any) -> None:
        """Print what can be printed."""
        try:
            super().print(*objects, **options)
        except OSError:
            del self._buffer[:]  # which would be printed again with what follows


out = Console(highlight=False, soft_wrap=True)
err = Remarks(stderr=True, highlight=False, soft_wrap=True)

USAGE_ERROR: Any = typer.BadParameter.__base__  # of click, or of the copy of it in newer releases of typer
JSON = "--json"

Json = Annotated[bool, typer.Option(JSON, help="Print the result, or the error, as JSON.")]
Layout = Annotated[
    str,
    typer.Option(
        help="How weights are stored: dense (ordinary weights with zeros, which stock vLLM can also serve) or slided "
        "(already rewritten as overlapping 2:4 windows)."
    ),
]


def show(title: str, text: object) -> None:
    """Print a line of a summary."""
    out.print(escape(f"{title:9} {text}"))


def warn(text: str, kind: str = "warning") -> None:
    """Print a warning, or another ``kind`` of remark."""
    err.print(f"[yellow]{kind}:[/] {escape(text)}")


def note_work(folder: str | Path) -> None:
    """Print a note if an earlier conversion left its work beside a checkpoint, in a hidden folder."""
    from slidesparse.calibrate.resume import left_beside

    if note := left_beside(Path(folder)):
        warn(note, "note")


def whole(table: Table) -> Console:
    """Return a console for stdout that is wide enough for a table to be printed without truncating its cells."""
    # rich ignores a width without a height in a dumb terminal
    natural = Console(width=MAX_COLUMNS, height=1).measure(table).maximum
    return Console(highlight=False, width=natural, height=1)


def fail(code: int, message: object, as_json: bool = False) -> NoReturn:
    """Print an error, with ``as_json`` on stdout, too, and end the command with exit code ``code``."""
    if as_json:
        with suppress(OSError):  # which may be the error
            print(json.dumps({"code": code, "verdict": str(message)}, indent=2))
    err.print(f"[bold red]error:[/] {escape(str(message))}")
    raise typer.Exit(code)


class Commands(TyperGroup):
    """A group of commands."""

    def invoke(self, ctx: Any) -> Any:
        """Run the requested command; turn an error that a user can act on into a message and its class's exit code."""
        as_json = JSON in ctx.args  # also where options are wrong, so that none is known to be set
        try:
            return super().invoke(ctx)
        except USAGE_ERROR as error:
            if not as_json:
                raise
            fail(USAGE, error.format_message(), as_json)
        except SlideSparseError as error:
            fail(error.exit_code, error, as_json)
        except ImportError as error:
            missing = (error.name or "").partition(".")[0]
            if missing not in LIBRARIES:
                raise
            reason = f"this command needs {missing}, which cannot be imported ({error})"
            words = f"{reason}: pip install {missing}, or upgrade it"
            fail(ENVIRONMENT, words, as_json)
        except BrokenPipeError:
            raise  # its reader, such as `head`, has closed the pipe: Typer ends the command without a message
        except (MemoryError, OSError, RuntimeError) as error:
            if is_out_of_memory(error):
                of_gpu = type(error).__name__ == "OutOfMemoryError"  # torch's
                fail(ENVIRONMENT, NO_GPU_MEMORY if of_gpu else NO_MEMORY, as_json)
            if not isinstance(error, OSError):
                raise
            words = f"{error.strerror or error}: {error.filename or 'while reading or writing'}"
            fail(ENVIRONMENT, words, as_json)
        except KeyboardInterrupt as error:  # its arguments may say how to continue
            err.print(escape("; ".join(["interrupted", *map(str, error.args)])))
            raise typer.Exit(INTERRUPTED) from None


def application(help_text: str, **settings: Any) -> typer.Typer:
    """Return a Typer application of `Commands`; ``settings`` override the usual ones."""
    usual: dict[str, Any] = {
        "cls": Commands,
        "help": help_text,
        "no_args_is_help": True,
        "add_completion": False,
        "pretty_exceptions_enable": False,
        "context_settings": {"help_option_names": ["-h", "--help"]},
    }
    return typer.Typer(**{**usual, **settings})


@contextmanager
def byte_progress(lines: bool = False) -> Iterator[Callable[..., None]]:
    """Show progress on stderr: a bar for each phase, or in a log, with ``lines``, a line every LINE_SECONDS.

    Yields a function of the phase, the bytes done, the total bytes, and possibly a text on how it goes.
    """
    if not err.is_terminal:
        yield _progress_lines() if lines else (lambda *_: None)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=err, transient=True) as bar:
        tasks: dict[str, Any] = {}

        def advance(phase: str, done: int, total: int, detail: str = "") -> None:
            if phase not in tasks:
                tasks[phase] = bar.add_task(phase, total=total)
            bar.update(tasks[phase], completed=done, total=total, description=f"{phase:8} {detail}".rstrip())

        yield advance


def _progress_lines() -> Callable[..., None]:
    """Return a function that prints a line at most every LINE_SECONDS, and so none for a short phase."""
    called = printed = began = time.monotonic()
    current = ""

    def advance(phase: str, done: int, total: int, detail: str = "") -> None:
        nonlocal called, printed, current, began
        now = time.monotonic()
        if phase != current:
            began = called if current else now  # when the phase before ended, if there was one
        current, called = phase, now
        if called - printed < LINE_SECONDS or not 0 < done < total:
            return
        printed, took = called, called - began
        left = f", about {took * (total - done) / done:.0f} s left" if 20 * done >= total else ""
        err.print(f"{phase} {done / total:.0%} in {took:.0f} s{left}{detail and f': {detail}'}")

    return advance
