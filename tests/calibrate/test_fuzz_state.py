"""Damage what one run leaves for the next: work folders, measured losses, tuned tables.

A resumed conversion must give the bytes of an undamaged run or a one-line error, as `fuzz` has it; a conversion beside
damaged losses must give them; a table must be read, refused in a line or replaced.  FUZZ_TIMES=50 makes the run long.
"""

from __future__ import annotations

import os
import random
import shutil
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import fuzz
import pytest
from calibration import Killed, calibrated, save, set_clock, write_ids
from checkpoints import snapshot

from slidesparse.calibrate import learning
from slidesparse.calibrate.resume import STATE, work_folder
from slidesparse.convert import stream
from slidesparse.convert.budget import Budget, Choice
from slidesparse.gemm import tuned
from slidesparse.gemm.problem import Problem
from slidesparse.gemm.tuned import Subject

OPTIONS: dict[str, Any] = {"rotate": "on", "budget": Budget(0.1, tokens=(16,)), "epochs": 0, "minutes": 0.1}
SUBJECT = Subject("hopper", "1", "NVIDIA H100", (9, 0))
PROBLEM = Problem("int8", "bf16", 4608, 3584, 64, "both")


class State:
    """A tiny model, and what an interrupted conversion of it, and a search, have left."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.source, self.out = folder, folder / "source", folder / "case" / "out"
        save("llama", self.source, num_hidden_layers=2)
        self.ids, self.text = write_ids(folder / "ids.npy", 12), write_ids(folder / "text.npy", 40)
        self.left = folder / "left"  # copied to folder/case for each case
        os.environ["SLIDESPARSE_CACHE"] = str(self.left / "cache")
        with patch.object(stream, "write_output", side_effect=Killed), suppress(Killed):
            self._convert(self.left / "out")
        shutil.copytree(work_folder(self.left / "out"), work_folder(folder / "whole"))
        self._convert(folder / "whole", resume=True)
        self.whole, self.choice = snapshot(folder / "whole"), self._chosen()
        tuned.save(SUBJECT, [(PROBLEM, "a")])
        os.environ["SLIDESPARSE_CACHE"] = str(folder / "case" / "cache")

    def _convert(self, out: Path, resume: bool = False) -> None:
        with pytest.MonkeyPatch.context() as clock:
            set_clock(clock)
            calibrated(self.source, out, self.ids, distill=(self.text,), resume=resume, **OPTIONS)

    def resume(self) -> str:
        """Finish the interrupted conversion."""
        self._convert(self.out, resume=True)
        return "ok" if snapshot(self.out) == self.whole else "other bytes"

    def decide(self) -> str:
        """Choose anew, with the losses in the cache."""
        shutil.rmtree(work_folder(self.out))
        return "ok" if self._chosen() == self.choice else "another choice"

    def _chosen(self) -> Choice | None:
        budget = calibrated(
            self.source, self.out, self.ids, dry_run=True, **{**OPTIONS, "minutes": None}
        ).budget
        return budget.choice if budget else None

    def look_up(self) -> str:
        """Choose an algorithm, and save another."""
        tuned._merged_table.cache_clear()
        chosen = tuned.tuned_algorithm(SUBJECT, PROBLEM)
        tuned.save(SUBJECT, [(PROBLEM, "c")])
        return "untuned" if chosen is None else "ok"

    def files(self, kind: str) -> list[Path]:
        """List the files of a kind in the case's folder."""
        case = self.out.parent
        if kind == "work":
            return sorted(path for path in work_folder(self.out).iterdir() if path.suffix)
        return sorted((case / "cache" / kind).rglob("*.json"))


COMMANDS = {"work": State.resume, "losses": State.decide, "tuned": State.look_up}


def damage(path: Path, rng: random.Random) -> str:
    """Damage a file and return a description."""
    if rng.random() < 0.15:
        return fuzz.damage_file(path, rng.choice(range(1 if path.name == STATE else 0, 6)))
    if path.suffix == ".json" and rng.random() < 0.7:
        return fuzz.damage_json_file(path, rng)
    if path.suffix == ".safetensors" and rng.random() < 0.7:
        return fuzz.damage_header(path, rng)
    changed, what = fuzz.damage_bytes(path.read_bytes(), rng)
    path.write_bytes(changed)
    return what


def test_damaged_state_is_refused_or_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learning, "STEPS", 2)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    counts, defects, state = Counter[str](), list[str](), State(tmp_path)
    for number in range(40 * fuzz.MORE):
        rng = random.Random(number)
        shutil.copytree(state.left, state.out.parent)
        kind = rng.choice(sorted(COMMANDS))
        path = rng.choice(state.files(kind))
        what = f"{path.name}: {damage(path, rng)}"
        try:
            result = fuzz.outcome(lambda kind=kind: COMMANDS[kind](state))
            if result.startswith(("other", "another")):
                raise fuzz.Defect(f"{result} than without damage")
            counts[f"{kind}: {result}"] += 1
        except fuzz.Defect as defect:
            defects.append(f"{number}: {what}: {defect}")
        shutil.rmtree(state.out.parent)
    assert defects == []
    assert counts["work: error"] > 5
    assert counts["losses: ok"] > 5
    assert counts["tuned: error"] > 2
