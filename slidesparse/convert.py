"""``slidesparse convert``: a float or W8A8 checkpoint becomes a pruned W8A8 one.

Two passes over the source, row chunk by row chunk on a few threads: the first reads everything and refuses
what is not finite, the second prunes, quantizes, slides and writes.  Memory is a few chunks, whatever the
size of the model. The output grows in a hidden sibling folder and appears under its name by one rename;
config.json is its last file.

With calibration data a pass in between prunes and quantizes layer by layer (`slidesparse.calibrate`) into a
second hidden folder, which outlives a killed run; the pass that writes takes codes and scales from there, and
what it wrote is read back and checked before it gets its name.
"""

from __future__ import annotations

import errno
import json
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slidesparse import architectures
from slidesparse.architectures import SCALE, WEIGHT
from slidesparse.calibrate.pipeline import calibrate, rank
from slidesparse.calibrate.report import Facts, layer_rows, read_back, sensitivity
from slidesparse.calibrate.run import Calibration, choose_method, prepare, share, worst_layers
from slidesparse.calibrate.work import finished_bytes, open_work
from slidesparse.checkpoint import CONFIG, DTYPES, INDEX, SUFFIX, Checkpoint, CheckpointError, Reader, Writer
from slidesparse.pattern import SlidePattern
from slidesparse.plan import Part, Plan, make_plan
from slidesparse.prune import prune
from slidesparse.publish import (
    SpaceError,
    chunk_seed,
    partial_folder,
    publish,
    remove_stale,
    require_free_name,
    require_space,
    workers,
)
from slidesparse.quantize import FP8, NAMES, quantize_rows
from slidesparse.slide import slide
from slidesparse.stored import restore

Progress = Callable[[str, int, int], None]  # phase, bytes done, bytes in all

MODULES = "modules.json"  # of sentence-transformers
_WEIGHT_SUFFIXES = (
    *(SUFFIX, ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".onnx", ".onnx_data", ".h5", ".msgpack", ".ot"),
)


@dataclass(frozen=True)
class Report:
    """What a conversion did, or with ``dry_run`` would do."""

    source: Path
    out: Path
    pattern: SlidePattern
    quant: str
    layout: str
    method: str
    patterns: dict[str, SlidePattern]  # pruned layers
    kept: dict[str, str]  # 2-D weights left as they are -> why
    skipped: dict[str, str]  # linear layers quantized, not pruned -> why
    bytes_in: int
    bytes_out: int
    seconds: float
    samples: str = ""  # of calibration, in words
    note: str = ""  # what the user should know of them
    layers: tuple[dict[str, Any], ...] = ()  # of `calibrate.report.layer_rows`; with calibration or check
    made: bool = True  # whether anything was pruned now, not just laid out anew

    @property
    def pruned(self) -> tuple[str, ...]:
        """The pruned layers."""
        return tuple(self.patterns)

    @property
    def sensitivity(self) -> list[str]:
        """The pruned layers, the largest error of their output first; empty without calibration."""
        return sensitivity(self.layers)

    @property
    def rate(self) -> float:
        """MB of source tensors a second, all passes together."""
        return self.bytes_in / 1e6 / max(self.seconds, 1e-9)


def convert(
    source: str | Path,
    out: str | Path,
    *,
    pattern: SlidePattern,
    quant: str | None = None,
    layout: str = "dense",
    method: str | None = None,
    ignore: Sequence[str] = (),
    linear: str | None = None,
    seed: int = 0,
    layer: Sequence[str] = (),
    skip: Sequence[str] = (),
    skip_worst: str | None = None,
    calibration: Calibration | None = None,
    check: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> Report:
    """Prune the linear layers of ``source`` to ``pattern`` and write the W8A8 checkpoint ``out``.

    Args:
        source: a Hugging Face folder in FP32, FP16 or BF16, or a compressed-tensors W8A8 one (whose scales and
            ignore list are kept), or one made by this function with the same pattern (whose layout alone
            changes).
        out: the folder to make; absent or empty.
        quant: "int8" or "fp8"; None takes what a W8A8 source has, and int8 for a float one.
        layout: "dense" [N, K], which stock vLLM serves, or "slided" [N, K'].
        method: "sparsegpt" or "wanda", which need ``calibration``, "magnitude", or "random" (by ``seed``); None takes
            sparsegpt with calibration data and magnitude without.
        ignore: regexes of layers to leave exactly as they are, searched in names without ".weight".
        linear: regex of the layers to prune, instead of those of the architecture.
        layer: "REGEX=PATTERN" for layers of another pattern; of several that match, the last counts.
        skip: regexes of layers to quantize without pruning them.
        skip_worst: such as "5%": skip also so many of the layers, those that pruning costs most; needs calibration.
        calibration: data to prune by, from float weights of known architectures; with its ``resume``, a killed run
            goes on from the layers that it finished, and the output is the same bytes.
        check: read the output back and fill ``Report.layers`` also without calibration.
        dry_run: decide and check everything that can be without reading weights; write nothing.
        progress: called with phase, bytes done and bytes in all.

    Same input, same bytes out; with calibration, on the same machine.  Raises CheckpointError, ArchitectureError,
    MetadataError, PatternError, CalibrationError or MissingPackageError before anything is written when the source or
    the options do not do, SpaceError when the output does not fit, DamagedError when what was written is not what
    should have been.
    """
    started = time.monotonic()
    source, out = Path(source), Path(out)
    require_free_name(source, out)
    checkpoint = Checkpoint.open(source)
    method = choose_method(method, calibration)
    replan = partial(
        make_plan, checkpoint, pattern, quant, layout, method, ignore, linear, seed, rules=layer, skip=skip
    )
    plan = replan()
    worst = share(skip_worst) if skip_worst is not None else 0.0
    if worst and not calibration:
        raise CheckpointError(
            "--skip-worst needs calibration data to tell which layers those are: --calib FILE.jsonl"
        )
    task = prepare(plan, calibration) if calibration else None
    rows: list[dict[str, Any]] = []
    if not dry_run:
        others = _other_files(source)
        remove_stale(out)
        copied = sum((source / name).stat().st_size for name in others)
        kept = finished_bytes(out) if calibration and calibration.resume else 0
        require_space(out, plan.disk_bytes() + copied + (task.disk_bytes() - kept if task else 0))
        with _space_explained(out, plan, kept=task is not None), checkpoint.reader() as reader:
            with workers() as pool:
                _check_values(plan, reader, pool, progress)
            if task and calibration:
                state = {**task.state(), "skip_worst": worst}
                with open_work(out, state, calibration.resume) as work:
                    if worst:
                        plan = replan(worst=_worst(rank(task, reader, work, progress), plan, worst))
                        task = replace(task, layers=plan.patterns, skipped=frozenset(plan.skipped))
                    calibrate(task, reader, work, progress)
                    with work.tensors().reader() as codes:
                        facts = _write(plan, others, out, reader, codes, True, progress)
                    rows = layer_rows(facts, work.rows(), plan.method)
                    work.remove()
            else:
                facts = _write(plan, others, out, reader, None, check, progress)
                rows = layer_rows(facts, (), plan.method)
    return Report(
        source=source,
        out=out,
        pattern=pattern,
        quant=plan.quant,
        layout=layout,
        method=plan.method,
        patterns=plan.patterns,
        kept=plan.kept,
        skipped=plan.skipped,
        bytes_in=plan.bytes_in,
        bytes_out=plan.bytes_out,
        seconds=time.monotonic() - started,
        samples=task.samples.words if task else "",
        note=task.samples.note if task else "",
        layers=tuple(rows),
        made=not plan.converted,
    )


@contextmanager
def _space_explained(out: Path, plan: Plan, kept: bool) -> Iterator[None]:
    """A full disk becomes a SpaceError; ``kept``: finished layers stay for another run."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        left = "the layers pruned so far are kept" if kept else "nothing is left behind"
        raise SpaceError(
            f"no space left in {out.resolve().parent} while writing {plan.disk_bytes() / 1e6:.0f} MB; {left}. "
            f"Free some space{'' if kept else ' or choose another output folder'}, then run the same command again"
            f"{' with --resume' if kept else ''}"
        ) from error


def _write(
    plan: Plan,
    others: Sequence[Path],
    out: Path,
    reader: Reader,
    codes: Reader | None,
    check: bool,
    progress: Progress | None,
) -> list[Facts]:
    """Write the output and publish it; with ``check`` not before it has been read back."""
    source = plan.checkpoint.folder
    with workers() as pool, partial_folder(out) as folder:
        for name in others:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / name, folder / name)
        _write_tensors(plan, reader, codes, pool, folder, progress)
        for file, content in plan.small_files():
            (folder / file).write_bytes(content)
        facts = read_back(folder, plan.checkpoint) if check else []
        publish(folder, out)
    return facts


def _worst(errors: dict[str, float], plan: Plan, part: float) -> frozenset[str]:
    family = architectures.family_of(plan.checkpoint.config, plan.checkpoint.tensors)
    return worst_layers(errors, family.groups(plan.pruned), part)


def _other_files(source: Path) -> list[Path]:
    """What is copied: all but weights and hidden files; the folders that modules.json names, whole."""
    found = []
    modules = _module_folders(source)
    for path in sorted(source.rglob("*")):
        name = path.relative_to(source)
        if not path.is_file() or any(part.startswith(".") for part in name.parts):
            continue
        is_weight = path.name.endswith((*_WEIGHT_SUFFIXES, *(f"{s}.index.json" for s in _WEIGHT_SUFFIXES)))
        if (is_weight and name.parts[0] not in modules) or str(name) in (CONFIG, INDEX):
            continue
        found.append(name)
    return found


def _module_folders(source: Path) -> set[str]:
    """Folders of the further modules, such as 2_Dense, of a sentence-transformers model."""
    path = source / MODULES
    if not path.exists():
        return set()
    try:
        return {str(module["path"]) for module in json.loads(path.read_bytes()) if module["path"]}
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path} is not a list of modules with their paths ({type(error).__name__}: {error}); fetch it again"
        ) from error


def _each_chunk(
    parts: Sequence[Part], pool: ThreadPoolExecutor, work: Callable[[Part, slice], None]
) -> Iterator[int]:
    """Do ``work`` for every chunk; yield the source bytes done, in order, or raise the first error."""
    jobs = [(part, rows) for part in parts for rows in part.source.chunks()]

    def run(job: tuple[Part, slice]) -> int:
        part, rows = job
        work(part, rows)
        return int(rows.stop - rows.start) * part.source.row_bytes

    yield from pool.map(run, jobs)


def _check_values(plan: Plan, reader: Reader, pool: ThreadPoolExecutor, progress: Progress | None) -> None:
    done = 0
    for size in _each_chunk(plan.parts, pool, lambda part, rows: _check_chunk(plan, reader, part, rows)):
        done += size
        if progress:
            progress("checking", done, plan.bytes_in)


def _check_chunk(plan: Plan, reader: Reader, part: Part, rows: slice) -> None:
    """Refuse NaN and Inf, and in a source that we converted whatever breaks its pattern."""
    values = reader.rows(part.source.name, rows)
    if not is_finite(values):
        raise CheckpointError(_not_finite_message(reader, part))
    if plan.converted and part.layer:
        restore(values, plan.converted, part.layer, rows.start)


def is_finite(values: Tensor) -> bool:
    """Whether no element is NaN or Inf; one pass without temporaries for the usual dtypes."""
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
    plan: Plan,
    reader: Reader,
    codes: Reader | None,
    pool: ThreadPoolExecutor,
    folder: Path,
    progress: Progress | None,
) -> None:
    done = 0
    for file in plan.checkpoint.files:
        writer = Writer(folder / file, plan.specs(file))
        try:
            parts = [part for part in plan.parts if part.file == file]

            def work(part: Part, rows: slice, writer: Writer = writer) -> None:
                _write_chunk(plan, reader, codes, writer, part, rows)

            for size in _each_chunk(parts, pool, work):
                done += size
                if progress:
                    progress("writing", done, plan.bytes_in)
            writer.close()
        finally:
            writer.close(sync=False)


def _write_chunk(
    plan: Plan, reader: Reader, codes: Reader | None, writer: Writer, part: Part, rows: slice
) -> None:
    if part.layer is None:
        writer.write(part.source.name, rows.start, reader.rows(part.source.name, rows))
        return
    if codes and part.pattern:
        weight = codes.rows(part.layer + WEIGHT, rows)
        scale: Tensor | None = codes.rows(part.layer + SCALE, rows)
    else:
        weight, scale = _pack(plan, part, rows, reader.rows(part.source.name, rows))
    if part.pattern and plan.layout == "slided":
        weight = slide(weight, part.pattern, layer=part.layer)
    assert weight.dtype == DTYPES[part.out[0].dtype]
    writer.write(part.out[0].name, rows.start, weight)
    if scale is not None:
        writer.write(part.out[1].name, rows.start, scale)


def _pack(plan: Plan, part: Part, rows: slice, values: Tensor) -> tuple[Tensor, Tensor | None]:
    """The rows of a weight as they are written in the dense layout, with their scales if the source has none."""
    assert part.layer
    if plan.converted is not None:
        return restore(values, plan.converted, part.layer, rows.start), None
    if part.pattern:
        values = prune(values, part.pattern, plan.method, chunk_seed(plan.seed, part.source.name, rows.start))
    return quantize_rows(values, NAMES[plan.quant], "cuda") if plan.from_float else (values, None)
