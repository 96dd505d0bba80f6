"""``slidesparse convert``: convert a float or W8A8 checkpoint to a pruned W8A8 one.

The source is read twice, in chunks of rows on a few threads.  The first pass refuses values that are not finite; the
second prunes, quantizes, slides and writes.  Memory use is a few chunks, whatever the size of the model.  The output is
written to a hidden sibling folder, config.json last, and published by one rename.

With calibration data, a pass in between prunes and quantizes block by block (`slidesparse.calibrate`) into a second
hidden folder, from which an interrupted run can be resumed.  The second pass then takes codes and scales from there,
and the output is read back and checked before it is published.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slidesparse import methods
from slidesparse.blocks import obeys
from slidesparse.calibrate.distill import Distilled, distill, require_memory
from slidesparse.calibrate.distill import disk_bytes as distillation_bytes
from slidesparse.calibrate.learning import disk_bytes as rotation_bytes
from slidesparse.calibrate.learning import find_rotation
from slidesparse.calibrate.permutation import OrderedReader
from slidesparse.calibrate.pipeline import calibrate
from slidesparse.calibrate.resume import DISTILLED, WorkFolder, finished_bytes, open_work
from slidesparse.calibrate.rotation import RotatedReader, rotation_obstacle, untie_head
from slidesparse.calibrate.smoothing import SmoothedReader, find_smoothing
from slidesparse.calibrate.task import Progress, Task, no_progress
from slidesparse.checkpoint import architectures
from slidesparse.checkpoint.architectures import SCALE, WEIGHT, ZERO_POINT
from slidesparse.checkpoint.bitnet import is_bitnet
from slidesparse.checkpoint.converted import open_checkpoint, restore
from slidesparse.checkpoint.output import (
    chunk_seed,
    full_disk_explained,
    partial_folder,
    publish,
    remove_stale,
    require_free_name,
    require_space,
    workers,
)
from slidesparse.checkpoint.storage import (
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
    Writer,
    is_inside,
)
from slidesparse.checkpoint.w8a8 import Scheme, holds_floats
from slidesparse.convert.budget import Choice, layers
from slidesparse.convert.choose import Outcome, estimate, loss_cache, prune_within
from slidesparse.convert.options import ConvertOptions
from slidesparse.convert.plan import ConversionPlan, Part, calibration_task, make_plan
from slidesparse.convert.report import Facts, Report, layer_rows, read_back
from slidesparse.errors import CalibrationError
from slidesparse.pattern import SlidePattern
from slidesparse.quantize import FP8, dequantize_blocks, dequantize_rows, quantize_rows
from slidesparse.slide import slide

ROTATED = "the residual stream and the values of each attention head, folded into the weights"
_CODE = (".py", ".pkl", ".bin", ".pt", ".pth", ".so", ".sh")  # never copied, whatever the name


@dataclass(frozen=True)
class _Result:
    """The final plan, and the parts of the report that only running it tells."""

    plan: ConversionPlan
    rows: Sequence[dict[str, Any]] = ()
    rotation: str = ""
    smoothing: str = ""
    budget: Outcome | None = None
    distilled: Distilled | None = None
    sparse: bool = False  # whether the weights obeyed their patterns already


def convert(
    source: str | Path,
    out: str | Path,
    options: ConvertOptions,
    *,
    dry_run: bool = False,
    progress: Progress = no_progress,
) -> Report:
    """Prune the linear layers of ``source`` and write the W8A8 checkpoint ``out``.

    Args:
        source: a Hugging Face folder in FP32, FP16 or BF16, a compressed-tensors W8A8 one (whose weight scales and
            ignore list are kept), an FP8 one, a BitNet one (whose codes stay ternary), or an output of this function
            with the same pattern (of which only the layout changes).
        out: the folder to create; absent or empty.
        dry_run: plan and check everything that needs no weights; write nothing.
        progress: called with the phase, bytes done and total bytes.

    The output is deterministic; with calibration, on the same machine.  Raises SlideSparseError (CheckpointError,
    MetadataError, PatternError or CalibrationError) before anything is written when the source or the options cannot be
    used, EnvironmentFault when the output does not fit or a library is missing, and DamagedError when the output, read
    back, is wrong.
    """
    started = time.monotonic()
    source, out = Path(source), Path(out)
    require_free_name(source, out)
    checkpoint, _ = open_checkpoint(source)
    rotation = _rotation(checkpoint, options)
    if rotation == ROTATED:
        checkpoint = untie_head(checkpoint)
    plan = make_plan(checkpoint, options)
    task = calibration_task(plan) if options.calibration else None
    distillation = require_memory(task) if task and task.texts else ""
    if options.budget:
        loss_cache()  # refused here if it cannot be written, not after the model was rotated
    _, left_out = _other_files(checkpoint)
    result = _Result(plan)
    if not dry_run:
        remove_stale(out)
        _require_room(plan, task, out, rotation == ROTATED)
        result = _prune_and_write(plan, task, out, rotation == ROTATED, progress)
        plan = result.plan
    elif task and options.budget:
        with checkpoint.reader() as reader, tempfile.TemporaryDirectory() as folder:
            work = WorkFolder(Path(folder))
            dense = _transformed(task, reader, work, rotation == ROTATED, progress)
            outcome = estimate(task, dense.reader, work, options.budget, dense.rotated, progress)
            result = _Result(plan, rotation=dense.rotation, budget=outcome)
    return Report(
        source=source,
        out=out,
        pattern=plan.pattern,
        quant=plan.quant,
        layout=options.layout,
        method=options.method_name,
        patterns=plan.patterns,
        kept=plan.kept,
        skipped=plan.skipped,
        rewritten=plan.rewritten,
        experts=plan.experts,
        bytes_in=plan.bytes_in,
        bytes_out=plan.bytes_out,
        seconds=time.monotonic() - started,
        samples=task.samples.summary if task else "",
        note=task.samples.note if task else "",
        rotation=result.rotation or rotation,
        smoothing=result.smoothing,
        budget=result.budget,
        distillation=distillation,
        distilled=result.distilled,
        layers=tuple(result.rows),
        ternary=is_bitnet(checkpoint.config),
        newly_pruned=not plan.converted and not result.sparse,
        left_out=tuple(map(str, left_out)),
    )


def _rotation(checkpoint: Checkpoint, options: ConvertOptions) -> str:
    """Return ROTATED if the model will be rotated, otherwise "" or the reason why not.

    Raises CalibrationError if rotation was requested and is impossible.
    """
    if not options.calibration or options.calibration.rotate == "off":
        return ""
    block = checkpoint.quantization_config()
    if block is not None and not holds_floats(block):
        return ""  # calibration refuses such a source
    by_default = options.calibration.rotate == "auto"
    if by_default and (options.pattern.density == 1 or not methods.get(options.method_name).updates_weights):
        return ""  # nothing is pruned, or by a method for comparison
    why_not = rotation_obstacle(checkpoint) or _sparse(checkpoint, options)
    if not why_not:
        return ROTATED
    if options.calibration.rotate == "on":
        raise CalibrationError(f"--rotate on: {why_not}; leave --rotate out")
    return f"not rotated: {why_not}"


def _sparse(checkpoint: Checkpoint, options: ConvertOptions) -> str | None:
    """Return the reason not to rotate a model that has a layer already pruned to the pattern, or None."""
    family = architectures.family_of(checkpoint.config, checkpoint.tensors, options.linear)
    length = options.pattern.length
    with checkpoint.reader() as reader:
        for spec in (checkpoint.require(name + WEIGHT) for name in family.layers(checkpoint.tensors)):
            if length is None or spec.columns < length or spec.dtype not in FLOATS or not spec.rows:
                continue
            if obeys(reader.rows(spec.name, next(spec.chunks())), options.pattern):
                return f"{spec.name} already satisfies {options.pattern.ratio}, which rotation would undo"
    return None


def _prune_and_write(
    plan: ConversionPlan, task: Task | None, out: Path, rotate: bool, progress: Progress
) -> _Result:
    """Check the source's values, prune, and write the output."""
    advice = (
        "the layers pruned so far are kept. Free some space, then run the same command again with --resume"
        if task
        else "nothing is left behind. Free some space or choose another output folder, then run the same command again"
    )
    with full_disk_explained(out, plan.disk_bytes(), advice), plan.checkpoint.reader() as reader:
        sparse = _check_values(plan, reader, progress)
        if task:
            return _write_calibrated(plan, task, out, reader, rotate, progress)
        facts = _write(plan, out, reader, None, progress)
        return _Result(plan, layer_rows(facts, (), plan.options.method_name), sparse=sparse)


def _write_calibrated(
    plan: ConversionPlan, task: Task, out: Path, reader: Reader, rotate: bool, progress: Progress
) -> _Result:
    """Calibrate the layers and write the output."""
    options, outcome, distilled = plan.options, None, None
    state = {**task.state(), "budget": options.budget and asdict(options.budget), "rotate": rotate}
    with open_work(out, state, task.calibration.resume) as work:
        dense = _transformed(task, reader, work, rotate, progress)
        reader = dense.reader
        if rotate and not dense.rotated:  # a tied lm_head stays tied
            plan = make_plan(open_checkpoint(plan.checkpoint.folder)[0], options)
        if options.budget:
            outcome = estimate(task, reader, work, options.budget, dense.rotated, progress)

            def fitted(choice: Choice) -> Task:
                chosen = make_plan(plan.checkpoint, options, dict(layers(choice)))
                return replace(task, layers=chosen.patterns, skipped=frozenset(chosen.skipped))

            outcome = prune_within(reader, work, outcome, fitted, progress)
            assert outcome.choice
            plan = make_plan(plan.checkpoint, options, dict(layers(outcome.choice)))
            task = fitted(outcome.choice)
        else:
            calibrate(task, reader, work, progress)
        if task.texts:
            distilled = distill(task, reader, work, progress)
        with work.tensors(DISTILLED).reader() as codes:
            facts = _write(plan, out, OrderedReader(reader, codes), OrderedReader(codes, codes), progress)
        rows = layer_rows(facts, work.rows(), task.method)
        work.remove()
    return _Result(plan, rows, dense.rotation, dense.smoothing, outcome, distilled)


class _Transformed(NamedTuple):
    """The dense model to prune, and what was done to it, for the report."""

    reader: Reader
    rotated: bool
    rotation: str
    smoothing: str


def _transformed(
    task: Task, reader: Reader, work: WorkFolder, rotate: bool, progress: Progress
) -> _Transformed:
    """Return the rotated and smoothed model.

    A rotation that prunes worse, as that of a model whose weights are sparse already, is used only if it was requested.
    """
    rotated, rotation = False, ""
    if rotate:
        learned = find_rotation(task, reader, work, progress)
        change = f"estimated pruning loss {learned.after / learned.before - 1:+.0%}" if learned.before else ""
        if learned.after > learned.before and task.calibration.rotate == "auto":
            rotation = f"not rotated, as that would prune worse: {change}"
        else:
            rotated, rotation = True, f"{ROTATED}; {change}" if change else ROTATED
            reader = RotatedReader(reader, task.model, task.device, learned.rotation)
    if not task.smooths:
        return _Transformed(reader, rotated, rotation, "")
    smoothing = find_smoothing(task, reader, work, progress)
    smoothed = SmoothedReader(reader, smoothing.factors, task.model.stages)
    return _Transformed(smoothed, rotated, rotation, smoothing.summary)


def _write(
    plan: ConversionPlan, out: Path, reader: Reader, codes: Reader | None, progress: Progress
) -> list[Facts]:
    """Write the output and publish it; with calibrated ``codes`` or the option ``check``, read it back first."""
    source = plan.checkpoint.folder
    with partial_folder(out) as folder:
        for name in _other_files(plan.checkpoint)[0]:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / name, folder / name)
        _write_tensors(plan, reader, codes, folder, progress)
        for file, content in plan.small_files():
            (folder / file).write_bytes(content)
        facts = read_back(folder, plan.checkpoint) if codes or plan.options.check else []
        publish(folder, out)
    return facts


# Disk space


def _require_room(plan: ConversionPlan, task: Task | None, out: Path, rotate: bool) -> None:
    """Raise EnvironmentFault unless the output and the finished blocks of calibration fit on the disk."""
    source = plan.checkpoint.folder
    needed = plan.disk_bytes() + sum(
        (source / name).stat().st_size for name in _other_files(plan.checkpoint)[0]
    )
    if task:
        needed += (
            task.disk_bytes()
            + distillation_bytes(task)
            - (finished_bytes(out) if task.calibration.resume else 0)
        )
        needed += rotation_bytes(task, out) if rotate else 0
    require_space(out, needed)


# Files and chunks


def _other_files(checkpoint: Checkpoint) -> tuple[list[Path], list[Path]]:
    """List the other files to copy, and those to leave out: code, other weights, links out of the folder.

    Files of known kinds are copied, and safetensors files in folders named by modules.json.  Hidden files are in
    neither list.
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
    parts: Sequence[Part], pool: ThreadPoolExecutor, work: Callable[[Part, slice], None]
) -> Iterator[int]:
    """Call ``work`` for every chunk; yield the source bytes of each in order, or raise the first error."""
    jobs = [(part, rows) for part in parts for rows in part.chunks()]

    def run(job: tuple[Part, slice]) -> int:
        part, rows = job
        work(part, rows)
        return int(rows.stop - rows.start) * part.source.row_bytes

    yield from pool.map(run, jobs)


def _check_values(plan: ConversionPlan, reader: Reader, progress: Progress) -> bool:
    """Check all tensors by `_check_chunk`; return whether all weights to prune obey their patterns already."""
    done, dense = 0, list[str]()

    def check(part: Part, rows: slice) -> None:
        values = _check_chunk(plan, reader, part, rows)
        if not (plan.converted or dense or part.pattern is None or obeys(values, part.pattern)):
            dense.append(part.source.name)

    with workers() as pool:
        for size in _each_chunk(plan.parts, pool, check):
            done += size
            progress("checking", done, plan.bytes_in)
    return not dense


def _check_chunk(plan: ConversionPlan, reader: Reader, part: Part, rows: slice) -> Tensor:
    """Return rows of a tensor.

    Refuses NaN and Inf, zero points that are not 0, and rows of a converted source that break their pattern.
    """
    values, name = reader.rows(part.source.name, rows), part.source.name
    if not is_finite(values):
        raise CheckpointError(_not_finite_message(reader, part))
    if name.endswith(ZERO_POINT) and not part.out and bool(values.float().any()):
        raise CheckpointError(
            f"tensor {name} in {part.file} is not 0 everywhere, but quantization_config says that weights are "
            "symmetric; only symmetric ones are supported: start from the original checkpoint, or fetch the config "
            "again"
        )
    if plan.converted and part.layer:
        restore(values, plan.converted, part.layer, rows.start)
    return values


def is_finite(values: Tensor) -> bool:
    """Return whether all elements are finite, in one pass and without temporaries for the usual dtypes."""
    if not values.dtype.is_floating_point or not values.numel():
        return True
    if values.dtype == FP8:  # no Inf, and one NaN of either sign
        return bool((values.view(torch.int8) & 0x7F).max() < 0x7F)
    if values.element_size() == 1:
        return bool(torch.isfinite(values.float()).all())
    return bool(torch.isfinite(torch.stack(torch.aminmax(values))).all())  # NaN wins both comparisons


def _not_finite_message(reader: Reader, part: Part) -> str:
    count, first, spec = 0, None, part.source
    for rows in spec.chunks():
        values = reader.rows(spec.name, rows).float()
        bad = ~torch.isfinite(values)
        count += int(bad.sum())
        if first is None and bool(bad.any()):
            row, column = divmod(int(bad.flatten().to(torch.int8).argmax()), spec.columns)
            first = (rows.start + row, column, float(values[row, column]))
    assert first is not None
    row, column, value = first
    where = f"row {row}, column {column}" if len(spec.shape) > 1 else f"element {row}"
    return (
        f"tensor {spec.name} in {part.file} holds {count} values that are not finite, the first at {where} "
        f"({value}); such weights cannot be pruned or quantized: fetch the checkpoint again, or repair the "
        "training"
    )


def _write_tensors(
    plan: ConversionPlan, reader: Reader, codes: Reader | None, folder: Path, progress: Progress
) -> None:
    done = 0
    with workers() as pool:
        for file in plan.checkpoint.files:
            with Writer(folder / file, plan.specs(file)) as writer:
                parts = [part for part in plan.parts if part.file == file]

                def work(part: Part, rows: slice, writer: Writer = writer) -> None:
                    _write_chunk(plan, reader, codes, writer, part, rows)

                for size in _each_chunk(parts, pool, work):
                    done += size
                    progress("writing", done, plan.bytes_in)


def _write_chunk(
    plan: ConversionPlan, reader: Reader, codes: Reader | None, writer: Writer, part: Part, rows: slice
) -> None:
    if part.layer is None:
        if part.out:
            values = reader.rows(part.source.name, rows)  # float32 if it was rotated
            if part.scheme:
                values = _dequantized(values, part.scheme, reader, part.source.name, rows)
            writer.write(part.source.name, rows.start, values.to(DTYPES[part.out[0].dtype]))
        return
    if codes and part.pattern:
        weight = codes.rows(part.layer + WEIGHT, rows)
        scale: Tensor | None = codes.rows(part.layer + SCALE, rows)
    else:
        weight, scale = _make(plan, part, rows, reader)
    if isinstance(part.pattern, SlidePattern) and plan.options.layout == "slided":
        weight = slide(weight, part.pattern, layer=part.layer)
    assert weight.dtype == DTYPES[part.out[0].dtype]
    part.write(writer, rows.start, weight, scale if part.scaled else None)


def _dequantized(values: Tensor, scheme: Scheme, reader: Reader, name: str, rows: slice) -> Tensor:
    """Return codes times their scales, [M, K] float32, for ``rows`` of the weight ``name``."""
    scale = reader.whole(name.removesuffix(WEIGHT) + scheme.scale)
    if scheme.block:
        return dequantize_blocks(values, scale, scheme.block, rows.start)
    return dequantize_rows(values, scale.reshape(-1)[rows] if scheme.strategy == "channel" else scale)


def _make(plan: ConversionPlan, part: Part, rows: slice, reader: Reader) -> tuple[Tensor, Tensor | None]:
    """Return pruned and quantized rows of a weight in the dense layout, and their scales unless these are copied."""
    assert part.layer
    values, scheme = reader.rows(part.source.name, rows), part.scheme
    if plan.converted is not None:
        return restore(values, plan.converted, part.layer, rows.start), None
    scale = reader.whole(part.layer + scheme.scale).float() if scheme and part.scaled else None
    if scheme and scheme.block and scale is not None:
        values = dequantize_blocks(values, scale, scheme.block, rows.start)
    if part.pattern:
        seed = chunk_seed(plan.options.seed, part.source.name, rows.start)
        values = methods.get(plan.options.method_name).prune(values, part.pattern, seed)
    if scheme is None or scheme.block:
        return quantize_rows(values, DTYPES[part.out[0].dtype], "cuda")
    return values, None if scale is None else scale.reshape(1, 1).expand(len(values), 1)
