"""`slidesparse build`: what it says, in words and in JSON, and its exit codes."""

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
    """A machine that can compile ``good`` and not ``bad``, by a compiler that only pretends."""
    compiler = tmp_path / "c++"
    compiler.write_text(
        '#!/bin/sh\nwhile [ $# -gt 0 ]; do if [ "$1" = -o ]; then touch "$2"; fi; shift; done\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("SLIDESPARSE_CACHE", str(tmp_path / "cache"))
    good = Target("good", "good thing", ("library.h",))
    bad = Target("bad", "bad thing", ("library.h",), headers=("no_such_header.h",))
    for name in list(TARGETS):
        monkeypatch.delitem(TARGETS, name)
    monkeypatch.setitem(TARGETS, "bad", bad)
    monkeypatch.setitem(TARGETS, "good", good)
    return tmp_path


def test_build_reports_each_target_and_exit_code(root: Path) -> None:
    """It exits 3 with the reason for what cannot be built, and 0 without it; what is there is said to be."""
    first = CliRunner().invoke(app, ["build"])
    assert first.exit_code == 3
    assert "no_such_header.h" in first.stderr
    assert "bad thing" in first.stderr
    assert first.stdout.split() == [
        "good",
        "built",
        *first.stdout.split()[2:4],
        str(compile.target_path("good")),
    ]
    again = CliRunner().invoke(app, ["build", "good"])
    assert (again.exit_code, again.stderr) == (0, "")
    assert "was there" in again.stdout


def test_build_json_output(root: Path) -> None:
    done = CliRunner().invoke(app, ["build", "--json"])
    said = json.loads(done.stdout)
    assert done.exit_code == 3
    assert said["cache"] == str(root / "cache")
    bad, good = said["targets"]
    assert (bad["name"], bad["state"], good["name"], good["state"]) == ("bad", "failed", "good", "built")
    assert "no_such_header.h" in bad["what"]
    assert bad["remedy"]
    assert good["path"] == str(compile.target_path("good"))
    assert good["seconds"] >= 0


def test_build_of_unknown_target_exits_2(root: Path) -> None:
    done = CliRunner().invoke(app, ["build", "none"])
    assert done.exit_code == 2
    assert "'none'" in done.stderr
