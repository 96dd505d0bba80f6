"""All measurements in parts: order of steps, resumption, and removal of models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from models import write_config
from typer.testing import CliRunner

from benchmarks import e2e, reproduce
from benchmarks.cli import app
from slidesparse.cli.main import app as product
from slidesparse.convert.synth_model import PUBLIC
from slidesparse.errors import ENVIRONMENT, FAILED
from slidesparse.tune.measure import Deadline


class Machine:
    """Stand-in for the processes, of 100 s each: a table has 3 cells, and a call measures up to 2."""

    def __init__(self, out: Path) -> None:
        self.out, self.seconds, self.ran = out, 0.0, list[str]()
        self.cells: dict[str, int] = {}
        self.failing: dict[str, tuple[int, str]] = {}

    def run(self, command: list[str]) -> tuple[int, str]:
        self.seconds += 100
        if "synth" in command:
            path = Path(command[command.index("synth") + 2])
            path.mkdir(parents=True)
            self.ran.append(path.name)
            return 0, "made"
        name = command[command.index("--patterns") + 1] if "e2e" in command else "kernel"
        self.ran.append(name)
        if name in self.failing:
            return self.failing[name]
        self.cells[name] = min(3, self.cells.get(name, 0) + 2)
        summary = {"finished": self.cells[name] == 3, "rows": 7, "cells": self.cells[name], "planned": 3}
        return 0, json.dumps(summary)

    def part(self, seconds: float) -> list[str]:
        """Run one part and return the names of its steps."""
        self.ran.clear()
        reproduce.run_steps(self.out, Deadline(seconds, lambda: self.seconds), lambda line: None)
        return list(self.ran)

    @property
    def models(self) -> set[str]:
        return {path.name for path in self.out.glob("models/*/*")}


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    fake = Machine(tmp_path)
    monkeypatch.setattr(reproduce, "_run", fake.run)
    monkeypatch.setattr(reproduce, "KERNELS", {"kernel": ("kernel",)})
    monkeypatch.setattr(reproduce, "WHOLE_MODELS", (("A", ("int8",), "stock,sparse", ("2:4", "6:8")),))
    return fake


def test_parts_continue_where_the_last_one_stopped(machine: Machine) -> None:
    """A command starts only with 60 s left, and one that loads engines with 240 s."""
    assert machine.part(159) == ["kernel"]
    assert machine.part(159) == ["kernel"]
    assert machine.part(439) == ["dense", "2_4"]
    assert machine.part(1000) == ["2:4"]
    assert machine.models == {"dense", "2_4"}
    assert machine.part(439) == ["2:4", "2_8"]
    assert machine.models == {"dense", "2_8"}  # both groups need dense weights
    assert machine.part(240) == machine.part(240) == ["6:8"]
    assert machine.models == set()
    assert machine.part(1000) == []


def test_failed_cells_are_retried_last(machine: Machine) -> None:
    machine.cells["kernel"] = 1
    machine.failing["2:4"] = FAILED, json.dumps({"finished": True, "cells": 2, "planned": 3})
    machine.cells["6:8"] = 1
    assert machine.part(1000) == ["kernel", "dense", "2_4", "2:4", "2_8", "6:8"]
    assert machine.models == set()
    del machine.failing["2:4"]
    result = CliRunner().invoke(app, ["reproduce", str(machine.out), "--dry-run"])
    assert result.stdout.startswith(f"test -d {machine.out}/models/A-int8/dense || slidesparse synth A ")
    assert "--first-round 1" in result.stdout
    assert "--first-round 4" not in result.stdout


def test_a_command_without_a_result_ends_the_part(machine: Machine) -> None:
    machine.failing["kernel"] = ENVIRONMENT, ""
    result = CliRunner().invoke(app, ["reproduce", str(machine.out)])
    assert (result.exit_code, machine.ran) == (ENVIRONMENT, ["kernel"])
    assert f"status {ENVIRONMENT}" in result.stderr
    assert [line.split()[0] for line in result.stdout.splitlines()] == ["left"] * 3


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch is built with CUDA")
def test_every_command_has_valid_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Options of every command are valid: GPU commands fail for lack of a GPU, and e2e commands print their plan."""
    monkeypatch.setattr(e2e, "_other_plugins", list)  # slow, and called for each printed command
    steps = reproduce.steps(tmp_path)
    for step in steps:
        for path, synth_command in step.checkpoints:
            if not path.exists():
                config = (
                    write_config(path, None if path.name == "dense" else path.name, synth_command[5])
                    / "config.json"
                )
                positions = PUBLIC[synth_command[2]]["max_position_embeddings"]
                content = json.loads(config.read_text()) | {"max_position_embeddings": positions}
                config.write_text(json.dumps(content))
        program, *arguments = step.command
        if program == "e2e":
            result = CliRunner().invoke(app, [*step.command, "--dry-run"])
            assert result.exit_code == 0, result.stderr
        else:
            result = CliRunner().invoke(
                *((product, arguments) if program == "slidesparse" else (app, step.command))
            )
            assert (result.exit_code, "NVIDIA GPU" in result.stderr) == (ENVIRONMENT, True), step
    keys = [
        (model, dtype, systems, pattern)
        for model, dtypes, systems, groups in reproduce.WHOLE_MODELS
        for dtype in dtypes
        for pattern in ",".join(groups).split(",")
    ]
    assert len(keys) == len(set(keys)) == 9 * 4 + 2 * (2 + 3)
    assert len({step.name for step in steps}) == len(steps)
