"""The Makefile's installation without a GPU, with a stand-in for Python, pip and uv."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STAND_IN = """#!/bin/sh
case "$*" in
*"-m venv"*) mkdir -p .venv/bin; cp "$0" .venv/bin/python; cp "$0" .venv/bin/uv ;;
*"-m pip"*" install torch=="*) echo "the index has no such torch" >&2; exit 1 ;;
esac
"""


@pytest.mark.skipif(not shutil.which("make"), reason="make is not installed")
def test_error_of_pip_is_shown_before_uv_is_tried(tmp_path: Path) -> None:
    shutil.copy(ROOT / "Makefile", tmp_path)
    for name in ("pyproject.toml", "setup.py"):
        (tmp_path / name).touch()
    (tmp_path / "python").write_text(STAND_IN)
    (tmp_path / "python").chmod(0o755)
    command = ["make", "venv", f"PYTHON={tmp_path / 'python'}", "EXTRAS=cpu"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    assert "the index has no such torch\npip could not install" in result.stderr
    assert (tmp_path / ".venv" / ".installed").exists()
