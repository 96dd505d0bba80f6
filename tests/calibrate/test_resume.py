"""Calibrated conversions that are killed and resumed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from calibration import DEVICES, Killed, calibrated, write_ids
from checkpoints import llama, snapshot

from slidesparse.calibrate import pipeline, resume
from slidesparse.convert.budget import Budget
from slidesparse.errors import CalibrationError


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return llama(tmp_path / "source")


@contextmanager
def dying_at_rename(monkeypatch: pytest.MonkeyPatch, call: int) -> Iterator[None]:
    """Make the given call of os.rename raise Killed before it renames."""
    rename, calls = os.rename, [0]

    def die(*arguments: Any) -> None:
        calls[0] += 1
        if calls[0] == call:
            raise Killed
        rename(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(resume.os, "rename", die)
        yield


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Calibrate once without a kill; the output does not depend on where the source lies."""
    folder = tmp_path_factory.mktemp("whole")
    calibrated(llama(folder / "source"), folder / "whole", write_ids(folder / "ids.npy"), finetune=1)
    return folder / "whole"


@pytest.mark.parametrize("call", range(1, 6))
def test_killed_while_saving_a_block_resumes(
    source: Path, whole: Path, tmp_path: Path, ids: str, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    """The run is killed before each rename: of the state, and of the rows and tensors of both blocks."""
    options = {"finetune": 1}
    with dying_at_rename(monkeypatch, call), pytest.raises(Killed):
        calibrated(source, tmp_path / "out", ids, **options)
    assert not (tmp_path / "out").exists()
    if call > 3:  # a block is finished
        with pytest.raises(CalibrationError, match="--resume"):
            calibrated(source, tmp_path / "out", ids, **options)
    pruned: list[int] = []
    prune_block = pipeline._prune_block

    def counted(at: pipeline.Position) -> Any:
        pruned.append(at.number)
        return prune_block(at)

    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "_prune_block", counted)
        report = calibrated(source, tmp_path / "out", ids, resume=True, **options)
    finished = 0 if call < 4 else 1
    assert pruned == list(range(finished, 2))
    assert snapshot(tmp_path / "out") == snapshot(whole)
    assert len(report.layers) == len(report.pruned)
    assert all(row["error_pruned"] > 0 for row in report.layers)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ids.npy", "out", "source"]


KILLED = """
import os, signal, sys
import torch
torch.set_num_threads(1)
from slidesparse.calibrate.task import Calibration
from slidesparse.checkpoint.storage import Writer
from slidesparse.convert.options import ConvertOptions
from slidesparse.convert.stream import convert
from slidesparse.pattern import SlidePattern
source, out, ids, most, device = sys.argv[1:]
written, write = 0, Writer.write
def write_then_die(self, *arguments):
    global written
    write(self, *arguments)
    written += 1
    if written == int(most):
        os.kill(os.getpid(), signal.SIGKILL)
Writer.write = write_then_die
calibration = Calibration(ids, seqlen=24, device=device, rotate="off", resume=True)
convert(source, out, ConvertOptions(SlidePattern(8), calibration=calibration))
"""


@DEVICES
def test_killed_by_a_signal_resumes(source: Path, tmp_path: Path, ids: str, device: str) -> None:
    """The run is killed within the first block's 14 tensors, then within those of the output."""
    for limit in (10, 14 + 14 + 9):
        command = [sys.executable, "-c", KILLED, str(source), str(tmp_path / "out"), ids, str(limit), device]
        process = subprocess.run(command, cwd=Path(__file__).parents[2], timeout=120, check=False)
        assert process.returncode == -signal.SIGKILL
    assert not (tmp_path / "out").exists()
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        calibrated(source, tmp_path / "out", ids, device=device, resume=True)
        calibrated(source, tmp_path / "whole", ids, device=device)
    finally:
        torch.set_num_threads(threads)
    assert snapshot(tmp_path / "out") == snapshot(tmp_path / "whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ids.npy", "out", "source", "whole"]


CHANGES: list[tuple[dict[str, Any], str]] = [
    ({"pattern": "4:6"}, "layers was {'model.layers.0."),
    ({"quant": "fp8"}, "quant was 'int8', is 'fp8'"),
    ({"method": "wanda"}, "method was 'sparsegpt', is 'wanda'"),
    ({"samples": 3}, "samples was"),
    ({"sweeps": 1}, "sweeps was 4, is 1"),
    ({"target": "own"}, "finetune was 4, is 0; target was 'dense', is 'own'"),
    ({"finetune": 2}, "finetune was 4, is 2"),
    ({"skip": ["o_proj"]}, "layers was"),
    ({"budget": Budget(zeros=0.2)}, "budget was None, is {"),
]


def test_resuming_another_run_is_refused(
    source: Path, tmp_path: Path, ids: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names the option that differs, or the source."""
    with dying_at_rename(monkeypatch, 4), pytest.raises(Killed):
        calibrated(source, tmp_path / "out", ids)
    for change, fact in CHANGES:
        with pytest.raises(CalibrationError) as error:
            calibrated(source, tmp_path / "out", ids, resume=True, **change)
        assert fact in str(error.value)
    os.utime(source / "model.safetensors")
    with pytest.raises(CalibrationError, match="source was"):
        calibrated(source, tmp_path / "out", ids, resume=True)


def test_concurrent_calibration_is_refused(source: Path, tmp_path: Path, ids: str) -> None:
    messages: list[str] = []

    def interfere(phase: str, done: int, total: int) -> None:
        if phase == "pruning" and not messages:
            with pytest.raises(CalibrationError, match="another calibration is writing") as error:
                calibrated(source, tmp_path / "out", ids, finetune=0, resume=True)
            messages.append(str(error.value))

    calibrated(source, tmp_path / "out", ids, finetune=0, progress=interfere)
    assert len(messages) == 1
