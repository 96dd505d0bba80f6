"""Tables of tuned algorithms: choice of an algorithm, order of tables, and how they are written."""

from __future__ import annotations

import json
import math
import os
import re
import threading
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from slidesparse.gemm import tuned
from slidesparse.gemm.problem import Problem
from slidesparse.gemm.tuned import Subject, TableError
from slidesparse.pattern import round_up
from slidesparse.tune.shapes import packed_columns, parse_shapes

SUBJECT = Subject("cusparselt", "0.8.0", "NVIDIA H200", (9, 0))
FILE = "nvidia-h200_sm90_cusparselt-0.8.0.json"
PROBLEM = Problem("int8", "bf16", 4608, 5376, 64, "both")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Use a new folder for the user's tables, and no shipped tables."""
    monkeypatch.setenv(tuned.CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(tuned, "SHIPPED_TABLES", tmp_path / "shipped")
    tuned._similar_gpus.cache_clear()
    return tmp_path / "cache" / "tuned"


def choose(problem: Problem, subject: Subject = SUBJECT) -> str | None:
    return tuned.tuned_algorithm(subject, problem)


def save_results(*results: tuple[int, str], problem: Problem = PROBLEM) -> Path:
    return tuned.save(SUBJECT, [(replace(problem, m=m), name) for m, name in results])


def test_lookup_takes_the_next_larger_tuned_m() -> None:
    """One that is more than eight times as large is no substitute, but for few tokens."""
    save_results((2048, "c"), (64, "a"), (128, "b"))
    found = {m: choose(replace(PROBLEM, m=m)) for m in (1, 64, 65, 128, 255, 256, 2048, 4096, 4097)}
    few = {1: "a", 64: "a", 65: "b", 128: "b"}
    assert found == {**few, 255: None, 256: "c", 2048: "c", 4096: "c", 4097: None}


def test_far_more_tokens_use_a_neighbouring_shape() -> None:
    save_results((64, "few"))
    save_results((64, "wrong"), (4096, "near"), problem=replace(PROBLEM, k=PROBLEM.k + 256))
    save_results((8192, "far"), problem=replace(PROBLEM, k=8 * PROBLEM.k))
    assert choose(replace(PROBLEM, m=64)) == "few"
    assert choose(replace(PROBLEM, m=128)) is None
    many = replace(PROBLEM, m=2000)
    assert choose(many) is None
    assert tuned.select_algorithm(SUBJECT, many, 0.01) == ("few", "that for fewer tokens")
    assert tuned.select_algorithm(SUBJECT, many, 0.01, lambda name: name != "few")[0] is None
    lone = replace(PROBLEM, n=64)
    save_results((8192, "large"), problem=lone)
    assert tuned.select_algorithm(SUBJECT, replace(lone, m=16), 0.5) == (None, "its own heuristic")
    assert tuned.tuned_algorithm(SUBJECT, many, math.inf) == "near"
    assert tuned.tuned_algorithm(SUBJECT, replace(PROBLEM, m=10000), math.inf) == "far"
    assert tuned.tuned_algorithm(SUBJECT, replace(PROBLEM, m=10000), max_distance=1) is None
    assert tuned.tuned_algorithm(SUBJECT, replace(PROBLEM, m=10**6), math.inf) is None


@pytest.mark.parametrize(
    "change",
    [
        *({"dtype": "fp8"}, {"out": "int32"}, {"scale": "none"}, {"n": 4640}, {"k": 5344}),
        *({"library": "hopper"}, {"version": "0.8.1"}, {"gpu": "NVIDIA H100"}, {"capability": (9, 1)}),
    ],
    ids=str,
)
def test_lookup_needs_equal_problems_and_machines(change: dict[str, object], cache: Path) -> None:
    assert save_results((64, "a")) == cache / FILE
    assert choose(PROBLEM) == "a"
    if hasattr(SUBJECT, next(iter(change))):
        assert choose(PROBLEM, replace(SUBJECT, **change)) is None
    else:
        assert choose(replace(PROBLEM, **change)) is None


@pytest.mark.parametrize(
    "entry", ['["plain", 1.0]', '{"algorithm": "plain", "us": 1.0, "others": {"b": 1.25}, "tried": 60}']
)
def test_entries_with_times_are_read_and_written_without(entry: str) -> None:
    """The user's tables of 0.3.0, and of 0.2.0 with objects, which a server must not refuse after an upgrade."""
    path = save_results((64, "plain"))
    path.write_text(path.read_text().replace('"plain"', entry))
    tuned._merged_table.cache_clear()
    save_results((512, "new"))
    assert [*json.loads(path.read_text())["entries"].values()] == [{"64": "plain", "512": "new"}]


def test_user_table_overrides_the_shipped_one(cache: Path) -> None:
    path = save_results((64, "shipped"), (128, "shipped"))
    tuned.SHIPPED_TABLES.mkdir()
    path.rename(tuned.SHIPPED_TABLES / path.name)
    save_results((128, "mine"))
    assert [choose(replace(PROBLEM, m=m)) for m in (64, 128)] == ["shipped", "mine"]
    assert "shipped" not in (cache / FILE).read_text()


def test_concurrent_saves_keep_both_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    write = tuned.write_atomically
    thread = threading.Thread(target=save_results, args=((128, "b"),))

    def while_another_saves(path: Path, content: bytes) -> None:
        monkeypatch.setattr(tuned, "write_atomically", write)
        thread.start()
        thread.join(0.5)  # waits for the lock
        write(path, content)

    monkeypatch.setattr(tuned, "write_atomically", while_another_saves)
    save_results((64, "a"))
    thread.join()
    assert [choose(replace(PROBLEM, m=m)) for m in (64, 128)] == ["a", "b"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "JSON"),
        ('{"format": 2}', "has format 2, not 1"),
        ("[]", "JSON object: 'list'"),
        (json.dumps({"format": "x" * 3000}), "has format 'xxx.*[.]{3}"),
        (None, "has gpu 'NVIDIA H100', not 'NVIDIA H200'"),
        ("\xff", "JSON"),
        ("[" * 10**5, "JSON"),
    ],
)
def test_damaged_or_foreign_table_is_reported(cache: Path, text: str | None, message: str) -> None:
    path = save_results((64, "a"))
    path.write_text(path.read_text().replace("H200", "H100") if text is None else text)
    tuned._merged_table.cache_clear()
    for act in (lambda: choose(PROBLEM), lambda: save_results((128, "b"))):
        with pytest.raises(TableError, match=message) as error:
            act()
        assert str(path) in str(error.value)
        assert "delete it and run `slidesparse tune` again" in str(error.value)
        assert len(str(error.value)) < 1000


@pytest.mark.parametrize(
    ("broken", "instead"),
    [
        *((key, '"what"') for key in ('"64"', '"entries"', f'"{tuned.Shape.of_problem(PROBLEM)}"')),
        ('"64"', '"-16"'),
        *(('"a"', entry) for entry in ("7", "[]", "[7, 1.0]", "{}", '{"algorithm": 7}')),
        ('{"64": "a"}', '["what"]'),
    ],
)
def test_damaged_entries_are_reported(broken: str, instead: str) -> None:
    path = tuned.save(SUBJECT, [(PROBLEM, "a")])
    text = json.dumps(json.loads(path.read_text()))
    assert broken in text
    path.write_text(text.replace(broken, instead))
    tuned._merged_table.cache_clear()
    for shape in (PROBLEM, replace(PROBLEM, n=64)):
        with pytest.raises(TableError, match="is damaged"):
            tuned.select_algorithm(SUBJECT, shape)


def test_pipe_in_place_of_a_table_is_reported() -> None:
    tuned.tables_folder().mkdir(parents=True, exist_ok=True)
    os.mkfifo(tuned.tables_folder() / SUBJECT.file_name)
    with pytest.raises(TableError, match="is not a file"):
        tuned.select_algorithm(SUBJECT, PROBLEM)


def test_a_gpu_without_a_table_uses_another_of_its_compute_capability() -> None:
    """The library must accept the algorithm for this GPU; the GPU's own table and near shapes come first."""
    tuned.SHIPPED_TABLES.mkdir()
    near = replace(PROBLEM, n=2 * PROBLEM.n)
    for subject, algorithm in ((SUBJECT, "a"), (replace(SUBJECT, gpu="Old", capability=(8, 0)), "old")):
        path = tuned.save(subject, [(PROBLEM, algorithm)])
        path.rename(tuned.SHIPPED_TABLES / path.name)
    tuned._merged_table.cache_clear()
    other = replace(SUBJECT, gpu="NVIDIA H20")
    for problem in (PROBLEM, near):
        assert tuned.select_algorithm(other, problem) == ("a", "one that was tuned on an NVIDIA H200")
    assert tuned.select_algorithm(other, near, 0.5) == (None, "its own heuristic")
    assert tuned.select_algorithm(other, PROBLEM, suits=lambda name: name != "a")[0] is None
    assert tuned.select_algorithm(replace(other, version="0.9"), PROBLEM)[0] is None
    tuned.save(other, [(near, "own")])
    assert tuned.select_algorithm(other, PROBLEM) == ("own", "that of a near tuned shape")


def test_documented_shapes_are_tuned() -> None:
    """See "Tuned models" in docs/serve.md: each shape at these patterns, in both types, on an H200."""
    root = Path(__file__).parents[2]
    rows = re.findall(r"^\| (.+) \| `([0-9x,]+)` \|$", (root / "docs/serve.md").read_text(), re.MULTILINE)
    assert len(rows) > 25
    path = root / "slidesparse/tuned_tables/nvidia-h200_sm90_hopper-4.json"
    entries = json.loads(path.read_text())["entries"]
    for _, shapes in rows:
        for layer in parse_shapes(shapes):
            for dtype, (blocks, k) in product(
                ("int8", "fp8"),
                [
                    *(packed_columns(layer.k, pattern, 128)[::-1] for pattern in ("2:4", "4:6")),
                    *((blocks, round_up(layer.k, 128)) for blocks in ("dense", "mixed")),
                ],
            ):
                problem = Problem(dtype, "bf16", layer.n, k, 1, "both", blocks=blocks)
                measured = entries.get(str(tuned.Shape.of_problem(problem)), {})
                assert {"1", "16", "64", "512"} <= measured.keys(), problem
