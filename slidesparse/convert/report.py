"""The report of a conversion."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slidesparse.calibrate.distill import Distilled
from slidesparse.convert.choose import Outcome
from slidesparse.convert.plan import ConversionPlan


@dataclass(frozen=True)
class Report:
    """The result of a conversion, or what is planned in a dry run."""

    plan: ConversionPlan
    out: Path
    seconds: float = 0.0
    samples: str = ""  # description of the calibration samples; "" if weights were pruned by magnitude
    note: str = ""  # hint about the samples
    rotation: str = ""  # with calibration: how the model was rotated, or why not
    smoothing: str = ""  # with calibration: what smoothing does, if it does anything
    budget: Outcome | None = None  # result of a budget
    distillation: str = ""  # requirements of distillation
    distilled: Distilled | None = None  # result of distillation
    layers: tuple[dict[str, Any], ...] = ()  # with calibration: what it measured of each pruned layer
    was_sparse: bool = False  # whether the weights obeyed their patterns already
    left_out: tuple[str, ...] = ()  # files of the source that were not copied
    unserved: str = ""  # why the vLLM that is installed does not serve the model

    @property
    def sensitivity(self) -> list[str]:
        """The pruned layers by descending relative output error; empty without calibration."""
        errors = {row["name"]: row.get("error_finetuned", row["error_quantized"]) for row in self.layers}
        return sorted(errors, key=lambda name: (-errors[name], name))
