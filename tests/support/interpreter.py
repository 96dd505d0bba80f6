"""Cases of Triton kernels, run by Triton's interpreter: in a process of their own, as kernels ask for it when defined.

A test file that has such cases is itself the program: `run` starts it, once, and its ``__main__`` calls `report`.
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
    """Return what each case of a test file said, None where it passed; skip without Triton."""
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-W", "ignore", program]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False)
    found = dict(json.loads(line) for line in done.stdout.splitlines())
    assert done.returncode == 0, f"after {len(found)} cases: {done.stderr[-2000:]}"
    return found


def report(cases: Mapping[str, Callable[[str], None]]) -> None:
    """Run the cases; a line of JSON each: [name, what went wrong or null]."""
    for name, check in cases.items():
        message = None
        try:
            check("cpu")
        except BaseException as error:
            message = f"{type(error).__name__}: {error}"
        print(json.dumps([name, message]), flush=True)
