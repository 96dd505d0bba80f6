"""Our layers against transformers', and the data and caches that feed them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import llama

from slidesparse.calibrate.cache import HiddenStates, Inputs, may_keep
from slidesparse.calibrate.data import Samples, load_samples
from slidesparse.calibrate.errors import CalibrationError, MissingPackageError
from slidesparse.calibrate.forward import Block, Shape, rms_norm
from slidesparse.calibrate.models import Model, open_model
from slidesparse.checkpoint import Checkpoint

transformers = pytest.importorskip(
    "transformers", reason="transformers, which comes with vLLM, is not installed"
)

CPU = torch.device("cpu")
COMMON = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_hidden_layers": 2}
COMMON |= {"vocab_size": 100, "max_position_embeddings": 128}
DECODER = {**COMMON, "num_key_value_heads": 2}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0}
LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 32}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", DECODER),
    "llama 3 rope": ("LlamaForCausalLM", "LlamaConfig", {**DECODER, "rope_parameters": LLAMA3}),
    "linear rope": ("LlamaForCausalLM", "LlamaConfig", {**DECODER, "rope_parameters": LINEAR}),
    "llama biased": (
        "LlamaForCausalLM",
        "LlamaConfig",
        {**DECODER, "attention_bias": True, "mlp_bias": True},
    ),
    "llama bare": ("LlamaModel", "LlamaConfig", DECODER),
    "mistral": ("MistralForCausalLM", "MistralConfig", {**DECODER, "sliding_window": None}),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", DECODER),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**DECODER, "head_dim": 24}),
    "bert": ("BertModel", "BertConfig", COMMON),
    "bert tanh": ("BertModel", "BertConfig", {**COMMON, "hidden_act": "gelu_new"}),
    "bert prefixed": ("BertForSequenceClassification", "BertConfig", COMMON),
    "roberta": ("RobertaModel", "RobertaConfig", COMMON),
    "xlm roberta": ("XLMRobertaForSequenceClassification", "XLMRobertaConfig", COMMON),
}


def saved(name: str, folder: Path) -> Any:
    """A random model of transformers, written to ``folder``; norms and biases differ from their defaults."""
    model_class, config_class, settings = MODELS[name]
    torch.manual_seed(0)
    model = getattr(transformers, model_class)(getattr(transformers, config_class)(**settings)).float().eval()
    for parameter in model.parameters():
        parameter.data.normal_(0.0, 0.3) if parameter.dim() > 1 else parameter.data.uniform_(0.3, 1.5)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("name", MODELS)
@torch.inference_mode()
def test_layers_equal_transformers(name: str, tmp_path: Path) -> None:
    theirs = saved(name, tmp_path)
    ids = torch.randint(3, 100, (2, 50), generator=torch.Generator().manual_seed(1))
    expected = theirs(ids, output_hidden_states=True).hidden_states
    model = open_model(Checkpoint.open(tmp_path))
    with model.checkpoint.reader() as reader:
        x = model.embedder(reader, [ids], CPU)(ids)
        close(x, expected[0])
        for number in range(model.blocks):
            x = model.load(reader, number, CPU).output(x)
            last = number + 1 == model.blocks
            if last and model.is_decoder:  # transformers shows the last one after the final norm
                x = rms_norm(x, reader.whole(f"{model.root}norm.weight"), model.shape.eps)
            close(x, expected[number + 1])


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal up to float32 rounding of sums of some hundred terms: 2^-24 * 100 of the largest value."""
    assert found.shape == expected.shape
    assert float((found - expected).abs().max()) <= 100 * 2**-24 * float(expected.abs().max())


def test_older_configs_name_rotary_embeddings_otherwise(tmp_path: Path) -> None:
    saved("llama 3 rope", tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    new = open_model(Checkpoint.open(tmp_path)).shape.frequencies
    scaling = config.pop("rope_parameters")
    path.write_text(json.dumps({**config, "rope_theta": scaling.pop("rope_theta"), "rope_scaling": scaling}))
    old = open_model(Checkpoint.open(tmp_path)).shape.frequencies
    assert new is not None
    assert old is not None
    assert torch.equal(old, new)


def test_stages_are_the_inputs_of_their_layers(tmp_path: Path) -> None:
    """What a hook on each linear layer of transformers' model sees."""
    theirs = saved("qwen3", tmp_path)
    ids = torch.randint(3, 100, (1, 20))
    seen: dict[str, torch.Tensor] = {}
    for name, module in theirs.model.layers[0].named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_hook(lambda _, x, __, name=name: seen.update({name: x[0]}))
    model = open_model(Checkpoint.open(tmp_path))
    with torch.inference_mode(), model.checkpoint.reader() as reader:
        theirs(ids)
        x = model.embedder(reader, [ids], CPU)(ids)
        block: Block = model.load(reader, 0, CPU)
        for stage, names in enumerate(block.stages):
            for name in names:
                close(block.input(stage, x), seen[name])
    assert {name for stage in block.stages for name in stage} == set(seen)


# Models that are not run


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"architectures": ["GemmaForCausalLM"]}, "names the architecture 'GemmaForCausalLM'"),
        ({"hidden_act": "xielu"}, "the activation 'xielu'"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "rotary embeddings of type 'yarn'"),
        ({"partial_rotary_factor": 0.5}, "or partial ones"),
        ({"num_attention_heads": None}, "num_attention_heads is None"),
    ],
)
def test_models_that_cannot_be_run_are_refused(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    saved("llama", tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(CalibrationError) as error:
        open_model(Checkpoint.open(tmp_path))
    assert words in str(error.value)


# Data


@pytest.fixture
def decoder(tmp_path: Path) -> Model:
    """A decoder with a tokenizer of the words a b c d, which ends texts with token 9."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    folder = llama(tmp_path / "model")
    tokenizer = Tokenizer(models.WordLevel({"a": 1, "b": 2, "c": 3, "d": 4, "[E]": 9}, unk_token="d"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A [E]", special_tokens=[("[E]", 9)])
    tokenizer.enable_truncation(3)
    tokenizer.save(str(folder / "tokenizer.json"))
    return open_model(Checkpoint.open(folder))


def encoder(decoder: Model) -> Model:
    """The same, taken for an encoder."""
    from dataclasses import replace

    return replace(decoder, kind="Bert")


def texts(folder: Path, *lines: object) -> str:
    path = folder / "calib.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n\n")
    return str(path)


def rows(samples: Samples) -> list[list[int]]:
    return [sample.tolist() for sample in samples.ids]


def test_decoders_read_texts_as_one_stream(decoder: Model, tmp_path: Path) -> None:
    """The tokenizer's own truncation, to 3 tokens, is not obeyed."""
    path = texts(tmp_path, {"text": "a b c a b c a"}, "b", {"text": "  "}, {"text": "c c", "source": "x"})
    found = load_samples(path, decoder, 10, 4)
    stream = [token for row in rows(found) for token in row]
    assert [len(row) for row in rows(found)] == [4, 4, 4]
    one, two, three = [1, 2, 3, 1, 2, 3, 1, 9], [2, 9], [3, 3, 9]
    orders = [one + two + three, two + one + three, two + three + one, three + one + two, three + two + one]
    assert stream in [order[:12] for order in [*orders, one + three + two]]
    assert found.note == "calib.jsonl gives 3 samples of at most 4 tokens, 10 were asked for"
    fewer = load_samples(path, decoder, 2, 4)
    assert rows(fewer) == rows(found)[:2]
    assert fewer.note == ""
    assert fewer.digest != found.digest


def test_encoders_read_each_text_by_itself_and_keep_its_end(decoder: Model, tmp_path: Path) -> None:
    path = texts(tmp_path, "a b c a b c a", "b", "c c")
    found = load_samples(path, encoder(decoder), 3, 5)
    assert sorted(rows(found)) == [[1, 2, 3, 1, 9], [2, 9], [3, 3, 9]]
    assert rows(load_samples(path, encoder(decoder), 3, 5)) == rows(found)


def test_ids_of_a_file(decoder: Model, tmp_path: Path) -> None:
    path = tmp_path / "ids.npy"
    np.save(path, np.arange(30, dtype=np.uint16).reshape(5, 6))
    assert rows(load_samples(str(path), decoder, 5, 4)) == [[6 * i + j for j in range(4)] for i in range(5)]
    chosen = rows(load_samples(str(path), decoder, 3, 6, seed=1))
    assert len(chosen) == 3
    assert chosen != rows(load_samples(str(path), decoder, 3, 6, seed=2))
    np.save(path, np.arange(23))
    assert rows(load_samples(str(path), decoder, 9, 10)) == [list(range(10)), list(range(10, 20))]


def test_random_tokens_say_what_they_are_good_for(decoder: Model) -> None:
    found = load_samples("random", decoder, 3, 7)
    assert [len(row) for row in rows(found)] == [7, 7, 7]
    assert "for trying things out only" in found.note
    assert (
        found.digest
        == load_samples("random", decoder, 3, 7).digest
        != load_samples("random", decoder, 3, 7, 1).digest
    )


@pytest.mark.parametrize(
    ("calib", "options", "words"),
    [
        ("missing.jsonl", {}, "is no file; give FILE.jsonl"),
        ("texts.txt", {}, "is not of a kind known; give FILE.jsonl (a text a line), FILE.npy"),
        ("random", {"samples": 0}, "--samples 0 is too few"),
        ("random", {"seqlen": 1000}, "--seqlen 1000 is not from 2 to 512"),
        ("bad.jsonl", {}, "bad.jsonl, line 2: KeyError: 'text'; each line must be"),
        ("broken.jsonl", {}, "broken.jsonl, line 1: JSONDecodeError"),
        ("empty.jsonl", {}, "holds no text"),
        ("short.jsonl", {"seqlen": 500}, "gives no sample of 500 tokens"),
        ("floats.npy", {}, "holds float64 [2, 2]; token ids are integers"),
        ("objects.npy", {}, "is not an array of numbers that NumPy wrote"),
    ],
)
def test_data_that_do_not_do(
    decoder: Model, tmp_path: Path, calib: str, options: dict[str, int], words: str
) -> None:
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"prompt": "a"}\n')
    (tmp_path / "broken.jsonl").write_text("plain text\n")
    (tmp_path / "empty.jsonl").write_text('\n""\n')
    (tmp_path / "short.jsonl").write_text('"a b c"\n')
    np.save(tmp_path / "floats.npy", np.ones((2, 2)))
    np.save(tmp_path / "objects.npy", np.array([{}], dtype=object), allow_pickle=True)
    path = calib if calib == "random" else str(tmp_path / calib)
    with pytest.raises(CalibrationError) as error:
        load_samples(path, decoder, **options)
    assert words in str(error.value)


def test_texts_without_a_tokenizer(decoder: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = texts(tmp_path, "a b")
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    with pytest.raises(MissingPackageError, match="pip install tokenizers, or give token ids"):
        load_samples(path, decoder)
    (decoder.checkpoint.folder / "tokenizer.json").write_text("{}")
    monkeypatch.undo()
    with pytest.raises(CalibrationError, match="is not a tokenizer that the package tokenizers reads"):
        load_samples(path, decoder)
    (decoder.checkpoint.folder / "tokenizer.json").unlink()
    (decoder.checkpoint.folder / "tokenizer").mkdir()  # as synth makes one, which is not the model's own
    with pytest.raises(CalibrationError, match="has no tokenizer .tokenizer.json., which texts need"):
        load_samples(path, decoder)


def test_ids_of_another_tokenizer_are_refused(decoder: Model) -> None:
    samples = [torch.tensor([0, decoder.vocabulary])]
    with (
        decoder.checkpoint.reader() as reader,
        pytest.raises(CalibrationError, match="run from 0 to 40, but model.embed_tokens.weight has 40 rows"),
    ):
        decoder.embedder(reader, samples, CPU)


# Hidden states


@pytest.mark.parametrize(("limit", "where"), [(10**9, "memory"), (0, "disk")])
def test_hidden_states_come_back_as_they_were(tmp_path: Path, limit: int, where: str) -> None:
    shapes = [(2, 3, 8), (1, 5, 8)]
    states = HiddenStates(shapes, CPU, tmp_path, limit)
    assert states.where == where
    kept = [torch.randn(shape) for shape in shapes]
    for _ in range(2):
        for i, value in enumerate(kept):
            states[i] = value
        kept = [kept[0], kept[1] + 1]
    states[1] = kept[1].transpose(1, 2).contiguous().transpose(1, 2)
    assert all(torch.equal(states[i], value) for i, value in enumerate(kept))
    assert len(states) == 2
    assert list(tmp_path.iterdir()) == []  # a file without a name: a killed run leaves nothing
    states.close()


class Doubling(Block):
    """Three stages that count how often they are run; each multiplies by its weight."""

    stages = (("a",), ("b",), ("c",))
    runs = 0

    def steps(self, x: torch.Tensor) -> Iterator[torch.Tensor]:
        for name in "abc":
            self.runs += 1
            yield x
            x = x * self.weights[name]
        yield x


@pytest.mark.parametrize("keep", [True, False])
def test_inputs_follow_the_weights_as_they_are_replaced(tmp_path: Path, keep: bool) -> None:
    """Stage b is never asked for, as when none of its layers is pruned."""
    states = HiddenStates([(1, 1, 2), (1, 1, 2)], CPU, tmp_path)
    states[0], states[1] = torch.full((1, 1, 2), 1.0), torch.full((1, 1, 2), 10.0)
    block = Doubling(Shape(1, 1, 2, 0.0, torch.relu), dict.fromkeys("abc", torch.tensor(2.0)))
    inputs = Inputs(block, states, keep)
    assert [float(inputs.input(0, i)[0, 0, 0]) for i in range(2)] == [1, 10]
    block.weights["a"] = torch.tensor(3.0)
    assert [float(inputs.input(2, i)[0, 0, 0]) for i in range(2)] == [6, 60]
    block.weights["c"] = torch.tensor(5.0)
    inputs.advance()
    inputs.advance()  # once is enough
    assert [float(states[i][0, 0, 0]) for i in range(2)] == [30, 300]
    assert block.runs == (6 if keep else 2 * (1 + 3 + 3))


def test_inputs_start_again_when_weights_behind_them_change(tmp_path: Path) -> None:
    states = HiddenStates([(1, 1, 2)], CPU, tmp_path)
    states[0] = torch.ones(1, 1, 2)
    block = Doubling(Shape(1, 1, 2, 0.0, torch.relu), dict.fromkeys("abc", torch.tensor(2.0)))
    inputs = Inputs(block, states, True)
    assert float(inputs.input(2, 0)[0, 0, 0]) == 4
    block.weights["a"] = torch.tensor(3.0)
    inputs.restart()
    inputs.advance()
    assert float(states[0][0, 0, 0]) == 3 * 2 * 2


def test_inputs_are_kept_if_all_fits_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hidden states of 8 columns, what waits of 8 + 24: five times as much."""
    states = HiddenStates([(2, 3, 8), (1, 5, 8)], CPU, tmp_path)
    assert states.nbytes == 11 * 8 * 4
    for limit, fits in ((5 * states.nbytes, True), (5 * states.nbytes - 1, False)):
        monkeypatch.setattr("slidesparse.calibrate.cache.KEPT_BYTES", limit)
        assert may_keep(states, 24) == fits
    both = HiddenStates([(2, 3, 8), (1, 5, 8)], CPU, tmp_path, streams=2)
    for limit, fits in ((10 * states.nbytes, True), (10 * states.nbytes - 1, False)):
        monkeypatch.setattr("slidesparse.calibrate.cache.KEPT_BYTES", limit)
        assert may_keep(both, 24) == fits
    monkeypatch.setattr("slidesparse.calibrate.cache.KEPT_OF_HOST", 2**60)
    assert not may_keep(both, 24)
    monkeypatch.undo()
    assert not may_keep(HiddenStates([(2, 3, 8)], CPU, tmp_path, limit=0), 24)  # on the disk
