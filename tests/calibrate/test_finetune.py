"""Fine-tuning of a pruned transformer block: error as served, kept zeros, determinism."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from calibration import calibrated, write_ids
from checkpoints import LLAMA, snapshot, tensors_of
from torch.nn.attention import sdpa_kernel

from slidesparse.calibrate import finetune as finetuning
from slidesparse.calibrate import pipeline
from slidesparse.calibrate.finetune import VALIDATION_INTERVAL, Finetuned, finetune
from slidesparse.calibrate.inputs import BlockInputs, HiddenStates
from slidesparse.calibrate.models import DecoderBlock, Scores, attention, open_model
from slidesparse.checkpoint.storage import Checkpoint
from slidesparse.errors import CalibrationError
from slidesparse.pattern import SlidePattern
from slidesparse.prune import prune
from slidesparse.quantize import FP8, INT8, dequantize_rows, quantize_rows

CPU = torch.device("cpu")
SAMPLES, TOKENS, HIDDEN = 240, 16, LLAMA.hidden
DTYPES = [INT8, FP8, None]


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limit the tokens of a step, so that there are many steps."""
    monkeypatch.setattr(finetuning, "STEP_TOKENS", 120)
    monkeypatch.setitem(finetuning.PIECE_TOKENS, "cpu", 64)


class Case:
    """A block pruned by magnitude, its inputs, and the outputs of the dense block."""

    def __init__(
        self,
        source: Path,
        folder: Path,
        samples: int = SAMPLES,
        tokens: int = TOKENS,
        device: torch.device = CPU,
    ) -> None:
        checkpoint = Checkpoint.open(source)
        with checkpoint.reader() as reader:
            dense = open_model(checkpoint).load(reader, 0, device)
        x = torch.randn(samples, tokens, HIDDEN, generator=torch.Generator().manual_seed(3)).to(device)
        shapes = [(5, tokens, HIDDEN), (samples - 5, tokens, HIDDEN)]
        self.states, self.targets = (HiddenStates(shapes, device, folder) for _ in range(2))
        for batch, part in enumerate((x[:5], x[5:])):
            self.states[batch], self.targets[batch] = part, dense.output(part)
        self.block = dense.copy()
        self.names = [name for stage in dense.stages for name in stage]
        self.pruned = {name: prune(dense.weights[f"{name}.weight"], SlidePattern(8)) for name in self.names}

    def run(self, dtype: torch.dtype | None, epochs: int = 4) -> Finetuned:
        inputs = BlockInputs(self.block, self.states, keep=False)
        return finetune(inputs, self.targets, self.pruned, self.names, dtype, epochs)

    def error(self, weights: Mapping[str, torch.Tensor], dtype: torch.dtype | None) -> float:
        """Return the error on held-out samples of a block whose linear layers quantize weights and inputs."""
        changed = {f"{name}.weight": w for name, w in weights.items()}
        block = QuantizedBlock(self.block.sizes, self.block.weights | changed)
        block.dtype = dtype
        x, expected = (
            torch.cat([states[batch] for batch in range(2)])[VALIDATION_INTERVAL - 1 :: VALIDATION_INTERVAL]
            for states in (self.states, self.targets)
        )
        lost = (block.output(x) - expected).square().sum(-1) / expected.square().sum(-1)
        return float(lost.mean().sqrt())


class QuantizedBlock(DecoderBlock):
    """A decoder layer as it is served, quantized to ``dtype`` unless that is None."""

    dtype: torch.dtype | None = None

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        w, bias, rows = self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"), x.flatten(0, -2)
        if self.dtype is not None:
            w, rows = (dequantize_rows(*quantize_rows(t, self.dtype)) for t in (w, rows))
        return torch.nn.functional.linear(rows, w, bias).view(*x.shape[:-1], -1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_fine_tuning_reduces_the_error_as_served(
    source: Path, tmp_path: Path, dtype: torch.dtype | None
) -> None:
    """Errors are of held-out samples. Pruned weights stay zero, and a second run gives the same bits."""
    case = Case(source, tmp_path)
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
def test_fine_tuning_on_a_gpu_is_deterministic(
    source: Path, tmp_path: Path, dtype: torch.dtype | None
) -> None:
    """Samples are long enough for gradients of attention to be sums over several of its blocks."""
    case = Case(source, tmp_path, samples=24, tokens=1000, device=torch.device("cuda", 0))
    tuned, repeated = case.run(dtype), case.run(dtype)
    assert tuned.error_after == repeated.error_after < 0.97 * tuned.error_before
    for name, w in case.pruned.items():
        assert torch.equal(tuned.weights[name], repeated.weights[name])
        assert not tuned.weights[name][w == 0].any()


@pytest.mark.parametrize("scores", [Scores(0.3), Scores(0.3, causal=False), Scores(0.3, window=4)])
def test_recomputed_attention_has_the_same_gradients(scores: Scores) -> None:
    leaves = [torch.randn(2, 3, 7, 8, requires_grad=True) for _ in range(3)]
    expected = torch.autograd.grad(attention(*leaves, scores).square().sum(), leaves)
    actual = torch.autograd.grad(finetuning._Attention.apply(*leaves, scores).square().sum(), leaves)
    assert not torch.are_deterministic_algorithms_enabled()
    for gradient, reference in zip(actual, expected, strict=True):
        torch.testing.assert_close(gradient, reference)


@pytest.mark.gpu
@pytest.mark.parametrize("scores", [Scores(0.1), Scores(0.1, window=300), Scores(0.1, cap=2.0)])
def test_attention_on_a_gpu_has_the_same_gradients(scores: Scores) -> None:
    """Gradients agree up to rounding to BF16, and a second run gives the same bits."""
    leaves = [torch.randn(2, 3, 999, 64, requires_grad=True) for _ in range(3)]
    expected = torch.autograd.grad(attention(*leaves, scores).square().sum(), leaves)
    moved = [leaf.detach().cuda().requires_grad_() for leaf in leaves]
    with sdpa_kernel(finetuning.ATTENTION["cuda"]):
        actual, repeated = (
            torch.autograd.grad(finetuning.attend(*moved, scores).float().square().sum(), moved)
            for _ in range(2)
        )
    for gradient, repeat, reference in zip(actual, repeated, expected, strict=True):
        assert torch.equal(gradient, repeat)
        assert float((gradient.cpu() - reference).norm()) < 0.05 * float(reference.norm())


def test_fine_tuning_leaves_the_block_unchanged(source: Path, tmp_path: Path) -> None:
    case = Case(source, tmp_path)
    before = {name: w.clone() for name, w in case.block.weights.items()}
    case.run(INT8, epochs=1)
    assert case.block.read is None
    assert case.block.attend is attention
    assert all(torch.equal(case.block.weights[name], w) for name, w in before.items())


def test_fine_tuning_without_improvement_is_discarded(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finetuning, "RATE", 100.0)
    case = Case(source, tmp_path)
    tuned = case.run(INT8)
    assert tuned.error_after == tuned.error_before
    assert all(torch.equal(tuned.weights[name], w) for name, w in case.pruned.items())


def test_layer_of_zeros_stays_zero(source: Path, tmp_path: Path) -> None:
    case = Case(source, tmp_path)
    case.pruned["mlp.up_proj"].zero_()
    tuned = case.run(INT8)
    assert not tuned.weights["mlp.up_proj"].any()
    assert tuned.error_after < tuned.error_before


@pytest.mark.parametrize("max_tokens", [1, 40, 64, 10**6])
def test_each_sample_is_in_one_split(max_tokens: int) -> None:
    """One of eight samples is held out, over all batches. A piece has at least one sample and at most max_tokens."""
    shapes = [torch.Size((samples, 16, 4)) for samples in (3, 9, 1, 20)]
    trained, judged = finetuning._pieces(shapes, max_tokens)
    offsets = [0, 3, 12, 13]
    numbers = [
        [offsets[batch] + i for batch, part in pieces for i in range(part.start, part.stop)]
        for pieces in (trained, judged)
    ]
    assert numbers[1] == [7, 15, 23, 31]
    assert sorted(numbers[0] + numbers[1]) == list(range(33))
    assert all((part.stop - part.start) * 16 <= max(max_tokens, 16) for _, part in trained)


def test_step_size_gives_32_steps_within_token_limits(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finetuning, "STEP_TOKENS", 8192)
    case = Case(source, tmp_path, samples=8)
    for tokens, step in ((16, 512), (2048, 512), (32_000, 1000), (262_144, 8192), (2**21, 8192)):
        case.targets.shapes = [torch.Size((tokens // 16, 16, HIDDEN))]
        inputs = BlockInputs(case.block, case.states, keep=False)
        trainer = finetuning._Trainer(inputs, case.targets, case.pruned, case.names, INT8)
        assert trainer._step_tokens == step


def test_few_samples_serve_for_training_and_validation(source: Path, tmp_path: Path) -> None:
    shapes = [torch.Size((VALIDATION_INTERVAL - 1, 16, 4))]
    trained, judged = finetuning._pieces(shapes, 10**6)
    assert trained == judged == [(0, slice(0, VALIDATION_INTERVAL - 1))]
    tuned = Case(source, tmp_path, samples=VALIDATION_INTERVAL - 1).run(INT8)
    assert tuned.error_after < tuned.error_before


def test_too_little_memory_is_explained(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*_: Any) -> None:
        raise torch.OutOfMemoryError("Tried to allocate 4.62 GiB")

    monkeypatch.setattr(finetuning._Trainer, "run", run)
    with pytest.raises(CalibrationError, match=r"memory of cpu .*4\.62 GiB.*--finetune 0"):
        Case(source, tmp_path).run(INT8)


# Conversions


MANY = 200  # samples; with fewer, training does not help reliably


@pytest.fixture(scope="module")
def ids(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_ids(tmp_path_factory.mktemp("ids") / "ids.npy", MANY)


def test_fine_tuned_model_is_nearer_to_the_dense_one(
    source: Path, tmp_path: Path, ids: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The report has errors of each block, and pruned weights stay zero.

    The second block is trained on the output of the first with its trained codes.
    """
    states: list[torch.Tensor] = []
    original = pipeline.finetune

    def record(inputs: BlockInputs, *arguments: Any) -> Finetuned:
        states.append(inputs.states[0].clone())
        return original(inputs, *arguments)

    monkeypatch.setattr(pipeline, "finetune", record)
    by_epochs = {}
    for epochs in (0, 4):
        rows = calibrated(source, tmp_path / str(epochs), ids, samples=MANY, finetune=epochs).layers
        by_epochs[epochs] = tensors_of(tmp_path / str(epochs))
        errors = {
            (row["name"].split(".")[2], row["block_error"], row["block_error_finetuned"]) for row in rows
        }
        if epochs:
            assert len(errors) == LLAMA.layers
            assert all(0 < after < before for _, before, after in errors)
        else:
            assert all(error[1:] == (None, None) for error in errors)
        assert all(row["violations"] == 0 for row in rows)
    names = [f"{name}.weight" for name in LLAMA.linears() if ".0." in name]
    assert all(not by_epochs[4][name][by_epochs[0][name] == 0].any() for name in names)
    assert any(not torch.equal(by_epochs[4][name], by_epochs[0][name]) for name in names)
    checkpoint = Checkpoint.open(source)
    with checkpoint.reader() as reader:
        block = open_model(checkpoint).load(reader, 0, CPU)
    for name in (name for stage in block.stages for name in stage):
        full = f"model.layers.0.{name}.weight"
        block.weights[f"{name}.weight"] = dequantize_rows(by_epochs[4][full], by_epochs[4][f"{full}_scale"])
    # float32 sums in another order where batches differ
    torch.testing.assert_close(states[1], block.output(states[0]), rtol=0, atol=1e-4)


def test_unpruned_layers_are_not_trained(source: Path, tmp_path: Path, ids: str) -> None:
    down = "model.layers.1.mlp.down_proj.weight"
    codes, scale = quantize_rows(tensors_of(source)[down].float(), INT8)
    calibrated(source, tmp_path / "out", ids, samples=60, finetune=1, layer=["down_proj=2_inf"])
    converted = tensors_of(tmp_path / "out")
    assert torch.equal(converted[down], codes)
    assert torch.equal(converted[f"{down}_scale"], scale)


def test_wanda_weights_are_not_fine_tuned(source: Path, tmp_path: Path, ids: str) -> None:
    for epochs in (0, 4):
        calibrated(source, tmp_path / str(epochs), ids, samples=6, method="wanda", finetune=epochs)
    assert snapshot(tmp_path / "0") == snapshot(tmp_path / "4")
