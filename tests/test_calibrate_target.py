"""Pruning towards what the dense model gives, and inputs evened out before they are quantized."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from calibration import SIX_EIGHT, calibrated, write_ids
from checkpoints import LLAMA, llama, snapshot, tensors_of
from test_cli import Done

from slidesparse import convert as converting
from slidesparse.calibrate import pipeline
from slidesparse.calibrate.balance import balance, scales
from slidesparse.calibrate.cache import HiddenStates, Inputs
from slidesparse.calibrate.forward import Block
from slidesparse.calibrate.hessian import Hessian
from slidesparse.calibrate.models import open_model
from slidesparse.calibrate.pipeline import prune_floats
from slidesparse.calibrate.run import Calibration, prepare
from slidesparse.calibrate.sparsegpt import damped, factor
from slidesparse.calibrate.target import Drift, target_of
from slidesparse.checkpoint import Checkpoint
from slidesparse.plan import make_plan
from slidesparse.quantize import FP8, INT8, dequantize_rows, quantize_rows

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
        found = floats(source, tmp_path, str(tmp_path / "ids.npy"), target=target)
        error[target] = float((hidden(source, ids, found) - dense).norm())
    assert 0 < error["dense"] < 0.98 * error["own"]


def test_the_first_layer_is_pruned_as_if_by_itself(source: Path, tmp_path: Path) -> None:
    """Its first stage reads what it reads in the dense model; the second does not."""
    ids = write_ids(tmp_path / "ids.npy")
    own, dense = (floats(source, tmp_path, ids, target=target) for target in ("own", "dense"))
    q, o = (f"model.layers.0.self_attn.{name}_proj" for name in "qo")
    assert torch.equal(own[q], dense[q])
    assert not torch.equal(own[o], dense[o])


def test_room_for_both_streams_is_counted(source: Path, tmp_path: Path) -> None:
    ids = write_ids(tmp_path / "ids.npy")
    plan = make_plan(Checkpoint.open(source), SIX_EIGHT, None, "dense", "sparsegpt", (), None, 0)
    one, two = (
        prepare(plan, Calibration(ids, seqlen=24, device="cpu", target=target)) for target in ("own", "dense")
    )
    assert two.disk_bytes() - one.disk_bytes() == 4 * two.samples.tokens * LLAMA.hidden
    shapes = [(6, 24, 64)]
    nbytes = 4 * 6 * 24 * 64
    assert HiddenStates(shapes, CPU, tmp_path, limit=2 * nbytes, streams=2).where == "memory"
    assert HiddenStates(shapes, CPU, tmp_path, limit=2 * nbytes - 1, streams=2).where == "disk"


# Even inputs


def an_uneven_block(source: Path) -> Block:
    """A decoder layer of which a few inputs of down_proj are 40 times as large as the others."""
    checkpoint = Checkpoint.open(source)
    with checkpoint.reader() as reader:
        block = open_model(checkpoint).load(reader, 0, CPU)
    del block.weights["mlp.up_proj.bias"]
    block.weights[UP] = block.weights[UP].clone()
    block.weights[UP][::30] *= 40
    return block


def inputs_of(block: Block, folder: Path) -> Inputs:
    states = HiddenStates([(2, 24, 64), (3, 24, 64)], CPU, folder)
    states[0], states[1] = random(2, 24, 64, seed=5), random(3, 24, 64, seed=6)
    return Inputs(block, states, keep=False)


def int8_error(block: Block, x: torch.Tensor) -> float:
    """Of down_proj's outputs, relative; ``x`` is what the block reads."""
    x, w = block.input(3, x).flatten(0, 1), block.weights[DOWN]
    found = [dequantize_rows(*quantize_rows(t, INT8)) for t in (x, w)]
    return float((found[0] @ found[1].t() - x @ w.t()).norm() / (x @ w.t()).norm())


def test_even_inputs_change_no_bit_and_quantize_better(source: Path, tmp_path: Path) -> None:
    block = an_uneven_block(source)
    x = random(4, 24, 64)
    before, error = block.output(x), int8_error(block, x)
    changed = balance(inputs_of(block, tmp_path), BOTH, INT8)
    assert set(changed) == {UP, DOWN}
    ratio = changed[DOWN] / block.weights[DOWN]
    s = ratio[0]
    assert torch.equal(ratio, s.expand_as(ratio))
    assert torch.equal(s.log2(), s.log2().round())  # powers of two
    assert float(s[::30].min()) > float(s[1:30].max())  # the large inputs are divided by more
    up = block.weights[UP]
    codes, scale = quantize_rows(up, INT8)
    block.weights |= changed
    assert torch.equal(block.output(x), before)
    again, divided = quantize_rows(block.weights[UP], INT8)
    assert torch.equal(again, codes)  # up_proj's scales take up s whole
    assert torch.equal(divided, scale / s[:, None])
    assert int8_error(block, x) < 0.6 * error


@pytest.mark.parametrize("dtype", [INT8, FP8])
def test_even_inputs_stay_as_they_are(dtype: torch.dtype) -> None:
    x, w = torch.where(random(512, 64) > 0, 1.0, -1.0), random(16, 64, seed=1)
    assert torch.equal(scales(torch.ones(64), x, w, dtype), torch.ones(64))


def test_an_input_never_seen_and_a_layer_of_zeros() -> None:
    size, x = torch.ones(8), torch.ones(4, 8)
    size[3], x[:, 3] = 0, 0
    assert float(scales(size, x, random(4, 8), INT8)[3]) == 1
    assert torch.equal(scales(size, x, torch.zeros(4, 8), INT8), torch.ones(8))


def test_what_is_not_pruned_or_has_a_bias_is_left(source: Path, tmp_path: Path) -> None:
    block = an_uneven_block(source)
    inputs = inputs_of(block, tmp_path)
    assert balance(inputs, BOTH[:1], INT8) == balance(inputs, BOTH[1:], INT8) == {}
    block.weights["mlp.up_proj.bias"] = torch.zeros(88)
    assert balance(inputs, BOTH, INT8) == {}


def uneven(folder: Path, source: Path) -> Path:
    """A model whose first layer is `an_uneven_block`."""
    changed = {"weight": an_uneven_block(source).weights[UP].bfloat16(), "bias": None}
    return llama(
        folder, **{f"model__layers__0__mlp__up_proj__{kind}": found for kind, found in changed.items()}
    )


def test_conversions_with_and_without(source: Path, tmp_path: Path) -> None:
    """up_proj's codes are the same and its scales powers of two apart, as down_proj alone reads its outputs."""
    ids = write_ids(tmp_path / "ids.npy")
    model, found = uneven(tmp_path / "uneven", source), {}
    for name, options in (("with", {"balance": True}), ("without", {}), ("wanda", {"method": "wanda", "balance": True}),
                          ("plain", {"method": "wanda"})):  # fmt: skip
        calibrated(model, tmp_path / name, ids, **options)
        found[name] = tensors_of(tmp_path / name)
    up = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(found["with"][up], found["without"][up])
    bits = (found["without"][f"{up}_scale"] / found["with"][f"{up}_scale"]).log2()
    assert torch.equal(bits, bits.round())
    assert bool(bits.any())
    assert snapshot(tmp_path / "wanda") == snapshot(tmp_path / "plain")  # it keeps its weights as they are


def test_a_balanced_layer_is_the_same_after_resuming(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both streams go through it again: the pruned one as it was published, the dense one as it was read."""
    model, ids = uneven(tmp_path / "uneven", source), write_ids(tmp_path / "ids.npy")
    calibrated(model, tmp_path / "whole", ids, balance=True)
    plain, numbers = pipeline._balance, []

    def die_at_the_second(task: pipeline.Task, number: int, *rest: Any) -> None:
        numbers.append(number)
        if numbers == [0, 1]:
            raise KeyboardInterrupt
        plain(task, number, *rest)

    monkeypatch.setattr(pipeline, "_balance", die_at_the_second)
    with pytest.raises(KeyboardInterrupt):
        calibrated(model, tmp_path / "out", ids, balance=True)
    calibrated(model, tmp_path / "out", ids, resume=True, balance=True)
    assert numbers == [0, 1, 1]
    assert snapshot(tmp_path / "out") == snapshot(tmp_path / "whole")


def test_layers_skipped_or_not_pruned_stay_as_they_are(tmp_path: Path) -> None:
    """Of down_proj, quantized alone, neither weights nor inputs change; of layers at 2_inf the weights do not."""
    names = [f"model__layers__{i}__mlp__up_proj__bias" for i in range(LLAMA.layers)]
    source = llama(tmp_path / "without", **dict.fromkeys(names))
    ids = write_ids(tmp_path / "ids.npy")
    down = "model.layers.1.mlp.down_proj.weight"
    w = tensors_of(source)[down].float()
    codes, scale = quantize_rows(w, INT8)
    for name, options in (("skip", {"skip": ["down_proj"]}), ("inf", {"layer": ["down_proj=2_inf"]})):
        calibrated(source, tmp_path / name, ids, balance=True, **options)
        found = tensors_of(tmp_path / name)
        assert torch.equal(found[down], codes)
        assert torch.equal(found[f"{down}_scale"], scale)


def test_the_command_has_both_options(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert Done(*common, "--dry-run", "--target", "own", "--balance").code == 0
    assert [(how.target, how.balance) for how in seen] == [("dense", False), ("own", True)]
    refused = Done(*common, "--target", "mean")
    assert refused.code == 2
    assert "--target 'mean' is not known; use dense" in refused.err
