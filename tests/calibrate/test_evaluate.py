"""Quality metrics against direct computations; their data, the engine process and the eval commands."""

from __future__ import annotations

import itertools
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import converted, write_tokenizer
from commands import Done
from engines import Engines
from models import LLAMA, MODEL, write, write_float
from transformers import AutoModelForCausalLM

from slidesparse.errors import CheckFailed, SlideSparseError
from slidesparse.evaluate import engine, perplexity
from slidesparse.evaluate.engine import Scored, run
from slidesparse.evaluate.perplexity import bootstrap, window_of, windows


def mean(values: np.ndarray) -> np.ndarray:
    return np.asarray(values.mean(-1))


def test_bootstrap_resamples_pairs_together() -> None:
    values = np.random.default_rng(0).normal(0.0, 100.0, 50)
    interval = bootstrap(lambda a, b: mean(a) - mean(b), values + 0.5, values)
    assert (interval.ci_low, interval.value, interval.ci_high) == pytest.approx((0.5, 0.5, 0.5), abs=1e-9)


def scored(logprobs: np.ndarray) -> Scored:
    return Scored(logprobs, [], "")


def test_perplexity_and_its_comparison() -> None:
    ids = [[1] * 5, [1] * 9, [1] * 3]
    generator = np.random.default_rng(0)
    logprobs, reference = (generator.normal(-3, 1, 14) for _ in range(2))
    result = perplexity.summarize("a", "b", ids, scored(logprobs), scored(reference))
    assert (result["windows"], result["tokens"]) == (3, 14)
    expected = {
        "perplexity": math.exp(-logprobs.mean()),
        "against_perplexity": math.exp(-reference.mean()),
        "delta_pct": 100 * (math.exp(reference.mean() - logprobs.mean()) - 1),
    }
    assert {name: result[name].value for name in expected} == pytest.approx(expected, rel=1e-6)
    with pytest.raises(CheckFailed, match="1 of 14 log-probabilities by b are not finite"):
        perplexity.summarize("a", "b", ids, scored(logprobs), scored(np.append(reference[1:], math.nan)))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two checkpoint folders, one inside the other, whose tokenizer has a token per letter."""
    for path in (tmp_path, tmp_path / "other"):
        write(path, {"vocab_size": 26}, {"norm.weight": torch.ones(2)})
    write_tokenizer(tmp_path, "abcdefghijklmnopqrstuvwxyz")
    return tmp_path


def test_windows_of_texts_and_ids(folder: Path) -> None:
    (folder / "a.txt").write_text("a b c d\ne f g")
    # U+2028 and U+0085 do not end lines of JSON, and a byte order mark is not part of the text
    lines = '\ufeff{"text": "a b c"}\r\n"d\u2028e\u0085f g"\n'
    (folder / "a.jsonl").write_text(lines, encoding="utf-8", newline="")
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
        ('{"text_config": null, "max_position_embeddings": 512}', 511),
        ('{"max_position_embeddings": 32768}', 2048),
        ('{"max_position_embeddings": null}', 2048),
        ('{"max_position_embeddings": Infinity}', 2048),
        pytest.param("[" * 100_000, 2048, id="nested too deeply"),
        ("[]", 2048),
        ("{", 2048),
    ],
)
def test_window_leaves_room_for_a_generated_token(tmp_path: Path, config: str, tokens: int) -> None:
    (tmp_path / "config.json").write_text(config)
    assert window_of(tmp_path) == window_of(tmp_path / "none", tmp_path) == tokens


@pytest.mark.parametrize(("name", "text"), [("a.txt", "a b"), ("a.jsonl", "")])
def test_data_without_a_window_are_refused(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text)
    with pytest.raises(SlideSparseError, match=f"{name} gives no window of 3 tokens"):
        windows(folder / name, folder, 3, None)
    with pytest.raises(SlideSparseError, match="'missing.txt' is not a file"):
        windows("missing.txt", folder, 3, None)


def test_no_more_documents_are_read_than_needed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dataset on the Hub may be endless."""
    monkeypatch.setattr(perplexity, "read_documents", lambda data: itertools.repeat("a b c"))
    assert [len(window) for window in windows("org/name", folder, 4, 3)] == [4] * 3


@pytest.mark.parametrize("token", [26, -1])
def test_ids_beyond_the_vocabulary_are_refused(folder: Path, without_engine: list[Any], token: int) -> None:
    """The engine is not started, as ids outside the vocabulary of either model would crash it."""
    np.save(folder / "ids.npy", np.array([[0, 25, 1], [2, token, 3]]))
    (folder / "other" / "config.json").write_text("{}")
    data = ("--data", folder / "ids.npy", "--seqlen", 3)
    for models in ((folder,), (folder / "other", "--against", folder)):
        process = Done("eval", "perplexity", *models, *data)
        assert (process.code, without_engine) == (2, [])
        assert (
            f"--data holds token ids from {min(token, 0)} to {max(token, 25)}, but the vocabulary of {folder} has "
            "26 tokens, 0 to 25; use the tokenizer that belongs to these weights"
        ) in process.err


@pytest.fixture
def without_engine(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Replace engines by fakes whose results depend on the name of the model."""
    requests: list[Any] = []

    def run(model: Path, request: Any, options: Any, log: None) -> Scored:
        requests.append((options, model.name))
        count = sum(len(sample) - 1 for sample in request["ids"])
        return scored(np.full(count, -2.0 - 0.1 * (model.name == "other")))

    monkeypatch.setattr(perplexity, "run", run)
    return requests


def test_eval_perplexity(folder: Path, without_engine: list[Any]) -> None:
    (folder / "a.txt").write_text(" ".join("abcdefghijkl"))
    command = ("eval", "perplexity", folder, "--data", folder / "a.txt", "--seqlen", 4)
    process = Done(*command, "--against", folder / "other", "--option", "dtype=float32", "--option", "seed=3")
    assert process.code == 0, process.err
    options = {"enforce_eager": True, "max_model_len": 5, "dtype": "float32", "seed": 3}
    assert without_engine[0] == (options, folder.name)
    shown = {line[:22].strip(): line[22:].split()[:1] for line in process.out.splitlines()[1:]}
    figures = {"data": "3", "perplexity": "7.3891", "against: perplexity": "8.1662", "increase": "-9.516%"}
    assert {name: shown[name] for name in figures} == {name: [value] for name, value in figures.items()}
    assert f"against                {folder / 'other'}: stock vLLM" in process.out
    result = json.loads(Done(*command, "--json").out)
    assert result["perplexity"]["value"] == pytest.approx(math.exp(2), rel=1e-6)
    assert "delta_pct" not in result
    assert "  (95%: 7.3891 to 7.3891)" in process.out
    alone = Done(*command, "--samples", 1)  # resampled, one window is always itself
    assert "7.3891  (of one window, which has no interval)" in alone.out


def test_pickled_weights_are_left_to_vllm(folder: Path, without_engine: list[Any]) -> None:
    """It loads them where there are no others."""
    (folder / "other" / MODEL).rename(folder / "other" / "pytorch_model.bin")
    np.save(folder / "ids.npy", np.arange(6).reshape(2, 3))
    process = Done("eval", "perplexity", folder, "--against", folder / "other", "--data", folder / "ids.npy")
    assert (process.code, len(without_engine)) == (0, 2), process.err


@pytest.mark.parametrize("name", [MODEL, "tokenizer.json"])
def test_broken_checkpoints_start_no_engine(name: str, folder: Path, without_engine: list[Any]) -> None:
    """Nor does the reference, which would be read after the model was scored."""
    np.save(folder / "ids.npy", np.arange(6).reshape(2, 3))
    (folder / "other" / name).write_text("{")
    process = Done("eval", "perplexity", folder, "--against", folder / "other", "--data", folder / "ids.npy")
    assert (process.code, without_engine) == (2, [])
    assert re.match(rf"error: .*{re.escape(str(folder / 'other'))}.* fetch it again\n\Z", process.err)


def test_models_of_different_tokenizers_are_not_compared(folder: Path, without_engine: list[Any]) -> None:
    """The ids of one model's tokenizer are other words to the other model."""
    write_tokenizer(folder / "other", "zyxwvutsrqponmlkjihgfedcba")
    (folder / "a.txt").write_text(" ".join("abcdefghijkl"))
    command = ("eval", "perplexity", folder, "--data", folder / "a.txt", "--seqlen", 4)
    process = Done(*command, "--against", folder / "other")
    assert (process.code, without_engine) == (2, [])
    assert f"--against {folder / 'other'} has another tokenizer than {folder}" in process.err


@torch.inference_mode()
def exact_logprobs(folder: Path, ids: list[list[int]]) -> np.ndarray:
    """Return log-probabilities [tokens] of all but the first token, by transformers in float32."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    logprobs = model(torch.tensor(ids)).logits[:, :-1].log_softmax(-1)
    return logprobs.gather(2, torch.tensor(ids)[:, 1:, None]).flatten().numpy()


@pytest.mark.vllm
@pytest.mark.slow
def test_engine_process(engines: Engines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that ``slidesparse eval`` starts scores as transformers does, continues prompts, and has a log."""
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "ERROR")  # would hide the plugin's line
    source, log = write_float(LLAMA, tmp_path / "source"), tmp_path / "log"
    slided = converted(source, tmp_path / "slided", "6:8", "slided")
    options = {"dtype": "float32", "gpu_memory_utilization": 0.2, "enforce_eager": True, "max_model_len": 8}
    sampling = [{"max_tokens": 3, "temperature": 0.0, "ignore_eos": True}] * 2
    request: dict[str, Any] = {"ids": [[1, 2, 3, 4, 9], [5, 6, 3, 7, 0]]}
    scores = run(source, request, options, log)
    assert scores.served_by == ""
    # sums of float32 in another order
    assert scores.logprobs == pytest.approx(exact_logprobs(source, request["ids"]), abs=1e-4)
    done: list[int] = []
    request |= {"prompts": [[1, 2], [3]], "sampling": sampling}
    scores = run(slided, request, options, log, report=done.append)
    assert "8 layers sparse, 1 dense (1 lm_head); slided layout" in scores.served_by
    assert scores.logprobs.shape == (8,)
    assert scores.outputs == engines.serve(slided, work={"prompts": [[1, 2], [3]], "tokens": 3}).tokens
    assert done == [2]
    with pytest.raises(SlideSparseError, match=r"run .*source:\n.*ValidationError.*\n.*max_model_len"):
        run(source, {"ids": [[1, 2]]}, {**options, "max_model_len": 10**6}, log)
    headers = [line for line in log.read_text().splitlines() if line.startswith("# ")]
    assert headers == [f"# {source}", f"# {slided}", f"# {source}"]


ABORTING = """
import os, sys, types
from slidesparse.evaluate import worker
sys.modules["vllm"] = types.SimpleNamespace(LLM=lambda *_, **__: None, SamplingParams=dict)
worker.main()
os.abort()
"""


@pytest.mark.vllm
def test_answers_count_however_their_process_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads of vLLM's libraries have aborted the interpreter at its end, after all was done."""
    (tmp_path / "aborting.py").write_text(ABORTING)
    monkeypatch.setattr(engine, "WORKER", "aborting")
    scores = run(tmp_path, {}, {}, environment={"PYTHONPATH": str(tmp_path)})
    assert (scores.logprobs.size, scores.outputs) == (0, [])
