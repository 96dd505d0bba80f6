"""The options of calibration, and the task that combines them with model and data."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

import slidesparse
from slidesparse.calibrate.model import LayerGroup, Model
from slidesparse.calibrate.resume import DIGEST
from slidesparse.calibrate.samples import REFERENCE, SAMPLES, Samples, join, load_sources
from slidesparse.checkpoint.bitnet import is_bitnet
from slidesparse.checkpoint.names import is_expert
from slidesparse.errors import CalibrationError, EnvironmentFault, SlideSparseError
from slidesparse.pattern import Pattern
from slidesparse.progress import Progress, no_progress

DEVICES = ("auto", "cpu", "cuda")
ROTATIONS = ("auto", "on", "off")  # where possible, always (an error where impossible), or never
MINUTES = 10.0
HELD_BACK, TEXTS = "the held-back samples", "the text of --distill"  # keys of `Task.state`
MAX_VALIDATION_SAMPLES = 64  # most validation samples of a distillation
# Fewer tokens than this are little text to distill with: five minutes on 4 M of a model's own won back far less than
# ten on 33 M of many kinds
LITTLE_TEXT = 2**24


@dataclass(frozen=True)
class Calibration:
    """Calibration data and how to use them.  Raises CalibrationError for a value that is not allowed."""

    data: tuple[str, ...]  # this and the next two: see `slidesparse.calibrate.samples.load_sources`
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
                f"--minutes {self.minutes} must be finite and more than 0; the default is {MINUTES:g}"
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
    held_back: tuple[Samples, ...] = ()  # with a budget: samples of each kind of text that it is validated on
    texts: tuple[Samples, Samples] | None = None  # training and validation split of distillation
    rotates: bool = False  # whether to learn a rotation, which is used if it helps or was requested

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
        """The epochs of fine-tuning: 0 for ternary weights, and where nothing is pruned."""
        trains = not self.ternary and any(pattern.density < 1 for pattern in self.layers.values())
        return self.calibration.epochs if trains else 0

    def quantized(self, number: int) -> dict[str, str]:
        """Return the checkpoint's names of the linear layers of a block that are quantized, by their names in it."""
        names = self.model.linears(number).items()
        return {name: full for name, full in names if full in self.layers or full in self.skipped}

    def groups(self, number: int) -> list[LayerGroup]:
        """Return the groups of the layers of a block that are pruned, in order of execution."""
        groups = self.model.layer_groups(number)
        return [*filter(None, (tuple(name for name in group if name in self.layers) for group in groups))]

    def patterns(self, number: int) -> dict[str, str]:
        """Return the patterns of the layers of a block that are pruned, by name."""
        return {name: self.layers[name].ratio for group in self.groups(number) for name in group}

    def state(self) -> dict[str, Any]:
        """Return the values that must be equal for a run to resume another; the keys are the words for them."""
        config = json.dumps(dict(self.model.checkpoint.config))
        return {
            "slidesparse": slidesparse.__version__,
            "config.json of the source": DIGEST + hashlib.sha256(config.encode()).hexdigest(),
            "layers": {name: pattern.ratio for name, pattern in sorted(self.layers.items())},
            "skipped": sorted(self.skipped),
            "the data of --calib": DIGEST + self.samples.digest,
            HELD_BACK: DIGEST + "".join(samples.digest for samples in self.held_back),
            "smoothing": self.smooths,
            TEXTS: DIGEST + "".join(text.digest for text in self.texts or ()),
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
    progress: Progress = no_progress,
) -> Task:
    """Read the data, or let the model write them, and return the task.

    Args:
        hold_back: whether to hold back samples of each source for validation.  If there is one source, samples of
            another kind of text join them: a loss on text like that of calibration says little about other text.

    Raises CalibrationError for a model that cannot be run or does not run one of the ``layers``, and the errors of
    `slidesparse.calibrate.samples.load_sources`.
    """
    linears = {name for i in range(model.blocks) for group in model.layer_groups(i) for name in group}
    if calibration.distill and any(map(is_expert, layers)):
        raise CalibrationError(
            "--distill does not train routed experts: leave it out, or leave them unpruned: --layer "
            "'\\.experts\\.=dense'"
        )
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
    texts, notes = None, list[str]()
    if calibration.distill:  # first, as then the model writes text only once
        text = join(load_sources(calibration.distill, model, progress, None, calibration.seqlen, "--distill"))
        shortest, *longer = sorted({len(sample) for sample in text.ids})
        if longer:
            raise CalibrationError(
                f"--distill: samples have {shortest} to {longer[-1]} tokens, but must be of one length: rows of a .npy "
                f"file are shorter than others; cut all with --seqlen {shortest}"
            )
        notes.append(text.note)
        if text.tokens < LITTLE_TEXT:
            notes.append(
                f"{text.tokens} tokens are little text for --distill; tens of millions, of several kinds, win back more"
            )
        texts = text.split(MAX_VALIDATION_SAMPLES)
    sources = load_sources(calibration.data, model, progress, calibration.samples, calibration.seqlen)
    notes.append(join(sources).note)
    held_back: tuple[Samples, ...] = ()
    if hold_back:
        pairs = [source.split() for source in sources]
        sources, held_back = [training for training, _ in pairs], tuple(held for _, held in pairs)
        if len(sources) == 1:
            count, length = len(held_back[0].ids), max(map(len, held_back[0].ids))
            try:
                held_back += tuple(load_sources([REFERENCE], model, progress, count, length))
            except SlideSparseError as error:
                notes.append(f"the loss is measured on text like that of {sources[0].origin} alone: {error}")
    samples = replace(join(sources), note="; ".join(dict.fromkeys(filter(None, notes))))
    return Task(model, layers, frozenset(skipped), samples, quant, calibration, held_back, texts)
