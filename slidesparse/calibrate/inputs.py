"""The activations of a model: hidden states between blocks, inputs of linear layers, and their `Hessian`.

The layers of a group share their inputs, and pruning needs only the sum of x x^T over these.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path

import torch
from torch import Tensor

from slidesparse.calibrate.model import Block, fast_products, reading
from slidesparse.errors import CalibrationError
from slidesparse.quantize import is_finite

DEVICE_PART = 4  # hidden states may take 1 / DEVICE_PART of a GPU's free memory, else they are in host memory
HOST_PART = 2  # of which they may take 1 / HOST_PART
# Memory limit of a container: control groups version 2 and 1
CONTAINER_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
BAND_COLUMNS = 2048  # columns of H that are computed at a time, right of the diagonal only


class HiddenStates:
    """A list of float32 tensors, one per batch, kept on the device or in host memory depending on size.

    Args:
        shapes: the shape of each tensor.
        streams: the number of such lists that must fit into the same place.

    Raises CalibrationError when host memory is too small.
    """

    def __init__(self, shapes: Sequence[tuple[int, ...]], device: torch.device, streams: int = 1) -> None:
        self.shapes = [torch.Size(shape) for shape in shapes]
        self.device = device
        nbytes = sum(shape.numel() for shape in self.shapes) * 4 * streams
        self._home = torch.device("cpu")
        if device.type == "cuda" and nbytes <= free_bytes(device) // DEVICE_PART:
            self._home = device
        elif nbytes > host_memory() // HOST_PART:
            raise CalibrationError(
                f"the hidden states of the samples take {nbytes / 1e9:.1f} GB, more than half of this machine's "
                f"{host_memory() / 1e9:.1f} GB; use fewer --samples or a smaller --seqlen"
            )
        self._tensors: dict[int, Tensor] = {}

    def __iter__(self) -> Iterator[Tensor]:
        return map(self.__getitem__, range(len(self.shapes)))

    def __getitem__(self, index: int) -> Tensor:
        return self._tensors[index].to(self.device)

    def __setitem__(self, index: int, value: Tensor) -> None:
        assert value.shape == self.shapes[index]
        self._tensors[index] = value.to(self._home)

    def samples(self, places: Iterable[tuple[int, int]]) -> Tensor:
        """Return a copy [samples, ...] of samples of equal shapes, by the index of a batch and of a sample in it."""
        return torch.stack([self._tensors[batch][sample] for batch, sample in places]).to(self.device)


def host_memory() -> int:
    """Return the bytes of host memory, or the container's limit if that is lower."""
    nbytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for limit in CONTAINER_LIMITS:
        with suppress(OSError, ValueError):  # absent, or "max"
            nbytes = min(nbytes, int(limit.read_text()))
    return nbytes


def free_bytes(device: torch.device) -> int:
    """Return the free bytes of a GPU, those included that torch has reserved but does not use, or `host_memory`."""
    if device.type != "cuda":
        return host_memory()
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused


class Stream:
    """A block of a model and the hidden states that enter it, batch by batch."""

    def __init__(self, block: Block, states: HiddenStates) -> None:
        self.block, self.states = block, states
        self.advanced = False  # whether the states are the block's output

    def advance(self, read: Callable[[str, Tensor], None] | None = None, layers: Iterable[str] = ()) -> None:
        """Replace the hidden states by the block's output; further calls do nothing.

        ``read`` is called with the name and the input [..., K] of each of these linear layers, batch by batch.
        """
        assert not (self.advanced and read)
        watched = reading(self.block.module, layers, read) if read else nullcontext()
        with fast_products(self.states.device), watched:
            for batch, x in enumerate(() if self.advanced else self.states):
                self.states[batch] = self.block.output(x)
        self.advanced = True


class Hessian:
    """H [K, K], the sum of x x^T over calibration tokens, which is half the Hessian of the squared output error."""

    def __init__(
        self, in_features: int, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
    ) -> None:
        self._sum = torch.zeros(in_features, in_features, dtype=dtype, device=device)
        starts = range(0, in_features, BAND_COLUMNS)
        self._bands = [slice(start, min(start + BAND_COLUMNS, in_features)) for start in starts]
        self._mirrored = True
        self.tokens = 0

    def add(self, x: Tensor) -> None:
        """Add the tokens ``x`` [..., K]."""
        rows = x.reshape(-1, x.shape[-1]).to(self._sum.dtype)
        for band in self._bands:
            self._sum[band, band.start :].addmm_(rows[:, band].t(), rows[:, band.start :])
        self._mirrored = False
        self.tokens += len(rows)

    def merge(self, other: Hessian) -> None:
        """Add the tokens of another."""
        self._sum += other.matrix
        self._mirrored, self.tokens = self._mirrored and other._mirrored, self.tokens + other.tokens

    def require_finite(self, of: str) -> None:
        """Raise CalibrationError when an input is NaN or infinite, or H overflows."""
        if not is_finite(self.matrix.diagonal()):
            raise CalibrationError(
                f"the inputs of {of} are not finite (NaN or Inf); the weights or the calibration samples are damaged, "
                "or the model overflows float32"
            )

    @property
    def matrix(self) -> Tensor:
        """H as a full symmetric matrix."""
        for band in () if self._mirrored else self._bands:
            self._sum[band.stop :, band] = self._sum[band, band.stop :].t()
        self._mirrored = True
        return self._sum


def gather_hessian(stream: Stream, layer: str) -> Hessian:
    """Compute H of the input of ``layer``.

    Raises CalibrationError when an input is NaN or infinite, or H overflows.
    """
    hessian: Hessian | None = None
    with fast_products(stream.states.device):
        for states in stream.states:
            x = stream.block.input(layer, states)
            hessian = hessian or Hessian(x.shape[-1], x.device)
            hessian.add(x)
    assert hessian is not None
    hessian.require_finite(stream.block.model.skeleton.layer(stream.block.number, layer))
    return hessian


def gather_hessians(stream: Stream, layers: Sequence[str]) -> dict[str, Hessian]:
    """Compute H of the inputs of ``layers``, which hold no pruned weights yet, while the stream advances.

    Raises CalibrationError as `gather_hessian` does.
    """
    hessians: dict[str, Hessian] = {}

    def add(layer: str, x: Tensor) -> None:
        hessians.setdefault(layer, Hessian(x.shape[-1], x.device)).add(x)

    stream.advance(add, layers)
    for layer, hessian in hessians.items():
        hessian.require_finite(stream.block.model.skeleton.layer(stream.block.number, layer))
    return hessians


def output_error(w: Tensor, other: Tensor, hessian: Tensor) -> float:
    """Return |X (w - other)^T| / |X w^T| in Frobenius norms, weights [N, K], X the tokens of ``hessian`` [K, K].

    The error is 0 if both outputs are zero, and infinite if only that of ``w`` is.
    """
    w, other = (x.to(hessian.dtype) / power_of_two(w) for x in (w, other))
    # trace(w H w^T); rounding may take it below 0, and NaN stays NaN in this order
    lost, total = (
        max(float(((x @ hessian) * x).sum(-1, dtype=torch.float64).sum()), 0.0) for x in (w - other, w)
    )
    if total == 0:
        return 0.0 if lost == 0 else float("inf")
    return float((lost / total) ** 0.5)


def power_of_two(x: Tensor) -> float:
    """Return about the largest of |x|: divided by it, x keeps its digits, and sums of its squares stay in range."""
    return 2.0 ** max(math.frexp(float(x.abs().amax()))[1] - 1, -126)
