"""`slidesparse build`: its text and JSON output, and its exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from slidesparse.build import compile
from slidesparse.build.compile import TARGETS, Target
from slidesparse.cli.main import app


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Simulate a machine that can compile ``good`` but not ``bad``, with a fake compiler."""
    compiler = tmp_path / "c++"
    compiler.write_text(
        '#!/bin/sh\nwhile [ $# -gt 0 ]; do if [ "$1" = -o ]; then touch "$2"; fi; shift; done\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("SLIDESPARSE_CACHE", str(tmp_path / "cache"))
    good = Target("good", "good thing", ("hopper/operators.cpp",))
    bad = Target("bad", "bad thing", ("no_such_source.h",))
    for name in list(TARGETS):
        monkeypatch.delitem(TARGETS, name)
    monkeypatch.setitem(TARGETS, "bad", bad)
    monkeypatch.setitem(TARGETS, "good", good)
    return tmp_path


def test_build_reports_each_target_and_exit_code(root: Path) -> None:
    """It exits with 3 and the reason if a target cannot be built, otherwise with 0; existing targets are reported."""
    first = CliRunner().invoke(app, ["build"])
    assert first.exit_code == 3
    assert "no_such_source.h" in first.stderr
    assert "bad thing" in first.stderr
    assert first.stdout.split() == [
        "good",
        "built",
        *first.stdout.split()[2:4],
        str(compile.target_path("good")),
    ]
    second = CliRunner().invoke(app, ["build", "good"])
    assert (second.exit_code, second.stderr) == (0, "")
    assert "up to date" in second.stdout


def test_build_json_output(root: Path) -> None:
    result = CliRunner().invoke(app, ["build", "--json"])
    report = json.loads(result.stdout)
    assert result.exit_code == 3
    assert report["cache"] == str(root / "cache")
    bad, good = report["targets"]
    assert (bad["name"], bad["state"], good["name"], good["state"]) == ("bad", "failed", "good", "built")
    assert "no_such_source.h" in bad["what"]
    assert bad["remedy"]
    assert good["path"] == str(compile.target_path("good"))
    assert good["seconds"] >= 0


def test_build_of_unknown_target_exits_2(root: Path) -> None:
    result = CliRunner().invoke(app, ["build", "none"])
    assert result.exit_code == 2
    assert "'none'" in result.stderr
