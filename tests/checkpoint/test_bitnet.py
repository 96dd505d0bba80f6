"""BitNet sources: all forms give the codes and scales of transformers, and codes stay ternary."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import bitnets
import numpy as np
import pytest
import torch
from bitnets import OFFLINE, ONLINE, linear_layers, transformers_model, write_master, write_offline
from calibration import run
from checkpoints import assert_same_tensors, config_of, convert, refused, tensors_of
from transformers.integrations.bitnet import WeightQuant

from slidesparse.calibrate.model import Model
from slidesparse.calibrate.task import Calibration
from slidesparse.checkpoint.bitnet import as_int8
from slidesparse.checkpoint.inspection import inspect
from slidesparse.checkpoint.skeleton import Skeleton
from slidesparse.checkpoint.storage import Checkpoint
from slidesparse.errors import SlideSparseError
from slidesparse.quantize import INT8, quantize_rows

Q = "model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_master(tmp_path_factory.mktemp("bitnet") / "master", ONLINE)


@pytest.fixture(scope="module")
def whole(master: Path) -> dict[str, torch.Tensor]:
    """All codes and scales, unpruned."""
    convert(master, master.parent / "whole", "2_inf")
    return tensors_of(master.parent / "whole")


def test_master_weights_are_rounded_like_transformers(master: Path, whole: dict[str, torch.Tensor]) -> None:
    torch.compiler.set_stance("force_eager")
    output, source = dict(whole), tensors_of(master)
    layers = linear_layers(source)
    assert len(layers) == 14
    for name in layers:
        codes, scale = output.pop(f"{name}.weight"), output.pop(f"{name}.weight_scale")
        assert (codes.dtype, scale.shape) == (torch.int8, (len(codes), 1))
        assert sorted(codes.unique().tolist()) == [-1, 0, 1]
        torch.testing.assert_close(codes * scale, WeightQuant.apply(source.pop(f"{name}.weight").float()))
    assert_same_tensors(output, source)
    config = config_of(master.parent / "whole")
    assert config["quantization_config"]["quant_method"] == "compressed-tensors"
    assert config["hidden_act"] == "relu2"


@pytest.mark.parametrize(("block", "packed"), [(OFFLINE, True), (bitnets.INVERSE, True), (OFFLINE, False)])
def test_ternary_sources_convert_like_their_master_weights(
    master: Path, whole: dict[str, torch.Tensor], tmp_path: Path, block: dict[str, Any], packed: bool
) -> None:
    convert(write_offline(master, tmp_path / "offline", block, packed), tmp_path / "out", "2_inf")
    actual = tensors_of(tmp_path / "out")
    assert actual.keys() == whole.keys()
    for name, tensor in actual.items():
        if name.endswith("_scale"):  # BF16 in such a source
            torch.testing.assert_close(tensor, whole[name], rtol=2**-7, atol=0)
        elif tensor.dtype == torch.int8:  # near ties round by the rounded scale
            assert float((tensor != whole[name]).float().mean()) < 0.01


def test_tied_lm_head_is_quantized(master: Path, whole: dict[str, torch.Tensor], tmp_path: Path) -> None:
    convert(master, tmp_path / "out", "2_inf", layer=["lm_head=dense"])
    codes, scales = quantize_rows(whole["model.embed_tokens.weight"].float(), INT8)
    expected = {**whole, "lm_head.weight": codes, "lm_head.weight_scale": scales}
    assert_same_tensors(tensors_of(tmp_path / "out"), expected)


def codes(dtype: torch.dtype, value: float, rows: int = 128) -> dict[str, torch.Tensor]:
    return {f"{Q}.weight": torch.full((rows, 128), value, dtype=dtype)}


# A form of the weights, changed tensors, and words of the message
DAMAGED: dict[str, tuple[dict[str, Any], bool, dict[str, torch.Tensor], str]] = {
    "norms": ({**OFFLINE, "use_rms_norm": True}, True, {}, "use_rms_norm"),
    "a code of 2": (OFFLINE, True, codes(torch.uint8, 3, 32), f"{Q}.weight holds 2, ternary weights are"),
    "a half": (OFFLINE, False, codes(torch.float32, 0.5), f"{Q}.weight holds 0.5"),
    "another dtype": (OFFLINE, True, codes(torch.int32, 1), f"{Q}.weight is I32"),
    "128 scales": (OFFLINE, True, {f"{Q}.weight_scale": torch.ones(128)}, f"{Q}.weight_scale is F32 [128]"),
    "no scale": (OFFLINE, True, {f"{Q}.weight_scale": torch.zeros(1)}, f"the scale of {Q} is 0.0"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_sources_are_refused(master: Path, tmp_path: Path, name: str) -> None:
    block, packed, changed, words = DAMAGED[name]
    base = tensors_of(write_offline(master, tmp_path / "base", OFFLINE, packed))
    refused(bitnets.write(tmp_path / "damaged", {**base, **changed}, block), words)


def test_nan_and_fp8_are_refused(master: Path, tmp_path: Path) -> None:
    weights = tensors_of(master)
    weights[f"{Q}.weight"][3, 5] = torch.nan
    refused(bitnets.write(tmp_path / "nan", weights, None), f"the scale of {Q} is nan")
    refused(master, "--quant fp8 contradicts", quant="fp8", out="fp8", error=SlideSparseError)


@pytest.fixture(scope="module")
def ids(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("ids") / "ids.npy"
    np.save(path, np.random.default_rng(0).integers(0, 512, (16, 64)))
    return str(path)


def test_calibrated_blocks_multiply_codes_and_scales(master: Path, ids: str) -> None:
    """As in the served model, but that activations are not quantized."""
    reference, tokens = bitnets.load(transformers_model(ONLINE), master), torch.from_numpy(np.load(ids))[:2]
    for name in linear_layers(reference.state_dict()):
        layer = reference.get_submodule(name)
        layer.forward = partial(lambda layer, x: x @ WeightQuant.apply(layer.weight).t(), layer)
    checkpoint = as_int8(Checkpoint.open(master))
    model = Model(Skeleton(checkpoint), torch.device("cpu"))
    with checkpoint.reader() as reader, torch.inference_mode():
        expected = reference(input_ids=tokens).logits
        torch.testing.assert_close(run(model, reader, tokens), expected, atol=1e-4, rtol=1e-4)


def test_codes_stay_ternary(master: Path, whole: dict[str, torch.Tensor], tmp_path: Path, ids: str) -> None:
    calibration = Calibration((ids,), device="cpu", seqlen=64)
    report = convert(master, tmp_path / "out", calibration=calibration)
    assert report.rotation == "not rotated: its weights are ternary"
    pruned = tensors_of(tmp_path / "out")
    assert inspect(tmp_path / "out").violations == 0
    for name in linear_layers(pruned):
        assert set(pruned[f"{name}.weight"].unique().tolist()) <= {-1, 0, 1}
        assert torch.equal(pruned[f"{name}.weight_scale"], whole[f"{name}.weight_scale"])
