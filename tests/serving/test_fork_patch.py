"""The patch for forks of vLLM: it applies to the installed vLLM's source, loads the plugin, and can be reverted."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import vllm_fork_patch  # noqa: E402

PLUGINS = vllm_fork_patch.PLUGINS
PROGRAM = """
import importlib.metadata, vllm
real = importlib.metadata.entry_points
importlib.metadata.entry_points = lambda **by: [] if by.get("group") == "vllm.general_plugins" else real(**by)
from vllm.plugins import load_general_plugins
load_general_plugins()
from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS
print(vllm.__file__, "slidesparse" in QUANTIZATION_METHODS)
"""


@pytest.mark.vllm
@pytest.mark.slow
def test_patched_vllm_loads_the_plugin_without_an_entry_point(tmp_path: Path) -> None:
    """The installed vLLM, linked file by file with a plugins folder of its own, before and with the patch."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    tree, installed = tmp_path / "tree", Path(spec.origin).parent
    (tree / "vllm").mkdir(parents=True)
    for path in installed.iterdir():
        if path.name not in ("plugins", "__pycache__"):
            (tree / "vllm" / path.name).symlink_to(path)
    shutil.copytree(installed / "plugins", tree / "vllm/plugins")
    before, patch = (tree / PLUGINS).read_bytes(), vllm_fork_patch.patch(tree)

    def apply(*options: str) -> None:
        subprocess.run(["git", "apply", *options, "-"], input=patch.encode(), cwd=tree, check=True)

    def registered(**environ: str) -> bool:
        environ = {**os.environ, "PYTHONPATH": f"{tree}:{ROOT}", "PYTHONDONTWRITEBYTECODE": "1"} | environ
        command = [sys.executable, "-c", PROGRAM]
        process = subprocess.run(command, capture_output=True, text=True, cwd=tree, env=environ, check=False)
        file, found = process.stdout.splitlines()[-1].split()
        assert file == f"{tree}/vllm/__init__.py", process.stderr
        return found == "True"

    assert not registered()
    apply()
    assert registered()
    assert not registered(VLLM_PLUGINS="others")
    with pytest.raises(ValueError, match="is patched already"):
        vllm_fork_patch.patch(tree)
    apply("-R")
    assert (tree / PLUGINS).read_bytes() == before


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
