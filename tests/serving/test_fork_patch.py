"""The patch for forks of vLLM: it applies to the installed vLLM's source, loads the plugin, and can be reverted."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import vllm_fork_patch  # noqa: E402

PLUGINS = vllm_fork_patch.PLUGINS


@pytest.mark.vllm
def test_patched_vllm_loads_without_an_entry_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The installed vLLM's function, before and with the patch."""
    from vllm import ModelRegistry

    spec = importlib.util.find_spec("vllm.plugins")
    file = tmp_path / PLUGINS
    file.parent.mkdir(parents=True)
    shutil.copy(spec.origin, file)
    before, patch = file.read_bytes(), vllm_fork_patch.patch(tmp_path)

    def apply(*options: str) -> None:
        subprocess.run(["git", "apply", *options, "-"], input=patch.encode(), cwd=tmp_path, check=True)

    def is_loaded() -> bool:
        monkeypatch.setattr(ModelRegistry, "models", {})
        functions = runpy.run_path(str(file))
        functions["load_general_plugins"]()
        return "BitNetForCausalLM" in ModelRegistry.models

    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [])
    assert not is_loaded()
    apply()
    assert is_loaded()
    monkeypatch.setenv("VLLM_PLUGINS", "others")
    assert not is_loaded()
    with pytest.raises(ValueError, match="is patched already"):
        vllm_fork_patch.patch(tmp_path)
    apply("-R")
    assert file.read_bytes() == before


def test_patch_refuses_unknown_source_trees(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for text, message in (
        (None, f"has no {PLUGINS}: give the folder that vllm/ lies in"),
        (
            "def load_general_plugins():\n    found = load_plugins_by_group(1)\n",
            "has no load_general_plugins() with",
        ),
    ):
        if text:
            (tmp_path / PLUGINS).parent.mkdir(parents=True)
            (tmp_path / PLUGINS).write_text(text)
        assert vllm_fork_patch.main([str(tmp_path)]) == 1
        captured = capsys.readouterr()
        assert captured.out == ""
        assert message in captured.err
