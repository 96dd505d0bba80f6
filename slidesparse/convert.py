"""``slidesparse convert``: a float or W8A8 checkpoint becomes a pruned W8A8 one.

Two passes over the source, row chunk by row chunk on a few threads: the first reads everything and refuses
what is not finite, the second prunes, quantizes, slides and writes.  Memory is a few chunks, whatever the
size of the model. The output grows in a hidden sibling folder and appears under its name by one rename;
config.json is its last file.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from slidesparse.checkpoint import CONFIG, DTYPES, INDEX, SUFFIX, Checkpoint, CheckpointError, Reader, Writer
from slidesparse.pattern import SlidePattern
from slidesparse.plan import Part, Plan, make_plan
from slidesparse.prune import prune
from slidesparse.quantize import FP8, NAMES, quantize_rows
from slidesparse.slide import slide
from slidesparse.stored import restore

Progress = Callable[[str, int, int], None]  # phase, bytes done, bytes in all

MOST_WORKERS = 8
MODULES = "modules.json"  # of sentence-transformers
_WEIGHT_SUFFIXES = (
    *(SUFFIX, ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".onnx", ".onnx_data", ".h5", ".msgpack", ".ot"),
)


class SpaceError(RuntimeError):
    """Not enough room for the output."""


@dataclass(frozen=True)
class Report:
    """What a conversion did."""

    source: Path
    out: Path
    pattern: SlidePattern
    quant: str
    layout: str
    pruned: tuple[str, ...]
    kept: dict[str, str]  # 2-D weights left as they are -> why
    bytes_in: int
    bytes_out: int
    seconds: float

    @property
    def rate(self) -> float:
        """MB of source tensors a second, both passes together."""
        return self.bytes_in / 1e6 / max(self.seconds, 1e-9)


def convert(
    source: str | Path,
    out: str | Path,
    *,
    pattern: SlidePattern,
    quant: str | None = None,
    layout: str = "dense",
    method: str = "magnitude",
    ignore: Sequence[str] = (),
    linear: str | None = None,
    seed: int = 0,
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
        method: "magnitude" or "random" (by ``seed``).
        ignore: regexes of layers to leave exactly as they are, searched in names without ".weight".
        linear: regex of the layers to prune, instead of those of the architecture.
        progress: called with phase, bytes done and bytes in all.

    Same input, same bytes out.  Raises CheckpointError, ArchitectureError, MetadataError or PatternError
    before anything is written when the source or the options do not do, SpaceError when the output does not
    fit.
    """
    started = time.monotonic()
    source, out = Path(source), Path(out)
    _require_free_name(source, out)
    checkpoint = Checkpoint.open(source)
    plan = make_plan(checkpoint, pattern, quant, layout, method, ignore, linear, seed)
    others = _other_files(source)
    _remove_stale(out)
    _require_space(out, plan.disk_bytes() + sum((source / name).stat().st_size for name in others))
    with checkpoint.reader() as reader, _workers() as pool:
        _check_values(plan, reader, pool, progress)
        try:
            with _partial_folder(out) as partial:
                for name in others:
                    (partial / name).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(source / name, partial / name)
                _write_tensors(plan, reader, pool, partial, progress)
                for file, content in plan.small_files():
                    (partial / file).write_bytes(content)
                _publish(partial, out)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise SpaceError(
                    f"no space left in {out.resolve().parent} while writing {plan.disk_bytes() / 1e6:.0f} "
                    "MB; nothing is left behind. Free some space or choose another output folder, then run "
                    "the same command again"
                ) from error
            raise
    return Report(
        source=source,
        out=out,
        pattern=pattern,
        quant=plan.quant,
        layout=layout,
        pruned=tuple(plan.pruned),
        kept=plan.kept,
        bytes_in=plan.bytes_in,
        bytes_out=plan.bytes_out,
        seconds=time.monotonic() - started,
    )


def _require_free_name(source: Path, out: Path) -> None:
    if out.is_dir() and any(out.iterdir()):
        raise CheckpointError(f"output folder {out} is not empty; name a new one, or empty it first")
    if out.exists() and not out.is_dir():
        raise CheckpointError(f"output folder {out} is a file; name a new folder")
    above = _existing_parent(out)
    if not above.is_dir():
        raise CheckpointError(f"output folder {out} lies below {above}, which is a file; name another folder")
    if out.resolve().is_relative_to(source.resolve()):
        raise CheckpointError(f"output folder {out} lies inside the source {source}; name one elsewhere")


def _existing_parent(out: Path) -> Path:
    """The nearest thing above ``out`` that exists."""
    return next(path for path in out.resolve().parents if path.exists())


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


def _require_space(out: Path, needed: int) -> None:
    folder = _existing_parent(out)
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise SpaceError(
            f"no space left for {out}: it needs {needed / 1e6:.1f} MB, {folder} has {free / 1e6:.1f} MB "
            "free; free some space or choose another output folder"
        )


@contextmanager
def _workers() -> Iterator[ThreadPoolExecutor]:
    """A thread for each processor; torch's own threads would only wait for each other."""
    count = max(1, min(MOST_WORKERS, len(os.sched_getaffinity(0))))
    before = torch.get_num_threads()
    pool = ThreadPoolExecutor(
        count, thread_name_prefix="slidesparse", initializer=torch.set_num_threads, initargs=(1,)
    )
    try:
        with pool:
            yield pool
    finally:
        torch.set_num_threads(before)


def _partial_name(out: Path) -> str:
    return f".{out.resolve().name}.partial-"


def _remove_stale(out: Path) -> None:
    """Free the space of killed conversions to ``out``.  CheckpointError if one is still running."""
    parent = out.resolve().parent
    for stale in list(parent.iterdir()) if parent.exists() else ():
        if stale.name.startswith(_partial_name(out)):
            with _locked(stale, out):
                shutil.rmtree(stale)


@contextmanager
def _partial_folder(out: Path) -> Iterator[Path]:
    """A hidden sibling of ``out``, gone afterwards unless published.

    A lock on it, which the kernel drops with its process, tells a killed run from a running one.
    """
    partial = out.resolve().parent / f"{_partial_name(out)}{secrets.token_hex(4)}"
    partial.mkdir(parents=True)
    try:
        with _locked(partial, out):
            yield partial
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def _locked(partial: Path, out: Path) -> Iterator[None]:
    descriptor = os.open(partial, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise CheckpointError(
            f"another conversion is writing {out} (in {partial}); wait for it or stop it"
        ) from None
    finally:
        os.close(descriptor)


def _publish(partial: Path, out: Path) -> None:
    """Everything to the disk, then one rename."""
    for path in sorted(partial.rglob("*")):
        if not path.name.endswith(SUFFIX) or path.parent != partial:  # shards are synced as they are closed
            _sync(path)
    _sync(partial)
    try:
        os.rename(partial, out.resolve())
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            raise CheckpointError(
                f"output folder {out} was filled by somebody else meanwhile; name a new one"
            ) from error
        raise
    _sync(out.resolve().parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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
    plan: Plan, reader: Reader, pool: ThreadPoolExecutor, folder: Path, progress: Progress | None
) -> None:
    done = 0
    for file in plan.checkpoint.files:
        writer = Writer(folder / file, plan.specs(file))
        try:
            parts = [part for part in plan.parts if part.file == file]

            def work(part: Part, rows: slice, writer: Writer = writer) -> None:
                _write_chunk(plan, reader, writer, part, rows)

            for size in _each_chunk(parts, pool, work):
                done += size
                if progress:
                    progress("writing", done, plan.bytes_in)
            writer.close()
        finally:
            writer.close(sync=False)


def _write_chunk(plan: Plan, reader: Reader, writer: Writer, part: Part, rows: slice) -> None:
    values = reader.rows(part.source.name, rows)
    if part.layer is None:
        writer.write(part.source.name, rows.start, values)
        return
    weight, scale = _pack(plan, part, rows, values)
    writer.write(part.out[0].name, rows.start, weight)
    if scale is not None:
        writer.write(part.out[1].name, rows.start, scale)


def _pack(plan: Plan, part: Part, rows: slice, values: Tensor) -> tuple[Tensor, Tensor | None]:
    """The rows of a weight as they are written, with their scales if the source has none."""
    assert part.layer
    scale = None
    if plan.converted is not None:
        weight = restore(values, plan.converted, part.layer, rows.start)
    else:
        weight = prune(values, plan.pattern, plan.method, _seed(plan.seed, part.source.name, rows.start))
        if plan.from_float:
            weight, scale = quantize_rows(weight, NAMES[plan.quant], "cuda")
    if plan.layout == "slided":
        weight = slide(weight, plan.pattern, layer=part.layer)
    assert weight.dtype == DTYPES[part.out[0].dtype]
    return weight, scale


def _seed(seed: int, name: str, row: int) -> int:
    """The seed of a chunk: of its tensor and first row, so that no order of work changes it."""
    digest = hashlib.sha256(f"{seed}\0{name}\0{row}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
