"""What `slidesparse.convert` asks of calibration: options checked beforehand, and the layers to leave unpruned."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from slidesparse.calibrate.data import SAMPLES, load_samples
from slidesparse.calibrate.errors import CalibrationError, MissingPackageError
from slidesparse.calibrate.finetune import EPOCHS
from slidesparse.calibrate.models import open_model
from slidesparse.calibrate.refine import SWEEPS
from slidesparse.calibrate.task import TARGETS, Task, require_layers
from slidesparse.plan import ALL_METHODS, CALIBRATED, Plan

DEVICES = ("auto", "cpu", "cuda")


@dataclass(frozen=True)
class Calibration:
    """Calibration data and how to use them; see `slidesparse.calibrate.data.load_samples`."""

    data: str
    samples: int = SAMPLES
    seqlen: int | None = None
    device: str = "auto"  # CUDA where there is one
    resume: bool = False
    sweeps: int = SWEEPS
    target: str = TARGETS[0]
    finetune: int | None = None  # epochs; by default EPOCHS, where the dense model is the target


def choose_method(method: str | None, calibration: Calibration | None) -> str:
    """The pruning method: sparsegpt with calibration data, magnitude without, unless one is asked for.

    Raises CalibrationError when the two do not go together.
    """
    chosen = method or ("sparsegpt" if calibration else "magnitude")
    if chosen in CALIBRATED and not calibration:
        raise CalibrationError(
            f"--method {chosen} needs calibration data: --calib FILE.jsonl, FILE.npy or random; without, there is "
            "--method magnitude"
        )
    if calibration and chosen in ALL_METHODS and chosen not in (*CALIBRATED, "magnitude"):
        raise CalibrationError(f"--method {chosen} has no use for --calib; leave one of them out")
    return chosen


def prepare(plan: Plan, calibration: Calibration) -> Task:
    """Read model and data; writes nothing.  Raises CalibrationError, or MissingPackageError for a library."""
    if plan.converted:
        raise CalibrationError(
            "--calib does not go with a source that is already pruned, as only its layout changes; start from the "
            "original checkpoint"
        )
    if not plan.from_float:
        raise CalibrationError(
            f"calibration updates float weights, but the source holds {plan.quant} ones; start from the original "
            "checkpoint, or prune its codes: --method magnitude without --calib"
        )
    if calibration.sweeps < 0:
        raise CalibrationError(
            f"--sweeps {calibration.sweeps} is negative; 0 is SparseGPT by itself, {SWEEPS} usual"
        )
    if calibration.target not in TARGETS:
        raise CalibrationError(
            f"--target {calibration.target!r} is not known; use dense, to prune layers towards what the dense model "
            "gives, or own, towards what they themselves gave before"
        )
    epochs = calibration.finetune
    if epochs is None:
        epochs = EPOCHS if calibration.target == "dense" else 0
    if epochs < 0:
        raise CalibrationError(f"--finetune {epochs} is negative; 0 is none, {EPOCHS} usual")
    if epochs and calibration.target != "dense":
        raise CalibrationError(
            f"--finetune {epochs} trains towards what the dense model gives, which --target {calibration.target} does "
            "not run; leave one of the two out"
        )
    model = open_model(plan.checkpoint)
    require_layers(model, plan.patterns)
    samples = load_samples(calibration.data, model, calibration.samples, calibration.seqlen, plan.seed)
    return Task(
        model,
        plan.patterns,
        frozenset(plan.skipped),
        samples,
        plan.method,
        plan.quant,
        _device(calibration.device),
        calibration.sweeps,
        calibration.target,
        epochs,
    )


def _device(name: str) -> torch.device:
    if name not in DEVICES:
        raise CalibrationError(f"--device {name!r} is not known; use one of {', '.join(DEVICES)}")
    if name == "cuda" and not torch.cuda.is_available():
        raise MissingPackageError(
            f"--device cuda: this torch ({torch.__version__}) finds no GPU; use --device cpu"
        )
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def share(text: str) -> float:
    """``5%`` -> 0.05.  Raises CalibrationError for what is no percentage below 100."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*%", text.strip())
    if not match or not 0 < float(match[1]) < 100:
        raise CalibrationError(f"--skip-worst {text!r} is not a percentage between 0% and 100%, such as 5%")
    return float(match[1]) / 100


def worst_layers(
    errors: Mapping[str, float], groups: Sequence[tuple[str, ...]], part: float
) -> frozenset[str]:
    """The layers of the largest errors: at most ``part`` of all, but at least one group; fused layers go together."""
    grouped = {name: group for group in groups for name in group}
    units = {grouped.get(name, (name,)) for name in errors}
    ordered = sorted(units, key=lambda unit: (-max(errors[name] for name in unit), unit))
    chosen: list[str] = list(ordered[0])
    for unit in ordered[1:]:
        if len(chosen) + len(unit) > part * len(errors):
            break
        chosen += unit
    return frozenset(chosen)
