"""Training the weights of a transformer block after pruning: better as served, zeros kept, the same bits each time."""

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
    """Steps have few tokens, so that there are many."""
    monkeypatch.setattr(finetuning, "STEP_TOKENS", 120)
    monkeypatch.setitem(finetuning.PIECE_TOKENS, "cpu", 64)


class Case:
    """A block pruned by magnitude, what it reads, and what the dense block gives."""

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
        """The error on the samples held out, by a block whose linear layers quantize weights and inputs themselves."""
        changed = {f"{name}.weight": w for name, w in weights.items()}
        block = QuantizedBlock(self.block.sizes, self.block.weights | changed)
        block.dtype = dtype
        x, wanted = (
            torch.cat([states[batch] for batch in range(2)])[VALIDATION_INTERVAL - 1 :: VALIDATION_INTERVAL]
            for states in (self.states, self.targets)
        )
        lost = (block.output(x) - wanted).square().sum(-1) / wanted.square().sum(-1)
        return float(lost.mean().sqrt())


class QuantizedBlock(DecoderBlock):
    """A decoder layer as it is served: quantized to ``dtype`` if that is given."""

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
    """The samples were not trained on; what was pruned stays zero, and a second run gives the same bits."""
    case = Case(source, tmp_path)
    found, again = case.run(dtype), case.run(dtype)
    assert (found.error_before, found.error_after) == (again.error_before, again.error_after)
    for name, w in case.pruned.items():
        assert torch.equal(found.weights[name], again.weights[name])
        assert not found.weights[name][w == 0].any()
        assert not torch.equal(found.weights[name], w)
        assert found.weights[name].dtype == w.dtype
        assert not found.weights[name].requires_grad
    # float32 sums of the same numbers in another order, over errors of some percent
    assert found.error_before == pytest.approx(case.error(case.pruned, dtype), rel=1e-4)
    assert found.error_after == pytest.approx(case.error(found.weights, dtype), rel=1e-4)
    assert found.error_after < 0.97 * found.error_before
    assert found.error_after < case.run(dtype, epochs=1).error_after


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_fine_tuning_on_a_gpu_is_deterministic(
    source: Path, tmp_path: Path, dtype: torch.dtype | None
) -> None:
    """The samples are so long that the gradients of attention are sums over several of its blocks."""
    case = Case(source, tmp_path, samples=24, tokens=1000, device=torch.device("cuda", 0))
    found, again = case.run(dtype), case.run(dtype)
    assert found.error_after == again.error_after < 0.97 * found.error_before
    for name, w in case.pruned.items():
        assert torch.equal(found.weights[name], again.weights[name])
        assert not found.weights[name][w == 0].any()


@pytest.mark.parametrize("how", [Scores(0.3), Scores(0.3, causal=False), Scores(0.3, window=4)])
def test_recomputed_attention_has_the_same_gradients(how: Scores) -> None:
    leaves = [torch.randn(2, 3, 7, 8, requires_grad=True) for _ in range(3)]
    wanted = torch.autograd.grad(attention(*leaves, how).square().sum(), leaves)
    found = torch.autograd.grad(finetuning._Attention.apply(*leaves, how).square().sum(), leaves)
    assert not torch.are_deterministic_algorithms_enabled()
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.gpu
@pytest.mark.parametrize("how", [Scores(0.1), Scores(0.1, window=300), Scores(0.1, cap=2.0)])
def test_attention_on_a_gpu_has_the_same_gradients(how: Scores) -> None:
    """They agree up to the rounding of BF16, and have the same bits twice."""
    leaves = [torch.randn(2, 3, 999, 64, requires_grad=True) for _ in range(3)]
    wanted = torch.autograd.grad(attention(*leaves, how).square().sum(), leaves)
    moved = [leaf.detach().cuda().requires_grad_() for leaf in leaves]
    with sdpa_kernel(finetuning.ATTENTION["cuda"]):
        found, again = (
            torch.autograd.grad(finetuning.attend(*moved, how).float().square().sum(), moved)
            for _ in range(2)
        )
    for ours, twice, theirs in zip(found, again, wanted, strict=True):
        assert torch.equal(ours, twice)
        assert float((ours.cpu() - theirs).norm()) < 0.05 * float(theirs.norm())


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
    found = case.run(INT8)
    assert found.error_after == found.error_before
    assert all(torch.equal(found.weights[name], w) for name, w in case.pruned.items())


def test_layer_of_zeros_stays_zero(source: Path, tmp_path: Path) -> None:
    case = Case(source, tmp_path)
    case.pruned["mlp.up_proj"].zero_()
    found = case.run(INT8)
    assert not found.weights["mlp.up_proj"].any()
    assert found.error_after < found.error_before


@pytest.mark.parametrize("most", [1, 40, 64, 10**6])
def test_each_sample_is_in_one_split(most: int) -> None:
    """One of eight is held out, counted over all batches; pieces have at least a sample, and at most so many tokens."""
    shapes = [torch.Size((samples, 16, 4)) for samples in (3, 9, 1, 20)]
    trained, judged = finetuning._pieces(shapes, most)
    first = [0, 3, 12, 13]
    numbers = [
        [first[batch] + i for batch, part in pieces for i in range(part.start, part.stop)]
        for pieces in (trained, judged)
    ]
    assert numbers[1] == [7, 15, 23, 31]
    assert sorted(numbers[0] + numbers[1]) == list(range(33))
    assert all((part.stop - part.start) * 16 <= max(most, 16) for _, part in trained)


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
    found = Case(source, tmp_path, samples=VALIDATION_INTERVAL - 1).run(INT8)
    assert found.error_after < found.error_before


def test_too_little_memory_is_explained(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*_: Any) -> None:
        raise torch.OutOfMemoryError("Tried to allocate 4.62 GiB")

    monkeypatch.setattr(finetuning._Trainer, "run", run)
    with pytest.raises(CalibrationError, match=r"memory of cpu .*4\.62 GiB.*--finetune 0"):
        Case(source, tmp_path).run(INT8)


# In a conversion


MANY = 200  # samples; fewer do not show that training helps


@pytest.fixture(scope="module")
def ids(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_ids(tmp_path_factory.mktemp("ids") / "ids.npy", MANY)


def test_fine_tuned_model_is_nearer_to_the_dense_one(
    source: Path, tmp_path: Path, ids: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The report says how near, block by block; the zeros are where they were.

    The second block's training starts from the first one's output with its trained codes.
    """
    read: list[torch.Tensor] = []
    plain = pipeline.finetune

    def record(inputs: BlockInputs, *rest: Any) -> Finetuned:
        read.append(inputs.states[0].clone())
        return plain(inputs, *rest)

    monkeypatch.setattr(pipeline, "finetune", record)
    found = {}
    for epochs in (0, 4):
        rows = calibrated(source, tmp_path / str(epochs), ids, samples=MANY, finetune=epochs).layers
        found[epochs] = tensors_of(tmp_path / str(epochs))
        errors = {
            (row["name"].split(".")[2], row["block_error"], row["block_error_finetuned"]) for row in rows
        }
        if epochs:
            assert len(errors) == LLAMA.layers
            assert all(0 < after < before for _, before, after in errors)
        else:
            assert all(error[1:] == (None, None) for error in errors)
        assert all(row["violations"] == 0 for row in rows)
    first = [f"{name}.weight" for name in LLAMA.linears() if ".0." in name]
    assert all(not found[4][name][found[0][name] == 0].any() for name in first)
    assert any(not torch.equal(found[4][name], found[0][name]) for name in first)
    checkpoint = Checkpoint.open(source)
    with checkpoint.reader() as reader:
        block = open_model(checkpoint).load(reader, 0, CPU)
    for name in (name for stage in block.stages for name in stage):
        full = f"model.layers.0.{name}.weight"
        block.weights[f"{name}.weight"] = dequantize_rows(found[4][full], found[4][f"{full}_scale"])
    # the same float32 sums, in another order where a batch is another
    torch.testing.assert_close(read[1], block.output(read[0]), rtol=0, atol=1e-4)


def test_unpruned_layers_are_not_trained(source: Path, tmp_path: Path, ids: str) -> None:
    down = "model.layers.1.mlp.down_proj.weight"
    codes, scale = quantize_rows(tensors_of(source)[down].float(), INT8)
    calibrated(source, tmp_path / "out", ids, samples=60, finetune=1, layer=["down_proj=2_inf"])
    found = tensors_of(tmp_path / "out")
    assert torch.equal(found[down], codes)
    assert torch.equal(found[f"{down}_scale"], scale)


def test_wanda_weights_are_not_fine_tuned(source: Path, tmp_path: Path, ids: str) -> None:
    for epochs in (0, 4):
        calibrated(source, tmp_path / str(epochs), ids, samples=6, method="wanda", finetune=epochs)
    assert snapshot(tmp_path / "0") == snapshot(tmp_path / "4")
