"""Calibration samples from texts, conversations and token ids, in the forms in which people have them."""

from __future__ import annotations

import gzip
import itertools
import json
import pickle
import shutil
import struct
import sys
from collections.abc import Iterable, Iterator
from itertools import permutations
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pyarrow
import pytest
from calibration import open_model
from checkpoints import llama
from pyarrow import parquet
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoTokenizer

from slidesparse.calibrate import samples as module
from slidesparse.calibrate.model import Model
from slidesparse.calibrate.samples import Samples, _sample_each_text, join, load_sources
from slidesparse.checkpoint.tokens import _text, automatic_tokenizer, is_dataset, read_documents, tokenize
from slidesparse.errors import SlideSparseError
from slidesparse.progress import no_progress

END = 9
TEMPLATE = "{% for m in messages %}{{ m.role }} {{ m.content }} [E] {% endfor %}"


@pytest.fixture
def decoder(tmp_path: Path) -> Model:
    """A decoder whose tokenizer knows the words a, b, c and d, and ends texts with token 9."""
    folder = llama(tmp_path / "model")
    words = {"a": 1, "b": 2, "c": 3, "d": 4, "user": 5, "assistant": 6, "[E]": END}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="d"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A [E]", special_tokens=[("[E]", END)])
    tokenizer.add_special_tokens(["[E]"])
    tokenizer.enable_truncation(3)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return open_model(folder)


def texts(folder: Path, *lines: object) -> str:
    path = folder / "calib.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n\n")
    return str(path)


def load(data: str | Iterable[str], model: Model, *options: Any) -> Samples:
    return join(load_sources([data] if isinstance(data, str) else [*data], model, no_progress, *options))


def rows(samples: Samples) -> list[list[int]]:
    return [sample.tolist() for sample in samples.ids]


def test_texts_are_cut_at_a_limit(decoder: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A larger source gives what a smaller one lacks of its half, wherever it is named."""
    monkeypatch.setattr(module, "MAX_TOKENS", 40)
    small, large = (str(tmp_path / name) for name in ("small.npy", "large.npy"))
    np.save(small, np.ones((2, 4), np.int64))
    np.save(large, np.full((20, 4), 2))
    for data in ([small, large], [large, small]):
        found = load_sources(data, decoder, no_progress, None, 4)
        assert sorted(len(part.ids) for part in found) == [2, 8]
        assert [part.origin for part in found] == [Path(name).name for name in data]
        assert join(found).note == "of large.npy, 32 tokens are used: all sources together give 40 at most"
    with pytest.raises(SlideSparseError, match=r"--calib .*small.npy is given twice"):
        load([small, large, small], decoder)


def test_decoder_samples_are_cut_from_one_token_stream(decoder: Model, tmp_path: Path) -> None:
    """Texts are shuffled, empty ones skipped, and the tokenizer's own truncation to 3 tokens is ignored."""
    path = texts(tmp_path, {"text": "a b c a b c a"}, "b", {"text": "  "}, {"text": "c c", "source": "x"})
    samples = load(path, decoder, 10, 4)
    assert [len(row) for row in rows(samples)] == [4, 4, 4]
    found = [token for row in rows(samples) for token in row]
    documents = [1, 2, 3, 1, 2, 3, 1, END], [2, END], [3, 3, END]
    assert found in [[*a, *b, *c][:12] for a, b, c in permutations(documents)]
    skipped = "rows of calib.jsonl without text, which are skipped: 1"
    assert samples.note == f"{skipped}; calib.jsonl gives 3 samples of at most 4 tokens, 10 were requested"
    fewer = load(path, decoder, 2, 4)
    assert rows(fewer) == rows(samples)[:2]
    assert fewer.note == skipped
    assert fewer.digest != samples.digest


def test_encoder_samples_are_texts(decoder: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder, "is_causal", False)
    path = texts(tmp_path, "a b c a b c a", "b", "c c")
    samples = load(path, decoder, 3, 5)
    assert sorted(rows(samples)) == [[1, 2, 3, 1, END], [2, END], [3, 3, END]]
    assert rows(load(path, decoder, 3, 5)) == rows(samples)
    # A text has no tokens if the tokenizer drops all of its characters
    assert [row.tolist() for row in _sample_each_text([[1, 2], [], [3]], 8, 5)] == [[1, 2], [3]]


TURNS = [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "c"}]
TURN_IDS = [5, 1, 2, END, 6, 3, END]  # the template holds the end tokens; no other is added


def test_conversations_have_the_ids_of_their_chat_template(decoder: Model, tmp_path: Path) -> None:
    folder = decoder.checkpoint.folder
    assert AutoTokenizer.from_pretrained(folder).apply_chat_template(TURNS)["input_ids"] == TURN_IDS
    path = texts(tmp_path, {"messages": TURNS, "id": 7}, {"messages": []}, {"messages": TURNS, "text": None})
    assert rows(load(path, decoder, 2, 7)) == [TURN_IDS, TURN_IDS]
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    with pytest.raises(SlideSparseError, match="has no chat template for these messages .* with {'content'"):
        load(path, decoder, 2, 7)
    (folder / "tokenizer_config.json").write_text("[1]")
    with pytest.raises(SlideSparseError, match="--calib: the tokenizer of .* cannot be read"):
        load(path, decoder, 2, 7)


@pytest.mark.parametrize("form", ["json", "json.gz", "jsonl.gz", "parquet"])
def test_conversations_of_sharegpt(decoder: Model, tmp_path: Path, form: str) -> None:
    """In a list or in lines, packed or not, beside texts."""
    turns = [{"from": "human", "value": "a b"}, {"from": "bing", "value": "c"}]
    data: list[Any] = [
        {"id": "x", "text": "", "messages": [], "conversations": turns},
        {"id": "y", "conversations": []},
        {"text": "a\nb"},
    ]
    path = tmp_path / f"chat.{form}"
    if form == "parquet":
        parquet.write_table(pyarrow.Table.from_pylist(data[:2]), path)
    else:
        lines = json.dumps(data, indent=1) if form == "json" else "\n".join(map(json.dumps, data))
        with (gzip.open if form.endswith(".gz") else open)(path, "wt", encoding="utf-8") as file:
            file.write(lines)
    chat, *others = read_documents(str(path))
    assert others == ([None] if form == "parquet" else [None, "a\nb"])
    assert chat.messages == TURNS


def test_rows_of_a_list_are_those_of_lines(tmp_path: Path) -> None:
    """With what is null in a call's arguments, and with other keys of messages, as templates get them."""
    call = {"function": {"name": "look", "arguments": {"word": None}}}
    messages = [{"role": "user", "content": "a", "from": "b"}, {"role": "assistant", "tool_calls": [call]}]
    row = {"messages": messages, "tools": [{"function": {"name": "look", "default": None}}]}
    found = []
    for name, text in (("list.json", json.dumps([row])), ("lines.json", json.dumps(row))):
        (tmp_path / name).write_text(text)
        found += read_documents(str(tmp_path / name))
    chat = ([messages[0], {**messages[1], "content": ""}], row["tools"])
    assert found == [chat, chat]


# As those of models that call tools: Llama 3.1's asks for the key
TOOL_TEMPLATE = """{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}{% for m in messages %}{{ m.role }}
{% if 'tool_calls' in m %}{% for c in m.tool_calls %}{{ c.function.arguments.word }} {% endfor %}{% endif %}
{{ m.content + ' [E] ' }}{% endfor %}"""


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_conversations_call_tools_and_have_parts(decoder: Model, tmp_path: Path, form: str) -> None:
    """Rows of Parquet have all keys of any row, without values, and tools as text."""
    folder = decoder.checkpoint.folder
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TOOL_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    call = {"id": "1", "type": "function", "function": {"name": "c", "arguments": '{"word": "b"}'}}
    answer = {"role": "assistant", "content": None, "tool_calls": [call]}
    parts = [{"type": "text", "text": text} for text in "ab"]
    turns = [{"role": "user", "content": parts}, answer]
    tools: Any = [{"type": "function", "function": {"name": "c"}}]
    path = texts(tmp_path, {"messages": turns, "tools": tools})
    for none in ("", [], None):
        (tmp_path / "none.jsonl").write_text(json.dumps({"messages": turns, "tools": none}))
        assert [chat.tools for chat in read_documents(str(tmp_path / "none.jsonl"))] == [None]
    if form == "parquet":
        turns[0]["content"] = "a\nb"  # a column has one type
        table = pyarrow.Table.from_pylist([{"messages": turns, "tools": json.dumps(tools)}])
        parquet.write_table(table, path := str(tmp_path / "chat.parquet"))
    assert rows(load(path, decoder, 1, 8)) == [[3, 5, 1, 2, END, 6, 2, END]]


@pytest.mark.parametrize(
    ("now", "words"),
    [
        ("strftime_now('%d %b %Y') if strftime_now is defined else 'never'", "01 Jul 2025"),
        ("strftime_now('%A, %-d ' + '%B').replace(',', '')", "Tuesday 1 July"),
        ("strftime_now(format = form)[:4]", "2025"),
        ("strftime_now('100%%%d')", "100%01"),
    ],
)
def test_conversations_are_the_same_on_every_day(
    decoder: Model, tmp_path: Path, now: str, words: str
) -> None:
    """Though templates, such as Llama 3.2's, print the date: a run can be resumed on the next one."""
    folder = decoder.checkpoint.folder
    template = "{% set form = '%Y-%m-%d' %}{{ " + now + " }} {{ messages[0].content }}"
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    path = texts(tmp_path, {"messages": TURNS})
    documents = read_documents(path)
    (text,) = (_text(document, folder, automatic_tokenizer) for document in documents)
    assert text == f"{words} a b"


def test_parquet_has_no_keys_of_other_rows(tmp_path: Path) -> None:
    """Each row of Parquet has the arguments of all tools, without values, which templates would print."""
    arguments = [{"a": 1}, {"b": {"c": [2]}}]
    calls = [[{"function": {"name": "f", "arguments": each}}] for each in arguments]
    turns = [[{"role": "assistant", "content": "a", "tool_calls": call}] for call in calls]
    pairs = [*zip(turns, calls, strict=True)]
    table = pyarrow.Table.from_pylist([{"messages": turn, "tools": call} for turn, call in pairs])
    parquet.write_table(table, tmp_path / "calls.parquet")
    assert [*read_documents(str(tmp_path / "calls.parquet"))] == pairs


def test_plain_text_is_sampled(decoder: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In pieces that end at the ends of lines, or at twice their length; a byte order mark is no text."""
    monkeypatch.setattr(module, "PIECE", 6)
    monkeypatch.setattr("slidesparse.checkpoint.tokens.BATCH", 24)
    path = tmp_path / "book.txt"
    path.write_text("".join(f"{word} {word} {word}\n" for word in "abcd" * 50), encoding="utf-8-sig")
    tokens = {token for row in rows(load(str(path), decoder, 5, 8)) for token in row}
    assert tokens == {1, 2, 3, 4, END}
    assert load(str(path), decoder, None, 8).tokens == (200 * 3 + 100) // 8 * 8  # two lines a piece
    calls: list[tuple[int, int]] = []
    load_sources([str(path)], decoder, lambda phase, *bytes_done: calls.append(bytes_done), None, 8)
    assert calls == [*((12 * number, 1200) for number in range(1, 101)), (1200, 1200)]
    load_sources([str(path)], decoder, lambda phase, *bytes_done: calls.append(bytes_done), 5, 8)
    assert len(calls) < 150
    assert calls[-1] == (1200, 1200)  # the rest was not wanted
    with gzip.open(tmp_path / "book.txt.gz", "wb") as packed:
        packed.write(path.read_bytes())
    # what downloads, as browsers unpack some and not others, may be called
    shutil.copy(tmp_path / "book.txt.gz", tmp_path / "packed.txt")
    shutil.copy(path, tmp_path / "unpacked.txt.gz")
    for name in ("book.txt.gz", "packed.txt", "unpacked.txt.gz"):
        assert rows(load(str(tmp_path / name), decoder, 5, 8)) == rows(load(str(path), decoder, 5, 8))
    path.write_text("a b c " * 50)
    assert rows(load(str(path), decoder, None, 7)) == [[1, 2, 3, 1, 2, 3, END]] * 25


def test_parquet_has_the_samples_of_the_same_lines(decoder: Model, tmp_path: Path) -> None:
    lines = [{"text": "a b c"}, {"text": "b"}, {"text": ""}, {"text": "c c"}]
    expected = rows(load(texts(tmp_path, *lines), decoder, 9, 3))
    late = pyarrow.array([2**60] * len(lines), pyarrow.timestamp("us"))  # which Python's dates do not reach
    table = pyarrow.Table.from_pylist(lines).append_column("when", late)
    parquet.write_table(table, tmp_path / "TEXTS.PARQUET")
    assert rows(load(str(tmp_path / "TEXTS.PARQUET"), decoder, 9, 3)) == expected
    parquet.write_table(pyarrow.Table.from_pylist([{"messages": TURNS}]), tmp_path / "chat.parquet")
    assert rows(load(str(tmp_path / "chat.parquet"), decoder, 1, 7)) == [TURN_IDS]
    table = pyarrow.table({"text": [None, "a b c"], "id": [1, 2]})
    parquet.write_table(table, tmp_path / "null.parquet")
    assert [*read_documents(str(tmp_path / "null.parquet"))] == [None, "a b c"]
    parquet.write_table(pyarrow.table({"prompt": ["a"]}), tmp_path / "prompt.parquet")
    with pytest.raises(SlideSparseError, match=r"row 1 \(found \['prompt'\]\)"):
        load(str(tmp_path / "prompt.parquet"), decoder)
    (tmp_path / "broken.parquet").write_bytes(b"PAR1")
    with pytest.raises(SlideSparseError, match="cannot be read as Parquet"):
        load(str(tmp_path / "broken.parquet"), decoder)


def test_hub_dataset_is_read_no_further_than_needed(decoder: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Hub is what no machine of the tests has; datasets have more text than fits into memory."""
    monkeypatch.setattr("slidesparse.checkpoint.tokens.BATCH", 10)  # two documents
    read: list[int] = []

    class Endless:
        def shuffle(self, seed: int, buffer_size: int) -> Iterator[dict[str, str]]:
            for number in itertools.count():
                read.append(number)
                yield {"text": "a b c"}

    library = SimpleNamespace(load_dataset=lambda name, split, streaming: {"org/name-2.5": Endless()}[name])
    monkeypatch.setitem(sys.modules, "datasets", library)
    for data in ("org/name-2.5", "https://huggingface.co/datasets/org/name-2.5/viewer"):
        read.clear()
        assert rows(load(data, decoder, 3, 4)) == [[1, 2, 3, END]] * 3
        assert len(read) == 4
    library.load_dataset = Mock(side_effect=ConnectionError("no\nnetwork"))
    with pytest.raises(SlideSparseError, match=r"neither a file here nor a .*ConnectionError: no network"):
        load("org/name", decoder)


@pytest.mark.parametrize(
    ("data", "expected"),
    [("org/name", True), ("org/name-2.5", True), ("org/v1.0.1", True)]
    + [
        (name, False)
        for name in ("texts/calib.jsonl", "a/b.csv", "./x", "../x", "a/b/c", "a", "/a/b", "a/b.json2")
    ],
)
def test_names_of_datasets_are_not_those_of_missing_files(data: str, expected: bool) -> None:
    assert is_dataset(data) == expected


def test_several_sources_contribute_equal_shares(decoder: Model, tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.full((9, 4), 1))
    np.save(tmp_path / "b.npy", np.full((2, 4), 2))
    samples = load((str(tmp_path / "a.npy"), str(tmp_path / "b.npy"), "random"), decoder, 7, 4)
    assert rows(samples)[:5] == [[1] * 4] * 3 + [[2] * 4] * 2
    assert samples.origin == "a.npy and b.npy and random tokens"
    short = load((str(tmp_path / "a.npy"), str(tmp_path / "b.npy")), decoder, 10, 4)
    assert short.note == "b.npy gives 2 samples of at most 4 tokens, 5 were requested"
    with pytest.raises(SlideSparseError, match="--samples 1 must be from 2, one for each --calib, to"):
        load((str(tmp_path / "a.npy"), str(tmp_path / "missing.jsonl")), decoder, 1, 4)


def test_samples_of_an_id_file(decoder: Model, tmp_path: Path) -> None:
    path = tmp_path / "ids.npy"
    np.save(path, np.arange(30, dtype=np.uint16).reshape(5, 6))
    assert rows(load(str(path), decoder, 5, 4)) == [[6 * i + j for j in range(4)] for i in range(5)]
    assert rows(load(str(path), decoder, 15, 2)) == [[i, i + 1] for i in range(0, 30, 2)]
    chosen = rows(load(str(path), decoder, 3, 6))
    assert chosen == sorted(chosen)
    assert len(chosen) == 3
    np.save(path, np.arange(23))
    assert rows(load(str(path), decoder, 9, 10)) == [list(range(10)), list(range(10, 20))]


def test_random_tokens_come_with_a_note(decoder: Model) -> None:
    samples = load("random", decoder, 3, 7)
    assert [len(row) for row in rows(samples)] == [7, 7, 7]
    assert "only to try things out" in samples.note
    assert samples.digest == load("random", decoder, 3, 7).digest


def npy(shape: str, content: bytes = b"", kind: str = "<i8") -> bytes:
    """Return a file whose header says this shape and type."""
    header = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}}}".encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + content


REFUSED: dict[str, tuple[bytes | str, str]] = {
    "missing.jsonl": ("", "missing.jsonl' is not a file; give FILE.jsonl"),
    "texts.csv": ("a", "texts.csv' is not a supported type of file; give FILE.jsonl"),
    "bad.jsonl": ('{"text": "a"}\n{"prompt": "a"}\n', "bad.jsonl, line 2 (found ['prompt']): give {"),
    "number.jsonl": ("7\n", "number.jsonl, line 1 (found 7)"),
    "null.jsonl": (
        '{"text": null}\n{"messages": null}',
        "gives no sample of 500 tokens (rows of null.jsonl without text, which are skipped: 2)",
    ),
    "number_text.jsonl": ('{"text": 7, "messages": null}', "line 1 (found 7)"),
    "chat_text.jsonl": ('{"messages": "hello"}', "line 1 (found 'hello')"),
    "from.jsonl": ('{"messages": [{"content": "a"}]}', "line 1 ('role' is missing)"),
    "value.jsonl": ('{"conversations": [{"from": "gpt"}]}', "line 1 ('value' is missing)"),
    "speaker.jsonl": (
        '{"conversations": [{"from": "observation", "value": "a"}]}',
        "line 1 (found a turn from 'observation', not from human, gpt,",
    ),
    "rows.json": ('["a", 3]', "rows.json, row 2 (found 3): give"),
    "cut.json": ('["a", "b', "cut.json is no JSON: Unterminated string"),
    "cut.json.gz": (
        gzip.compress(b'"a b c"' * 99)[:-9],
        "cut.json.gz cannot be unpacked (Compressed file ended",
    ),
    "tool.jsonl": ('{"messages": [{"role": "user", "content": null}]}', "has no text as its content"),
    "turns.jsonl": ('{"messages": ["hello"]}', "line 1 (found 'hello', no object, as a message): give"),
    "pairs.jsonl": ('{"messages": [[["role", "user"]]]}', "line 1 (found [['role', 'user']], no object"),
    "broken.jsonl": ("plain text\n", "broken.jsonl, line 1 (Expecting value"),
    "half.jsonl": ('"half of a pair: \\ud83d"\n', "half.jsonl, line 1 ('utf-8' codec can't"),
    "role.jsonl": (
        '{"messages": [{"role": "\\ud83d", "content": "a"}]}',
        "role.jsonl, line 1 ('utf-8' codec can't",
    ),
    "deep.jsonl": ("[" * 100_000, "deep.jsonl, line 1 (maximum recursion"),
    "latin.txt": (b"caf\xe9", "latin.txt is not text in UTF-8"),
    "empty.jsonl": ('\n""\n', "which are skipped: 1); give more text"),
    "short.jsonl": ('"a b c"\n', "gives no sample of 500 tokens; give more text, or a smaller --seqlen"),
    "empty.npy": (b"", "empty.npy is not an array of numbers"),
    "zip.npy": (b"PK\3\4", "zip.npy is not an array of numbers"),
    "text.npy": (b"hi", "text.npy is not an array of numbers that NumPy wrote: EOF"),
    "damaged.npy": (npy("(1, 'a"), "damaged.npy is not an array of numbers"),
    "large.npy": (npy(f"({2**50},)"), "large.npy is not an array of numbers"),
    "larger.npy": (npy(f"({2**62}, 8)"), "larger.npy is not an array of numbers"),
    "largest.npy": (npy(f"({10**30},)"), "largest.npy is not an array of numbers"),
    "negative.npy": (
        npy("(1, 2)", struct.pack("<2q", 2, -1)),
        "negative.npy holds token ids from -1 to 2, but",
    ),
    "floats.npy": (npy("(2, 2)", bytes(32), "<f8"), "holds float64 [2, 2]; token ids are integers"),
    "objects.npy": (
        npy("(1,)", pickle.dumps(np.array([{}], object)), "|O"),
        "objects.npy is not an array of numbers",
    ),
    "other.npy": (npy("(1, 2)", struct.pack("<2q", 0, 40)), "from 0 to 40, but the vocabulary of "),
}


@pytest.mark.parametrize("name", REFUSED)
def test_unusable_data_are_refused_in_one_line(decoder: Model, tmp_path: Path, name: str) -> None:
    content, words = REFUSED[name]
    if content:
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    elif isinstance(content, bytes):
        (tmp_path / name).touch()
    with pytest.raises(SlideSparseError) as error:
        load(str(tmp_path / name), decoder, 4, 500)
    assert words in str(error.value)
    assert str(error.value).startswith("--calib")
    assert "\n" not in str(error.value)


def test_texts_without_a_tokenizer_are_refused(decoder: Model, tmp_path: Path) -> None:
    path, folder = texts(tmp_path, "a b"), decoder.checkpoint.folder
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(SlideSparseError, match="the tokenizer of .* cannot be read"):
        load(path, decoder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    (folder / "tokenizer").mkdir()
    with pytest.raises(SlideSparseError, match="has no tokenizer"):
        load(path, decoder)


def test_code_of_a_tokenizer_is_never_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers would ask on the terminal whether to trust it."""
    questions: list[str] = []
    monkeypatch.setattr("builtins.input", lambda question: questions.append(question) or "n")
    code = {"AutoTokenizer": ["tokenization_own.OwnTokenizer", None]}
    config = {"tokenizer_class": "OwnTokenizer", "auto_map": code}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(SlideSparseError, match="custom code"):
        next(tokenize(tmp_path, ["a"]))
    assert not questions
