"""Test cases of Triton kernels that run in Triton's interpreter, which a kernel selects when it is defined.

They need a separate process: `run` starts the test file itself as a program, once, and its ``__main__`` calls `report`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@cache
def run(program: str) -> dict[str, str | None]:
    """Return the error message of each case of a test file, None if it passed; skip without Triton."""
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-W", "ignore", program]
    process = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False)
    messages = dict(json.loads(line) for line in process.stdout.splitlines())
    assert process.returncode == 0, f"after {len(messages)} cases: {process.stderr[-2000:]}"
    return messages


def report(cases: Mapping[str, Callable[[str], None]]) -> None:
    """Run the cases, and print a line of JSON for each: [name, error message or null]."""
    for name, check in cases.items():
        message = None
        try:
            check("cpu")
        except BaseException as error:
            message = f"{type(error).__name__}: {error}"
        print(json.dumps([name, message]), flush=True)
