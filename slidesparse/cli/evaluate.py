"""The commands ``slidesparse eval``: evaluate a checkpoint as vLLM serves it."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from slidesparse.cli.console import Json, application, out, warn
from slidesparse.errors import SlideSparseError

if TYPE_CHECKING:
    from slidesparse.evaluate.perplexity import Interval


Folder = Annotated[Path, typer.Argument(help="The checkpoint to evaluate.", metavar="DIR")]
Against = Annotated[
    Path | None, typer.Option(help="A checkpoint to compare with, such as the original model.", metavar="DIR")
]
Samples = Annotated[int | None, typer.Option(help="Use only the first N samples.", metavar="N")]
Options = Annotated[
    list[str] | None,
    typer.Option(
        "--option",
        help="An argument of vllm.LLM, such as dtype=float32; may be repeated.",
        metavar="NAME=VALUE",
    ),
]
Log = Annotated[Path | None, typer.Option(help="Append what vLLM prints to this file.", metavar="FILE")]


app = application("Measure the accuracy of a checkpoint as vLLM serves it.")


@app.command()
def perplexity(
    model: Folder,
    data: Annotated[
        str,
        typer.Option(help="Evaluation text: FILE.txt, FILE.jsonl, or token ids in FILE.npy.", metavar="FILE"),
    ],
    against: Against = None,
    seqlen: Annotated[
        int | None,
        typer.Option(
            help="Tokens per window; default 2048, or one less than the model's maximum sequence length if that is "
            "shorter.",
            metavar="N",
        ),
    ] = None,
    samples: Samples = None,
    top: Annotated[
        int,
        typer.Option(
            help="Number of most likely tokens that the KL divergence covers; -1 for the whole vocabulary, if memory "
            "allows.",
            metavar="N",
        ),
    ] = 20,
    option: Options = None,
    log: Log = None,
    as_json: Json = False,
) -> None:
    """Measure the perplexity of a language model; with --against, also top-1 agreement and KL divergence."""
    from slidesparse.evaluate.perplexity import measure
    from slidesparse.evaluate.texts import config_of, window_of, windows

    for folder in filter(None, (model, against)):
        config_of(folder)  # raises an error unless it is a checkpoint
    if seqlen is None:
        seqlen = window_of(model, *([against] if against else []))
    ids = windows(data, model, seqlen, samples)
    result = measure(model, ids, against, top, _arguments(option), log)
    _warn(result)
    print(json.dumps(result, default=asdict, indent=2)) if as_json else _show_perplexity(result)


def _arguments(options: list[str] | None) -> dict[str, Any]:
    arguments: dict[str, Any] = {}
    for text in options or []:
        name, separator, value = text.partition("=")
        if not separator or not name.isidentifier():
            raise SlideSparseError(f"--option {text!r} is not of the form NAME=VALUE, such as dtype=float32")
        try:
            arguments[name] = json.loads(value)
        except ValueError:
            arguments[name] = value
    return arguments


def _warn(result: dict[str, Any]) -> None:
    """Warn if a converted checkpoint was not served by the plugin."""
    from slidesparse.checkpoint.metadata import KEY
    from slidesparse.evaluate.texts import config_of

    for name in ("model", "against"):
        folder, served = result.get(name), result.get("served_by" if name == "model" else "against_served_by")
        if folder and not served and KEY in (config_of(Path(folder)).get("quantization_config") or {}):
            warn(
                f"{folder} was served by stock vLLM, without the plugin; install slidesparse in vLLM's environment, "
                "unset DISABLE_SLIDESPARSE, and add slidesparse to VLLM_PLUGINS if that is set"
            )


def _show(name: str, interval: Interval, digits: int = 4, unit: str = "") -> None:
    low, high = (f"{value:.{digits}f}{unit}" for value in (interval.ci_low, interval.ci_high))
    out.print(escape(f"{name:22} {interval.value:.{digits}f}{unit}  (95%: {low} to {high})"))


def _show_perplexity(result: dict[str, Any]) -> None:
    out.print(escape(f"{'model':22} {result['model']}: {result['served_by'] or 'stock vLLM'}"))
    out.print(f"{'data':22} {result['windows']} windows, {result['tokens']} tokens scored")
    _show("perplexity", result["perplexity"])
    if "against" not in result:
        return
    out.print(escape(f"{'against':22} {result['against']}: {result['against_served_by'] or 'stock vLLM'}"))
    _show("against: perplexity", result["against_perplexity"])
    _show("increase", result["delta_pct"], 3, "%")
    _show("top-1 agreement", result["top1_agreement"])
    exact = "kl" in result
    _show("KL divergence" if exact else "KL divergence >=", result["kl" if exact else "kl_at_least"], 5)
