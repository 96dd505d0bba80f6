"""``slidesparse convert``: convert a float or W8A8 checkpoint to a pruned W8A8 one.

The source is read twice, in chunks of rows on a few threads.  The first pass refuses values that are not finite; the
second prunes, quantizes, slides and writes.  Memory use is a few chunks, whatever the size of the model.  The output is
written to a hidden sibling folder, config.json last, and published by one rename.

With calibration data, a pass in between prunes and quantizes block by block (`slidesparse.calibrate`) into a second
hidden folder, from which an interrupted run can be resumed.  The second pass then takes codes and scales from there,
and refuses codes that break their pattern.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from slidesparse.calibrate.distill import Distilled, distill, require_memory
from slidesparse.calibrate.distill import disk_bytes as distillation_bytes
from slidesparse.calibrate.learning import LOSSES, find_rotation
from slidesparse.calibrate.permutation import ordered_reader
from slidesparse.calibrate.pipeline import calibrate
from slidesparse.calibrate.resume import (
    DIGEST,
    DISTILLED,
    WorkFolder,
    left_beside,
    leftover,
    open_work,
    require_resumable,
)
from slidesparse.calibrate.roles import roles_of
from slidesparse.calibrate.rotation import rotated_reader, rotation_obstacle, untie_head
from slidesparse.calibrate.smoothing import find_smoothing, smoothed_reader
from slidesparse.calibrate.task import Calibration, Task, prepare
from slidesparse.checkpoint.converted import open_checkpoint, restore
from slidesparse.checkpoint.names import SCALE, WEIGHT, ZERO_POINT
from slidesparse.checkpoint.output import (
    full_disk_explained,
    partial_folder,
    publish,
    remove_stale,
    require_free_name,
    require_space,
    workers,
)
from slidesparse.checkpoint.storage import (
    ADAPTER_CONFIG,
    CONFIG,
    DTYPES,
    FLOATS,
    INDEX,
    MODULES,
    SIDE_NAMES,
    SIDE_SUFFIXES,
    SUFFIX,
    Checkpoint,
    CheckpointError,
    Reader,
    TensorSpec,
    Writer,
    bytes_of,
    is_inside,
)
from slidesparse.checkpoint.tokens import require_readable
from slidesparse.convert.budget import Choice, times_digest
from slidesparse.convert.choose import Outcome, estimate, loss_cache, prune_within, require_usable
from slidesparse.convert.options import BUDGET, ConvertOptions
from slidesparse.convert.plan import ConversionPlan, Output, Planner, ask
from slidesparse.convert.source import Floats, Quantized
from slidesparse.errors import CalibrationError, is_out_of_memory, shown
from slidesparse.pattern import MixedPattern, SlidePattern
from slidesparse.progress import Progress, no_progress
from slidesparse.prune import prune
from slidesparse.quantize import is_finite
from slidesparse.serving import Skeletons
from slidesparse.slide import obeys, require_pattern, slide

ROTATED = "the residual stream and the values of each attention head, folded into the weights"
_CODE = (".py", ".pkl", ".bin", ".pt", ".pth", ".so", ".sh")  # never copied, whatever the name


@dataclass(frozen=True)
class Report:
    """The result of a conversion, or what is planned in a dry run."""

    plan: ConversionPlan
    out: Path
    seconds: float = 0.0
    samples: str = ""  # description of the calibration samples; "" if weights were pruned by magnitude
    note: str = ""  # hint about the samples, or what an interrupted run left
    rotation: str = ""  # with calibration: how the model was rotated, or why not
    smoothing: str = ""  # with calibration: what smoothing does, if it does anything
    budget: Outcome | None = None  # result of a budget
    distillation: str = ""  # requirements of distillation
    distilled: Distilled | None = None  # result of distillation
    layers: tuple[dict[str, Any], ...] = ()  # with calibration: what it measured of each pruned layer
    was_sparse: bool = False  # whether the weights obeyed their patterns already
    left_out: tuple[str, ...] = ()  # files of the source that were not copied
    unserved: str = ""  # why the vLLM that is installed does not serve the model


def convert(
    source: str | Path,
    out: str | Path,
    options: ConvertOptions,
    *,
    dry_run: bool = False,
    progress: Progress = no_progress,
    skeletons: Skeletons | None = None,
) -> Report:
    """Prune the linear layers of ``source`` and write the W8A8 checkpoint ``out``.

    Args:
        source: a Hugging Face folder in FP32, FP16 or BF16, a compressed-tensors W8A8 one (whose weight scales and
            ignore list are kept), an FP8 one, a BitNet one (whose codes stay ternary), or an output of this function
            with the same pattern (of which only the layout changes).
        out: the folder to create; absent or empty.
        dry_run: plan and check everything that needs no weights; write nothing.
        progress: called with the phase, bytes done and total bytes.
        skeletons: vLLM, where it is installed; it is asked what it would make of the output.

    The output is deterministic; with calibration, on the same machine.  Raises SlideSparseError (CheckpointError,
    MetadataError, PatternError or CalibrationError) before anything is written when the source or the options cannot be
    used, and EnvironmentFault when the output does not fit or a library is missing.
    """
    try:
        return _convert(Path(source), Path(out), options, dry_run, progress, skeletons)
    except Exception as error:
        if not options.calibration or not is_out_of_memory(error):
            raise
        device, reason = options.calibration.torch_device, " ".join(str(error).split())
        less = ["fewer --samples", "a smaller --seqlen"]
        less += ["--rotate off"] * (options.calibration.rotate == "auto")
        less += ["--device cpu"] * (device.type != "cpu")
        raise CalibrationError(
            f"calibration does not fit into the memory of {device} ({shown(reason or type(error).__name__)}); where "
            "more is free, --resume continues from the finished layers; less is needed with "
            f"{', '.join(less[:-1])} or {less[-1]}"
        ) from None


def _convert(
    source: Path,
    out: Path,
    options: ConvertOptions,
    dry_run: bool,
    progress: Progress,
    skeletons: Skeletons | None,
) -> Report:
    """See `convert`."""
    started = time.monotonic()
    for pattern in (options.pattern, *(pattern for _, pattern in options.layer_patterns)):
        if isinstance(pattern, MixedPattern) and pattern.share:
            raise CheckpointError(
                f"{pattern.ratio} is no pattern to convert to, as it loses more than others with as many zeros; "
                "slidesparse synth writes it for measuring"
            )
    try:
        require_free_name(source, out)
    except CheckpointError as error:
        raise CheckpointError("; ".join(filter(None, [str(error), left_beside(out)]))) from None
    resume = options.calibration is not None and options.calibration.resume
    if options.calibration and (resume or not dry_run):
        require_resumable(out, _asked(options, options.calibration), resume)
    checkpoint, _ = open_checkpoint(source)
    require_readable(source)
    planner, why_not = _planner(checkpoint, options)
    unserved = ask(planner, skeletons) if skeletons else ""
    plan = planner.plan()
    task, calibration = None, options.calibration
    if calibration:
        layers, skipped, hold_back = plan.patterns, plan.unpruned, options.budget is not None
        task = prepare(planner.model, layers, skipped, plan.quant, calibration, hold_back, progress)
        task = replace(task, rotates=why_not is None)
    distillation = require_memory(task) if task and task.texts else ""
    if task and options.budget:  # what it lacks is refused here, not after the model was rotated
        require_usable(task, options.budget)
        loss_cache()
    copied, left_out = _other_files(checkpoint)
    report = Report(
        plan,
        out,
        samples=task.samples.summary if task else "",
        note=task.samples.note if task else "",
        rotation=ROTATED if why_not is None else why_not,
        distillation=distillation,
        left_out=tuple(map(str, left_out)),
        unserved=unserved,
    )
    if dry_run:
        report = replace(report, note="; ".join(filter(None, [report.note, left_beside(out)])))
    else:
        if task:
            require_resumable(out, _state(task, options), task.calibration.resume)
        else:
            report = replace(report, note=leftover(out))
        remove_stale(out)
        if not (task and task.calibration.resume):  # the run before has written some of it
            # The codes of finished blocks are as large as the output
            kept = plan.disk_bytes() + distillation_bytes(task) if task else 0
            others = sum((checkpoint.folder / name).stat().st_size for name in copied)
            require_space(out, plan.disk_bytes() + others + kept)
        report = _prune_and_write(planner, task, report, progress)
    if dry_run and task and options.budget:
        with planner.checkpoint.reader() as reader, tempfile.TemporaryDirectory() as folder:
            work = WorkFolder(Path(folder))
            dense = _transformed(task, reader, work, progress)
            outcome = estimate(task, dense.reader, work, options.budget, dense.rotated, progress)
            report = replace(report, rotation=dense.rotation or report.rotation, budget=outcome)
    return replace(report, seconds=time.monotonic() - started)


def _planner(checkpoint: Checkpoint, options: ConvertOptions) -> tuple[Planner, str | None]:
    """Return the planner of a checkpoint, and None if the model will be rotated, otherwise why not, or "".

    Raises CalibrationError if rotation was requested and is impossible.
    """
    planner, calibration = Planner(checkpoint, options), options.calibration
    if calibration is None or calibration.rotate == "off":
        return planner, ""
    plan = planner.plan()  # refuses weights that the model cannot be run with
    nothing = not options.budget and all(pattern.density == 1 for pattern in plan.patterns.values())
    # Rotated, two real models have 1.4 and 1.5% less perplexity in INT8; in FP8, whose errors grow where norms are
    # folded into weights, one has 4.0% more, 1.7% more at 6:8 and 2.7% more at 4:6 (docs/accuracy).
    fp8 = plan.quant == "fp8"
    if calibration.rotate == "auto" and nothing and (fp8 or not isinstance(planner.source, Floats)):
        return planner, ""
    if calibration.rotate == "auto" and fp8:
        return planner, "not rotated: in FP8 it costs more than it gains"
    if planner.source.quantization.kv_cache:
        why_not = "the scales of its quantized KV cache hold for its own values"
    elif isinstance(planner.source, Quantized):
        why_not = "its weights are ternary"
    else:
        untied = Planner(untie_head(checkpoint), options)
        with untied.checkpoint.reader() as reader:
            obstacle = rotation_obstacle(untied.model, reader) or _sparse(untied, reader)
        if obstacle is None:
            return untied, None
        why_not = obstacle
    if calibration.rotate == "on":
        raise CalibrationError(f"--rotate on: {why_not}; leave --rotate out")
    return planner, f"not rotated: {why_not}"


def _sparse(planner: Planner, reader: Reader) -> str | None:
    """Return the reason not to rotate a model that has a layer already pruned to its pattern, or None."""
    for name, pattern in planner.plan().patterns.items():
        spec = planner.checkpoint.require(name + WEIGHT)
        prunable = pattern.length is not None and spec.columns >= pattern.length and spec.dtype in FLOATS
        if prunable and pattern.density < 1 and obeys(reader.rows(spec.name, next(spec.chunks())), pattern):
            return f"{spec.name} already satisfies {pattern.ratio}, which rotation would undo"
    return None


def _asked(options: ConvertOptions, calibration: Calibration) -> dict[str, Any]:
    """Return the options that must be equal for a run to resume another; data count by what they hold."""
    return {
        "--sparsity": options.pattern.ratio,
        "--max-loss": options.budget and asdict(options.budget),
        "slidesparse's layer times": options.budget and DIGEST + times_digest(options.budget.gpu),
        "--quant": options.quant,
        "--layer": [
            f"{regex}={pattern.ratio if pattern else BUDGET}" for regex, pattern in options.layer_patterns
        ],
        "--ignore": list(options.ignore),
        "--samples": calibration.samples,
        "--seqlen": calibration.seqlen,
        "--rotate": calibration.rotate,
        "--minutes": calibration.training_minutes if calibration.distill else None,
        "epochs": calibration.epochs,
    }


def _state(task: Task, options: ConvertOptions) -> dict[str, Any]:
    """Return the values that must be equal for a run to resume another, but for the digest of the source's weights."""
    return {**_asked(options, task.calibration), **task.state(), "rotated": task.rotates}


def _prune_and_write(planner: Planner, task: Task | None, report: Report, progress: Progress) -> Report:
    """Check the source's values, prune, and write the output; return what is known then."""
    advice = (
        "the layers pruned so far are kept. Free some space, then run the same command again with --resume"
        if task
        else "nothing is left behind. Free some space or choose another output folder, then run the same command again"
    )
    plan, out = report.plan, report.out
    with full_disk_explained(out, plan.disk_bytes(), advice), plan.checkpoint.reader() as reader:
        was_sparse, weights = _check_values(plan, reader, progress)
        report = replace(report, was_sparse=was_sparse)
        if task:
            return _write_calibrated(planner, task, report, reader, weights, progress)
        write_output(plan, out, reader, None, progress)
        return report


def _write_calibrated(
    planner: Planner, task: Task, report: Report, reader: Reader, weights: str, progress: Progress
) -> Report:
    """Calibrate the layers and write the output; ``weights`` is the digest of the source's."""
    plan, out = report.plan, report.out
    options, outcome, distilled = plan.options, None, None
    state = {**_state(task, options), "the weights of the source": weights}
    with open_work(out, state, task.calibration.resume) as work:
        dense = _transformed(task, reader, work, progress)
        reader = dense.reader
        if task.rotates and not dense.rotated and not planner.head:  # a tied lm_head stays tied
            tied = Planner(open_checkpoint(plan.checkpoint.folder)[0], options)
            tied.unquantized, tied.served_names = planner.unquantized, planner.served_names
            planner, plan = tied, tied.plan()
        if options.budget:
            outcome = estimate(task, reader, work, options.budget, dense.rotated, progress)

            def fitted(choice: Choice) -> Task:
                chosen = planner.plan(choice.by_layer)
                return replace(task, layers=chosen.patterns, skipped=frozenset(chosen.unpruned))

            outcome = prune_within(reader, work, outcome, fitted, progress)
            assert outcome.choice
            plan = planner.plan(outcome.choice.by_layer)
            task = fitted(outcome.choice)
        else:
            calibrate(task, reader, work, progress)
        if task.texts:
            distilled = distill(task, reader, work, _dense_reader, progress)
        measured = work.rows()
        with work.tensors(DISTILLED).reader() as codes:
            write_output(plan, out, ordered_reader(reader, codes), ordered_reader(codes, codes), progress)
        work.remove()
    return replace(
        report,
        plan=plan,
        layers=tuple(measured),
        rotation=dense.rotation or report.rotation,
        smoothing=dense.smoothing,
        budget=outcome,
        distilled=distilled,
    )


class _Transformed(NamedTuple):
    """The dense model to prune, and what was done to it, for the report."""

    reader: Reader
    rotated: bool
    rotation: str
    smoothing: str


def _transformed(task: Task, reader: Reader, work: WorkFolder, progress: Progress) -> _Transformed:
    """Return the rotated and smoothed model.

    A rotation that prunes worse, as that of a model whose weights are sparse already, is used only if it was requested.
    """
    rotated, rotation = False, ""
    if task.rotates:
        learned = find_rotation(task, reader, work, progress)
        before, after = learned[LOSSES].tolist()
        change = f"estimated pruning loss {after / before - 1:+.0%}" if before else ""
        if after > before and task.calibration.rotate == "auto":
            rotation = f"not rotated, as that would prune worse: {change}"
        else:
            rotated, rotation = True, f"{ROTATED}; {change}" if change else ROTATED
            reader = rotated_reader(reader, task.model, roles_of(task.model, reader), learned)
    if not task.smooths:
        return _Transformed(reader, rotated, rotation, "")
    factors, smoothing = find_smoothing(task, reader, work, progress)
    return _Transformed(smoothed_reader(reader, task.model, factors), rotated, rotation, smoothing)


def _dense_reader(task: Task, reader: Reader, work: WorkFolder) -> Reader:
    """Return the reader of the dense model that was pruned, in another process."""
    return _transformed(task, reader, work, no_progress).reader


def write_output(
    plan: ConversionPlan,
    out: Path,
    reader: Reader,
    codes: Reader | None,
    progress: Progress,
    added: Mapping[str, bytes] = {},
) -> None:
    """Write the output, with files that are ``added``, and publish it, with calibrated ``codes`` if there are some."""
    source = plan.checkpoint.folder
    with partial_folder(out) as folder:
        for name in _other_files(plan.checkpoint)[0]:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / name, folder / name)
        _write_tensors(plan, reader, codes, folder, progress)
        for file, content in chain(added.items(), plan.small_files()):
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).write_bytes(content)
        plan.checkpoint.require_unchanged()
        publish(folder, out)


# Files and chunks


def _other_files(checkpoint: Checkpoint) -> tuple[list[Path], list[Path]]:
    """List the other files to copy, and those to leave out: code, other weights, links out of the folder.

    Files of known kinds are copied, and safetensors files in folders named by modules.json.  Hidden files are in
    neither list.  The configuration of an adapter would have transformers load another model in the output's place.
    """
    source = checkpoint.folder
    copied: list[Path] = []
    left_out: list[Path] = []
    modules = _module_folders(checkpoint)
    for path in sorted(source.rglob("*")):
        name = path.relative_to(source)
        if not path.is_file() or any(part.startswith(".") for part in name.parts):
            continue
        if str(name) in (CONFIG, INDEX, *checkpoint.files):
            continue
        copyable = path.name.endswith(SIDE_SUFFIXES) and not path.name.endswith(".index.json")
        copyable &= path.name != ADAPTER_CONFIG
        copyable |= path.name.startswith(SIDE_NAMES) and not path.name.endswith(_CODE)
        copyable |= name.parts[0] in modules and path.suffix == SUFFIX
        (copied if copyable and is_inside(source, path) else left_out).append(name)
    for module in modules:
        files = [name for name in left_out if name.parts[0] == module and name.suffix == ".bin"]
        if files and not any(name.parts[0] == module and name.suffix == SUFFIX for name in copied):
            raise CheckpointError(
                f"{source / files[0]}, which modules.json needs, is not a safetensors file; others may contain code "
                "and are not copied: save the model again with safe_serialization=True"
            )
    return copied, left_out


def _module_folders(checkpoint: Checkpoint) -> set[str]:
    """Return the folders of a sentence-transformers model's additional modules, such as 2_Dense."""
    path = checkpoint.folder / MODULES
    if not path.is_file() or not is_inside(checkpoint.folder, path):
        return set()
    try:
        return {str(module["path"]) for module in json.loads(path.read_bytes()) if module["path"]}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is not a list of modules with their paths ({type(error).__name__}: {error}); fetch it again"
        ) from error


def _each_chunk(
    outputs: Sequence[Output], pool: ThreadPoolExecutor, work: Callable[[Output, slice], None]
) -> Iterator[int]:
    """Call ``work`` for every chunk; yield the source bytes of each in order, or raise the first error."""
    jobs = [(output, rows) for output in outputs for rows in output.source.chunks()]

    def run(job: tuple[Output, slice]) -> int:
        output, rows = job
        work(output, rows)
        return int(rows.stop - rows.start) * output.source.row_bytes

    yield from pool.map(run, jobs)


def _check_values(plan: ConversionPlan, reader: Reader, progress: Progress) -> tuple[bool, str]:
    """Check all tensors by `_check_chunk`.

    Returns whether all weights to prune obey their patterns already, and for calibration a digest of all tensors.
    """
    done, dense, sums = 0, list[str](), dict[tuple[TensorSpec, int], int]()

    def check(output: Output, rows: slice) -> None:
        values = _check_chunk(plan, reader, output, rows)
        if plan.options.calibration:
            sums[output.source, rows.start] = zlib.crc32(bytes_of(values))
        if not (plan.source.metadata or dense or output.pattern is None or obeys(values, output.pattern)):
            dense.append(output.source.name)

    with workers() as pool:
        for size in _each_chunk(plan.outputs, pool, check):
            done += size
            progress("checking", done, plan.bytes_in)
    return not dense, DIGEST + hashlib.sha256(repr(sorted(sums.items())).encode()).hexdigest()


def _check_chunk(plan: ConversionPlan, reader: Reader, output: Output, rows: slice) -> Tensor:
    """Return rows of a tensor.

    Refuses NaN and Inf, zero points that are not 0, and rows of a converted source that break their pattern.
    """
    values, name = reader.rows(output.source.name, rows), output.source.name
    if not _may_hold(output, values):
        row, column = map(int, (~values.float().isfinite()).nonzero()[0])
        is_vector, place = len(output.source.shape) < 2, rows.start + row
        where = f"element {place}" if is_vector else f"row {place}, column {column}"
        raise CheckpointError(
            f"tensor {name} in {output.file} is not finite at {where} ({float(values[row, column])}); such weights "
            "cannot be pruned or quantized: fetch the checkpoint again, or repair the training"
        )
    if name.endswith(ZERO_POINT) and not output.specs and bool(values.float().any()):
        raise CheckpointError(
            f"tensor {name} in {output.file} is not 0 everywhere, but quantization_config says that weights are "
            "symmetric; only symmetric ones are supported: start from the original checkpoint, or fetch the config "
            "again"
        )
    if output.layer and (metadata := plan.source.metadata):
        restore(values, metadata.layers[output.layer], metadata.layout, output.layer, rows.start)
    return values


def _may_hold(output: Output, values: Tensor) -> bool:
    """Return whether a tensor may hold the values, which are finite, but for the limits of a clamp."""
    return is_finite(values) or (output.is_limit and not bool(values.float().isnan().any()))


def _write_tensors(
    plan: ConversionPlan, reader: Reader, codes: Reader | None, folder: Path, progress: Progress
) -> None:
    """Write the safetensors files of a plan into ``folder``; ``codes`` has those of calibrated layers, and vectors."""
    done = 0
    with workers() as pool:
        for file in plan.checkpoint.files:
            with Writer(folder / file, plan.specs(file)) as writer:
                outputs = [output for output in plan.outputs if output.file == file]

                def work(output: Output, rows: slice, writer: Writer = writer) -> None:
                    _write_chunk(plan, reader, codes, writer, output, rows)

                for size in _each_chunk(outputs, pool, work):
                    done += size
                    progress("writing", done, plan.bytes_in)


def _write_chunk(
    plan: ConversionPlan, reader: Reader, codes: Reader | None, writer: Writer, output: Output, rows: slice
) -> None:
    layer, pattern, name = output.layer, output.pattern, output.source.name
    trained = codes.checkpoint.tensors if codes else {}
    if layer is None:
        head = name.removesuffix(WEIGHT)
        for spec in output.specs:
            if isinstance(plan.source, Quantized) and head in plan.source.heads:
                values = plan.source.float_rows(reader, head, rows)
            else:
                source = codes if codes and name in trained else reader
                values = source.rows(name, rows)  # float32 if it was rotated or trained
            _write_checked(writer, output, spec, rows, values)
        return
    if codes and layer + WEIGHT in trained:
        weight = codes.rows(layer + WEIGHT, rows)
        scale: Tensor | None = codes.rows(layer + SCALE, rows)
        if isinstance(pattern, SlidePattern):
            require_pattern(weight, pattern, layer)
    else:
        pruned = (lambda w: prune(w, pattern)) if pattern else (lambda w: w)
        weight, scale = plan.source_of(layer).codes(reader, layer, rows, pruned)
    if isinstance(pattern, SlidePattern) and weight.shape[1] != output.specs[0].columns:
        weight = slide(weight, pattern, layer=layer)
    writer.write(output.specs[0].name, rows.start, weight)
    if len(output.specs) > 1 and scale is not None:
        _write_checked(writer, output, output.specs[1], rows, scale)


def _write_checked(writer: Writer, output: Output, spec: TensorSpec, rows: slice, values: Tensor) -> None:
    """Write rows in the dtype of their tensor.  Raises CheckpointError for values out of its range."""
    converted = values.to(DTYPES[spec.dtype])
    if not _may_hold(output, converted):
        raise CheckpointError(
            f"converted values of {spec.name} are out of the range of {spec.dtype}; save the source in BF16 or F32, "
            "convert it with --rotate off, or fetch it again if scales are damaged"
        )
    writer.write(spec.name, rows.start, converted)
