"""The command ``slidesparse build``."""

from __future__ import annotations

import json
import time
from typing import Annotated, Any

import typer
from rich.markup import escape

from slidesparse.build.compile import TARGETS, build, cache_folder, target_path
from slidesparse.build.find import ToolchainError
from slidesparse.cli.console import Json, err, out
from slidesparse.errors import EnvironmentFault, SlideSparseError


def build_targets(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME]...", help=f"What to compile: {', '.join(TARGETS)}. Default: all."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Compile the kernels ahead of time instead of when vLLM first starts.  Needs no GPU.

    If one cannot be compiled, the others still are, and the command prints the reason and exits with 3.
    """
    unknown = [name for name in names or () if name not in TARGETS]
    if unknown:
        raise SlideSparseError(f"{unknown[0]!r} is not a build target; choose from {', '.join(TARGETS)}")
    results: list[dict[str, Any]] = []
    failed: list[str] = []
    for name in names or TARGETS:
        began = time.monotonic()
        try:
            target = target_path(name)
            state = "up to date" if target.is_file() else "built"
            if state == "built":
                err.print(f"building the {TARGETS[name].title} ...")
            result = {"state": state, "path": str(build(name))}
        except ToolchainError as error:
            failed.append(f"the {TARGETS[name].title}: {error}")
            result = {"state": "failed", "what": error.what, "remedy": error.remedy}
        results.append({"name": name, **result, "seconds": round(time.monotonic() - began, 1)})
        if not as_json and "path" in result:
            out.print(escape(f"{name:<12} {state:<10} {results[-1]['seconds']:>6} s  {result['path']}"))
    if as_json:
        print(json.dumps({"cache": str(cache_folder()), "targets": results}, indent=2))
    if failed:
        raise EnvironmentFault("could not compile " + "\n".join(failed))
