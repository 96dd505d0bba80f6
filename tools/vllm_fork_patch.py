#!/usr/bin/env python3
"""Write the patch that makes a fork of vLLM load slidesparse by itself, without an entry point.

    python tools/vllm_fork_patch.py VLLM_CHECKOUT > slidesparse.patch
    git -C VLLM_CHECKOUT apply slidesparse.patch          # or patch -p1; with -R it is taken back

It adds one file, which calls `slidesparse.vllm_patch.register`, and two lines to vLLM's function that runs plugins.
The plugin itself stays in the package slidesparse.  Exit code 1 when that function is not as the patch needs it.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import sys
from pathlib import Path

PLUGINS = "vllm/plugins/__init__.py"
ADDED = "vllm/plugins/slidesparse.py"
FUNCTION, CALL = "load_general_plugins", "load_plugins_by_group"

MODULE = '''\
"""Loads SlideSparse, (2N-2):2N structured sparsity, as its entry point in group vllm.general_plugins would."""

import os
from collections.abc import Callable
from typing import Any

import vllm.envs as envs

NAME = "slidesparse"


def add_to(plugins: dict[str, Callable[[], Any]]) -> None:
    """Add the plugin to those that will run, unless its entry point did or VLLM_PLUGINS leaves it out."""
    if envs.VLLM_PLUGINS is None or NAME in envs.VLLM_PLUGINS:
        plugins.setdefault(NAME, register)


def register() -> None:
    """Register the quantization config, or say what is missing."""
    try:
        from slidesparse.vllm_patch import register as register_config
    except ImportError as error:
        if os.environ.get("DISABLE_SLIDESPARSE", "").strip().lower() not in ("1", "true", "yes"):
            words = "pip install slidesparse, or set DISABLE_SLIDESPARSE=1"
            raise RuntimeError(f"slidesparse cannot be imported: {error}; {words}") from error
        return
    register_config()
'''


class TreeError(ValueError):
    """A source tree that the patch does not fit."""


def edited(source: str) -> str:
    """vllm/plugins/__init__.py with our plugin among those that load_general_plugins() runs.  Raises TreeError."""
    functions = [n for n in ast.parse(source).body if isinstance(n, ast.FunctionDef) and n.name == FUNCTION]
    for node in (node for function in functions for node in function.body):
        if isinstance(node, ast.Assign) and ast.unparse(node).startswith(f"plugins = {CALL}("):
            lines, indent = source.splitlines(keepends=True), " " * node.col_offset
            added = f"{indent}from vllm.plugins.slidesparse import add_to as add_slidesparse_to\n\n"
            added += f"{indent}add_slidesparse_to(plugins)\n"
            return "".join([*lines[: node.end_lineno], added, *lines[node.end_lineno :]])
    raise TreeError(f"{PLUGINS} has no {FUNCTION}() with `plugins = {CALL}(...)` in it")


def patch(tree: Path) -> str:
    """The unified diff for the vLLM source in ``tree``.  Raises TreeError."""
    path = tree / PLUGINS
    if not path.is_file():
        raise TreeError(f"{tree} has no {PLUGINS}: give the folder that vllm/ lies in")
    if (tree / ADDED).exists():
        raise TreeError(f"{tree} has {ADDED}: it is patched already; take that back first, with git apply -R")
    before = path.read_text(encoding="utf-8")
    changes = ((f"a/{PLUGINS}", PLUGINS, before, edited(before)), ("/dev/null", ADDED, "", MODULE))
    return "".join(
        line
        for old, new, *texts in changes
        for line in difflib.unified_diff(*(text.splitlines(keepends=True) for text in texts), old, f"b/{new}")
    )


def main(argv: list[str] | None = None) -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description="the patch that makes a fork of vLLM load slidesparse")
    parser.add_argument("tree", type=Path, help="the folder that vllm/ lies in")
    try:
        sys.stdout.write(patch(parser.parse_args(argv).tree))
    except TreeError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
