"""Calibration sees what will be served, keeps what needs no pruning, and reports what it wrote."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from calibration import LINEARS, TOKENS, calibrated, write_ids
from checkpoints import LLAMA, config_of, llama, tensors_of, write

from slidesparse import convert as converting
from slidesparse.calibrate import pipeline, work
from slidesparse.calibrate.cache import HiddenStates, Inputs
from slidesparse.calibrate.data import load_samples
from slidesparse.calibrate.errors import CalibrationError
from slidesparse.calibrate.hessian import output_error
from slidesparse.calibrate.models import open_model
from slidesparse.calibrate.target import gather
from slidesparse.checkpoint import Checkpoint
from slidesparse.pattern import SlidePattern
from slidesparse.prune import prune
from slidesparse.publish import SpaceError
from slidesparse.quantize import dequantize_rows, quantize_rows

FIRST = "model.layers.0.self_attn.q_proj"
CPU = torch.device("cpu")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return llama(tmp_path / "source")


@pytest.fixture
def ids(tmp_path: Path) -> str:
    return write_ids(tmp_path / "ids.npy")


@pytest.mark.parametrize("how", [{"skip": ["o_proj"]}, {"skip_worst": "30%"}], ids=["skip", "skip-worst"])
@pytest.mark.parametrize("method", ["sparsegpt", "wanda"])
def test_what_is_skipped_is_seen_as_it_is_served(
    source: Path, tmp_path: Path, ids: str, monkeypatch: pytest.MonkeyPatch, method: str, how: dict[str, Any]
) -> None:
    """Quantized: by the layers behind it, while they are pruned, and while they are trained."""
    seen: dict[str, torch.Tensor] = {}
    trained: list[set[str]] = []
    plain, tune = pipeline._prune_stage, pipeline.finetune

    def prune_stage(task: Any, number: int, stage: int, names: Any, inputs: Inputs, *rest: Any) -> Any:
        for name in task.skipped:
            short = name.removeprefix(task.model.prefix(number))
            if f"{short}.weight" in inputs.block.weights:
                seen[name] = inputs.block.weights[f"{short}.weight"].clone()
        return plain(task, number, stage, names, inputs, *rest)

    def finetune(inputs: Inputs, targets: Any, pruned: Any, quantized: Any, *rest: Any) -> Any:
        trained.append(set(quantized) - set(pruned))
        return tune(inputs, targets, pruned, quantized, *rest)

    monkeypatch.setattr(pipeline, "_prune_stage", prune_stage)
    monkeypatch.setattr(pipeline, "finetune", finetune)
    report = calibrated(source, tmp_path / "out", ids, method=method, finetune=1, **how)
    written = tensors_of(tmp_path / "out")
    assert report.skipped
    assert set(seen) == set(report.skipped)
    for name, weight in seen.items():
        served = dequantize_rows(written[f"{name}.weight"], written[f"{name}.weight_scale"])
        assert torch.equal(weight, served)
    if method == "sparsegpt":
        assert any(trained)


@pytest.mark.parametrize("sparser", ["2:4", "6:8"])
@pytest.mark.parametrize("method", ["sparsegpt", "wanda", "magnitude"])
def test_a_layer_that_obeys_the_pattern_is_kept(
    source: Path, tmp_path: Path, ids: str, sparser: str, method: str
) -> None:
    tensors = tensors_of(source)
    for name in LINEARS:
        tensors[f"{name}.weight"] = prune(tensors[f"{name}.weight"], SlidePattern.parse(sparser))
    kept = write(tmp_path / "pruned", config_of(source), tensors)
    calibrated(kept, tmp_path / "out", ids, method=method, finetune=0)
    written = tensors_of(tmp_path / "out")
    for name in LINEARS:
        codes, _ = quantize_rows(tensors[f"{name}.weight"].float(), torch.int8, "cuda")
        assert torch.equal(written[f"{name}.weight"], codes)
    if method == "sparsegpt":
        calibrated(kept, tmp_path / "tuned", ids, method=method, finetune=2)
        changed = tensors_of(tmp_path / "tuned")
        zeros = {name: tensors[f"{name}.weight"] == 0 for name in LINEARS}
        assert all(not changed[f"{name}.weight"][zero].any() for name, zero in zeros.items())


def test_shards_and_tied_embeddings(source: Path, tmp_path: Path, ids: str) -> None:
    """The same layers come out of a source in two files without an lm_head of its own."""
    tensors = {name: t for name, t in tensors_of(source).items() if name != "lm_head.weight"}
    config = config_of(source) | {"tie_word_embeddings": True}
    apart = write(tmp_path / "apart", config, tensors, shards=2)
    assert len(list(apart.glob("*.safetensors"))) == 2
    for name, folder in (("one", source), ("two", apart)):
        calibrated(folder, tmp_path / name, ids, finetune=1)
    one, two = (tensors_of(tmp_path / name) for name in ("one", "two"))
    assert set(one) - set(two) == {"lm_head.weight"}
    for name, tensor in two.items():
        assert torch.equal(tensor.view(torch.uint8), one[name].view(torch.uint8))


def test_the_error_reported_is_that_of_what_was_written(source: Path, tmp_path: Path, ids: str) -> None:
    """Of the first stage, whose inputs no pruning changes."""
    report = calibrated(source, tmp_path / "out", ids, finetune=4)
    rows = {row["name"]: row for row in report.layers}
    checkpoint = Checkpoint.open(source)
    model, written = open_model(checkpoint), tensors_of(tmp_path / "out")
    samples = load_samples(ids, model, 128, TOKENS[1])
    with checkpoint.reader() as reader:
        block, embed = model.load(reader, 0, CPU), model.embedder(reader, samples.ids, CPU)
    states = HiddenStates([(*TOKENS, LLAMA.hidden)], CPU, tmp_path)
    states[0] = embed(torch.stack(samples.ids))
    hessian = gather(Inputs(block, states, keep=False), 0)[0].matrix
    served = dequantize_rows(written[f"{FIRST}.weight"], written[f"{FIRST}.weight_scale"])
    found = output_error(tensors_of(source)[f"{FIRST}.weight"].float(), served, hessian)
    assert rows[FIRST]["error_finetuned"] == pytest.approx(found, rel=1e-4)  # float32 sums in another order
    assert rows[FIRST]["error_finetuned"] != rows[FIRST]["error_quantized"]
    largest = max(rows.values(), key=lambda row: row["error_finetuned"])
    assert report.sensitivity[0] == largest["name"]


@pytest.mark.parametrize("method", ["sparsegpt", "wanda", "magnitude"])
def test_inputs_that_are_not_finite_are_refused(source: Path, tmp_path: Path, ids: str, method: str) -> None:
    tensors = tensors_of(source)
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = torch.full_like(tensors[name], 3e38)
    overflowing = write(tmp_path / "huge", config_of(source), tensors)
    with pytest.raises(CalibrationError, match="not finite"):
        calibrated(overflowing, tmp_path / "out", ids, method=method)


def test_nan_is_no_small_error() -> None:
    w = torch.ones(2, 4)
    assert math.isnan(output_error(w, w / 2, torch.full((4, 4), float("nan"))))


def test_a_gpu_that_is_too_small_is_explained(
    source: Path, tmp_path: Path, ids: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> Any:
        raise torch.OutOfMemoryError("tried to allocate 3 GiB")

    monkeypatch.setattr(pipeline, "gather", full)
    with pytest.raises(
        CalibrationError, match=r"does not fit into the memory of cpu .tried to allocate 3 GiB"
    ):
        calibrated(source, tmp_path / "out", ids)


def test_finished_layers_need_no_room_again(
    source: Path, tmp_path: Path, ids: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk says how to go on, and going on asks for as much less as there is."""
    asked: list[int] = []
    monkeypatch.setattr(converting, "require_space", lambda _, needed: asked.append(needed))

    def full(*_: Any) -> Any:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(converting, "read_back", full)
        with pytest.raises(SpaceError, match=r"are kept. Free some space, then .* with --resume"):
            calibrated(source, tmp_path / "out", ids)
    there = sum(
        path.stat().st_size for path in work.work_folder(tmp_path / "out").glob("layer-*.safetensors")
    )
    calibrated(source, tmp_path / "out", ids, resume=True)
    assert there > 0
    assert asked[0] - asked[1] == there


def test_texts_without_tokens_are_left_out(tmp_path: Path, source: Path) -> None:
    """An encoder's samples are texts; one of a character that the tokenizer drops has no token."""
    from slidesparse.calibrate.data import _one_by_one

    found = _one_by_one(iter([[1, 2], [], [3]]), 5, 8)
    assert [sample.tolist() for sample in found] == [[1, 2], [3]]


@pytest.mark.parametrize(
    ("scaling", "words"),
    [
        ({"rope_type": "linear"}, "rotary embeddings of type 'linear' lack a usable 'factor'"),
        ({"rope_type": "llama3", "factor": 8.0}, "rotary embeddings of type 'llama3' lack a usable"),
    ],
)
def test_rotary_embeddings_without_their_numbers(source: Path, scaling: dict[str, Any], words: str) -> None:
    path = source / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rope_scaling": scaling}))
    with pytest.raises(CalibrationError, match=words):
        open_model(Checkpoint.open(source))


def test_samples_end_where_a_sliding_window_does(source: Path) -> None:
    path = source / "config.json"
    plain = json.loads(path.read_text())
    for change, longest in (
        ({"sliding_window": 48}, 48),
        ({"sliding_window": 48, "use_sliding_window": False}, LLAMA_POSITIONS),
        ({"sliding_window": None}, LLAMA_POSITIONS),
    ):
        path.write_text(json.dumps(plain | change))
        assert open_model(Checkpoint.open(source)).longest == longest


LLAMA_POSITIONS = 512
