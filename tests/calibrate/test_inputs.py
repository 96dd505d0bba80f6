"""Samples of texts and token ids, hidden states, and inputs of stages."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import llama
from slidesparse.calibrate.models import Block, BlockSizes, LayeredModel, open_model

from slidesparse.calibrate import inputs
from slidesparse.calibrate.inputs import BlockInputs, HiddenStates, host_memory, may_keep
from slidesparse.calibrate.samples import Samples, _sample_each_text, load_samples
from slidesparse.checkpoint.storage import Checkpoint
from slidesparse.checkpoint.tokens import tokenizer_of
from slidesparse.errors import CalibrationError, EnvironmentFault, SlideSparseError

CPU = torch.device("cpu")

# Data


@pytest.fixture
def decoder(tmp_path: Path) -> LayeredModel:
    """A decoder whose tokenizer knows the words a, b, c and d, and ends texts with token 9."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    folder = llama(tmp_path / "model")
    tokenizer = Tokenizer(models.WordLevel({"a": 1, "b": 2, "c": 3, "d": 4, "[E]": 9}, unk_token="d"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A [E]", special_tokens=[("[E]", 9)])
    tokenizer.enable_truncation(3)
    tokenizer.save(str(folder / "tokenizer.json"))
    return open_model(Checkpoint.open(folder))


def encoder(decoder: LayeredModel) -> LayeredModel:
    """Return the same model as an encoder."""
    return replace(decoder, kind="Bert")


def texts(folder: Path, *lines: object) -> str:
    path = folder / "calib.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n\n")
    return str(path)


def rows(samples: Samples) -> list[list[int]]:
    return [sample.tolist() for sample in samples.ids]


def test_decoder_samples_are_cut_from_one_token_stream(decoder: LayeredModel, tmp_path: Path) -> None:
    """The tokenizer's own truncation to 3 tokens is ignored."""
    path = texts(tmp_path, {"text": "a b c a b c a"}, "b", {"text": "  "}, {"text": "c c", "source": "x"})
    samples = load_samples(path, decoder, 10, 4)
    stream = [token for row in rows(samples) for token in row]
    assert [len(row) for row in rows(samples)] == [4, 4, 4]
    text_a, text_b, text_c = [1, 2, 3, 1, 2, 3, 1, 9], [2, 9], [3, 3, 9]
    orders = [
        text_a + text_b + text_c,
        text_b + text_a + text_c,
        text_b + text_c + text_a,
        text_c + text_a + text_b,
        text_c + text_b + text_a,
    ]
    assert stream in [order[:12] for order in [*orders, text_a + text_c + text_b]]
    assert samples.note == "calib.jsonl gives 3 samples of at most 4 tokens, 10 were requested"
    fewer = load_samples(path, decoder, 2, 4)
    assert rows(fewer) == rows(samples)[:2]
    assert fewer.note == ""
    assert fewer.digest != samples.digest


def test_encoder_samples_are_single_texts_with_end_token(decoder: LayeredModel, tmp_path: Path) -> None:
    path = texts(tmp_path, "a b c a b c a", "b", "c c")
    samples = load_samples(path, encoder(decoder), 3, 5)
    assert sorted(rows(samples)) == [[1, 2, 3, 1, 9], [2, 9], [3, 3, 9]]
    assert rows(load_samples(path, encoder(decoder), 3, 5)) == rows(samples)


def test_samples_of_an_id_file(decoder: LayeredModel, tmp_path: Path) -> None:
    path = tmp_path / "ids.npy"
    np.save(path, np.arange(30, dtype=np.uint16).reshape(5, 6))
    assert rows(load_samples(str(path), decoder, 5, 4)) == [[6 * i + j for j in range(4)] for i in range(5)]
    chosen = rows(load_samples(str(path), decoder, 3, 6, seed=1))
    assert len(chosen) == 3
    assert chosen != rows(load_samples(str(path), decoder, 3, 6, seed=2))
    np.save(path, np.arange(23))
    assert rows(load_samples(str(path), decoder, 9, 10)) == [list(range(10)), list(range(10, 20))]


def test_random_tokens_come_with_a_note(decoder: LayeredModel) -> None:
    samples = load_samples("random", decoder, 3, 7)
    assert [len(row) for row in rows(samples)] == [7, 7, 7]
    assert "only to try things out" in samples.note
    assert (
        samples.digest
        == load_samples("random", decoder, 3, 7).digest
        != load_samples("random", decoder, 3, 7, 1).digest
    )


@pytest.mark.parametrize(
    ("calib", "options", "fact"),
    [
        ("missing.jsonl", {}, "missing.jsonl"),
        ("texts.txt", {}, "FILE.npy"),
        ("random", {"samples": 0}, "--samples 0"),
        ("random", {"seed": -1}, "--seed -1 is negative"),
        ("random", {"seqlen": 1000}, "--seqlen 1000 must be from 2 to 512"),
        ("bad.jsonl", {}, "bad.jsonl, line 2: KeyError: 'text'"),
        ("broken.jsonl", {}, "broken.jsonl, line 1: JSONDecodeError"),
        ("half.jsonl", {}, "half.jsonl, line 1: UnicodeEncodeError"),
        ("deep.jsonl", {}, "deep.jsonl, line 1: RecursionError"),
        ("empty.jsonl", {}, "no text"),
        ("short.jsonl", {"seqlen": 500}, "500 tokens"),
        ("floats.npy", {}, "float64 [2, 2]"),
        ("objects.npy", {}, "objects.npy"),
        ("large.npy", {}, "large.npy holds token ids from 0 to 40, but the vocabulary of "),
        ("negative.npy", {}, "negative.npy holds token ids from -1 to 2, but"),
    ],
)
def test_invalid_data_is_refused(
    decoder: LayeredModel, tmp_path: Path, calib: str, options: dict[str, int], fact: str
) -> None:
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"prompt": "a"}\n')
    (tmp_path / "broken.jsonl").write_text("plain text\n")
    (tmp_path / "half.jsonl").write_text('"half of a pair: \\ud83d"\n')
    (tmp_path / "deep.jsonl").write_text("[" * 100_000)
    (tmp_path / "empty.jsonl").write_text('\n""\n')
    (tmp_path / "short.jsonl").write_text('"a b c"\n')
    np.save(tmp_path / "floats.npy", np.ones((2, 2)))
    np.save(tmp_path / "objects.npy", np.array([{}], dtype=object), allow_pickle=True)
    np.save(tmp_path / "large.npy", np.array([[0, 40]]))
    np.save(tmp_path / "negative.npy", np.array([[2, -1]]))
    path = calib if calib == "random" else str(tmp_path / calib)
    with pytest.raises(SlideSparseError) as error:
        load_samples(path, decoder, **options)
    assert fact in str(error.value)


def test_texts_without_a_tokenizer_are_refused(
    decoder: LayeredModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = texts(tmp_path, "a b")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(EnvironmentFault, match="pip install tokenizers"):
        load_samples(path, decoder)
    (decoder.checkpoint.folder / "tokenizer.json").write_text("{}")
    monkeypatch.undo()
    with pytest.raises(SlideSparseError, match="tokenizer.json is not a tokenizer"):
        load_samples(path, decoder)
    (decoder.checkpoint.folder / "tokenizer.json").unlink()
    (decoder.checkpoint.folder / "tokenizer").mkdir()  # as synth makes one, which is not the model's own
    with pytest.raises(SlideSparseError, match="has no tokenizer"):
        load_samples(path, decoder)


def test_texts_without_tokens_are_left_out() -> None:
    """A text has no tokens if the tokenizer drops all of its characters."""
    samples = _sample_each_text(iter([[1, 2], [], [3]]), 5, 8)
    assert [sample.tolist() for sample in samples] == [[1, 2], [3]]


def test_code_of_a_tokenizer_is_never_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers would ask on the terminal whether to trust it."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    questions: list[str] = []
    monkeypatch.setattr("builtins.input", lambda question: questions.append(question) or "n")
    code = {"AutoTokenizer": ["tokenization_own.OwnTokenizer", None]}
    config = {"tokenizer_class": "OwnTokenizer", "auto_map": code}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(SlideSparseError, match="custom code"):
        tokenizer_of(tmp_path)
    assert not questions


def test_ids_of_another_tokenizer_are_refused(decoder: LayeredModel) -> None:
    samples = [torch.tensor([0, decoder.vocabulary])]
    with (
        decoder.checkpoint.reader() as reader,
        pytest.raises(CalibrationError, match="from 0 to 40, but .* 40 rows"),
    ):
        decoder.embedder(reader, samples, CPU)


# Hidden states


@pytest.mark.parametrize(("limit", "place"), [(10**9, "memory"), (0, "disk")])
def test_hidden_states_are_preserved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int, place: str
) -> None:
    monkeypatch.setattr(inputs, "MEMORY_BYTES", limit)
    shapes = [(2, 3, 8), (1, 5, 8)]
    states = HiddenStates(shapes, CPU, tmp_path)
    assert states.where == place
    expected = [torch.randn(shape) for shape in shapes]
    for _ in range(2):
        for i, value in enumerate(expected):
            states[i] = value
        expected = [expected[0], expected[1] + 1]
    states[1] = expected[1].transpose(1, 2).contiguous().transpose(1, 2)
    assert all(torch.equal(states[i], value) for i, value in enumerate(expected))
    assert len(states) == 2
    assert list(tmp_path.iterdir()) == []  # an unlinked file: a killed run leaves nothing
    states.close()


class Doubling(Block):
    """Three stages that multiply by their weights and count their runs."""

    stages = (("a",), ("b",), ("c",))
    runs = 0

    def steps(self, x: torch.Tensor) -> Iterator[torch.Tensor]:
        for name in "abc":
            self.runs += 1
            yield x
            x = x * self.weights[name]
        yield x


@pytest.mark.parametrize("keep", [True, False])
def test_stage_inputs_reflect_replaced_weights(tmp_path: Path, keep: bool) -> None:
    """The input of stage b is never read, as when none of its layers is pruned."""
    states = HiddenStates([(1, 1, 2), (1, 1, 2)], CPU, tmp_path)
    states[0], states[1] = torch.full((1, 1, 2), 1.0), torch.full((1, 1, 2), 10.0)
    block = Doubling(BlockSizes(1, 1, 2, 0.0, torch.relu), dict.fromkeys("abc", torch.tensor(2.0)))
    reading = BlockInputs(block, states, keep)
    assert [float(reading.input(0, i)[0, 0, 0]) for i in range(2)] == [1, 10]
    block.weights["a"] = torch.tensor(3.0)
    assert [float(reading.input(2, i)[0, 0, 0]) for i in range(2)] == [6, 60]
    block.weights["c"] = torch.tensor(5.0)
    reading.advance()
    reading.advance()  # once is enough
    assert [float(states[i][0, 0, 0]) for i in range(2)] == [30, 300]
    assert block.runs == (6 if keep else 2 * (1 + 3 + 3))


def test_stage_inputs_restart_with_changed_weights(tmp_path: Path) -> None:
    states = HiddenStates([(1, 1, 2)], CPU, tmp_path)
    states[0] = torch.ones(1, 1, 2)
    block = Doubling(BlockSizes(1, 1, 2, 0.0, torch.relu), dict.fromkeys("abc", torch.tensor(2.0)))
    reading = BlockInputs(block, states, True)
    assert float(reading.input(2, 0)[0, 0, 0]) == 4
    block.weights["a"] = torch.tensor(3.0)
    reading.restart()
    reading.advance()
    assert float(states[0][0, 0, 0]) == 3 * 2 * 2


def test_may_keep_inputs_that_fit_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With hidden states of 8 columns, suspended inputs have 8 + 24: five times as much for each stream."""
    for streams in (1, 2):
        states = HiddenStates([(2, 3, 8), (1, 5, 8)], CPU, tmp_path, streams=streams)
        for spare, fits in ((0, True), (-1, False)):
            monkeypatch.setattr(inputs, "MAX_SUSPENDED_BYTES", 5 * streams * states.nbytes + spare)
            assert may_keep(states, 24) == fits
    monkeypatch.undo()
    monkeypatch.setattr(inputs, "MEMORY_BYTES", 0)
    assert not may_keep(HiddenStates([(2, 3, 8)], CPU, tmp_path), 24)  # on the disk


def test_host_memory_respects_container_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = tmp_path / "memory.max", tmp_path / "memory.limit_in_bytes"
    monkeypatch.setattr(inputs, "CONTAINER_LIMITS", limits)
    machine = host_memory()
    limits[0].write_text("max\n")
    assert host_memory() == machine
    limits[1].write_text("9223372036854771712\n")  # no limit in the format of cgroups v1
    assert host_memory() == machine
    limits[0].write_text("1000000\n")
    assert host_memory() == 10**6
    assert not may_keep(HiddenStates([(2, 300, 80)], CPU, tmp_path), 240)
