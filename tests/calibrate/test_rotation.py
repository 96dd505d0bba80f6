"""Rotation of the residual stream, which keeps the model's outputs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from calibration import DEVICES, calibrated, random_decoder, write_ids
from checkpoints import DOWN, bert, config_of, edit_json, llama, snapshot, tensors_of, write

from slidesparse.calibrate import learning, pipeline
from slidesparse.calibrate.learning import _layer_costs, hadamard
from slidesparse.calibrate.models import Block, LayeredModel, attention, open_model
from slidesparse.calibrate.rotation import RotatedReader, Rotation, rotation_obstacle, untie_head
from slidesparse.calibrate.task import Calibration, Task, no_progress
from slidesparse.checkpoint.inspection import inspect
from slidesparse.checkpoint.storage import Checkpoint
from slidesparse.convert import stream
from slidesparse.convert.budget import Budget
from slidesparse.convert.options import ConvertOptions
from slidesparse.convert.plan import calibration_task, make_plan
from slidesparse.errors import CalibrationError
from slidesparse.pattern import SlidePattern
from slidesparse.prune import prune
from slidesparse.quantize import dequantize_rows

CPU = torch.device("cpu")
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama tied": ("Llama", {"tie_word_embeddings": True}),
    "llama biased": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {}),
    "qwen2 tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3 tied": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
}


def save_random_model(name: str, folder: Path) -> Any:
    kind, settings = MODELS[name]
    model = random_decoder(kind, **settings)
    model.save_pretrained(folder)
    return model


def orthogonal(*shape: int) -> torch.Tensor:
    return torch.linalg.qr(torch.randn(*shape, dtype=torch.float64)).Q


def write_rotated_model(source: Path, out: Path, rotation: Rotation) -> Any:
    """Write the rotated model in float32 and load it by transformers."""
    checkpoint = untie_head(Checkpoint.open(source))
    with checkpoint.reader() as reader:
        rotated = RotatedReader(reader, open_model(checkpoint), CPU, rotation)
        tensors = {name: rotated.whole(name).contiguous() for name in checkpoint.tensors}
    write(out, checkpoint.config, tensors)
    return transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)


@pytest.mark.parametrize("name", MODELS)
@torch.inference_mode()
def test_rotation_keeps_model_outputs(name: str, tmp_path: Path) -> None:
    model = save_random_model(name, tmp_path / "source")
    sizes = open_model(Checkpoint.open(tmp_path / "source")).sizes[0]
    rotation = Rotation(orthogonal(48, 48), orthogonal(2, sizes.kv_heads, sizes.head_dim, sizes.head_dim))
    rotated = write_rotated_model(tmp_path / "source", tmp_path / "out", rotation)
    assert rotated.config.tie_word_embeddings is False
    ids = torch.randint(3, 100, (2, 50), generator=torch.Generator().manual_seed(1))
    expected, actual = model(ids).logits, rotated(ids).logits
    assert float((actual - expected).abs().max()) <= 200 * 2**-24 * float(expected.abs().max())
    assert not torch.allclose(
        rotated.model.layers[0].mlp.down_proj.weight, model.model.layers[0].mlp.down_proj.weight
    )


def test_untie_head_ignores_stored_head_of_a_tied_model(tmp_path: Path) -> None:
    """Transformers and vLLM ignore that head, too."""
    source = llama(tmp_path / "source")
    edit_json(source / "config.json", tie_word_embeddings=True)
    untied = untie_head(Checkpoint.open(source))
    assert untied.config["tie_word_embeddings"] is False
    with untied.reader() as reader:
        head, embedding = (reader.whole(f"{name}.weight") for name in ("lm_head", "model.embed_tokens"))
        assert torch.equal(head, embedding)
        assert not torch.equal(head, tensors_of(source)["lm_head.weight"])
        x = torch.randn(3, embedding.shape[1])
        tied = open_model(Checkpoint.open(source)).logits(reader, CPU)(x)
        assert torch.equal(tied, open_model(untied).logits(reader, CPU)(x))


def test_hadamard_is_orthogonal_and_has_no_zeros() -> None:
    for size in (1, 7, 48, 64):
        start = hadamard(size)
        assert_near(start @ start.mT, torch.eye(size, dtype=torch.float64))
        assert (start != 0).all()


def assert_near(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-12) -> None:
    assert float((actual - expected).abs().max()) <= tolerance * float(expected.abs().max())


# Learning


def task_of(source: Path, pattern: str = "6:8") -> Task:
    np.save(source / "ids.npy", np.random.default_rng(0).integers(0, 100, (6, 40)))
    calibration = Calibration(str(source / "ids.npy"), seqlen=40, device="cpu")
    options = ConvertOptions(SlidePattern.parse(pattern), calibration=calibration)
    return calibration_task(make_plan(untie_head(Checkpoint.open(source)), options))


def some_rotation(model: LayeredModel) -> Rotation:
    torch.manual_seed(2)
    sizes = model.sizes[0]
    return Rotation(
        orthogonal(model.hidden, model.hidden),
        orthogonal(model.blocks, sizes.kv_heads, sizes.head_dim, sizes.head_dim),
    )


def identity_like(rotation: Rotation) -> Rotation:
    return Rotation(*(torch.eye(x.shape[-1]).double().expand_as(x) for x in (rotation.q, rotation.r)))


@pytest.mark.parametrize("name", ["llama biased", "qwen3"])
def test_rotation_costs_equal_those_of_the_rotated_model(name: str, tmp_path: Path) -> None:
    """The costs of each block for a rotation equal those measured in the rotated model."""
    save_random_model(name, tmp_path)
    task = task_of(tmp_path)
    rotation = some_rotation(task.model)
    with torch.no_grad(), task.model.checkpoint.reader() as reader:
        costs = _layer_costs(task, RotatedReader(reader, task.model, CPU), tmp_path, no_progress)
        rotated_costs = _layer_costs(
            task, RotatedReader(reader, task.model, CPU, rotation), tmp_path, no_progress
        )
    q, r = rotation.q.float(), rotation.r.float()
    identity, changes = identity_like(rotation), []
    for number in range(task.model.blocks):
        assert len(costs[number]) == len(rotated_costs[number]) == 7
        for cost, rotated_cost in zip(costs[number], rotated_costs[number], strict=True):
            expected = float(rotated_cost(identity.q.float(), identity.r[number].float()))
            assert float(cost(q, r[number])) == pytest.approx(expected, rel=1e-3)
            changes.append(abs(float(cost(identity.q.float(), identity.r[number].float())) / expected - 1))
    assert max(changes) > 0.02


def test_layer_costs_use_gradients_of_the_loss(tmp_path: Path) -> None:
    """Costs are proportional to the mean squared gradients of transformers' own loss."""
    model = save_random_model("llama", tmp_path)
    task = task_of(tmp_path)
    ids = torch.stack(task.samples.ids)
    outputs: dict[str, torch.Tensor] = {}

    def keep(name: str, out: torch.Tensor) -> None:
        out.retain_grad()
        outputs[name] = out

    for name, module in model.model.layers[0].named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_hook(lambda _, __, out, name=name: keep(name, out))
    logits = model(ids).logits[:, :-1]
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum").backward()
    block_gradients: dict[str, torch.Tensor] = {}

    def look(task: Task, number: int, block: Block, gradients: dict[str, torch.Tensor], *_: Any) -> list[Any]:
        block_gradients.update(gradients)  # block 0 comes last
        return []

    with pytest.MonkeyPatch.context() as patch, torch.no_grad(), task.model.checkpoint.reader() as reader:
        patch.setattr(learning, "_block_costs", look)
        _layer_costs(task, RotatedReader(reader, task.model, CPU), tmp_path, no_progress)
    for name, out in outputs.items():
        g = out.grad.flatten(0, 1)  # type: ignore[union-attr]
        diagonal = (
            block_gradients[name].diagonal(dim1=-2, dim2=-1).flatten()
            if block_gradients[name].dim() > 1
            else block_gradients[name]
        )
        assert_near(diagonal, g.square().mean(0), 1e-4)


def test_layer_costs_with_bf16_attention(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_random_model("llama", tmp_path)
    task = task_of(tmp_path)
    monkeypatch.setattr(learning, "attend", lambda *arguments: attention(*arguments).bfloat16())
    with torch.no_grad(), task.model.checkpoint.reader() as reader:
        costs = _layer_costs(task, RotatedReader(reader, task.model, CPU), tmp_path, no_progress)
    assert [len(of_block) for of_block in costs] == [7, 7]


def test_learning_reduces_the_cost_and_is_deterministic(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learning, "STEPS", 25)
    save_random_model("qwen2 tied", tmp_path)
    task = task_of(tmp_path, "2:4")
    parts: list[float] = []

    def progress(phase: str, done: int, total: int) -> None:
        assert phase == "rotating"
        parts.append(done / total)

    with task.model.checkpoint.reader() as reader:
        first, second = (learning.learn_rotation(task, reader, tmp_path, progress) for _ in range(2))
    once = parts[: len(parts) // 2]
    assert once == sorted(set(once))
    assert once[-1] == 1
    assert first.after < 0.7 * first.before
    for x, y in ((first.rotation.q, second.rotation.q), (first.rotation.r, second.rotation.r)):
        assert torch.equal(x, y)
        assert_near(x @ x.mT, torch.eye(x.shape[-1], dtype=torch.float64).expand_as(x))


# Conversion


@pytest.mark.parametrize("name", ["llama tied", "qwen2"])
@torch.inference_mode()
def test_rotated_conversion_at_2_inf_keeps_model_outputs(name: str, tmp_path: Path) -> None:
    """Only rounding to INT8 changes weights; pruned, skipped and ignored layers are all rotated."""
    model = save_random_model(name, tmp_path / "source")
    np.save(tmp_path / "ids.npy", np.random.default_rng(0).integers(0, 100, (2, 20)))
    options = {"skip": [r"1\.self_attn\.o_proj"], "ignore": [r"0\.self_attn\.o_proj", r"1\.mlp\.down"]}
    ids = str(tmp_path / "ids.npy")
    report = calibrated(tmp_path / "source", tmp_path / "out", ids, pattern="2_inf", rotate="on", **options)
    assert report.rotation
    config = config_of(tmp_path / "out")
    assert config.pop("tie_word_embeddings") is False
    assert "lm_head" in config.pop("quantization_config")["ignore"]
    tensors = tensors_of(tmp_path / "out")
    for layer in [n.removesuffix("_scale") for n in tensors if n.endswith("_scale")]:
        tensors[layer] = dequantize_rows(tensors[layer], tensors.pop(f"{layer}_scale"))
    write(tmp_path / "floats", {**config, "tie_word_embeddings": False}, tensors)
    rotated = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "floats", dtype=torch.float32)
    tokens = torch.randint(3, 100, (2, 50), generator=torch.Generator().manual_seed(1))
    expected, actual = model(tokens).logits, rotated(tokens).logits
    assert float((actual - expected).norm()) <= 0.05 * float(expected.norm())
    weight = model.model.layers[0].self_attn.o_proj.weight
    assert not torch.allclose(tensors["model.layers.0.self_attn.o_proj.weight"], weight, rtol=0.1)


@DEVICES
def test_rotation_reduces_errors_and_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    monkeypatch.setattr(learning, "STEPS", 15)
    source, ids = llama(tmp_path / "source", shards=2), write_ids(tmp_path / "ids.npy")
    options: dict[str, Any] = {"finetune": 0, "layer": ["down_proj=4:6"], "quant": "fp8", "layout": "slided"}
    options["device"] = device
    unrotated = calibrated(source, tmp_path / "plain", ids, **options)
    rotated = calibrated(source, tmp_path / "whole", ids, rotate="on", **options)
    assert unrotated.rotation == ""
    errors = [sum(row["error_quantized"] for row in report.layers) for report in (unrotated, rotated)]
    assert errors[1] < 0.9 * errors[0]
    assert inspect(tmp_path / "whole").violations == 0

    def die(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "_prune_block", die)
        with pytest.raises(KeyboardInterrupt):
            calibrated(source, tmp_path / "out", ids, rotate="on", **options)
    with pytest.raises(CalibrationError, match="with --resume"):
        calibrated(source, tmp_path / "out", ids, rotate="on", **options)
    with pytest.raises(CalibrationError, match="rotate was True, is False"):
        calibrated(source, tmp_path / "out", ids, resume=True, **options)
    monkeypatch.setattr(learning, "learn_rotation", die)  # must not run again
    report = calibrated(source, tmp_path / "out", ids, rotate="on", resume=True, **options)
    assert snapshot(tmp_path / "out") == snapshot(tmp_path / "whole")
    assert report.rotation == rotated.rotation


def test_sparse_model_is_not_rotated(tmp_path: Path) -> None:
    source, pattern = llama(tmp_path / "source"), SlidePattern(8)
    tensors = tensors_of(source)
    write(
        source,
        config_of(source),
        {n: prune(t, pattern) if n == f"{DOWN}.weight" else t for n, t in tensors.items()},
    )
    options: dict[str, Any] = {"samples": 2, "seqlen": 8, "dry_run": True}
    with pytest.raises(CalibrationError, match=f"--rotate on: {DOWN}.weight already satisfies 6:8"):
        calibrated(source, tmp_path / "out", "random", rotate="on", **options)
    assert calibrated(source, tmp_path / "out", "random", rotate="on", pattern="2:4", **options).rotation


def test_rotation_that_prunes_worse_is_used_on_request_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As that of a model of llmcompressor 0.14's SparseGPTModifier with mask_structure "0:0", whose zeros it undoes."""
    monkeypatch.setattr(learning, "STEPS", 2)
    source, ids = llama(tmp_path / "source"), write_ids(tmp_path / "ids.npy")
    tensors = tensors_of(source)
    for name, tensor in tensors.items():
        if name.endswith("_proj.weight"):
            tensor[tensor.abs() < tensor.abs().median()] = 0
    del tensors["lm_head.weight"]
    write(source, {**config_of(source), "tie_word_embeddings": True}, tensors)
    reports = [
        calibrated(source, tmp_path / rotate, ids, finetune=0, rotate=rotate) for rotate in ("auto", "on")
    ]
    assert re.fullmatch(r"not rotated, as .*: estimated pruning loss \+\d+%", reports[0].rotation)
    assert re.search(r"; estimated pruning loss \+\d+%$", reports[1].rotation)
    errors = [sum(row["error_quantized"] for row in report.layers) for report in reports]
    assert errors[0] < 0.7 * errors[1]
    assert [config_of(tmp_path / name)["tie_word_embeddings"] for name in ("auto", "on")] == [True, False]
    heads = ["lm_head.weight" in tensors_of(tmp_path / name) for name in ("auto", "on")]
    assert heads == [False, True]
    keys = []  # of the cache of losses, which the rotated model's may not share

    def estimate(task: Task, reader: Any, work: Any, budget: Budget, rotate: bool, progress: Any) -> None:
        keys.append(rotate)

    monkeypatch.setattr(stream, "estimate", estimate)
    for rotate in ("auto", "on"):
        calibrated(source, tmp_path / "dry", ids, budget=Budget(zeros=0.3), rotate=rotate, dry_run=True)
    assert keys == [False, True]


def test_encoders_are_not_rotated(tmp_path: Path) -> None:
    source = bert(tmp_path / "source")
    options: dict[str, Any] = {"samples": 2, "seqlen": 8, "dry_run": True}
    with pytest.raises(CalibrationError, match="--rotate on: BertModel is not one of LlamaForCausalLM, "):
        calibrated(source, tmp_path / "out", "random", rotate="on", **options)
    report = calibrated(source, tmp_path / "out", "random", rotate="auto", **options)
    assert report.rotation.startswith("not rotated: BertModel is not one of LlamaForCausalLM, ")


@pytest.mark.parametrize(
    ("options", "rotated"),
    [
        ({}, True),
        ({"method": "wanda"}, False),
        ({"pattern": "2_inf"}, False),
        ({"budget": Budget(zeros=0.2)}, True),
    ],
)
def test_models_are_rotated_by_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], rotated: bool
) -> None:
    monkeypatch.setattr(learning, "STEPS", 1)
    source, ids = llama(tmp_path / "source"), write_ids(tmp_path / "ids.npy")
    training_options = {} if options.get("method") else {"finetune": 0}
    report = calibrated(source, tmp_path / "out", ids, rotate="auto", **training_options, **options)
    assert report.rotation.startswith("the residual stream") == rotated
    assert ("lm_head.weight" in tensors_of(tmp_path / "out")) or not rotated


def test_rotation_obstacle_names_unsupported_models(tmp_path: Path) -> None:
    save_random_model("llama", tmp_path)
    assert rotation_obstacle(Checkpoint.open(tmp_path)) is None
    tensors = tensors_of(tmp_path)
    write(tmp_path, config_of(tmp_path), {**tensors, "model.mtp.weight": torch.ones(2)})
    assert "model.mtp.weight" in str(rotation_obstacle(Checkpoint.open(tmp_path)))
    write(tmp_path, config_of(tmp_path), tensors)
    (tmp_path / "modules.json").write_text("[]")  # of a model whose hidden states are used
    assert "modules.json" in str(rotation_obstacle(Checkpoint.open(tmp_path)))
    edit_json(tmp_path / "config.json", architectures=["LlamaModel"])
    assert "LlamaModel" in str(rotation_obstacle(Checkpoint.open(tmp_path)))
