"""Patterns chosen for a budget: optimality of the choice, losses against transformers, and the measured budget."""

from __future__ import annotations

import itertools
import math
import os
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812  (its usual name)
import transformers
from calibration import DEVICES, calibrated, open_model, save, task_of, write_ids
from checkpoints import bert, snapshot, tensors_of, write_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from slidesparse.calibrate import losses
from slidesparse.calibrate.losses import GroupLoss, layer_losses
from slidesparse.calibrate.sparsegpt import factor, sparsegpt
from slidesparse.checkpoint.inspection import inspect
from slidesparse.convert import choose, stream
from slidesparse.convert.budget import (
    DEFAULT_GPU,
    PATTERNS,
    AllocationProblem,
    Budget,
    Candidate,
    Choice,
    Shape,
    allocation_problem,
    default_gpu,
    layer_fits,
)
from slidesparse.convert.choose import AIM, next_limit
from slidesparse.convert.stream import Report
from slidesparse.errors import CalibrationError, EnvironmentFault
from slidesparse.pattern import SlidePattern
from slidesparse.progress import no_progress

ID_SAMPLES = 24
LENGTHS = (8, 6, 4)
# Times of layers as small as these models' are estimates, by which only decode gets faster
BUDGET = Budget(0.5, tokens=(16,))


# Choices of patterns


@st.composite
def problems(draw: st.DrawFn) -> AllocationProblem:
    """Up to four groups with a dense candidate and three patterns each; any candidate may be slower than stock."""
    count = draw(st.integers(1, 4))
    candidates: dict[tuple[str, ...], tuple[Candidate, ...]] = {}
    for number in range(count):
        options = [Candidate(None, 0.0, draw(st.sampled_from((0.9, 1.0, 1.1))) / count, 0)]
        for length in LENGTHS:
            loss, time = draw(st.integers(0, 50)), draw(st.integers(40, 110))
            options.append(Candidate(SlidePattern(length), loss / 10, time / 100 / count, 200 // length))
        candidates[f"group{number}",] = tuple(options)
    return AllocationProblem(candidates, 100 * count)


def all_choices(problem: AllocationProblem) -> list[Choice]:
    """Return every choice of a candidate for each group."""
    groups = list(problem.candidates)
    picks = itertools.product(*problem.candidates.values())
    return [problem.choice(dict(zip(groups, picked, strict=True))) for picked in picks]


@settings(max_examples=200, deadline=None)
@given(problems(), st.floats(0.01, 12))
def test_choices_are_optimal(problem: AllocationProblem, loss: float) -> None:
    """Each point of the frontier has the least loss of all choices that are as fast.

    The optimum of the relaxed problem lies between two points of the frontier and bounds the fastest choice.
    """
    frontier, choices = problem.frontier(), all_choices(problem)
    assert not any(frontier[0].patterns.values())
    for point in frontier:
        least = min(o.loss for o in choices if o.time <= point.time + 1e-9)
        assert point.loss <= least + 1e-9
    assert frontier[-1].time <= min(o.time for o in choices) + 1e-9
    choice = problem.fastest(loss)
    assert choice.loss <= loss + 1e-9
    within = [point for point in frontier if point.loss <= loss]
    assert choice.time <= within[-1].time + 1e-9
    best = min(o.time for o in choices if o.loss <= loss)
    behind = frontier[len(within) : len(within) + 1]
    assert best >= (behind or within[-1:])[0].time - 1e-9


# Of Qwen3-30B-A3B and Mixtral-8x7B: both matrices of an expert, and the experts' shares of tokens
QWEN3 = ((1536, 2048), (2048, 768)), (8 / 128,) * 128
MIXTRAL = ((28672, 4096), (4096, 14336)), (2 / 8,) * 8


@pytest.mark.parametrize(
    ("experts", "quant", "tokens", "unpruned", "pruned"),
    [
        (QWEN3, "int8", 1, 28, 23),
        (QWEN3, "int8", 16, 145, 100),
        (QWEN3, "fp8", 64, 220, 148),
        (QWEN3, "fp8", 256, 245, 171),
        (MIXTRAL, "int8", 1, 132, 90),
        (MIXTRAL, "int8", 16, 473, 303),
        (MIXTRAL, "int8", 256, 539, 361),
        (MIXTRAL, "fp8", 1024, 686, 527),
    ],
)
def test_gains_of_experts(experts: Any, quant: str, tokens: int, unpruned: float, pruned: float) -> None:
    """In us on an H100, at 2:4 (docs/kernels-notebook.md)."""
    shapes = {(str(n),): Shape(n, k, experts[1]) for n, k in experts[0]}
    losses = dict.fromkeys(shapes, GroupLoss(dict.fromkeys(("6:8", "4:6", "2:4"), 1.0)))
    budget = Budget(0.01, tokens=(tokens,), gpu="nvidia-h100-80gb-hbm3")
    problem = allocation_problem(losses, shapes, quant, budget, [])
    dense, sparse = problem.frontier()[0], problem.uniform(SlidePattern(4))
    assert dense.time / sparse.time == pytest.approx(unpruned / pruned, rel=1 / 7)
    assert sparse.zeros == 0.5


@pytest.mark.parametrize(
    ("before", "is_sparsest", "expected"),
    [
        ([(2.0, 0.9)], False, None),  # near enough to the limit
        ([(2.0, 0.3)], True, None),  # nothing more to prune
        ([(2.0, 0.5)], False, 2.0 * AIM / 0.5),  # in proportion
        ([(2.0, -0.1)], False, 2.0 * choose.MAX_STEP),
        ([(2.0, 1.8)], False, 2.0 * AIM / 1.8),
        ([(2.0, 8.0), (0.5, 0.5)], False, 0.5 * (AIM / 0.5) ** 0.5),  # through both: the square
        ([(1.0, 0.7), (2.0, 0.71)], False, 2.0 * (AIM / 0.71) ** 2),  # hardly grows: its root at least
        ([(1.2, 1.5), (1.19, 0.7)], False, 1.195),  # between the two
        ([(2.0, 1.5), (1.3, 0.7), (1.7, 1.1)], False, 1.3),  # the best choice again
        ([(2.0, 1.5), (1.7, 1.2), (1.5, 1.1)], False, None),  # none within the limit
        ([(2.0, 1.5), (1.3, 0.7), (1.7, 1.1), (1.3, 0.7)], False, None),
    ],
)
def test_next_limit(before: list[tuple[float, float]], is_sparsest: bool, expected: float | None) -> None:
    assert next_limit(before, 1.0, is_sparsest) == (None if expected is None else pytest.approx(expected))


# Times


@pytest.mark.parametrize(
    ("name", "expected"),
    [("NVIDIA H100 80GB HBM3", "nvidia-h100-80gb-hbm3"), ("NVIDIA L40S", DEFAULT_GPU), (None, DEFAULT_GPU)],
)
def test_default_gpu_has_times(name: str | None, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: name is not None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)
    assert default_gpu() == expected
    assert layer_fits(default_gpu())


# Losses


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama, some of whose tokens are far likelier than others."""
    whole: Any = save("llama", folder := tmp_path_factory.mktemp("model") / "source")
    whole.lm_head.weight.data *= 3
    whole.save_pretrained(folder)
    return folder


def whole_model(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@torch.inference_mode()
def test_layer_losses_equal_those_of_transformers(model: Path, tmp_path: Path) -> None:
    """A group's loss is the divergence of next-token distributions when its layers alone are pruned."""
    ids = write_ids(tmp_path / "ids.npy", 9)
    task = task_of(open_model(model), ids, SlidePattern(6), hold_back=True)
    reference, samples = whole_model(model), torch.stack(task.samples.ids)
    with task.model.checkpoint.reader() as reader:
        found = layer_losses(task, PATTERNS, reader, {}, lambda _: None, no_progress)
    assert [len(group) for group in found] == [3, 1, 2, 1] * 2
    inputs: dict[str, torch.Tensor] = {}
    modules = dict(reference.named_modules())
    for name in task.layers:
        modules[name].register_forward_pre_hook(lambda _, x, n=name: inputs.update({n: x[0].flatten(0, 1)}))
    dense = reference(samples).logits.log_softmax(-1)
    reads = dict(inputs)
    for group, (by_pattern, _) in found.items():
        assert list(by_pattern) == [p.ratio for p in PATTERNS]
        assert 0 < by_pattern["6:8"] < by_pattern["4:6"] < by_pattern["2:4"]
        x = reads[group[0]]
        upper = factor(x.T @ x)
        weights = {name: modules[name].weight.data.clone() for name in group}
        for name in group:
            modules[name].weight.data = sparsegpt(weights[name], upper, SlidePattern(4))
        pruned = reference(samples).logits.log_softmax(-1)
        for name in group:
            modules[name].weight.data = weights[name]
        expected = F.kl_div(pruned, dense, reduction="sum", log_target=True) / samples.numel()
        assert by_pattern["2:4"] == pytest.approx(float(expected), rel=1e-3)


@torch.inference_mode()
def test_whole_loss_equals_that_of_the_written_model(model: Path, tmp_path: Path) -> None:
    """Transformers computes the loss with the written weights, on texts that the dense model generates.

    Activations are not rounded there, which changes both losses by about the same amount.
    """
    reference = whole_model(model)
    generator, sampled = torch.Generator().manual_seed(0), torch.zeros(80, 1, dtype=torch.int64)
    for _ in range(23):
        following = reference(sampled).logits[:, -1].softmax(-1).multinomial(1, generator=generator)
        sampled = torch.cat((sampled, following), 1)
    np.save(tmp_path / "ids.npy", sampled.numpy())
    ids = str(tmp_path / "ids.npy")
    report = calibrated(model, tmp_path / "out", ids, budget=Budget(0.9, (16,)), epochs=0)
    (held_back,) = task_of(open_model(model), ids, SlidePattern(6), hold_back=True).held_back
    held_out = torch.stack(held_back.ids)

    def entropy() -> float:
        logits = reference(held_out).logits[:, :-1]
        return float(F.cross_entropy(logits.flatten(0, 1), held_out[:, 1:].flatten()))

    before, stored = entropy(), tensors_of(tmp_path / "out")
    for name, module in reference.named_modules():
        if f"{name}.weight_scale" in stored:
            module.weight.data = stored[f"{name}.weight"].float() * stored[f"{name}.weight_scale"]
    added = entropy() - before
    assert added > 0.3
    assert outcome(report).measured_loss == pytest.approx(added, rel=0.05)


# Conversions


def outcome(report: Report) -> choose.Outcome:
    return report.budget


@DEVICES
def test_the_chosen_patterns_are_written(model: Path, tmp_path: Path, ids: str, device: str) -> None:
    options: dict[str, Any] = {"budget": BUDGET, "epochs": 0, "rotate": "on", "device": device}
    report = calibrated(model, tmp_path / "out", ids, **options)
    inspection = inspect(tmp_path / "out")
    assert inspection.violations == 0
    choice = outcome(report).choice
    assert len({*choice.patterns.values()}) > 1
    by_layer = {name: p.ratio for group, p in choice.patterns.items() if p for name in group}
    assert {layer.name: layer.pattern for layer in inspection.layers if layer.pattern} == by_layer
    assert set(report.plan.skipped.values()) <= {"by the budget"}
    weights = tensors_of(tmp_path / "out")
    codes = [weights[f"{name}.weight"] for group in choice.patterns for name in group]
    zeros = sum(int((w == 0).sum()) for w in codes) / sum(w.numel() for w in codes)
    assert choice.zeros <= zeros < choice.zeros + 0.05  # rounding makes some codes zero, too


def test_loss_budget_is_kept_and_used(model: Path, tmp_path: Path, ids: str) -> None:
    """Times of layers this small are estimates, by which only decode gets faster."""
    results = []
    for loss in (0.05, 0.3):
        budget = Budget(loss, tokens=(16,))
        result = outcome(calibrated(model, tmp_path / str(loss), ids, budget=budget, epochs=0))
        assert result.within_budget
        assert math.expm1(result.measured_loss) <= loss
        results.append(1 / result.choice.time)
    assert 1 < results[0] <= results[1]


def test_excess_is_reported(model: Path, tmp_path: Path, ids: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And refused where no choice is estimated to be within the budget."""
    with pytest.raises(CalibrationError, match="allow a larger loss"):
        calibrated(model, tmp_path / "out", ids, budget=Budget(1e-9, tokens=(16,)), epochs=0)
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr(choose, "whole_loss", lambda *_: 1.0)
    assert not outcome(calibrated(model, tmp_path / "out", ids, budget=BUDGET, epochs=0)).within_budget


def test_worst_text_counts(model: Path, tmp_path: Path, ids: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are of each source, or of one and the reference of Python, if the folder has a tokenizer."""
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    write_tokenizer(folder, ["?", "the", "a", "of", "is", "and"])
    other = write_ids(tmp_path / "other.npy", ID_SAMPLES)
    options: dict[str, Any] = {"budget": BUDGET, "epochs": 0}
    one = calibrated(folder, tmp_path / "one", ids, **options)
    assert outcome(one).kinds == ("ids.npy", "the reference of the Python language")
    assert len({*(outcome(one).measured or ())}) == 2
    assert outcome(one).measured_loss == max(outcome(one).measured or ())
    assert "on ids.npy, +" in outcome(one).summary
    two = calibrated(folder, tmp_path / "two", ids, data=(ids, other), **options)
    assert outcome(two).kinds == ("ids.npy", "other.npy")
    alone = calibrated(model, tmp_path / "alone", ids, **options)
    assert outcome(alone).kinds == ("ids.npy",)
    assert "on text like that of ids.npy alone: " in alone.note
    assert "has no tokenizer" in alone.note


def test_losses_are_cached(model: Path, tmp_path: Path, ids: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are cached, and measured again where the cache is damaged, or about other layers or weights."""
    before = snapshot(tmp_path)
    options: dict[str, Any] = {"budget": BUDGET, "dry_run": True}
    first = outcome(calibrated(model, tmp_path / "out", ids, **options))
    assert snapshot(tmp_path) == before
    assert first.measured_loss is None
    (cache,) = (Path(os.environ["SLIDESPARSE_CACHE"]) / "losses").glob("*.json")
    with monkeypatch.context() as patch:
        patch.setattr(losses, "_measure", lambda *_: pytest.fail("measured again"))
        loss_budget = Budget(0.3, tokens=(16,))
        second = outcome(calibrated(model, tmp_path / "out", ids, budget=loss_budget, dry_run=True))
    assert second.problem.candidates.keys() == first.problem.candidates.keys()
    entries = cache.read_text()
    for damaged in (
        entries[:50],
        entries.replace("0.", "NaN, 0.", 1),
        entries.replace("q_proj", "x_proj"),
        "Infinity",
        "[" * 10**5,
        re.sub(r"\d\.\d", "7.7", entries, count=1),
        None,
    ):
        cache.unlink()
        cache.write_text(damaged) if damaged else os.mkfifo(cache)
        result = outcome(calibrated(model, tmp_path / "out", ids, **options))
        assert result.problem == first.problem
        assert cache.read_text() == entries
    weights = shutil.copytree(model, tmp_path / "other") / "model.safetensors"
    for written, count in ((0, 1), (1, 2)):  # a copy that keeps the time is the same model
        os.utime(weights, ns=(0, (model / weights.name).stat().st_mtime_ns + written))
        calibrated(weights.parent, tmp_path / "out", ids, **options)
        assert len([*cache.parent.iterdir()]) == count
    cache.unlink()
    cache.mkdir()  # in which nothing can be written
    assert outcome(calibrated(model, tmp_path / "out", ids, **options)).problem == first.problem


def test_budget_without_savings_is_refused_before_losses_are_measured(
    model: Path, tmp_path: Path, ids: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefill of layers this small gets no faster by any pattern; a cache that cannot be written comes as early."""
    monkeypatch.setattr(stream, "open_work", lambda *_: pytest.fail("work began"))
    budget = Budget(0.1, tokens=(4096,))
    with pytest.raises(CalibrationError, match="no pattern makes any layer of this model faster at 4096"):
        calibrated(model, tmp_path / "out", ids, budget=budget)
    (tmp_path / "file").touch()
    monkeypatch.setenv("SLIDESPARSE_CACHE", str(tmp_path / "file"))
    with pytest.raises(EnvironmentFault, match="losses cannot be created: .*; set SLIDESPARSE_CACHE"):
        calibrated(model, tmp_path / "out", ids, budget=BUDGET)


def test_budget_refuses_models_whose_loss_is_not_known(
    model: Path, tmp_path: Path, ids: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decoders that predict no tokens, and those that overflow."""
    folder, options = tmp_path / "model", {"budget": BUDGET, "epochs": 0}
    shutil.copytree(model, folder)
    (folder / "modules.json").write_text("[]")
    with pytest.raises(CalibrationError, match="modules.json marks this as an embedding model: give a"):
        calibrated(folder, tmp_path / "out", ids, **options)
    monkeypatch.setattr(losses.Criterion, "distances", lambda *_: [math.nan] * 12)
    with pytest.raises(CalibrationError, match=r"q_proj at 6:8 is not finite"):
        calibrated(model, tmp_path / "other", ids, **options)


def test_encoder_loss_is_cosine_distance_of_embeddings(tmp_path: Path, ids: str) -> None:
    bert(tmp_path / "source")
    options: dict[str, Any] = {"budget": BUDGET, "epochs": 0, "seqlen": 16}
    result = outcome(calibrated(tmp_path / "source", tmp_path / "out", ids, **options))
    assert not result.in_nats
    assert 0 < result.measured_loss < 1
    assert "1 - cosine" in result.summary
