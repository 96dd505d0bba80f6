"""Imports point one way, and the modules that must work without torch do."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CORE = ROOT / "slidesparse"
PLUGIN = ROOT / "vllm_patch"

# A module may import modules of lower layers, and of its own where several share one (never in a circle).
LAYERS = [
    {"__init__"},
    {"pattern"},
    {"slide", "prune", "quantize", "metadata", "flags", "theory", "backends", "toolchain", "nvcc"},
    {"reference", "kernels", "profiling", "checkpoint", "architectures"},
    {"gemm", "w8a8", "stored", "publish", "decoder", "token_files"},
    {"ops", "fused_ops"},
    {
        "plan",
        "calibrate",
        "evaluate",
        "convert",
        "synth",
        "inspection",
        "bench",
        "report",
        "tune",
        "doctor",
        "doctor_words",
        "demo",
    },
    {"cli_bench", "cli_convert", "cli_e2e", "cli_eval", "cli_synth"},
    {"cli", "__main__"},
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}

STDLIB_ONLY = ["slidesparse", *(f"slidesparse.{name}" for name in ("pattern", "metadata", "flags"))]
STDLIB_ONLY += [
    f"slidesparse.{name}" for name in ("doctor", "doctor_words", "backends", "theory", "toolchain", "nvcc")
]


def module_name(path: Path) -> str:
    """``slidesparse/gemm/reference.py`` -> ``gemm``; ``slidesparse/__init__.py`` -> ``__init__``."""
    return path.relative_to(CORE).parts[0].removesuffix(".py")


def imported(path: Path) -> set[str]:
    """Absolute names of all that ``path`` imports, inside functions too; ``from a import b`` gives a.b."""
    names: set[str] = set()
    package = ["slidesparse", *path.relative_to(CORE).parts[:-1]] if path.is_relative_to(CORE) else []
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            names |= {f"{base}.{alias.name}" for alias in node.names}
    return names


def own(names: set[str]) -> set[str]:
    """The core's modules among ``names``, as LAYERS calls them; ``slidesparse.__version__`` -> __init__."""
    found = set()
    for name in names:
        top, _, rest = name.partition(".")
        if top == "slidesparse":
            first = rest.partition(".")[0]
            module = first and ((CORE / first).is_dir() or (CORE / f"{first}.py").is_file())
            found.add(first if module else "__init__")
    return found


CORE_FILES = sorted(CORE.rglob("*.py"))


def identify(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", CORE_FILES, ids=identify)
def test_imports_point_down(path: Path) -> None:
    module = module_name(path)
    assert module in LEVEL, f"{identify(path)} is in no layer: put {module} into LAYERS"
    upward = sorted(name for name in own(imported(path)) - {module} if LEVEL.get(name, 99) > LEVEL[module])
    assert upward == [], f"{identify(path)} imports {upward}, which are above it"


def test_the_core_has_no_circles() -> None:
    depends: dict[str, set[str]] = {}
    for path in CORE_FILES:
        depends.setdefault(module_name(path), set()).update(own(imported(path)) - {module_name(path)})
    done: set[str] = set()
    while remaining := set(depends) - done:
        ready = {name for name in remaining if depends[name] & set(depends) <= done}
        assert ready, f"these modules import each other in a circle: {sorted(remaining)}"
        done |= ready


# Programs that are run inside vLLM, and that nothing else of the core imports but for their path.
INSIDE_VLLM = {CORE / "bench" / "e2e_worker.py", CORE / "evaluate" / "worker.py"}


@pytest.mark.parametrize("path", sorted(set(CORE_FILES) - INSIDE_VLLM), ids=identify)
def test_the_core_knows_neither_vllm_nor_the_plugin(path: Path) -> None:
    wrong = [n for n in imported(path) if n.split(".")[0] == "vllm" or n.startswith("slidesparse.vllm_patch")]
    assert wrong == []


def test_only_the_top_of_the_plugin_is_free_of_torch_and_vllm() -> None:
    """vLLM swallows an ImportError of the entry-point module, so its top level needs nothing installed."""
    tree = ast.parse((PLUGIN / "__init__.py").read_text())
    for node in tree.body:
        if isinstance(node, ast.Import):
            assert {alias.name.split(".")[0] for alias in node.names} <= sys.stdlib_module_names
        elif isinstance(node, ast.ImportFrom):
            assert (node.module or "").split(".")[0] in {*sys.stdlib_module_names, "__future__"}


def test_these_checks_see_what_they_look_for(tmp_path: Path) -> None:
    """Every form of import is read, inside functions as well."""
    source = tmp_path / "source.py"
    source.write_text(
        "import vllm.config\ndef f():\n    from slidesparse import ops, __version__\n    import torch as t\n"
    )
    names = imported(source)
    assert names == {"vllm.config", "slidesparse.ops", "slidesparse.__version__", "torch"}
    assert own(names) == {"ops", "__init__"}


@pytest.mark.parametrize("installed", [False, True])
def test_a_clone_has_the_plugin_in_the_package_too(tmp_path: Path, installed: bool) -> None:
    """``python -m`` in a clone imports from there, and without what pip installed for it (-S: no site-packages).

    Where it is in the package already, as in an installation, that one counts.
    """
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
    run = [sys.executable, "-S", "-c", program]
    done = subprocess.run(run, capture_output=True, text=True, cwd=tmp_path, timeout=60, check=False)
    folder = tmp_path / "slidesparse" / "vllm_patch" if installed else tmp_path / "vllm_patch"
    expected = f"{folder / '__init__.py'} None None None\n"  # nothing else of the clone
    assert (done.returncode, done.stdout) == (0, expected), done.stderr


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


def test_import_without_anything_installed() -> None:
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED, *STDLIB_ONLY],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "torch is not in the standard library\n"  # the blocker does block


def test_importing_the_core_initializes_no_gpu_and_needs_no_vllm() -> None:
    modules = sorted(
        f"slidesparse.{m}" for m in {module_name(path) for path in CORE_FILES} - {"__init__", "__main__"}
    )
    program = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]: importlib.import_module(name)\n"
        "import torch\n"
        "print('vllm' in sys.modules, torch.cuda.is_initialized())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *modules],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "False False\n"), done.stderr
