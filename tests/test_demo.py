"""The real model through ``vllm serve`` and ``/v1/embeddings``, as the demo does it."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from slidesparse import demo
from slidesparse.convert import convert
from slidesparse.flags import DISABLE, SPARSITY, USE_CUSPARSELT
from slidesparse.pattern import SlidePattern
from slidesparse.quantize import dequantize_rows

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

SIX_EIGHT = SlidePattern.parse("6:8")


def test_minilm_over_http(tmp_path: Path) -> None:
    """Both layouts give the same embeddings, and they are those of the pruned weights.

    The yardstick is stock vLLM with the same pruned and quantized weights, unquantized activations.  What INT8
    activations cost MiniLM is known from the unpruned model: 0.997 in cosine.  0.99 leaves room for single sentences
    and is far from what a wrong layer does: pruning alone moves the embeddings to 0.93.
    """
    source, machine = demo.original(), demo.this_machine()
    dense, slided, weights = (tmp_path / name for name in ("dense", "slided", "weights"))
    convert(source, dense, pattern=SIX_EIGHT)
    convert(source, slided, pattern=SIX_EIGHT, layout="slided")
    _dequantized(dense, source, weights)
    flags = {USE_CUSPARSELT: "1", SPARSITY: "2_8"}
    jobs = [(dense, flags), (slided, flags), (weights, {DISABLE: "1"})]
    with ThreadPoolExecutor(machine.servers) as pool:
        served = list(
            pool.map(lambda job: demo.embed(*job, machine.options, tmp_path / f"{job[0].name}.log"), jobs)
        )
    assert "24 layers sparse, 0 dense; dense layout" in served[0].summary
    assert "24 layers sparse, 0 dense; slided layout" in served[1].summary
    assert not served[2].summary
    assert served[0].embeddings == served[1].embeddings
    assert min(demo.cosines(served[0].embeddings, served[2].embeddings)) > 0.99


def _dequantized(quantized: Path, source: Path, out: Path) -> None:
    """The weights of a converted checkpoint as float32, in a copy of ``source``."""
    shutil.copytree(source, out)
    tensors = load_file(quantized / "model.safetensors")
    for name in [name for name in tensors if name.endswith(".weight_scale")]:
        scale = tensors.pop(name)
        weight = name.removesuffix("_scale")
        tensors[weight] = dequantize_rows(tensors[weight], scale)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    assert "quantization_config" not in json.loads((out / "config.json").read_text())


def test_a_server_that_does_not_start_says_why(tmp_path: Path) -> None:
    folder = tmp_path / "empty"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    with pytest.raises(demo.DemoError, match=r"vllm serve ended; its log is .*(?s:.)*Error: "):
        demo.embed(folder, {}, demo.this_machine().options, tmp_path / "server.log")


def test_the_demo_removes_only_its_own_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    precious = tmp_path / "precious.txt"
    precious.write_text("mine")
    assert demo.main(["--out", str(tmp_path)]) == 3
    assert "holds files that are not the demo's" in capsys.readouterr().out
    assert precious.read_text() == "mine"
