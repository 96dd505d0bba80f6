"""What benchmarks are made of: shapes, random operands in rotation, rules of timing, tables on disk."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from fake_library import CPU, GPU, FakeLibrary

from slidesparse.bench import shapes
from slidesparse.bench.inputs import Inputs
from slidesparse.bench.machine import conditions
from slidesparse.bench.measure import EXACT_US, MOST_COPIES, Timing, copies_for, launches_for
from slidesparse.bench.records import Records, RecordsError, amend_conditions, write_conditions
from slidesparse.bench.shapes import Layer, ShapeError
from slidesparse.gemm.library import Problem
from slidesparse.slide import is_two_four, nonzero

# --- shapes


def test_layers_of_the_five_models() -> None:
    expected = {
        "BitNet-2B": ["3840x2560", "2560x2560", "13824x2560", "2560x6912"],
        "Llama3.2-1B": ["3072x2048", "2048x2048", "16384x2048", "2048x8192"],
        "Llama3.2-3B": ["5120x3072", "3072x3072", "16384x3072", "3072x8192"],
        "Qwen2.5-7B": ["4608x3584", "3584x3584", "37888x3584", "3584x18944"],
        "Qwen2.5-14B": ["7168x5120", "5120x5120", "27648x5120", "5120x13824"],
    }
    found = {
        name: [f"{layer.n}x{layer.k}" for layer in model.layers] for name, model in shapes.MODELS.items()
    }
    assert found == expected
    assert [layer.name for layer in shapes.MODELS["BitNet-2B"].layers] == ["qkv", "o", "gate_up", "down"]


def test_a_folder_gives_the_layers_of_its_config(tmp_path: Path) -> None:
    config = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    name, layers = shapes.model(str(tmp_path))
    assert (name, [(one.n, one.k) for one in layers]) == (
        tmp_path.name,
        [(128, 64), (64, 64), (192, 64), (64, 96)],
    )
    (tmp_path / "config.json").write_text(json.dumps({"text_config": config | {"head_dim": 32}}))
    assert [(one.n, one.k) for one in shapes.model(str(tmp_path))[1]][:2] == [(256, 64), (64, 128)]
    for text, words in (("{}", "has no 'hidden_size'"), ("[]", "is not the configuration"), ("{", "is not")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ShapeError, match=words):
            shapes.model(str(tmp_path))
    with pytest.raises(ShapeError, match="neither one of the models Llama3.2-1B, .* nor a folder"):
        shapes.model("Llama9")


def test_shapes_and_token_counts_as_text() -> None:
    assert shapes.parse_shapes("4608x3584, 3584X18944") == (
        Layer("4608x3584", 4608, 3584),
        Layer("3584x18944", 3584, 18944),
    )
    assert shapes.parse_tokens("64,1") == (64, 1)
    assert shapes.parse_patterns("6:8,2_10,2_inf") == ("6:8", "8:10", "2_inf")
    for text in ("", "64", "64x0", "axb", "64x64x64"):
        with pytest.raises(ShapeError):
            shapes.parse_shapes(text)
    for text in ("", "0", "a", "1.5"):
        with pytest.raises(ShapeError):
            shapes.parse_tokens(text)


@pytest.mark.parametrize(
    ("pattern", "k", "alignment", "expected"),
    [
        *(("2:4", 3584, 32, 3584), ("6:8", 3584, 32, 5376), ("8:10", 2048, 32, 3296), ("2:4", 36, 32, 64)),
        *(("2_inf", 2048, 32, 4096), ("8:10", 2048, 128, 3328), ("6:8", 3584, 128, 5376)),
    ],
)
def test_slided_columns_are_multiples_of_what_a_library_takes(
    pattern: str, k: int, alignment: int, expected: int
) -> None:
    """8:10 of 2048: 205 blocks of 16 are 3280, and 32 divides 3296."""
    assert shapes.slided(k, pattern, alignment) == expected


# --- operands and timing


@pytest.mark.parametrize("dtype", ["int8", "fp8", "bf16", "fp16"])
def test_random_weights_are_two_of_four_and_dense_ones_not(dtype: str) -> None:
    inputs = Inputs(CPU, 0)
    sparse, dense = (inputs.weight(dtype, 48, 100, sparse=wanted) for wanted in (True, False))
    groups = nonzero(sparse).view(-1, 4).sum(1)
    assert is_two_four(sparse)
    assert (groups == 2).float().mean() > 0.999  # FP8 and FP16 may round to zero
    assert len(nonzero(sparse).view(-1, 4).unique(dim=0)) >= 6  # every place
    assert nonzero(dense).float().mean() > 0.98
    if dtype == "int8":
        assert (int(dense.min()), int(dense.max())) == (-127, 127)


def test_copies_exceed_the_cache_and_do_not_overlap() -> None:
    problem = Problem("int8", "int32", 32, 64, 16)
    inputs = Inputs(CPU, 1 << 14)
    copies = inputs.copies(problem)
    call = 32 * 64 + 16 * 64 + 16 * 32 * 4
    assert 2 << 14 < copies * call < 4 << 14
    rotation = inputs.rotation(problem, inputs.packed(FakeLibrary(), problem, copies))
    operands = [*rotation.activations, *rotation.weights, *rotation.outs]
    spans = sorted((t.data_ptr(), t.data_ptr() + t.numel() * t.element_size()) for t in operands)
    assert len(spans) == 3 * copies
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    assert all(nonzero(one).float().mean() > 0.9 for one in rotation.activations)


def test_a_smaller_problem_views_the_same_memory_and_a_larger_one_is_random_to_the_end() -> None:
    inputs = Inputs(CPU, 0)
    first = inputs.activations("int8", 64, 64, 1)[0]
    assert inputs.activations("int8", 16, 64, 2)[0].data_ptr() == first.data_ptr()
    assert nonzero(inputs.activations("int8", 128, 128, 2)[1]).float().mean() > 0.98


def test_how_many_copies_and_launches() -> None:
    assert copies_for(1000, 100) == 1
    assert copies_for(100, 1000) == 25
    assert copies_for(1, 1 << 30) == MOST_COPIES
    for copies, us in ((1, 5.0), (27, 5.0), (128, 3.0), (1, 7000.0), (3, 0.0)):
        count = launches_for(copies, us, EXACT_US)
        assert count % copies == 0
        assert count * us >= EXACT_US or count >= 512 or us == 0


def test_percentiles() -> None:
    timing = Timing.of([float(i) for i in range(11)])
    assert (timing.p20, timing.p50, timing.p80) == (2.0, 5.0, 8.0)


# --- tables


def test_a_torn_last_line_is_dropped_and_measured_again(tmp_path: Path) -> None:
    path = tmp_path / "new" / "t.csv"
    table = Records(path, ("a", "b", "us"), ("a", "b"))
    table.add({"a": "x, y", "b": 1, "us": 1 / 3})
    table.add({"a": "z", "b": 2, "us": 2.0})
    whole = path.read_bytes()
    assert whole == b'a,b,us\n"x, y",1,0.333\nz,2,2.000\n'
    for lost in range(1, 10):
        path.write_bytes(whole[:-lost])
        again = Records(path, ("a", "b", "us"), ("a", "b"))
        assert again.has(a="x, y", b=1)
        assert not again.has(a="z", b=2)
        again.add({"a": "z", "b": 2, "us": 2.0})
        assert path.read_bytes() == whole


def test_a_table_with_a_torn_head_begins_again(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("a,b")
    assert Records(tmp_path / "t.csv", ("a", "b"), ("a",)).rows == []
    assert (tmp_path / "t.csv").read_text() == "a,b\n"


@pytest.mark.parametrize(
    ("text", "words"), [("a,c\n", "has the columns a,c, not a,b"), ("a,b\n1\n1,2\n", "line 2 has 1 values")]
)
def test_a_foreign_table_is_refused(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "t.csv"
    path.write_text(text)
    with pytest.raises(RecordsError, match=words) as error:
        Records(path, ("a", "b"), ("a",))
    assert str(path) in str(error.value)
    assert path.read_text() == text


def test_conditions_collect_commands_and_refuse_another_machine(tmp_path: Path) -> None:
    path, found = tmp_path / "kernel.json", conditions(GPU, [FakeLibrary()])
    assert (found["gpu"], found["capability"]) == (GPU.name, "9.0")
    assert found["versions"]["cusparselt"] == "1.2.3"
    assert found["versions"]["torch"] == torch.__version__
    write_conditions(path, found, ["slidesparse", "bench kernel"])
    amend_conditions(path, {"copy_GBps": 4.0})
    write_conditions(path, found, ["slidesparse", "again"])
    document = json.loads(path.read_text())
    assert document["commands"] == ["slidesparse 'bench kernel'", "slidesparse again"]
    assert document["copy_GBps"] == 4.0
    for change in ({"gpu": "NVIDIA Other"}, {"versions": found["versions"] | {"torch": "0.1"}}):
        with pytest.raises(RecordsError, match="choose another folder"):
            write_conditions(path, found | change, [])
    assert json.loads(path.read_text()) == document
    write_conditions(path, found | {"versions": {"torch": torch.__version__, "hopper": "4"}}, [])
    assert json.loads(path.read_text())["versions"] == found["versions"] | {"hopper": "4"}
