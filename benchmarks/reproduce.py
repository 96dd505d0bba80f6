"""Run the measurements behind docs/benchmarks, one command after another, over several calls.

Every command continues its own table when it is repeated; OUT/reproduce.json records the progress of each.  Whole
models need checkpoints, which are created in OUT/models on demand and deleted when no command needs them any longer:
at most 70 GB at a time.
"""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.records import amend_conditions, read_conditions
from slidesparse.errors import FAILED, EnvironmentFault
from slidesparse.pattern import parse_pattern
from slidesparse.tune.measure import Deadline
from slidesparse.tune.shapes import MIXED_PATTERNS, PATTERNS

PRODUCT = "slidesparse"  # the program of commands that are not benchmarks
STATE, REPORT_FIELDS = "reproduce.json", ("finished", "cells", "planned")
MIN_SECONDS = 60.0  # least seconds left to begin a command
MIN_ENGINE_SECONDS = 240.0  # and one that loads engines first

ALL_PATTERNS = ",".join((*PATTERNS[:-1], "16:18", PATTERNS[-1]))
ALL_AND_MIXED_PATTERNS = f"{ALL_PATTERNS},2:4@33%,2:4@50%,2:4@67%"
FEW_TOKENS, MANY_TOKENS = "1,16,32", "64,128,256,512,1024,2048,4096,8192,16384"
KERNELS: dict[str, tuple[str, ...]] = {
    "tune": (PRODUCT, "tune", "--pattern", f"{ALL_PATTERNS},{','.join(MIXED_PATTERNS)}"),
    "kernel, 8 bits": ("kernel", "--dtype", "int8,fp8", "--pattern", ALL_PATTERNS),
    "kernel, squares": ("kernel", "--mode", "square", "--pattern", ALL_PATTERNS),
    "kernel, BF16": ("kernel", "--dtype", "bf16", "--pattern", ALL_PATTERNS),
    "linear": ("linear", "--m", f"{FEW_TOKENS},{MANY_TOKENS}", "--pattern", ALL_AND_MIXED_PATTERNS),
}
# A model, its operand types, the systems, and the patterns that are measured together.  Engines of one group are loaded
# side by side, in the 141 GB of an H200; stock vLLM has no BitNet.
DENSE, SYSTEMS = "dense", "stock,dense,sparse"
WHOLE_MODELS = (
    ("Qwen2.5-7B", ("int8", "fp8"), SYSTEMS, ("2:4,4:6,6:8,8:10",)),
    ("Qwen2.5-7B", ("int8", "fp8"), "stock,cusparselt", ("2:4,6:8",)),
    ("Qwen2.5-7B", ("int8", "fp8"), "stock,sparse", ("2:4@33%,2:4@50%,2:4@67%",)),
    ("Qwen2.5-14B", ("int8", "fp8"), SYSTEMS, ("6:8,2:4", "4:6,8:10")),
    ("Llama3.2-3B", ("int8", "fp8"), SYSTEMS, ("2:4,4:6,6:8,8:10",)),
    ("Llama3.2-1B", ("int8", "fp8"), SYSTEMS, ("2:4,4:6,6:8,8:10",)),
    ("BitNet-2B", ("int8",), "dense,sparse", ("2:4,4:6,6:8,8:10",)),
)
ROUNDS = 2
E2E_STEPS = ("--prefill-steps", "8", "--decode-steps", "128")
# Decode of longer prompts, each in a table of its own: tokens of a prompt, and the batch sizes.
CONTEXTS = {("Qwen2.5-7B", dtype): {2048: "16,64,128", 8192: "16,32"} for dtype in ("int8", "fp8")}
CONTEXT_PATTERNS = "6:8,2:4"
E2E_TOKENS = ("--m", "512,1024,2048,4096,8192,16384,32768", "--decode-m", "1,4,16,32,64,128,256,512")


@dataclass(frozen=True)
class Step:
    """One command; ``checkpoints`` are the folders that it reads, and the command that creates each."""

    name: str
    command: tuple[str, ...]
    checkpoints: tuple[tuple[Path, tuple[str, ...]], ...] = ()


def steps(out: Path) -> list[Step]:
    """All commands, in order."""
    planned = []
    for name, command in KERNELS.items():
        place = () if command[0] == PRODUCT else ("--out", str(out))  # tuning saves into the user's tables
        planned.append(Step(name, (*command, *place)))
    first_rounds: dict[Path, int] = {}
    for model, dtypes, systems, groups in WHOLE_MODELS:
        for dtype in dtypes:
            folder = out / "models" / f"{model}-{dtype}"
            for patterns in groups:
                # a group has rounds, and dense systems, of its own: ratios are taken within a round
                first = first_rounds.setdefault(folder, 1)
                first_rounds[folder] += ROUNDS
                if first == 1:
                    for prompt, batches in CONTEXTS.get((model, dtype), {}).items():
                        sizes = f"--stages decode --decode-m {batches} --decode-prompt-len {prompt}".split()
                        apart = out / f"context-{prompt}"  # one table has prompts of one length
                        planned.append(_e2e(folder, model, dtype, systems, CONTEXT_PATTERNS, sizes, apart))
                sizes = [*E2E_TOKENS, "--first-round", str(first)]
                planned.append(_e2e(folder, model, dtype, systems, patterns, sizes, out))
    return planned


def _e2e(
    folder: Path, model: str, dtype: str, systems: str, patterns: str, sizes: Sequence[str], out: Path
) -> Step:
    checkpoints = ("--name", model, "--model", str(folder), "--patterns", patterns)
    command = ("e2e", "--resident", *checkpoints, "--systems", systems, *E2E_STEPS, *sizes)
    needed = [_synth(folder, model, dtype, name) for name in (DENSE, *patterns.split(","))]
    return Step(
        f"e2e, {model} {dtype} {patterns} into {out.name}",
        (*command, "--rounds", str(ROUNDS), "--out", str(out)),
        tuple(needed),
    )


def _synth(folder: Path, model: str, dtype: str, pattern: str) -> tuple[Path, tuple[str, ...]]:
    path = folder / (pattern if pattern == DENSE else parse_pattern(pattern).flag)
    pruned = () if pattern == DENSE else ("--sparsity", pattern)
    return path, (PRODUCT, "synth", model, str(path), "--quant", dtype, *pruned)


class Stopped(EnvironmentFault):
    """A command that ended without a result and has printed the reason."""


def progress(out: Path) -> list[tuple[Step, dict[str, Any]]]:
    """Every step with its last report: measured "cells" of "planned" ones."""
    reports = read_conditions(out / STATE)
    return [(step, reports.get(step.name, {})) for step in steps(out)]


def steps_left(out: Path) -> list[Step]:
    """The steps that are not done; last those that finished with failed cells."""
    unfinished = [(step, report) for step, report in progress(out) if not is_done(report)]
    return [step for step, _ in sorted(unfinished, key=lambda item: bool(item[1].get("finished")))]


def is_done(report: dict[str, Any]) -> bool:
    """Whether a step with this report has no cell left."""
    return bool(report) and report["cells"] == report["planned"]


def run_steps(out: Path, deadline: Deadline, say: Callable[[str], None]) -> None:
    """Run what is left until the time is up.  Raises Stopped."""
    todo = steps_left(out)
    for number, step in enumerate(todo):
        for path, command in step.checkpoints:
            if not path.exists():
                if not _has_time(deadline, MIN_SECONDS):
                    return
                say(shlex.join(command))
                _run_command(command)
        if not _has_time(deadline, MIN_ENGINE_SECONDS if step.checkpoints else MIN_SECONDS):
            return
        say(step.name)
        limit = () if deadline.seconds_left is None else ("--time-limit", f"{deadline.seconds_left:.0f}")
        result = json.loads(_run_command((*step.command, *limit, "--json")))
        amend_conditions(out / STATE, {step.name: {name: result[name] for name in REPORT_FIELDS}})
        if not result["finished"]:
            return
        needed = {path for other in todo[number + 1 :] for path, _ in other.checkpoints}
        for path, _ in step.checkpoints:
            if path not in needed:
                shutil.rmtree(path)


def commands(out: Path) -> Iterator[str]:
    """Return the shell commands for the remaining steps."""
    for step in steps_left(out):
        for path, command in step.checkpoints:
            yield f"test -d {shlex.quote(str(path))} || {shlex.join(command)}"
        yield shlex.join(
            step.command if step.command[0] == PRODUCT else ["python", "-m", "benchmarks", *step.command]
        )


def _has_time(deadline: Deadline, seconds: float) -> bool:
    return deadline.seconds_left is None or deadline.seconds_left >= seconds


def _run_command(command: tuple[str, ...]) -> str:
    """Run a command and return what it printed.  Raises Stopped when it has no result."""
    program = ["-m", "benchmarks", *command]
    if command[0] == PRODUCT:
        program = ["-c", "from slidesparse.cli import main; main()", *command[1:]]
    status, text = _run([sys.executable, *program])
    if status and not (status == FAILED and text):  # some cells of a table failed, the others are there
        raise Stopped(f"{shlex.join(command)} ended with status {status}")
    return text


def _run(command: list[str]) -> tuple[int, str]:
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    text, _ = process.communicate()  # when interrupted, it ends by itself, because it has to close engines
    return process.returncode, text
