"""Imports have no cycles, and some modules can be imported without torch."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from commands import ROOT, run

CORE = ROOT / "slidesparse"
PLUGIN = ROOT / "vllm_patch"

# What runs before models are served; the modules that serve them, and the plugin, import none of it.
OFFLINE = {"calibrate", "convert", "evaluate", "synth", "tune", "doctor", "cli", "demo", "packaged"}
OFFLINE |= {"__main__"}
# vLLM swallows an ImportError of the plugin's entry-point module, so that needs nothing installed.
STDLIB_ONLY = "vllm_patch errors versions pattern theory build.find build.compile gemm flags doctor kernels"
INSIDE_VLLM = CORE / "evaluate" / "worker.py"  # a program that runs inside vLLM; no module imports it


def imported(path: Path) -> set[str]:
    """Absolute names of all imports of ``path``, also inside functions; ``from a import b`` gives a.b."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path} has a relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def units_of(names: set[str]) -> set[str]:
    """Return the modules and packages of slidesparse that hold these names: slidesparse.gemm.cuda -> gemm."""
    firsts = {name.split(".")[1] for name in names if name.startswith("slidesparse.")}
    return {first for first in firsts if (CORE / first).is_dir() or (CORE / f"{first}.py").is_file()}


FILES = {path: path.relative_to(CORE).parts[0].removesuffix(".py") for path in sorted(CORE.rglob("*.py"))}
IMPORTS = {path: imported(path) for path in FILES}


def test_imports_have_no_cycles_and_serving_needs_nothing_of_conversion() -> None:
    depends: dict[str, set[str]] = {unit: set() for unit in FILES.values()}
    for path, unit in FILES.items():
        depends[unit] |= units_of(IMPORTS[path]) - {unit}
    TopologicalSorter(depends).prepare()  # raises CycleError, which names the modules
    wrong = {unit: depends[unit] & OFFLINE for unit in depends.keys() - OFFLINE}
    assert not any(wrong.values()), wrong


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_package_imports_neither_vllm_nor_the_plugin(path: Path) -> None:
    forbidden = [name for name in IMPORTS[path] if name.split(".")[0] in ("vllm", "benchmarks", "tests")]
    forbidden += [name for name in IMPORTS[path] if name.startswith("slidesparse.vllm_patch")]
    assert forbidden == [] or path == INSIDE_VLLM


@pytest.mark.parametrize("path", sorted(PLUGIN.glob("*.py")), ids=lambda path: path.name)
def test_plugin_imports_only_serving_modules(path: Path) -> None:
    assert units_of(imported(path)) & OFFLINE == set()


@pytest.mark.parametrize("installed", [False, True])
def test_plugin_is_importable_from_a_clone(tmp_path: Path, installed: bool) -> None:
    """Even without site-packages (-S); a plugin inside the package, as in an installation, takes precedence."""
    for name in ("slidesparse/__init__.py", "vllm_patch/__init__.py"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    if installed:
        (tmp_path / "slidesparse" / "vllm_patch").mkdir()
        (tmp_path / "slidesparse" / "vllm_patch" / "__init__.py").touch()
    (tmp_path / "setup.py").touch()
    program = """
from importlib.util import find_spec
from slidesparse import vllm_patch
print(vllm_patch.__file__, *(find_spec(f"slidesparse.{name}") for name in ("setup", "slidesparse", "vllm")))
"""
    command = [sys.executable, "-S", "-c", program]
    process = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=60, check=False)
    folder = tmp_path / "slidesparse" / "vllm_patch" if installed else tmp_path / "vllm_patch"
    expected = f"{folder / '__init__.py'} None None None\n"  # nothing else of the clone
    assert (process.returncode, process.stdout) == (0, expected), process.stderr


BLOCKED = """
import importlib, sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] not in {*sys.stdlib_module_names, "slidesparse"}:
            raise ImportError(f"{name} is not in the standard library")
sys.meta_path.insert(0, Blocker())
for name in sys.argv[1:]:
    importlib.import_module(name)
try:
    importlib.import_module("slidesparse.slide")
except ImportError as error:
    print(error)
"""


def output(program: str, *arguments: str) -> str:
    process = run(program, *arguments)
    assert (process.returncode, process.stderr) == (0, "")
    return process.stdout


def test_imported_packages_are_declared() -> None:
    """Or come with torch, vLLM or transformers, or with an extra; errors name these where they are missing."""
    text = re.search(r"^dependencies = \[(.*)\]", (ROOT / "pyproject.toml").read_text(), re.M)
    declared = set(re.findall(r'"([a-z]+)', text[1]))
    brought = {"torch", "triton", "vllm", "transformers", "tokenizers", "huggingface_hub", "pydantic"}
    names = {name.split(".")[0] for f in (CORE, PLUGIN) for p in f.rglob("*.py") for name in imported(p)}
    names -= {*sys.stdlib_module_names, "slidesparse", "datasets", "pyarrow", "accelerate", "gguf"}
    assert names - brought == declared


def test_core_modules_import_without_dependencies() -> None:
    modules = ["slidesparse", *(f"slidesparse.{name}" for name in STDLIB_ONLY.split())]
    assert output(BLOCKED, *modules) == "torch is not in the standard library\n"  # the blocker works


def test_importing_the_core_needs_neither_gpu_nor_vllm() -> None:
    modules = sorted(f"slidesparse.{name}" for name in set(FILES.values()) - {"__init__"})
    program = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]: importlib.import_module(name)\n"
        "import torch\n"
        "print('vllm' in sys.modules, torch.cuda.is_initialized())"
    )
    assert output(program, *modules) == "False False\n"
