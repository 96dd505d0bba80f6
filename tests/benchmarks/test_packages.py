"""The text out of packages that `benchmarks accuracy packages` makes."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

from benchmarks.accuracy.packages import LENGTHS, WORDS, Packages, build, split

PACKAGES: Packages = [("code", 1.0, "pip", "one two", r"\.py$")]


def _words(name: str) -> str:
    """Return 500 words, each of them once."""
    return " ".join(f"{name}{i}x{'abc'[i % 3]}" for i in range(500))


def test_documents_are_whole_once_and_not_scored_on(tmp_path: Path) -> None:
    scored = _words("Scored")
    row = scored.replace(" ", "\n-- ").lower().split("-- ")
    files = {
        "one": {
            "a.py": _words("first"),
            "b.py": _words("second") + "\n" + "".join(row[40 : 40 + WORDS]),
            "c.py": _words("third") + "\n" + "".join(row[40 : 40 + WORDS - 1]),
            "d.txt": _words("other"),
        },
        "two": {"e.py": _words("first"), "f.py": "too short", "g.py": _words("числа").translate({120: "ч"})},
    }
    for name, texts in files.items():
        folder = tmp_path / "pip" / name
        folder.mkdir(parents=True)
        with zipfile.ZipFile(folder / f"{name}.whl", "w") as wheel:
            for path, text in texts.items():
                wheel.writestr(path, text)
    counts = build(tmp_path / "out.jsonl", [scored], tmp_path, 1_000_000, PACKAGES)
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text("utf-8").splitlines()]
    assert {row["text"] for row in rows} == {_words("first"), files["one"]["c.py"].rstrip()}
    assert [row["kind"] for row in rows] == ["code"] * counts["kept"] == ["code"] * 2
    assert counts["a duplicate"] == counts["not text"] == 1
    assert counts[f"{WORDS} words of a text to score on"] == 1


def test_texts_are_cut_at_blank_lines() -> None:
    shortest, longest = LENGTHS
    paragraph = "word " * 3000 + "end\n\n"
    documents = list(split(paragraph * 12))
    assert all(shortest <= len(document) <= longest and document.endswith("end") for document in documents)
    assert "\n\n".join(documents) == (paragraph * 12).rstrip()
    assert list(split("a" * (shortest - 1))) == []
    assert list(map(len, split("a" * (longest + shortest)))) == [longest, shortest]
