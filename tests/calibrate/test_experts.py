"""Routed experts are pruned by the tokens that are routed to them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from calibration import calibrated, open_model, task_of, write_ids
from checkpoints import config_of, convert, tensors_of
from moe import EXPERTS, LAYERS, MODELS, PRUNED, QWEN
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForCausalLM

from slidesparse.calibrate import experts
from slidesparse.calibrate.losses import layer_losses
from slidesparse.calibrate.sparsegpt import pruner
from slidesparse.checkpoint.converted import open_checkpoint
from slidesparse.checkpoint.storage import CheckpointError
from slidesparse.convert.budget import PATTERNS, Budget
from slidesparse.convert.options import ConvertOptions
from slidesparse.convert.plan import Planner
from slidesparse.errors import CalibrationError
from slidesparse.pattern import SlidePattern
from slidesparse.progress import no_progress
from slidesparse.quantize import FP8, INT8, dequantize_rows, quantize_rows
from slidesparse.slide import violations

PATTERN = SlidePattern(8)


def inputs_of_experts(model: nn.Module, layer: int, ids: Tensor) -> list[Tensor]:
    """Return the inputs of each expert when transformers runs the whole model."""
    caught: list[tuple[Tensor, ...]] = []
    module = model.get_submodule(f"model.layers.{layer}.mlp.experts")
    hook = module.register_forward_pre_hook(lambda _, args: caught.append(args))
    model(input_ids=ids)
    hook.remove()
    ((x, chosen, _),) = caught
    return [x[(chosen == expert).any(-1)] for expert in range(EXPERTS)]


@pytest.mark.parametrize(("name", "quant"), [("mixtral", "int8"), ("qwen2", "fp8")])
@torch.inference_mode()
def test_each_expert_is_pruned_by_the_tokens_routed_to_it(
    tmp_path: Path, name: str, quant: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """The first layer with experts, by inputs from transformers' run of the model with the written linear layers.

    transformers, which joins the experts of each block, does not print how far it is.
    """
    model, dtype = MODELS[name], {"int8": INT8, "fp8": FP8}[quant]
    source, ids = model.write(tmp_path / "source", name == "qwen2"), write_ids(tmp_path / "ids.npy", 24)
    capfd.readouterr()
    report = calibrated(source, tmp_path / "out", ids, quant=quant, epochs=0, layer=PRUNED)
    assert capfd.readouterr() == ("", "")
    written, before = tensors_of(tmp_path / "out"), model.read()[1]
    block = config_of(tmp_path / "out")["quantization_config"]["slidesparse"]
    assert block["experts"] == ["6:8"]
    assert set(block["layers"]) == set(model.linears())
    rows = {row["name"]: row for row in report.layers}
    assert set(model.experts()) < set(rows)
    layer = LAYERS - 1 if model.dense else 0
    whole = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, experts_implementation="eager")
    for other in model.linears():
        weight = dequantize_rows(written[f"{other}.weight"], written[f"{other}.weight_scale"])
        whole.get_submodule(other).weight.data = weight
    tokens = inputs_of_experts(whole, layer, torch.from_numpy(np.load(ids)))
    gate, up, down = model.parts
    for expert, x in enumerate(tokens):
        prefix = f"model.layers.{layer}.{model.module}.experts.{expert}."
        assert rows[prefix + gate]["tokens"] == len(x)
        both = torch.cat([before[f"{prefix}{part}.weight"].float() for part in (gate, up)])
        best = pruner(x.mT @ x, 4)(both, PATTERN)
        for part, w in zip((gate, up), best.chunk(2), strict=True):
            codes = quantize_rows(w, dtype, "cuda")[0].float()
            stored = written[f"{prefix}{part}.weight"]
            assert violations(stored, PATTERN) is None
            assert float((codes != stored.float()).float().mean()) < 0.01
        first, second = (
            dequantize_rows(written[f"{prefix}{part}.weight"], written[f"{prefix}{part}.weight_scale"])
            for part in (gate, up)
        )
        h = functional.silu(x @ first.T) * (x @ second.T)
        best = pruner(h.mT @ h, 4)(before[f"{prefix}{down}.weight"].float(), PATTERN)
        codes = quantize_rows(best, dtype, "cuda")[0].float()
        assert float((codes != written[f"{prefix}{down}.weight"].float()).float().mean()) < 0.01


def test_experts_with_few_tokens_use_the_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The inputs of shared experts, whose channels are scaled, are [tokens, K]."""
    model = MODELS["qwen2"]
    source, ids = model.write(tmp_path / "source"), write_ids(tmp_path / "ids.npy")
    monkeypatch.setattr(experts, "FLOOR", 1)  # as many tokens as columns
    report = calibrated(source, tmp_path / "out", ids, rotate="auto", layer=PRUNED)
    assert report.rotation.startswith("not rotated")
    rows = [row for row in report.layers if row["name"] in model.experts()]
    columns = {name: k for name, (_, k) in model.experts().items()}
    assert [row["pooled"] for row in rows] == [row["tokens"] < columns[row["name"]] for row in rows]
    assert {row["pooled"] for row in rows} == {True, False}
    written = tensors_of(tmp_path / "out")
    assert all(violations(written[f"{name}.weight"], PATTERN) is None for name in model.experts())


@torch.inference_mode()
def test_losses_of_experts_equal_those_of_transformers(tmp_path: Path) -> None:
    """The gates and ups of all experts of a layer are one group, pruned by the tokens of each."""
    model = MODELS["qwen3"]
    source, ids = model.write(tmp_path / "source", True), write_ids(tmp_path / "ids.npy", 24)
    task = task_of(open_model(source), ids, PATTERN)
    with task.model.checkpoint.reader() as reader:
        found = layer_losses(task, PATTERNS, reader, {}, lambda _: None, no_progress)
    assert [len(group) for group in found] == [3, 1, 2 * EXPERTS, EXPERTS] * LAYERS
    whole = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, experts_implementation="eager")
    samples = torch.stack(task.samples.ids)
    dense = whole(samples).logits.log_softmax(-1)
    joined = whole.model.layers[0].mlp.experts.gate_up_proj
    by_pattern, shares = [*found.values()][2]
    for expert, x in enumerate(inputs_of_experts(whole, 0, samples)):
        assert shares[expert] == len(x) / samples.numel()
        joined.data[expert] = pruner(x.mT @ x, 0)(joined[expert], SlidePattern(4))
    pruned = whole(samples).logits.log_softmax(-1)
    expected = functional.kl_div(pruned, dense, reduction="sum", log_target=True) / samples.numel()
    assert by_pattern["2:4"] == pytest.approx(float(expected), rel=1e-3)


@pytest.mark.parametrize("asked", [True, False])
def test_a_budget_counts_experts_that_it_may_prune(tmp_path: Path, asked: bool) -> None:
    model = MODELS["qwen3"]
    source, ids = model.write(tmp_path / "source"), write_ids(tmp_path / "ids.npy", 24)
    layer = [r"\.experts\.=budget"] * asked
    report = calibrated(
        source, tmp_path / "out", ids, budget=Budget(0.5, tokens=(16,)), layer=layer, epochs=0
    )
    patterns, shapes = report.plan.patterns, model.linears() | (model.experts() if asked else {})
    zeros = sum(n * (k // patterns[name].length) * 2 for name, (n, k) in shapes.items() if name in patterns)
    assert report.budget.choice.zeros == zeros / sum(n * k for n, k in shapes.values())
    assert asked == bool({*patterns} & {*model.experts()})
    written = tensors_of(tmp_path / "out")
    assert all(violations(written[f"{name}.weight"], pattern) is None for name, pattern in patterns.items())


def test_second_layers_of_square_experts_have_a_pattern_of_their_own(tmp_path: Path) -> None:
    """They have the shape of the first ones, with which they are no group."""
    model = replace(MODELS["qwen3"], config={**QWEN, "moe_intermediate_size": 128})
    for joined in (False, True):
        source, out = model.write(tmp_path / str(joined), joined), tmp_path / f"{joined} out"
        layer = [*PRUNED, r"experts.*down_proj=2:4"]
        patterns = convert(source, out, layer=layer).plan.patterns
        assert {patterns[name].ratio for name in model.experts() if "down" in name} == {"2:4"}
        assert {patterns[name].ratio for name in model.experts() if "down" not in name} == {"6:8"}
        with pytest.raises(CheckpointError, match="which read the same input"):
            convert(source, tmp_path / "x", layer=[r"experts.*up_proj=2:4"])


def test_planning_compares_no_expert_with_each_other(tmp_path: Path) -> None:
    """The 18432 matrices of Qwen3-30B took 20 s in each of several plans of one command, and take 1.2."""
    model = replace(MODELS["qwen3"], config={**QWEN, "num_experts": 64})
    planner = Planner(open_checkpoint(model.write(tmp_path))[0], ConvertOptions(PATTERN))
    compared = 0

    class Name(str):
        __slots__ = ()
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            nonlocal compared
            compared += 1
            return str.__eq__(self, other)

    experts = [Name(name) for name in planner.experts]
    assert len(experts) == 3 * 64 * LAYERS
    planner.source.dropped(experts)
    assert compared <= 10 * len(experts)


@pytest.mark.parametrize("budget", [None, Budget(0.5, tokens=(16,))])
def test_experts_are_pruned_alone(tmp_path: Path, budget: Budget | None) -> None:
    """All other layers of Qwen3-MoE are ignored."""
    model = MODELS["qwen3"]
    source, ids = model.write(tmp_path / "source"), write_ids(tmp_path / "ids.npy", 24)
    layer = [r"\.experts\.=budget"] if budget else PRUNED
    options = {"layer": layer, "ignore": ["self_attn"], "budget": budget, "epochs": 0, "rotate": "auto"}
    report = calibrated(source, tmp_path / "out", ids, **options)
    assert {*report.plan.patterns} == {*model.experts()}
    before, after = tensors_of(source), tensors_of(tmp_path / "out")
    assert all(torch.equal(after[f"{name}.weight"], before[f"{name}.weight"]) for name in model.linears())
    with pytest.raises(CheckpointError, match="is left to prune; .* prunes them, too"):
        convert(source, tmp_path / "x", ignore=["self_attn"])


def test_distillation_of_pruned_experts_is_refused(tmp_path: Path) -> None:
    source, ids = MODELS["qwen3"].write(tmp_path / "source"), write_ids(tmp_path / "ids.npy")
    with pytest.raises(CalibrationError, match="--distill does not train routed experts"):
        calibrated(source, tmp_path / "out", ids, distill=(ids,), layer=PRUNED)
