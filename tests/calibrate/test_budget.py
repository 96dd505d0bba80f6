"""Patterns chosen for a budget: optimality of the choice, losses against transformers, and the measured budget."""

from __future__ import annotations

import itertools
import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812  (its usual name)
from calibration import DEVICES, Killed, calibrated, random_decoder, write_ids
from checkpoints import LLAMA, bert, config_of, snapshot, tensors_of
from hypothesis import given, settings
from hypothesis import strategies as st
from slidesparse.calibrate.models import open_model
from slidesparse.methods.sparsegpt import damping_for, factor, sparsegpt

from slidesparse.calibrate import losses
from slidesparse.calibrate.losses import layer_losses, whole_loss
from slidesparse.calibrate.pipeline import calibrate
from slidesparse.calibrate.resume import WorkFolder
from slidesparse.calibrate.task import Calibration, no_progress, prepare
from slidesparse.checkpoint.inspection import inspect
from slidesparse.checkpoint.storage import Checkpoint
from slidesparse.convert import choose
from slidesparse.convert.budget import PATTERNS, AllocationProblem, Budget, Candidate, Choice
from slidesparse.convert.choose import Attempt, next_limit
from slidesparse.convert.report import Report
from slidesparse.convert.times import LayerTimes, TimesError, default_gpu
from slidesparse.errors import CalibrationError, EnvironmentFault, SlideSparseError
from slidesparse.pattern import SlidePattern

LENGTHS = (10, 8, 6, 4)


# Choices of patterns


@st.composite
def problems(draw: st.DrawFn) -> AllocationProblem:
    """Up to four units with a dense candidate and three patterns each; any candidate may be slower than stock."""
    count = draw(st.integers(1, 4))
    candidates: dict[tuple[str, ...], tuple[Candidate, ...]] = {}
    for number in range(count):
        options = [Candidate(None, 0.0, draw(st.sampled_from((0.9, 1.0, 1.1))) / count, 0)]
        for length in LENGTHS[1:]:
            loss, time = draw(st.integers(0, 50)), draw(st.integers(40, 110))
            options.append(Candidate(SlidePattern(length), loss / 10, time / 100 / count, 200 // length))
        candidates[f"unit{number}",] = tuple(options)
    return AllocationProblem(candidates, 100 * count, draw(st.booleans()))


def all_choices(problem: AllocationProblem) -> list[Choice]:
    """Return every choice of a candidate for each unit."""
    units = list(problem.candidates)
    return [
        problem.choice(dict(zip(units, picked, strict=True)))
        for picked in itertools.product(*problem.candidates.values())
    ]


def saved(problem: AllocationProblem, choice: Choice) -> float:
    return choice.zeros if problem.by_zeros else 1 - choice.time


@settings(max_examples=200, deadline=None)
@given(problems())
def test_frontier_is_optimal(problem: AllocationProblem) -> None:
    """Each point of the frontier has the least loss of all choices that save as much."""
    frontier = problem.frontier()
    assert not any(frontier[0].patterns.values())
    choices = all_choices(problem)
    for choice in frontier:
        least = min(o.loss for o in choices if saved(problem, o) >= saved(problem, choice) - 1e-9)
        assert choice.loss <= least + 1e-9
    assert saved(problem, frontier[-1]) >= max(saved(problem, o) for o in choices) - 1e-9


@settings(max_examples=200, deadline=None)
@given(problems(), st.floats(0.01, 12))
def test_fastest_choice_is_within_a_step_of_the_optimum(problem: AllocationProblem, loss: float) -> None:
    """The optimum of the relaxed problem lies between two points of the frontier and bounds every choice."""
    choice = problem.fastest(loss)
    assert choice.loss <= loss + 1e-9
    within = [point for point in problem.frontier() if point.loss <= loss]
    assert saved(problem, choice) >= saved(problem, within[-1]) - 1e-9
    best = max(saved(problem, o) for o in all_choices(problem) if o.loss <= loss)
    behind = problem.frontier()[len(within) : len(within) + 1]
    assert best <= saved(problem, (behind or within[-1:])[0]) + 1e-9


@settings(max_examples=200, deadline=None)
@given(problems(), st.floats(0.01, 0.6))
def test_least_loss_reaches_the_saving(problem: AllocationProblem, saving: float) -> None:
    choice = problem.least_loss(saving)
    reaching = [o for o in all_choices(problem) if saved(problem, o) >= saving]
    assert (choice is None) == (not reaching)
    if choice:
        assert saved(problem, choice) >= saving - 1e-9
        point = next(p for p in problem.frontier() if saved(problem, p) >= saving - 1e-9)
        assert choice.loss <= point.loss + 1e-9


@pytest.mark.parametrize(
    ("attempts", "is_sparsest", "expected"),
    [
        ([Attempt(2.0, 0.9)], False, None),  # near enough to the limit
        ([Attempt(2.0, 0.3)], True, None),  # nothing more to prune
        ([Attempt(2.0, 0.5)], False, 0.95 * 2.0 / 0.5),
        ([Attempt(2.0, 0.0)], False, 0.95 * 2.0 * choose.MAX_STEP),
        ([Attempt(2.0, 1.5)], False, 0.95 * 2.0 / 1.5),
        ([Attempt(1.0, 0.6), Attempt(2.0, 4.0)], False, 1.5),  # between the two attempts
        ([Attempt(2.0, 1.5), Attempt(1.3, 0.7), Attempt(1.7, 1.1)], False, 1.3),  # the best attempt again
        (
            [Attempt(2.0, 1.5), Attempt(1.7, 1.2), Attempt(1.5, 1.1)],
            False,
            None,
        ),  # no attempt within the limit
        ([Attempt(2.0, 1.5), Attempt(1.3, 0.7), Attempt(1.7, 1.1), Attempt(1.3, 0.7)], False, None),
    ],
)
def test_next_limit(attempts: list[Attempt], is_sparsest: bool, expected: float | None) -> None:
    actual = next_limit(attempts, 1.0, attempts[-1].limit, is_sparsest)
    assert actual == (None if expected is None else pytest.approx(expected))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "give one of"),
        ({"zeros": 0.1, "max_loss": 0.1}, "--max-loss and --zeros"),
        ({"zeros": 0.51}, "--zeros 51"),
        ({"max_loss": 0.0}, "--max-loss 0%"),
        ({"max_loss": 1.0}, "--max-loss 100% is"),
        ({"min_speedup": 2.5}, "--min-speedup 2.5"),
        ({"max_loss": 0.1, "tokens": (8, 0)}, "--tokens.*found 8,0$"),
    ],
)
def test_invalid_budgets_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(SlideSparseError, match=message):
        Budget(**values)


# Times


def test_times_follow_the_fits_and_lie_between_measured_tokens() -> None:
    times = LayerTimes.of("h200")
    shape, pattern = (4608, 3584), SlidePattern(8)
    a, b = times.fits["int8", "6:8"][16]
    assert times.us("int8", pattern, shape, 16) == pytest.approx(a + b * shape[0] * shape[1])
    low, high = (times.us("int8", pattern, shape, tokens) for tokens in (16, 32))
    assert low < times.us("int8", pattern, shape, 23) < high
    most_tokens = max(times.fits["int8", "6:8"])
    last = times.us("int8", pattern, shape, most_tokens)
    assert times.us("int8", pattern, shape, 2 * most_tokens) == pytest.approx(2 * last)
    assert times.us("int8", None, shape, 16) != times.stock_us("int8", shape, 16)
    with pytest.raises(TimesError, match="14:16"):
        times.us("int8", SlidePattern(16), shape, 16)


@pytest.mark.parametrize("gpu", ["", "a100", "nvidia"])
def test_gpu_without_times_is_refused(gpu: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "times.csv").write_text("gpu\nnvidia-h200\nnvidia-h100\n")
    monkeypatch.setattr("slidesparse.convert.times.FILE", tmp_path / "times.csv")
    for refused in (lambda: LayerTimes.of(gpu), lambda: Budget(max_loss=0.1, gpu=gpu)):
        with pytest.raises(TimesError, match="nvidia-h200"):
            refused()


@pytest.mark.parametrize(
    ("name", "expected"),
    [("NVIDIA H100 80GB HBM3", "nvidia-h100-80gb-hbm3"), ("NVIDIA L40S", "h200"), (None, "h200")],
)
def test_default_gpu_is_that_of_the_machine_if_it_has_times(
    name: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: name is not None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)
    assert default_gpu() == expected
    assert LayerTimes.of(default_gpu())


# Losses


def float_llama(folder: Path) -> Any:
    """Save and return a random model of transformers whose logits are far from uniform."""
    model = random_decoder("Llama", vocab_size=LLAMA.vocabulary)
    model.save_pretrained(folder)
    return model


def task_of(folder: Path, ids: str, pattern: SlidePattern, **options: Any) -> Any:
    checkpoint = Checkpoint.open(folder)
    model = open_model(checkpoint)
    names = [name for number in range(model.blocks) for name in model.linears(number)]
    calibration = Calibration(ids, seqlen=24, device="cpu", **options)
    layers = dict.fromkeys(names, pattern)
    return prepare(checkpoint, layers, (), "sparsegpt", "int8", 0, calibration, hold_back=True)


@torch.inference_mode()
def test_layer_losses_equal_those_of_transformers(tmp_path: Path) -> None:
    """A unit's loss is the divergence of next-token distributions when only the layers that vLLM fuses into it are
    pruned.
    """
    reference = float_llama(tmp_path / "model")
    task = task_of(tmp_path / "model", write_ids(tmp_path / "ids.npy", 9), SlidePattern(6))
    (tmp_path / "work").mkdir()
    with task.model.checkpoint.reader() as reader:
        work = tmp_path / "work"
        unit_losses = layer_losses(task, PATTERNS, reader, work, WorkFolder(work), "losses.json", no_progress)
    assert {len(unit) for unit in unit_losses} == {1, 2, 3}
    assert sum(map(len, unit_losses)) == len(task.layers)
    ids = torch.stack(task.samples.ids)
    dense = reference(ids).logits.log_softmax(-1)
    inputs: dict[str, torch.Tensor] = {}
    modules = dict(reference.named_modules())
    for name in task.layers:
        modules[name].register_forward_pre_hook(
            lambda _, x, name=name: inputs.__setitem__(name, x[0].flatten(0, 1))
        )
    reference(ids)
    reads = dict(inputs)
    for unit, of_patterns in unit_losses.items():
        assert list(of_patterns) == [p.ratio for p in PATTERNS]
        assert 0 < of_patterns["8:10"] < of_patterns["4:6"] < of_patterns["2:4"]
        x = reads[unit[0]]
        upper = factor(x.T @ x, damping_for(x.shape[1], len(x)))
        weights = {name: modules[name].weight.data.clone() for name in unit}
        for name in unit:
            modules[name].weight.data = sparsegpt(weights[name], upper, SlidePattern(4))
        pruned = reference(ids).logits.log_softmax(-1)
        for name in unit:
            modules[name].weight.data = weights[name]
        expected = F.kl_div(pruned, dense, reduction="sum", log_target=True) / ids.numel()
        assert of_patterns["2:4"] == pytest.approx(float(expected), rel=1e-3)


def test_unpruned_model_has_no_loss(tmp_path: Path) -> None:
    float_llama(tmp_path / "model")
    task = task_of(tmp_path / "model", write_ids(tmp_path / "ids.npy", 9), SlidePattern(None), target="own")
    (tmp_path / "work").mkdir()
    work = WorkFolder(tmp_path / "work")
    with task.model.checkpoint.reader() as reader:
        calibrate(task, reader, work, no_progress)
        assert whole_loss(task, reader, work, no_progress) == 0.0


@torch.inference_mode()
def test_whole_loss_equals_that_of_the_written_model(tmp_path: Path) -> None:
    """Transformers computes the loss with the written weights, on texts that the dense model generates.

    Activations are not rounded there, which changes both losses by about the same amount.
    """
    reference = float_llama(tmp_path / "model")
    for parameter in reference.lm_head.parameters():
        parameter.data *= 3  # makes some tokens far likelier than others
    reference.save_pretrained(tmp_path / "model")
    generator, sampled = torch.Generator().manual_seed(0), torch.zeros(80, 1, dtype=torch.int64)
    for _ in range(23):
        sampled = torch.cat(
            (sampled, reference(sampled).logits[:, -1].softmax(-1).multinomial(1, generator=generator)), 1
        )
    np.save(tmp_path / "ids.npy", sampled.numpy())
    ids = str(tmp_path / "ids.npy")
    report = calibrated(tmp_path / "model", tmp_path / "out", ids, budget=Budget(zeros=0.4), finetune=0)
    task = task_of(tmp_path / "model", ids, SlidePattern(6))
    held_out = torch.stack(task.held_back.ids)

    def entropy() -> float:
        logits = reference(held_out).logits[:, :-1]
        return float(F.cross_entropy(logits.flatten(0, 1), held_out[:, 1:].flatten()))

    before, stored = entropy(), tensors_of(tmp_path / "out")
    for name, module in reference.named_modules():
        if f"{name}.weight_scale" in stored:
            codes = stored[f"{name}.weight"].float() * stored[f"{name}.weight_scale"]
            module.weight.data = codes
    assert report.budget
    assert report.budget.measured_loss is not None
    added = entropy() - before
    assert added > 0.3
    assert report.budget.measured_loss == pytest.approx(added, rel=0.05)


# Conversions


@pytest.fixture
def model(tmp_path: Path) -> Path:
    float_llama(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def ids(tmp_path: Path) -> str:
    return write_ids(tmp_path / "ids.npy", 24)


def outcome(report: Report) -> choose.Outcome:
    assert report.budget
    return report.budget


@DEVICES
@pytest.mark.parametrize("rotate", ["off", "on"])
def test_zeros_budget_is_reached_with_several_patterns(
    model: Path, tmp_path: Path, ids: str, rotate: str, device: str
) -> None:
    options: dict[str, Any] = {"budget": Budget(zeros=0.3), "finetune": 0, "rotate": rotate, "device": device}
    report = calibrated(model, tmp_path / "out", ids, **options)
    inspection = inspect(tmp_path / "out")
    assert inspection.violations == 0
    choice = outcome(report).choice
    assert choice
    assert choice.zeros >= 0.3
    assert len(choice.counts) > 1
    by_layer = {name: p.ratio for unit, p in choice.patterns.items() if p for name in unit}
    assert {layer.name: layer.pattern for layer in inspection.layers if layer.pattern} == by_layer
    assert set(report.skipped.values()) <= {"by the budget"}
    weights = tensors_of(tmp_path / "out")
    codes = [weights[f"{name}.weight"] for unit in choice.patterns for name in unit]
    zeros = sum(int((w == 0).sum()) for w in codes) / sum(w.numel() for w in codes)
    assert choice.zeros <= zeros < choice.zeros + 0.05  # rounding makes some codes zero, too


def test_loss_budget_is_kept_and_used(model: Path, tmp_path: Path, ids: str) -> None:
    """Times of layers this small are estimates, by which only decode gets faster."""
    budget = Budget(max_loss=0.05, tokens=(16,))
    report = calibrated(model, tmp_path / "out", ids, budget=budget, finetune=0)
    strict = outcome(report)
    assert strict.within_budget
    assert strict.measured_loss is not None
    assert math.expm1(strict.measured_loss) <= 0.05
    assert strict.choice
    assert strict.choice.speedup > 1
    loose_report = calibrated(
        model, tmp_path / "dearer", ids, budget=Budget(max_loss=0.3, tokens=(16,)), finetune=0
    )
    loose = outcome(loose_report)
    assert loose.within_budget
    assert loose.choice
    assert loose.choice.speedup >= strict.choice.speedup
    document = json.loads(json.dumps(loose_report.to_json()))["budget"]
    assert document["goal"] == "--max-loss 30%"
    assert document["kept"] is True
    assert len(document["frontier"]) > 2
    assert document["loss"] <= 0.3


def test_exceeded_budget_is_reported(
    model: Path, tmp_path: Path, ids: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choose, "whole_loss", lambda *_: 1.0)
    report = calibrated(model, tmp_path / "out", ids, budget=Budget(max_loss=0.5, tokens=(16,)), finetune=0)
    assert not outcome(report).within_budget
    assert outcome(report).to_json()["kept"] is False


def test_losses_are_measured_once_for_all_budgets(
    model: Path, tmp_path: Path, ids: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = snapshot(tmp_path)
    first = calibrated(model, tmp_path / "out", ids, budget=Budget(zeros=0.2), dry_run=True)
    assert snapshot(tmp_path) == before
    assert outcome(first).choice
    assert outcome(first).measured_loss is None

    def not_again(*_: Any) -> Any:
        raise AssertionError("measured again")

    monkeypatch.setattr(losses, "_measure", not_again)
    second = calibrated(model, tmp_path / "out", ids, budget=Budget(max_loss=0.3, tokens=(16,)), dry_run=True)
    assert outcome(second).problem.candidates.keys() == outcome(first).problem.candidates.keys()


def test_damaged_loss_cache_is_measured_again(model: Path, tmp_path: Path, ids: str) -> None:
    options: dict[str, Any] = {"budget": Budget(zeros=0.2), "dry_run": True}
    first = outcome(calibrated(model, tmp_path / "out", ids, **options))
    (cache_file,) = (Path(os.environ["SLIDESPARSE_CACHE"]) / "losses").glob("*.json")
    cache_file.write_text(cache_file.read_text()[:50])
    assert outcome(calibrated(model, tmp_path / "out", ids, **options)).to_json() == first.to_json()


def test_unwritable_loss_cache_is_an_error(
    model: Path, tmp_path: Path, ids: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("SLIDESPARSE_CACHE", str(tmp_path / "file"))
    with pytest.raises(EnvironmentFault, match="cannot be written: .*; set SLIDESPARSE_CACHE"):
        calibrated(model, tmp_path / "out", ids, budget=Budget(zeros=0.2))
    assert list(tmp_path.glob(".out*")) == []  # it is noticed before the model is rotated


def test_budget_refuses_decoders_that_predict_no_tokens(model: Path, tmp_path: Path, ids: str) -> None:
    (model / "modules.json").write_text("[]")
    with pytest.raises(
        CalibrationError, match="modules.json marks this as an embedding model: give a pattern"
    ):
        calibrated(model, tmp_path / "out", ids, budget=Budget(zeros=0.2), finetune=0)
    (model / "modules.json").unlink()
    config = {**config_of(model), "architectures": ["LlamaModel"]}
    (model / "config.json").write_text(json.dumps(config))
    with pytest.raises(CalibrationError, match="names LlamaModel: give a pattern"):
        calibrated(model, tmp_path / "out", ids, budget=Budget(zeros=0.2), finetune=0)


def test_nonfinite_loss_is_reported(
    model: Path, tmp_path: Path, ids: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(losses.Criterion, "distances", lambda *_: [math.nan] * 16)
    with pytest.raises(CalibrationError, match=r"q_proj at 8:10 is not finite"):
        calibrated(model, tmp_path / "out", ids, budget=Budget(zeros=0.2), finetune=0)


def test_killed_budget_search_resumes(
    model: Path, tmp_path: Path, ids: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The search is killed at each write of losses, a choice, or a block. Stored results are not computed again."""
    options: dict[str, Any] = {"budget": Budget(max_loss=0.1, tokens=(16,)), "finetune": 0}
    write_json, calls, last = WorkFolder.write_json, 0, 0

    def dying(self: WorkFolder, name: str, value: object) -> None:
        nonlocal calls
        calls += 1
        if calls == last:
            raise Killed
        write_json(self, name, value)

    with monkeypatch.context() as patch:
        patch.setattr(WorkFolder, "write_json", dying)
        calibrated(model, tmp_path / "whole", ids, **options)
    writes = calls
    assert writes >= 5  # losses, at least two choices, two blocks
    for last in range(1, writes + 1):
        monkeypatch.setenv("SLIDESPARSE_CACHE", str(tmp_path / f"cache{last}"))
        out, calls = tmp_path / f"out{last}", 0
        with monkeypatch.context() as patch:
            patch.setattr(WorkFolder, "write_json", dying)
            with pytest.raises(Killed):
                calibrated(model, out, ids, **options)
        assert not out.exists()
        calibrated(model, out, ids, resume=True, **options)
        assert snapshot(out) == snapshot(tmp_path / "whole")


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        (Budget(min_speedup=1.9, tokens=(16,)), "cannot be reached: the maximum is 1."),
        (Budget(min_speedup=1.01, tokens=(16,)), "is reached without pruning: .* SPARSITY=dense"),
        (Budget(max_loss=1e-9, tokens=(16,)), "allow a larger loss"),
    ],
)
def test_unreachable_budget_is_refused(
    model: Path, tmp_path: Path, ids: str, budget: Budget, message: str
) -> None:
    with pytest.raises(SlideSparseError, match=message):
        calibrated(model, tmp_path / "out", ids, budget=budget, finetune=0)
    assert not (tmp_path / "out").exists()


def test_encoder_loss_is_cosine_distance_of_embeddings(tmp_path: Path) -> None:
    bert(tmp_path / "source")
    ids = write_ids(tmp_path / "ids.npy", 24)
    report = calibrated(
        tmp_path / "source", tmp_path / "out", ids, budget=Budget(zeros=0.2), finetune=0, seqlen=16
    )
    result = outcome(report)
    assert not result.in_nats
    assert result.measured_loss is not None
    assert 0 < result.measured_loss < 1
    assert "1 - cosine" in result.summary


def test_layer_option_with_a_budget_is_refused(model: Path, tmp_path: Path, ids: str) -> None:
    with pytest.raises(CalibrationError, match="--layer"):
        calibrated(model, tmp_path / "out", ids, budget=Budget(zeros=0.2), layer=["down=8:10"])
