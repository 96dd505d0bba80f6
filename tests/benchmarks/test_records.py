"""Tables on disk: resumption without repeated rows, and refusal of another machine's tables."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from fake_library import GPU

from benchmarks.conditions import gpu_conditions
from benchmarks.records import Format, Records, RecordsError, write_conditions

FORM = Format("t", ("a", "b"), ("us",))


def test_a_torn_last_line_is_dropped_and_measured_again(tmp_path: Path) -> None:
    path = tmp_path / "new" / "t.csv"
    table = Records(path.parent, FORM)
    table.add({"a": "x, y", "b": 1, "us": 1 / 3})
    table.add({"a": "z", "b": 2, "us": 2.0})
    content = path.read_bytes()
    assert content == b'a,b,us\n"x, y",1,0.333\nz,2,2.000\n'
    for lost in range(1, 10):
        path.write_bytes(content[:-lost])
        resumed = Records(path.parent, FORM)
        assert resumed.has({"a": "x, y", "b": 1, "us": 9.0})
        assert not resumed.has({"a": "z", "b": 2})
        resumed.add({"a": "z", "b": 2, "us": 2.0})
        assert path.read_bytes() == content


def test_table_with_a_torn_header_is_restarted(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("a,b")
    assert Records(tmp_path, FORM).rows == []
    assert (tmp_path / "t.csv").read_text() == "a,b,us\n"


@pytest.mark.parametrize(("text", "fact"), [("a,c\n", "a,c"), ("a,b,us\n1\n1,2,3\n", "line 2")])
def test_a_foreign_table_is_refused_and_kept(tmp_path: Path, text: str, fact: str) -> None:
    path = tmp_path / "t.csv"
    path.write_text(text)
    with pytest.raises(RecordsError, match=fact) as error:
        Records(tmp_path, FORM)
    assert str(path) in str(error.value)
    assert path.read_text() == text


def test_conditions_collect_commands_and_refuse_another_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, conditions = tmp_path / "kernel.json", gpu_conditions(GPU, {"cusparselt": "1.2.3"})
    assert (conditions["gpu"], conditions["capability"]) == (GPU.name, "9.0")
    assert conditions["versions"]["torch"] == torch.__version__
    for command in ("kernel one", "kernel one", "again"):  # repeated to continue
        monkeypatch.setattr(sys, "argv", ["benchmarks", command])
        write_conditions(path, conditions)
    document = json.loads(path.read_text())
    assert document["commands"] == ["python -m benchmarks 'kernel one'", "python -m benchmarks again"]
    for change in ({"gpu": "NVIDIA Other"}, {"versions": conditions["versions"] | {"torch": "0.1"}}):
        with pytest.raises(RecordsError, match="--out"):
            write_conditions(path, conditions | change)
    assert json.loads(path.read_text()) == document
    # a library in only one of the two sets is no contradiction
    write_conditions(path, conditions | {"versions": {"torch": torch.__version__, "hopper": "4"}})
    assert json.loads(path.read_text())["versions"] == conditions["versions"] | {"hopper": "4"}
