"""Short calibrated conversions on the CPU, and their calibration samples."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from architectures import ARCHITECTURES
from checkpoints import LLAMA, config_of, convert, tensors_of, write
from tiny import build, fill
from torch import Tensor, nn

from slidesparse.calibrate import distill
from slidesparse.calibrate.inputs import Hessian
from slidesparse.calibrate.model import Model
from slidesparse.calibrate.roles import Roles, hadamard
from slidesparse.calibrate.rotation import Q, Rotation, untie_head, value_pair
from slidesparse.calibrate.task import Calibration, Task, prepare
from slidesparse.checkpoint.skeleton import Skeleton
from slidesparse.checkpoint.storage import Checkpoint, Reader
from slidesparse.convert import budget
from slidesparse.convert.stream import Report
from slidesparse.pattern import SlidePattern
from slidesparse.quantize import dequantize_rows

CPU = torch.device("cpu")
IDS = torch.from_numpy(np.random.default_rng(0).integers(3, 128, (2, 24)))
LINEARS = sorted(LLAMA.linears())
TOKENS = (6, 24)  # number of samples, sequence length
DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


class Killed(BaseException):
    """Stand-in for a signal that kills the process: no code handles it."""


# Microseconds of a layer of hardly any weights, by tokens: patterns save time in decode, and not with 4096 tokens.
LAYER_US = {
    16: {"stock": 5.5, "dense": 4.5, "6:8": 4.3, "4:6": 4.2, "2:4": 4.0},
    4096: {"stock": 12, "dense": 16.5, "6:8": 18, "4:6": 18, "2:4": 18},
    8192: {"stock": 20.5, "dense": 22.5, "6:8": 22, "4:6": 22, "2:4": 22},
}


def write_layer_times(path: Path) -> Path:
    """Copy the times of layers that ship, with LAYER_US for DEFAULT_GPU, whose own change when it is measured."""
    lines = budget.FILE.read_text().splitlines()
    lines = [line for line in lines if not line.startswith(f"{budget.DEFAULT_GPU},")]
    for dtype in ("int8", "fp8"):
        for tokens, us in LAYER_US.items():
            lines += [f"{budget.DEFAULT_GPU},{dtype},{pattern},{tokens},{t},0.2" for pattern, t in us.items()]
    path.write_text("\n".join(lines))
    return path


def write_ids(path: Path, samples: int = TOKENS[0]) -> str:
    """Token ids [samples, 24]."""
    np.save(path, np.random.default_rng(0).integers(0, LLAMA.vocabulary, (samples, TOKENS[1])))
    return str(path)


def calibrated(source: Path, out: Path, ids: str, **options: Any) -> Report:
    """Convert with calibration, by default without rotation and on the CPU, where results are deterministic."""
    settings = {field.name: options.pop(field.name) for field in fields(Calibration) if field.name in options}
    usual = {"data": (ids,), "device": "cpu", "seqlen": TOKENS[1], "rotate": "off"}
    calibration = Calibration(**{**usual, **settings})
    return convert(source, out, calibration=calibration, **options)


def save(name: str, folder: Path, **settings: Any) -> nn.Module:
    """Write a model of `ARCHITECTURES` in float32 and return it."""
    model = build(name.split()[0], **{**ARCHITECTURES.get(name, {}), **settings})
    fill(model)
    model.save_pretrained(folder)
    return model


def open_model(folder: Path, untied: bool = False) -> Model:
    """Open the model of a checkpoint on the CPU, with an ``untied`` head as it is rotated."""
    checkpoint = Checkpoint.open(folder)
    return Model(Skeleton(untie_head(checkpoint) if untied else checkpoint), CPU)


def task_of(model: Model, ids: str, pattern: SlidePattern, **options: Any) -> Task:
    """Return a task that prunes all linear layers of a model, and all routed experts."""
    groups = (group for number in range(model.blocks) for group in model.layer_groups(number))
    names = [name for group in groups for name in group]
    calibration = Calibration((ids,), seqlen=TOKENS[1], device="cpu", epochs=0)
    return prepare(model, dict.fromkeys(names, pattern), (), "int8", calibration, **options)


def some_rotation(model: Model, roles: list[Roles]) -> Rotation:
    """Return a rotation of the residual stream and of the values of all heads."""
    pairs = {number: value_pair(of_block) for number, of_block in enumerate(roles)}
    r = {
        str(number): torch.stack([hadamard(pair.width, CPU).roll(i, 0) for i in range(pair.kv_heads)])
        for number, pair in pairs.items()
        if pair
    }
    return {Q: hadamard(model.hidden, CPU), **r}


@torch.inference_mode()
def run(model: Model, reader: Reader, ids: Tensor = IDS) -> Tensor:
    """Return logits, or the last block's output of a model that predicts no tokens."""
    ends = model.ends(reader)
    x = ends.embed(ids)
    for number in range(model.blocks):
        x = model.load(reader, number).output(x)
    return ends.logits(x) if model.skeleton.generates else x


def logits_of(folder: Path) -> Tensor:
    """Run the model of a checkpoint."""
    model = open_model(folder)
    with model.checkpoint.reader() as reader:
        return run(model, reader)


def dequantized(folder: Path, out: Path) -> Path:
    """Write a converted model with its weights dequantized."""
    tensors, config = tensors_of(folder), config_of(folder)
    for layer in [name.removesuffix("_scale") for name in tensors if name.endswith("_scale")]:
        tensors[layer] = dequantize_rows(tensors[layer], tensors.pop(f"{layer}_scale"))
    del config["quantization_config"]
    return write(out, config, tensors)


def inputs(tokens: int, k: int, seed: int = 0) -> Tensor:
    """Correlated inputs [tokens, k] in float64 whose columns differ in size, as those of activations do."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(k, k, generator=generator, dtype=torch.float64) * 0.5 / k**0.5
    sizes = torch.rand(k, generator=generator, dtype=torch.float64) + 0.1
    x = torch.randn(tokens, k, generator=generator, dtype=torch.float64)
    return x @ (mixing + torch.eye(k, dtype=torch.float64)) * sizes + 0.2


def weights(n: int, k: int, seed: int = 1) -> Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def hessian_of(x: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    hessian = Hessian(x.shape[1], dtype=dtype)
    for part in x.split(100):
        hessian.add(part.reshape(1, *part.shape))
    assert hessian.tokens == len(x)
    return hessian.matrix


WORKER = distill._worker


def set_clock(patch: pytest.MonkeyPatch) -> None:
    """Let the clock of distillation advance by one second at each reading, so that all runs have the same steps."""
    seconds = iter(range(10**6))
    patch.setattr(distill, "time", SimpleNamespace(monotonic=lambda: float(next(seconds))))


def set_pace(patch: pytest.MonkeyPatch) -> None:
    """Set the clock, with short steps at a high rate."""
    set_clock(patch)
    patch.setattr(distill, "RATE", 0.01)
    patch.setitem(distill.STEP_TOKENS, "cpu", 960)
    patch.setitem(distill.PASS_TOKENS, "cpu", 240)


def paced_worker(*arguments: Any) -> None:
    """Train in a process of its own, by such a clock."""
    set_pace(pytest.MonkeyPatch())
    WORKER(*arguments)


def large_worker(*arguments: Any) -> None:
    """Do so with too little memory for a whole model in each process."""
    pytest.MonkeyPatch().setattr(distill, "free_bytes", lambda _: 0)
    paced_worker(*arguments)
