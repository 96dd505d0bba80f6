"""The options of a conversion."""

from __future__ import annotations

from dataclasses import dataclass

from slidesparse.calibrate.task import Calibration
from slidesparse.checkpoint.metadata import WRITTEN_LAYOUTS
from slidesparse.checkpoint.storage import CheckpointError
from slidesparse.checkpoint.w8a8 import KINDS
from slidesparse.convert.budget import Budget
from slidesparse.errors import CalibrationError
from slidesparse.pattern import MixedPattern, Pattern, PatternError, parse_pattern

BUDGET = "budget"  # word of --layer in the place of a pattern

LayerPatterns = tuple[tuple[str, Pattern | None], ...]  # regexes and patterns, None for that of the budget


@dataclass(frozen=True)
class ConvertOptions:
    """The options of a conversion.  Regexes are searched in layer names without ".weight".

    Raises CheckpointError for an unknown value, CalibrationError for options that exclude each other.
    """

    pattern: Pattern
    quant: str | None = None  # "int8" or "fp8"; None is that of a W8A8 source, and int8 for a float one
    layout: str = "dense"  # weights [N, K], which stock vLLM serves too, or "slided" [N, K']
    ignore: tuple[str, ...] = ()  # regexes of layers to leave unchanged
    layer_patterns: LayerPatterns = ()  # the last match counts
    budget: Budget | None = None  # chooses the pattern of each layer, instead of ``pattern``
    calibration: Calibration | None = None  # for float weights and BitNet; else they are pruned by magnitude

    def __post_init__(self) -> None:
        choices = {
            "--quant": ("int8" if self.quant is None else self.quant, tuple(KINDS)),
            "--layout": (self.layout, WRITTEN_LAYOUTS),
        }
        for option, (value, allowed) in choices.items():
            if value not in allowed:
                raise CheckpointError(f"{option} {value!r} is not known; use one of {', '.join(allowed)}")
        if self.layout != "dense" and isinstance(self.pattern, MixedPattern):
            raise CheckpointError(
                f"--layout {self.layout} stores patterns such as 6:8, not {self.pattern.ratio}; use --layout dense"
            )
        if self.budget and not self.calibration:
            raise CalibrationError(
                f"{self.budget.goal} needs calibration data to measure what each layer loses: --calib FILE.jsonl"
            )
        if self.budget and any(pattern and pattern.density < 1 for _, pattern in self.layer_patterns):
            raise CalibrationError(
                f"{self.budget.goal} chooses the pattern of each layer; with it, --layer can only keep layers dense, "
                "or let it choose for routed experts, too: --layer '\\.experts\\.=budget'"
            )
        if not self.budget and any(pattern is None for _, pattern in self.layer_patterns):
            raise CalibrationError("--layer ...=budget needs a budget: give --max-loss")


def parse_layer_pattern(text: str) -> tuple[str, Pattern | None]:
    """Read ``REGEX=PATTERN``, None for BUDGET.  Raises CheckpointError or PatternError, which name ``--layer``."""
    regex, separator, ratio = text.rpartition("=")
    if not separator or not regex:
        raise CheckpointError(f"--layer {text!r} is not REGEX=PATTERN, such as 'down_proj=8:10'")
    try:
        return regex, None if ratio == BUDGET else parse_pattern(ratio)
    except PatternError as error:
        raise PatternError(f"--layer {text!r}: {error}") from error
