"""Pruning towards what the dense model gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from calibration import SIX_EIGHT, write_ids
from checkpoints import LLAMA, llama
from test_cli import Done

from slidesparse import convert as converting
from slidesparse.calibrate import cache
from slidesparse.calibrate.cache import HiddenStates
from slidesparse.calibrate.hessian import Hessian
from slidesparse.calibrate.models import open_model
from slidesparse.calibrate.pipeline import prune_floats
from slidesparse.calibrate.run import Calibration, prepare
from slidesparse.calibrate.sparsegpt import damped, factor
from slidesparse.calibrate.target import Drift, target_of
from slidesparse.checkpoint import Checkpoint
from slidesparse.plan import make_plan

CPU = torch.device("cpu")
UP, DOWN = "mlp.up_proj.weight", "mlp.down_proj.weight"
BOTH = ("mlp.up_proj", "mlp.down_proj")


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return llama(tmp_path / "source")


# The target


@pytest.mark.parametrize("rows", [(4, 4), (12, 8)])
def test_the_target_solves_its_least_squares(rows: tuple[int, int]) -> None:
    """Its normal equations, of few rows and of many; and it is nearer to w d than w is, as here a tells of d."""
    w = {name: random(n, 24, seed=n).double() for name, n in zip("xy", rows, strict=True)}
    a = random(400, 24, seed=2).double()
    d = a + 0.3 * a @ random(24, 24, seed=3).double() + 0.1 * random(400, 24, seed=4)
    hessian, drift = Hessian(24, dtype=torch.float64), Drift(w)
    for part in range(2):
        hessian.add(a[part::2])
        drift.add(a[part::2], d[part::2])
    errors = drift.errors()
    for name, weight in w.items():
        found = target_of(weight, errors[name], factor(hessian.matrix, dtype=torch.float64))
        wanted = weight @ (d - a).t() @ a
        # float64 sums of 400 products, none above 1e3: rounding is below 1e-10
        torch.testing.assert_close((found - weight) @ damped(hessian.matrix), wanted, rtol=0, atol=1e-9)
        wanted = d @ weight.t()
        assert float((a @ found.t() - wanted).norm()) < 0.2 * float((a @ weight.t() - wanted).norm())


def test_inputs_that_did_not_move_leave_the_target_alone() -> None:
    w, a = random(8, 24), random(100, 24, seed=1)
    drift, hessian = Drift({"w": w}), Hessian(24)
    drift.add(a, a.clone())
    hessian.add(a)
    assert torch.equal(target_of(w, drift.errors()["w"], factor(hessian.matrix)), w)


def floats(source: Path, folder: Path, ids: str, **options: Any) -> dict[str, torch.Tensor]:
    checkpoint = Checkpoint.open(source)
    plan = make_plan(checkpoint, SIX_EIGHT, None, "dense", "sparsegpt", (), None, 0)
    task = prepare(plan, Calibration(ids, samples=60, seqlen=24, device="cpu", **options))
    with checkpoint.reader() as reader:
        return prune_floats(task, reader, folder)


def hidden(source: Path, ids: np.ndarray, changed: dict[str, torch.Tensor]) -> torch.Tensor:
    """What the last layer of a model gives, some of its weights replaced."""
    checkpoint = Checkpoint.open(source)
    model = open_model(checkpoint)
    tokens = torch.from_numpy(ids)
    with checkpoint.reader() as reader:
        x = model.embedder(reader, list(tokens), CPU)(tokens)
        for number in range(model.blocks):
            block = model.load(reader, number, CPU)
            prefix = model.prefix(number)
            block.weights |= {
                f"{name.removeprefix(prefix)}.weight": w.float()
                for name, w in changed.items()
                if name.startswith(prefix)
            }
            x = block.output(x)
    return x


def test_the_model_comes_nearer_to_the_dense_one(source: Path, tmp_path: Path) -> None:
    """On the samples it was pruned with, where the first layer is the same and the second makes up for it."""
    ids = np.random.default_rng(1).integers(0, LLAMA.vocabulary, (60, 24))
    np.save(tmp_path / "ids.npy", ids)
    dense = hidden(source, ids, {})
    error = {}
    for target in ("own", "dense"):
        found = floats(source, tmp_path, str(tmp_path / "ids.npy"), target=target, finetune=0)
        error[target] = float((hidden(source, ids, found) - dense).norm())
    assert 0 < error["dense"] < 0.98 * error["own"]


def test_the_first_layer_is_pruned_as_if_by_itself(source: Path, tmp_path: Path) -> None:
    """Its first stage reads what it reads in the dense model; the second does not."""
    ids = write_ids(tmp_path / "ids.npy")
    own, dense = (floats(source, tmp_path, ids, target=target, finetune=0) for target in ("own", "dense"))
    q, o = (f"model.layers.0.self_attn.{name}_proj" for name in "qo")
    assert torch.equal(own[q], dense[q])
    assert not torch.equal(own[o], dense[o])


def test_room_for_both_streams_is_counted(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = write_ids(tmp_path / "ids.npy")
    plan = make_plan(Checkpoint.open(source), SIX_EIGHT, None, "dense", "sparsegpt", (), None, 0)
    one, two = (
        prepare(plan, Calibration(ids, seqlen=24, device="cpu", target=target)) for target in ("own", "dense")
    )
    assert two.disk_bytes() == one.disk_bytes()  # they stay in memory
    monkeypatch.setattr(cache, "MEMORY_BYTES", 0)
    assert two.disk_bytes() - one.disk_bytes() == 4 * two.samples.tokens * LLAMA.hidden
    shapes = [(6, 24, 64)]
    nbytes = 4 * 6 * 24 * 64
    assert HiddenStates(shapes, CPU, tmp_path, limit=2 * nbytes, streams=2).where == "memory"
    assert HiddenStates(shapes, CPU, tmp_path, limit=2 * nbytes - 1, streams=2).where == "disk"


def test_the_command_has_all_options(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Calibration] = []
    plain = converting.convert

    def record(*arguments: Any, **options: Any) -> Any:
        seen.append(options["calibration"])
        return plain(*arguments, **options)

    monkeypatch.setattr(converting, "convert", record)
    common = (
        "convert",
        source,
        tmp_path / "out",
        "-s",
        "6:8",
        "--calib",
        "random",
        "--samples",
        2,
        "--seqlen",
        9,
    )
    assert Done(*common, "--dry-run").code == 0
    assert Done(*common, "--dry-run", "--target", "own").code == 0
    assert Done(*common, "--dry-run", "--finetune", 7).code == 0
    assert [(how.target, how.finetune) for how in seen] == [("dense", None), ("own", None), ("dense", 7)]
    refused = Done(*common, "--target", "mean")
    assert refused.code == 2
    assert "--target 'mean' is not known; use dense" in refused.err
