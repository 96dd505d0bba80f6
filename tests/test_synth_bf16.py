"""Float checkpoints of random weights, which are there to be converted."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from checkpoints import config_of, snapshot, tensors_of
from models import QWEN, write_float
from synth_configs import SMALL, config_file, small_chunks  # noqa: F401  the fixture is used by being here
from typer.testing import CliRunner

from slidesparse import checkpoint as checkpoint_module
from slidesparse.calibrate.run import Calibration
from slidesparse.checkpoint import Checkpoint, CheckpointError
from slidesparse.cli import app
from slidesparse.convert import convert
from slidesparse.inspection import inspect
from slidesparse.pattern import SlidePattern
from slidesparse.synth import MARK, synth

SIX = SlidePattern.parse("6:8")


@pytest.mark.parametrize("family", SMALL)
def test_it_has_the_tensors_and_the_config_of_the_float_model(tmp_path: Path, family: str) -> None:
    source = write_float(SMALL[family], tmp_path / "source")
    report = synth(source, tmp_path / "out", quant="bf16")
    found, expected = Checkpoint.open(tmp_path / "out"), Checkpoint.open(source)
    assert {name: stored.spec.shape for name, stored in found.tensors.items()} == {
        name: stored.spec.shape for name, stored in expected.tensors.items()
    }
    assert {stored.spec.dtype for stored in found.tensors.values()} == {"BF16"}
    assert (report.quant, report.pattern) == ("bf16", None)
    assert report.bytes_out == sum(stored.spec.nbytes for stored in found.tensors.values())
    config = config_of(tmp_path / "out")
    assert config.pop(MARK)["weights"] == "random"
    assert config == config_of(source) | {"torch_dtype": "bfloat16"}


@pytest.mark.parametrize("named", [{"torch_dtype": "float16"}, {"torch_dtype": None, "dtype": "float32"}, {}])
def test_bf16_whatever_the_config_says(tmp_path: Path, named: dict[str, Any]) -> None:
    """A quantization of the config's own is gone as well."""
    config = config_file(tmp_path, quantization_config={"quant_method": "fp8"}, **named)
    assert synth(config, tmp_path / "out", quant="bf16").replaced == "fp8"
    assert {str(values.dtype) for values in tensors_of(tmp_path / "out").values()} == {"torch.bfloat16"}
    written = config_of(tmp_path / "out")
    assert written["torch_dtype"] == "bfloat16"
    assert not written.keys() & {"dtype", "quantization_config"}


def test_scales_are_those_of_trained_models_and_rows_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The deviation of n normal values is known to 1/sqrt(2n), of which five are allowed; BF16 adds 1e-4 at most."""
    monkeypatch.setattr(checkpoint_module, "CHUNK_ELEMENTS", 2**14)
    model = replace(QWEN, hidden=256, intermediate=512, heads=8, layers=2)
    synth(config_file(tmp_path, model, initializer_range=0.05), tmp_path / "out", quant="bf16")
    found = {name: values.float() for name, values in tensors_of(tmp_path / "out").items()}
    wanted = {f"{layer}.weight": k**-0.5 for layer, (_, k) in model.linears().items()}
    wanted |= dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), 0.05)
    for name, std in wanted.items():
        drawn = min(found[name].numel(), 2**14)  # the rest is made of it
        tolerance = 5 / math.sqrt(2 * drawn) + 1e-4
        assert abs(float(found[name].pow(2).mean().sqrt()) / std - 1) < tolerance, name
        assert 0.45 < float((found[name] > 0).float().mean()) < 0.55, name
        assert len(found[name].unique(dim=0)) == len(found[name]), name
    assert found["model.norm.weight"].eq(1).all()
    layers = [found[f"model.layers.{i}.mlp.up_proj.weight"] for i in range(2)]
    assert not layers[0].equal(layers[1])


def test_same_seed_same_bytes(tmp_path: Path) -> None:
    config = config_file(tmp_path)
    for name, seed in (("a", 7), ("b", 7), ("c", 8)):
        synth(config, tmp_path / name, quant="bf16", seed=seed)
    assert snapshot(tmp_path / "a") == snapshot(tmp_path / "b") != snapshot(tmp_path / "c")


@pytest.mark.parametrize("calibration", [None, Calibration("random", samples=4, seqlen=16, device="cpu")])
def test_convert_takes_it(tmp_path: Path, calibration: Calibration | None) -> None:
    synth(config_file(tmp_path), tmp_path / "float", quant="bf16", shard_bytes=40_000)
    report = convert(tmp_path / "float", tmp_path / "out", pattern=SIX, calibration=calibration, check=True)
    assert report.method == ("sparsegpt" if calibration else "magnitude")
    found = inspect(tmp_path / "out")
    assert (found.pattern, found.violations) == ("6:8", 0)
    assert len(found.layers) == len(SMALL["qwen2"].linears())
    errors = [row["error_quantized"] for row in report.layers]
    if calibration:
        assert errors
        assert all(0 < error < 0.5 for error in errors)


@pytest.mark.parametrize("options", [["--sparsity", "6:8"], ["--sparsity", "2_inf"], ["--layout", "slided"]])
def test_a_pattern_or_a_layout_is_refused(tmp_path: Path, options: list[str]) -> None:
    config = config_file(tmp_path)
    command = ["synth", str(config), str(tmp_path / "out"), "--quant", "bf16", *options]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 2, result.output
    for words in (
        "carry no pattern and no layout",
        "leave --sparsity and --layout out",
        "slidesparse convert",
    ):
        assert words in result.output
    assert list(tmp_path.iterdir()) == [config]


def test_an_unknown_kind_names_all_three(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="'int4' is not known; use one of int8, fp8, bf16"):
        synth(config_file(tmp_path), tmp_path / "out", quant="int4")


def test_the_command_says_how_to_convert_what_it_made(tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = CliRunner().invoke(app, ["synth", str(config_file(tmp_path)), str(out), "--quant", "bf16"])
    assert "Qwen2ForCausalLM, 2 layers in bf16, not pruned" in result.stdout, result.output
    assert f"slidesparse convert {out} PRUNED --sparsity 6:8" in result.stdout
