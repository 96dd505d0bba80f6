"""All that decides what a calibrated run computes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

import slidesparse
from slidesparse.architectures import WEIGHT
from slidesparse.calibrate.cache import place
from slidesparse.calibrate.data import Samples
from slidesparse.calibrate.errors import CalibrationError
from slidesparse.calibrate.finetune import EPOCHS
from slidesparse.calibrate.forward import DecoderBlock, EncoderBlock
from slidesparse.calibrate.models import Model
from slidesparse.calibrate.refine import SWEEPS
from slidesparse.checkpoint import Checkpoint
from slidesparse.pattern import SlidePattern

TARGETS = ("dense", "own")  # pruned layers should give what they do in the dense model, or on the same inputs


@dataclass(frozen=True)
class Task:
    """All that decides what a calibrated run computes."""

    model: Model
    layers: Mapping[str, SlidePattern]  # linear layers to prune -> pattern
    skipped: frozenset[str]  # linear layers that are served quantized without being pruned
    samples: Samples
    method: str
    quant: str
    device: torch.device
    sweeps: int = SWEEPS  # of `slidesparse.calibrate.refine`, after sparsegpt
    target: str = TARGETS[0]  # one of them, of sparsegpt
    finetune: int = EPOCHS  # of each layer of the model after sparsegpt, if the dense model is run

    @property
    def streams(self) -> int:
        """How many models are run: the pruned one, and with it, if that is the target, the dense one."""
        return 2 if self.method == "sparsegpt" and self.target == "dense" else 1

    def prunes(self, name: str) -> bool:
        """Whether a linear layer is rewritten, and not just quantized or left alone."""
        return name in self.layers and self.layers[name].length is not None

    def disk_bytes(self) -> int:
        """Bytes of finished layers, and of hidden states if they are to be spilled."""
        specs = [self.model.checkpoint.require(name + WEIGHT) for name in self.layers]
        states = 4 * self.samples.tokens * self.model.hidden * self.streams
        spilled = states if place(states, self.device) == "disk" else 0
        return sum(spec.rows * (spec.columns + 4) for spec in specs) + spilled

    def state(self) -> dict[str, Any]:
        """What a run that goes on from another's layers must share with it."""
        return {
            "slidesparse": slidesparse.__version__,
            "source": _fingerprint(self.model.checkpoint),
            "layers": {name: pattern.ratio for name, pattern in sorted(self.layers.items())},
            "skipped": sorted(self.skipped),
            "samples": self.samples.digest,
            "method": self.method,
            "sweeps": self.sweeps if self.method == "sparsegpt" else 0,
            "target": self.target if self.method == "sparsegpt" else None,
            "finetune": self.finetune if self.streams > 1 else 0,
            "quant": self.quant,
            "torch": torch.__version__,
            "device": torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu",
            "threads (OMP_NUM_THREADS)": torch.get_num_threads() if self.device.type == "cpu" else 0,
        }


def require_layers(model: Model, layers: Mapping[str, SlidePattern]) -> None:
    """CalibrationError unless every linear layer to prune is one that `Model.load` runs."""
    run = {name for number in range(model.blocks) for stage in stages_of(model, number) for name in stage}
    for name in layers:
        if name not in run:
            raise CalibrationError(
                f"{name} is none of the linear layers that calibration runs in a {model.kind} model, such as "
                f"{min(run)}; leave it out, or do without --calib"
            )


def stages_of(model: Model, number: int) -> list[list[str]]:
    """Names of the linear layers of a layer of the model, those that read the same input together, in order."""
    kind = DecoderBlock if model.is_decoder else EncoderBlock
    return [[model.prefix(number) + name for name in stage] for stage in kind.stages]


def widest(model: Model) -> int:
    """The most in-features of the linear layers of a block; the blocks are alike."""
    return max(
        model.checkpoint.require(name + WEIGHT).columns for stage in stages_of(model, 0) for name in stage
    )


def _fingerprint(checkpoint: Checkpoint) -> str:
    """Of a source's names, shapes, sizes and times of change; its bytes are too many to read again."""
    found = hashlib.sha256(repr(sorted(checkpoint.tensors.values())).encode())
    for file in checkpoint.files:
        status = (checkpoint.folder / file).stat()
        found.update(f"{file} {status.st_size} {status.st_mtime_ns}".encode())
    found.update((checkpoint.folder / "config.json").read_bytes())
    return found.hexdigest()
