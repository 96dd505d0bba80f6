"""The command ``slidesparse doctor``."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from slidesparse.cli.console import Json, out, whole

if TYPE_CHECKING:
    from slidesparse.preflight import Layer, Report


def doctor(
    model: Annotated[
        str | None,
        typer.Argument(
            help="Check whether this machine can serve a checkpoint: a folder, or ORG/NAME on the Hub."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show what this machine can run, what is missing, and how to get it.  Without MODEL, always exits 0.

    With MODEL: exit 0 if SlideSparse serves it here, 1 if not, 3 if this machine lacks something for it.
    """
    from slidesparse.doctor import announce_compiling, main

    if model is None:
        main(["--json"] if as_json else [])
        return
    from slidesparse.checkpoint.hub import local_folder
    from slidesparse.preflight import examine

    folder = local_folder(model)
    announce_compiling()
    report = examine(model, folder)
    if as_json:
        print(json.dumps(report.to_json(), indent=2))
    else:
        _show(report)
    raise typer.Exit(report.code)


def _show(report: Report) -> None:
    from slidesparse.pattern import DENSE_WEIGHT
    from slidesparse.preflight import OURS, STOCK, UNQUANTIZED, gib

    patterns = ", ".join(
        f"{count} dense" if pattern == DENSE_WEIGHT else f"{count} at {pattern}"
        for pattern, count in report.patterns.items()
    )
    sparse = f"{report.count(OURS)} served by SlideSparse{f' ({patterns})' if patterns else ''}"
    memory = gib(report.weight_bytes)
    if report.machine.free is not None:
        memory += f"; {gib(report.machine.free)} of GPU memory free"
    rows = [
        (
            "model",
            f"{report.model}: {report.architecture or 'no architecture'}, {report.quantization}, "
            f"{report.layout} layout",
        ),
        (
            "layers",
            f"{sparse}, {report.count(STOCK)} by vLLM's own kernels, {report.count(UNQUANTIZED)} unquantized",
        ),
        *(
            ("experts", f"{n} weights in {dtype}, served by vLLM's own kernels")
            for dtype, n in report.experts.items()
        ),
        ("GPU", report.machine.gpu or "none"),
        ("vLLM", report.vllm),
        ("backend", f"{report.backend}: {report.backend_reason}" if report.backend else "vLLM's own kernels"),
        ("weights", memory),
    ]
    for title, words in rows:
        out.print(escape(f"  {title:<9} {words}"))
    _show_layers(report)
    for item in report.missing:
        remedy = f"\n            remedy: {item['remedy']}" if item["remedy"] else ""
        out.print(escape(f"  missing   {item['what']}{remedy}"))
    out.print(escape(f"{'yes' if not report.code else 'no'}: {report.verdict}"))


def _show_layers(report: Report) -> None:
    from slidesparse.convert.times import DEFAULT_TOKENS

    table = Table("layer", box=SIMPLE_HEAD, pad_edge=False)
    for name in ("count", "N x K", "pattern", "tuned"):
        table.add_column(name, justify="right", no_wrap=True)
    for tokens in DEFAULT_TOKENS if report.times else ():
        table.add_column(f"{tokens} tokens: us, vLLM us, speed-up", justify="right", no_wrap=True)
    for layer in report.layers:
        table.add_row(*map(escape, _cells(layer)))
    out.print()
    whole(table).print(table)
    if report.times:
        out.print(
            f"  times     measured on {report.times}"
            + ("" if report.machine.gpu else ", as this machine has no GPU")
        )


def _cells(layer: Layer) -> list[str]:
    timed = zip(layer.us, layer.stock_us, layer.ratios, strict=True)
    times = [
        f"{us:.1f} {stock:.1f} {ratio:.2f}x" if us and ratio else f"- {stock:.1f} -"
        for us, stock, ratio in timed
    ]
    shape = f"{layer.n} x {layer.k}"
    return [layer.name, str(layer.count), shape, layer.pattern or layer.reason, layer.tuned or "-", *times]
