"""The patch for forks of vLLM: it applies to the installed vLLM's source, loads the plugin, and can be reverted."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import vllm_fork_patch  # noqa: E402

Tree = dict[str, bytes]

WITHOUT_ENTRY_POINTS = """
import importlib.metadata
real = importlib.metadata.entry_points
importlib.metadata.entry_points = lambda **by: [] if by.get("group") == "vllm.general_plugins" else real(**by)
from vllm.plugins import load_general_plugins
load_general_plugins()
load_general_plugins()
"""
PLUGIN = "def register():\n    print('registered')\n"


def installed() -> Path:
    """The folder of the installed vLLM's package, found without importing it."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def contents(folder: Path) -> Tree:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Copy the files of the installed vLLM that load plugins."""
    folder = tmp_path / "tree"
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(installed() / "plugins", folder / "vllm/plugins", ignore=ignored)
    shutil.copy(installed() / "envs.py", folder / "vllm/envs.py")
    (folder / "vllm/__init__.py").touch()
    return folder


def git_apply(tree: Path, patch: str, *options: str) -> None:
    run(["git", "apply", *options, "-"], tree, patch)


def unix_patch(tree: Path, patch: str, *options: str) -> None:
    run(["patch", "-p1", "--no-backup-if-mismatch", *options], tree, patch)


def run(command: list[str], tree: Path, patch: str) -> None:
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    process = subprocess.run(command, input=patch, cwd=tree, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stdout + process.stderr


def python(tree: Path, program: str, **environ: str) -> subprocess.CompletedProcess[str]:
    inherited = {k: v for k, v in os.environ.items() if "SPARS" not in k and k != "VLLM_PLUGINS"}
    return subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        cwd=tree,
        env={**inherited, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1", **environ},
        timeout=300,
        check=False,
    )


@pytest.mark.vllm
@pytest.mark.parametrize("apply", [git_apply, unix_patch])
def test_patch_applies_and_reverts(tree: Path, apply: Callable[..., None]) -> None:
    before, patch = contents(tree), vllm_fork_patch.patch(tree)
    apply(tree, patch)
    after = contents(tree)
    assert {name for name in before.keys() | after if before.get(name) != after.get(name)} == {
        vllm_fork_patch.PLUGINS,
        vllm_fork_patch.ADDED,
    }
    assert after[vllm_fork_patch.ADDED].decode() == vllm_fork_patch.MODULE
    with pytest.raises(vllm_fork_patch.TreeError, match="it is patched already"):
        vllm_fork_patch.patch(tree)
    apply(tree, patch, "-R")
    assert contents(tree) == before


@pytest.mark.vllm
def test_patched_vllm_loads_the_plugin_without_an_entry_point(tree: Path) -> None:
    (tree / "slidesparse/vllm_patch").mkdir(parents=True)
    (tree / "slidesparse/__init__.py").touch()
    (tree / "slidesparse/vllm_patch/__init__.py").write_text(PLUGIN)
    process = python(tree, WITHOUT_ENTRY_POINTS)
    assert (process.returncode, process.stdout) == (0, ""), process.stderr  # not patched yet
    git_apply(tree, vllm_fork_patch.patch(tree))
    process = python(tree, WITHOUT_ENTRY_POINTS)
    assert (process.returncode, process.stdout) == (0, "registered\n"), process.stderr
    assert python(tree, WITHOUT_ENTRY_POINTS, VLLM_PLUGINS="others").stdout == ""
    assert python(tree, WITHOUT_ENTRY_POINTS, VLLM_PLUGINS="others,slidesparse").stdout == "registered\n"


@pytest.mark.vllm
def test_patched_vllm_adds_nothing_beside_the_entry_point(tree: Path) -> None:
    git_apply(tree, vllm_fork_patch.patch(tree))
    program = """
from vllm.plugins.slidesparse import add_to
plugins = {"slidesparse": print}
add_to(plugins)
print(plugins == {"slidesparse": print})
"""
    assert python(tree, program).stdout == "True\n"


@pytest.mark.vllm
def test_patched_vllm_reports_missing_slidesparse(tree: Path) -> None:
    git_apply(tree, vllm_fork_patch.patch(tree))
    program = "import sys\nsys.modules['slidesparse'] = None\n" + WITHOUT_ENTRY_POINTS
    process = python(tree, program)
    assert process.returncode == 1
    assert "slidesparse cannot be imported" in process.stderr
    assert python(tree, program, DISABLE_SLIDESPARSE="1").returncode == 0


@pytest.mark.vllm
@pytest.mark.slow
def test_patched_vllm_registers_the_quantization_method(tree: Path) -> None:
    """The installed vLLM, linked file by file, with a patched plugins folder loads the real plugin."""
    for path in installed().iterdir():
        target = tree / "vllm" / path.name
        if path.name not in ("plugins", "__pycache__"):
            target.unlink(missing_ok=True)
            target.symlink_to(path)
    git_apply(tree, vllm_fork_patch.patch(tree))
    program = (
        WITHOUT_ENTRY_POINTS
        + "from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS\n"
        + "import vllm\nprint(vllm.__file__, 'slidesparse' in QUANTIZATION_METHODS)"
    )
    process = python(tree, program)
    assert process.stdout.splitlines()[-1:] == [f"{tree}/vllm/__init__.py True"], process.stderr


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "has no vllm/plugins/__init__.py: give the folder that vllm/ lies in"),
        ({"vllm/plugins/__init__.py": "def load():\n    pass\n"}, "has no load_general_plugins()"),
        (
            {
                "vllm/plugins/__init__.py": "def load_general_plugins():\n    found = load_plugins_by_group(1)\n"
            },
            "with `plugins = load_plugins_by_group(...)` in it",
        ),
    ],
)
def test_patch_refuses_unknown_source_trees(
    files: dict[str, str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(text)
    assert vllm_fork_patch.main([str(tmp_path)]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
