"""Commands of ``slidesparse``, run in this process, and programs in one of their own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from slidesparse.cli.main import app

ROOT = Path(__file__).parents[2]


def run(program: str, *arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run the text of a program in the project's folder, or as ``options`` of subprocess say."""
    command = [sys.executable, "-c", program, *map(str, arguments)]
    options = {"cwd": ROOT, "timeout": 300, **options}
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


class Done:
    """The outcome of a command."""

    def __init__(self, *arguments: object) -> None:
        result = CliRunner().invoke(app, [str(argument) for argument in arguments])
        self.code, self.out, self.err = result.exit_code, result.stdout, result.stderr
