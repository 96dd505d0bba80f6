"""Hidden states between layers, on the device, in memory, or in a file, by their size; and inputs within a layer."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from slidesparse.calibrate.forward import Block, fast_products

MEMORY_BYTES = 2 * 2**30  # what may stay in the host's memory
DEVICE_SHARE = 4  # of a GPU's free memory one part in so many
KEPT_SHARE = 2  # the same with what `Inputs` keep; factoring H and running a batch take the other half
KEPT_BYTES = 6 * 2**30  # what both may take of the host's memory,
KEPT_OF_HOST = 4  # of which they take one part in so many at most


class HiddenStates:
    """A list of float32 tensors, one a batch, each replaced in its place."""

    def __init__(
        self,
        shapes: Sequence[tuple[int, ...]],
        device: torch.device,
        folder: Path,
        limit: int | None = None,
        streams: int = 1,
    ) -> None:
        """Room for tensors of ``shapes``; spilled to an unnamed file in ``folder`` beyond ``limit`` bytes.

        ``streams``: how many such lists there will be, all with room in the same place.
        """
        self.shapes = [torch.Size(shape) for shape in shapes]
        self.device = device
        self.streams = streams
        self.nbytes = sum(shape.numel() for shape in self.shapes) * 4
        self.where = place(self.nbytes * streams, device, limit)
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


class Inputs:
    """What the stages of a block read, batch by batch; the stages are asked for in their order.

    A batch that is kept waits where its last stage was, in the device's memory, and goes on from there; else it is run
    from the block's start each time.  Both are the same arithmetic, as a stage's weights are replaced before the
    next is asked for.
    """

    def __init__(self, block: Block, states: HiddenStates, keep: bool) -> None:
        self.block, self.states, self.keep = block, states, keep
        self.advanced = False  # whether the states are the block's output
        # by batch: the stage that comes next, and the steps from there on
        self._running: dict[int, tuple[int, Iterator[Tensor]]] = {}

    def __len__(self) -> int:
        return len(self.states)

    def input(self, stage: int, batch: int) -> Tensor:
        """What the linear layers of a stage read, [batch, tokens, K]; behind the last stage, the block's output."""
        reached, steps = self._running.pop(batch, (0, None))
        if steps is None:
            steps = self.block.steps(self.states[batch])
        assert reached <= stage
        for _ in range(reached, stage):
            next(steps)
        found = next(steps)
        if self.keep and stage < len(self.block.stages):
            self._running[batch] = stage + 1, steps
        return found

    def restart(self) -> None:
        """Forget where batches wait: weights of stages behind which they are have changed."""
        self._running.clear()

    def advance(self) -> None:
        """Replace the hidden states by the block's output, once."""
        with fast_products(self.states.device):
            for batch in range(0 if self.advanced else len(self)):
                self.states[batch] = self.input(len(self.block.stages), batch)
        self.advanced = True


def may_keep(states: HiddenStates, in_features: int) -> bool:
    """Whether `Inputs` of at most ``in_features`` fit beside the hidden states where these are computed with.

    Asked before anything else lies there; a batch that waits holds what its stage reads and one more hidden state.
    """
    hidden = states.shapes[0][-1] if states.shapes else 1
    needed = (states.nbytes + states.nbytes // hidden * (hidden + in_features)) * states.streams
    home = "device" if states.device.type == "cuda" else "memory"
    host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = min(KEPT_BYTES, host // KEPT_OF_HOST)
    return states.where == home == place(needed, states.device, limit, KEPT_SHARE)


def place(nbytes: int, device: torch.device, limit: int | None = None, share: int = DEVICE_SHARE) -> str:
    """Where so many bytes of hidden states go: "device", "memory" or "disk"; see `HiddenStates`."""
    limit = MEMORY_BYTES if limit is None else limit
    if device.type == "cuda" and nbytes <= _free(device) // share:
        return "device"
    return "memory" if nbytes <= limit else "disk"


def _free(device: torch.device) -> int:
    """Bytes of a GPU that are free, those included that torch holds without using them."""
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused
