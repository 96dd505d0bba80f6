"""Fine-tuning of a pruned transformer block: error as served, kept zeros, determinism."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from calibration import calibrated, open_model, write_ids
from checkpoints import LLAMA, tensors_of
from torch import Tensor

from slidesparse.calibrate import finetune as finetuning
from slidesparse.calibrate import pipeline
from slidesparse.calibrate.finetune import VALIDATION_INTERVAL, Finetuned, finetune
from slidesparse.calibrate.graphs import recordings
from slidesparse.calibrate.inputs import HiddenStates, Stream
from slidesparse.calibrate.model import Model
from slidesparse.checkpoint.skeleton import Skeleton
from slidesparse.checkpoint.storage import Checkpoint
from slidesparse.pattern import SlidePattern
from slidesparse.prune import prune
from slidesparse.quantize import FP8, INT8, dequantize_rows, quantize_rows

CPU = torch.device("cpu")
SAMPLES, TOKENS, HIDDEN = 120, 16, LLAMA.hidden
DTYPES = [INT8, FP8]


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limit the tokens of a step, so that there are many steps."""
    monkeypatch.setattr(finetuning, "STEP_TOKENS", 120)
    monkeypatch.setitem(finetuning.PIECE_TOKENS, "cpu", 64)


class Case:
    """A block pruned by magnitude, its inputs, and the outputs of the dense block."""

    def __init__(
        self, source: Path, samples: int = SAMPLES, tokens: int = TOKENS, device: torch.device = CPU
    ) -> None:
        model = Model(Skeleton(Checkpoint.open(source)), device)
        with model.checkpoint.reader() as reader:
            dense = model.load(reader, 0)
        x = torch.randn(samples, tokens, HIDDEN, generator=torch.Generator().manual_seed(3)).to(device)
        shapes = [(5, tokens, HIDDEN), (samples - 5, tokens, HIDDEN)]
        self.states, self.targets = (HiddenStates(shapes, device) for _ in range(2))
        for batch, part in enumerate((x[:5], x[5:])):
            self.states[batch], self.targets[batch] = part, dense.output(part)
        self.block = dense.copy()
        self.names = [name for group in dense.groups for name in group]
        self.pruned = {name: prune(dense.weights[f"{name}.weight"], SlidePattern(8)) for name in self.names}

    def run(self, dtype: torch.dtype, epochs: int = 4) -> Finetuned:
        stream = Stream(self.block, self.states)
        return finetune(stream, self.targets, self.pruned, self.names, dtype, epochs)

    def error(self, weights: Mapping[str, Tensor], dtype: torch.dtype) -> float:
        """Return the error on held-out samples of a block whose linear layers quantize weights and inputs."""

        def served(x: Tensor) -> Tensor:
            rows = x.flatten(0, -2)
            return dequantize_rows(*quantize_rows(rows, dtype)).view_as(x)

        block = self.block.copy()
        block.weights |= {f"{name}.weight": served(w) for name, w in weights.items()}
        block.read = lambda _, x: served(x)
        x, expected = (
            torch.cat([states[batch] for batch in range(2)])[VALIDATION_INTERVAL - 1 :: VALIDATION_INTERVAL]
            for states in (self.states, self.targets)
        )
        lost = (block.output(x) - expected).square().sum(-1) / expected.square().sum(-1)
        return float(lost.mean().sqrt())


def test_an_epoch_has_each_training_sample_once_in_steps_of_equal_shapes(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU each shape is recorded anew."""
    read, original = list[tuple[int, int]](), HiddenStates.samples

    def record(states: HiddenStates, places: Sequence[tuple[int, int]]) -> Tensor:
        read.extend(places)
        steps.append(len(places))
        return original(states, places)

    monkeypatch.setattr(HiddenStates, "samples", record)
    steps = list[int]()
    Case(source).run(INT8, epochs=0)
    validation, validating = {*read}, len(steps)
    read.clear()
    steps.clear()
    Case(source).run(INT8, epochs=1)
    trained = read[2 * len(validation) : -2 * len(validation)]  # inputs and targets of each
    assert len(validation) == SAMPLES // VALIDATION_INTERVAL
    assert len(trained) == 2 * (SAMPLES - len(validation))
    assert {*trained} == {(0, i) for i in range(5)} | {(1, i) for i in range(SAMPLES - 5)} - validation
    assert len({*steps[validating:-validating]}) <= 2  # the last piece is smaller


@pytest.mark.parametrize("dtype", DTYPES)
def test_fine_tuning_reduces_the_error_as_served(source: Path, dtype: torch.dtype) -> None:
    """Errors are of held-out samples. Pruned weights stay zero, and a second run gives the same bits.

    Over four seeds, training left 0.86 to 0.91 of the error, and a single epoch 0.03 to 0.08 more.
    """
    case = Case(source)
    tuned, repeated = case.run(dtype), case.run(dtype)
    assert (tuned.error_before, tuned.error_after) == (repeated.error_before, repeated.error_after)
    for name, w in case.pruned.items():
        assert torch.equal(tuned.weights[name], repeated.weights[name])
        assert not tuned.weights[name][w == 0].any()
        assert not torch.equal(tuned.weights[name], w)
        assert tuned.weights[name].dtype == w.dtype
        assert not tuned.weights[name].requires_grad
    # float32 sums of the same numbers in another order, where errors are a few percent
    assert tuned.error_before == pytest.approx(case.error(case.pruned, dtype), rel=1e-4)
    assert tuned.error_after == pytest.approx(case.error(tuned.weights, dtype), rel=1e-4)
    assert tuned.error_after < 0.97 * tuned.error_before
    assert tuned.error_after < case.run(dtype, epochs=1).error_after


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_fine_tuning_on_a_gpu_is_deterministic(source: Path, dtype: torch.dtype) -> None:
    """Gradients of attention are sums over several of its blocks; graphs of steps compute what steps do."""
    case = Case(source, samples=24, tokens=500, device=torch.device("cuda", 0))
    tuned = case.run(dtype)
    with recordings():
        repeated = case.run(dtype)
    assert tuned.error_after == repeated.error_after < tuned.error_before
    for name, w in case.pruned.items():
        assert torch.equal(tuned.weights[name], repeated.weights[name])
        assert not tuned.weights[name][w == 0].any()


@pytest.mark.gpu
def test_attention_with_shared_keys_writes_no_weights_to_gpu_memory(source: Path) -> None:
    """Two heads share the keys and values of one; outputs are within float32 sums of those of a CPU."""
    device, tokens = torch.device("cuda", 0), 8192
    x = torch.randn(1, tokens, HIDDEN, generator=torch.Generator().manual_seed(3))
    outputs = []
    for kind in (CPU, device):
        model = Model(Skeleton(Checkpoint.open(source)), kind)
        with model.checkpoint.reader() as reader:
            block = model.load(reader, 0)
        model.call(0, 1, tokens)  # is kept
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        outputs.append(block.output(x.to(kind)).cpu())
        taken = torch.cuda.max_memory_allocated() - before
    assert taken < LLAMA.heads * tokens**2 * 4 / 4
    torch.testing.assert_close(*outputs, rtol=0, atol=1e-4)


def test_fine_tuning_leaves_the_block_and_torch_unchanged(source: Path) -> None:
    case = Case(source)
    before = {name: w.clone() for name, w in case.block.weights.items()}
    case.run(INT8, epochs=1)
    assert case.block.read is None
    assert all(torch.equal(case.block.weights[name], w) for name, w in before.items())
    assert not torch.are_deterministic_algorithms_enabled()


def test_fine_tuning_without_improvement_is_discarded(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finetuning, "RATE", 100.0)
    case = Case(source)
    tuned = case.run(INT8)
    assert tuned.error_after == tuned.error_before
    assert all(torch.equal(tuned.weights[name], w) for name, w in case.pruned.items())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("factor", [0.0, 1e-30, 1e-24])
def test_layers_of_zeros_or_tiny_weights_do_not_stop_others(
    source: Path, dtype: torch.dtype, factor: float
) -> None:
    """Their mean square, by which steps are scaled, is below float32."""
    case = Case(source)
    case.pruned["mlp.up_proj"] *= factor
    tuned = case.run(dtype, epochs=1)
    assert all(torch.isfinite(w).all() for w in tuned.weights.values())
    assert not tuned.weights["mlp.up_proj"][case.pruned["mlp.up_proj"] == 0].any()
    assert tuned.error_after < tuned.error_before


def test_steps_are_as_near_to_their_size_as_samples_let_them_be(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two samples of 50 tokens fill a step of 120 better than four do."""
    monkeypatch.setitem(finetuning.PIECE_TOKENS, "cpu", 120)
    steps, original = list[int](), finetuning._Trainer._train

    def train(self: Any, *data: Tensor) -> None:
        steps.append(sum(len(x) for x in data[::2]))
        original(self, *data)

    monkeypatch.setattr(finetuning._Trainer, "_train", train)
    Case(source, samples=40, tokens=50).run(INT8, epochs=1)
    assert sum(steps) == 35
    assert max(steps) == 3  # the last sample joins two


def test_blocks_train_on_trained_ones(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With their codes as written, and towards the dense model's outputs; the report has both errors."""
    ids, states = write_ids(tmp_path / "ids.npy", 200), list[Tensor]()
    original = pipeline.finetune

    def record(stream: Stream, *arguments: Any) -> Finetuned:
        states.append(stream.states[0].clone())
        return original(stream, *arguments)

    monkeypatch.setattr(pipeline, "finetune", record)
    rows = calibrated(source, tmp_path / "out", ids, samples=200, epochs=2).layers
    errors = {(row["name"].split(".")[2], row["block_error"], row["block_error_finetuned"]) for row in rows}
    assert len(errors) == LLAMA.layers
    assert all(0 < after < before for _, before, after in errors)
    model, written = open_model(source), tensors_of(tmp_path / "out")
    with model.checkpoint.reader() as reader:
        block = model.load(reader, 0)
    for name in (name for group in block.groups for name in group):
        layer = model.skeleton.layer(0, name)
        served = dequantize_rows(written[f"{layer}.weight"], written[f"{layer}.weight_scale"])
        block.weights[f"{name}.weight"] = served
    # float32 sums in another order where batches differ
    torch.testing.assert_close(states[1], block.output(states[0]), rtol=0, atol=1e-4)
