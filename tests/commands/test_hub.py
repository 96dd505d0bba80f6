"""Models given by their Hub id, from a simulated cache folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoints import llama, snapshot
from typer.testing import CliRunner

from slidesparse.checkpoint.hub import local_folder
from slidesparse.checkpoint.storage import CheckpointError
from slidesparse.cli.main import app

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


def test_convert_accepts_a_hub_id(cache: Path, tmp_path: Path) -> None:
    """The command runs in a separate process, as for a user."""
    before = snapshot(cache)
    environment = {**os.environ, "HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "slidesparse.cli.main", "convert", "org/name", "out", "-s", "6:8"]
    process = subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=120, check=False
    )
    assert process.returncode == 0, process.stderr
    assert set(snapshot(tmp_path / "out")) == {"config.json", "model.safetensors", "tokenizer.json"}
    assert snapshot(cache) == before


def test_inspect_accepts_a_hub_id(cache: Path) -> None:
    result = CliRunner().invoke(app, ["inspect", "org/name", "--json"])
    assert result.exit_code == 0, result.output
    assert len(json.loads(result.stdout)["layers"]) == 14


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
    with pytest.raises(CheckpointError, match=f"{page}/blob/x is not the page of a model"):
        local_folder(f"{page}/blob/x")


@pytest.mark.parametrize("command", [["inspect", "org/other"], ["convert", "org/other", "out", "-s", "6:8"]])
def test_unavailable_hub_model_exits_2(cache: Path, command: list[str]) -> None:
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 2
    assert "org/other is not a folder here, and the Hugging Face Hub does not provide it (" in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_incomplete_hub_model_exits_2(cache: Path) -> None:
    (cache / "models--org--name" / "snapshots" / REVISION / "model.safetensors").unlink()
    result = CliRunner().invoke(app, ["inspect", "org/name"])
    assert result.exit_code == 2
    assert "holds no .safetensors file" in result.stderr


@pytest.mark.parametrize("name", ["name", "a/b/c", "/a/b", "../b", "org/name\n", "-org/name"])
def test_names_that_are_no_hub_ids_are_folders(cache: Path, name: str) -> None:
    assert local_folder(name) == Path(name)


def test_missing_library_exits_3(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    result = CliRunner().invoke(app, ["inspect", "org/name"])
    assert (result.exit_code, "pip install huggingface_hub, or upgrade" in result.stderr) == (3, True)
