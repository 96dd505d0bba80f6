"""The demo: the real model served by ``vllm serve`` at ``/v1/embeddings``."""

from __future__ import annotations

import sys
from pathlib import Path

import minilm
import numpy as np
import pytest
from checkpoints import convert
from typer.testing import CliRunner

from slidesparse import demo
from slidesparse.errors import EnvironmentFault
from slidesparse.flags import SPARSITY, USE_CUSPARSELT


@pytest.mark.vllm
@pytest.mark.slow
def test_minilm_embeddings_over_http(tmp_path: Path) -> None:
    source, machine = demo.original(), demo.this_machine()
    convert(source, tmp_path / "dense")
    flags = {USE_CUSPARSELT: "1", SPARSITY: "2_8"}
    served = demo.embed(tmp_path / "dense", flags, machine.options, tmp_path / "server.log")
    assert "24 layers sparse, 0 dense; dense layout" in served.summary
    expected = minilm.embeddings(source, tmp_path / "dense", demo.SENTENCES)
    minilm.assert_served(np.asarray(served.embeddings), expected)


def test_server_start_failure_shows_the_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script that replaces vLLM logs as vLLM does."""
    (tmp_path / "vllm").write_text(
        "#!/bin/sh\necho 'INFO starting'\necho '(APIServer pid=7) ValueError: no such architecture'\nexit 1\n"
    )
    (tmp_path / "vllm").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(EnvironmentFault, match=r"server\.log\n.*ValueError: no such architecture"):
        demo.embed(tmp_path, {}, (), tmp_path / "server.log")


def test_demo_does_not_overwrite_other_files(tmp_path: Path) -> None:
    (tmp_path / "precious.txt").write_text("mine")
    result = CliRunner().invoke(demo.app, ["--out", str(tmp_path)])
    assert result.exit_code == 2
    assert "the demo's" in result.stderr
    assert (tmp_path / "precious.txt").read_text() == "mine"
