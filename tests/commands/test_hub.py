"""Models given by their Hub id, from a simulated cache folder."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from checkpoints import llama, snapshot
from commands import Done

from slidesparse.checkpoint.hub import local_folder
from slidesparse.checkpoint.storage import CheckpointError
from slidesparse.evaluate import perplexity
from slidesparse.evaluate.engine import Scored

REVISION = "0123456789abcdef0123456789abcdef01234567"
constants = pytest.importorskip("huggingface_hub.constants")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with the model ``org/name`` in the layout of the Hub's library, without network access."""
    folder = tmp_path / "hub"
    model = folder / "models--org--name"
    source = llama(model / "snapshots" / REVISION)
    (model / "blobs").mkdir()
    for number, path in enumerate(sorted(source.iterdir())):
        path.rename(model / "blobs" / f"{number}")
        path.symlink_to(f"../../blobs/{number}")
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text(REVISION)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    return folder


@pytest.mark.usefixtures("warm")
def test_commands_accept_a_hub_id(cache: Path, tmp_path: Path) -> None:
    before = snapshot(cache)
    done = Done("convert", "org/name", "out", "-s", "6:8")
    assert done.code == 0, done.err
    assert set(snapshot(tmp_path / "out")) == {"config.json", "model.safetensors", "tokenizer.json"}
    assert snapshot(cache) == before
    assert len(json.loads(Done("inspect", "org/name", "--json").out)["layers"]) == 14


def test_eval_accepts_a_hub_id(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the README compares with MODEL, whose id `convert` takes."""
    asked: list[Path] = []

    def run(model: Path, *_: object) -> Scored:
        asked.append(model)
        return Scored(np.zeros(3, np.float32), [], "")

    monkeypatch.setattr(perplexity, "run", run)
    np.save(tmp_path / "ids.npy", [1, 2, 3, 4])
    done = Done("eval", "perplexity", "org/name", "--against", "org/name", "--data", "ids.npy", "--seqlen", 4)
    assert done.code == 0, done.err
    assert asked == [local_folder("org/name")] * 2


def test_local_folder_takes_precedence_over_hub_id(cache: Path, tmp_path: Path) -> None:
    assert local_folder("org/name").is_relative_to(cache)
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert local_folder("org/name") == Path("org/name")


@pytest.mark.parametrize(
    "page",
    ["https://huggingface.co/org/name", "huggingface.co/org/name/", "https://hf.co/org/name/tree/main"],
)
def test_address_of_a_models_page_is_its_id(cache: Path, page: str) -> None:
    assert local_folder(page) == local_folder("org/name")
    for other in (f"{page}/blob/x", "hf://org/name"):
        with pytest.raises(CheckpointError, match=f"{other} is not the page of a model"):
            local_folder(other)


def test_unavailable_and_incomplete_hub_models_exit_2(cache: Path) -> None:
    unknown = "org/other is not a folder here, and the Hugging Face Hub does not provide it ("
    for command in (["inspect", "org/other"], ["convert", "org/other", "out", "-s", "6:8"]):
        done = Done(*command)
        assert (done.code, len(done.err.strip().splitlines())) == (2, 1)
        assert unknown in done.err
    (cache / "models--org--name" / "snapshots" / REVISION / "model.safetensors").unlink()
    done = Done("inspect", "org/name")
    assert done.code == 2
    assert "holds no .safetensors file" in done.err


@pytest.mark.parametrize("name", ["name", "a/b/c", "/a/b", "../b", "org/name\n", "-org/name"])
def test_names_that_are_no_hub_ids_are_folders(cache: Path, name: str) -> None:
    assert local_folder(name) == Path(name)


def test_missing_library_exits_3(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    result = Done("inspect", "org/name")
    assert (result.code, "pip install huggingface_hub, or upgrade" in result.err) == (3, True)
