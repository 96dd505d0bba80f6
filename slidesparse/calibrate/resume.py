"""The hidden folder next to the output that holds finished blocks, from which an interrupted run is resumed.

::

    .OUT.calibrated/
      state.json                     the options and inputs of the run; another run is refused
      rotation.safetensors           the rotation of the model, if it is rotated
      rotation.json                  the estimated losses without and with it
      smoothing.safetensors          the factors between the layers of an MLP, if it is smoothed
      choice.json                    with a budget: the limits tried, and the losses measured
      layer-00000.json               the report's rows of a transformer block
      layer-00000.safetensors        its codes and scales; renamed last, which marks the block as finished
      distilled.safetensors          with --distill: the best codes and scales so far, of all blocks
      distilling.safetensors         weights and optimizer state to continue from; written last
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from slidesparse.checkpoint.output import locked, sync
from slidesparse.checkpoint.storage import (
    NAMES,
    SUFFIX,
    Checkpoint,
    StoredTensor,
    TensorSpec,
    Writer,
    read_header,
)
from slidesparse.errors import CalibrationError, shown

STATE, CHOICE = "state.json", "choice.json"
ROTATION, GAIN, SMOOTHING = f"rotation{SUFFIX}", "rotation.json", f"smoothing{SUFFIX}"
DISTILLED, DISTILLING = f"distilled{SUFFIX}", f"distilling{SUFFIX}"


@dataclass(frozen=True)
class WorkFolder:
    """The folder of a run, which holds a lock on it."""

    folder: Path

    def has(self, number: int) -> bool:
        """Return whether a block is finished."""
        return (self.folder / _block_file(number)).exists()

    def save(self, number: int, tensors: Mapping[str, Tensor], rows: list[dict[str, Any]]) -> None:
        """Save a finished block atomically."""
        self.write_json(f"layer-{number:05}.json", rows)
        self.write_tensors(_block_file(number), tensors)

    def write_tensors(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Write a safetensors file atomically."""
        specs = [TensorSpec(name, NAMES[t.dtype], tuple(t.shape)) for name, t in tensors.items()]
        partial = self.folder / f".{name}"
        partial.unlink(missing_ok=True)
        with Writer(partial, specs) as writer:
            for tensor_name, tensor in tensors.items():
                writer.write(tensor_name, 0, tensor.cpu())
        os.rename(partial, self.folder / name)
        sync(self.folder)

    def write_json(self, name: str, value: object) -> None:
        """Write a small JSON file atomically."""
        partial = self.folder / f".{name}.{os.getpid()}"  # other processes may share the folder
        with partial.open("w") as file:
            json.dump(value, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        os.rename(partial, self.folder / name)

    def read_json(self, name: str) -> Any:
        """Return the value that `write_json` saved under a name, or None."""
        path = self.folder / name
        return json.loads(path.read_bytes()) if path.exists() else None

    def rows(self) -> list[dict[str, Any]]:
        """Return the report's rows of all finished blocks, in order."""
        stems = sorted(path.stem for path in self.folder.glob(f"layer-*{SUFFIX}"))
        return [row for name in stems for row in self.read_json(f"{name}.json")]

    def tensors(self, *overrides: str) -> Checkpoint:
        """Return all finished blocks as one checkpoint; tensors in the files ``overrides`` replace theirs."""
        blocks = sorted(path.name for path in self.folder.glob(f"layer-*{SUFFIX}"))
        return self.open_files(*blocks, *overrides)

    def read_tensors(self, name: str) -> dict[str, Tensor] | None:
        """Return the tensors that `write_tensors` saved under a name, or None."""
        if not (checkpoint := self.open_files(name)).files:
            return None
        with checkpoint.reader() as reader:
            return {tensor_name: reader.whole(tensor_name) for tensor_name in checkpoint.tensors}

    def open_files(self, *names: str) -> Checkpoint:
        """Return the files that exist as one checkpoint; tensors of later files override those of earlier ones."""
        files = tuple(name for name in names if (self.folder / name).exists())
        tensors: dict[str, StoredTensor] = {}
        for file in files:
            tensors |= {tensor.spec.name: tensor for tensor in read_header(self.folder / file)}
        return Checkpoint(self.folder, {}, None, files, tensors)

    def clear(self) -> None:
        """Remove finished blocks."""
        for path in sorted(self.folder.glob("layer-*")):
            path.unlink()

    def remove(self) -> None:
        """Remove the folder, once the output has been published."""
        shutil.rmtree(self.folder)


def work_folder(out: Path) -> Path:
    """Return the folder for finished blocks of a conversion to ``out``."""
    return out.resolve().parent / f".{out.resolve().name}.calibrated"


def finished_bytes(out: Path) -> int:
    """Return the bytes of finished blocks and of a distillation left by an interrupted conversion to ``out``."""
    return sum(
        path.stat().st_size
        for kind in ("layer-*", "distill*")
        for path in work_folder(out).glob(kind + SUFFIX)
    )


@contextmanager
def open_work(out: Path, state: Mapping[str, Any], resume: bool) -> Iterator[WorkFolder]:
    """Create and lock the folder.  It remains when the run fails, so that ``resume`` can continue from it.

    Raises CalibrationError when it holds finished work and ``resume`` is false, when it belongs to a run with other
    options (which the message names), and when another run holds the lock.
    """
    folder = work_folder(out)
    has_work = any(folder.glob(f"layer-*{SUFFIX}")) or any(
        (folder / n).exists() for n in (CHOICE, ROTATION, SMOOTHING)
    )
    if has_work and not resume:
        raise CalibrationError(
            f"{folder} holds the finished layers of an interrupted run; continue from them with --resume, or remove "
            "the folder to start over"
        )
    folder.mkdir(parents=True, exist_ok=True)
    busy = CalibrationError(f"another calibration is writing {out} (in {folder}); wait for it or stop it")
    try:
        with locked(folder, busy):
            work = WorkFolder(folder)
            if not has_work:
                (folder / STATE).unlink(missing_ok=True)
            _require_same(work, state)
            yield work
    except KeyboardInterrupt:
        raise KeyboardInterrupt("--resume continues from the finished layers") from None


def _require_same(work: WorkFolder, state: Mapping[str, Any]) -> None:
    saved = work.read_json(STATE)
    plain = json.loads(json.dumps(dict(state)))
    if saved is None:
        work.write_json(STATE, plain)
        return
    different = sorted(key for key in {*saved, *plain} if saved.get(key) != plain.get(key))
    if different:
        changes = "; ".join(
            f"{key} was {shown(saved.get(key))}, is {shown(plain.get(key))}" for key in different
        )
        raise CalibrationError(
            f"--resume: {work.folder} was started with other options ({changes}); repeat that command, or remove the "
            "folder to start over"
        )


def _block_file(number: int) -> str:
    return f"layer-{number:05}{SUFFIX}"
