"""Figures of quality: each against a plain computation, and the engine that they come from."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_cli import Done

from slidesparse.evaluate import embedding, engine, perplexity
from slidesparse.evaluate.engine import Engine, EvaluationError, Scored
from slidesparse.evaluate.intervals import bootstrap, mean, percentile
from slidesparse.evaluate.texts import texts_or_pairs, window_of, windows

VOCABULARY = 12


# Divergence


def distributions(tokens: int, seed: int) -> np.ndarray:
    """Log-probabilities [tokens, VOCABULARY]."""
    scores = np.random.default_rng(seed).normal(0, 2, (tokens, VOCABULARY))
    return scores - np.log(np.exp(scores).sum(-1, keepdims=True))


def likeliest(logprobs: np.ndarray, top: int) -> tuple[np.ndarray, np.ndarray]:
    ids = np.argsort(-logprobs, axis=1)[:, :top]
    return ids, np.take_along_axis(logprobs, ids, axis=1)


def lumped(p: np.ndarray, q: np.ndarray, top: int) -> float:
    """KL of two distributions, tokens among the likeliest of both apart and the others as one: written out."""
    both = set(np.argsort(-p)[:top]) & set(np.argsort(-q)[:top])
    rest = [token for token in range(len(p)) if token not in both]
    atoms = [(math.exp(p[token]), math.exp(q[token])) for token in both]
    if rest:
        atoms.append((sum(math.exp(p[token]) for token in rest), sum(math.exp(q[token]) for token in rest)))
    return sum(a * math.log(a / b) for a, b in atoms)


@pytest.mark.parametrize("top", [1, 3, 7, VOCABULARY])
def test_divergence_is_that_of_the_lumped_distributions(top: int) -> None:
    p, q = distributions(50, 0), distributions(50, 1)
    found = perplexity.divergence(*likeliest(p, top), *likeliest(q, top))
    whole = (np.exp(p) * (p - q)).sum(-1)
    for row in range(50):
        assert found[row] == pytest.approx(lumped(p[row], q[row], top), abs=1e-9)
        assert found[row] <= whole[row] + 1e-9
    if top == VOCABULARY:
        assert found == pytest.approx(whole, abs=1e-9)
    assert perplexity.divergence(*likeliest(p, top), *likeliest(p, top)) == pytest.approx(0, abs=1e-12)


# Intervals


def test_the_interval_of_a_mean_is_that_of_theory() -> None:
    values = np.random.default_rng(0).normal(5.0, 2.0, 4000)
    found = bootstrap(mean, values)
    half = 1.96 * values.std() / 4000**0.5
    assert found.value == pytest.approx(values.mean())
    assert found.high - found.value == pytest.approx(half, rel=0.1)  # 2000 rounds give the ends to some 4%
    assert found.value - found.low == pytest.approx(half, rel=0.1)
    assert bootstrap(mean, values) == found


def test_pairs_stay_together() -> None:
    values = np.random.default_rng(0).normal(0.0, 100.0, 50)
    found = bootstrap(lambda a, b: mean(a) - mean(b), values + 0.5, values)
    assert (found.low, found.value, found.high) == pytest.approx((0.5, 0.5, 0.5), abs=1e-9)


def test_percentile_and_rounds_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.arange(1001.0)
    whole = bootstrap(percentile(0.01), values)
    assert whole.value == 10.0
    assert whole.low < 10 < whole.high
    monkeypatch.setattr("slidesparse.evaluate.intervals.DRAWS", 5000)
    in_parts = bootstrap(percentile(0.01), values)
    assert in_parts.value == 10.0
    assert abs(in_parts.low - whole.low) <= 2


# Perplexity


def scored(logprobs: np.ndarray, tops: np.ndarray, top: int = 3) -> Scored:
    ids, values = likeliest(tops, top)
    return Scored({"logprobs": logprobs, "top_ids": ids, "top_logprobs": values}, "")


def test_perplexity_and_its_comparison() -> None:
    ids = [[1] * 5, [1] * 9, [1] * 3]
    generator = np.random.default_rng(0)
    ours, theirs = (generator.normal(-3, 1, 14) for _ in range(2))
    p, q = distributions(14, 0), distributions(14, 1)
    found = perplexity.summarize("a", "b", ids, scored(ours, p), scored(theirs, q))
    assert (found.windows, found.tokens) == (3, 14)
    assert found.perplexity.value == pytest.approx(math.exp(-ours.mean()))
    compared = found.comparison
    assert compared is not None
    assert compared.perplexity.value == pytest.approx(math.exp(-theirs.mean()))
    assert compared.delta_pct.value == pytest.approx(100 * (math.exp(theirs.mean() - ours.mean()) - 1))
    assert compared.top1.value == pytest.approx(np.mean(p.argmax(1) == q.argmax(1)))
    assert compared.kl.value == pytest.approx(np.mean([lumped(q[i], p[i], 3) for i in range(14)]), abs=1e-6)
    assert not compared.exact
    exact = perplexity.summarize("a", "b", ids, scored(ours, p, VOCABULARY), scored(theirs, q, VOCABULARY))
    assert exact.comparison is not None
    assert exact.comparison.exact
    assert set(exact.to_json()) - set(found.to_json()) == {"kl"}


def test_a_model_beside_itself() -> None:
    p = distributions(8, 0)
    same = scored(np.linspace(-4, -1, 8), p)
    found = perplexity.summarize("a", "a", [[1] * 5, [1] * 5], same, same).comparison
    assert found is not None
    assert (found.delta_pct.low, found.delta_pct.high, found.top1.value) == (0.0, 0.0, 1.0)
    assert found.kl.value == pytest.approx(0, abs=1e-12)


# Embeddings


def test_retrieval_is_what_sorting_gives() -> None:
    generator = np.random.default_rng(0)
    ours, theirs = generator.normal(size=(60, 8)), generator.normal(size=(60, 8))
    ours[30:] += 0.8 * ours[:30]  # documents near their queries
    theirs += ours
    found = embedding.summarize("a", "b", ours, theirs, True, ("", ""))

    def by_hand(vectors: np.ndarray) -> tuple[list[float], list[set[int]]]:
        unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
        reciprocal, nearest = [], []
        for i in range(30):
            order = sorted(range(30), key=lambda j: -float(unit[i] @ unit[30 + j]))
            reciprocal.append(1 / (1 + order.index(i)))
            nearest.append(set(order[:10]))
        return reciprocal, nearest

    (mine, near), (reference, wanted) = by_hand(ours), by_hand(theirs)
    assert found.mrr is not None
    assert found.mrr.value == pytest.approx(np.mean(mine))
    assert found.mrr_against is not None
    assert found.mrr_against.value == pytest.approx(np.mean(reference))
    assert found.mrr_loss is not None
    assert found.mrr_loss.value == pytest.approx(np.mean(reference) - np.mean(mine))
    assert found.top10 is not None
    assert found.top10.value == pytest.approx(
        np.mean([len(a & b) / 10 for a, b in zip(near, wanted, strict=True)])
    )
    assert found.cosine_mean is not None
    cosines = (ours * theirs).sum(1) / np.linalg.norm(ours, axis=1) / np.linalg.norm(theirs, axis=1)
    assert found.cosine_mean.value == pytest.approx(cosines.mean())
    assert found.cosine_p1 is not None
    assert found.cosine_p1.value == pytest.approx(np.quantile(cosines, 0.01))


def test_embeddings_that_are_all_alike_find_nothing() -> None:
    found = embedding.summarize("a", None, np.ones((20, 4)), None, True, ("", ""))
    assert found.mrr is not None
    assert found.mrr.value == pytest.approx(1 / 10)
    assert (found.cosine_mean, found.top10, found.mrr_loss) == (None, None, None)
    assert set(found.to_json()) == {"model", "texts", "mrr"}


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


# The engine


FAKE = """
import json, os, sys
import numpy as np
request = json.load(sys.stdin)
if "DISABLE_SLIDESPARSE" not in os.environ:
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
def test_the_engine_is_a_process_whose_answer_and_log_are_read(tmp_path: Path) -> None:
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
    assert "vLLM is not installed: pip install 'slidesparse[cpu]'" in done.err


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


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--data", "missing.txt"), "--data 'missing.txt' is no file"),
        (("--data", "a.txt", "--option", "dtype"), "--option 'dtype' is not NAME=VALUE"),
        (("--data", "a.txt", "--top", 0), "--top 0 is not a number of tokens"),
        (("--data", "a.txt", "--seqlen", 1), "--seqlen 1 is too short"),
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
