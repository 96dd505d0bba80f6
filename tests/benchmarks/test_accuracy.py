"""The programs of the accuracy protocols on tiny models, and their tables and plots."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.accuracy import corpus, float_prune, plot
from benchmarks.accuracy import language_model as lm
from slidesparse.calibrate.inputs import Hessian

ROOT = Path(__file__).resolve().parents[2]


def test_programs_can_be_imported() -> None:
    """One process imports all programs, as a process for each would take a minute."""
    listed = subprocess.run(
        [sys.executable, "-m", "benchmarks", "accuracy"], capture_output=True, text=True, cwd=ROOT, check=True
    )
    names = [line.split()[0] for line in listed.stdout.splitlines()]
    assert names == ["bitnet", "corpus", "float_prune", "parity", "plot", "protocol_a", "protocol_b", "train"]
    program = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    assert callable(importlib.import_module(f'benchmarks.accuracy.{name}').main)"
    )
    subprocess.run([sys.executable, "-c", program, *names], cwd=ROOT, check=True)
    command = [sys.executable, "-m", "benchmarks", "accuracy", "plot", "--help"]
    assert b"cosine" in subprocess.run(command, capture_output=True, cwd=ROOT, check=True).stdout


@pytest.mark.parametrize("method", ["magnitude", "wanda", "sparsegpt"])
def test_unstructured_pruning_reaches_its_share(method: str) -> None:
    rules = float_prune.RULES
    torch.manual_seed(0)
    w, hessian = torch.randn(16, 256), Hessian(256)
    hessian.add(torch.randn(8000, 256) @ torch.randn(256, 256))  # correlated inputs
    pruned = rules[method](w, hessian, 0.25)
    assert float((pruned == 0).float().mean()) == 0.25
    lost = ((pruned - w) @ hessian.matrix * (pruned - w)).sum()
    if method == "sparsegpt":
        by_wanda = rules["wanda"](w, hessian, 0.25) - w
        assert lost < (by_wanda @ hessian.matrix * by_wanda).sum()
    else:
        assert torch.equal(pruned[pruned != 0], w[pruned != 0])


def test_model_equals_llama_of_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    shape = lm.Shape(vocabulary=100, hidden=32, intermediate=48, layers=2, heads=4, window=32)
    weights = lm.initial(shape, "cpu")
    for name, tensor in weights.items():
        tensor.data.normal_(1.0 if "norm" in name else 0.0, 0.3)
    lm.save(tmp_path, shape, weights)
    shape, weights = lm.load(tmp_path, "cpu")
    model = lm.Model(shape, weights, torch.float32, compiled=False)
    ids = torch.randint(100, (2, 30))
    reference = transformers.LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.no_grad():
        logits, expected = lm.logits_of(model.hidden(ids), *model.ends), reference(ids).logits
    # both in float32: sums of about 100 products in another order
    assert (logits - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_held_out_documents_that_overlap_training_are_dropped() -> None:
    lines = [f"a line of a document that is long enough to count {number}\n" for number in range(20)]
    training, twin, separate = "".join(lines[:10]), "".join(lines[5:15]), "".join(lines[15:])
    counts = corpus.Counter()
    splits = corpus.split([(1, training), (0, twin), (corpus.HELD_OUT_INTERVAL, separate)], counts)
    assert splits == ([training], [separate])
    assert sum(counts.values()) == 1


def test_plots_are_deterministic(tmp_path: Path) -> None:
    folder = ROOT / "docs" / "accuracy"
    out, drawn = tmp_path / "out.svg", []
    for _ in range(2):
        plot.losses(folder / "protocol_a.csv", out)
        drawn.append(out.read_bytes())
    assert drawn[0] == drawn[1]


def test_layer_plot_has_errors_as_served(tmp_path: Path) -> None:
    """The plotted error is that after fine-tuning, or that after quantization without fine-tuning."""
    drawn = []
    for tuned in (None, 0.2, 0.3):
        row = {"name": "q_proj", "error_quantized": 0.2, "error_finetuned": tuned}
        report = {"pattern": "6:8", "method": "sparsegpt", "quant": "int8"}
        report["layers"] = [row, {**row, "name": "o_proj", "error_finetuned": 0.1}]
        (tmp_path / "report.json").write_text(json.dumps(report))
        plot.layers([tmp_path / "report.json"], tmp_path / "out.svg")
        drawn.append((tmp_path / "out.svg").read_text())
    assert drawn[0] == drawn[1] != drawn[2]
    assert "6:8 sparsegpt int8" in drawn[0]
