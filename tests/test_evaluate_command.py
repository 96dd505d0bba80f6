"""The command ``slidesparse eval``: its data, the engine that answers, and what it prints."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_cli import Done
from test_evaluate import distributions, scored

from slidesparse.evaluate import engine, perplexity
from slidesparse.evaluate.engine import Engine, EvaluationError, Scored
from slidesparse.evaluate.texts import texts_or_pairs, window_of, windows

# Data


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint's folder with a tokenizer of one letter a token."""
    words = {chr(ord("a") + i): i for i in range(26)}
    model = {"type": "WordLevel", "vocab": words, "unk_token": "z"}
    splitter = {"type": "WhitespaceSplit"}
    (tmp_path / "tokenizer.json").write_text(
        json.dumps({"version": "1.0", "added_tokens": [], "pre_tokenizer": splitter, "model": model})
    )
    (tmp_path / "config.json").write_text('{"vocab_size": 26}')
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text('{"vocab_size": 26}')
    return tmp_path


def test_windows_of_texts_and_ids(folder: Path) -> None:
    (folder / "a.txt").write_text("a b c d\ne f g")
    (folder / "a.jsonl").write_text('{"text": "a b c"}\n"d e f g"\n')
    np.save(folder / "stream.npy", np.arange(7))
    np.save(folder / "rows.npy", np.arange(8).reshape(2, 4))
    for name in ("a.txt", "a.jsonl", "stream.npy"):
        assert windows(folder / name, folder, 3, None) == [[0, 1, 2], [3, 4, 5]]
        assert windows(folder / name, folder, 3, 1) == [[0, 1, 2]]
    assert windows(folder / "rows.npy", folder, 3, None) == [[0, 1, 2], [4, 5, 6]]


@pytest.mark.parametrize(
    ("config", "tokens"),
    [
        ('{"max_position_embeddings": 1024}', 1023),
        ('{"text_config": {"max_position_embeddings": 512}, "max_position_embeddings": 9}', 511),
        ('{"max_position_embeddings": 32768}', 2048),
        ('{"max_position_embeddings": null}', 2048),
        ("[]", 2048),
        ("{", 2048),
    ],
)
def test_a_window_and_a_generated_token_fit_into_the_positions(
    tmp_path: Path, config: str, tokens: int
) -> None:
    (tmp_path / "config.json").write_text(config)
    assert window_of(tmp_path) == window_of(tmp_path / "none", tmp_path) == tokens


def test_pairs_and_texts(folder: Path) -> None:
    (folder / "pairs.jsonl").write_text('{"query": "a b", "text": "c"}\n{"query": "d", "text": "e f g h"}\n')
    found = texts_or_pairs(folder / "pairs.jsonl", folder, None, longest=3)
    assert (found.queries, found.documents) == ([[0, 1], [3]], [[2], [4, 5, 7]])
    (folder / "texts.jsonl").write_text('{"text": "a b"}\n"c"\n')
    found = texts_or_pairs(folder / "texts.jsonl", folder, 1)
    assert (found.queries, found.documents) == ([[0, 1]], None)


def test_data_that_are_not_there(folder: Path) -> None:
    with pytest.raises(EvaluationError, match="is no file; give one of .txt, .jsonl, .npy"):
        windows(folder / "none.txt", folder, 3, None)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.txt", "a b", "has 2 tokens, not one window of 3"),
        ("a.md", "a b", "is no file of a kind known here: .txt, .jsonl, .npy"),
        ("a.jsonl", '{"body": "a"}', "line 1: KeyError: 'text'; each line must be {"),
        ("a.jsonl", "{", "line 1: JSONDecodeError"),
        ("a.jsonl", '{"text": 3}', "line 1: TypeError: it holds a int; each line must be {"),
        ("a.jsonl", "", "holds no text"),
        ("a.npy", "text", "is not an array of numbers"),
    ],
)
def test_data_that_do_not_do(folder: Path, name: str, text: str, words: str) -> None:
    (folder / name).write_text(text)
    with pytest.raises(EvaluationError) as error:
        windows(folder / name, folder, 3, None)
    assert words in str(error.value)


def test_lines_end_where_json_says(folder: Path) -> None:
    """U+2028 and U+0085 end lines in prose, not in JSON; a byte order mark is no text."""
    line = json.dumps({"text": "a\u2028b\u0085c"}, ensure_ascii=False)
    (folder / "a.jsonl").write_text(f"\ufeff{line}\r\n{line}\n", encoding="utf-8")
    assert windows(folder / "a.jsonl", folder, 3, None) == [[0, 1, 2], [0, 1, 2]]
    pair = json.dumps({"query": "a\u2028b", "text": "c"}, ensure_ascii=False)
    (folder / "p.jsonl").write_text(f'\ufeff{pair}\n{{"query": "", "text": "d"}}\n', encoding="utf-8")
    assert texts_or_pairs(folder / "p.jsonl", folder, None).queries == [[0, 1]]  # half a pair is left out
    (folder / "a.txt").write_bytes("\ufeffa b é".encode("latin-1", "ignore"))
    with pytest.raises(EvaluationError, match=r"a.txt is not text in UTF-8 .*; convert it: iconv"):
        windows(folder / "a.txt", folder, 3, None)


def test_more_log_probabilities_than_memory_holds(
    folder: Path, without_engine: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = [[1] * 40] * 3
    perplexity.measure(folder, ids, folder / "other", -1)
    assert len(without_engine) == 2
    monkeypatch.setattr(perplexity, "MOST_AT_ONCE", 40 * 26 - 1)
    with pytest.raises(
        EvaluationError, match=r"--top -1 asks for 26 .* of each of 120 tokens .*; use --top 25 or"
    ):
        perplexity.measure(folder, ids, folder / "other", -1)
    monkeypatch.setattr(perplexity, "MOST_AT_ONCE", 10**7)
    monkeypatch.setattr(perplexity, "MOST", 120 * 7)
    with pytest.raises(EvaluationError, match=r"--top 8 asks for 8 .*; use --top 7 or less"):
        perplexity.measure(folder, ids, None, 8)
    perplexity.measure(folder, ids, None, 7)
    assert len(without_engine) == 3


# The engine


FAKE = """
import json, os, sys
import numpy as np
request = json.load(sys.stdin)
if "DISABLE_SLIDESPARSE" not in os.environ and os.environ["VLLM_LOGGING_LEVEL"] == "INFO":
    print("SlideSparse 6:8 (2 of every 8 pruned): 8 layers sparse, 0 dense; x")
if request["model"] == "broken":
    print("ERROR ValueError: no such architecture")
    sys.exit(1)
if request["model"] == "refused":
    print("pydantic_core.ValidationError: 1 validation error for ModelConfig")
    print("  Value error, max_model_len (9) is greater than the derived one")
    print("    For further information visit a page")
    sys.exit(1)
np.savez(sys.argv[1], **{"embeddings": np.ones((len(request["ids"]), 2)) * request["options"]["max_model_len"]})
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fake_worker.py").write_text(FAKE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(engine, "WORKER", "fake_worker")
    monkeypatch.setattr(engine.importlib.util, "find_spec", lambda name: object())


@pytest.mark.usefixtures("fake")
def test_the_engine_is_a_process_whose_answer_and_log_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "ERROR")  # which would hide the plugin's line
    log = tmp_path / "log"
    found = Engine(log=log).score(Path("model"), "embedding", [[1, 2, 3], [4]])
    assert found.arrays["embeddings"].tolist() == [[3, 3], [3, 3]]  # its max_model_len
    assert Engine().score(Path("model"), "perplexity", [[1, 2, 3]]).arrays["embeddings"][0, 0] == 4
    assert found.served_by == "6:8 (2 of every 8 pruned): 8 layers sparse, 0 dense; x"
    assert Engine(log=log).score(Path("model"), "embedding", [[1]], stock=True).served_by == ""
    with pytest.raises(
        EvaluationError, match="could not evaluate broken:\nERROR ValueError: no such architecture"
    ):
        Engine({"max_model_len": 9}, log).score(Path("broken"), "embedding", [[1]])
    with pytest.raises(EvaluationError, match=r"for ModelConfig\n  Value error, max_model_len \(9\) .*one$"):
        Engine({"max_model_len": 9}).score(Path("refused"), "embedding", [[1]])
    assert [line for line in log.read_text().splitlines() if line[0:1] == "#"] == [
        "# embedding of model",
        "# embedding of model",
        "# embedding of broken",
    ]


def test_no_vllm_is_said(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setattr(engine.importlib.util, "find_spec", lambda name: None)
    (folder / "a.txt").write_text("a b c d")
    done = Done("eval", "perplexity", folder, "--data", folder / "a.txt", "--seqlen", 4)
    assert done.code == 3
    assert "vLLM is not installed: pip install '.[cuda]'" in done.err


# The command


@pytest.fixture
def without_engine(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Engines that answer from the name of the model."""
    seen: list[Any] = []

    def score(self: Engine, model: Path, task: str, ids: Any, top: int = 0, stock: bool = False) -> Scored:
        seen.append((self.options, model.name, task, top))
        if task == "embedding":
            shift = 0.1 * (model.name == "other")
            base = np.asarray([[math.cos(sum(text) + shift), math.sin(sum(text) + shift)] for text in ids])
            return Scored({"embeddings": base}, "6:8 (x): 8 layers sparse")
        count = sum(len(sample) - 1 for sample in ids)
        return scored(np.full(count, -2.0 - 0.1 * (model.name == "other")), distributions(count, 0), top)

    monkeypatch.setattr(Engine, "score", score)
    return seen


def test_eval_perplexity(folder: Path, without_engine: list[Any]) -> None:
    (folder / "a.txt").write_text(" ".join("abcdefghijkl"))
    command = ("eval", "perplexity", folder, "--data", folder / "a.txt", "--seqlen", 4, "--top", 2)
    done = Done(*command, "--against", folder / "other", "--option", "dtype=float32", "--option", "seed=3")
    assert done.code == 0, done.err
    assert without_engine[0] == ({"dtype": "float32", "seed": 3}, folder.name, "perplexity", 2)
    lines = done.out.splitlines()
    assert lines[1] == "data              3 windows, 9 tokens scored"
    assert lines[2].startswith("perplexity        7.3891  (95%: 7.3891 to 7.3891)")
    assert lines[4].startswith("its perplexity    8.1662")
    assert lines[5].startswith("difference        -9.516%  (95%: -9.516% to -9.516%)")
    assert lines[6].startswith("same top token    1.0000")
    assert lines[7].startswith("KL, at least      ")
    found = json.loads(Done(*command, "--json").out)
    assert found["perplexity"]["value"] == pytest.approx(math.exp(2), rel=1e-6)
    assert "delta_pct" not in found


def test_eval_embedding(folder: Path, without_engine: list[Any]) -> None:
    (folder / "pairs.jsonl").write_text('{"query": "a b", "text": "b a"}\n{"query": "d", "text": "d"}\n')
    command = ("eval", "embedding", folder, "--data", folder / "pairs.jsonl", "--against", folder / "other")
    done = Done(*command)
    assert done.code == 0, done.err
    assert without_engine[1][1:3] == ("other", "embedding")
    found = json.loads(Done(*command, "--json").out)
    assert found["cosine_mean"]["value"] == pytest.approx(math.cos(0.1))
    assert found["mrr"]["value"] == 1.0
    names = [line[:17].strip() for line in done.out.splitlines()]
    assert names[3:] == ["cosine, mean", "cosine, 1%", "same nearest 10", "MRR", "its MRR", "MRR lost"]


def test_who_served_is_said(folder: Path, without_engine: list[Any]) -> None:
    """A checkpoint of ours that vLLM itself served is a warning; of others it is what was asked for."""
    (folder / "a.txt").write_text("a b c d")
    command = (
        "eval",
        "perplexity",
        folder,
        "--data",
        folder / "a.txt",
        "--seqlen",
        4,
        "--against",
        folder / "other",
    )
    assert Done(*command).err == ""
    ours = {"vocab_size": 26, "quantization_config": {"slidesparse": {}}}
    (folder / "config.json").write_text(json.dumps(ours))
    done = Done(*command)
    assert done.code == 0
    assert f"warning: {folder} was served by vLLM itself, without the plugin" in done.err
    assert f"{folder / 'other'} was" not in done.err
    (folder / "a.jsonl").write_text('"a b"\n')
    short = ("eval", "embedding", folder, "--data", folder / "a.jsonl", "--json")
    assert json.loads(Done(*short).out)["served_by"].startswith("6:8")
    assert "--longest 1 leaves nothing" in Done(*short, "--longest", 1).err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--data", "missing.txt"), "--data 'missing.txt' is no file"),
        (("--data", "a.txt", "--option", "dtype"), "--option 'dtype' is not NAME=VALUE"),
        (("--data", "a.txt", "--top", 0), "--top 0 is not a number of tokens"),
        (("--data", "a.txt", "--seqlen", 1), "--seqlen 1 is too short"),
        (("--data", "a.txt", "--samples", 0), "--samples 0 is too few"),
        (
            ("--data", "a.txt", "--against", "nowhere"),
            "nowhere is no checkpoint folder: its config.json cannot",
        ),
    ],
)
def test_usage_exits_2(
    folder: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[Any, ...], words: str
) -> None:
    (folder / "a.txt").write_text("a b c d")
    monkeypatch.chdir(folder)
    done = Done(
        "eval", "perplexity", folder, *(("--seqlen", 4) if "--seqlen" not in options else ()), *options
    )
    assert done.code == 2
    assert words in done.err
