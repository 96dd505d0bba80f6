"""Text that a model writes itself: its distribution, its beginnings, and the cache."""

from __future__ import annotations

import copy
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from calibration import calibrated, open_model, save
from checkpoints import edit_json, snapshot
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from slidesparse.calibrate import written
from slidesparse.calibrate.model import Model
from slidesparse.checkpoint.skeleton import Skeleton
from slidesparse.checkpoint.storage import Checkpoint
from slidesparse.errors import CalibrationError, SlideSparseError
from slidesparse.progress import no_progress

WORDS = ["<s>", "</s>", "user", ":", "says", *(f"w{i}" for i in range(100))]
TEMPLATE = "{% for m in messages %}{{ m.role }} : {{ m.content }} </s> {% endfor %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama, a tokenizer of 105 of its 128 tokens, and files that ask for likely tokens and to stop early."""
    folder = tmp_path_factory.mktemp("model") / "source"
    whole: Any = save("llama", folder, hidden_size=256)
    whole.generation_config.update(do_sample=True, top_k=2, temperature=0.1, eos_token_id=[5, 6, 7])
    whole.lm_head.weight.data *= 2
    whole.save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="</s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(WORDS[:2])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": TEMPLATE}))
    return folder


def write(model: Model, samples: int, length: int = 24) -> np.ndarray:
    ids, note = written.write(model, samples, length, no_progress, "--calib")
    assert (ids.shape, ids.dtype, note) == ((samples, length), np.int32, "")
    return ids


@torch.inference_mode()
@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.vllm, pytest.mark.slow])]
)
def test_text_has_the_distribution_of_the_model(folder: Path, device: str) -> None:
    """Surprise, and its expectation, which the likeliest tokens alone would undercut, are equal within 4 sigma."""
    model = Model(Skeleton(Checkpoint.open(folder)), torch.device(device))
    ids = torch.from_numpy(write(model, 100)).long()
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    logprobs = reference(ids).logits[:, 3:-1].double().log_softmax(-1)
    surprise = -logprobs.gather(2, ids[:, 4:, None])[..., 0]
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    error = (surprise - entropy).mean() / ((surprise - entropy).std() / surprise.numel() ** 0.5)
    assert abs(float(error)) < 4
    assert float(entropy.mean()) > 2


def test_half_of_the_text_begins_as_the_user_does(folder: Path) -> None:
    ids = write(open_model(folder), 40)
    assert {tuple(row[:2]) for row in ids[1::2]} == {(2, 3)}  # user :
    assert {int(row[0]) for row in ids[::2]} == {0}
    seconds = {int(row[1]) for row in ids[::2]}
    assert len(seconds) > 10
    assert min(seconds) > 1  # no special token
    assert max(seconds) < len(WORDS)


def test_samples_are_kept_and_others_appended(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the cache, where a damaged file is written again; the same seed gives the same text."""
    model = open_model(folder)
    four, six = (write(model, count) for count in (4, 6))
    with monkeypatch.context() as patch:
        patch.setattr(written, "_write", lambda *_: pytest.fail("written again"))
        assert np.array_equal(six[:4], four)
        assert np.array_equal(write(model, 5), six[:5])
    (path,) = (Path(os.environ["SLIDESPARSE_CACHE"]) / "texts").glob("*/ids.json")
    kept = path.read_text()
    for damaged in (kept[:-9], "PK\3\4", kept.replace(f" {four[3, 9]}", " 1000000")):
        path.write_text(damaged)
        assert np.array_equal(write(model, 4), four)
    path.unlink()
    path.mkdir()  # what cannot be kept is used all the same
    assert np.array_equal(write(model, 4), four)


def test_text_begins_as_the_present_tokenizer_says(folder: Path, tmp_path: Path) -> None:
    """Text of an earlier chat template is not taken from the cache; one that the model lacks tokens for is refused."""
    shutil.copytree(folder, tmp_path / "model")
    before = write(open_model(tmp_path / "model"), 2)
    edit_json(tmp_path / "model" / "tokenizer_config.json", chat_template="says {{ messages[0].content }}")
    assert write(open_model(tmp_path / "model"), 2)[1][0] == WORDS.index("says") != before[1][0]
    known = json.loads((tmp_path / "model" / "tokenizer.json").read_text())["added_tokens"]
    more = [{**known[0], "id": id, "content": f"<{id}>"} for id in range(len(WORDS), 129)]
    edit_json(tmp_path / "model" / "tokenizer.json", added_tokens=known + more)
    edit_json(tmp_path / "model" / "tokenizer_config.json", chat_template="<128> {{ messages[0].content }}")
    with pytest.raises(SlideSparseError, match="the chat template holds token ids from 0 to 128, but"):
        write(open_model(tmp_path / "model"), 2)


def test_model_without_tokenizer_begins_with_any_token(tmp_path: Path) -> None:
    save("qwen2", tmp_path)  # for which transformers makes an empty one
    ids, note = written.write(open_model(tmp_path), 8, 12, no_progress, "--calib")
    assert len({*ids[:, 0].tolist()}) > 4
    assert note.startswith("all of the model's own text begins with random tokens, as ")


def test_template_that_takes_other_messages_is_said(folder: Path, tmp_path: Path) -> None:
    """Then no text begins as the user does."""
    shutil.copytree(folder, tmp_path / "model")
    template = "{{ messages[1].content }}"  # after those of the system
    edit_json(tmp_path / "model" / "tokenizer_config.json", chat_template=template)
    ids, note = written.write(open_model(tmp_path / "model"), 4, 12, no_progress, "--calib")
    assert {*ids[:, 0].tolist()} == {0}
    assert "as its chat template takes no single message of a user (UndefinedError: " in note


def test_conversion_and_distillation_by_own_text(folder: Path, tmp_path: Path) -> None:
    """A second run has the same bytes, and so the same text."""
    options: dict[str, Any] = {"data": ("self",), "samples": 8, "epochs": 0}
    first = calibrated(folder, tmp_path / "first", "", **options)
    assert first.samples == "its own text, 8 samples, 192 tokens"
    calibrated(folder, tmp_path / "second", "", **options)
    assert snapshot(tmp_path / "first") == snapshot(tmp_path / "second")


def test_transformers_writes_where_vllm_fails(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On a GPU, which says so at once: it takes longer."""

    def fails(*_: object) -> None:
        raise SlideSparseError("vLLM ended:\nno memory\nand more")

    model = open_model(folder)
    expected = write(model, 2)
    (path,) = (Path(os.environ["SLIDESPARSE_CACHE"]) / "texts").glob("*/ids.json")
    path.unlink()
    monkeypatch.setattr(written, "is_available", lambda: True)
    monkeypatch.setattr(written, "_by_vllm", fails)
    assert np.array_equal(write(model, 2), expected)  # on a CPU vLLM is not asked
    assert not caplog.records
    path.unlink()
    on_gpu, by_transformers = copy.copy(model), written._by_transformers
    on_gpu.device = torch.device("cuda")
    monkeypatch.setattr(written, "free_bytes", lambda _: 1 << 40)
    monkeypatch.setattr(written, "_by_transformers", lambda _, *rest: by_transformers(model, *rest))
    assert np.array_equal(write(on_gpu, 2), expected)
    assert caplog.messages == ["transformers writes the text, which takes longer, as vLLM failed: no memory"]


def test_other_models_are_refused(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save("llama", tmp_path / "embedding")
    edit_json(tmp_path / "embedding" / "config.json", architectures=["LlamaModel"])
    with pytest.raises(CalibrationError, match="needs a model that predicts tokens, but .*; give text"):
        calibrated(tmp_path / "embedding", tmp_path / "out", "", data=("self",), seqlen=16)
    monkeypatch.setattr(written, "free_bytes", lambda _: 10**5)
    with pytest.raises(CalibrationError, match="does not fit into the memory of cpu; give text instead"):
        calibrated(folder, tmp_path / "out", "", data=("self",))
    assert not (tmp_path / "out").exists()


@torch.inference_mode()
@pytest.mark.parametrize("name", ["gemma3_text", "qwen3_moe", "mamba"])
def test_models_are_assembled_by_our_reader(tmp_path: Path, name: str) -> None:
    """Logits are those of transformers."""
    reference = save(name, tmp_path)
    ids = torch.arange(3, 19)[None]
    whole = written.assembled(open_model(tmp_path))
    assert torch.allclose(whole(ids).logits, reference(ids).logits, atol=1e-5)
