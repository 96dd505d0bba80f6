"""Distillation of the dense model into all layers of the pruned one: divergence, kept zeros, gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812  (its usual name)
from calibration import DEVICES, Killed, calibrated, large_worker, open_model, paced_worker, save, set_pace
from checkpoints import LLAMA, bert, llama, snapshot, tensors_of
from torch import Tensor

from slidesparse.calibrate import distill, samples
from slidesparse.calibrate.finetune import InputRounder, fake_quantize
from slidesparse.convert.budget import Budget
from slidesparse.errors import EnvironmentFault, SlideSparseError

TEXT_SAMPLES = 256
STEPS = 12  # of one second each by the fake clock
QUICK: dict[str, Any] = {"minutes": STEPS / 60, "epochs": 0}


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Advance the clock by one second at each reading, so that all runs have the same steps."""
    set_pace(monkeypatch)


CASES: list[dict[str, Any]] = [
    {"pattern": "2:4", "layer": ["1.*o_proj=dense"]},
    {"pattern": "4:6", "quant": "fp8", "rotate": "on"},
    {"budget": Budget(0.5, tokens=(16,))},
]


@DEVICES
@pytest.mark.parametrize("case", CASES, ids=str)
def test_distillation_reduces_divergence_and_keeps_zeros(
    source: Path, tmp_path: Path, ids: str, text: tuple[str, ...], case: dict[str, Any], device: str
) -> None:
    """0.55, 0.76 and 0.71 of the divergence on held-out text are left; unpruned tensors are unchanged."""
    report = calibrated(source, tmp_path / "pruned", ids, epochs=0, device=device, **case)
    options: dict[str, Any] = {"distill": text, "device": device, "minutes": 2, "epochs": 0}
    result = calibrated(source, tmp_path / "out", ids, **options, **case)
    assert result.distilled.steps == 120
    assert result.distillation.startswith("2 minutes on text.npy, 224 samples, 5376 tokens; about ")
    assert "6144 tokens are little text for --distill" in result.note
    assert result.distilled.summary.endswith("%; 120 steps in 2 minutes")
    broken = replace(result.distilled, after=distill.Loss(1e20, 1e20))
    assert "-> +inf%; 120 steps" in broken.summary
    assert result.distilled.after.divergence < 0.9 * result.distilled.before.divergence
    assert result.plan.patterns == report.plan.patterns
    before, after = tensors_of(tmp_path / "pruned"), tensors_of(tmp_path / "out")
    for name, w in after.items():
        if name.removesuffix(".weight") in result.plan.patterns:
            assert not w.float()[before[name].float() == 0].any()
        assert torch.equal(w.float(), before[name].float()) == (".layers." not in name)


@pytest.mark.parametrize(
    ("name", "quant"), [("llama biased", "int8"), ("llama biased", "fp8"), ("gemma2", "int8")]
)
def test_gradient_equals_that_of_blocks_one_after_the_other(
    name: str, quant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reference runs the blocks and the head of `Model`; Gemma 2 limits its logits."""
    save(name, tmp_path / "source")
    np.save(tmp_path / "ids.npy", np.random.default_rng(0).integers(3, 128, (20, 24)))
    gradients: dict[str, Tensor] = {}
    make, trainings = distill._Training.__init__, list[distill._Training]()

    def record(self: distill._Training, *arguments: Any) -> None:
        make(self, *arguments)
        trainings.append(self)

    def keep(tensors: list[tuple[Tensor, ...]], *_: Any) -> None:
        weights = trainings[0]._weights[len(gradients) // len(tensors)]
        gradients.update({w.name: t[3].clone() for w, t in zip(weights, tensors, strict=True)})

    monkeypatch.setattr(distill._Training, "__init__", record)
    monkeypatch.setattr(distill, "_update", keep)
    monkeypatch.setattr(distill, "LOGITS_PER_CHUNK", 50 * 128)  # several chunks
    ids = str(tmp_path / "ids.npy")
    calibrated(
        tmp_path / "source", tmp_path / "out", ids, quant=quant, distill=(ids,), minutes=1 / 60, epochs=0
    )
    (training,) = trainings
    model, leaves = open_model(tmp_path / "source"), dict[str, Tensor]()
    values = {w.name: w for weights in training._weights for w in weights}
    with model.checkpoint.reader() as reader:
        ends = model.ends(reader)
        x = dense_states = ends.embed(training._training_ids)  # all, in two passes of nine
        for number in range(model.blocks):
            block = model.load(reader, number)
            dense_states, prefix = block.output(dense_states), model.skeleton.prefix(number)
            for parameter in block.weights:
                weight = values[model.skeleton.stored[prefix + parameter]]
                leaves[weight.name] = weight.value.clone().requires_grad_()
                served = leaves[weight.name]
                block.weights[parameter] = fake_quantize(served, weight.dtype) if weight.dtype else served
            block.read = InputRounder(training._dtype, [n for group in block.groups for n in group])
            x = block.output(x)
        dense, pruned = (ends.logits(y.flatten(0, 1)).log_softmax(-1) for y in (dense_states, x))
    loss = F.kl_div(pruned, dense, reduction="batchmean", log_target=True)
    for weight, reference in zip(leaves, torch.autograd.grad(loss, [*leaves.values()]), strict=True):
        # another order of summation changes the last bits of float32, and so occasionally the rounding of an input
        assert (gradients[weight] - reference).norm() < 0.01 * reference.norm()


def test_blocks_of_one_structure_share_graphs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: one graph for dense blocks, and one with and one without gradients for pruned blocks."""
    save("qwen3", tmp_path / "source")
    np.save(tmp_path / "ids.npy", np.random.default_rng(0).integers(3, 128, (20, 24)))
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    def compile_blocks(_: distill._Training, function: Callable[..., Any]) -> Callable[..., Any]:
        if not hasattr(function, "__self__"):  # not of a block
            return function
        return torch.compile(function, backend=backend, fullgraph=True, dynamic=False)

    monkeypatch.setattr(distill._Training, "_compiled", compile_blocks)
    ids = str(tmp_path / "ids.npy")
    calibrated(tmp_path / "source", tmp_path / "out", ids, distill=(ids,), **QUICK)
    assert len(graphs) == 3


@pytest.mark.alone  # it starts processes that wait for each other
def test_processes_train_as_one(
    source: Path, tmp_path: Path, ids: str, text: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has all weights, or half of their rows; also from where another run was interrupted."""

    def run(name: str, processes: int, resume: bool = False) -> distill.Distilled:
        monkeypatch.setattr(distill, "_processes", lambda _: processes)
        options: dict[str, Any] = {"distill": text, "quant": "fp8", "resume": resume, **QUICK}
        report = calibrated(source, tmp_path / name, ids, **options)
        return report.distilled

    one, save_state = run("one", 1), distill._Training._save

    def interrupt(self: distill._Training, end: bool) -> None:
        monkeypatch.setattr(
            self, "_validation_loss", lambda: self._done.after
        )  # the last weights will be the best
        save_state(self, end)
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(distill, "SAVE_SECONDS", 5.0)
        patch.setattr(distill._Training, "_save", interrupt)
        with pytest.raises(Killed):
            run("resumed", 1)
    for name, worker in (("two", paced_worker), ("shared", large_worker), ("resumed", large_worker)):
        monkeypatch.setattr(distill, "_worker", worker)
        two = run(name, 2, resume=name == "resumed")
        assert one.steps == two.steps == STEPS
        assert two.before.divergence == pytest.approx(one.before.divergence, rel=1e-5)
        assert two.after.divergence == pytest.approx(one.after.divergence, rel=0.005)
        tensors, expected = tensors_of(tmp_path / name), tensors_of(tmp_path / "one")
        for tensor, w in expected.items():
            # Rounding of other sums moves up to 0.0005; gradients of half of the samples would move 0.0034
            assert (w.float() - tensors[tensor].float()).norm() < 0.0015 * w.float().norm()


@pytest.mark.parametrize("dtype", [torch.int8, None])
def test_steps_equal_those_of_adam(dtype: torch.dtype | None) -> None:
    """Up to rounding of the moments to BF16; zeros stay zero, and the served tensor follows."""
    generator = torch.Generator().manual_seed(0)
    value = torch.randn(8, 16, generator=generator)
    value[:, ::2] = 0.0
    reference = value.clone().requires_grad_()
    weight = distill._Weight("w", value.clone(), value, dtype, 0)
    optimizer = torch.optim.Adam([reference], 0.01 * float(weight.size), distill.BETAS, distill.EPSILON)
    for step in range(1, 6):
        reference.grad = 1e-6 * torch.randn(8, 16, generator=generator)
        rates = [0.01, *(1 - beta for beta in distill.BETAS), *(1 - beta**step for beta in distill.BETAS)]
        tensors = weight.value, weight.moment, weight.square, reference.grad, weight.parameter, weight.size
        distill._update([tensors], [dtype], torch.tensor(rates))
        optimizer.step()
    is_kept = value != 0
    assert not weight.value[~is_kept].any()
    moved = (reference.detach() - value)[is_kept]
    # moments in BF16 have 8 bits: five steps err by less than five times 2^-8
    assert ((weight.value - value)[is_kept] - moved).abs().max() < 0.02 * moved.abs().max()
    assert torch.equal(weight.parameter, fake_quantize(weight.value, dtype) if dtype else weight.value)


def test_each_sample_is_used_once_per_epoch() -> None:
    indices = [i for step in range(6) for i in distill._samples(10, 5 * step, 5)]
    epochs = [indices[:10], indices[10:20], indices[20:]]
    assert [sorted(epoch) for epoch in epochs] == [list(range(10))] * 3
    assert epochs[0] != epochs[1]


def test_distillation_that_worsens_the_model_is_discarded(
    source: Path, tmp_path: Path, ids: str, text: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is left is the model with fine-tuned blocks, from which distillation starts."""
    monkeypatch.setattr(distill, "RATE", 1e6)
    monkeypatch.setattr(distill, "MAX_RATE", 1e6)
    report = calibrated(source, tmp_path / "out", ids, distill=text, **{**QUICK, "epochs": 1})
    calibrated(source, tmp_path / "pruned", ids, epochs=1)
    assert report.distilled.after == report.distilled.before
    assert snapshot(tmp_path / "out") == snapshot(tmp_path / "pruned")


def test_unusable_texts_and_models_are_refused(source: Path, tmp_path: Path, ids: str) -> None:
    """Before anything is written."""
    np.save(tmp_path / "short.npy", np.arange(20))
    np.save(tmp_path / "one.npy", np.zeros((1, 24), int))
    np.save(tmp_path / "strange.npy", np.full((9, 24), LLAMA.vocabulary))
    np.save(tmp_path / "narrow.npy", np.zeros((9, 10), int))
    encoder, embedding = bert(tmp_path / "bert"), llama(tmp_path / "m")
    (embedding / "modules.json").write_text("[]")
    for folder, data, words in (
        (source, "missing.jsonl", "--distill: 'missing.jsonl' is not a file"),
        (source, "short.npy", "short.npy gives no sample of 24 tokens"),
        (source, "one.npy", "one.npy gives one sample, but two are needed"),
        (source, f"narrow.npy {ids}", "have 10 to 24 tokens, but must be of one length: .* --seqlen 10"),
        (source, "strange.npy", "holds token ids from 40 to 40, but the vocabulary"),
        (encoder, "random", "--distill is for models that predict tokens, but config.json names BertModel"),
        (embedding, "random", "--distill is for .* modules.json marks this as an embedding"),
    ):
        texts = tuple(str(tmp_path / text) if text.endswith(".npy") else text for text in data.split())
        calib = "random" if data == "random" else ids
        with pytest.raises(SlideSparseError, match=words):
            calibrated(folder, tmp_path / "out", calib, seqlen=8 if calib == "random" else 24, distill=texts)
    assert not list(tmp_path.glob("*out*"))


def test_notes_on_both_texts(source: Path, tmp_path: Path, ids: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "MAX_TOKENS", 1000)
    report = calibrated(source, tmp_path / "out", ids, samples=9, distill=("random",), dry_run=True)
    assert report.note.startswith("random tokens do not represent the text")
    assert report.note.endswith("gives 6 samples of at most 24 tokens, 9 were requested")


def test_too_little_memory_is_refused(
    source: Path, tmp_path: Path, ids: str, text: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distill, "LOGITS_PER_CHUNK", 2**50)
    with pytest.raises(EnvironmentFault, match="trains all layers at once.*GB of memory, but the device cpu"):
        calibrated(source, tmp_path / "out", ids, distill=text)
