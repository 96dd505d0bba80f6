"""`slidesparse build`: its text and JSON output, and its exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import Done

from slidesparse.build import compile
from slidesparse.build.compile import TARGETS, Target


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
    first = Done("build", "--json")
    report = json.loads(first.out)
    assert (first.code, report["cache"]) == (3, str(root / "cache"))
    bad, good = report["targets"]
    path = str(compile.target_path("good"))
    assert (bad["name"], bad["state"], good["name"], good["state"]) == ("bad", "failed", "good", "built")
    assert (good["path"], bool(bad["remedy"])) == (path, True)
    assert "no_such_source.h" in bad["what"]
    second, third = Done("build"), Done("build", "good")
    assert second.code == 3
    assert "bad thing" in second.err
    assert "no_such_source.h" in second.err
    assert (third.code, third.err) == (0, "")
    for words in ("up to date", path):
        assert words in second.out
        assert words in third.out
