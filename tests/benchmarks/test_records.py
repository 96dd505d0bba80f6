"""Tables on disk: resumption without repeated rows, and refusal of another machine's tables."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from fake_library import GPU

from benchmarks.conditions import gpu_conditions
from benchmarks.records import Format, Records, RecordsError, write_conditions

FORM = Format("t", ("a", "b"), ("us", "mj"))


def test_a_torn_last_line_is_dropped_and_measured_again(tmp_path: Path) -> None:
    path = tmp_path / "new" / "t.csv"
    table = Records(path.parent, FORM)
    table.add({"a": "x, y", "b": 1, "us": 1 / 3, "mj": None})
    table.add({"a": "z", "b": 2, "us": 2.0})
    content = path.read_bytes()
    assert content == b'a,b,us,mj\n"x, y",1,0.333,\nz,2,2.000,\n'
    for lost in (1, 5, 10):
        path.write_bytes(content[:-lost])
        resumed = Records(path.parent, FORM)
        assert (resumed.has({"a": "x, y", "b": 1}), resumed.has({"a": "z", "b": 2})) == (True, False)
        resumed.add({"a": "z", "b": 2, "us": 2.0})
        assert path.read_bytes() == content


@pytest.mark.parametrize(("text", "fact"), [("a,c\n", "a,c"), ("a,b,us,mj\n1\n", "line 2")])
def test_a_foreign_table_is_refused_and_kept(tmp_path: Path, text: str, fact: str) -> None:
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(RecordsError, match=fact):
        Records(tmp_path, FORM)
    assert (tmp_path / "t.csv").read_text() == text


def test_conditions_list_commands_of_one_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, conditions = tmp_path / "kernel.json", gpu_conditions(GPU, {"cusparselt": "1.2.3"})
    for command in ("kernel one", "kernel one", "again"):  # repeated to continue
        monkeypatch.setattr(sys, "argv", ["benchmarks", command])
        write_conditions(path, conditions)
    document = json.loads(path.read_text())
    assert document["commands"] == ["python -m benchmarks 'kernel one'", "python -m benchmarks again"]
    for change in ({"gpu": "NVIDIA Other"}, {"versions": conditions["versions"] | {"torch": "0.1"}}):
        with pytest.raises(RecordsError, match="--out"):
            write_conditions(path, conditions | change)
    write_conditions(path, conditions | {"versions": {"hopper": "4"}})  # in one of the two: no contradiction
    assert json.loads(path.read_text())["versions"] == conditions["versions"] | {"hopper": "4"}
