"""The accuracy benchmark: cells and their baselines, and the sandbox of HumanEval."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from benchmarks.accuracy.cells import Cell, CellError, Texts, find_baseline, read_cells, run
from benchmarks.accuracy.humaneval import pass_at_1, passes
from slidesparse.files import locked

# with their columns but the model's, and the line of the baseline
CELLS: dict[str, tuple[tuple[str, ...], int | None]] = {
    "smollm2": (("bf16", "dense", "-", "0", "-"), None),
    "smollm2 --sparsity dense --calib own": (("int8", "dense", "calibrated", "0", "0"), 0),
    "smollm2 --sparsity dense": (("int8", "dense", "-", "0", "0"), 0),
    "smollm2 --sparsity 2_8 --calib own --rotate off --seed 1": (
        ("int8", "6:8", "sparsegpt rotate off", "0", "1"),
        1,
    ),
    "smollm2 --sparsity 6:8": (("int8", "6:8", "magnitude", "0", "0"), 2),
    "smollm2 --max-loss 3% --calib own --distill own --minutes 5": (
        ("int8", "max-loss 3%", "distilled", "5", "0"),
        1,
    ),
    "smollm2 --sparsity 6:8 --calib own --distill own --distill a/books.jsonl --minutes 5": (
        ("int8", "6:8", "distilled on own and books", "5", "0"),
        1,
    ),
}


@pytest.fixture
def cells(tmp_path: Path) -> list[Cell]:
    (tmp_path / "cells").write_text("\n\n# a comment\n".join([*CELLS, *CELLS]))
    return read_cells(tmp_path / "cells")


def test_cells_name_their_columns_and_baselines(cells: list[Cell]) -> None:
    for cell, (columns, base) in zip(cells, CELLS.values(), strict=True):
        assert tuple(cell.columns.values())[1:] == columns
        assert find_baseline(cell, cells) == (None if base is None else cells[base])
    closer = Cell.parse("smollm2 --sparsity dense --calib own --rotate off")
    assert find_baseline(cells[3], [*cells, closer]) == closer
    assert find_baseline(cells[5], [*cells, closer]) == cells[1]
    assert len(cells) == len(CELLS)
    with pytest.raises(CellError, match="llama"):
        Cell.parse("llama --sparsity 6:8")


def test_two_runs_do_not_share_a_folder(tmp_path: Path) -> None:
    texts = Texts(tmp_path, None, None)
    with locked(tmp_path), pytest.raises(CellError, match="another run"):
        run([], texts, (), 1, tmp_path / "table.csv", print)
    assert run([], texts, (), 1, tmp_path / "table.csv", print) == []


def test_a_missing_text_is_said_before_anything_is_converted(tmp_path: Path) -> None:
    cell = Cell.parse("smollm2 --sparsity 2:4")
    with pytest.raises(CellError, match=r"smollm2\.held_out\.npy is missing: .* prepare smollm2 WORK"):
        run([cell], Texts(tmp_path, None, None), (), 1, tmp_path / "table.csv", print)
    assert not (tmp_path / "running").exists()


@pytest.mark.parametrize(
    ("answer", "passed"),
    [
        ("Sure!\n```python\ndef half(x):\n    return math.floor(x / 2)\n```\nIt halves.", True),
        ("def half(x):\n    return x / 2", True),  # no block
        ("```python\ndef half(x):\n    return x / 2", True),  # cut off
        ("```python\ndef half(x):\n    return x\n```", False),
        ("I cannot.", False),
    ],
)
def test_answers_are_tested(answer: str, passed: bool) -> None:
    problem = {"prompt": 'import math\n\ndef half(x):\n    """Halve x."""\n', "entry_point": "half"}
    problem["test"] = "def check(candidate):\n    assert candidate(4) == 2\n"
    assert pass_at_1([problem], [answer]) == [passed]


@pytest.mark.parametrize(
    ("source", "fits"),
    [
        ("x = bytearray(1 << 29)", True),
        ("x = bytearray(1 << 31)", False),  # memory
        ("open('file', 'wb').write(bytes(1 << 22))", False),  # size of a file
        ("import os; assert os.listdir() == [] == sorted(set(os.environ) - {'PATH', 'LC_CTYPE'})", True),
    ],
)
def test_sandbox_limits_programs(source: str, fits: bool) -> None:
    assert passes(source) == fits


def test_sandbox_ends_programs_and_what_they_start(tmp_path: Path) -> None:
    child = f"import time; time.sleep(2); open({str(tmp_path / 'mark')!r}, 'w')"
    program = (
        f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {child!r}]); time.sleep(60)"
    )
    assert not passes(program, 1)
    time.sleep(2)
    assert not (tmp_path / "mark").exists()
