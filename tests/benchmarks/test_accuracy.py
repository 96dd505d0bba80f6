"""The accuracy benchmark: cells and their baselines, resumption, windows, and the sandbox of HumanEval."""

from __future__ import annotations

import csv
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from models import QWEN, converted, write_config, write_float

from benchmarks.accuracy import cells as runner
from benchmarks.accuracy import humaneval
from benchmarks.accuracy.cells import Cell, CellError, Texts, compare, read_cells, run, zeros
from benchmarks.accuracy.texts import WINDOW, Engine, python_reference, windows

LINES = """\
smollm2

# calibrated
smollm2 --sparsity dense --calib own
smollm2 --sparsity dense
smollm2 --sparsity 2_8 --calib own --samples 256 --rotate off --seed 1
smollm2 --sparsity 6:8
smollm2 --max-loss 3% --calib own --distill a/b.npy --minutes 4
smollm2 --sparsity 6:8
"""


def test_cells_name_their_columns_and_baselines(tmp_path: Path) -> None:
    (tmp_path / "cells").write_text(LINES)
    cells = read_cells(tmp_path / "cells")
    assert [tuple(cell.columns.values())[1:] for cell in cells] == [
        ("bf16", "dense", "-", "-"),
        ("int8", "dense", "calibrated", "0"),
        ("int8", "dense", "-", "0"),
        ("int8", "6:8", "sparsegpt rotate off", "1"),
        ("int8", "6:8", "magnitude", "0"),
        ("int8", "max-loss 3%", "sparsegpt distill b.npy minutes 4", "0"),
    ]
    bases = [runner.find_baseline(cell, cells) for cell in cells]
    assert bases == [None, cells[0], cells[0], cells[1], cells[2], cells[1]]
    assert len({cell.tag for cell in cells}) == 6
    with pytest.raises(CellError, match="llama"):
        Cell.parse("llama --sparsity 6:8")


def test_finished_cells_are_not_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two cells at a time on each of two GPUs; a failure leaves the others, and is tried again."""
    (tmp_path / "cells").write_text(LINES)
    cells, calls, failing = read_cells(tmp_path / "cells"), list[tuple[str, str | None]](), [True]

    def measure(cell: Cell, texts: Texts, engine: Engine, folder: Path) -> dict[str, Any]:
        calls.append((cell.columns["pattern"], engine.gpu))
        if cell.columns["method"] == "magnitude" and failing[0]:
            raise RuntimeError("out of memory")
        loss = (
            0.0 if not cell.options else np.log(1.1) if cell.columns["pattern"] == "dense" else np.log(1.21)
        )
        return {
            "zeros": 25.0,
            "minutes": 1.0,
            "nll": {"own": [3.0 + loss, 2.0 + loss]},
            "humaneval": [True, False],
        }

    monkeypatch.setattr(runner, "measure", measure)
    texts, table = Texts(tmp_path, None, None), tmp_path / "table.csv"

    def again() -> list[str]:
        calls.clear()
        return run(cells, texts, ("0", "1"), 2, table, lambda line: None)

    (failure,) = again()
    assert "out of memory" in failure
    assert len(calls) == 6
    assert {gpu for _, gpu in calls} <= {"0", "1"}
    failing[0] = False
    assert again() == []
    assert [pattern for pattern, _ in calls] == ["6:8"]
    assert again() == []
    assert calls == []
    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    own = {(row["pattern"], row["method"]): row["delta_pct"] for row in rows if row["text"] == "own"}
    assert own["dense", "-"] == "10.00"  # of INT8 over BF16, which has none
    assert own["6:8", "magnitude"] == own["6:8", "sparsegpt rotate off"] == "10.00"  # over INT8
    assert {row["humaneval"] for row in rows if row["text"] == "humaneval"} == {"50.0"}
    assert rows[0]["perplexity"] == f"{np.exp(2.5):.3f}"
    (found,) = compare(cells[4], cells[2], tmp_path / "results").values()
    assert (found.low, found.value, found.high) == pytest.approx((10.0,) * 3)  # every window loses as much


def test_share_of_zeros_counts_every_quantized_layer(tmp_path: Path) -> None:
    source = write_float(QWEN, tmp_path / "source")
    assert zeros(converted(source, tmp_path / "6_8", "6:8")) == pytest.approx(0.25)
    config = tmp_path / "6_8" / "config.json"
    content = json.loads(config.read_text())
    content["quantization_config"]["slidesparse"]["layers"] = {}
    config.write_text(json.dumps(content))
    assert zeros(tmp_path / "6_8") == 0.0


def test_windows_do_not_overlap_and_have_one_length() -> None:
    class Words:
        def __call__(self, text: str) -> dict[str, list[int]]:
            return {"input_ids": [int(word) for word in text.split()]}

    text = " ".join(map(str, range(3 * WINDOW - 1)))
    assert [(ids[0], ids[-1]) for ids in windows(Words(), text, 5)] == [(0, 1023), (1024, 2047)]
    assert len(windows(Words(), text, 1)) == 1
    assert len(python_reference()) > 300_000
    assert python_reference() == python_reference()


PROBLEM = {
    "task_id": "0",
    "prompt": 'import math\n\ndef half(x):\n    """Halve x."""\n',
    "test": "def check(candidate):\n    assert candidate(4) == 2\n",
    "entry_point": "half",
}


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
    assert humaneval.pass_at_1([PROBLEM], [answer]) == [passed]


@pytest.mark.parametrize(
    ("source", "fits"),
    [
        ("x = bytearray(1 << 29)", True),
        ("x = bytearray(1 << 31)", False),  # memory
        ("open('file', 'wb').write(bytes(1 << 22))", False),  # size of a file
        ("import os; assert not set(os.environ) - {'PATH', 'LC_CTYPE'}", True),
        ("import os; assert os.listdir() == []", True),
    ],
)
def test_sandbox_limits_programs(source: str, fits: bool) -> None:
    assert humaneval.passes(source) == fits


def test_sandbox_ends_programs_and_what_they_start(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    child = f"import time; time.sleep(2); open({str(mark)!r}, 'w')"
    assert not humaneval.passes(
        f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {child!r}]); time.sleep(60)",
        1,
    )
    time.sleep(2)
    assert not mark.exists()


def test_problems_come_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "problems.jsonl"
    path.write_text(json.dumps(PROBLEM) + "\n\n")
    assert humaneval.problems(path) == [PROBLEM]


def test_a_model_without_its_own_text_is_an_error(tmp_path: Path) -> None:
    write_config(tmp_path / "smollm2", None)
    with pytest.raises(CellError, match="prepare"):
        Texts(tmp_path, None, None).of("smollm2")
