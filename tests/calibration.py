"""What the tests of calibrated conversion share: ids, and short runs on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import LLAMA

from slidesparse.calibrate.run import Calibration
from slidesparse.convert import Report, convert
from slidesparse.pattern import SlidePattern

SIX_EIGHT = SlidePattern.parse("6:8")
LINEARS = sorted(LLAMA.linears())
TOKENS = (6, 24)  # samples of so many tokens
DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def write_ids(path: Path) -> str:
    """Token ids of a few samples."""
    np.save(path, np.random.default_rng(0).integers(0, LLAMA.vocabulary, TOKENS))
    return str(path)


def calibrated(source: Path, out: Path, ids: str, **options: Any) -> Report:
    """Convert with calibration; CPU, so that bytes are the same everywhere in these tests."""
    keys = ("resume", "samples", "seqlen", "device", "sweeps", "target", "finetune")
    how = {key: options.pop(key) for key in keys if key in options}
    settings = {"device": "cpu", "seqlen": TOKENS[1], **how}
    options.setdefault("pattern", SIX_EIGHT)
    return convert(source, out, calibration=Calibration(ids, **settings), **options)
