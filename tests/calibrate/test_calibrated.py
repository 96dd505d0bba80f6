"""Conversions with calibration data, from float weights to the written checkpoint."""

from __future__ import annotations

import json
import shutil
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from calibration import LINEARS, calibrated, open_model, save, write_ids
from checkpoints import (
    DOWN,
    assert_same_tensors,
    bert,
    config_of,
    llama,
    rewrite,
    snapshot,
    tensors_of,
    write,
)
from torch import Tensor, nn

from slidesparse.calibrate import inputs
from slidesparse.calibrate.inputs import HiddenStates, host_memory
from slidesparse.calibrate.model import Model
from slidesparse.calibrate.sparsegpt import factor, refine, sparsegpt
from slidesparse.calibrate.task import Calibration, prepare
from slidesparse.checkpoint.inspection import inspect
from slidesparse.checkpoint.storage import CheckpointError
from slidesparse.convert.stream import Report
from slidesparse.errors import CalibrationError, EnvironmentFault
from slidesparse.pattern import SlidePattern
from slidesparse.prune import prune
from slidesparse.quantize import NAMES, dequantize_rows, quantize_rows

CPU = torch.device("cpu")
FIRST = "model.layers.0.self_attn.q_proj"


def errors(report: Report) -> dict[str, float]:
    return {row["name"]: row["error_quantized"] for row in report.layers}


def layer_input(model: nn.Module, name: str, ids: Tensor) -> Tensor:
    """Return the input of a linear layer when transformers runs the whole model, [tokens, K]."""
    caught: list[Tensor] = []
    hook = model.get_submodule(name).register_forward_pre_hook(lambda _, args: caught.append(args[0]))
    model(input_ids=ids)
    hook.remove()
    return caught[0].flatten(0, 1)


@pytest.mark.parametrize(
    ("name", "quant"), [("llama biased", "int8"), ("phi3", "fp8"), ("bert", "int8"), ("bamba", "int8")]
)
@torch.inference_mode()
def test_codes_equal_those_of_a_loop_over_the_whole_model(name: str, quant: str, tmp_path: Path) -> None:
    """Each layer is pruned on the inputs that it will have."""
    whole = save(name, tmp_path / "source")
    ids = torch.from_numpy(np.load(write_ids(tmp_path / "ids.npy", 30)))
    calibrated(tmp_path / "source", tmp_path / "out", str(tmp_path / "ids.npy"), quant=quant, epochs=0)
    written, pattern, model = tensors_of(tmp_path / "out"), SlidePattern(8), open_model(tmp_path / "source")
    different = count = 0
    for start, group in [(model.skeleton.prefix(n), g) for n in range(model.blocks) for g in model.groups(n)]:
        x = layer_input(whole, start + group[0], ids)
        h = x.mT @ x
        upper = factor(h)
        for layer in (start + layer for layer in group):
            weight = whole.get_submodule(layer).weight
            best = refine(weight, sparsegpt(weight, upper, pattern), h, pattern, 4)
            codes, scale = quantize_rows(best, NAMES[quant], "cuda")
            weight.data = dequantize_rows(codes, scale)
            different += int((codes.float() != written[f"{layer}.weight"].float()).sum())
            count += codes.numel()
    # Sums run in another order, so that of thousands of choices and roundings a near tie may turn
    assert different <= count / 1000


def test_encoder_is_calibrated_with_texts(tmp_path: Path) -> None:
    """Texts of several lengths, one sample each."""
    source, calib = bert(tmp_path / "source"), tmp_path / "calib.jsonl"
    texts = [" ".join(f"w{(i * j) % 50}" for j in range(2, 4 + i % 12)) for i in range(40)]
    calib.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    report = calibrated(source, tmp_path / "out", str(calib), seqlen=None, samples=30)
    assert len(report.plan.patterns) == 12
    assert report.samples.startswith("calib.jsonl, 30 samples, ")
    assert all(0 < row["block_error_finetuned"] <= row["block_error"] < 1 for row in report.layers)
    assert inspect(tmp_path / "out").violations == 0


def test_decoder_without_a_head_is_calibrated_as_with_one(source: Path, tmp_path: Path, ids: str) -> None:
    """Such as those that embed texts, which by default keep the keys and values of what they have read."""
    config = config_of(source) | {"architectures": ["LlamaModel"]}
    write(tmp_path / "bare", config, {n: x for n, x in tensors_of(source).items() if n != "lm_head.weight"})
    for folder in (source, tmp_path / "bare"):
        calibrated(folder, tmp_path / f"{folder.name}-out", ids, epochs=1)
    expected = tensors_of(tmp_path / f"{source.name}-out")
    del expected["lm_head.weight"]
    assert_same_tensors(tensors_of(tmp_path / "bare-out"), expected)


@pytest.mark.parametrize("epochs", [0, 2])
def test_reported_error_is_of_the_written_layer(source: Path, tmp_path: Path, ids: str, epochs: int) -> None:
    """The inputs of layer 0's q_proj are normed embeddings, which do not depend on pruning."""
    report = calibrated(source, tmp_path / "out", ids, epochs=epochs)
    rows = {row["name"]: row for row in report.layers}
    tensors, written = tensors_of(source), tensors_of(tmp_path / "out")
    x = tensors["model.embed_tokens.weight"].double()[torch.from_numpy(np.load(ids)).flatten()]
    x = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    w = tensors[f"{FIRST}.weight"].double()
    served = dequantize_rows(written[f"{FIRST}.weight"], written[f"{FIRST}.weight_scale"]).double()
    expected = float((x @ (w - served).t()).norm() / (x @ w.t()).norm())
    reported = "error_finetuned" if epochs else "error_quantized"
    # the Hessian and its products are float32
    assert rows[FIRST][reported] == pytest.approx(expected, rel=1e-4)
    assert rows[FIRST].get("error_finetuned") != rows[FIRST]["error_quantized"]


def test_model_of_zeros_stays_one(source: Path, tmp_path: Path, ids: str) -> None:
    """Fine-tuning has no weight to train."""
    zeros = {name: x * ("proj" not in name) for name, x in tensors_of(source).items()}
    calibrated(write(tmp_path / "zeros", config_of(source), zeros), tmp_path / "out", ids, epochs=1)
    assert not any(x.any() for x in tensors_of(tmp_path / "out").values() if x.dtype == torch.int8)


@pytest.mark.parametrize("sparser", ["2:4", "6:8"])
def test_layer_that_obeys_is_unchanged(source: Path, tmp_path: Path, ids: str, sparser: str) -> None:
    """Fine-tuning keeps its zeros."""
    tensors = tensors_of(source)
    for name in LINEARS:
        tensors[f"{name}.weight"] = prune(tensors[f"{name}.weight"], SlidePattern.parse(sparser))
    pruned = write(tmp_path / "pruned", config_of(source), tensors)
    calibrated(pruned, tmp_path / "out", ids, epochs=0)
    calibrated(pruned, tmp_path / "tuned", ids, epochs=1)
    output, tuned = tensors_of(tmp_path / "out"), tensors_of(tmp_path / "tuned")
    for name in LINEARS:
        codes, _ = quantize_rows(tensors[f"{name}.weight"].float(), torch.int8, "cuda")
        assert torch.equal(output[f"{name}.weight"], codes)
        assert not tuned[f"{name}.weight"][tensors[f"{name}.weight"] == 0].any()


def test_dtypes_that_are_not_quantized(model: Path, tmp_path: Path, ids: str) -> None:
    """Vectors in float64 are calculated with as others are; a layer in integers is refused before the model runs."""
    folder = shutil.copytree(model, tmp_path / "source")
    names = "model.layers.0.input_layernorm.weight", "model.embed_tokens.weight"
    rewrite(folder, **{name: tensors_of(folder)[name].double() for name in names})
    for rotate in ("on", "off"):
        calibrated(folder, tmp_path / f"out {rotate}", ids, epochs=0, rotate=rotate)
        calibrated(model, tmp_path / f"expected {rotate}", ids, epochs=0, rotate=rotate)
        actual, expected = (tensors_of(tmp_path / f"{kind} {rotate}") for kind in ("out", "expected"))
        assert_same_tensors({**actual, **{name: actual[name].float() for name in names}}, expected)
    rewrite(folder, **{f"{DOWN}.weight": tensors_of(folder)[f"{DOWN}.weight"].int()})
    with pytest.raises(
        CheckpointError, match=f"{DOWN}.weight is I32; where config.json quantizes no weights"
    ):
        calibrated(folder, tmp_path / "refused", ids, rotate="auto")


def test_one_block_in_memory(source: Path, tmp_path: Path, ids: str, monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[weakref.ref[Tensor]] = []
    peak, load = 0, Model.load

    def counted(self: Any, *arguments: Any) -> Any:
        nonlocal peak
        block = load(self, *arguments)
        alive.extend(weakref.ref(tensor) for tensor in block.weights.values())
        peak = max(peak, sum(loaded.nbytes for ref in alive if (loaded := ref()) is not None))
        return block

    monkeypatch.setattr(Model, "load", counted)
    calibrated(source, tmp_path / "out", ids, epochs=1)
    sizes = [4 * tensor.numel() for name, tensor in tensors_of(source).items() if ".layers.0." in name]
    assert peak <= 2 * sum(sizes)  # the next block is read while a variable still refers to the last


@pytest.mark.gpu
def test_states_on_the_gpu(source: Path, tmp_path: Path, ids: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calibrated(source, tmp_path / "gpu", ids, device="cuda")
    monkeypatch.setattr(inputs, "DEVICE_PART", 2**60)
    calibrated(source, tmp_path / "host", ids, device="cuda")
    assert snapshot(tmp_path / "gpu") == snapshot(tmp_path / "host")
    assert inspect(tmp_path / "gpu").violations == 0


def test_hidden_states_beyond_memory_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container's limit counts, of control groups of both versions; "max" and an endless number are none."""
    limits = tmp_path / "memory.max", tmp_path / "memory.limit_in_bytes"
    monkeypatch.setattr(inputs, "CONTAINER_LIMITS", limits)
    machine = host_memory()
    limits[0].write_text("max\n")
    limits[1].write_text("9223372036854771712\n")
    assert host_memory() == machine
    limits[0].write_text("1000000\n")
    assert host_memory() == 10**6
    shape = (1000, 63)  # of float32, twice: 504 kB
    with pytest.raises(CalibrationError, match="fewer --samples or a smaller --seqlen"):
        HiddenStates([shape], CPU, streams=2)
    HiddenStates([shape], CPU)


def test_overflow(source: Path, tmp_path: Path, ids: str) -> None:
    tensors, name = tensors_of(source), "model.layers.0.mlp.up_proj.weight"
    for value, words in ((3e38, "pruning .*up_proj gave"), (1e30, "inputs of .*layers.0.mlp.down_proj are")):
        huge = write(tmp_path / f"{value}", config_of(source), {**tensors, name: tensors[name].fill_(value)})
        with pytest.raises(CalibrationError, match=f"{words}.* not finite"):
            calibrated(huge, tmp_path / "out", ids)

    halves = {name: x.half() * (3e4 if "embed" in name else 1) for name, x in tensors_of(source).items()}
    write(huge, config_of(source), {name: x.clamp(-6e4, 6e4) for name, x in halves.items()})
    with pytest.raises(CheckpointError, match=r"embed_tokens.* out of the range of F16.*--rotate off"):
        calibrated(huge, tmp_path / "out", ids, rotate="on")


def test_missing_layers_and_devices(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(EnvironmentFault, match="--device cuda"):
        calibrated(source, tmp_path / "out", "random", samples=1, device="cuda")
    save("jamba", tmp_path / "jamba")  # its dt_proj is read by another layer
    with pytest.raises(CalibrationError, match=r"mamba\.dt_proj is not run .*--layer '.*=dense'"):
        calibrated(tmp_path / "jamba", tmp_path / "out", "random", samples=1)
    model, calibration = open_model(llama(tmp_path / "llama")), Calibration(("random",), 1, 8)
    with pytest.raises(CalibrationError, match=r"model\.extra is not run"):
        prepare(model, {"model.extra": SlidePattern(8)}, (), "int8", calibration)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["jamba", "llama"]
