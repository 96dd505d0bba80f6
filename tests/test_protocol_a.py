"""The programs of docs/accuracy for protocol A, on models too small to learn anything."""

from __future__ import annotations

import importlib
import json
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


ROW = "{},{},{},{},{},{},{},{},{},{}"
LOSSES = [
    "pattern,method,quant,seed,ppl,delta_pct,ci_low,ci_high,text,distilled",
    *(
        ROW.format("dense", "-", q, 0, 4, d, d, d, "in", "")
        for q, d in (("bf16", 0), ("int8", 0.25), ("fp8", 0))
    ),
    ROW.format("dense", "-", "bf16", 0, 4, 0.5, 0.4, 0.6, "in", "control"),
    *(
        ROW.format(pattern, method, quant, 0, 4, loss, loss - 0.5, loss + 0.5, "in", "")
        for pattern in ("8:10", "6:8", "4:6", "2:4")
        for method, loss in (("magnitude", 8.0), ("sparsegpt", 2.0))
        for quant in ("bf16", "fp8", "int8")
    ),
    ROW.format("6:8", "sparsegpt", "int8", 1, 4, 3.0, 2.25, 3.5, "in", ""),
    ROW.format("6:8", "sparsegpt", "bf16", 0, 4, 0.5, 0.4, 0.6, "in", "kl"),
    ROW.format("8:10", "sparsegpt", "int8", 0, 4, 1.0, 0.9, 1.1, "in", ""),  # again: this one counts
]
TIMES = [
    "model,layer,dtype,pattern,M,provider,p20_us,p50_us,p80_us",
    *(
        f"Qwen2.5-7B,{layer},int8,{pattern},{m},{provider},0,{us},0"
        for m in (64, 8192)
        for layer, pattern, provider, us in (
            ("sum", "dense", "stock", 100),
            ("sum", "6:8", "cusparselt", 125),
            ("sum", "8:10", "cusparselt", 125),
            ("sum", "4:6", "cusparselt", 100),
            ("sum", "2:4", "cusparselt", 50),
            ("sum", "6:8", "hopper", 80),
            ("down", "6:8", "hopper", 1),
        )
    ),
]


@pytest.fixture
def losses(tmp_path: Path) -> Path:
    path = tmp_path / "losses.csv"
    path.write_text("\n".join(LOSSES) + "\n")
    return path


def cells_of(table: str) -> dict[tuple[str, str], list[str]]:
    """Rows of a Markdown table by their first two cells."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    return {(row[0], row[1]): row[2:] for row in rows}


def test_tables_of_losses(program: object, losses: Path) -> None:
    results = program("language_results")  # type: ignore[operator]
    found = cells_of(results.table(losses))
    assert list(found)[:3] == [("dense", "-"), ("8:10", "sparsegpt"), ("8:10", "magnitude")]
    assert found["6:8", "sparsegpt"] == ["2.00", "2.50 (2.00 to 3.00)", "2.00", "-", "-", "-"]
    assert found["8:10", "sparsegpt"][1] == "1.00"
    wanted = {row: cells[0] for (row, _), cells in cells_of(results.wanted(losses)).items()}
    assert wanted["sparsegpt, INT8, 6:8 loses"] == "2.50%"
    assert wanted["sparsegpt's loss / magnitude's, INT8"] == "8:10 0.12, 6:8 0.31, 4:6 0.25, 2:4 0.25"
    added = wanted["points that INT8 adds to BF16, sparsegpt, same windows"]
    assert added == "dense 0.25, 8:10 -1.00, 6:8 0.00, 4:6 0.00, 2:4 0.00"
    # from 2 to 0.5, of 2 to the dense model and of 1.5 to the control
    assert cells_of(results.distilled(losses))["6:8", "BF16"] == ["2.00", "0.50", "-", "-", "75%", "100%"]


def test_distillation_may_have_begun_with_others(program: object, losses: Path) -> None:
    """Rows of its start count instead of the pattern's: of seed 0, or the mean of other seeds; 2.5 to 0.5 are 80%."""
    results = program("language_results")  # type: ignore[operator]
    start = [
        ("6:8", "bf16", 1, 9.0),
        ("6:8", "bf16", 0, 2.5),
        ("6:8", "int8", 1, 2.0),
        ("6:8", "int8", 2, 3.0),
    ]
    with losses.open("a") as file:
        for pattern, quant, seed, loss in start:
            file.write(ROW.format(pattern, "sparsegpt", quant, seed, 4, loss, 0, 9, "in", "start") + "\n")
    found = results.Results.of(losses)
    assert [found.begun("6:8", quant) for quant in ("bf16", "int8", "fp8")] == [2.5, 2.5, None]
    assert found.begun("4:6", "int8") == 2.0
    assert cells_of(results.distilled(losses))["6:8", "BF16"] == ["2.50", "0.50", "-", "-", "80%", "100%"]
    assert results.closed(found, "6:8", "bf16", "") == "80%"


def test_speeds_prefer_the_projects_kernels(program: object, losses: Path, tmp_path: Path) -> None:
    results = program("language_results")  # type: ignore[operator]
    path = tmp_path / "linear.csv"
    path.write_text("\n".join(TIMES) + "\n")
    speeds = results.Speeds.of(path)
    found = cells_of(results.speeds(losses, path))
    assert found["6:8", "2.50"] == ["-", "1.25 hopper", "1.25 hopper"]
    assert speeds.of_pattern("6:8", 64) == results.Speed(1.25, "hopper")
    assert speeds.of_pattern("8:10", 8192) == results.Speed(0.8, "cusparselt")
    with pytest.raises(SystemExit, match="10:12 and M = 64"):
        speeds.of_pattern("10:12", 64)


def test_plots_are_the_same_bytes(program: object, losses: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    plot, linear = program("plot"), tmp_path / "linear.csv"  # type: ignore[operator]
    linear.write_text("\n".join(TIMES) + "\n")
    written = [tmp_path / f"{name}.svg" for name in ("losses", "losses2", "speed", "speed2")]
    for out in written[:2]:
        plot.losses(losses, out)
    for out in written[2:]:
        plot.speed(losses, linear, out)
    drawn = [path.read_text() for path in written]
    assert drawn[0] == drawn[1]
    assert drawn[2] == drawn[3]
    assert "hopper: 6:8; cusparselt: 8:10, 4:6, 2:4" in drawn[2]


def test_layers_are_drawn_as_they_were_served(program: object, tmp_path: Path) -> None:
    """After fine-tuning where there was some."""
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    plot, drawn = program("plot"), []  # type: ignore[operator]
    for tuned in (None, 0.2, 0.3):
        row = {"name": "q_proj", "error_quantized": 0.2, "error_finetuned": tuned}
        report = {"pattern": "6:8", "method": "sparsegpt", "quant": "int8"}
        report["layers"] = [row, {**row, "name": "o_proj", "error_finetuned": 0.1}]
        (tmp_path / "report.json").write_text(json.dumps(report))
        plot.layers([tmp_path / "report.json"], tmp_path / "out.svg")
        drawn.append((tmp_path / "out.svg").read_text())
    assert drawn[0] == drawn[1] != drawn[2]
    assert "6:8 sparsegpt int8" in drawn[0]


def test_the_readme_has_protocol_b_as_it_is(program: object, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    plot = program("plot")  # type: ignore[operator]
    assert plot.table(PROGRAMS / "protocol_b.csv") in (PROGRAMS / "README.md").read_text()


@pytest.mark.parametrize("verb", ["table", "wanted", "distilled"])
def test_readme_has_the_tables(program: object, verb: str) -> None:
    results = program("language_results")  # type: ignore[operator]
    assert getattr(results, verb)(PROGRAMS / "protocol_a.csv") in (PROGRAMS / "README.md").read_text()


def test_readme_has_the_speeds_that_were_measured_last(program: object) -> None:
    results = program("language_results")  # type: ignore[operator]
    measured = PROGRAMS.parent / "benchmarks" / "h200" / "linear.csv"
    assert results.speeds(PROGRAMS / "protocol_a.csv", measured) in (PROGRAMS / "README.md").read_text()


def test_readme_has_the_table_of_fewer_windows(program: object) -> None:
    results = program("language_results")  # type: ignore[operator]
    assert results.table(PROGRAMS / "protocol_a_256.csv") in (PROGRAMS / "README.md").read_text()


def test_a_row_tells_what_its_checkpoint_was_calibrated_with(program: object) -> None:
    cell = program("protocol_a").Cell  # type: ignore[operator]
    assert cell("6:8", "sparsegpt", "int8").calibrated(4096, 2) == ("4096", "2")
    assert cell("6:8", "wanda", "int8").calibrated(4096, 2) == ("4096", "0")
    assert cell("25%", "sparsegpt", "bf16").calibrated(4096, 2) == ("4096", "0")
    for uncalibrated in (
        cell("6:8", "magnitude", "int8"),
        cell("dense", "-", "int8"),
        cell("6:8", "sparsegpt", "int8", 0, "kl"),
    ):
        assert uncalibrated.calibrated(4096, 2) == ("", "")
