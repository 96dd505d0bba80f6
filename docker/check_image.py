"""Check that an image, built on a machine without a GPU, can run the plugin on one with.  Exit code 1 with the reason.

vLLM must load the plugin and be new enough for it; cuSPARSELt and cuBLASLt must be there in a supported version, and
the compiled kernels in files that SlideSparse agrees to load.
"""

from __future__ import annotations

import sys

from slidesparse import doctor, versions
from slidesparse.build import compile, find
from slidesparse.errors import SlideSparseError


def problems() -> list[str]:
    """Name everything that would keep the plugin from running, an empty list where nothing would."""
    found = []
    plugin = doctor.plugin()
    if not plugin["loads"]:
        found.append(f"vLLM will not load the plugin: {plugin['words']}")
    section, supported = doctor.vllm()
    if not supported:
        found.append(section["words"])
    for name in find.LIBRARIES:
        try:
            library = find.find_library(name)
            if library.version:
                find.require_supported(name, versions.numbers(library.version))
        except SlideSparseError as error:
            found.append(str(error))
    for target in compile.TARGETS:
        try:
            compile.build(target)
        except SlideSparseError as error:
            found.append(str(error))
    return found


if __name__ == "__main__":
    lacks = problems()
    for lack in lacks:
        print(lack, file=sys.stderr)
    sys.exit(bool(lacks))
