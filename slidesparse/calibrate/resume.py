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

It must be this user's own.  All files hold a checksum, and damaged ones are refused by name.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slidesparse import files
from slidesparse.checkpoint.names import SCALE, WEIGHT
from slidesparse.checkpoint.storage import (
    NAMES,
    SUFFIX,
    Checkpoint,
    CheckpointError,
    Reader,
    StoredTensor,
    TensorSpec,
    Writer,
    read_header,
)
from slidesparse.errors import CalibrationError, shown
from slidesparse.quantize import dequantize_rows

STATE, LOSSES, CHOICE = "state.json", "losses.json", "choice.json"
ROTATION, SMOOTHING = f"rotation{SUFFIX}", f"smoothing{SUFFIX}"
DISTILLED, DISTILLING = f"distilled{SUFFIX}", f"distilling{SUFFIX}"
SUM, SUM_BYTES = "sha256", 32  # the last tensor of each file, of the file's name and all bytes before
PIECE = 2**20  # bytes of a file that are read at a time
ELSEWHERE = "name another output folder"
DIGEST = "sha256:"  # begins the values of a state that nobody can read


@dataclass(frozen=True)
class WorkFolder:
    """The folder of a run, which holds a lock on it."""

    folder: Path
    _whole: dict[str, int] = field(default_factory=dict)  # files whose checksum is right -> time of change

    def has(self, number: int, patterns: Mapping[str, str]) -> bool:
        """Return whether a block is finished, with these patterns of its layers."""
        rows = self.read_json(f"layer-{number:05}.json") or []
        finished = self.open_files(_block_file(number))
        return bool(finished.files) and {row["name"]: row["pattern"] for row in rows} == dict(patterns)

    def save(self, number: int, tensors: Mapping[str, Tensor], rows: list[dict[str, Any]]) -> None:
        """Save a finished block atomically."""
        (self.folder / _block_file(number)).unlink(missing_ok=True)  # of other patterns
        self.write_json(f"layer-{number:05}.json", rows)
        self.write_tensors(_block_file(number), tensors)

    def write_tensors(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Write a safetensors file with a checksum, atomically."""
        specs = [TensorSpec(name, NAMES[t.dtype], tuple(t.shape)) for name, t in tensors.items()]
        self.write_each(name, specs, tensors.items())

    def write_each(
        self, name: str, specs: Sequence[TensorSpec], tensors: Iterable[tuple[str, Tensor]]
    ) -> None:
        """Write a safetensors file of the tensors ``specs``, one after the other, with a checksum, atomically."""
        partial = self.folder / f".{name}"
        partial.unlink(missing_ok=True)
        with Writer(partial, [*specs, TensorSpec(SUM, "U8", (SUM_BYTES,))]) as writer:
            for tensor_name, tensor in tensors:
                writer.write(tensor_name, 0, tensor.cpu())
            writer.write(SUM, 0, torch.tensor(list(_sums(partial, name)[0]), dtype=torch.uint8))
        os.rename(partial, self.folder / name)
        files.sync(self.folder)
        self._whole[name] = (self.folder / name).stat().st_mtime_ns

    def write_json(self, name: str, value: object) -> None:
        """Write a small JSON file atomically."""
        files.write_json(self.folder / name, value)

    def read_json(self, name: str) -> Any:
        """Return the value that `write_json` wrote, or None if there is no file."""
        try:
            return files.read_json(self.folder / name)
        except files.DamagedFile as error:
            raise self.damaged(error) from error

    def rows(self) -> list[dict[str, Any]]:
        """Return the report's rows of all finished blocks, in order."""
        stems = sorted(path.stem for path in self.folder.glob(f"layer-*{SUFFIX}"))
        return [row for name in stems for row in self.read_json(f"{name}.json") or []]

    def tensors(self, *overrides: str) -> Checkpoint:
        """Return all finished blocks as one checkpoint; tensors in the files ``overrides`` replace theirs."""
        blocks = sorted(path.name for path in self.folder.glob(f"layer-*{SUFFIX}"))
        return self.open_files(*blocks, *overrides)

    def keep_tensors(self, name: str, find: Callable[[], Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Return the tensors that were saved under a name, or else ``find`` and save them."""
        if not self.open_files(name).files:
            self.write_tensors(name, find())
        checkpoint = self.open_files(name)
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
                stored = {tensor.spec.name: tensor for tensor in read_header(path)}
            except CheckpointError as error:
                raise self.damaged(error) from error
            changed = path.stat().st_mtime_ns
            if self._whole.get(file) != changed:
                computed, written = _sums(path, file)
                if computed != written:
                    raise self.damaged(f"{path} does not hold what was written there")
            self._whole[file] = changed
            tensors |= {name: tensor for name, tensor in stored.items() if name != SUM}
        return Checkpoint(self.folder, {}, None, found, tensors)

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


def served_weight(finished: Reader, layer: str, device: torch.device) -> Tensor:
    """Return the weight [N, K] of a finished layer, its codes times their scales."""
    codes, scale = (finished.whole(layer + suffix).to(device) for suffix in (WEIGHT, SCALE))
    return dequantize_rows(codes, scale)


def work_folder(out: Path) -> Path:
    """Return the folder for finished blocks of a conversion to ``out``."""
    return out.resolve().parent / f".{out.resolve().name}.calibrated"


@contextmanager
def open_work(out: Path, state: Mapping[str, Any], resume: bool) -> Iterator[WorkFolder]:
    """Create and lock the folder.  It remains when the run fails, so that ``resume`` can continue from it.

    Raises CalibrationError when it holds finished work and ``resume`` is false, when it belongs to a run with other
    options (which the message names), and when another run holds the lock; EnvironmentFault for another user's folder.
    """
    folder = files.own_folder(work_folder(out), ELSEWHERE)
    try:
        with files.locked(folder, _busy(out)):
            work = WorkFolder(folder)
            if not _is_resumable(folder, state, resume):
                for name in (STATE, LOSSES):
                    (folder / name).unlink(missing_ok=True)
                work.write_json(STATE, dict(state))
            yield work
    except KeyboardInterrupt:
        raise KeyboardInterrupt("--resume continues from the finished layers") from None


def require_resumable(out: Path, state: Mapping[str, Any], resume: bool) -> None:
    """Raise the errors of `open_work`, without creating the folder.

    Args:
        state: some of the values that the run must have in common.
    """
    folder = work_folder(out)
    if folder.is_symlink() or folder.exists():
        files.own_folder(folder, ELSEWHERE)
        with files.locked(folder, _busy(out)):
            _is_resumable(folder, state, resume)


def leftover(out: Path) -> str:
    """Return a note on the work of an interrupted run, for one without calibration; "" if there is none to keep.

    Raises CalibrationError if a calibration is writing ``out`` at this moment.
    """
    folder = work_folder(out)
    if folder.is_symlink() or not folder.is_dir():
        return ""
    with files.locked(folder, _busy(out)) as held:
        if held and not _holds_work(folder):
            shutil.rmtree(folder, ignore_errors=True)
            return ""
    return (
        f"{folder} holds the finished layers of an interrupted run with --calib, which this one does not use; remove "
        f"it, or move {out} away and continue that run with --resume"
    )


def left_beside(out: Path) -> str:
    """Return a note on the work that an earlier run left beside ``out``; "" if there is none, or a run still uses it.

    A run that was ended after its output was published could not remove it.
    """
    try:
        folder = work_folder(out)
        if folder.is_symlink() or not folder.is_dir() or not _holds_work(folder):
            return ""
        with files.locked(folder, _busy(out)):
            published = out.is_dir() and any(out.iterdir())
    except (CalibrationError, OSError, RuntimeError):  # used, or another user's; no name of a folder
        return ""
    if published:
        return f"{folder} holds the work of an interrupted run; if {out} is its output, remove that folder"
    return (
        f"{folder} holds the finished layers of an interrupted run; --resume continues from them, and to start over, "
        "remove the folder"
    )


def _busy(out: Path) -> CalibrationError:
    return CalibrationError(
        f"another calibration is writing {out} (in {work_folder(out)}); wait for it or stop it"
    )


def _is_resumable(folder: Path, state: Mapping[str, Any], resume: bool) -> bool:
    """Return whether a locked folder holds work to continue from."""
    if not _holds_work(folder) and not (resume and (folder / LOSSES).exists()):
        return False
    if not resume:
        raise CalibrationError(
            f"{folder} holds the finished layers of an interrupted run; continue from them with --resume, or remove "
            "the folder to start over"
        )
    saved = WorkFolder(folder).read_json(STATE)
    plain = json.loads(json.dumps(dict(state)))
    if saved is None:
        raise CalibrationError(f"{folder} does not say what run it belongs to; remove it to start over")
    different = sorted(key for key in plain if saved.get(key) != plain[key])
    if different:
        changes = "; ".join(
            f"{key} changed"
            if str(plain[key]).startswith(DIGEST)
            else f"{key} was {shown(saved.get(key))}, is {shown(plain[key])}"
            for key in different
        )
        raise CalibrationError(
            f"--resume: {folder} was started with other inputs ({changes}); repeat that command with them, or remove "
            "the folder to start over"
        )
    return True


def _holds_work(folder: Path) -> bool:
    """Return whether a folder holds more than losses, which are in the user's cache, too."""
    kept = [folder / name for name in (CHOICE, ROTATION, SMOOTHING)]
    return any(path.exists() for path in (*kept, *folder.glob(f"layer-*{SUFFIX}")))


def _sums(path: Path, name: str) -> tuple[bytes, bytes]:
    """Return the checksum of a file's ``name`` and all its bytes but the last SUM_BYTES; and these, which hold it."""
    digest, size = hashlib.sha256(name.encode()), path.stat().st_size - SUM_BYTES
    with path.open("rb") as file:
        for start in range(0, size, PIECE):
            digest.update(file.read(min(PIECE, size - start)))
        return digest.digest(), file.read()


def _block_file(number: int) -> str:
    return f"layer-{number:05}{SUFFIX}"
