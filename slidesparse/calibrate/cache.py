"""Hidden states between layers: on the device, in memory, or in a file, by their size."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

MEMORY_BYTES = 2 * 2**30  # what may stay in the host's memory
DEVICE_SHARE = 4  # of a GPU's free memory one part in so many


class HiddenStates:
    """A list of float32 tensors, one a batch, each replaced in its place."""

    def __init__(
        self, shapes: Sequence[tuple[int, ...]], device: torch.device, folder: Path, limit: int | None = None
    ) -> None:
        """Room for tensors of ``shapes``; spilled to an unnamed file in ``folder`` beyond ``limit`` bytes."""
        self.shapes = [torch.Size(shape) for shape in shapes]
        self.device = device
        self.nbytes = sum(shape.numel() for shape in self.shapes) * 4
        self.where = _place(self.nbytes, device, MEMORY_BYTES if limit is None else limit)
        self._tensors: list[Tensor | None] = [None] * len(self.shapes)
        self._file = tempfile.TemporaryFile(dir=folder) if self.where == "disk" else None  # noqa: SIM115

    def __len__(self) -> int:
        return len(self.shapes)

    def __getitem__(self, index: int) -> Tensor:
        found = self._tensors[index]
        if found is not None:
            return found.to(self.device)
        assert self._file is not None
        raw = torch.empty(self.shapes[index], dtype=torch.float32)
        view, done = memoryview(raw.numpy()).cast("B"), 0  # type: ignore[arg-type]
        while done < len(view):
            got = os.preadv(self._file.fileno(), [view[done:]], self._start(index) + done)
            if got == 0:
                raise OSError("hidden states spilled to disk became shorter")
            done += got
        return raw.to(self.device)

    def __setitem__(self, index: int, value: Tensor) -> None:
        assert value.shape == self.shapes[index]
        if self.where == "device":
            self._tensors[index] = value
        elif self.where == "memory":
            self._tensors[index] = value.cpu()
        else:
            assert self._file is not None
            view, done = memoryview(value.cpu().contiguous().numpy()).cast("B"), 0  # type: ignore[arg-type]
            while done < len(view):
                done += os.pwrite(self._file.fileno(), view[done:], self._start(index) + done)

    def _start(self, index: int) -> int:
        return 4 * sum(shape.numel() for shape in self.shapes[:index])

    def close(self) -> None:
        """Give memory or disk back."""
        self._tensors = [None] * len(self.shapes)
        if self._file is not None:
            self._file.close()


def _place(nbytes: int, device: torch.device, limit: int) -> str:
    if device.type == "cuda" and nbytes <= torch.cuda.mem_get_info(device)[0] // DEVICE_SHARE:
        return "device"
    return "memory" if nbytes <= limit else "disk"
