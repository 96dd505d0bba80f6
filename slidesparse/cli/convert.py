"""The command ``slidesparse convert``: prune a model and write it as a W8A8 checkpoint."""

from __future__ import annotations

from collections import Counter, defaultdict
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from slidesparse.cli.console import Layout, byte_progress, out, show, warn
from slidesparse.errors import FORMS, SlideSparseError, argument, listed
from slidesparse.pattern import Pattern, parse_pattern

if TYPE_CHECKING:
    from slidesparse.calibrate.task import Calibration
    from slidesparse.convert.budget import Budget, Choice
    from slidesparse.convert.choose import Outcome
    from slidesparse.convert.plan import ConversionPlan
    from slidesparse.convert.stream import Report

FRONTIER_ROWS = 8  # rows of the table of losses and savings
MAX_WORST = 5  # layers with the largest errors to list
WITHOUT_CALIBRATION = (
    "weights were pruned by magnitude, without calibration data, which loses much more accuracy than pruning the "
    "float model with text similar to what it will serve: --calib FILE.jsonl, or --calib self"
)
TERNARY = (
    "all non-zero weights of BitNet have the same magnitude, so without calibration the leftmost ones of each block "
    "were pruned; for a better choice, pass text similar to what the model will serve: --calib FILE.jsonl"
)
UNASKED = (
    "vLLM is not installed here, so it was not asked which of these layers it quantizes, and by what names: before "
    "serving, run slidesparse doctor {out} where it is"
)

# Options under a heading of --help
_calibration_option = partial(typer.Option, rich_help_panel="Calibration")
_layer_option = partial(typer.Option, rich_help_panel="Options for individual layers")


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
        typer.Option(
            help="Make the model as fast as possible while its perplexity (for encoders: 1 - cosine of the embeddings) "
            "rises by at most this much, on the kind of text where that is most: held-out samples of each --calib and, "
            "where there is one, the reference of the Python language.",
            metavar="PERCENT",
            rich_help_panel="A budget instead of --sparsity (needs --calib)",
        ),
    ] = None,
    quant: Annotated[
        str | None, typer.Option(help="int8 or fp8; by default the type of a W8A8 source, otherwise int8.")
    ] = None,
    layout: Layout = "dense",
    calib: Annotated[
        list[str] | None,
        _calibration_option(
            help="Text similar to what the model will serve; without it, weights are pruned by magnitude. May be "
            "repeated, to mix: the word self, for text that the model writes; the word random, for trying things out; "
            f"or {FORMS}.",
            metavar="DATA",
        ),
    ] = None,
    samples: Annotated[
        int | None,
        _calibration_option(help="Number of calibration samples; by default 128.", metavar="N"),
    ] = None,
    seqlen: Annotated[
        int | None,
        _calibration_option(
            help="Tokens per calibration sample; by default 2048, or the model's maximum if that is less.",
            metavar="N",
        ),
    ] = None,
    device: Annotated[
        str | None,
        _calibration_option(
            help="Device to calibrate on: auto (the default: a GPU if available), cpu or cuda."
        ),
    ] = None,
    rotate: Annotated[
        str | None,
        _calibration_option(
            help="Rotate the weights, permute channels and, for INT8, scale those of MLPs, so that pruning and "
            "quantization lose less. auto (the default) does what leaves the model's outputs as they are, and rotates "
            "no FP8 model; on is an error if it cannot be rotated; off does none of it.",
            metavar="WHEN",
        ),
    ] = None,
    distill: Annotated[
        list[str] | None,
        _calibration_option(
            help="After pruning, train the remaining weights of all layers to match the dense model's next-token "
            "distributions on this text, in the forms of --calib; the more text, the better (self: 4 million tokens on "
            "a GPU). May be repeated.",
            metavar="DATA",
        ),
    ] = None,
    minutes: Annotated[
        float | None,
        _calibration_option(help="Duration of distillation in minutes; by default 10.", metavar="N"),
    ] = None,
    resume: Annotated[
        bool,
        _calibration_option("--resume", help="Continue an interrupted run from the layers it finished."),
    ] = False,
    layer: Annotated[
        list[str] | None,
        _layer_option(
            help="Use another pattern for layers whose name matches, such as 'down_proj=8:10', or 'o_proj=dense' to "
            "quantize them without pruning; 'lm_head=dense' quantizes lm_head, too; '\\.experts\\.=budget' lets a "
            "budget choose for routed experts, too. May be repeated; the last match applies.",
            metavar="REGEX=PATTERN",
        ),
    ] = None,
    ignore: Annotated[
        list[str] | None,
        _layer_option(
            help=r"Neither prune nor quantize layers whose name matches, such as '\.experts\.'; may be repeated.",
            metavar="REGEX",
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
    pattern, budget = _parse_goal(sparsity, max_loss)
    from slidesparse.checkpoint.hub import local_folder
    from slidesparse.convert.options import ConvertOptions, parse_layer_pattern
    from slidesparse.convert.stream import convert as run
    from slidesparse.serving import Skeletons, is_available

    calibration = {
        "samples": samples,
        "seqlen": seqlen,
        "device": device,
        "rotate": rotate,
        "distill": tuple(distill) if distill else None,
        "minutes": minutes,
        "resume": resume or None,
    }
    options = ConvertOptions(
        pattern=pattern,
        quant=quant,
        layout=layout,
        ignore=tuple(ignore or ()),
        layer_patterns=tuple(map(parse_layer_pattern, layer or ())),
        budget=budget,
        calibration=_calibration(calib, calibration),
    )
    folder = local_folder(source)
    asks = is_available()
    with (
        Skeletons() if asks else nullcontext() as skeletons,
        byte_progress(lines=True) as progress,
    ):
        result = run(folder, target, options, dry_run=dry_run, progress=progress, skeletons=skeletons)
    _warn(result)
    if not asks:
        warn(UNASKED.format(out=argument(target)), "note")
    _summarize(result, dry_run)


def _parse_goal(sparsity: str | None, max_loss: str | None) -> tuple[Pattern, Budget | None]:
    """Return the requested pattern, or a budget with the pattern for which a rotation is learned."""
    if (sparsity is None) == (max_loss is None):
        found = "neither a pattern nor a budget" if sparsity is None else "--sparsity and --max-loss"
        raise SlideSparseError(
            f"found {found}; give either --sparsity, such as --sparsity 6:8, or --max-loss, such as --max-loss 1%"
        )
    if sparsity is not None:
        return parse_pattern(sparsity), None
    assert max_loss is not None
    from slidesparse.convert.budget import MIDDLE, Budget, default_gpu, parse_percent

    return MIDDLE, Budget(parse_percent("--max-loss", max_loss), gpu=default_gpu())


def _calibration(calib: list[str] | None, options: dict[str, Any]) -> Calibration | None:
    """Return the options of calibration given on the command line, or None without any."""
    from slidesparse.calibrate.task import Calibration

    options = {name: value for name, value in options.items() if value is not None}
    if calib:
        return Calibration(tuple(calib), **options)
    if options:
        flags = " and ".join(f"--{name}" for name in options)
        raise SlideSparseError(f"{flags} would have no effect without calibration data: add --calib DATA")
    return None


def _warn(report: Report) -> None:
    from slidesparse.checkpoint.bitnet import is_bitnet

    plan = report.plan
    pruned = any(pattern.density < 1 for pattern in plan.patterns.values())
    if pruned and not (report.samples or report.was_sparse or plan.source.metadata):
        warn(TERNARY if is_bitnet(plan.checkpoint.config) else WITHOUT_CALIBRATION)
    if report.note:
        warn(report.note, "note")
    if report.unserved:
        warn(
            f"the vLLM that is installed here does not serve this model, converted or not: {report.unserved}"
        )
    if report.budget and not report.budget.within_budget:
        warn(
            f"{report.budget.budget.goal} is exceeded: {report.budget.summary}; this checkpoint came closest of "
            "several attempts. Allow a larger loss, or give more calibration text"
        )


def _summarize(report: Report, dry_run: bool) -> None:
    from slidesparse.calibrate.pipeline import METHOD
    from slidesparse.checkpoint.names import is_expert, serving_options

    plan = report.plan
    if report.budget:
        _show_budget(report.budget)
    if not (report.budget and dry_run):
        show("pattern", str(plan.pattern))
        kind = f"{plan.quant.upper()} W8A8, {plan.options.layout} layout"
        title = "pruned" if plan.pattern.density < 1 else "layers"
        show(title, f"{len(plan.patterns)} linear layers, {kind}")
        others = Counter(p.ratio for p in plan.patterns.values() if p != plan.pattern)
        for pattern, count in others.items():
            show("", f"{count} of them at {pattern}")
        if experts := sum(map(is_expert, plan.patterns)):
            few = sum(row.get("pooled", False) for row in report.layers)
            by = f"; {few} of these by all tokens of their layer, as few were routed to them" if few else ""
            show("", f"{experts} of them matrices of routed experts{by}")
        if speed := _speed(plan):
            show("speed", speed)
    for title, text in {
        "source": plan.rewritten,
        "method": report.samples and f"{METHOD}, calibrated with {report.samples}",
        "rotation": report.rotation,
        "smoothing": report.smoothing,
        "distilled": report.distilled.summary if report.distilled else report.distillation,
    }.items():
        if text:
            show(title, text)
    for title, treatment, names in (
        ("unpruned", "quantized but not pruned", plan.skipped),
        ("unchanged", "neither pruned nor quantized again", plan.kept),
    ):
        by_reason = defaultdict(list)
        for name, reason in names.items():
            by_reason[reason].append(name)
        for reason, layers in sorted(by_reason.items()):
            weights = "1 weight" if len(layers) == 1 else f"{len(layers)} weights"
            show(title, f"{weights} {treatment} ({reason}): {listed(layers)}")
    if report.left_out:
        files = [name if name.isprintable() else repr(name) for name in report.left_out]
        show(
            "skipped",
            f"{len(files)} files were not copied, as they are not tokenizer, configuration or license files: "
            f"{listed(files)}",
        )
    size = f"{plan.bytes_in / 1e6:.1f} MB -> {plan.bytes_out / 1e6:.1f} MB"
    if dry_run and report.budget:
        show("dry run", "no checkpoint was written; the measured losses are cached for the next run")
        return
    if dry_run:
        show("size", size)
        show("dry run", "nothing was written")
        return
    _show_errors(report)
    show(
        "size", f"{size} in {report.seconds:.1f} s, {plan.bytes_in / 1e6 / report.seconds:.0f} MB/s of input"
    )
    arguments = [f"--{name} {value}" for name, value in serving_options(plan.config).items()]
    show("serve", " ".join(["vllm serve", argument(report.out), *arguments]))


def _speed(plan: ConversionPlan) -> str:
    """Estimate the gain by pruning of the quantized linear layers, but for routed experts and lm_head.

    "" for types, or models, of which it is not known, if nothing is pruned, and for converted sources.
    """
    from slidesparse.checkpoint.names import WEIGHT
    from slidesparse.checkpoint.w8a8 import KINDS
    from slidesparse.convert.budget import LayerTimes, Shape, default_gpu

    if plan.source.metadata or plan.quant not in KINDS or not plan.groups:
        return ""
    specs = [[plan.checkpoint.require(name + WEIGHT) for name in group] for group in plan.groups]
    shapes = [Shape(sum(spec.rows for spec in group), group[0].columns) for group in specs]
    layers = [(shape, plan.patterns.get(group[0])) for shape, group in zip(shapes, plan.groups, strict=True)]
    if all(pattern is None or pattern.density == 1 for _, pattern in layers):
        return ""
    gpu, count = default_gpu(), sum(map(len, plan.groups))
    speeds = LayerTimes(gpu, plan.quant).speeds(layers).items()
    parts = (f"{ours:.2f}x at {tokens} tokens a step" for tokens, ours in speeds)
    return f"of {count} linear layers relative to unpruned ones: {', '.join(parts)}; estimated for {gpu}"


def _show_budget(outcome: Outcome) -> None:
    """Show the trade-off between loss and speed, the uniform patterns and the choice."""
    from slidesparse.convert.budget import PATTERNS

    problem = outcome.problem
    frontier = problem.frontier()
    last = len(frontier) - 1
    table = Table(box=None, padding=(0, 2, 0, 0))
    loss = "perplexity" if outcome.in_nats else "1 - cosine"
    for column in (loss, "speed", "zeros", "layers per pattern"):
        table.add_column(column, justify="left" if column == "layers per pattern" else "right")

    def add(name: str, choice: Choice, style: str = "") -> None:
        lost = f"{100 * outcome.loss(choice):+.2f}%" if outcome.in_nats else f"{outcome.loss(choice):.4f}"
        speed, zeros = f"{1 / choice.time:.3f}x", f"{choice.zeros:.1%}"
        table.add_row(lost, speed, zeros, name + choice.mix, style=style)

    for number in sorted({round(last * part / FRONTIER_ROWS) for part in range(FRONTIER_ROWS + 1)}):
        add("", frontier[number])
    for pattern in PATTERNS:
        add("uniform: ", problem.uniform(pattern), "dim")
    if outcome.choice:
        add("chosen: ", outcome.choice, "bold")
    out.print(table)
    steps = ", ".join(map(str, outcome.budget.tokens))
    show(
        "speed",
        f"of the linear layers relative to the unpruned model's at {steps} tokens per forward pass, "
        f"{outcome.budget.gpu}",
    )
    show("budget", outcome.budget.goal)
    if outcome.summary:
        show("loss", outcome.summary)


def _show_errors(report: Report) -> None:
    """Show the layers with the largest errors, if calibration measured them."""

    def rank(row: dict[str, Any]) -> tuple[float, str]:
        return -row.get("error_finetuned", row["error_quantized"]), row["name"]

    for number, row in enumerate(sorted(report.layers, key=rank)[:MAX_WORST]):
        text = f"{row['error_pruned']:.4f} after pruning, {row['error_quantized']:.4f} after quantization"
        if "error_finetuned" in row:
            text += f", {row['error_finetuned']:.4f} after fine-tuning"
        show("error", f"{row['name']}: {text}{'' if number else '  (the largest)'}")
