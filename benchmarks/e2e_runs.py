"""Run ``vllm bench throughput``, one process at a time, and read its results."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

from packaging.version import InvalidVersion, Version

from benchmarks.conditions import cpu_conditions, gpu_conditions
from benchmarks.e2e import (
    BLOCKS,
    CUBLASLT,
    CUSPARSELT,
    DECODE,
    SLIDED_SYSTEMS,
    Run,
    Workload,
    command,
    differences,
    environment,
)
from benchmarks.records import E2E, SHARED_CONDITIONS, Records, amend_conditions
from slidesparse.evaluate.engine import ERROR_LINE
from slidesparse.tune import machine
from slidesparse.tune.measure import Deadline

CONDITIONS = (*SHARED_CONDITIONS, "cpu", "workload")  # that all rows of a table share
# In the plugin's log line for dense systems.
DENSE_LOG_WORDS = {CUBLASLT: "on the cuBLASLt", BLOCKS: "in blocks"}
PLUGIN_SYSTEMS = (*DENSE_LOG_WORDS, *SLIDED_SYSTEMS)  # systems whose layers the plugin runs
LIBRARIES = {CUBLASLT: "cublaslt", CUSPARSELT: "cusparselt"}  # the backend that a system needs on a GPU
RUN_SECONDS = 1800.0  # of one process: loading, compiling and capturing included
END_SECONDS = 15  # between SIGTERM and SIGKILL
LAST_LINES, CAUSES = 8, 3

# The plugin's log line about its layers, and vLLM's about the size of its KV cache.
SERVED_LINE = re.compile(
    r"SlideSparse (?P<line>(?P<pattern>[^\s:]+(:[\d.@%]+)?)( \([^)]*\))?: "
    r"(?P<layers>\d+) layers (?P<kind>sparse|on the cuBLASLt|in blocks).*)"
)
CACHE_SIZE_LINE = re.compile(r"KV cache size: ([\d,]+) tokens")


class RunError(RuntimeError):
    """A run failed; the message is the reason."""


@dataclass(frozen=True)
class Failure:
    """A failed run, the reason, and the end of its log."""

    run: Run
    reason: str
    log: Path
    lines: tuple[str, ...]


def conditions(systems: Sequence[str]) -> dict[str, Any]:
    """Return the conditions of this machine, queried in a child process, because this one must not use GPU memory.

    Raises MissingError when a library that a system needs cannot run.
    """
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(_conditions, tuple(systems)).result()


def _conditions(systems: Sequence[str]) -> dict[str, Any]:
    try:
        gpu = machine.require_gpu()
    except machine.MissingError:
        return cpu_conditions()
    libraries = machine.require_libraries(gpu, [LIBRARIES[name] for name in systems if name in LIBRARIES])
    if set(systems) & {BLOCKS, *SLIDED_SYSTEMS}:  # the plugin uses whichever backend it finds
        names = {library.name for library in libraries}
        usable, _ = machine.usable_libraries(gpu)
        libraries += [library for library in usable if library.sparse and library.name not in names]
    return gpu_conditions(gpu, libraries)


def vllm_version(facts: Mapping[str, Any]) -> Version | None:
    """Return the version of vLLM in the conditions ``facts``; None if unknown."""
    try:
        return Version(str(facts["versions"]["vllm"]))
    except InvalidVersion:
        return None


@dataclass(frozen=True)
class Figures:
    """The figures of a run, by the names of their columns."""

    tokens_per_s: float
    tokens_per_joule: float | str = ""  # "": not measured
    step_ms: float | str = ""


def read_figures(run: Run, document: Mapping[str, Any], answer: Mapping[str, Any] | None = None) -> Figures:
    """Return a run's figures, from the JSON of ``vllm bench throughput --output-json`` and a resident engine's answer.

    prefill: ``total_num_tokens / elapsed_time``, prompt tokens as vLLM counted them and one output token a prompt.
    decode:  ``num_requests * output length / elapsed_time``, output tokens only.  Their number is exact, as the
    benchmark ignores ends of sequence; the time includes the steps that prefill the prompts.

    ``elapsed_time`` is wall time in seconds from handing all prompts to the engine until the last output is there:
    tokenizing, scheduling, attention, sampling and detokenizing included; loading, compiling, CUDA graph capture and
    warm-up not.  Raises RunError when the JSON is not of this run, or when its prompts were too short for M.
    """
    try:
        elapsed, total = float(document["elapsed_time"]), int(document["total_num_tokens"])
        requests = int(document["num_requests"])
    except (KeyError, TypeError, ValueError) as error:
        raise RunError(f"vLLM's JSON has no usable {error}: {json.dumps(document)[:300]}") from error
    size = run.size
    if elapsed <= 0 or requests != size.prompts:
        raise RunError(
            f"vLLM's JSON tells of {requests} requests in {elapsed} s; {size.prompts} were asked for"
        )
    tokens = requests * size.output if run.stage == DECODE else total
    joules, steps = (answer.get("joules"), answer["steps"]) if answer else (None, [])
    figures = Figures(tokens / elapsed, tokens / joules if joules else "", _step_ms(steps, run.m))
    if run.stage == DECODE:
        return figures
    prompts = total - requests * size.output
    if prompts * size.sequences < run.m * requests:
        raise RunError(
            f"prompts had {prompts / requests:.1f} tokens, not {size.prompt}, so that no step had {run.m}: "
            "the tokenizer does not keep the lengths of random prompts"
        )
    return figures


def _step_ms(steps: Sequence[tuple[int, float]], m: int) -> float | str:
    """Return the median milliseconds of the steps of ``m`` tokens that follow another one; "" if there is none.

    In the median, steps that waited for a busy CPU do not count, as long as most did not.
    """
    times = [seconds for (before, _), (tokens, seconds) in pairwise(steps) if before == tokens == m]
    return 1000 * median(times) if times else ""


def check_log(run: Run, text: str) -> str:
    """Return the plugin's log line, "" for a system without it.  Raises RunError if another system ran."""
    logged = SERVED_LINE.search(text)
    if run.system not in PLUGIN_SYSTEMS:
        if logged:
            raise RunError(f"the plugin served {logged['line']}, though {run.system} is vLLM without it")
        return ""
    if logged is None:
        raise RunError(
            "the plugin did not count its layers in the log: it is not installed in the environment of the vllm "
            "command, or VLLM_LOGGING_LEVEL hides its line"
        )
    kind, pattern = (
        ("sparse", run.pattern)
        if run.system in SLIDED_SYSTEMS
        else (DENSE_LOG_WORDS[run.system], logged["pattern"])
    )
    if (logged["kind"], logged["pattern"]) != (kind, pattern) or not int(logged["layers"]):
        raise RunError(f"the plugin served {logged['line']}, not {run.label}")
    return logged["line"]


def check_room(run: Run, text: str) -> None:
    """Raise RunError when vLLM's KV cache cannot hold the sequences that make up M."""
    size, match = run.size, CACHE_SIZE_LINE.search(text)
    needed = run.m * (size.prompt + size.output) if run.stage == DECODE else run.m
    if match and (room := int(match[1].replace(",", ""))) < needed:
        raise RunError(
            f"the KV cache holds {room} tokens, {needed} are needed for M {run.m}; "
            "give vLLM more memory with --vllm-args"
        )


def execute(arguments: Sequence[str], env: Mapping[str, str], log: Path, seconds: float | None) -> int | None:
    """Run a command with its output appended to ``log``; return its exit status, or None when the time was up.

    The process leads a process group, which is ended before this returns or raises.
    """
    with log.open("a", encoding="utf-8") as sink:
        process = subprocess.Popen(
            arguments,
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=sink,
            start_new_session=True,
        )
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            end_process(process)


def end_process(process: subprocess.Popen[bytes]) -> None:
    """End a process that leads a group, and the group."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_SECONDS)
    with suppress(ProcessLookupError):  # engine processes that outlive their parent keep its GPU memory
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@dataclass
class E2eBench:
    """Fills OUT/e2e.csv, each run in a process of its own.

    ``begin`` is called with the number of runs done and the label of the next one, ``say`` with each result.
    """

    out: Path
    vllm: str
    version: Version | None
    workload: Workload
    deadline: Deadline
    run_seconds: float = RUN_SECONDS
    begin: Callable[[int, str], None] = lambda done, label: None
    say: Callable[[str], None] = lambda line: None
    failures: list[Failure] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.records = Records(self.out, E2E)
        (self.out / "logs").mkdir(exist_ok=True)

    def close(self) -> None:
        """Do nothing: no process is left running between runs."""

    def run(self, runs: Sequence[Run]) -> bool:
        """Measure what is not in the table, and note failed runs; return False if the time limit was reached."""
        for done, run in enumerate(runs):
            self.begin(done, run.label)
            if self.records.has(run.key):
                continue
            if self.deadline.passed:
                return False
            try:
                figures, line = self._measure(run)
            except RunError as error:
                self._note(run, str(error))
                continue
            if figures is None:
                return False
            self.records.add({**run.key, **asdict(figures)})
            if line:
                amend_conditions(self.out / "e2e.json", {f"{run.model} {run.pattern} {run.system}": line})
            self.say(f"{run.label}: {figures.tokens_per_s:.0f} tokens/s")
        return True

    def _measure(self, run: Run) -> tuple[Figures | None, str]:
        """Return a run's figures and the plugin's log line, or (None, "") if the command's time limit was reached."""
        log = log_path(self.out, run)
        result = log.with_suffix(".json")
        result.unlink(missing_ok=True)  # of an earlier attempt
        arguments = command(self.vllm, self.version, run, self.workload, result)
        log.write_text(f"$ {format_command(run, arguments)}\n", encoding="utf-8")
        left = self.deadline.seconds_left
        seconds = self.run_seconds if left is None else min(left, self.run_seconds)
        status = execute(arguments, environment(run.system, os.environ), log, seconds)
        if status is None and self.deadline.passed:
            return None, ""
        if status is None:
            raise RunError(f"it took more than the {self.run_seconds:g} s of --run-limit")
        if status:
            raise RunError(f"vllm ended with status {status}")
        text = log.read_text(encoding="utf-8", errors="replace")
        line = check_log(run, text)
        check_room(run, text)
        try:
            document = json.loads(result.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise RunError(f"vllm wrote no JSON that can be read ({error})") from error
        return read_figures(run, document), line

    def _note(self, run: Run, reason: str) -> None:
        log = log_path(self.out, run)
        lines = last_lines(log.read_text(encoding="utf-8", errors="replace"))
        with log.open("a", encoding="utf-8") as file:
            file.write(f"\nfailed: {reason}\n")
        self.failures.append(Failure(run, reason, log, lines))
        self.say(f"{run.label}: failed, {reason}")


def log_path(out: Path, run: Run) -> Path:
    """Return the file for the output of ``run``; vLLM's JSON is next to it."""
    return out / "logs" / f"{run.file_name}.log"


def format_command(run: Run, arguments: Sequence[str]) -> str:
    """Return the command line for a shell, including its changes to the environment."""
    changes = differences(run.system, os.environ)
    return shlex.join(["env", *changes, *arguments] if changes else arguments)


def last_lines(text: str) -> tuple[str, ...]:
    """Return the first errors of a log, which usually cause the others, and its last lines."""
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    last = lines[-LAST_LINES:]
    causes = dict.fromkeys(match[0] for line in lines[:-LAST_LINES] if (match := ERROR_LINE.search(line)))
    return (*list(causes)[:CAUSES], *last)
