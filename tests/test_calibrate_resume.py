"""Calibrated conversions that are killed and resumed, and those that are refused before they begin."""

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
from calibration import DEVICES, SIX_EIGHT, calibrated, write_ids
from checkpoints import llama, refused, snapshot, w8a8

from slidesparse.calibrate import pipeline, work
from slidesparse.calibrate.errors import CalibrationError
from slidesparse.calibrate.run import Calibration
from slidesparse.checkpoint import CheckpointError
from slidesparse.convert import convert
from slidesparse.pattern import PatternError, SlidePattern


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return llama(tmp_path / "source")


@pytest.fixture
def ids(tmp_path: Path) -> str:
    return write_ids(tmp_path / "ids.npy")


# Killed and resumed


class Killed(BaseException):
    """Stands for a kill in this process."""


@contextmanager
def dying_at(monkeypatch: pytest.MonkeyPatch, module: Any, name: str, call: int) -> Iterator[None]:
    """A function dies when it is called so often, before it does anything."""
    plain, calls = getattr(module, name), [0]

    def die(*arguments: Any, **options: Any) -> Any:
        calls[0] += 1
        if calls[0] == call:
            raise Killed
        return plain(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(module, name, die)
        yield


@pytest.mark.parametrize("skip_worst", [None, "10%"])
@pytest.mark.parametrize("call", range(1, 6))
def test_killed_while_publishing_a_layer_and_resumed(
    source: Path, tmp_path: Path, ids: str, monkeypatch: pytest.MonkeyPatch, call: int, skip_worst: str | None
) -> None:
    """Before each rename: of the state, then of the report's rows and the tensors of both layers."""
    calibrated(source, tmp_path / "whole", ids, skip_worst=skip_worst)
    with dying_at(monkeypatch, work.os, "rename", call), pytest.raises(Killed):
        calibrated(source, tmp_path / "out", ids, skip_worst=skip_worst)
    assert not (tmp_path / "out").exists()
    if call > (3 if skip_worst is None else 2):  # a layer, or the ranking of them, is finished
        with pytest.raises(CalibrationError, match="of a run that did not end; --resume goes on"):
            calibrated(source, tmp_path / "out", ids, skip_worst=skip_worst)
    pruned: list[int] = []
    prune_stage = pipeline._prune_stage

    def counted(task: pipeline.Task, number: int, *rest: Any) -> Any:
        pruned.append(number)
        return prune_stage(task, number, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "_prune_stage", counted)
        report = calibrated(source, tmp_path / "out", ids, skip_worst=skip_worst, resume=True)
    finished = 0 if call < (4 if skip_worst is None else 5) else 1
    assert sorted(set(pruned)) == list(range(finished, 2))
    assert snapshot(tmp_path / "out") == snapshot(tmp_path / "whole")
    assert len(report.layers) == len(report.pruned)
    assert all(row["error_pruned"] > 0 for row in report.layers)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ids.npy", "out", "source", "whole"]


KILLED = """
import os, signal, sys
import torch
torch.set_num_threads(1)
from slidesparse import convert
from slidesparse.calibrate.run import Calibration
from slidesparse.checkpoint import Writer
from slidesparse.pattern import SlidePattern
written, write, most = 0, Writer.write, int(sys.argv[4])
def write_then_die(self, *arguments):
    global written
    write(self, *arguments)
    written += 1
    if written == most:
        os.kill(os.getpid(), signal.SIGKILL)
Writer.write = write_then_die
calibration = Calibration(sys.argv[3], seqlen=24, device=sys.argv[5], resume=True)
convert.convert(sys.argv[1], sys.argv[2], pattern=SlidePattern.parse("6:8"), calibration=calibration)
"""


@DEVICES
def test_killed_by_a_signal_at_several_points(source: Path, tmp_path: Path, ids: str, device: str) -> None:
    """In the first layer's tensors (14 of them), in the second's, and in the output's: one after the other."""

    def run(most: int, out: str) -> int:
        command = [sys.executable, "-c", KILLED, str(source), str(tmp_path / out), ids, str(most), device]
        return subprocess.run(
            command, cwd=Path(__file__).parent.parent, timeout=120, check=False, env=os.environ
        ).returncode

    assert run(10, "out") == -signal.SIGKILL
    assert run(20, "out") == -signal.SIGKILL
    assert run(14 + 9, "out") == -signal.SIGKILL  # the second layer's, then the output's ninth
    assert not (tmp_path / "out").exists()
    assert run(10**6, "out") == 0
    assert run(10**6, "whole") == 0
    assert snapshot(tmp_path / "out") == snapshot(tmp_path / "whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ids.npy", "out", "source", "whole"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"pattern": SlidePattern(6)}, 'layers was {"model.layers.0.'),
        ({"quant": "fp8"}, 'quant was "int8", is "fp8"'),
        ({"method": "wanda"}, 'method was "sparsegpt", is "wanda"'),
        ({"samples": 3}, "samples was"),
        ({"sweeps": 1}, "sweeps was 4, is 1"),
        ({"target": "own"}, 'finetune was 4, is 0; target was "dense", is "own"'),
        ({"finetune": 2}, "finetune was 4, is 2"),
        ({"skip": ["o_proj"]}, "layers was"),
        ({"skip_worst": "5%"}, "skip_worst was 0.0, is 0.05"),
    ],
)
def test_resuming_another_run_is_refused(
    source: Path,
    tmp_path: Path,
    ids: str,
    monkeypatch: pytest.MonkeyPatch,
    change: dict[str, Any],
    words: str,
) -> None:
    with dying_at(monkeypatch, work.os, "rename", 4), pytest.raises(Killed):
        calibrated(source, tmp_path / "out", ids)
    with pytest.raises(CalibrationError) as error:
        calibrated(source, tmp_path / "out", ids, resume=True, **change)
    assert "was started otherwise" in str(error.value)
    assert words in str(error.value)


def test_resuming_after_the_source_changed_is_refused(
    source: Path, tmp_path: Path, ids: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with dying_at(monkeypatch, work.os, "rename", 4), pytest.raises(Killed):
        calibrated(source, tmp_path / "out", ids)
    os.utime(source / "model.safetensors")
    with pytest.raises(CalibrationError, match="source was"):
        calibrated(source, tmp_path / "out", ids, resume=True)


def test_two_runs_at_once(source: Path, tmp_path: Path, ids: str) -> None:
    seen: list[str] = []

    def interfere(phase: str, done: int, total: int) -> None:
        if phase == "pruning" and not seen:
            with pytest.raises(CalibrationError, match="another calibration is writing") as error:
                calibrated(source, tmp_path / "out", ids, resume=True)
            seen.append(str(error.value))

    calibrated(source, tmp_path / "out", ids, progress=interfere)
    assert len(seen) == 1


# What is refused, before anything is written


@pytest.mark.parametrize(
    ("options", "words", "error"),
    [
        ({"method": "sparsegpt"}, "--method sparsegpt needs calibration data: --calib", CalibrationError),
        ({"method": "wanda"}, "there is --method magnitude", CalibrationError),
        ({"method": "random", "calibration": Calibration("random")}, "has no use for --calib", CalibrationError),
        ({"skip_worst": "5%"}, "--skip-worst needs calibration data", CheckpointError),
        ({"skip_worst": "5", "calibration": Calibration("random", 1, 8)}, "is not a percentage", CalibrationError),
        ({"calibration": Calibration("random", device="tpu")}, "--device 'tpu' is not known", CalibrationError),
        ({"calibration": Calibration("random", sweeps=-1)}, "--sweeps -1 is negative", CalibrationError),
        ({"calibration": Calibration("random", target="mean")}, "--target 'mean' is not known", CalibrationError),
        ({"calibration": Calibration("random", finetune=-1)}, "--finetune -1 is negative", CalibrationError),
        ({"calibration": Calibration("random", target="own", finetune=2)}, "--target own does not run",
         CalibrationError),
        ({"layer": ["down_proj"]}, "--layer 'down_proj' is not REGEX=PATTERN", CheckpointError),
        ({"layer": ["down_proj=7:8"]}, "--layer 'down_proj=7:8': sparsity '7:8' prunes 1", PatternError),
        ({"layer": ["porj=6:8"]}, "--layer 'porj' matches none of the 14", Exception),
        ({"layer": ["q_proj=4:6"]}, "so name all of them or none", Exception),
        ({"skip": ["gate_proj"]}, "--skip covers", Exception),
        ({"skip": ["."]}, "every linear layer is skipped", CheckpointError),
        ({"linear": "lm_head|embed"}, "none of the", CheckpointError),
    ],
)  # fmt: skip
def test_options_that_do_not_do(
    source: Path, options: dict[str, Any], words: str, error: type[Exception]
) -> None:
    refused(source, words, error=error, **options)


def test_layers_that_are_not_run_are_refused(tmp_path: Path) -> None:
    source = llama(tmp_path / "source", model__extra__weight=torch.ones(8, 8).bfloat16())
    words = "model.extra is none of the linear layers that calibration runs in a Llama model"
    options = {"linear": "_proj|extra", "calibration": Calibration("random", 1, 8)}
    refused(source, words, error=CalibrationError, **options)


def test_calibration_of_quantized_sources_is_refused(tmp_path: Path) -> None:
    source = w8a8(tmp_path / "source")
    how = Calibration("random", 1, 8)
    refused(
        source, "the source holds int8 ones; start from the original", error=CalibrationError, calibration=how
    )
    convert(source, tmp_path / "pruned", pattern=SIX_EIGHT)
    refused(tmp_path / "pruned", "already pruned, as only its layout", error=CheckpointError, calibration=how)
    refused(tmp_path / "pruned", "--skip does not go with a source", error=CheckpointError, skip=["q_proj"])
    refused(tmp_path / "pruned", "--layer does not go with", error=CheckpointError, layer=["down_proj=8:10"])


def test_a_gpu_that_is_not_there(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from slidesparse.calibrate.errors import MissingPackageError

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    how = Calibration("random", 1, 8, device="cuda")
    refused(source, "--device cuda: this torch", "finds no GPU", error=MissingPackageError, calibration=how)


def test_dry_run_writes_nothing(source: Path, tmp_path: Path, ids: str) -> None:
    before = snapshot(tmp_path)
    report = calibrated(source, tmp_path / "out", ids, dry_run=True, skip=["o_proj"])
    assert snapshot(tmp_path) == before
    assert len(report.pruned) == 12
    assert report.bytes_out > 0
