"""The demo refuses what it must not touch; `make demo` itself runs it whole."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from slidesparse import demo


def test_demo_does_not_overwrite_other_files(tmp_path: Path) -> None:
    (tmp_path / "precious.txt").write_text("mine")
    result = CliRunner().invoke(demo.app, ["--out", str(tmp_path)])
    assert (result.exit_code, "the demo's" in result.stderr) == (2, True)
    assert (tmp_path / "precious.txt").read_text() == "mine"
