"""The programs of docs/accuracy for protocol A, on models too small to learn anything."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from calibration import write_ids
from checkpoints import LLAMA, llama

from slidesparse.calibrate.hessian import Hessian
from slidesparse.calibrate.pipeline import prune_floats
from slidesparse.calibrate.run import Calibration, prepare
from slidesparse.checkpoint import Checkpoint
from slidesparse.pattern import SlidePattern
from slidesparse.plan import make_plan

PROGRAMS = Path(__file__).parent.parent / "docs" / "accuracy"


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> object:
    """Import one of the programs by its name."""
    monkeypatch.syspath_prepend(str(PROGRAMS))
    known = set(sys.modules)

    def load(name: str) -> ModuleType:
        return importlib.import_module(name)

    yield load
    for name in set(sys.modules) - known:
        if str(PROGRAMS) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def test_pruned_layers_feed_the_next(tmp_path: Path) -> None:
    source = llama(tmp_path / "model")
    ids = write_ids(tmp_path / "ids.npy")
    checkpoint = Checkpoint.open(source)
    plan = make_plan(checkpoint, SlidePattern.parse("6:8"), None, "dense", "wanda", (), None, 0)
    task = prepare(plan, Calibration(ids, seqlen=24, device="cpu"))
    alike = []

    def nothing_left(w: torch.Tensor, hessian: Hessian) -> torch.Tensor:
        spread = torch.linalg.eigvalsh(hessian.matrix)
        alike.append(bool(spread[-2] < 1e-4 * spread[-1]))  # every token gives the same input: rank one
        return torch.zeros_like(w)

    with checkpoint.reader() as reader:
        found = prune_floats(task, reader, tmp_path, nothing_left)
    assert sorted(found) == sorted(LLAMA.linears())
    assert not any(w.any() for w in found.values())
    # Without weights, q, k and v give biases alone for o to read, gate and up for down.
    assert alike == [False, False, False, True, False, False, True] * LLAMA.layers


@pytest.mark.parametrize("method", ["magnitude", "wanda", "sparsegpt"])
def test_unstructured_shares(program: object, method: str) -> None:
    rules = program("float_prune").RULES  # type: ignore[operator]
    torch.manual_seed(0)
    w, hessian = torch.randn(16, 256), Hessian(256)
    hessian.add(torch.randn(8000, 256) @ torch.randn(256, 256))  # inputs that tell of each other
    found = rules[method](w, hessian, 0.25)
    assert float((found == 0).float().mean()) == 0.25
    lost = ((found - w) @ hessian.matrix * (found - w)).sum()
    if method == "sparsegpt":
        by_wanda = rules["wanda"](w, hessian, 0.25) - w
        assert lost < (by_wanda @ hessian.matrix * by_wanda).sum()
    else:
        assert torch.equal(found[found != 0], w[found != 0])


def test_model_is_llama(program: object, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    lm = program("language_model")  # type: ignore[operator]
    shape = lm.Shape(vocabulary=100, hidden=32, intermediate=48, layers=2, heads=4, window=32)
    weights = lm.initial(shape, "cpu")
    for name, tensor in weights.items():
        tensor.data.normal_(1.0 if "norm" in name else 0.0, 0.3)
    lm.save(tmp_path, shape, weights)
    shape, weights = lm.load(tmp_path, "cpu")
    model = lm.Model(shape, weights, torch.float32, compiled=False)
    ids = torch.randint(100, (2, 30))
    theirs = transformers.LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.no_grad():
        ours, expected = lm.logits_of(model.hidden(ids), *model.ends), theirs(ids).logits
    # both in float32: sums of some 100 products, in another order
    assert (ours - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_masks_stay(program: object) -> None:
    distill, lm = program("distill"), program("language_model")  # type: ignore[operator]
    shape = lm.Shape(vocabulary=100, hidden=32, intermediate=48, layers=1, heads=4, window=32)
    weights = lm.initial(shape, "cpu")
    with torch.no_grad():
        weights["0.qkv"][:, ::4] = 0
    masks = distill.masks_of(weights)
    with torch.no_grad():
        for tensor in weights.values():
            tensor.add_(1.0)
    distill.apply(weights, masks)
    assert not weights["0.qkv"][:, ::4].any()
    assert weights["0.qkv"][:, 1::4].all()
    assert sorted(masks) == ["0.down", "0.gate_up", "0.o", "0.qkv"]


def test_held_out_documents_share_little(program: object) -> None:
    corpus = program("corpus")  # type: ignore[operator]
    lines = [f"a line of a document that is long enough to count {number}\n" for number in range(20)]
    training, twin, other = "".join(lines[:10]), "".join(lines[5:15]), "".join(lines[15:])
    counts = corpus.Counter()
    found = corpus.split([(1, training), (0, twin), (corpus.ONE_IN, other)], counts)
    assert found == ([training], [other])
    assert sum(counts.values()) == 1
