"""Whether an image, built on a machine without a GPU, can run the plugin on one with.  Exit code 1 with the reason.

Asks that vLLM will load the plugin and is not too old for it, that cuSPARSELt and cuBLASLt are there in a version that
is supported, and that the extensions that call them are built or can be.
"""

from __future__ import annotations

import os
import sys
import tempfile

from slidesparse.vllm_patch import compat

from slidesparse import doctor, toolchain


def problems() -> list[str]:
    """What would keep the plugin from running, in words."""
    found = []
    plugin = doctor.collect()["plugin"]
    if not plugin.get("loads"):
        found.append(f"vLLM will not load the plugin: {plugin.get('why') or plugin.get('error')}")
    if compat.installed() is None:
        found.append("vLLM is not installed")
    try:
        compat.check()
    except compat.CompatibilityError as error:
        found.append(str(error))
    for name in toolchain.EXTENSIONS:
        try:
            library = toolchain.find_library(name)
            if library.version:
                toolchain.require_supported(name, toolchain.numbers(library.version))
            _require_buildable(name)
        except toolchain.ToolchainError as error:
            found.append(str(error))
    return found


def _require_buildable(name: str) -> None:
    """Build an extension that was not installed, to see that it can be.  Raises ToolchainError."""
    if toolchain.extension_state(name).state == "installed":
        return
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["SLIDESPARSE_CACHE"] = scratch
        toolchain.build(name)


if __name__ == "__main__":
    lacks = problems()
    for lack in lacks:
        print(lack, file=sys.stderr)
    sys.exit(bool(lacks))
