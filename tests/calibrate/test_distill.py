"""Distillation of the dense model into all layers of the pruned one: divergence, kept zeros, resumption."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812  (its usual name)
from calibration import DEVICES, Killed, calibrated, write_ids
from checkpoints import LLAMA, bert, llama, refused, snapshot, tensors_of
from commands import Done
from torch import Tensor

from slidesparse.calibrate import distill
from slidesparse.calibrate.finetune import InputRounder, _fake_quantize
from slidesparse.calibrate.models import open_model
from slidesparse.calibrate.task import Calibration
from slidesparse.checkpoint.storage import Checkpoint
from slidesparse.convert.budget import Budget
from slidesparse.errors import CalibrationError, EnvironmentFault, SlideSparseError
from slidesparse.pattern import SlidePattern

STEPS = 12  # of one second each by the fake clock
QUICK: dict[str, Any] = {"minutes": STEPS / 60, "finetune": 0}


@pytest.fixture
def text(tmp_path: Path) -> str:
    return write_ids(tmp_path / "text.npy", samples=256)


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Advance the clock by one second at each reading, so that all runs have the same steps."""
    seconds = iter(range(10**6))
    monkeypatch.setattr(distill, "time", SimpleNamespace(monotonic=lambda: float(next(seconds))))
    monkeypatch.setattr(distill, "RATE", 0.01)
    monkeypatch.setitem(distill.STEP_TOKENS, "cpu", 960)
    monkeypatch.setitem(distill.PIECE_TOKENS, "cpu", 480)


CASES: list[dict[str, Any]] = [
    {"pattern": "2:4", "skip": ["1.*o_proj"]},
    {"pattern": "4:6", "quant": "fp8", "rotate": "on"},
    {"pattern": "2:4@50%"},
    {"pattern": SlidePattern(8), "budget": Budget(zeros=0.2)},
]


@DEVICES
@pytest.mark.parametrize("case", CASES, ids=str)
def test_distillation_reduces_divergence_and_keeps_zeros(
    source: Path, tmp_path: Path, ids: str, text: str, case: dict[str, Any], device: str
) -> None:
    """The divergence is measured on held-out text; unpruned tensors are unchanged."""
    report = calibrated(source, tmp_path / "pruned", ids, finetune=0, device=device, **case)
    result = calibrated(
        source, tmp_path / "out", ids, distill=text, device=device, minutes=0.5, finetune=0, **case
    )
    assert result.distilled
    assert result.distilled.steps == 30
    assert result.distilled.after.divergence < 0.75 * result.distilled.before.divergence
    assert result.patterns == report.patterns
    before, after = tensors_of(tmp_path / "pruned"), tensors_of(tmp_path / "out")
    for name, w in after.items():
        if name.removesuffix(".weight") in result.pruned:
            assert not w.float()[before[name].float() == 0].any()
            assert not torch.equal(w.float(), before[name].float())
        elif name.removesuffix(".weight_scale") not in result.pruned:
            assert torch.equal(w, before[name])


def test_packed_layout_has_the_weights_of_the_dense_one(
    source: Path, tmp_path: Path, ids: str, text: str
) -> None:
    """The model is rotated, and its channels are permuted."""
    for layout in ("dense", "packed"):
        calibrated(source, tmp_path / layout, ids, layout=layout, distill=text, rotate="on", **QUICK)
    process = Done("verify", tmp_path / "dense", tmp_path / "packed")
    assert process.code == 0, process.out


@pytest.mark.parametrize("quant", ["int8", "fp8"])
def test_gradient_equals_that_of_torch_for_the_whole_model(
    source: Path, tmp_path: Path, ids: str, text: str, quant: str, monkeypatch: pytest.MonkeyPatch
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
    calibrated(source, tmp_path / "out", ids, quant=quant, distill=text, minutes=1 / 60, finetune=0)
    (training,) = trainings
    leaves: list[Tensor] = []
    chosen = training._training_ids[distill._step_samples(len(training._training_ids), training._per_step, 0)]
    x = dense_states = training._embed(chosen)
    for dense, pruned, weights in zip(training._dense, training._pruned, training._weights, strict=True):
        dense_states, block = dense.output(dense_states), pruned.copy()
        for name, weight in weights.items():
            leaves.append(weight.value.clone().requires_grad_())
            block.weights[f"{name}.weight"] = _fake_quantize(leaves[-1], training._dtype)
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
def test_blocks_share_one_compiled_graph(source: Path, quant: torch.dtype) -> None:
    """The graph of one block serves the next, as on a GPU, and its results are bitwise those of eager torch."""
    model = open_model(Checkpoint.open(source))
    names = frozenset(name for stage in model.stages for name in stage)
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(distill._block_output, backend=backend, fullgraph=True, dynamic=False)
    x = torch.randn(2, 48, model.hidden, generator=torch.Generator().manual_seed(0))
    with model.checkpoint.reader() as reader:
        for number in range(model.blocks):
            block = model.load(reader, number, torch.device("cpu"))
            weights = block.weights | {
                name: w.clone().requires_grad_()
                for name, w in block.weights.items()
                if name.removesuffix(".weight") in names
            }
            leaves = [w for w in weights.values() if w.requires_grad]
            results = []
            for run in (compiled, distill._block_output):
                out = run(type(block), block.sizes, weights, names, quant, x)
                results.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
            for compiled_tensor, eager_tensor in zip(*results, strict=True):
                assert torch.equal(compiled_tensor, eager_tensor)
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
    assert ((weight.value - value)[is_kept] - moved).abs().max() < 0.02 * moved.abs().max()


def test_each_sample_is_used_once_per_epoch() -> None:
    indices = [i for step in range(6) for i in distill._step_samples(10, 5, step)]
    epochs = [indices[:10], indices[10:20], indices[20:]]
    assert [sorted(epoch) for epoch in epochs] == [list(range(10))] * 3
    assert epochs[0] != epochs[1]


def test_killed_distillation_resumes(
    source: Path, tmp_path: Path, ids: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resumed run continues from the last saved state and writes the bytes of an uninterrupted run."""
    monkeypatch.setattr(distill, "SAVE_SECONDS", 5.0)
    monkeypatch.setattr(distill, "SAVE_PART", 0)
    calibrated(source, tmp_path / "whole", ids, distill=text, **QUICK)
    steps: list[int] = []
    step = distill._Training._step

    def counted(self: distill._Training, rate: float) -> None:
        if len(steps) == 8:
            raise Killed
        steps.append(self._steps)
        step(self, rate)

    monkeypatch.setattr(distill._Training, "_step", counted)
    with pytest.raises(Killed):
        calibrated(source, tmp_path / "out", ids, distill=text, **QUICK)
    resumed_options = {"resume": True, "distill": text, **QUICK}
    changes: list[tuple[dict[str, Any], str]] = [
        ({"minutes": 1.0}, "minutes was 0.2, is 1.0"),
        ({"distill": ids}, "distill was ["),
        ({"distill": None, "minutes": None}, "distill was ["),
    ]
    for change, fact in changes:
        with pytest.raises(CalibrationError) as error:
            calibrated(source, tmp_path / "out", ids, **{**resumed_options, **change})
        assert fact in str(error.value)
    steps.clear()
    report = calibrated(source, tmp_path / "out", ids, **resumed_options)
    assert 0 < steps[0] <= 8
    assert steps == list(range(steps[0], STEPS))
    assert report.distilled
    assert report.distilled.steps == STEPS
    assert snapshot(tmp_path / "out") == snapshot(tmp_path / "whole")
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["ids.npy", "out", "text.npy", "whole"]


def test_resume_does_not_repeat_finished_training(
    source: Path, tmp_path: Path, ids: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(*_: Any) -> None:
        raise Killed

    from slidesparse.convert import stream

    with monkeypatch.context() as patch:
        patch.setattr(stream, "_write", die)
        with pytest.raises(Killed):
            calibrated(source, tmp_path / "out", ids, distill=text, **QUICK)
    monkeypatch.setattr(distill._Training, "_step", die)
    report = calibrated(source, tmp_path / "out", ids, distill=text, resume=True, **QUICK)
    assert report.distilled
    assert report.distilled.steps == STEPS


def test_distillation_that_worsens_the_model_is_discarded(
    source: Path, tmp_path: Path, ids: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distill, "RATE", 1e6)
    report = calibrated(source, tmp_path / "out", ids, distill=text, **QUICK)
    calibrated(source, tmp_path / "pruned", ids, finetune=0)
    assert report.distilled
    assert report.distilled.after == report.distilled.before
    assert snapshot(tmp_path / "out") == snapshot(tmp_path / "pruned")


def test_convert_prints_and_reports_distillation(source: Path, tmp_path: Path, ids: str, text: str) -> None:
    command = ["convert", source, tmp_path / "out", "-s", "2:4", "--calib", ids, "--seqlen", 24]
    command += ["--device", "cpu", "--rotate", "off", "--finetune", 0, "--distill", text, "--minutes", 0.1]
    process = Done(*command, "--dry-run")
    assert process.code == 0, process.err
    line = next(line for line in process.out.splitlines() if line.startswith("distilled"))
    assert line.startswith("distilled 0.1 minutes on text.npy, 224 samples, 5376 tokens; about ")
    report = tmp_path / "report.json"
    process = Done(*command, "--report", report)
    assert process.code == 0, process.err
    line = next(line for line in process.out.splitlines() if line.startswith("distilled"))
    assert line.endswith("; 6 steps in 0.1 minutes")
    distilled = json.loads(report.read_text())["distilled"]
    assert distilled["steps"] == 6
    assert distilled["after"]["divergence"] < distilled["before"]["divergence"]


def test_distill_refuses_invalid_options(source: Path, tmp_path: Path, ids: str, text: str) -> None:
    def refuses(
        message: str, folder: Path = source, error: type[Exception] = CalibrationError, **changes: Any
    ) -> None:
        options = {"seqlen": 24, "device": "cpu", "rotate": "off", "distill": text, **changes}
        with pytest.raises(error, match=message):
            calibrated(folder, tmp_path / "out", str(options.pop("calib", ids)), **options)
        assert not [path for path in tmp_path.iterdir() if "out" in path.name]

    short, single, odd = (tmp_path / f"{name}.npy" for name in ("short", "one", "strange"))
    np.save(short, np.arange(20))
    np.save(single, np.zeros((1, 24), int))
    np.save(odd, np.full((9, 24), LLAMA.vocabulary))
    refuses("--distill 'missing.npy' is not a file", distill="missing.npy")
    refuses("--distill 'text.txt' is not a supported type", distill="text.txt")
    refuses("gives no sample of 24 tokens; give more text", distill=str(short))
    refuses("one.npy gives one sample, but two are needed", distill=str(single))
    strange_ids = "--distill .*strange.npy holds token ids from 40 to 40, but the vocabulary"
    refuses(strange_ids, error=SlideSparseError, distill=str(odd))
    refuses("--minutes 3 is the duration of distillation", distill=None, minutes=3.0)
    for minutes in (0.0, -1.0, float("nan"), float("inf")):
        refuses("--minutes .* must be more than 0", minutes=minutes)
    encoder = bert(tmp_path / "bert")
    refuses("--distill is for language models", encoder, calib="random", seqlen=8, distill="random")
    refuses("--distill is for .* names LlamaModel", _headless(tmp_path), calib="random", seqlen=8)
    embedding = llama(tmp_path / "embedding")
    (embedding / "modules.json").write_text("[]")
    refuses(
        "--distill is for .* modules.json marks this as an embedding", embedding, calib="random", seqlen=8
    )


def _headless(folder: Path) -> Path:
    path = llama(folder / "headless", lm_head__weight=None)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "architectures": ["LlamaModel"]}))
    return path


def test_distill_refuses_too_little_memory(
    source: Path, ids: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distill, "LOGITS_PER_CHUNK", 2**50)
    messages = ("--distill trains all layers at once", "GB of memory, but this machine has")
    calibration = Calibration(ids, seqlen=24, device="cpu", distill=text)
    refused(source, *messages, error=EnvironmentFault, pattern="2:4", calibration=calibration)
