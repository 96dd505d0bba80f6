"""The command ``slidesparse convert``: prune a model and write it as a W8A8 checkpoint."""

from __future__ import annotations

import json
import shlex
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from slidesparse import methods
from slidesparse.cli.console import Layout, byte_progress, out, show, warn
from slidesparse.convert.times import DEFAULT_GPU, DEFAULT_TOKENS
from slidesparse.errors import SlideSparseError
from slidesparse.pattern import Pattern, parse_pattern

if TYPE_CHECKING:
    from slidesparse.calibrate.task import Calibration
    from slidesparse.convert.budget import Budget, Choice
    from slidesparse.convert.choose import Outcome
    from slidesparse.convert.report import Report

# The keys of DECODERS and ENCODERS in `slidesparse.calibrate.models`, which --help must not import with torch
CALIBRATED_METHODS = (
    "Llama, Mistral, Qwen2, Qwen3, Gemma2, Gemma3, Phi3, Granite, BitNet, Olmo2, Bert, Roberta, XLMRoberta"
)
MAX_NAMES = 3  # names listed in a line of the summary
FRONTIER_ROWS = 8  # rows of the table of losses and savings
MAX_WORST = 5  # layers with the largest errors to list
WITHOUT_CALIBRATION = (
    "weights were pruned by magnitude, without calibration data, which loses much more accuracy than pruning the "
    "float model with text similar to what it will serve: --calib FILE.jsonl"
)
TERNARY = (
    "all non-zero weights of BitNet have the same magnitude, so without calibration the leftmost ones of each block "
    "were pruned; for a better choice, pass text similar to what the model will serve: --calib FILE.jsonl"
)

_DEFAULTS = {
    methods.DEFAULT_CALIBRATED: "the default with --calib",
    methods.DEFAULT: "the default without --calib",
}
# Options under a heading of --help
_budget_option = partial(
    typer.Option,
    rich_help_panel="A pattern for each layer, chosen by a budget (instead of --sparsity; needs --calib)",
)
_pruning_option = partial(typer.Option, rich_help_panel="Pruning")
_layer_option = partial(typer.Option, rich_help_panel="Options for individual layers")

_METHODS = ", ".join(f"{name} ({_DEFAULTS[name]})" if name in _DEFAULTS else name for name in methods.METHODS)


def convert(
    source: Annotated[
        str,
        typer.Argument(
            help="A Hugging Face checkpoint folder, or ORG/NAME on the Hub, in FP32, FP16, BF16, FP8, W8A8 or BitNet.",
            metavar="SRC",
        ),
    ],
    target: Annotated[Path, typer.Argument(help="The folder to write the checkpoint to.", metavar="OUT")],
    sparsity: Annotated[
        str | None,
        typer.Option(
            "--sparsity",
            "-s",
            help="The sparsity pattern, as non-zeros:block length: 2:4, 4:6, 6:8 (or 2_8), 8:10 and so on; dense "
            "quantizes without pruning.",
        ),
    ] = None,
    max_loss: Annotated[
        str | None,
        _budget_option(
            help="Make the model as fast as possible while its perplexity (for encoders: 1 - cosine of the embeddings) "
            "rises by at most this much.",
            metavar="PERCENT",
        ),
    ] = None,
    min_speedup: Annotated[
        float | None,
        _budget_option(
            help="Make the linear layers X times as fast as stock vLLM's dense ones, such as 1.15, with the smallest "
            "loss.",
            metavar="X",
        ),
    ] = None,
    zeros: Annotated[
        str | None,
        _budget_option(help="Prune this share of the weights, with the smallest loss.", metavar="PERCENT"),
    ] = None,
    tokens: Annotated[
        str | None,
        _budget_option(
            help="Tokens per forward pass at which --max-loss and --min-speedup measure speed; by default "
            f"{','.join(map(str, DEFAULT_TOKENS))}, for decode with batch size {DEFAULT_TOKENS[0]} and for prefill.",
            metavar="N,N",
        ),
    ] = None,
    gpu: Annotated[
        str | None,
        _budget_option(
            help="The GPU whose measured layer times are used: h100 or h200; by default this machine's GPU, or "
            f"{DEFAULT_GPU} if it is neither."
        ),
    ] = None,
    quant: Annotated[
        str | None, typer.Option(help="int8 or fp8; by default the type of a W8A8 source, otherwise int8.")
    ] = None,
    layout: Layout = "dense",
    method: Annotated[str | None, _pruning_option(help=f"{_METHODS}.")] = None,
    calib: Annotated[
        str | None,
        _pruning_option(
            help="Calibration data, similar to what the model will serve: FILE.jsonl (one text per line), FILE.npy "
            "(token ids), or the word random, for trying things out. Supported models: "
            f"{CALIBRATED_METHODS}.",
            metavar="FILE",
        ),
    ] = None,
    samples: Annotated[
        int | None,
        _pruning_option(help="Number of calibration samples; by default 128.", metavar="N"),
    ] = None,
    seqlen: Annotated[
        int | None,
        _pruning_option(
            help="Tokens per calibration sample; by default 2048, or the model's maximum if that is less.",
            metavar="N",
        ),
    ] = None,
    device: Annotated[
        str | None,
        _pruning_option(help="Device to calibrate on: auto (the default: a GPU if available), cpu or cuda."),
    ] = None,
    sweeps: Annotated[
        int | None,
        _pruning_option(help="Refinement passes of sparsegpt over each layer; by default 4.", metavar="N"),
    ] = None,
    target_of: Annotated[
        str | None,
        _pruning_option(
            "--target",
            help="The outputs that sparsegpt reproduces: dense (the default): those of the dense model's layer; own: "
            "those of the layer itself on the pruned model's inputs.",
        ),
    ] = None,
    finetune: Annotated[
        int | None,
        _pruning_option(
            help="Epochs of fine-tuning the remaining weights of each decoder or encoder layer after sparsegpt; by "
            "default 4.",
            metavar="EPOCHS",
        ),
    ] = None,
    rotate: Annotated[
        str | None,
        _pruning_option(
            help="Transform the weights so that pruning and quantization lose less: rotate them (Llama, Mistral, "
            "Qwen2, Qwen3), permute channels (all models but BitNet) and, for INT8, scale the channels of MLPs "
            "(decoders except BitNet). auto (the default) does what the model allows, and rotates and permutes only "
            "with sparsegpt; on is an error if the model cannot be rotated; off does none of it.",
            metavar="WHEN",
        ),
    ] = None,
    distill: Annotated[
        str | None,
        _pruning_option(
            help="After pruning, train the remaining weights of all layers to match the dense model's next-token "
            "distributions on this text: FILE.jsonl or FILE.npy; the more text, the better.",
            metavar="FILE",
        ),
    ] = None,
    minutes: Annotated[
        float | None,
        _pruning_option(help="Duration of distillation in minutes; by default 10.", metavar="N"),
    ] = None,
    resume: Annotated[
        bool,
        _pruning_option("--resume", help="Continue an interrupted run from the layers it finished."),
    ] = False,
    layer: Annotated[
        list[str] | None,
        _layer_option(
            help="Use another pattern for layers whose name matches, such as 'down_proj=8:10'; may be repeated; the "
            "last match applies.",
            metavar="REGEX=PATTERN",
        ),
    ] = None,
    skip: Annotated[
        list[str] | None,
        _layer_option(
            help="Quantize layers whose name matches but do not prune them; may be repeated.", metavar="REGEX"
        ),
    ] = None,
    ignore: Annotated[
        list[str] | None,
        _layer_option(
            help=r"Neither prune nor quantize layers whose name matches, such as '\.experts\.'; may be repeated.",
            metavar="REGEX",
        ),
    ] = None,
    linear: Annotated[
        str | None,
        _layer_option(
            help="The linear layers to prune, for architectures that convert does not know.", metavar="REGEX"
        ),
    ] = None,
    seed: Annotated[
        int, typer.Option(help="Random seed for selecting calibration samples and for --method random.")
    ] = 0,
    report: Annotated[
        Path | None,
        typer.Option(help="Write a report on every layer to this JSON file.", metavar="FILE.json"),
    ] = None,
    plot: Annotated[
        Path | None,
        _budget_option(
            help="Plot loss against speed (for --zeros: against sparsity) to this file.", metavar="FILE.svg"
        ),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Check everything and show what would be done, or a budget's trade-off, but write no checkpoint.",
        ),
    ] = False,
) -> None:
    """Prune a model, quantize it to INT8 or FP8, and write a checkpoint for vLLM to serve."""
    pattern, budget = _parse_goals(
        sparsity, {"--max-loss": max_loss, "--min-speedup": min_speedup, "--zeros": zeros}, tokens, gpu
    )
    from slidesparse.checkpoint.hub import local_folder
    from slidesparse.convert.options import ConvertOptions, parse_layer_pattern
    from slidesparse.convert.stream import convert as run

    data = {
        "samples": samples,
        "seqlen": seqlen,
        "device": device,
        "resume": resume or None,
        "rotate": rotate,
        "distill": distill,
        "minutes": minutes,
    }
    training = {"sweeps": sweeps, "target": target_of, "finetune": finetune}
    options = ConvertOptions(
        pattern=pattern,
        quant=quant,
        layout=layout,
        method=method,
        seed=seed,
        linear=linear,
        ignore=tuple(ignore or ()),
        skip=tuple(skip or ()),
        layer_patterns=tuple(map(parse_layer_pattern, layer or ())),
        budget=budget,
        calibration=_calibration(calib, method, data, training),
        check=report is not None,
    )
    if plot is not None and budget is None:
        raise SlideSparseError("--plot needs a budget; give one, such as --max-loss 1%, or leave --plot out")
    _require_writable("--report", report, target)
    _require_writable("--plot", plot, target)
    with byte_progress(lines=True) as progress:
        result = run(local_folder(source), target, options, dry_run=dry_run, progress=progress)
    if plot is not None and result.budget:
        from slidesparse.convert.plot import svg

        plot.write_text(svg(result.budget))
    if report is not None and (budget or not dry_run):
        report.write_text(json.dumps(result.to_json(), indent=2) + "\n")
    _warn(result)
    _summarize(result, dry_run)


def _parse_goals(
    sparsity: str | None, goals: Mapping[str, str | float | None], tokens: str | None, gpu: str | None
) -> tuple[Pattern, Budget | None]:
    """Return the requested pattern, or a budget with the pattern for which a rotation is learned."""
    chosen = [name for name, value in {"--sparsity": sparsity, **goals}.items() if value is not None]
    if len(chosen) != 1:
        raise SlideSparseError(
            f"found {' and '.join(chosen) or 'neither a pattern nor a budget'}; give exactly one of --sparsity (such "
            f"as --sparsity 6:8), {', '.join(goals)}"
        )
    idle = [name for name, value in {"--tokens": tokens, "--gpu": gpu}.items() if value is not None]
    if idle and chosen[0] in ("--sparsity", "--zeros"):
        raise SlideSparseError(
            f"{' and '.join(idle)} would have no effect, because {chosen[0]} does not use layer times; leave "
            f"{idle[0]} out, or give --max-loss or --min-speedup"
        )
    if sparsity is not None:
        return parse_pattern(sparsity), None
    from slidesparse.convert.budget import MIDDLE, Budget, parse_percent, parse_tokens
    from slidesparse.convert.times import default_gpu

    percents = {
        option: parse_percent(option, str(goals[option]))
        for option in ("--max-loss", "--zeros")
        if goals[option] is not None
    }
    speedup = goals["--min-speedup"]
    return MIDDLE, Budget(
        percents.get("--max-loss"),
        None if speedup is None else float(speedup),
        percents.get("--zeros"),
        DEFAULT_TOKENS if tokens is None else parse_tokens(tokens),
        default_gpu() if gpu is None else gpu,
    )


def _calibration(
    calib: str | None, method: str | None, data: dict[str, Any], training: dict[str, Any]
) -> Calibration | None:
    """Return the options of calibration given on the command line, or None without any.

    Args:
        data: options for any method.
        training: options for methods that update the remaining weights.
    """
    from slidesparse.calibrate.task import Calibration

    data, training = ({n: v for n, v in options.items() if v is not None} for options in (data, training))
    if training and method in methods.METHODS and not methods.get(method).updates_weights:
        flags = " and ".join(f"--{name}" for name in training)
        alternatives = " and ".join(name for name in methods.METHODS if methods.get(name).updates_weights)
        raise SlideSparseError(
            f"--method {method} does not use {flags}, but {alternatives} does; leave {flags} out"
        )
    if calib is not None:
        return Calibration(calib, **data, **training)
    if data or training:
        flags = " and ".join(f"--{name}" for name in (*data, *training))
        raise SlideSparseError(f"{flags} would have no effect without calibration data: add --calib FILE")
    return None


def _require_writable(option: str, report: Path | None, target: Path) -> None:
    """Raise SlideSparseError, before hours of work, unless the file of an option can be written beside ``target``."""
    if report is None:
        return
    if report.resolve() == target.resolve():
        raise SlideSparseError(
            f"{option} {report} is the folder that the model is written to; name a file beside it"
        )
    if report.is_dir() or not report.resolve().parent.is_dir():
        raise SlideSparseError(
            f"{option} {report} is a folder, or its folder does not exist; name a file in an existing folder"
        )
    new = not report.exists()
    try:
        report.open("a").close()
    except OSError as error:
        raise SlideSparseError(
            f"{option} {report}: {error.strerror}; name a file that can be written"
        ) from error
    if new:
        report.unlink()


def _warn(report: Report) -> None:
    pruned = any(pattern.density < 1 for pattern in report.patterns.values())
    if report.method == "magnitude" and not report.samples and report.newly_pruned and pruned:
        warn(TERNARY if report.ternary else WITHOUT_CALIBRATION)
    if report.note:
        warn(report.note, "note")
    if report.budget and not report.budget.within_budget:
        warn(
            f"{report.budget.budget.goal} is exceeded: {report.budget.summary}; this checkpoint came closest of "
            "several attempts. Allow a larger loss, or give more calibration text"
        )


def _summarize(report: Report, dry_run: bool) -> None:
    if report.budget:
        _show_budget(report.budget)
    if not (report.budget and dry_run):
        show("pattern", f"{report.pattern}; as a vLLM flag: SPARSITY={report.pattern.flag}")
        kind = f"{report.quant.upper()} W8A8, {report.layout} layout"
        show(
            "pruned" if report.pattern.density < 1 else "layers",
            f"{len(report.pruned)} linear layers, {kind}",
        )
        others = Counter(p.ratio for p in report.patterns.values() if p != report.pattern)
        for pattern, count in others.items():
            show("", f"{count} of them at {pattern}")
    if report.rewritten:
        show("source", report.rewritten)
    if report.samples:
        show("method", f"{report.method}, calibrated with {report.samples}")
    if report.rotation:
        show("rotation", report.rotation)
    if report.smoothing:
        show("smoothing", report.smoothing)
    if report.distillation:
        show("distilled", report.distilled.summary if report.distilled else report.distillation)
    for title, names in (("unpruned", report.skipped), ("unchanged", report.kept)):
        by_reason = defaultdict(list)
        for name, reason in names.items():
            by_reason[reason].append(name)
        treatment = (
            "quantized but not pruned" if title == "unpruned" else "neither pruned nor quantized again"
        )
        for reason, layers in sorted(by_reason.items()):
            weights = "1 weight" if len(layers) == 1 else f"{len(layers)} weights"
            show(title, f"{weights} {treatment} ({reason}): {_join_names(layers)}")
    if report.left_out:
        files = [name if name.isprintable() else repr(name) for name in report.left_out]
        show(
            "skipped",
            f"{len(files)} files were not copied, as they are not tokenizer, configuration or license files: "
            f"{_join_names(files)}",
        )
    size = f"{report.bytes_in / 1e6:.1f} MB -> {report.bytes_out / 1e6:.1f} MB"
    if dry_run and report.budget:
        show("dry run", "no checkpoint was written; the measured losses are cached for the next run")
        return
    if dry_run:
        show("size", size)
        show("dry run", "nothing was written")
        return
    _show_errors(report)
    show("size", f"{size} in {report.seconds:.1f} s, {report.rate:.0f} MB/s of input")
    show("serve", f"vllm serve {shlex.quote(str(report.out))}")


def _join_names(names: Sequence[str]) -> str:
    return f"{', '.join(names[:MAX_NAMES])}{', ...' if len(names) > MAX_NAMES else ''}"


def _show_budget(outcome: Outcome) -> None:
    """Show the trade-off between loss and speed or zeros, the uniform patterns and the choice."""
    problem, timed = outcome.problem, not outcome.problem.by_zeros
    frontier = problem.frontier()
    last = len(frontier) - 1
    table = Table(box=None, padding=(0, 2, 0, 0))
    loss = "perplexity" if outcome.in_nats else "1 - cosine"
    for column in (loss, *(["speed"] if timed else []), "zeros", "layers per pattern"):
        table.add_column(column, justify="left" if column == "layers per pattern" else "right")

    def add(name: str, choice: Choice, style: str = "") -> None:
        cells = [f"{100 * outcome.loss(choice):+.2f}%" if outcome.in_nats else f"{outcome.loss(choice):.4f}"]
        cells += [f"{choice.speedup:.3f}x"] if timed else []
        table.add_row(*cells, f"{choice.zeros:.1%}", name + choice.mix, style=style)

    for number in sorted({round(last * part / FRONTIER_ROWS) for part in range(FRONTIER_ROWS + 1)}):
        add("", frontier[number])
    for pattern in problem.patterns:
        add("uniform: ", problem.uniform(pattern), "dim")
    if outcome.choice:
        add("chosen: ", outcome.choice, "bold")
    out.print(table)
    if timed:
        steps = ", ".join(map(str, outcome.budget.tokens))
        show(
            "speed",
            f"of the linear layers relative to stock vLLM's dense ones at {steps} tokens per forward pass, "
            f"{outcome.budget.gpu}",
        )
    show("budget", outcome.budget.goal)
    if outcome.summary:
        show("loss", f"{outcome.summary}, on held-out samples")


def _show_errors(report: Report) -> None:
    """Show the layers with the largest errors, if calibration measured them."""
    errors = {row["name"]: row for row in report.layers}
    ranked = report.sensitivity[:MAX_WORST]
    for name in ranked:
        row = errors[name]
        text = f"{row['error_pruned']:.4f} after pruning, {row['error_quantized']:.4f} after quantization"
        if row["error_finetuned"] is not None:
            text += f", {row['error_finetuned']:.4f} after fine-tuning"
        show("error", f"{name}: {text}{'  (the largest)' if name == ranked[0] else ''}")
