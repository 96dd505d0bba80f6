"""The options of calibration, and the task that combines them with model and data."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

import slidesparse
from slidesparse.calibrate.model import Model
from slidesparse.calibrate.samples import SAMPLES, Samples, load_samples
from slidesparse.checkpoint.bitnet import is_bitnet
from slidesparse.checkpoint.names import SCALE, WEIGHT
from slidesparse.checkpoint.storage import Checkpoint
from slidesparse.errors import CalibrationError, EnvironmentFault
from slidesparse.pattern import Pattern

Progress = Callable[..., None]  # of the phase, bytes done, bytes in all, and possibly a text on how it goes


def no_progress(phase: str, done: int, total: int, detail: str = "") -> None:
    """Ignore progress."""


DEVICES = ("auto", "cpu", "cuda")
ROTATIONS = ("auto", "on", "off")  # where possible, always (an error where impossible), or never
MINUTES = 10.0
MAX_VALIDATION_SAMPLES = 64  # most validation samples of a distillation


@dataclass(frozen=True)
class Calibration:
    """Calibration data and how to use them.  Raises CalibrationError for a value that is not allowed."""

    data: tuple[str, ...]  # this and the next two: see `slidesparse.calibrate.samples.load_samples`
    samples: int = SAMPLES
    seqlen: int | None = None
    device: str = "auto"  # CUDA if available
    resume: bool = False  # continue from the finished layers of an interrupted run
    rotate: str = ROTATIONS[0]  # whether to rotate, permute and scale weights first
    distill: tuple[str, ...] = ()  # text, in the form of ``data``, for distillation from the dense model
    minutes: float | None = None  # duration of distillation; None: MINUTES
    epochs: int = 4  # of fine-tuning each block after it was pruned

    def __post_init__(self) -> None:
        if self.rotate not in ROTATIONS:
            raise CalibrationError(
                f"--rotate {self.rotate!r} is not known; use one of {', '.join(ROTATIONS)}"
            )
        if self.minutes is not None and not self.distill:
            raise CalibrationError(
                f"--minutes {self.minutes:g} is the duration of distillation: add --distill FILE, or leave --minutes "
                "out"
            )
        if not 0 < self.training_minutes < math.inf:
            raise CalibrationError(
                f"--minutes {self.minutes} must be more than 0; the default is {MINUTES:g}"
            )
        if self.device not in DEVICES:
            raise CalibrationError(f"--device {self.device!r} is not known; use one of {', '.join(DEVICES)}")

    @property
    def torch_device(self) -> torch.device:
        """The device to calibrate on.  Raises EnvironmentFault for a GPU that is missing."""
        if self.device == "cuda" and not torch.cuda.is_available():
            raise EnvironmentFault(
                f"--device cuda: this torch ({torch.__version__}) finds no GPU; use --device cpu"
            )
        name = ("cuda" if torch.cuda.is_available() else "cpu") if self.device == "auto" else self.device
        return torch.device(name)

    @property
    def training_minutes(self) -> float:
        """The minutes of distillation."""
        return MINUTES if self.minutes is None else self.minutes


@dataclass(frozen=True)
class Task:
    """All inputs of a calibrated run that determine its result."""

    model: Model
    layers: Mapping[str, Pattern]  # linear layers to prune -> pattern
    skipped: frozenset[str]  # linear layers to quantize without pruning
    samples: Samples
    quant: str
    calibration: Calibration
    held_back: Samples | None = None  # validation split, with a budget
    texts: tuple[Samples, Samples] | None = None  # training and validation split of distillation

    @property
    def device(self) -> torch.device:
        """The device that the model runs on."""
        return self.model.device

    @property
    def ternary(self) -> bool:
        """Whether all weights are -1, 0 or 1 times a scale, and must remain so."""
        return is_bitnet(self.model.checkpoint.config)

    @property
    def permutes(self) -> bool:
        """Whether channels may be permuted (see `slidesparse.calibrate.permutation`)."""
        return self.calibration.rotate != "off" and not self.ternary

    @property
    def smooths(self) -> bool:
        """Whether channels between the layers of an MLP may be scaled (see `slidesparse.calibrate.smoothing`)."""
        return self.calibration.rotate != "off" and self.quant == "int8" and not self.ternary

    @property
    def epochs(self) -> int:
        """The epochs of fine-tuning: 0 for ternary weights."""
        return 0 if self.ternary else self.calibration.epochs

    def patterns(self, number: int) -> dict[str, str]:
        """Return the patterns of the layers of a block that are pruned, by name."""
        names = (name for name in self.model.linears(number) if name in self.layers)
        return {name: self.layers[name].ratio for name in names}

    def shapes(self, number: int) -> dict[str, tuple[int, int]]:
        """Return the shapes of the codes and scales of a block's pruned layers, by the names of tensors."""
        specs = {name: self.model.checkpoint.require(name + WEIGHT) for name in self.patterns(number)}
        codes = {name + WEIGHT: (spec.rows, spec.columns) for name, spec in specs.items()}
        return codes | {name + SCALE: (spec.rows, 1) for name, spec in specs.items()}

    def disk_bytes(self) -> int:
        """Return the bytes of finished layers."""
        specs = [self.model.checkpoint.require(name + WEIGHT) for name in self.layers]
        return sum(spec.rows * (spec.columns + 4) for spec in specs)

    def state(self) -> dict[str, Any]:
        """Return the values that must be equal for a run to resume another."""
        return {
            "slidesparse": slidesparse.__version__,
            "source": _fingerprint(self.model.checkpoint),
            "layers": {name: pattern.ratio for name, pattern in sorted(self.layers.items())},
            "skipped": sorted(self.skipped),
            "samples": self.samples.digest,
            "smooths": self.smooths,
            "distill": [text.digest for text in self.texts] if self.texts else None,
            "quant": self.quant,
            "torch": torch.__version__,
            "device": torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu",
            "threads (OMP_NUM_THREADS)": torch.get_num_threads() if self.device.type == "cpu" else 0,
        }


def prepare(
    model: Model,
    layers: Mapping[str, Pattern],
    skipped: Collection[str],
    quant: str,
    calibration: Calibration,
    hold_back: bool = False,
) -> Task:
    """Read the data and return the task; nothing is written.

    Args:
        hold_back: whether to split off validation samples.

    Raises CalibrationError for a model that cannot be run or does not run one of the ``layers``, and the errors of
    `slidesparse.calibrate.samples.load_samples`.
    """
    linears = {name for number in range(model.blocks) for name in model.linears(number)}
    for name in layers:
        if name not in linears:
            raise CalibrationError(
                f"{name} is not run when the model reads text; leave it out with --layer '{name}=dense', or prune "
                "without --calib"
            )
    if calibration.distill and is_bitnet(model.checkpoint.config):
        raise CalibrationError(
            "--distill trains weights, but those of BitNet must stay -1, 0 and 1; leave it out"
        )
    if calibration.distill and model.other_use:
        raise CalibrationError(
            f"--distill is for models that predict tokens, but {model.other_use}; leave it out"
        )
    samples = load_samples(calibration.data, model, calibration.samples, calibration.seqlen)
    samples, held_back = samples.split() if hold_back else (samples, None)
    texts = None
    if calibration.distill:
        text_samples = load_samples(calibration.distill, model, None, calibration.seqlen, "--distill")
        texts = text_samples.split(MAX_VALIDATION_SAMPLES)
    return Task(model, layers, frozenset(skipped), samples, quant, calibration, held_back, texts)


def _fingerprint(checkpoint: Checkpoint) -> str:
    """Hash a source's tensor names and shapes, its config, and file sizes and times, but not the weights themselves."""
    sha256 = hashlib.sha256(repr(sorted(checkpoint.tensors.values())).encode())
    for file in checkpoint.files:
        status = (checkpoint.folder / file).stat()
        sha256.update(f"{file} {status.st_size} {status.st_mtime_ns}".encode())
    sha256.update((checkpoint.folder / "config.json").read_bytes())
    return sha256.hexdigest()
