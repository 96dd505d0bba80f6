"""The options of a conversion."""

from __future__ import annotations

from dataclasses import dataclass

from slidesparse import methods
from slidesparse.calibrate.task import Calibration
from slidesparse.checkpoint.metadata import LAYOUTS
from slidesparse.checkpoint.storage import CheckpointError
from slidesparse.checkpoint.w8a8 import KINDS
from slidesparse.convert.budget import Budget
from slidesparse.errors import CalibrationError
from slidesparse.pattern import MixedPattern, Pattern, PatternError, parse_pattern


@dataclass(frozen=True)
class ConvertOptions:
    """The options of a conversion.  Regexes are searched in layer names without ".weight".

    Raises CheckpointError for an unknown value, CalibrationError for options that exclude each other.
    """

    pattern: Pattern
    quant: str | None = None  # "int8" or "fp8"; None is that of a W8A8 source, and int8 for a float one
    layout: str = "dense"  # weights [N, K], which stock vLLM serves too, "slided" [N, K'] or "packed"
    method: str | None = None  # from `slidesparse.methods`; the default depends on ``calibration``
    seed: int = 0  # for selecting samples, and for random pruning
    linear: str | None = None  # regex of the layers to prune, instead of those of the architecture
    ignore: tuple[str, ...] = ()  # regexes of layers to leave unchanged
    skip: tuple[str, ...] = ()  # regexes of layers to quantize without pruning
    layer_patterns: tuple[tuple[str, Pattern], ...] = ()  # regexes and patterns; the last match counts
    budget: Budget | None = None  # chooses the pattern of each layer, instead of ``pattern``
    calibration: Calibration | None = None  # for float weights of known architectures
    check: bool = False  # read back the output and fill `Report.layers` even without calibration

    def __post_init__(self) -> None:
        choices = {
            "--quant": (self.quant or "int8", tuple(KINDS)),
            "--layout": (self.layout, LAYOUTS),
            "--method": (self.method_name, tuple(methods.METHODS)),
        }
        for option, (value, allowed) in choices.items():
            if value not in allowed:
                raise CheckpointError(f"{option} {value!r} is not known; use one of {', '.join(allowed)}")
        if self.layout != "dense":
            for pattern in (self.pattern, *(pattern for _, pattern in self.layer_patterns)):
                if isinstance(pattern, MixedPattern):
                    raise CheckpointError(
                        f"--layout {self.layout} stores patterns such as 6:8, not {pattern.ratio}; use --layout dense"
                    )
        requirement = methods.get(self.method_name).calibration
        if requirement == "required" and not self.calibration:
            raise CalibrationError(
                f"--method {self.method_name} needs calibration data: --calib FILE.jsonl, FILE.npy or random; "
                "--method magnitude needs none"
            )
        if requirement == "refused" and self.calibration:
            raise CalibrationError(f"--method {self.method_name} does not use --calib; leave one of them out")
        if self.budget and not self.calibration:
            raise CalibrationError(
                f"{self.budget.goal} needs calibration data to measure what each layer loses: --calib FILE.jsonl"
            )
        if self.budget and self.layer_patterns:
            raise CalibrationError(
                f"{self.budget.goal} chooses the pattern of each layer, but --layer sets some; leave one of them out"
            )

    @property
    def method_name(self) -> str:
        """The method to use."""
        return self.method or (methods.DEFAULT_CALIBRATED if self.calibration else methods.DEFAULT)


def parse_layer_pattern(text: str) -> tuple[str, Pattern]:
    """Read ``REGEX=PATTERN``.  Raises CheckpointError or PatternError, which name ``--layer`` and the text."""
    regex, separator, ratio = text.rpartition("=")
    if not separator or not regex:
        raise CheckpointError(f"--layer {text!r} is not REGEX=PATTERN, such as 'down_proj=8:10'")
    try:
        return regex, parse_pattern(ratio)
    except PatternError as error:
        raise PatternError(f"--layer {text!r}: {error}") from error
