"""The commands ``slidesparse eval``: evaluate a checkpoint as vLLM serves it."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from slidesparse.cli.console import Json, application, out
from slidesparse.errors import SlideSparseError

if TYPE_CHECKING:
    from slidesparse.evaluate.perplexity import Interval


OURS = ("model", "skip_tokenizer_init", "logprobs_mode")  # arguments of vllm.LLM that measuring depends on

app = application("Measure the accuracy of a checkpoint as vLLM serves it.")


@app.command()
def perplexity(
    model: Annotated[
        str,
        typer.Argument(help="The checkpoint to evaluate: a folder, or ORG/NAME on the Hub.", metavar="DIR"),
    ],
    data: Annotated[
        str,
        typer.Option(
            help="Evaluation text: FILE.txt, FILE.jsonl, FILE.json, FILE.parquet, or token ids in FILE.npy.",
            metavar="FILE",
        ),
    ],
    against: Annotated[
        str | None,
        typer.Option(help="A checkpoint to compare with, such as the original model.", metavar="DIR"),
    ] = None,
    seqlen: Annotated[
        int | None,
        typer.Option(
            help="Tokens per window; default 2048, or one less than the model's maximum sequence length if that is "
            "shorter.",
            metavar="N",
        ),
    ] = None,
    samples: Annotated[int | None, typer.Option(help="Use only the first N samples.", metavar="N")] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(
            help="An argument of vllm.LLM, such as dtype=float32; may be repeated.", metavar="NAME=VALUE"
        ),
    ] = None,
    log: Annotated[
        Path | None, typer.Option(help="Append what vLLM prints to this file.", metavar="FILE")
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure the perplexity of a language model; with --against, also how much it rises over another's."""
    from slidesparse.checkpoint.converted import open_checkpoint
    from slidesparse.checkpoint.hub import local_folder
    from slidesparse.checkpoint.storage import is_pickled
    from slidesparse.checkpoint.tokens import has_tokenizer, require_readable
    from slidesparse.evaluate.perplexity import measure, window_of, windows

    folders = [local_folder(name) for name in (model, against) if name is not None]
    for folder in folders:
        if not is_pickled(folder):  # which vLLM alone reads
            open_checkpoint(folder)  # raises an error for what is no checkpoint, before vLLM starts
        require_readable(folder)
    length = window_of(*folders) if seqlen is None else seqlen
    ids = windows(data, folders[0], length, samples)
    if against and has_tokenizer(folders[1]) and windows(data, folders[1], length, samples) != ids:
        raise SlideSparseError(
            f"--against {against} has another tokenizer than {model}, which makes other token ids of {data}, so their "
            "perplexities do not compare; evaluate each alone"
        )
    result = measure(folders[0], ids, folders[1] if against else None, _arguments(option), log)
    print(json.dumps(result, default=asdict, indent=2)) if as_json else _show_perplexity(result)


def _arguments(options: list[str] | None) -> dict[str, Any]:
    arguments: dict[str, Any] = {}
    for text in options or []:
        name, separator, value = text.partition("=")
        if not separator or not name.isidentifier():
            raise SlideSparseError(f"--option {text!r} is not of the form NAME=VALUE, such as dtype=float32")
        if name in OURS:
            raise SlideSparseError(
                f"--option {name} is set by this command, as its figures depend on it; leave it out"
            )
        try:
            arguments[name] = json.loads(value)
        except ValueError:
            arguments[name] = value
    return arguments


def _show(name: str, interval: Interval, windows: int, digits: int = 4, unit: str = "") -> None:
    low, high = (f"{value:.{digits}f}{unit}" for value in (interval.ci_low, interval.ci_high))
    known = f"95%: {low} to {high}" if windows > 1 else "of one window, which has no interval"
    out.print(escape(f"{name:22} {interval.value:.{digits}f}{unit}  ({known})"))


def _show_perplexity(result: dict[str, Any]) -> None:
    out.print(escape(f"{'model':22} {result['model']}: {result['served_by'] or 'stock vLLM'}"))
    out.print(f"{'data':22} {result['windows']} windows, {result['tokens']} tokens scored")
    _show("perplexity", result["perplexity"], result["windows"])
    if "against" not in result:
        return
    out.print(escape(f"{'against':22} {result['against']}: {result['against_served_by'] or 'stock vLLM'}"))
    _show("against: perplexity", result["against_perplexity"], result["windows"])
    _show("increase", result["delta_pct"], result["windows"], 3, "%")
