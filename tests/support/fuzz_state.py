"""Damage what one run leaves for the next: work folders, measured losses, tuned tables.  ``fuzz_state.py --help``.

A resumed conversion must give a valid checkpoint or a one-line error, as `fuzz` has it; a conversion beside damaged
losses must, too; a table must be read, refused in a line or replaced.  The checkpoint need not equal that of an
undamaged run, as some damage is another valid decision.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import fuzz
from calibration import Killed, calibrated, save, write_ids

from slidesparse.calibrate import learning
from slidesparse.calibrate.resume import work_folder
from slidesparse.checkpoint.inspection import inspect
from slidesparse.convert import stream
from slidesparse.convert.budget import Budget
from slidesparse.gemm import tuned
from slidesparse.gemm.problem import Problem
from slidesparse.gemm.tuned import Subject, Tuned

OPTIONS: dict[str, Any] = {"rotate": "on", "budget": Budget(zeros=0.3), "epochs": 0}
SUBJECT = Subject("hopper", "1", "NVIDIA H100", (9, 0))
PROBLEM = Problem("int8", "bf16", 4608, 3584, 64, "both")


class State:
    """A tiny model, and what an interrupted conversion of it, and a search, have left."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.source, self.out = folder, folder / "source", folder / "case" / "out"
        save("llama", self.source, num_hidden_layers=2)
        self.ids = write_ids(folder / "ids.npy", 12)

        def die(*_: Any) -> None:
            raise Killed

        self.left = folder / "left"  # copied to folder/case for each case
        os.environ["SLIDESPARSE_CACHE"] = str(self.left / "cache")
        with patch.object(stream, "_write", die), suppress(Killed):
            calibrated(self.source, self.left / "out", self.ids, **OPTIONS)
        tuned.save(SUBJECT, [(PROBLEM, Tuned("a", 1.0))])
        os.environ["SLIDESPARSE_CACHE"] = str(folder / "case" / "cache")

    def resume(self) -> str:
        """Finish the interrupted conversion."""
        calibrated(self.source, self.out, self.ids, resume=True, **OPTIONS)
        return "violations" if inspect(self.out).violations else "ok"

    def decide(self) -> str:
        """Convert anew, with the losses in the cache."""
        shutil.rmtree(work_folder(self.out))
        calibrated(self.source, self.out, self.ids, **OPTIONS)
        return "violations" if inspect(self.out).violations else "ok"

    def look_up(self) -> str:
        """Choose an algorithm, and save another."""
        tuned._merged_table.cache_clear()
        chosen = tuned.tuned_algorithm(SUBJECT, PROBLEM)
        tuned.save(SUBJECT, [(PROBLEM, Tuned("c", 0.5))])
        return "untuned" if chosen is None else "ok"

    def files(self, kind: str) -> list[Path]:
        """List the files of a kind in the case's folder."""
        case = self.out.parent
        if kind == "work":
            return sorted(path for path in work_folder(self.out).iterdir() if path.suffix)
        return sorted((case / "cache" / kind).rglob("*.json"))


COMMANDS: dict[str, Callable[[State], str]] = {
    "work": State.resume,
    "losses": State.decide,
    "tuned": State.look_up,
}


def damage(path: Path, rng: random.Random) -> str:
    """Damage a file and return a description."""
    if path.suffix == ".json" and rng.random() < 0.7:
        document = json.loads(path.read_bytes())
        what = fuzz.damage_json(document, rng)
        path.write_bytes(fuzz.dump(document))
        return what
    raw = path.read_bytes()
    if path.suffix == ".safetensors":  # but the values of tensors, which any value may be
        header = 8 + int.from_bytes(raw[:8], "little")
        changed, what = fuzz.damage_bytes(raw[:header], rng)
        path.write_bytes(changed + raw[header:])
        return what
    changed, what = fuzz.damage_bytes(raw, rng)
    path.write_bytes(changed)
    return what


def run(first: int, count: int, report: Callable[[int, str, str], None]) -> Counter[str]:
    """Judge ``count`` cases from ``first`` on; ``report`` gets number, damage and message of each defect."""
    counts: Counter[str] = Counter()
    with (
        tempfile.TemporaryDirectory(prefix="fuzz-") as name,
        patch.object(learning, "STEPS", 2),
        patch.object(os, "fsync", lambda descriptor: None),
        patch.dict(os.environ),
    ):
        state = State(Path(name))
        for number in range(first, first + count):
            rng = random.Random(number)
            shutil.copytree(state.left, state.out.parent)
            kind = rng.choice(sorted(COMMANDS))
            path = rng.choice(state.files(kind))
            what = f"{path.name}: {damage(path, rng)}"
            try:
                result = fuzz.outcome(lambda kind=kind: COMMANDS[kind](state))
                if result == "violations":
                    raise fuzz.Defect("the checkpoint violates its patterns")
                counts[f"{kind}: {result}"] += 1
            except fuzz.Defect as defect:
                counts["defect"] += 1
                report(number, what, str(defect))
            shutil.rmtree(state.out.parent)
    return counts


if __name__ == "__main__":
    sys.exit(fuzz.main(run))
