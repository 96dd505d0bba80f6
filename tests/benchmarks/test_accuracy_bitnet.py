"""The BitNet model of the accuracy protocol: arithmetic equal to that of transformers, and its table."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.accuracy import bitnet, corpus
from benchmarks.accuracy import language_model as lm

TINY = bitnet.Shape(vocabulary=100, hidden=32, intermediate=88, layers=2, heads=4, window=32)


def test_model_equals_bitnet_of_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    from transformers.integrations.bitnet import AutoBitLinear

    torch.manual_seed(0)
    weights = bitnet.initial(TINY, "cpu")
    for name, tensor in weights.items():
        tensor.data.normal_(1.0 if "norm" in name else 0.0, 0.3)
        tensor.data.copy_(tensor.bfloat16())
    lm.save(tmp_path, TINY, weights, layer_names=bitnet.NAMES)
    torch.compiler.set_stance("force_eager")
    reference = transformers.BitNetForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    for name, module in list(reference.model.named_modules()):
        if isinstance(module, torch.nn.Linear):
            new = AutoBitLinear(module.in_features, module.out_features, bias=False, online_quant=True)
            new.weight = module.weight
            reference.model.set_submodule(name, new)
    ids = torch.randint(100, (2, 30))
    model = bitnet.Model(TINY, weights, torch.float32, compiled=False)
    with torch.no_grad():
        logits, expected = lm.logits_of(model.hidden(ids), *model.ends), reference(ids).logits
    # a sum rounded to another INT8 code errs by a step of 1/127
    assert (logits - expected).abs().mean() <= 1e-3 * expected.abs().max()


def test_gradients_pass_straight_through() -> None:
    w = torch.randn(6, 8, requires_grad=True)
    codes = bitnet.ternary(w, 2)
    # 0 and one scale for each part
    assert [len(part.detach().abs().unique()) for part in codes.split(3)] == [2, 2]
    codes.sum().backward()
    assert torch.equal(w.grad, torch.ones(6, 8))  # type: ignore[arg-type]


def test_bitnet_protocol_runs_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = np.frombuffer(Path(__file__).read_bytes() * 4, np.uint8).astype(np.uint16)
    folder, part = tmp_path / "corpus", corpus.compress(text)
    folder.mkdir()
    (folder / "part0.xz").write_bytes(part)
    (folder / "corpus.json").write_text(json.dumps({"bytes of parts": [len(part)]}))
    windows = corpus.windows(text, 8)
    np.savez(folder / "eval.npz", calibration=windows, validation=windows)
    small = "--steps 2 --layers 1 --hidden 64 --window 32 --batch 4 --samples 4 --vocabulary 256 --device cpu"
    arguments = [str(folder), str(tmp_path / "out"), *small.split(), "--patterns", "6:8,2:4"]
    monkeypatch.setattr(sys, "argv", ["bitnet", *arguments])
    bitnet.main()
    with (tmp_path / "out" / "bitnet.csv").open() as file:
        rows = list(csv.DictReader(file))
    kinds = [(row["pattern"], row["method"]) for row in rows]
    assert kinds == [("dense", "-"), *((p, m) for p in ("6:8", "2:4") for m in bitnet.METHODS)]
    zeros = [float(row["zeros"]) for row in rows]
    assert 0.25 < zeros[0] < zeros[1] < zeros[4]
    result = json.loads((tmp_path / "out" / "bitnet.json").read_text())
    assert result["training"]["steps"] == 2
    assert result["model"]["hidden"] == 64
