"""Conversions with calibration data, from float weights to the written checkpoint."""

from __future__ import annotations

import json
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from calibration import LINEARS, TOKENS, calibrated, write_ids
from checkpoints import DOWN, LLAMA, Q, bert, config_of, convert, llama, snapshot, tensors_of, write
from slidesparse.calibrate.models import LayeredModel, open_model
from strategies import NAMED, assert_same_bits

from slidesparse.calibrate import inputs, pipeline
from slidesparse.calibrate.inputs import HiddenStates
from slidesparse.calibrate.pipeline import Position
from slidesparse.calibrate.resume import work_folder
from slidesparse.calibrate.task import Calibration, Task
from slidesparse.checkpoint.inspection import inspect, verify
from slidesparse.checkpoint.metadata import Metadata
from slidesparse.checkpoint.storage import Checkpoint
from slidesparse.convert import stream
from slidesparse.convert.budget import Budget
from slidesparse.convert.options import ConvertOptions
from slidesparse.convert.plan import calibration_task, make_plan
from slidesparse.convert.report import Report
from slidesparse.errors import CalibrationError, EnvironmentFault
from slidesparse.pattern import SlidePattern
from slidesparse.prune import prune
from slidesparse.quantize import dequantize_rows, quantize_rows
from slidesparse.slide import violations

CPU = torch.device("cpu")
FIRST = "model.layers.0.self_attn.q_proj"
METHODS = pytest.mark.parametrize("method", ["sparsegpt", "wanda", "magnitude"])


def errors(report: Report) -> dict[str, float]:
    return {row["name"]: row["error_quantized"] for row in report.layers}


def dequantized_weight(folder: Path, layer: str) -> torch.Tensor:
    """Return the dequantized weight of a converted layer."""
    tensors = tensors_of(folder)
    return dequantize_rows(tensors[f"{layer}.weight"], tensors[f"{layer}.weight_scale"])


# Patterns, methods and errors


@pytest.mark.parametrize("ratio", NAMED)
def test_calibrated_conversion_for_every_pattern(source: Path, tmp_path: Path, ids: str, ratio: str) -> None:
    """K is 64 and 88: most patterns leave a tail.  Methods take turns, as test_methods.py has both for all."""
    pattern = SlidePattern.parse(ratio)
    quant = "fp8" if NAMED.index(ratio) % 2 else "int8"
    method = "wanda" if NAMED.index(ratio) // 2 % 2 else "sparsegpt"
    report = calibrated(
        source, tmp_path / "out", ids, pattern=pattern, method=method, quant=quant, finetune=1
    )
    original, converted = tensors_of(source), tensors_of(tmp_path / "out")
    assert sorted(report.pruned) == LINEARS
    for name in LINEARS:
        codes = converted[f"{name}.weight"]
        assert violations(codes, pattern) is None
    for name, tensor in original.items():
        if name.removesuffix(".weight") not in LINEARS:
            assert_same_bits(converted[name], tensor)  # lm_head, embeddings, norms
    assert inspect(tmp_path / "out").violations == 0
    for row in report.layers:
        assert (row["out_features"], row["in_features"]) == LLAMA.linears()[row["name"]]
        assert (row["violations"], row["dead_columns"], row["method"]) == (0, 0, method)
        assert row["tokens"] == TOKENS[0] * TOKENS[1]
        assert 0 < row["scale_min"] <= row["scale_max"]
        assert ratio == "2_inf" or 0 < row["error_pruned"] <= row["error_quantized"] * 1.01 < 1
        assert row["zeros"] == int((converted[f"{row['name']}.weight"].float() == 0).sum())
    assert not work_folder(tmp_path / "out").exists()


def test_calibrated_conversion_of_an_encoder(tmp_path: Path) -> None:
    source, calib = bert(tmp_path / "source"), tmp_path / "calib.jsonl"
    texts = [" ".join(f"w{(i * j) % 50}" for j in range(2, 4 + i % 12)) for i in range(40)]
    calib.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    report = calibrated(source, tmp_path / "out", str(calib), seqlen=None, samples=30)
    assert len(report.pruned) == 12
    assert report.samples.startswith("calib.jsonl, 30 samples, ")
    assert all(0 < row["block_error_finetuned"] <= row["block_error"] < 1 for row in report.layers)
    assert inspect(tmp_path / "out").violations == 0
    by_magnitude = calibrated(source, tmp_path / "m", str(calib), seqlen=None, samples=30, method="magnitude")
    assert sum(errors(report).values()) < 0.8 * sum(errors(by_magnitude).values())


def test_methods_rank_by_error_and_sweeps_reduce_it(source: Path, tmp_path: Path, ids: str) -> None:
    """Magnitude pruning chooses the same weights with and without calibration data."""
    runs = {"sparsegpt": {}, "alone": {"sweeps": 0}, "wanda": {}, "magnitude": {}}
    total = {}
    for name, options in runs.items():
        method = "sparsegpt" if name == "alone" else name
        report = calibrated(source, tmp_path / name, ids, method=method, finetune=0, **options)
        total[name] = sum(errors(report).values())
    assert list(total) == sorted(total, key=total.__getitem__), total
    assert report.sensitivity == sorted(errors(report), key=errors(report).__getitem__, reverse=True)
    convert(source, tmp_path / "without")
    assert snapshot(tmp_path / "magnitude") == snapshot(tmp_path / "without")


@pytest.mark.parametrize("epochs", [0, 2])
def test_reported_error_is_that_of_the_written_layer(
    source: Path, tmp_path: Path, ids: str, epochs: int
) -> None:
    """The inputs of layer 0's q_proj are normed embeddings, which do not depend on pruning."""
    report = calibrated(source, tmp_path / "out", ids, finetune=epochs)
    rows = {row["name"]: row for row in report.layers}
    tensors = tensors_of(source)
    x = tensors["model.embed_tokens.weight"].double()[torch.from_numpy(np.load(ids)).flatten()]
    x = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    w = tensors[f"{FIRST}.weight"].double()
    expected = float(
        (x @ (w - dequantized_weight(tmp_path / "out", FIRST).double()).t()).norm() / (x @ w.t()).norm()
    )
    reported = "error_finetuned" if epochs else "error_quantized"
    # the Hessian and its products are float32
    assert rows[FIRST][reported] == pytest.approx(expected, rel=1e-4)
    assert rows[FIRST]["error_finetuned"] != rows[FIRST]["error_quantized"]
    assert report.sensitivity[0] == max(rows.values(), key=lambda row: row[reported])["name"]


def test_later_layers_depend_on_earlier_pruning(source: Path, tmp_path: Path, ids: str) -> None:
    """Layer 1's inputs, and so its weights, depend on how layer 0 was pruned."""
    calibrated(source, tmp_path / "all", ids, finetune=0)
    calibrated(source, tmp_path / "last", ids, finetune=0, skip=[r"layers\.0\."])
    first, second = tensors_of(tmp_path / "all"), tensors_of(tmp_path / "last")
    assert not torch.equal(first[f"{Q}.weight"], second[f"{Q}.weight"])


@pytest.mark.parametrize("sparser", ["2:4", "6:8"])
@METHODS
def test_layer_that_obeys_the_pattern_is_unchanged(
    source: Path, tmp_path: Path, ids: str, sparser: str, method: str
) -> None:
    tensors = tensors_of(source)
    for name in LINEARS:
        tensors[f"{name}.weight"] = prune(tensors[f"{name}.weight"], SlidePattern.parse(sparser))
    pruned = write(tmp_path / "pruned", config_of(source), tensors)
    calibrated(pruned, tmp_path / "out", ids, method=method, finetune=0)
    output = tensors_of(tmp_path / "out")
    for name in LINEARS:
        codes, _ = quantize_rows(tensors[f"{name}.weight"].float(), torch.int8, "cuda")
        assert torch.equal(output[f"{name}.weight"], codes)
    if method == "sparsegpt":
        calibrated(pruned, tmp_path / "tuned", ids, method=method, finetune=1)
        changed = tensors_of(tmp_path / "tuned")
        zeros = {name: tensors[f"{name}.weight"] == 0 for name in LINEARS}
        assert all(not changed[f"{name}.weight"][zero].any() for name, zero in zeros.items())


@METHODS
def test_inputs_that_are_not_finite_are_refused(source: Path, tmp_path: Path, ids: str, method: str) -> None:
    tensors = tensors_of(source)
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = torch.full_like(tensors[name], 3e38)
    overflowing = write(tmp_path / "huge", config_of(source), tensors)
    with pytest.raises(CalibrationError, match="not finite"):
        calibrated(overflowing, tmp_path / "out", ids, method=method)


# Outputs of the dense model as target


@torch.inference_mode()
def pruned_floats(source: Path, folder: Path, ids: str, **options: Any) -> dict[str, torch.Tensor]:
    """Return the weights of a model pruned to 6:8 and not quantized, by layer name."""
    calibration = Calibration(ids, samples=60, seqlen=24, device="cpu", finetune=0, **options)
    checkpoint = Checkpoint.open(source)
    task = calibration_task(make_plan(checkpoint, ConvertOptions(SlidePattern(8), calibration=calibration)))
    pruned: dict[str, torch.Tensor] = {}
    with checkpoint.reader() as reader, pipeline.walk(task, reader, folder, task.streams) as positions:
        for position in positions:
            for stage in range(len(position.block.stages)):
                weights = position.weights_to_prune(stage)
                hessian, drift = inputs.gather_statistics(position.inputs, stage, position.dense, weights)
                errors = drift.errors() if drift else None
                for name, w in pipeline.prune_rows(position, hessian, errors, weights).items():
                    position.block.weights[f"{name}.weight"] = pruned[position.full_name(name)] = w
    return pruned


def last_hidden_states(source: Path, ids: np.ndarray, changed: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the last block's output of a model with some of its weights replaced."""
    model, tokens = open_model(Checkpoint.open(source)), torch.from_numpy(ids)
    with model.checkpoint.reader() as reader:
        x = model.embedder(reader, list(tokens), CPU)(tokens)
        for number in range(model.blocks):
            block, prefix = model.load(reader, number, CPU), model.prefix(number)
            block.weights |= {
                f"{name.removeprefix(prefix)}.weight": w.float()
                for name, w in changed.items()
                if name.startswith(prefix)
            }
            x = block.output(x)
    return x


def test_dense_target_reduces_the_output_error(source: Path, tmp_path: Path) -> None:
    """Errors are measured on the calibration samples. Only the first stage has the inputs of the dense model."""
    ids = np.load(write_ids(tmp_path / "ids.npy", 60))
    dense = last_hidden_states(source, ids, {})
    by_target = {
        target: pruned_floats(source, tmp_path, str(tmp_path / "ids.npy"), target=target)
        for target in ("own", "dense")
    }
    error = {
        target: float((last_hidden_states(source, ids, weights) - dense).norm())
        for target, weights in by_target.items()
    }
    assert 0 < error["dense"] < 0.98 * error["own"]
    assert torch.equal(by_target["own"][FIRST], by_target["dense"][FIRST])
    o_proj = "model.layers.0.self_attn.o_proj"
    assert not torch.equal(by_target["own"][o_proj], by_target["dense"][o_proj])


def test_disk_space_of_both_streams_is_counted(
    source: Path, tmp_path: Path, ids: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def task(target: str) -> Task:
        calibration = Calibration(ids, seqlen=24, device="cpu", target=target)
        options = ConvertOptions(SlidePattern(8), calibration=calibration)
        return calibration_task(make_plan(Checkpoint.open(source), options))

    own_target, dense_target = task("own"), task("dense")
    assert dense_target.disk_bytes() == own_target.disk_bytes()  # both fit in memory
    monkeypatch.setattr(inputs, "MEMORY_BYTES", 0)
    assert (
        dense_target.disk_bytes() - own_target.disk_bytes() == 4 * dense_target.samples.tokens * LLAMA.hidden
    )
    nbytes = 4 * 6 * 24 * 64
    for limit, place in ((2 * nbytes, "memory"), (2 * nbytes - 1, "disk")):
        monkeypatch.setattr(inputs, "MEMORY_BYTES", limit)
        assert HiddenStates([(6, 24, 64)], CPU, tmp_path, streams=2).where == place


# Memory and disk


def test_spilled_hidden_states_change_nothing(
    source: Path, tmp_path: Path, ids: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calibrated(source, tmp_path / "memory", ids, finetune=1)
    monkeypatch.setattr(inputs, "MEMORY_BYTES", 0)
    calibrated(source, tmp_path / "disk", ids, finetune=1)
    assert snapshot(tmp_path / "disk") == snapshot(tmp_path / "memory")


@pytest.mark.gpu
def test_inputs_kept_on_the_gpu_change_nothing(
    source: Path, tmp_path: Path, ids: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inputs are kept between stages or recomputed for each; hidden states are on the GPU or on the disk."""
    calibrated(source, tmp_path / "kept", ids, device="cuda")
    monkeypatch.setattr(inputs, "SUSPENDED_DEVICE_PART", 2**60)
    calibrated(source, tmp_path / "anew", ids, device="cuda")
    monkeypatch.setattr(inputs, "DEVICE_PART", 2**60)
    monkeypatch.setattr(inputs, "MEMORY_BYTES", 0)
    calibrated(source, tmp_path / "disk", ids, device="cuda")
    assert snapshot(tmp_path / "kept") == snapshot(tmp_path / "anew") == snapshot(tmp_path / "disk")
    assert inspect(tmp_path / "kept").violations == 0


def test_at_most_one_block_is_in_memory(
    source: Path, tmp_path: Path, ids: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive: list[weakref.ref[torch.Tensor]] = []
    peak, load = 0, LayeredModel.load

    def counted(self: Any, *arguments: Any) -> Any:
        nonlocal peak
        block = load(self, *arguments)
        alive.extend(weakref.ref(tensor) for tensor in block.weights.values())
        peak = max(peak, sum(loaded.nbytes for ref in alive if (loaded := ref()) is not None))
        return block

    monkeypatch.setattr(LayeredModel, "load", counted)
    calibrated(source, tmp_path / "out", ids, finetune=1)
    block_bytes = sum(
        4 * tensor.numel() for name, tensor in tensors_of(source).items() if ".layers.0." in name
    )
    assert peak <= 2 * block_bytes  # the next block is read while a variable still refers to the last


def test_out_of_memory_is_explained(
    source: Path, tmp_path: Path, ids: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> Any:
        raise torch.OutOfMemoryError("tried to allocate 3 GiB")

    monkeypatch.setattr(pipeline, "gather_statistics", full)
    with pytest.raises(CalibrationError, match=r"memory of cpu .*3 GiB.*--samples"):
        calibrated(source, tmp_path / "out", ids)


def test_resume_needs_no_disk_space_for_finished_blocks(
    source: Path, tmp_path: Path, ids: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error of a full disk names --resume, and a resumed run needs less space by what was written."""
    required: list[int] = []
    monkeypatch.setattr(stream, "require_space", lambda _, needed: required.append(needed))

    def full(*_: Any) -> Any:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(stream, "read_back", full)
        with pytest.raises(EnvironmentFault, match="with --resume"):
            calibrated(source, tmp_path / "out", ids, finetune=0)
    stored = sum(path.stat().st_size for path in work_folder(tmp_path / "out").glob("layer-*.safetensors"))
    calibrated(source, tmp_path / "out", ids, finetune=0, resume=True)
    assert stored > 0
    assert required[0] - required[1] == stored


# Selection of layers


def test_mixed_patterns_by_layer_rules(source: Path, tmp_path: Path, ids: str) -> None:
    rules = ["down_proj=8:10", r"layers\.1\..*down_proj=14:16", "gate_proj|up_proj=4:6"]
    for name, options in (
        ("calibrated", {"calibration": Calibration(ids, seqlen=24, finetune=1, rotate="off")}),
        ("plain", {}),
    ):
        report = convert(source, tmp_path / name, layer=rules, **options)
        ratios = {layer: pattern.ratio for layer, pattern in report.patterns.items()}
        assert ratios[DOWN] == "8:10"
        assert ratios["model.layers.1.mlp.down_proj"] == "14:16"
        assert ratios["model.layers.1.mlp.gate_proj"] == "4:6"
        assert ratios[Q] == "6:8"
        metadata = Metadata.of_config(config_of(tmp_path / name)["quantization_config"])
        assert metadata is not None
        assert metadata.pattern.ratio == "6:8"
        assert {layer: entry.pattern.ratio for layer, entry in metadata.layers.items()} == ratios
        for layer, ratio in ratios.items():
            weight = tensors_of(tmp_path / name)[f"{layer}.weight"]
            assert violations(weight, SlidePattern.parse(ratio)) is None
        slided = tmp_path / f"{name} slided"
        convert(source, slided, layer=rules, layout="slided", **options)
        assert verify(tmp_path / name, slided).equal


def test_skipped_layers_are_quantized_and_not_pruned(source: Path, tmp_path: Path, ids: str) -> None:
    convert(source, tmp_path / "quantized", "2_inf")
    expected = tensors_of(tmp_path / "quantized")
    for name, options in (
        ("calibrated", {"calibration": Calibration(ids, seqlen=24, finetune=1, rotate="off")}),
        ("plain", {}),
    ):
        report = convert(source, tmp_path / name, skip=["o_proj", r"1.*down"], **options)
        layers = [f"model.layers.{i}.self_attn.o_proj" for i in (0, 1)] + ["model.layers.1.mlp.down_proj"]
        assert report.skipped == dict.fromkeys(layers, "--skip")
        converted, block = tensors_of(tmp_path / name), config_of(tmp_path / name)["quantization_config"]
        for layer in report.skipped:
            assert_same_bits(converted[f"{layer}.weight"], expected[f"{layer}.weight"])
            assert_same_bits(converted[f"{layer}.weight_scale"], expected[f"{layer}.weight_scale"])
            assert layer not in block["slidesparse"]["layers"]
        assert block["ignore"] == ["lm_head"]
        slided = tmp_path / f"{name} slided"
        convert(tmp_path / name, slided, layout="slided")
        assert verify(tmp_path / name, slided).equal


@pytest.mark.parametrize(
    "options", [{"skip": ["o_proj"]}, {"budget": Budget(zeros=0.1)}], ids=["skip", "budget"]
)
@pytest.mark.parametrize("method", ["sparsegpt", "wanda"])
def test_later_layers_read_outputs_of_quantized_skipped_layers(
    source: Path,
    tmp_path: Path,
    ids: str,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    options: dict[str, Any],
) -> None:
    """Skipped layers are quantized both while later layers are pruned and while those are trained."""
    read_weights: dict[str, torch.Tensor] = {}
    trained: list[set[str]] = []
    prune_rows, tune = pipeline.prune_rows, pipeline.finetune

    def look(at: Position, *arguments: Any) -> Any:
        for name in (name for stage in at.block.stages for name in stage):
            if at.full_name(name) in at.task.skipped:
                read_weights[at.full_name(name)] = at.block.weights[f"{name}.weight"].clone()
        return prune_rows(at, *arguments)

    def finetune(inputs: Any, targets: Any, pruned: Any, quantized: Any, *arguments: Any) -> Any:
        trained.append(set(quantized) - set(pruned))
        return tune(inputs, targets, pruned, quantized, *arguments)

    monkeypatch.setattr(pipeline, "prune_rows", look)
    monkeypatch.setattr(pipeline, "finetune", finetune)
    report = calibrated(source, tmp_path / "out", ids, method=method, finetune=1, **options)
    assert report.skipped
    assert set(read_weights) == set(report.skipped)
    assert all(
        torch.equal(weight, dequantized_weight(tmp_path / "out", name))
        for name, weight in read_weights.items()
    )
    assert any(trained) == (method == "sparsegpt")


def test_linear_option_never_prunes_lm_head_and_embeddings(source: Path, tmp_path: Path, ids: str) -> None:
    for name, options in (
        ("calibrated", {"calibration": Calibration(ids, seqlen=24, finetune=0)}),
        ("plain", {}),
    ):
        report = convert(source, tmp_path / name, linear="proj|lm_head|embed", **options)
        assert sorted(report.pruned) == LINEARS


def test_shards_and_tied_embeddings_change_nothing(source: Path, tmp_path: Path, ids: str) -> None:
    """A source of two files without an own lm_head gives the same layers."""
    tensors = {name: t for name, t in tensors_of(source).items() if name != "lm_head.weight"}
    config = config_of(source) | {"tie_word_embeddings": True}
    apart = write(tmp_path / "apart", config, tensors, shards=2)
    assert len(list(apart.glob("*.safetensors"))) == 2
    for name, folder in (("one", source), ("two", apart)):
        calibrated(folder, tmp_path / name, ids, finetune=1)
    untied, tied = (tensors_of(tmp_path / name) for name in ("one", "two"))
    assert set(untied) - set(tied) == {"lm_head.weight"}
    for name, tensor in tied.items():
        assert torch.equal(tensor.view(torch.uint8), untied[name].view(torch.uint8))


# Refusals before anything is written


@pytest.mark.parametrize(
    ("options", "fact"),
    [
        ({"device": "tpu"}, "--device 'tpu'"),
        ({"sweeps": -1}, "--sweeps -1"),
        ({"target": "mean"}, "--target 'mean'"),
        ({"finetune": -1}, "--finetune -1"),
        ({"target": "own", "finetune": 2}, "--target own"),
    ],
)
def test_invalid_calibration_options_are_refused(options: dict[str, Any], fact: str) -> None:
    with pytest.raises(CalibrationError, match=fact):
        Calibration("random", **options)


def test_layers_outside_the_model_are_refused(tmp_path: Path) -> None:
    source = llama(tmp_path / "source", model__extra__weight=torch.ones(8, 8).bfloat16())
    with pytest.raises(CalibrationError, match=r"model\.extra is none"):
        calibrated(source, tmp_path / "out", "random", samples=1, linear="_proj|extra")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_missing_gpu_is_refused(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(EnvironmentFault, match="--device cuda"):
        calibrated(source, tmp_path / "out", "random", samples=1, device="cuda")
