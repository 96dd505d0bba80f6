"""BitNet sources: all forms give the codes and scales of transformers, and codes stay ternary."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bitnets import (
    INVERSE,
    OFFLINE,
    ONLINE,
    SMALL,
    load,
    transformers_model,
    write,
    write_master,
    write_offline,
)
from checkpoints import convert, refused
from models import converted
from safetensors.torch import load_file
from slidesparse.calibrate.models import open_model
from slidesparse.convert.synth import synth
from transformers.integrations.bitnet import WeightQuant

from slidesparse.calibrate.task import Calibration
from slidesparse.checkpoint.bitnet import as_int8
from slidesparse.checkpoint.inspection import inspect, verify
from slidesparse.checkpoint.names import DECODER
from slidesparse.checkpoint.storage import Checkpoint
from slidesparse.convert.report import final_error
from slidesparse.errors import SlideSparseError
from slidesparse.pattern import SlidePattern


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_master(tmp_path_factory.mktemp("bitnet") / "master", ONLINE)


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def test_convert_rounds_master_weights_like_transformers(master: Path, tmp_path: Path) -> None:
    torch.compiler.set_stance("force_eager")
    out = converted(master, tmp_path / "out", "2_inf")
    output, source = tensors(out), tensors(master)
    layers = DECODER.layers(list(source))
    assert len(layers) == 14
    for name in layers:
        codes, scale = output[f"{name}.weight"], output[f"{name}.weight_scale"]
        assert codes.dtype == torch.int8
        assert scale.shape == (len(codes), 1)
        assert sorted(codes.unique().tolist()) == [-1, 0, 1]
        torch.testing.assert_close(codes * scale, WeightQuant.apply(source[f"{name}.weight"].float()))
    for name in set(source) - {f"{layer}.weight" for layer in layers}:
        assert torch.equal(output[name], source[name])
    assert verify(master, out).equal
    config = json.loads((out / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "compressed-tensors"
    assert config["hidden_act"] == "relu2"


@pytest.mark.parametrize(("block", "packed"), [(OFFLINE, True), (INVERSE, True), (OFFLINE, False)])
def test_ternary_sources_convert_like_their_master_weights(
    master: Path, tmp_path: Path, block: dict[str, Any], packed: bool
) -> None:
    offline = write_offline(master, tmp_path / "offline", block, packed)
    out = converted(offline, tmp_path / "out", "2_inf")
    actual, expected = tensors(out), tensors(converted(master, tmp_path / "expected", "2_inf"))
    assert actual.keys() == expected.keys()
    for name, tensor in actual.items():
        if name.endswith("_scale"):  # BF16 in such a source
            torch.testing.assert_close(tensor, expected[name], rtol=2**-7, atol=0)
        elif tensor.dtype == torch.int8:  # near ties round by the rounded scale
            assert float((tensor != expected[name]).float().mean()) < 0.01
    assert verify(offline, out).equal


@pytest.mark.parametrize("layout", ["dense", "slided"])
def test_pruned_codes_stay_ternary(master: Path, tmp_path: Path, layout: str) -> None:
    out = converted(master, tmp_path / "out", "6:8", layout)
    assert inspect(out).violations == 0
    dense = converted(out, tmp_path / "back", "6:8")
    source = tensors(converted(master, tmp_path / "whole", "2_inf"))
    for name, tensor in tensors(dense).items():
        unpruned = source[name]
        assert torch.equal(tensor[tensor != 0], unpruned[tensor != 0])
        if name.endswith("_proj.weight"):
            blocks, before = ((w != 0).unflatten(1, (-1, 8)).sum(-1) for w in (tensor, unpruned))
            assert torch.equal(blocks, before.clamp(max=6))  # natural zeros count among those that go


def test_convert_refuses_damaged_bitnet_sources(master: Path, tmp_path: Path) -> None:
    def damaged(
        number: int, change: dict[str, Any], block: dict[str, Any] | None = OFFLINE, packed: bool = True
    ) -> Path:
        base = write_offline(master, tmp_path / f"base{number}", OFFLINE, packed)
        folder = tmp_path / f"damaged{number}"
        return write(folder, {**tensors(base), **change}, block)

    q = "model.layers.0.self_attn.q_proj"
    refused(damaged(0, {}, {**OFFLINE, "use_rms_norm": True}), "use_rms_norm")
    refused(
        damaged(1, {f"{q}.weight": torch.full((32, 128), 3, dtype=torch.uint8)}), q, "holds 2", "-1, 0 and 1"
    )
    refused(damaged(2, {f"{q}.weight": torch.full((128, 128), 0.5)}, packed=False), q, "holds 0.5")
    refused(damaged(3, {f"{q}.weight_scale": torch.ones(128)}), f"{q}.weight_scale", "F32 [128]")
    refused(damaged(4, {f"{q}.weight_scale": torch.zeros(1)}), f"the scale of {q} is 0.0")
    refused(damaged(5, {f"{q}.weight": torch.ones(128, 128, dtype=torch.int32)}), q, "I32")
    weights = tensors(master)
    weights[f"{q}.weight"][3, 5] = torch.nan
    refused(write(tmp_path / "nan", weights, None), f"the scale of {q} is nan")
    refused(master, "--quant fp8 contradicts", quant="fp8", out="fp8", error=SlideSparseError)


@pytest.fixture(scope="module")
def ids(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("ids") / "ids.npy"
    np.save(path, np.random.default_rng(0).integers(0, 512, (16, 64)))
    return str(path)


def test_calibration_blocks_equal_transformers(master: Path, ids: str) -> None:
    """The weights of blocks are codes times scales, as in the served model; activations are not quantized."""
    reference = transformers_model(ONLINE)
    model, tokens = open_model(as_int8(Checkpoint.open(master))), torch.from_numpy(np.load(ids))[:2]
    load(reference, master)
    for name in DECODER.layers(reference.state_dict()):
        layer = reference.get_submodule(name)
        layer.forward = partial(lambda layer, x: x @ WeightQuant.apply(layer.weight).t(), layer)
    with as_int8(model.checkpoint).reader() as reader, torch.inference_mode():
        x = model.embedder(reader, list(tokens), torch.device("cpu"))(tokens)
        for number in range(2):
            x = model.load(reader, number, torch.device("cpu")).output(x)
        expected = reference.model(input_ids=tokens, output_hidden_states=True).hidden_states[-1]
        actual = reference.model.norm(x)
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("method", ["sparsegpt", "wanda"])
def test_calibrated_codes_stay_ternary(master: Path, tmp_path: Path, ids: str, method: str) -> None:
    calibration = Calibration(ids, device="cpu", seqlen=64, target="own")  # the errors below refer to it
    reports = {}
    for variant in (method, "magnitude"):
        reports[variant] = convert(master, tmp_path / variant, "6:8", method=variant, calibration=calibration)
    pruned, unpruned = tensors(tmp_path / method), tensors(converted(master, tmp_path / "whole", "2_inf"))
    assert inspect(tmp_path / method).violations == 0
    for name in DECODER.layers(list(pruned)):
        assert set(pruned[f"{name}.weight"].unique().tolist()) <= {-1, 0, 1}
        assert torch.equal(pruned[f"{name}.weight_scale"], unpruned[f"{name}.weight_scale"])
    errors = {variant: sum(final_error(row) for row in report.layers) for variant, report in reports.items()}
    assert errors[method] < 0.95 * errors["magnitude"]


@pytest.mark.parametrize("pattern", [None, "6:8"])
def test_synth_writes_ternary_weights(tmp_path: Path, pattern: str | None) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    out = tmp_path / "out"
    synth(tmp_path / "config.json", out, pattern=SlidePattern.parse(pattern) if pattern else None)
    weights, report = tensors(out), inspect(out)
    assert report.violations == 0
    assert report.fits[0].zeros == pytest.approx(0.42 if pattern is None else 0.43, abs=0.01)
    assert weights["model.layers.1.mlp.ffn_sub_norm.weight"].shape == (320,)
    for name in DECODER.layers(list(weights)):
        codes, scale = weights[f"{name}.weight"], weights[f"{name}.weight_scale"]
        assert sorted(codes.unique().tolist()) == [-1, 0, 1]
        assert len(scale.unique()) == 1
        assert float((codes * scale).std()) * codes.shape[1] ** 0.5 == pytest.approx(1, abs=0.05)


def test_inspect_counts_weights_a_pattern_would_prune(tmp_path: Path) -> None:
    """Rows repeat two zeros and 14 non-zeros: 6:8 prunes none of the first block and two of the second."""
    master = write_master(tmp_path / "master")
    weights = tensors(master)
    for name in DECODER.layers(list(weights)):
        weights[f"{name}.weight"] = torch.ones_like(weights[f"{name}.weight"])
        weights[f"{name}.weight"].view(-1, 16)[:, :2] = 0
    fits = {fit.pattern: fit for fit in inspect(write(tmp_path / "ones", weights, None)).fits}
    assert fits["14:16"].gone == fits["14:16"].over == 0
    six = fits["6:8"]
    assert (six.zeros, six.share_over, six.share_gone) == (pytest.approx(1 / 8), 0.5, pytest.approx(1 / 7))


def test_convert_refuses_finetuning_of_ternary_weights(master: Path, ids: str) -> None:
    calibration = Calibration(ids, device="cpu", seqlen=64, finetune=2)
    refused(
        master, "--finetune 2", "-1, 0 and 1", calibration=calibration, error=SlideSparseError, out="tuned"
    )
