"""Tables of the docs against the CSVs, and the command that checks and rewrites them."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.cli import app
from benchmarks.records import RecordsError
from benchmarks.report import docs

ROOT = Path(__file__).resolve().parents[2]


def test_tables_of_the_docs_equal_those_of_the_csvs() -> None:
    result = CliRunner().invoke(app, ["docs", "--check"])
    assert result.exit_code == 0, result.stderr


def test_marked_places_match_tables() -> None:
    names = [name for path in docs.MARKED_PAGES for _, name, _ in docs.MARKED.findall(path.read_text())]
    assert sorted(names) == sorted(docs.TABLES)


def test_first_difference_is_reported_and_rewritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "README.md"
    page.write_text("# A\n\n<!-- table: t -->\n| 1 |\n| 3 |\n<!-- end -->\n\nwords\n")
    monkeypatch.setattr(docs, "ROOT", tmp_path)
    monkeypatch.setattr(docs, "MARKED_PAGES", (page,))
    monkeypatch.setattr(docs, "TABLES", {"t": lambda: "| 1 |\n| 2 |\n"})
    monkeypatch.setattr(docs, "FOLDERS", {})
    result = CliRunner().invoke(app, ["docs", "--check"])
    assert result.exit_code == 1
    for fact in ("README.md, line 5", "| 3 |", "| 2 |"):
        assert fact in result.stderr
    assert str(page) in CliRunner().invoke(app, ["docs"]).stdout
    assert page.read_text() == "# A\n\n<!-- table: t -->\n| 1 |\n| 2 |\n<!-- end -->\n\nwords\n"
    assert (docs.write(), docs.check()) == ([], [])
    page.write_text("<!-- table: other -->\n<!-- end -->\n")
    with pytest.raises(RecordsError, match="'other'"):
        docs.check()
