"""The commands ``slidesparse eval``: evaluate a checkpoint as vLLM serves it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from slidesparse.cli.console import Json, application, err, out
from slidesparse.errors import SlideSparseError

if TYPE_CHECKING:
    from slidesparse.evaluate.embedding import Embedding
    from slidesparse.evaluate.engine import Engine
    from slidesparse.evaluate.intervals import Interval
    from slidesparse.evaluate.perplexity import Perplexity


Folder = Annotated[Path, typer.Argument(help="The checkpoint to evaluate.", metavar="DIR")]
Against = Annotated[
    Path | None, typer.Option(help="A checkpoint to compare with, such as the original.", metavar="DIR")
]
Samples = Annotated[int | None, typer.Option(help="Use only the first N samples.", metavar="N")]
Options = Annotated[
    list[str] | None,
    typer.Option(
        "--option",
        help="An option of vLLM's LLM, such as dtype=float32; may be repeated.",
        metavar="NAME=VALUE",
    ),
]
Log = Annotated[Path | None, typer.Option(help="Append what vLLM prints to this file.", metavar="FILE")]


app = application("Evaluate a checkpoint as vLLM serves it.")


@app.command()
def perplexity(
    model: Folder,
    data: Annotated[str, typer.Option(help="Text: FILE.txt, FILE.jsonl, or ids: FILE.npy.", metavar="FILE")],
    against: Against = None,
    seqlen: Annotated[
        int | None,
        typer.Option(
            help="Tokens of a window; default 2048, or one less than the model's positions if these are fewer.",
            metavar="N",
        ),
    ] = None,
    samples: Samples = None,
    top: Annotated[
        int,
        typer.Option(
            help="Most likely tokens to compare for KL; -1 for all, if they fit into memory.", metavar="N"
        ),
    ] = 20,
    option: Options = None,
    log: Log = None,
    as_json: Json = False,
) -> None:
    """Measure a decoder's perplexity, and compare it with another checkpoint: difference, top-1 agreement, KL."""
    from slidesparse.evaluate.perplexity import measure
    from slidesparse.evaluate.texts import config_of, window_of, windows

    for folder in filter(None, (model, against)):
        config_of(folder)  # raises an error unless it is a checkpoint
    if seqlen is None:
        seqlen = window_of(model, *([against] if against else []))
    ids = windows(data, model, seqlen, samples)
    found = measure(model, ids, against, top, _engine(option, log))
    _warn(found)
    print(json.dumps(found.to_json(), indent=2)) if as_json else _show_perplexity(found)


@app.command()
def embedding(
    model: Folder,
    data: Annotated[
        str, typer.Option(help='FILE.jsonl of {"text"}, or of pairs {"query", "text"}.', metavar="FILE")
    ],
    against: Against = None,
    samples: Samples = None,
    longest: Annotated[int, typer.Option(help="Maximum tokens of a text.", metavar="N")] = 256,
    option: Options = None,
    log: Log = None,
    as_json: Json = False,
) -> None:
    """Compare an encoder's embeddings with another checkpoint's: cosine, and with pairs also retrieval."""
    from slidesparse.evaluate.embedding import measure
    from slidesparse.evaluate.texts import config_of, texts_or_pairs

    for folder in filter(None, (model, against)):
        config_of(folder)  # raises an error unless it is a checkpoint
    found = measure(model, texts_or_pairs(data, model, samples, longest), against, _engine(option, log))
    _warn(found)
    print(json.dumps(found.to_json(), indent=2)) if as_json else _show_embedding(found)


def _engine(options: list[str] | None, log: Path | None) -> Engine:
    from slidesparse.evaluate.engine import Engine

    found: dict[str, Any] = {}
    for text in options or []:
        name, separator, value = text.partition("=")
        if not separator or not name.isidentifier():
            raise SlideSparseError(f"--option {text!r} is not NAME=VALUE, such as dtype=float32")
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    return Engine(found, log)


def _warn(found: Perplexity | Embedding) -> None:
    """Warn if a converted checkpoint was not served by the plugin."""
    from slidesparse.checkpoint.metadata import KEY
    from slidesparse.evaluate.texts import config_of

    for folder, served in ((found.model, found.served_by), (found.against, found.against_served_by)):
        if folder and not served and KEY in (config_of(Path(folder)).get("quantization_config") or {}):
            err.print(
                f"[yellow]warning:[/] {escape(folder)} was served by vLLM itself, without the plugin; install "
                "slidesparse where vLLM is, unset DISABLE_SLIDESPARSE, and put slidesparse on VLLM_PLUGINS if that is "
                "set"
            )


def _show(name: str, found: Interval | None, digits: int = 4, unit: str = "") -> None:
    if found is not None:
        low, high = (f"{value:.{digits}f}{unit}" for value in (found.low, found.high))
        out.print(escape(f"{name:17} {found.value:.{digits}f}{unit}  (95%: {low} to {high})"))


def _show_perplexity(found: Perplexity) -> None:
    out.print(escape(f"{'model':17} {found.model}: {found.served_by or 'vLLM itself'}"))
    out.print(f"{'data':17} {found.windows} windows, {found.tokens} tokens scored")
    _show("perplexity", found.perplexity)
    if found.comparison is None:
        return
    out.print(escape(f"{'against':17} {found.against}: {found.against_served_by or 'vLLM itself'}"))
    _show("its perplexity", found.comparison.perplexity)
    _show("difference", found.comparison.delta_pct, 3, "%")
    _show("same top token", found.comparison.top1)
    _show("KL" if found.comparison.exact else "KL, at least", found.comparison.kl, 5)


def _show_embedding(found: Embedding) -> None:
    out.print(escape(f"{'model':17} {found.model}: {found.served_by or 'vLLM itself'}"))
    if found.against:
        out.print(escape(f"{'against':17} {found.against}: {found.against_served_by or 'vLLM itself'}"))
    out.print(f"{'data':17} {found.texts} texts")
    _show("cosine, mean", found.cosine_mean)
    _show("cosine, 1%", found.cosine_p1)
    _show("same nearest 10", found.top10)
    _show("MRR", found.mrr)
    _show("its MRR", found.mrr_against)
    _show("MRR lost", found.mrr_loss)
