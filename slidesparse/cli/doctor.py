"""The command ``slidesparse doctor``."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.markup import escape

from slidesparse.cli.console import Json, out


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

    With MODEL: exit 0 if SlideSparse serves it here, 1 if not, 3 if this machine lacks something for it.
    """
    from slidesparse.doctor import announce_compiling, examine, lines, main

    if model is None:
        main(["--json"] if as_json else [])
        return
    from slidesparse.checkpoint.hub import local_folder

    folder = local_folder(model)
    announce_compiling()
    report = examine(model, folder)
    if as_json:
        print(json.dumps(report.to_json(), indent=2))
    else:
        for line in lines(report):
            out.print(escape(line))
    raise typer.Exit(report.code)
