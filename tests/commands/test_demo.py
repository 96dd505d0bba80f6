"""The demo: the real model served by ``vllm serve`` at ``/v1/embeddings``."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from checkpoints import convert
from typer.testing import CliRunner

from slidesparse import demo
from slidesparse.errors import EnvironmentFault


@pytest.mark.vllm
@pytest.mark.slow
def test_minilm_embeddings_over_http(tmp_path: Path) -> None:
    """Served sparse and by stock vLLM, which differ by rounding."""
    convert(demo.original(), tmp_path / "dense")
    ours, facts = demo.embed(tmp_path / "dense", False, tmp_path / "ours.log")
    stock, nothing = demo.embed(tmp_path / "dense", True, tmp_path / "stock.log")
    assert facts is not None
    assert (facts["layers"], facts["left"], nothing) == ({"6:8": 24}, {}, None)
    assert (ours * stock).sum(1).min() > 0.99


def test_server_start_failure_shows_the_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script that replaces vLLM logs as vLLM does."""
    (tmp_path / "vllm").write_text(
        "#!/bin/sh\necho 'INFO starting'\necho '(APIServer pid=7) ValueError: no such architecture'\nexit 1\n"
    )
    (tmp_path / "vllm").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(EnvironmentFault, match=r"server\.log\n.*ValueError: no such architecture"):
        demo.embed(tmp_path, False, tmp_path / "server.log")


def test_demo_does_not_overwrite_other_files(tmp_path: Path) -> None:
    (tmp_path / "precious.txt").write_text("mine")
    result = CliRunner().invoke(demo.app, ["--out", str(tmp_path)])
    assert (result.exit_code, "the demo's" in result.stderr) == (2, True)
    assert (tmp_path / "precious.txt").read_text() == "mine"
