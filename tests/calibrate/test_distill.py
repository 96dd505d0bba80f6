"""Distillation of the dense model into all layers of the pruned one: divergence, kept zeros, gradients."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812  (its usual name)
from calibration import DEVICES, calibrated, open_model, save, write_ids
from checkpoints import LLAMA, bert, edit_json, llama, snapshot, tensors_of
from torch import Tensor

from slidesparse.calibrate import distill
from slidesparse.calibrate.finetune import InputRounder, fake_quantize
from slidesparse.convert.budget import Budget
from slidesparse.errors import EnvironmentFault, SlideSparseError

STEPS = 12  # of one second each by the fake clock
QUICK: dict[str, Any] = {"minutes": STEPS / 60, "epochs": 0}


@pytest.fixture
def text(tmp_path: Path) -> tuple[str, ...]:
    return (write_ids(tmp_path / "text.npy", samples=256),)


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Advance the clock by one second at each reading, so that all runs have the same steps."""
    seconds = iter(range(10**6))
    monkeypatch.setattr(distill, "time", SimpleNamespace(monotonic=lambda: float(next(seconds))))
    monkeypatch.setattr(distill, "RATE", 0.01)
    monkeypatch.setitem(distill.STEP_TOKENS, "cpu", 960)
    monkeypatch.setitem(distill.PIECE_TOKENS, "cpu", 480)


CASES: list[dict[str, Any]] = [
    {"pattern": "2:4", "layer": ["1.*o_proj=dense"]},
    {"pattern": "4:6", "quant": "fp8", "rotate": "on"},
    {"budget": Budget(zeros=0.2)},
]


@DEVICES
@pytest.mark.parametrize("case", CASES, ids=str)
def test_distillation_reduces_divergence_and_keeps_zeros(
    source: Path, tmp_path: Path, ids: str, text: tuple[str, ...], case: dict[str, Any], device: str
) -> None:
    """0.68 to 0.78 of the divergence on held-out text is left, over three texts; unpruned tensors are unchanged."""
    report = calibrated(source, tmp_path / "pruned", ids, epochs=0, device=device, **case)
    options: dict[str, Any] = {"distill": text, "device": device, "minutes": 0.25, "epochs": 0}
    result = calibrated(source, tmp_path / "out", ids, **options, **case)
    assert result.distilled
    assert result.distilled.steps == 15
    assert result.distillation.startswith("0.25 minutes on text.npy, 224 samples, 5376 tokens; about ")
    assert result.distilled.summary.endswith("%; 15 steps in 0.25 minutes")
    assert result.distilled.after.divergence < 0.9 * result.distilled.before.divergence
    assert result.plan.patterns == report.plan.patterns
    before, after = tensors_of(tmp_path / "pruned"), tensors_of(tmp_path / "out")
    for name, w in after.items():
        if name.removesuffix(".weight") in result.plan.patterns:
            assert not w.float()[before[name].float() == 0].any()
            assert not torch.equal(w.float(), before[name].float())
        elif name.removesuffix(".weight_scale") not in result.plan.patterns:
            assert torch.equal(w, before[name])


@pytest.mark.parametrize("quant", ["int8", "fp8"])
def test_gradient_equals_that_of_torch_for_the_whole_model(
    source: Path, tmp_path: Path, ids: str, text: tuple[str, ...], quant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reference is the gradient of torch's divergence through all blocks at once."""
    gradients: list[Tensor] = []
    monkeypatch.setattr(
        distill._Weight, "update", lambda self, gradient, *_: gradients.append(gradient.clone())
    )
    monkeypatch.setattr(distill, "LOGITS_PER_CHUNK", 50 * LLAMA.vocabulary)  # several chunks
    trainings: list[distill._Training] = []
    make = distill._Training.__init__

    def record(self: distill._Training, *arguments: Any) -> None:
        make(self, *arguments)
        trainings.append(self)

    monkeypatch.setattr(distill._Training, "__init__", record)
    calibrated(source, tmp_path / "out", ids, quant=quant, distill=text, minutes=1 / 60, epochs=0)
    (training,) = trainings
    leaves: list[Tensor] = []
    chosen = training._training_ids[distill._step_samples(len(training._training_ids), training._per_step, 0)]
    x = dense_states = training._embed(chosen)
    for dense, pruned, weights in zip(training._dense, training._pruned, training._weights, strict=True):
        dense_states, block = dense.output(dense_states), pruned.copy()
        for name, weight in weights.items():
            leaves.append(weight.value.clone().requires_grad_())
            block.weights[f"{name}.weight"] = fake_quantize(leaves[-1], training._dtype)
        block.read = InputRounder(training._dtype, list(weights))
        x = block.output(x)
    dense_logprobs, pruned_logprobs = (
        training._logits(y.flatten(0, 1)).log_softmax(-1) for y in (dense_states, x)
    )
    expected = torch.autograd.grad(
        F.kl_div(pruned_logprobs, dense_logprobs, reduction="batchmean", log_target=True), leaves
    )
    backwards = [g for number in (1, 0) for g in expected[7 * number : 7 * number + 7]]
    for actual, reference in zip(gradients, backwards, strict=True):
        # another order of summation changes the last bits of float32, and so occasionally the rounding of an input
        assert (actual - reference).norm() < 0.01 * reference.norm()


@pytest.mark.parametrize("quant", [torch.int8, torch.float8_e4m3fn])
def test_blocks_of_one_structure_share_a_compiled_graph(
    tmp_path: Path, quant: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The graph of one block serves the next, as on a GPU, and its results are bitwise those of the block."""
    save("qwen3", tmp_path)
    model, graphs, compile_by_torch = open_model(tmp_path), [], torch.compile

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(
        torch, "compile", lambda f, **how: compile_by_torch(f, backend=backend, fullgraph=True, **how)
    )
    names = frozenset(name for group in model.groups(0) for name in group)
    compiled = distill._runner(model.skeleton.blocks[0], names, quant, "cuda")
    x = torch.randn(2, 48, model.hidden, generator=torch.Generator().manual_seed(0))
    with model.checkpoint.reader() as reader:
        for number in range(model.blocks):
            block = model.load(reader, number)
            block.read = InputRounder(quant, names)
            leaves = [block.weights[f"{name}.weight"].requires_grad_() for name in sorted(names)]
            outputs = compiled(block.weights, x, *model.call(number, 2, 48)), block.output(x)
            for actual, expected in zip(
                *([out, *torch.autograd.grad(out.square().sum(), leaves)] for out in outputs), strict=True
            ):
                assert torch.equal(actual, expected)
    assert len(graphs) == 1


def test_steps_equal_those_of_adam() -> None:
    """Steps are equal up to rounding to BF16 if the second moment is a product of one factor per row and one per
    column.
    """
    generator = torch.Generator().manual_seed(0)
    value = torch.randn(8, 16, generator=generator)
    value[:, ::2] = 0.0
    weight = distill._Weight(value.clone())
    reference = value.clone().requires_grad_()
    size = float(value[value != 0].square().mean().sqrt())
    optimizer = torch.optim.Adam([reference], 0.01 * size, distill.BETAS, distill.EPSILON)
    scale = torch.rand(8, 1, generator=generator) * torch.rand(1, 16, generator=generator)
    for step in range(1, 6):
        signs = torch.randint(2, (8, 16), generator=generator) * 2 - 1
        reference.grad = 1e-6 * step * scale * signs
        weight.update(reference.grad.clone(), 0.01, step)
        optimizer.step()
    is_kept = value != 0
    assert not weight.value[~is_kept].any()
    moved = (reference.detach() - value)[is_kept]
    # moments in BF16 have 8 bits: five steps err by less than five times 2^-8
    assert ((weight.value - value)[is_kept] - moved).abs().max() < 0.02 * moved.abs().max()


def test_each_sample_is_used_once_per_epoch() -> None:
    indices = [i for step in range(6) for i in distill._step_samples(10, 5, step)]
    epochs = [indices[:10], indices[10:20], indices[20:]]
    assert [sorted(epoch) for epoch in epochs] == [list(range(10))] * 3
    assert epochs[0] != epochs[1]


def test_distillation_that_worsens_the_model_is_discarded(
    source: Path, tmp_path: Path, ids: str, text: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distill, "RATE", 1e6)
    report = calibrated(source, tmp_path / "out", ids, distill=text, **QUICK)
    calibrated(source, tmp_path / "pruned", ids, epochs=0)
    assert report.distilled
    assert report.distilled.after == report.distilled.before
    assert snapshot(tmp_path / "out") == snapshot(tmp_path / "pruned")


def test_unusable_texts_and_models_are_refused(source: Path, tmp_path: Path, ids: str) -> None:
    """Before anything is written."""
    np.save(tmp_path / "short.npy", np.arange(20))
    np.save(tmp_path / "one.npy", np.zeros((1, 24), int))
    np.save(tmp_path / "strange.npy", np.full((9, 24), LLAMA.vocabulary))
    encoder, headless, embedding = (
        bert(tmp_path / "bert"),
        llama(tmp_path / "headless"),
        llama(tmp_path / "m"),
    )
    edit_json(headless / "config.json", architectures=["LlamaModel"])
    (embedding / "modules.json").write_text("[]")
    for folder, data, words in (
        (source, "missing.jsonl", "--distill: 'missing.jsonl' is not a file"),
        (source, "short.npy", "short.npy gives no sample of 24 tokens"),
        (source, "one.npy", "one.npy gives one sample, but two are needed"),
        (source, "strange.npy", "holds token ids from 40 to 40, but the vocabulary"),
        (encoder, "random", "--distill is for models that predict tokens, but config.json names BertModel"),
        (headless, "random", "--distill is for .* names LlamaModel"),
        (embedding, "random", "--distill is for .* modules.json marks this as an embedding"),
    ):
        path = str(tmp_path / data) if data.endswith(".npy") else data
        calib = "random" if data == "random" else ids
        with pytest.raises(SlideSparseError, match=words):
            calibrated(
                folder, tmp_path / "out", calib, seqlen=8 if calib == "random" else 24, distill=(path,)
            )
    assert not list(tmp_path.glob("*out*"))


def test_too_little_memory_is_refused(
    source: Path, tmp_path: Path, ids: str, text: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distill, "LOGITS_PER_CHUNK", 2**50)
    with pytest.raises(
        EnvironmentFault, match="trains all layers at once.*GB of memory, but this machine has"
    ):
        calibrated(source, tmp_path / "out", ids, distill=text)
