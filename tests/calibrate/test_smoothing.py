"""Models whose MLPs are smoothed give what they gave before, and lose less by INT8."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from calibration import DEVICES, calibrated, random_decoder
from checkpoints import config_of, snapshot, tensors_of, write

from slidesparse.calibrate import pipeline, smoothing
from slidesparse.calibrate.models import open_model
from slidesparse.calibrate.smoothing import SmoothedReader, choose_factors
from slidesparse.checkpoint.storage import Checkpoint
from slidesparse.quantize import dequantize_rows

MODELS: dict[str, dict[str, Any]] = {
    "Llama": {"mlp_bias": True},
    "Qwen2": {},
    "Gemma2": {"head_dim": 12},
    "Phi3": {"pad_token_id": 0},
    "Olmo2": {},
}
OUTLIER = 7  # a channel between up and down


def save_random_model(kind: str, folder: Path, outlier: float = 1.0) -> Any:
    """Save a random model; ``outlier`` multiplies one channel of its MLPs, and divides that channel's weights."""
    model = random_decoder(kind, **MODELS[kind])
    for layer in model.model.layers if outlier != 1 else ():
        layer.mlp.up_proj.weight.data[OUTLIER] *= outlier
        layer.mlp.down_proj.weight.data[:, OUTLIER] /= outlier
    model.save_pretrained(folder)
    return model


def logits(model: Any) -> torch.Tensor:
    found: torch.Tensor = model(
        torch.randint(3, 100, (2, 50), generator=torch.Generator().manual_seed(1))
    ).logits
    return found


@pytest.mark.parametrize("kind", MODELS)
@torch.inference_mode()
def test_smoothing_keeps_model_outputs(kind: str, tmp_path: Path) -> None:
    """Factors are powers of two, so that nothing is rounded."""
    model = save_random_model(kind, tmp_path / "source")
    checkpoint = Checkpoint.open(tmp_path / "source")
    names = [f"model.layers.{i}.mlp.down_proj" for i in range(2)]
    factors = {name: 2.0 ** torch.randint(-9, 9, (80,)) for name in names}
    with checkpoint.reader() as reader:
        smoothed = SmoothedReader(reader, factors, open_model(checkpoint).stages)
        tensors = {name: smoothed.whole(name).contiguous() for name in checkpoint.tensors}
    changed = {name for name, x in tensors.items() if not torch.equal(x, tensors_of(checkpoint.folder)[name])}
    assert len(changed) == (6 if kind == "Llama" else 4)
    out = write(tmp_path / "out", checkpoint.config, tensors)
    found = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    assert torch.equal(logits(found), logits(model))


def test_factors_restore_precision_of_small_channels() -> None:
    x, w = torch.randn(100, 64), torch.randn(32, 64)
    x[:, OUTLIER] *= 300
    w[:, OUTLIER] /= 300
    factors, (before, after) = choose_factors(x, x.abs().amax(0), w)
    assert factors is not None
    assert after < before / 100
    assert factors[OUTLIER] > 10 * factors.median()


def test_dead_channels_do_not_affect_factors() -> None:
    x, w = torch.randn(100, 64), torch.randn(32, 64)
    x[:, OUTLIER] *= 300
    x[:, :5], w[:, 5:9] = 0.0, 0.0
    factors, errors = choose_factors(x, x.abs().amax(0), w)
    assert factors is not None
    assert torch.isfinite(errors).all()
    assert torch.equal(factors[:5], torch.ones(5))


@pytest.mark.parametrize(("x", "w"), [(0.0, 1.0), (1.0, 0.0), (1.0, 1.0)])
def test_no_factors_if_smoothing_does_not_help(x: float, w: float) -> None:
    """Equal channels need none, and zeros have no error."""
    inputs, weight = torch.full((10, 8), x), torch.full((4, 8), w)
    factors, errors = choose_factors(inputs, inputs.abs().amax(0), weight)
    assert factors is None
    assert errors[0] == errors[1]


def served_floats(folder: Path, out: Path) -> Any:
    """A converted model with its weights dequantized, as transformers reads it, inputs of `down` rounded to INT8."""
    tensors = tensors_of(folder)
    for layer in [name.removesuffix("_scale") for name in tensors if name.endswith("_scale")]:
        tensors[layer] = dequantize_rows(tensors[layer], tensors.pop(f"{layer}_scale"))
    config = config_of(folder)
    del config["quantization_config"]
    write(out, config, tensors)
    model = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)

    def rounded(_: Any, inputs: tuple[torch.Tensor]) -> torch.Tensor:
        rows = inputs[0].flatten(0, -2)
        return dequantize_rows(*smoothing.quantize_rows(rows, torch.int8)).view_as(inputs[0])

    for layer in model.model.layers:
        layer.mlp.down_proj.register_forward_pre_hook(rounded)
    return model


@DEVICES
@torch.inference_mode()
def test_smoothed_conversion_reduces_errors_and_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    model = save_random_model("Qwen2", tmp_path / "source", outlier=1000.0)
    np.save(tmp_path / "ids.npy", np.random.default_rng(0).integers(0, 100, (8, 20)))
    ids = str(tmp_path / "ids.npy")
    how: dict[str, Any] = {"pattern": "2_inf", "device": device, "rotate": "auto"}
    plain = calibrated(tmp_path / "source", tmp_path / "plain", ids, **{**how, "rotate": "off"})
    assert plain.smoothing == ""

    def die(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "_prune_block", die)
        with pytest.raises(KeyboardInterrupt):
            calibrated(tmp_path / "source", tmp_path / "out", ids, **how)
    monkeypatch.setattr(smoothing, "choose_factors", die)  # not again
    report = calibrated(tmp_path / "source", tmp_path / "out", ids, resume=True, **how)
    assert report.smoothing.startswith("channels scaled before 2 of 2 down_proj layers")
    monkeypatch.undo()
    calibrated(tmp_path / "source", tmp_path / "whole", ids, **how)
    assert snapshot(tmp_path / "out") == snapshot(tmp_path / "whole")

    exact = logits(model)
    plain_error, error = (
        float((logits(served_floats(tmp_path / name, tmp_path / f"{name} floats")) - exact).norm())
        for name in ("plain", "out")
    )
    assert error < plain_error / 5


@pytest.mark.parametrize(
    "how", [{"quant": "fp8"}, {"rotate": "off"}, {"ignore": [r"(gate|up)_proj"]}, {"ignore": ["down_proj"]}]
)
def test_smoothing_is_skipped_where_unsupported(tmp_path: Path, how: dict[str, Any]) -> None:
    save_random_model("Qwen2", tmp_path / "source", outlier=1000.0)
    how = {"rotate": "auto", "samples": 2, "seqlen": 16, "finetune": 0, **how}
    report = calibrated(tmp_path / "source", tmp_path / "out", "random", **how)
    assert report.smoothing == ""
    assert "smoothing" not in {path.stem for path in tmp_path.glob(".out*/*")}
