#!/usr/bin/env python3
"""Write the patch that makes a fork of vLLM load slidesparse by itself, without an entry point.

    python tools/vllm_fork_patch.py VLLM_CHECKOUT > slidesparse.patch
    git -C VLLM_CHECKOUT apply slidesparse.patch          # or patch -p1; with -R it is taken back

It adds a few lines to the function of vLLM that runs plugins; the plugin itself stays in the package slidesparse.  Exit
code 1 when that function is not as the patch needs it.
"""

from __future__ import annotations

import difflib
import re
import sys
from pathlib import Path

PLUGINS = "vllm/plugins/__init__.py"
CALL = re.compile(r"^def load_general_plugins\(.*?^    plugins = load_plugins_by_group\(.*?\)\n", re.M | re.S)
LINES = """\
    # SlideSparse, as its entry point in the group vllm.general_plugins would be loaded
    if envs.VLLM_PLUGINS is None or "slidesparse" in envs.VLLM_PLUGINS:
        from slidesparse.vllm_patch import register as register_slidesparse

        plugins.setdefault("slidesparse", register_slidesparse)
"""


def patch(tree: Path) -> str:
    """Return the unified diff for the vLLM source in ``tree``.  Raises ValueError for one that it does not fit."""
    path = tree / PLUGINS
    if not path.is_file():
        raise ValueError(f"{tree} has no {PLUGINS}: give the folder that vllm/ lies in")
    before = path.read_text(encoding="utf-8")
    if LINES in before:
        raise ValueError(f"{path} is patched already; take that back first, with git apply -R")
    after, count = CALL.subn(lambda match: match[0] + LINES, before)
    if count != 1:
        raise ValueError(f"{path} has no load_general_plugins() with `plugins = load_plugins_by_group(...)`")
    texts = (text.splitlines(keepends=True) for text in (before, after))
    return "".join(difflib.unified_diff(*texts, f"a/{PLUGINS}", f"b/{PLUGINS}"))


def main(words: list[str]) -> int:
    """See the module."""
    if len(words) != 1:
        print(__doc__, file=sys.stderr)
        return 2
    try:
        sys.stdout.write(patch(Path(words[0])))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
