"""Calibration on a simulated GPU: no operation mixes tensors of the GPU and of the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from calibration import calibrated, save, write_ids
from simulated_gpu import simulated_gpu

from slidesparse.checkpoint.inspection import inspect
from slidesparse.convert.budget import Budget

CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama biased", {}),
    ("llama biased", {"pattern": "4:6", "quant": "fp8", "epochs": 0, "layer": ["o_proj=dense"]}),
    ("llama biased", {"budget": Budget(0.5, tokens=(16,))}),
    ("llama biased", {"distill": True, "minutes": 0.01}),
    ("qwen3_5_text", {}),
    ("granitemoehybrid", {}),
    ("bert", {}),
]


def test_operations_on_two_devices_fail() -> None:
    with simulated_gpu():
        x, y = torch.ones(3, device="cuda"), torch.ones(3)
        assert (x.device.type, y.device.type, (x + x).device.type) == ("cuda", "cpu", "cuda")
        assert (y.to("cuda") * x).cpu().device.type == "cpu"
        assert y.device.type == "cpu"
        for operation in (lambda: x * y, lambda: torch.cat((x, y)), lambda: y.add_(x)):
            with pytest.raises(RuntimeError, match="expected all tensors on the same device"):
                operation()
        with pytest.raises(TypeError, match="NumPy"):
            x.numpy()


@pytest.mark.parametrize(("name", "case"), CASES, ids=str)
def test_calibration_keeps_devices_apart(tmp_path: Path, name: str, case: dict[str, Any]) -> None:
    save(name, tmp_path / "source")
    options = {"rotate": "auto", "epochs": 1, **case}
    if options.pop("distill", False):
        np.save(tmp_path / "text.npy", np.random.default_rng(1).integers(0, 100, (40, 24)))
        options["distill"] = (str(tmp_path / "text.npy"),)
    with simulated_gpu():
        ids = write_ids(tmp_path / "ids.npy", 24)
        report = calibrated(tmp_path / "source", tmp_path / "out", ids, device="cuda", **options)
    assert inspect(tmp_path / "out").violations == 0
    assert report.layers
    assert all(0 < row["error_quantized"] < 0.9 for row in report.layers)  # 1 if all weights were zero
