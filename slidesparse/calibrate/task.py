"""The options of calibration, and the task that combines them with model and data."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

import slidesparse
from slidesparse import methods
from slidesparse.calibrate.inputs import choose_storage
from slidesparse.calibrate.models import LayeredModel, open_model
from slidesparse.calibrate.samples import SAMPLES, Samples, load_samples
from slidesparse.checkpoint.architectures import CAUSAL, MULTIMODAL, WEIGHT
from slidesparse.checkpoint.bitnet import is_bitnet
from slidesparse.checkpoint.storage import Checkpoint
from slidesparse.errors import CalibrationError, EnvironmentFault
from slidesparse.methods.method import Method
from slidesparse.pattern import Pattern

Progress = Callable[[str, int, int], None]  # phase, bytes done, bytes in all


def no_progress(phase: str, done: int, total: int) -> None:
    """Ignore progress."""


DEVICES = ("auto", "cpu", "cuda")
# A layer's target output: that in the dense model, or its own on the pruned model's inputs
TARGETS = ("dense", "own")
# Rotate the residual stream: where possible, always (an error where impossible), or never
ROTATIONS = ("auto", "on", "off")
SWEEPS = 4
EPOCHS = 4
MINUTES = 10.0
MAX_VALIDATION_SAMPLES = 64  # most validation samples of a distillation


@dataclass(frozen=True)
class Calibration:
    """Calibration data and how to use them.  Raises CalibrationError for a value that is not allowed.

    ``sweeps``, ``target`` and ``finetune`` only affect methods that update the remaining weights.
    """

    data: str  # this and the next two: see `slidesparse.calibrate.samples.load_samples`
    samples: int = SAMPLES
    seqlen: int | None = None
    device: str = "auto"  # CUDA if available
    resume: bool = False  # continue from the finished layers of an interrupted run
    sweeps: int = SWEEPS  # refinement passes over each layer after pruning
    target: str = TARGETS[0]
    finetune: int | None = None  # epochs of fine-tuning; None: EPOCHS if the target is the dense model
    rotate: str = ROTATIONS[0]  # whether to rotate the residual stream first
    distill: str | None = None  # text, in the form of ``data``, for distillation from the dense model
    minutes: float | None = None  # duration of distillation; None: MINUTES

    def __post_init__(self) -> None:
        if self.sweeps < 0:
            raise CalibrationError(
                f"--sweeps {self.sweeps} is negative; 0 is plain SparseGPT, the default is {SWEEPS}"
            )
        if self.target not in TARGETS:
            raise CalibrationError(
                f"--target {self.target!r} is not known; use dense, to fit each layer's output in the dense model, or "
                "own, to fit its own output before pruning"
            )
        if self.epochs < 0:
            raise CalibrationError(
                f"--finetune {self.epochs} is negative; 0 turns fine-tuning off, the default is {EPOCHS}"
            )
        if self.epochs and self.target != "dense":
            raise CalibrationError(
                f"--finetune {self.epochs} trains towards the outputs of the dense model, which --target {self.target} "
                "does not run; leave one of the two out"
            )
        if self.rotate not in ROTATIONS:
            raise CalibrationError(
                f"--rotate {self.rotate!r} is not known; use one of {', '.join(ROTATIONS)}"
            )
        if self.minutes is not None and self.distill is None:
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
    def training_minutes(self) -> float:
        """The minutes of distillation."""
        return MINUTES if self.minutes is None else self.minutes

    @property
    def epochs(self) -> int:
        """The epochs of fine-tuning."""
        if self.finetune is not None:
            return self.finetune
        return EPOCHS if self.target == "dense" else 0


@dataclass(frozen=True)
class Task:
    """All inputs of a calibrated run that determine its result."""

    model: LayeredModel
    layers: Mapping[str, Pattern]  # linear layers to prune -> pattern
    skipped: frozenset[str]  # linear layers to quantize without pruning
    samples: Samples
    method: str
    quant: str
    device: torch.device
    calibration: Calibration
    held_back: Samples | None = None  # validation split, with a budget
    texts: tuple[Samples, Samples] | None = None  # training and validation split of distillation

    @property
    def pruner(self) -> Method:
        """The pruning method."""
        return methods.get(self.method)

    @property
    def ternary(self) -> bool:
        """Whether all weights are -1, 0 or 1 times a scale, and must remain so."""
        return is_bitnet(self.model.checkpoint.config)

    @property
    def permutes(self) -> bool:
        """Whether channels may be permuted (see `slidesparse.calibrate.permutation`)."""
        return self.calibration.rotate != "off" and self.pruner.updates_weights and not self.ternary

    @property
    def smooths(self) -> bool:
        """Whether channels between the layers of an MLP may be scaled (see `slidesparse.calibrate.smoothing`)."""
        gated = self.model.is_decoder and not self.model.sizes[0].decoder.sub_norms[1]
        return self.calibration.rotate != "off" and self.quant == "int8" and gated

    @property
    def epochs(self) -> int:
        """The epochs of fine-tuning: 0 without the dense model's stream, and for ternary weights."""
        return self.calibration.epochs if self.streams > 1 and not self.ternary else 0

    @property
    def streams(self) -> int:
        """The number of models to run: the pruned one, and the dense one if it is the target."""
        return 2 if self.pruner.updates_weights and self.calibration.target == "dense" else 1

    def disk_bytes(self) -> int:
        """Return the bytes of finished layers, and of hidden states if they are spilled to disk."""
        specs = [self.model.checkpoint.require(name + WEIGHT) for name in self.layers]
        states = 4 * self.samples.tokens * self.model.hidden * self.streams
        spilled = states if choose_storage(states, self.device) == "disk" else 0
        return sum(spec.rows * (spec.columns + 4) for spec in specs) + spilled

    def state(self) -> dict[str, Any]:
        """Return the values that must be equal for a run to resume another."""
        updates = self.pruner.updates_weights
        return {
            "slidesparse": slidesparse.__version__,
            "source": _fingerprint(self.model.checkpoint),
            "layers": {name: pattern.ratio for name, pattern in sorted(self.layers.items())},
            "skipped": sorted(self.skipped),
            "samples": self.samples.digest,
            "method": self.method,
            "sweeps": self.calibration.sweeps if updates else 0,
            "target": self.calibration.target if updates else None,
            "finetune": self.epochs,
            "permutes": self.permutes,
            "smooths": self.smooths,
            "distill": [text.digest for text in self.texts] if self.texts else None,
            "minutes": self.calibration.training_minutes if self.texts else None,
            "quant": self.quant,
            "torch": torch.__version__,
            "device": torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu",
            "threads (OMP_NUM_THREADS)": torch.get_num_threads() if self.device.type == "cpu" else 0,
        }


def prepare(
    checkpoint: Checkpoint,
    layers: Mapping[str, Pattern],
    skipped: Collection[str],
    method: str,
    quant: str,
    seed: int,
    calibration: Calibration,
    hold_back: bool = False,
) -> Task:
    """Read the model's config and the data, and return the task; nothing is written.

    Args:
        hold_back: whether to split off validation samples.

    Raises CalibrationError for a model that cannot be run or lacks one of the ``layers``, and the errors of
    `slidesparse.calibrate.samples.load_samples`.
    """
    model = open_model(checkpoint)
    model.require_rows()
    linears = {name for number in range(model.blocks) for name in model.linears(number)}
    for name in layers:
        if name not in linears:
            raise CalibrationError(
                f"{name} is none of the linear layers that calibration runs in a {model.kind} model, such as "
                f"{min(linears)}; leave it out, or prune without --calib"
            )
    training = {"--finetune": calibration.finetune, "--distill": calibration.distill}
    for option, value in training.items() if is_bitnet(checkpoint.config) else ():
        if value:
            raise CalibrationError(
                f"{option} {value} trains weights, but those of BitNet must stay -1, 0 and 1; leave it out"
            )
    if calibration.distill and not model.is_language_model:
        raise CalibrationError(
            f"--distill is for language models (...{CAUSAL} or ...{MULTIMODAL}), but {model.other_use}; leave it out"
        )
    samples = load_samples(calibration.data, model, calibration.samples, calibration.seqlen, seed)
    device = _device(calibration.device)
    samples, held_back = samples.split() if hold_back else (samples, None)
    texts = None
    if calibration.distill:
        text_samples = load_samples(calibration.distill, model, None, calibration.seqlen, seed, "--distill")
        texts = text_samples.split(MAX_VALIDATION_SAMPLES)
    return Task(
        model, layers, frozenset(skipped), samples, method, quant, device, calibration, held_back, texts
    )


def _device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise EnvironmentFault(
            f"--device cuda: this torch ({torch.__version__}) finds no GPU; use --device cpu"
        )
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def _fingerprint(checkpoint: Checkpoint) -> str:
    """Hash a source's tensor names and shapes, its config, and file sizes and times, but not the weights themselves."""
    sha256 = hashlib.sha256(repr(sorted(checkpoint.tensors.values())).encode())
    for file in checkpoint.files:
        status = (checkpoint.folder / file).stat()
        sha256.update(f"{file} {status.st_size} {status.st_mtime_ns}".encode())
    sha256.update((checkpoint.folder / "config.json").read_bytes())
    return sha256.hexdigest()
