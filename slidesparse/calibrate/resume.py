"""The hidden folder next to the output that holds what a run has decided and finished, from which it is resumed.

::

    .OUT.calibrated/
      state.json                     the options and inputs of the run; another run is refused
      rotation.safetensors           the rotation of the model, if it is rotated, and the losses without and with it
      smoothing.safetensors          the factors between the layers of an MLP, if it is smoothed
      losses.json                    with a budget: the loss of each layer group at each pattern
      choice.json                    with a budget: the limits tried, and the losses measured
      layer-00000.json               the report's rows of a transformer block, with the patterns of its layers
      layer-00000.safetensors        its codes and scales; renamed last, which marks the block as finished
      distilled.safetensors          with --distill: the best codes, scales and vectors so far, of all blocks
      distilling.safetensors         weights and optimizer state to continue from; written last

It must be this user's own.  Damaged files are refused by name.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from slidesparse import files
from slidesparse.checkpoint.storage import (
    NAMES,
    SUFFIX,
    Checkpoint,
    CheckpointError,
    StoredTensor,
    TensorSpec,
    Writer,
    read_header,
)
from slidesparse.errors import CalibrationError, shown

T = TypeVar("T")
STATE, LOSSES, CHOICE = "state.json", "losses.json", "choice.json"
ROTATION, SMOOTHING = f"rotation{SUFFIX}", f"smoothing{SUFFIX}"
DISTILLED, DISTILLING = f"distilled{SUFFIX}", f"distilling{SUFFIX}"


@dataclass(frozen=True)
class WorkFolder:
    """The folder of a run, which holds a lock on it."""

    folder: Path

    def has(self, number: int, patterns: Mapping[str, str], shapes: Mapping[str, Sequence[int]]) -> bool:
        """Return whether a block is finished, with these patterns of its layers; refused without these ``shapes``."""
        finished = self.open_files(_block_file(number))
        rows = self.read_json(f"layer-{number:05}.json", _rows) or []
        if not finished.files or {row["name"]: row["pattern"] for row in rows} != dict(patterns):
            return False
        self.require(finished, shapes)
        return True

    def save(self, number: int, tensors: Mapping[str, Tensor], rows: list[dict[str, Any]]) -> None:
        """Save a finished block atomically."""
        (self.folder / _block_file(number)).unlink(missing_ok=True)  # of other patterns
        self.write_json(f"layer-{number:05}.json", rows)
        self.write_tensors(_block_file(number), tensors)

    def write_tensors(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Write a safetensors file atomically."""
        specs = [TensorSpec(name, NAMES[t.dtype], tuple(t.shape)) for name, t in tensors.items()]
        self.write_each(name, specs, tensors.items())

    def write_each(
        self, name: str, specs: Sequence[TensorSpec], tensors: Iterable[tuple[str, Tensor]]
    ) -> None:
        """Write a safetensors file of the tensors ``specs`` atomically, one after the other."""
        partial = self.folder / f".{name}"
        partial.unlink(missing_ok=True)
        with Writer(partial, specs) as writer:
            for tensor_name, tensor in tensors:
                writer.write(tensor_name, 0, tensor.cpu())
        os.rename(partial, self.folder / name)
        files.sync(self.folder)

    def write_json(self, name: str, value: object) -> None:
        """Write a small JSON file atomically."""
        files.write_json(self.folder / name, value)

    def read_json(self, name: str, parse: Callable[[Any], T]) -> T | None:
        """Return what ``parse`` makes of a file of `write_json`, or None if there is none."""
        try:
            return files.read_json(self.folder / name, parse)
        except files.DamagedFile as error:
            raise self.damaged(error) from error

    def rows(self) -> list[dict[str, Any]]:
        """Return the report's rows of all finished blocks, in order."""
        stems = sorted(path.stem for path in self.folder.glob(f"layer-*{SUFFIX}"))
        return [row for name in stems for row in self.read_json(f"{name}.json", _rows) or []]

    def tensors(self, *overrides: str) -> Checkpoint:
        """Return all finished blocks as one checkpoint; tensors in the files ``overrides`` replace theirs."""
        blocks = sorted(path.name for path in self.folder.glob(f"layer-*{SUFFIX}"))
        return self.open_files(*blocks, *overrides)

    def read_tensors(self, name: str, shapes: Mapping[str, Sequence[int]]) -> dict[str, Tensor] | None:
        """Return the tensors that `write_tensors` saved under a name, or None; refused without these ``shapes``."""
        if not (checkpoint := self.open_files(name)).files:
            return None
        self.require(checkpoint, shapes)
        with checkpoint.reader() as reader:
            return {tensor_name: reader.whole(tensor_name) for tensor_name in checkpoint.tensors}

    def open_files(self, *names: str) -> Checkpoint:
        """Return the files that exist as one checkpoint; tensors of later files override those of earlier ones."""
        found = tuple(name for name in names if (self.folder / name).exists())
        tensors: dict[str, StoredTensor] = {}
        for file in found:
            path = self.folder / file
            if path.is_symlink() or not path.is_file() or path.stat().st_uid != os.geteuid():
                raise self.damaged(f"{path} is not a file of this user")
            try:
                tensors |= {tensor.spec.name: tensor for tensor in read_header(path)}
            except CheckpointError as error:
                raise self.damaged(error) from error
        return Checkpoint(self.folder, {}, None, found, tensors)

    def require(self, checkpoint: Checkpoint, shapes: Mapping[str, Sequence[int]]) -> None:
        """Raise CalibrationError unless a checkpoint of `open_files` has tensors of these shapes."""
        for name, shape in shapes.items():
            stored = checkpoint.tensors.get(name)
            if stored is None or stored.spec.shape != tuple(shape):
                found = "is missing" if stored is None else f"has shape {list(stored.spec.shape)}"
                raise self.damaged(f"tensor {name} {found} in {', '.join(checkpoint.files)}")

    def clear(self) -> None:
        """Remove finished blocks."""
        for path in sorted(self.folder.glob("layer-*")):
            path.unlink()

    def remove(self) -> None:
        """Remove the folder, once the output has been published."""
        shutil.rmtree(self.folder)

    def damaged(self, problem: object) -> CalibrationError:
        """Return the error for a file that does not hold what was written there."""
        return CalibrationError(f"{problem}; remove {self.folder} to start over")


def work_folder(out: Path) -> Path:
    """Return the folder for finished blocks of a conversion to ``out``."""
    return out.resolve().parent / f".{out.resolve().name}.calibrated"


def finished_bytes(out: Path) -> int:
    """Return the bytes of finished blocks and of a distillation left by an interrupted conversion to ``out``."""
    return sum(
        path.lstat().st_size
        for kind in ("layer-*", "distill*")
        for path in work_folder(out).glob(kind + SUFFIX)
    )


@contextmanager
def open_work(out: Path, state: Mapping[str, Any], resume: bool) -> Iterator[WorkFolder]:
    """Create and lock the folder.  It remains when the run fails, so that ``resume`` can continue from it.

    Raises CalibrationError when it holds finished work and ``resume`` is false, when it belongs to a run with other
    options (which the message names), and when another run holds the lock; EnvironmentFault for another user's folder.
    """
    folder = files.own_folder(work_folder(out))
    busy = CalibrationError(f"another calibration is writing {out} (in {folder}); wait for it or stop it")
    try:
        with files.locked(folder, busy):
            work = WorkFolder(folder)
            if not require_resumable(out, state, resume):
                for name in (STATE, LOSSES):
                    (folder / name).unlink(missing_ok=True)
                work.write_json(STATE, dict(state))
            yield work
    except KeyboardInterrupt:
        raise KeyboardInterrupt("--resume continues from the finished layers") from None


def require_resumable(out: Path, state: Mapping[str, Any], resume: bool) -> bool:
    """Return whether an interrupted run left work; see `open_work` for what is refused.

    Args:
        state: some of the values that the run must have in common.
    """
    folder = work_folder(out)
    if not folder.is_symlink() and not folder.exists():
        return False
    files.own_folder(folder)
    kept = [CHOICE, ROTATION, SMOOTHING] + [LOSSES] * resume  # losses are in the user's cache, too
    if not any(folder.glob(f"layer-*{SUFFIX}")) and not any((folder / name).exists() for name in kept):
        return False
    if not resume:
        raise CalibrationError(
            f"{folder} holds the finished layers of an interrupted run; continue from them with --resume, or remove "
            "the folder to start over"
        )
    saved = WorkFolder(folder).read_json(STATE, dict)
    plain = json.loads(json.dumps(dict(state)))
    if saved is None:
        raise CalibrationError(f"{folder} does not say what run it belongs to; remove it to start over")
    different = sorted(key for key in plain if saved.get(key) != plain[key])
    if different:
        changes = "; ".join(
            f"{key} was {shown(saved.get(key))}, is {shown(plain.get(key))}" for key in different
        )
        raise CalibrationError(
            f"--resume: {folder} was started with other options ({changes}); repeat that command, or remove the "
            "folder to start over"
        )
    return True


def finite(value: Any) -> float:
    """Return a number.  Raises ValueError for anything else."""
    if type(value) not in (int, float) or not math.isfinite(value):
        raise ValueError(f"{shown(value)} is not a number")
    return float(value)


def _rows(value: Any) -> list[dict[str, Any]]:
    """Check rows of the report."""
    for row in value:
        if not all(isinstance(row[key], str) for key in ("name", "pattern", "method")):
            raise ValueError(f"{shown(row)} is not a row of the report")
        for key in {"error_pruned", "error_quantized", *(key for key in row if "error" in key)}:
            finite(row[key])
    return list(value)


def _block_file(number: int) -> str:
    return f"layer-{number:05}{SUFFIX}"
